"""`unisono certify` on two devices: a plain LightningModule, and what its run loses there."""

import json
from pathlib import Path

import pytest

from lit_models.certify.command import certify
from lit_models.errors import UsageError
from tests.distributed.launch import ROOT, finished, started

CONFIG = """
seed_everything: 1
model: {class_path: tests.certify.plain.Plain}
data: {class_path: tests.certify.plain.PlainData}
"""


@pytest.mark.slow
def test_it_is_said_what_a_plain_module_loses_on_two_devices(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(CONFIG)
    options = ("--strategies=ddp", "--levels=A", f"--to={tmp_path / 'page'}")
    command = ("-m", "lit_models", "certify", f"--config={tmp_path / 'mine.yaml'}", *options)
    statuses, [printed] = finished(started(*command))
    assert statuses == [1], printed
    facts = json.loads((tmp_path / "page" / "certificate.json").read_text())
    [way] = facts["ways"]
    sentences = "\n".join(way["sentences"])
    assert "samples: validation: 22 samples of 21, 1 twice (" in sentences
    assert "samples: epoch 0: 22 samples of 21, 1 twice (" in sentences
    assert "samples: step 1: 8 samples of 4, " in sentences
    assert "files: predictions: 21 lines of 21, 0 of them the same" in sentences
    assert way["metrics"].startswith("NOT ")
    assert way["sentences"][-1] == "parted first in step 1, by its samples"
    assert list(facts["left out"]) == ["test"]
    page = (tmp_path / "page" / "certificate.md").read_text()
    assert page.startswith("# mine: NOT the same run\n")
    assert max(map(len, printed.splitlines())) <= 80 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": "two"}, "numbers such as 1,2,4,8, got two"),
        ({"levels": "A,D"}, "some of A,B,C, got A,D"),
        ({"steps": 5}, "6 or more, got 5"),
        ({"devices": "1", "levels": "A"}, "--devices=1 .* leave --levels=A nothing to compare"),
        ({"strategies": "fsdp", "levels": "A,B"}, "=fsdp leave .*B takes 2, .* and ddp or ddp_sp"),
        ({"to": ROOT}, "is not empty; name a new folder"),
    ],
)
def test_what_cannot_be_meant_is_said(options: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        certify(["--config=occupation_coder/debug.yaml"], **options)

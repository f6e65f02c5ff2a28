"""Checkpoints as folders of shards, across strategies."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_models.commands.export import export_checkpoint
from lit_models.training.checkpoints import AVERAGED, damage, newest_checkpoint, read_checkpoint
from lit_models.training.export import read_exported
from tests.distributed.test_matrix import run_jobs, weights
from tests.toy import ledger_lines

pytestmark = [pytest.mark.slow, pytest.mark.soak]
HALF = {"max_steps": 5}
LIT_TIED = "tests.distributed.families.LitTied"
SHARD = [f"shard-0000{number}-model-00001-of-00001.safetensors" for number in (1, 2)]
SHARDS = {"sharded_checkpoint": True}


def job(name: str, strategy: str = "fsdp", **more: Any) -> dict[str, Any]:
    data = {"global_batch_size": 16}
    return {
        "name": name,
        "family": "tied",
        "strategy": strategy,
        "data": data,
        "decay": 0.9,
        **more,
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Undisturbed runs, and one that two devices begin and others finish."""
    folder = tmp_path_factory.mktemp("shards")
    half = str(folder / "half" / "checkpoints" / "last.ckpt")
    two = [
        job("file"),
        job("shards", sharding=SHARDS),
        job("half", sharding=SHARDS, trainer=HALF),
        job("to two, files", resume=half),
    ]
    run_jobs(folder, 2, two)
    run_jobs(folder, 1, [job("to one", "ddp", resume=half)])
    run_jobs(folder, 3, [job("to three", sharding=SHARDS, resume=half)])
    four = [job("to four, hybrid", sharding={**SHARDS, "replicate_size": 2}, resume=half)]
    run_jobs(folder, 4, four)
    return folder


@pytest.fixture
def copy(runs: Path, tmp_path: Path) -> Path:
    shutil.copytree(runs / "shards" / "checkpoints", tmp_path / "checkpoints")
    return tmp_path


def last(run: Path) -> Path:
    return run / "checkpoints" / "last.ckpt"


def test_every_rank_writes_its_half(runs):
    for name in ("last", "previous", "best"):
        folder = runs / "shards" / "checkpoints" / f"{name}.ckpt"
        assert sorted(p.name for p in folder.iterdir()) == ["meta.pt", *SHARD]
        assert damage(folder) is None
    sizes = [(last(runs / "shards") / name).stat().st_size for name in SHARD]
    assert 0.8 < sizes[0] / sizes[1] < 1.25
    names = sorted(p.name for p in (runs / "shards" / "checkpoints").iterdir())
    assert names == ["best.ckpt", "last.ckpt", "previous.ckpt"]  # nothing unfinished is left


def test_a_folder_reads_as_the_file_of_the_same_run(runs):
    for name in ("last", "previous", "best"):
        file = read_checkpoint(runs / "file" / "checkpoints" / f"{name}.ckpt")
        folder = read_checkpoint(runs / "shards" / "checkpoints" / f"{name}.ckpt")
        assert folder.keys() == file.keys()
        assert folder["global_step"] == file["global_step"]
        torch.testing.assert_close(folder["state_dict"], file["state_dict"], rtol=0, atol=0)
        torch.testing.assert_close(folder[AVERAGED], file[AVERAGED], rtol=0, atol=0)
        (ours,), (theirs,) = folder["optimizer_states"], file["optimizer_states"]
        torch.testing.assert_close(ours["state"], theirs["state"], rtol=0, atol=0)
        assert ours["param_groups"] == theirs["param_groups"]
        assert all("param_names" in group for group in ours["param_groups"])


def test_the_small_parts_of_a_folder_are_read_alone(runs):
    content = read_checkpoint(last(runs / "shards"), mmap=True)
    assert content["global_step"] == 10
    whole = weights(runs / "shards")
    assert {n: v.shape for n, v in content["state_dict"].items()} == {
        n: v.shape for n, v in whole.items()
    }


@pytest.mark.parametrize("name", ["to one", "to two, files", "to three", "to four, hybrid"])
def test_a_run_goes_on_from_shards_under_any_strategy_and_number_of_devices(runs, name):
    expected, found = read_checkpoint(last(runs / "file")), read_checkpoint(last(runs / name))
    for line, other in zip(ledger_lines(runs / "file")[5:], ledger_lines(runs / name), strict=True):
        assert line["digest"] == other["digest"]
    for key in ("state_dict", AVERAGED):
        torch.testing.assert_close(found[key], expected[key], rtol=1e-8, atol=1e-10)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "file", "message"),
    [
        (cut_short, SHARD[1], f"{SHARD[1]} is cut short"),
        (alter, SHARD[0], f"checksum of its shard {SHARD[0]} is wrong"),
        (Path.unlink, SHARD[1], f"{SHARD[1]} is missing"),
        (cut_short, "meta.pt", "of its meta.pt: it is cut short"),
        (Path.unlink, "meta.pt", "a folder without meta.pt"),
    ],
)
def test_a_damaged_shard_is_named_and_the_checkpoint_before_it_used(copy, harm, file, message):
    (copy / "checkpoints" / "best.ckpt").rename(copy / "best.ckpt")
    harm(last(copy) / file)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(last(copy))
    with pytest.warns(UserWarning, match=message):
        assert newest_checkpoint(copy) == copy / "checkpoints" / "previous.ckpt"


def test_shards_of_two_steps_are_never_mixed(copy):
    older = copy / "checkpoints" / "previous.ckpt" / SHARD[1]
    shutil.copy(older, last(copy) / SHARD[1])
    assert SHARD[1] in (damage(last(copy)) or "")


def test_an_export_of_shards_is_that_of_the_file(runs, tmp_path):
    content = {}
    for name in ("file", "shards"):
        export_checkpoint(last(runs / name), tmp_path / name, class_path=LIT_TIED)
        content[name] = read_exported(tmp_path / name)["state_dict"]
    torch.testing.assert_close(content["shards"], content["file"], rtol=0, atol=0)

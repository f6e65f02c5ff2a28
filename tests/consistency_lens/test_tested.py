"""What a test says of the data it was run on, of its files, and of a reference never kept."""

import json
from types import SimpleNamespace

import pytest
from lightning.pytorch import seed_everything

from datamodules.files.splitting import TextSplit
from datamodules.tokenizers.text import TokenizerOptions
from lit_models.causal_lm.pretrained import network_from_config as drawn
from lit_models.consistency_lens import subject
from lit_models.consistency_lens.controls import EvaluationOptions
from lit_models.consistency_lens.lens import NEVER
from lit_models.consistency_lens.module import continued
from lit_models.consistency_lens.subject import TRAINED_ON
from lit_models.consistency_lens.tables import NO_REFERENCE, OTHER_DATA
from lit_models.training.checkpoints import read_checkpoint
from tests.consistency_lens.small_lens import data_of, module_of, stories, trainer_of
from tests.consistency_lens.tiny import case_of

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")
BYTES = TokenizerOptions("bytes")  # the same of any texts
OPTIONS = EvaluationOptions(num_draws=1, num_examples=0)
OLDER = {"subject": 1, TRAINED_ON: ["old"]}
NEW = {"subject": 1, TRAINED_ON: ["new"]}


def split(seed):
    return TextSplit(test_share=0.2, seed=seed)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a folder of stories and a lens that has learnt two steps from a part of them."""
    folder = tmp_path_factory.mktemp("trained")
    seed_everything(1)
    trainer = trainer_of(folder / "fit", max_steps=2, limit_val_batches=0)
    trainer.fit(module_of(evaluation=OPTIONS), data_of(folder, tokenizer=BYTES, split=split(0)))
    trainer.save_checkpoint(folder / "lens.ckpt")
    return folder


def evaluated(folder, name, precision=64, **options):
    """Return the logged values and controls.json."""
    trainer = trainer_of(folder / name, precision=precision)
    module, path = module_of(evaluation=OPTIONS), folder / "lens.ckpt"
    data = data_of(folder, tokenizer=BYTES, **options)
    [values] = trainer.test(module, data, ckpt_path=path, weights_only=True, verbose=False)
    return values, json.loads((folder / name / "controls.json").read_text())


def test_a_test_on_another_split_of_the_same_texts_says_so(trained):
    _, own = evaluated(trained, "own", split=split(0))
    assert own["notes"][0] == NO_REFERENCE  # kept at the first step, without a warm start
    assert "teacher_text" in own["rows"]["all"]
    assert not {"separate_reader", "teacher_text_separate"} & own["rows"]["all"].keys()
    _, other = evaluated(trained, "other", split=split(1))
    assert other["notes"][0] == OTHER_DATA
    assert other["rows"]["all"]["mean"]["fve"] == pytest.approx(0, abs=1e-9)


def test_a_random_subject_is_the_same_in_every_precision_and_known_by_its_weights(
    trained, monkeypatch
):
    wide, _ = evaluated(trained, "wide", split=split(0))
    narrow, _ = evaluated(trained, "narrow", precision="32-true", split=split(0))
    assert narrow["test/fve"] == pytest.approx(wide["test/fve"], abs=1e-4)
    monkeypatch.setattr(subject, "network_from_config", lambda recipe: drawn(recipe).half().float())
    with pytest.raises(ValueError, match="trained with another subject than this run has"):
        evaluated(trained, "moved", split=split(0))


def test_the_headline_is_of_the_first_file_however_files_are_called(trained):
    for name in ("all", "b.c"):
        stories(trained, 16, name)
    with open(trained / "b.c.jsonl", "w") as file:  # other documents than those of all.jsonl
        for i in range(6):
            row = {"text": f"it saw one fox & left the hut at once {i} .", "attributes": {}}
            file.write(json.dumps(row) + "\n")
    train = trained / "train.jsonl"
    train.write_text(stories(trained).read_text().split("\n", 16)[-1])
    files = [str(trained / f"{name}.jsonl") for name in ("all", "b.c")]
    values, content = evaluated(trained, "files", test_files=files, train=str(train))
    first, second = (f"{trained.name}/{name}" for name in ("all", "b.c"))
    rows = content["rows"]
    assert list(rows) == ["all", first, second]
    assert values["test/fve"] == pytest.approx(rows[first]["greedy"]["fve"])
    assert values[f"test/{second}/fve"] == pytest.approx(rows[second]["greedy"]["fve"])
    assert rows["all"]["greedy"]["fve"] != pytest.approx(rows[first]["greedy"]["fve"], abs=1e-6)
    counts = [rows[group]["greedy"]["count"] for group in rows]
    assert counts[0] == counts[1] + counts[2]
    assert min(counts) > 0
    known = [content["attributes"][group]["pet"]["known"] for group in rows]
    assert known[0] == known[1] > known[2] == 0
    legible, shares = content["legibility"], [count / counts[0] for count in counts]
    nats = [legible[group]["text_nats"] for group in rows]
    assert nats[0] == pytest.approx(nats[1] * shares[1] + nats[2] * shares[2])
    assert values["test/text_nats"] == pytest.approx(nats[1])


def test_a_recipe_knows_all_that_its_weights_went_through():
    fits, tests = (SimpleNamespace(state=SimpleNamespace(fn=fn)) for fn in ("fit", "test"))
    assert continued(None, NEW, fits) is NEW
    assert continued(OLDER, NEW, tests)[TRAINED_ON] == ["old"]
    assert continued(OLDER, NEW, None)[TRAINED_ON] == ["old"]
    assert continued(OLDER, NEW, fits)[TRAINED_ON] == ["old", "new"]
    assert continued(NEW, NEW, fits)[TRAINED_ON] == ["new"]
    with pytest.raises(ValueError, match="another subject than this run has"):
        continued({"subject": 2, TRAINED_ON: ["new"]}, NEW, fits)


def test_a_lens_knows_when_its_reference_was_kept(trained):
    content = read_checkpoint(trained / "lens.ckpt")["state_dict"]
    assert content["lens.reference_step"] == NEVER
    lens = case_of().lens
    assert not lens.has_reference
    lens.keep_reference(7)
    assert lens.has_reference
    assert lens.state_dict()["reference_step"] == 7

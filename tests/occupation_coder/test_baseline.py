from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from datamodules.occupations.rows import Columns
from datamodules.occupations.store import CodeBookOptions, OccupationStore, StoreRequest, open_store
from datamodules.tokenizers.codes import CodeSystem
from lit_models.occupation_coder.baseline import LinearBaseline
from lit_models.occupation_coder.linear import LinearOptions
from lit_models.occupation_coder.module import LitOccupationCoder

TABLE = """text,code_1,code_2,split
baker,1,,train
old baker,1,,train
master baker,1,,train
smith,2,,train
smith,3,,train
smith,2,,train
old smith,2,,train
master smith,2,,train
young baker,1,,test
young smith,2,,test
baker and smith,1,2,test
miller,3,,test
"""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OccupationStore:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "jobs.csv"
    path.write_text(TABLE, encoding="utf-8")
    columns = Columns(split="split")
    system = CodeSystem(max_codes=2)
    return open_store(StoreRequest({0: [path], 1: [], 2: []}, columns, system, CodeBookOptions()))


def trainer_on(store: object, **changes: object) -> SimpleNamespace:
    settings = {
        "is_global_zero": True,
        "sanity_checking": False,
        "datamodule": SimpleNamespace(store=store),
        "loggers": [],
        "callback_metrics": {"test/f1": np.float32(0.9), "test/accuracy": np.float32(0.8)},
        "global_step": 7,
    }
    return SimpleNamespace(**(settings | changes))


def test_the_scores_are_those_worked_out_by_hand(store: OccupationStore) -> None:
    # right, right, one of two codes (F1 2/3, accuracy 1/2), and a trade never seen
    baseline = LinearBaseline()
    baseline.on_test_end(trainer_on(store), None)
    assert baseline.scores["f1"] == pytest.approx((1 + 1 + 2 / 3 + 0) / 4)
    assert baseline.scores["accuracy"] == pytest.approx((1 + 1 + 1 / 2 + 0) / 4)


def test_the_table_shows_the_model_beside_the_baseline(
    store: OccupationStore, capsys: pytest.CaptureFixture[str]
) -> None:
    logged = []
    logger = SimpleNamespace(log_metrics=lambda values, step: logged.append((values, step)))
    LinearBaseline().on_test_end(trainer_on(store, loggers=[logger]), None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("test, 4 records")
    assert lines[1].split()[-2:] == ["0.9000", "0.8000"]
    assert "linear SVM" in lines[2]
    assert "0.6667" in lines[2]
    assert logged == [({"test/baseline_f1": pytest.approx(2 / 3)}, 7)]


@pytest.mark.parametrize(
    ("f1", "linear", "words"),
    [
        (0.6, None, "the baseline is ahead by 0.0667; train with --config occupation_coder/table"),
        (0.6, LinearOptions(), "the whole vote,\n--model.decoding.flat_share=1 with test"),
        (0.7, None, ""),
    ],
)
def test_a_baseline_that_wins_is_told_with_its_remedy(
    store: OccupationStore,
    capsys: pytest.CaptureFixture[str],
    f1: float,
    linear: object,
    words: str,
) -> None:
    figures = {"test/f1": np.float32(f1), "test/accuracy": np.float32(f1)}
    coder = SimpleNamespace(loss=SimpleNamespace(linear=linear))
    LinearBaseline().on_test_end(trainer_on(store, callback_metrics=figures), coder)
    said = capsys.readouterr().out
    assert words in said
    assert ("ahead" in said) == bool(words)


def test_only_rank_zero_trains(store: OccupationStore, capsys: pytest.CaptureFixture[str]) -> None:
    baseline = LinearBaseline()
    baseline.on_test_end(trainer_on(store, is_global_zero=False), None)
    assert not baseline.scores
    assert not capsys.readouterr().out


def test_more_strings_than_allowed_are_thinned_out_evenly(
    store: OccupationStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for most, said in ((20, "6 training strings"), (3, "3 training strings"), (1, "1 training s")):
        LinearBaseline(max_texts=most).on_test_end(trainer_on(store), None)
        assert said in capsys.readouterr().out


def test_other_data_are_refused() -> None:
    with pytest.raises(ValueError, match="through an OccupationDataModule"):
        LinearBaseline().on_test_end(trainer_on(None), None)


def test_the_recipe_for_a_table_of_ones_own_needs_no_code_book_and_no_language(
    unisono: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    codes = {"baker": 1, "smith": 2, "weaver": 3, "miller": 4}
    places = ("", "old", "master", "young", "the king's")
    rows = [f"{place} {trade},{codes[trade]}" for place in places for trade in codes]
    Path("mine.csv").write_text("\n".join(["text,code_1", *rows]) + "\n", encoding="utf-8")
    small = ["--model.encoder.num_buckets=512", "--model.loss.linear.num_features=512"]
    files = ["--data.train_files=mine.csv", "--data.code_book=null", "--data.split.test_share=0.3"]
    status, output = unisono(
        "fit", "--config", "occupation_coder/table.yaml", *files, *small, "--trainer.max_steps=2"
    )
    assert status == 0, output
    assert "linear SVM" in output
    checkpoint = next(Path("runs").glob("*/checkpoints/last.ckpt"))
    coder = LitOccupationCoder.load_from_checkpoint(checkpoint)
    # two steps teach the decoder nothing: it is the linear head, solved before them, that knows
    options = {"method": "mixed", "flat_share": 1.0}
    assert [one.codes for one in coder.code(["a weaver", "a miller"], **options)] == [["3"], ["4"]]

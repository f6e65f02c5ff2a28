from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from datamodules.occupations.rows import Columns
from datamodules.occupations.store import CodeBookOptions, OccupationStore, StoreRequest, open_store
from datamodules.tokenizers.codes import CodeSystem
from lit_models.occupation_coder.baseline import LinearBaseline, fit_and_predict

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
    scores = LinearBaseline().judge(store, store.rows(0), store.rows(2))
    assert scores.f1 == pytest.approx((1 + 1 + 2 / 3 + 0) / 4)
    assert scores.accuracy == pytest.approx((1 + 1 + 1 / 2 + 0) / 4)
    assert (scores.num_records, scores.num_texts) == (4, 6)


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


def test_only_rank_zero_trains(store: OccupationStore, capsys: pytest.CaptureFixture[str]) -> None:
    baseline = LinearBaseline()
    baseline.on_test_end(trainer_on(store, is_global_zero=False), None)
    assert baseline.scores is None
    assert not capsys.readouterr().out


def test_more_strings_than_allowed_are_thinned_out_evenly(store: OccupationStore) -> None:
    assert LinearBaseline(max_texts=3).judge(store, store.rows(0), store.rows(2)).num_texts == 3


def test_one_code_in_training_is_named_everywhere() -> None:
    assert fit_and_predict(["a", "b"], [5, 5], ["c", "d", "e"], max_features=10) == [5, 5, 5]


def test_other_data_and_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="through an OccupationDataModule"):
        LinearBaseline().on_test_end(trainer_on(None), None)
    with pytest.raises(ValueError, match="max_texts must be at least 2"):
        LinearBaseline(max_texts=1)

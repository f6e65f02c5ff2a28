"""metrics.csv and TensorBoard hold every step once, whatever was resumed."""

import csv
from pathlib import Path

import pytest

from lit_models.training.run import AppendingCSVLogger, default_loggers


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_reopened_file_is_appended_to(tmp_path: Path) -> None:
    AppendingCSVLogger(str(tmp_path)).log_metrics({"train/loss": 1.5}, 1)
    AppendingCSVLogger(str(tmp_path)).log_metrics({"train/loss": 1.25}, 2)
    got = rows(tmp_path / "metrics.csv")
    assert [(r["step"], r["train/loss"]) for r in got] == [("1", "1.5"), ("2", "1.25")]


def test_a_new_metric_becomes_a_column_and_old_rows_stay(tmp_path: Path) -> None:
    logger = AppendingCSVLogger(str(tmp_path))
    logger.log_metrics({"train/loss": 1.5}, 1)
    logger.log_metrics({"val/f1": 0.5, "epoch": 0}, 1)
    got = rows(tmp_path / "metrics.csv")
    assert [r["train/loss"] for r in got] == ["1.5", ""]
    assert [r["val/f1"] for r in got] == ["", "0.5"]


def test_a_resume_replaces_the_rows_that_run_again(tmp_path: Path) -> None:
    logger = AppendingCSVLogger(str(tmp_path))
    for step in (1, 2, 3):
        logger.log_metrics({"train/loss": float(step)}, step)
    logger.log_metrics({"val/loss": 9.0}, 1)  # after two steps: Lightning counts from 0
    logger.log_metrics({"val/loss": 8.0}, 2)  # after three steps
    AppendingCSVLogger(str(tmp_path), resumed_step=2).log_metrics({"train/loss": 30.0}, 3)
    got = rows(tmp_path / "metrics.csv")
    assert [r["train/loss"] for r in got] == ["1.0", "2.0", "", "30.0"]
    assert [r["val/loss"] for r in got] == ["", "", "9.0", ""]


def test_a_row_that_a_kill_cut_short_does_not_stop_the_next_run(tmp_path: Path) -> None:
    AppendingCSVLogger(str(tmp_path)).log_metrics({"train/loss": 1, "b": 2}, 1)
    path = tmp_path / "metrics.csv"
    path.write_text(path.read_text() + "2,")
    AppendingCSVLogger(str(tmp_path), resumed_step=1).log_metrics({"train/loss": 3, "b": 4}, 2)
    assert [r["step"] for r in rows(path)] == ["1", "2"]


@pytest.mark.parametrize("content", [b"\x9d\x00\xff", b"mine,yours\n1,2\n"])
def test_a_damaged_file_is_named_and_kept(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metrics.csv").write_bytes(content)
    with pytest.raises(ValueError, match=r"metrics\.csv is damaged .* Move it away"):
        AppendingCSVLogger(str(tmp_path)).log_metrics({"train/loss": 1.0}, 1)
    assert (tmp_path / "metrics.csv").read_bytes() == content


def test_both_loggers_write_into_the_run_folder(tmp_path: Path) -> None:
    for logger in default_loggers(str(tmp_path)):
        logger.log_metrics({"train/loss": 1.0}, 1)
        logger.finalize("success")
    assert (tmp_path / "metrics.csv").exists()
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_tensorboard_forgets_the_steps_that_run_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = default_loggers(str(tmp_path))[1]
    for step in (1, 2, 3):
        first.log_metrics({"train/loss": float(step)}, step)
    first.finalize("success")
    second = default_loggers(str(tmp_path), resumed_step=2)[1]
    second.log_metrics({"train/loss": 30.0}, 3)
    second.finalize("success")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1), (2, 2), (3, 30)]


def test_weights_and_biases_logs_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="extra: wandb")
    from lightning.pytorch.loggers import WandbLogger

    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=str(tmp_path), offline=True, project="unisono")
    logger.log_metrics({"train/loss": 1.0}, 1)
    logger.experiment.finish()
    assert list(tmp_path.rglob("*.wandb"))

"""Proof of a run: findings of `unisono verify` for ledgers that the run did not write."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lit_models.commands import run_command
from lit_models.commands.verify import Status, chained, verify, verify_run
from lit_models.run_files import read_checkpoint
from lit_models.training import Ledger
from lit_models.training.run import Topology
from tests.toy import LitToy, ToyData, fit, json_rows, toy_trainer

STEPS = 14  # 2 epochs of 7


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    fit(folder)
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def lines_of(run: Path) -> list[dict]:
    return json_rows(run / "ledger.jsonl")


def write(run: Path, lines: list[dict], is_chained: bool = False) -> None:
    """Write a ledger, with hashes recomputed as a forger would."""
    before = ""
    for line in lines:
        if is_chained:
            line["hash"] = chained(line, before)
        before = line["hash"]
    (run / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_whole_run_is_proven(whole, capsys):
    assert verify([whole, Path(__file__)]) == Status.PROVEN  # as with error.txt in runs/*
    shown = capsys.readouterr().out
    assert "epochs 0 to 1     50 of 50 samples, each once" in shown
    assert "last.ckpt (step 14), previous.ckpt (step 12): the ledger's" in shown
    content = read_checkpoint(whole / "checkpoints" / "last.ckpt")
    assert content["ledger"]["hash"] == lines_of(whole)[STEPS]["hash"]  # after the first line


def test_a_limited_epoch_is_reported_with_its_counts(whole, tmp_path, capsys):
    fit(tmp_path, limit_train_batches=2)
    assert run_command("verify", [str(tmp_path), str(whole)]) == Status.CUT
    shown = capsys.readouterr().out
    assert f"run               {whole}\nattempts  " in shown
    assert "epochs 0 to 1     2 of 7 steps, 16 of 50 samples, each once" in shown
    assert "not whole" in shown


@pytest.mark.parametrize("limit", [{"limit_train_batches": 2}, {"max_steps": 2}])
def test_the_banner_counts_what_an_epoch_uses(tmp_path, limit, capsys):
    callbacks = [Ledger(), Topology()]
    trainer = toy_trainer(tmp_path, callbacks=callbacks, enable_checkpointing=False, **limit)
    trainer.fit(LitToy(), ToyData())
    assert "2 of 7 steps, 16 of 50 samples" in capsys.readouterr().out


@pytest.mark.parametrize("num_lines", [1, 2, 8, STEPS, STEPS + 1])
def test_a_ledger_shorter_than_its_checkpoints_is_reported(run, num_lines):
    write(run, lines_of(run)[:-num_lines])
    assert verify_run(run).status == (Status.CUT if num_lines == 1 else Status.MISSING)


def test_a_repeated_step_is_reported(run):
    lines = lines_of(run)
    write(run, [*lines[:4], dict(lines[3]), *lines[4:]])
    assert {Status.DOUBLED, Status.EDITED} <= {f.status for f in verify_run(run).findings}
    write(run, [*lines[:4], dict(lines[3]), *lines[4:]], is_chained=True)
    assert {Status.DOUBLED, Status.CHECKPOINT} <= {f.status for f in verify_run(run).findings}


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_an_edit_of_any_field_of_any_line_is_found(run, whole, data):
    lines = lines_of(whole)
    line = data.draw(st.sampled_from(lines))
    field = data.draw(st.sampled_from([*line, "new"]))
    value = line.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        new = data.draw(st.sampled_from([None, "other", not value]))
    else:
        new = data.draw(st.sampled_from([value + 1, -1 - value, str(value)]))
    line[field] = new
    write(run, lines)
    try:
        status = verify_run(run).status
    except ValueError:  # the line is no longer part of a ledger
        return
    assert status >= Status.MISSING


def assert_denied(run, status, words):
    proof = verify_run(run)
    assert proof.status == status
    assert words in proof.faults[0]


def test_a_forged_chain_is_denied_by_the_checkpoints(run):
    lines = lines_of(run)
    lines[2]["loss"] = 0.001
    write(run, lines, is_chained=True)
    assert_denied(run, Status.CHECKPOINT, "the ledger lacks the line it was saved at")


def test_a_checkpoint_of_another_step_or_with_another_byte_is_reported(run):
    path = run / "checkpoints" / "last.ckpt"
    content = bytearray(path.read_bytes())
    torch.save({**read_checkpoint(path), "global_step": 13}, path)
    assert_denied(run, Status.CHECKPOINT, "step 13, not 14")
    value = read_checkpoint(path)["state_dict"]["model.0.weight"].numpy().tobytes()
    content[content.index(value)] ^= 1
    path.write_bytes(content)
    assert_denied(run, Status.CHECKPOINT, "last.ckpt is damaged")


def test_a_step_that_a_scaler_left_out_is_not_in_the_weights(run):
    lines = lines_of(run)
    lines[3]["is_finite"] = False
    write(run, lines, is_chained=True)
    shutil.rmtree(run / "checkpoints")
    proof = verify_run(run)
    assert proof.status == Status.NOT_APPLIED
    assert sum(use.num_steps for use in proof.epochs) == STEPS - 1


def test_a_missing_step_and_another_plan_are_reported(run):
    plan = json.loads((run / "plan.json").read_text())
    other = {**plan, "request": {**plan["request"], "seed": plan["request"]["seed"] + 1}}
    (run / "plan.json").write_text(json.dumps(other))
    assert "attempt 1 followed another plan" in verify_run(run).faults[0]
    (run / "plan.json").write_text(json.dumps(plan))
    lengths = np.load(run / "plan_lengths.npy")
    lengths[0] += 1
    np.save(run / "plan_lengths.npy", lengths)
    assert "attempt 1 followed another plan" in verify_run(run).faults[0]
    lines = lines_of(run)
    write(run, lines[:3] + lines[4:])
    assert "steps are missing" in " ".join(verify_run(run).faults)


def test_a_damaged_line_and_a_folder_without_a_run_are_named(run, tmp_path):
    lines = (run / "ledger.jsonl").read_text().splitlines()
    (run / "ledger.jsonl").write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]) + "\n")
    with pytest.raises(ValueError, match=r"ledger\.jsonl, line 2 is damaged"):
        verify_run(run)
    with pytest.raises(FileNotFoundError, match="name a run folder"):
        verify_run(tmp_path)


def test_a_loss_that_counts_other_targets_than_planned_is_denied(tmp_path):
    class Miscounts(LitToy):
        def training_terms(self, batch):
            terms = self.losses(batch)
            return terms | {"values": terms["values"]._replace(count=terms["values"].count + 1)}

    fit(tmp_path, Miscounts())
    assert_denied(tmp_path, Status.OFF_PLAN, "the loss counted")


def test_a_resumed_run_goes_on_with_the_chain(tmp_path):
    fit(tmp_path, max_epochs=1)
    fit(tmp_path, resume=True)
    lines = lines_of(tmp_path)
    assert [line["attempt"] for line in lines if "resumed_from_step" in line] == [1, 2]
    assert all(
        line["hash"] == chained(line, before)
        for before, line in zip(["", *(ln["hash"] for ln in lines)], lines, strict=False)
    )
    assert verify_run(tmp_path).status == Status.PROVEN
    fit(tmp_path, resume=True)  # no step is left to train
    assert lines_of(tmp_path) == lines


def test_a_run_that_goes_on_elsewhere_is_proven_from_there(whole, tmp_path):
    path = whole / "checkpoints" / "previous.ckpt"  # step 12, the fifth of epoch 1
    toy_trainer(tmp_path).fit(LitToy(), ToyData(), ckpt_path=path, weights_only=True)
    (finding, _), proof = verify_run(tmp_path).findings, verify_run(tmp_path)
    assert (proof.status, proof.epochs[0].num_steps) == (Status.CUT, 2)
    assert "attempt 1 went on from step 12 of another run: see its ledger" in finding.text


def test_a_run_killed_behind_its_last_checkpoint_gets_its_end_when_started_again(run):
    write(run, lines_of(run)[:-1])
    fit(run, resume=True)
    assert verify_run(run).status == Status.PROVEN


@pytest.mark.parametrize(("given", "points"), [({}, 14), ({"log_every_n_steps": 5}, 2)])
def test_a_short_run_is_logged_at_every_step(tmp_path, given, points):
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path, name="", version="")
    toy_trainer(tmp_path, logger=logger, callbacks=[Ledger()], **given).fit(LitToy(), ToyData())
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    place = header.split(",").index("train/loss")
    assert sum(bool(row.split(",")[place]) for row in rows) == points

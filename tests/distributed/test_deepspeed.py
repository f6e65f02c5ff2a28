"""deepspeed: its engine's runs are those of one device, go on under others, and stop as they do."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_models.training.checkpoint import AVERAGED, read_checkpoint
from lit_models.training.lineage import verify_run
from tests.distributed.launch import run
from tests.distributed.test_matrix import facts, run_jobs
from tests.toy import ledger_lines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="extra: deepspeed"),
]
HALF = {"max_steps": 5}
STAGES = ({"stage": 1}, {"stage": 2})
NAN = {"num_samples": 50, "nan_sample": 7, "global_batch_size": 8}


def job(name: str, strategy: str = "deepspeed", family: str = "tied", **more: Any) -> Any:
    data = {"global_batch_size": 16, **more.pop("data", {})}
    options = {"precision": "32-true", **more.pop("trainer", {})}
    shared = {"family": family, "strategy": strategy, "data": data, "trainer": options}
    return {"name": name, "decay": 0.9, **shared, **more}


def rehearsed(options: dict[str, int]) -> list[Any]:
    """Return a run in micro-batches of four, and one that finds that as many of its longest rows, 9
    positions each, fit into the memory of one rank."""
    shared = {"family": "toy", "sharding": options}
    number = {"micro_batch_size": 4}
    stage = options["stage"]
    given = job(f"given, stage {stage}", data=number, **shared)
    return [given, job(f"rehearsed, stage {stage}", positions=[80, 40], **shared)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole runs, and runs in two halves by two strategies and numbers of processes."""
    folder = tmp_path_factory.mktemp("deepspeed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "compiled"))
        run_all(folder)
    return folder


def run_all(folder: Path) -> None:
    def last(name: str) -> str:
        return str(folder / name / "checkpoints" / "last.ckpt")

    one = [
        job("one", "ddp"),
        job("first-ddp-1", "ddp", trainer=HALF),
        job("one skip", "ddp", "toy", data=NAN, policy="skip"),
        job("one rollback", "ddp", "toy", data=NAN, policy="rollback", save_every=2),
    ]
    run_jobs(folder, 1, one)
    two = [
        job("stage 1", sharding=STAGES[0]),
        job("stage 2", sharding=STAGES[1]),
        job("stage 1 in parts", sharding=STAGES[0], data={"micro_batch_size": 2}),
        job("stage 2 in parts", sharding=STAGES[1], data={"micro_batch_size": 2}),
        job("ddp-2", "ddp"),
        job("first-deepspeed-2", trainer=HALF),
        job("ddp-1 to deepspeed-2", resume=last("first-ddp-1")),
        job("deepspeed-2 to fsdp-2", "fsdp", resume=last("first-deepspeed-2")),
        job("bf16", trainer={"precision": "bf16-mixed"}),
        *(job(f"lora {strategy}", strategy, "lora") for strategy in ("ddp", "deepspeed")),
        job("two skip", family="toy", data=NAN, policy="skip"),
        *(each for options in STAGES for each in rehearsed(options)),
        job("two rollback", family="toy", data=NAN, policy="rollback", save_every=2),
    ]
    run_jobs(folder, 2, two)
    run_jobs(folder, 1, [job("deepspeed-2 to ddp-1", "ddp", resume=last("first-deepspeed-2"))])
    three = [
        job("three", data={"micro_batch_size": 2}),
        job("deepspeed-2 to deepspeed-3", resume=last("first-deepspeed-2")),
    ]
    run_jobs(folder, 3, three)


def last(folder: Path) -> dict[str, Any]:
    return read_checkpoint(folder / "checkpoints" / "last.ckpt")


def by_name(checkpoint: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (state,) = checkpoint["optimizer_states"]
    names = [n for group in state["param_groups"] for n in group["param_names"]]
    return {name: state["state"][index] for index, name in enumerate(names)}


def assert_same(one: Path, other: Path, begin: int = 0) -> None:
    """Assert level A in float32: the same samples, losses within 1e-6, weights within 1e-5."""
    for a, b in zip(ledger_lines(one)[begin:], ledger_lines(other), strict=True):
        for key in ("step", "digest", "samples", "targets", "learning_rate", "is_finite"):
            assert a[key] == b[key]
        if a["is_finite"]:
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
    expected, found = last(one), last(other)
    close = {"rtol": 1e-5, "atol": 1e-6}
    for key in ("state_dict", AVERAGED):
        torch.testing.assert_close(found[key], expected[key], **close)
    torch.testing.assert_close(by_name(found), by_name(expected), **close)
    for stage in ("validation", "test"):
        assert facts(other)[stage] == pytest.approx(facts(one)[stage], rel=1e-5)


SAME = ("stage 1", "stage 2", "stage 1 in parts", "stage 2 in parts", "three", "ddp-2")


@pytest.mark.parametrize("name", SAME)
def test_a_run_is_that_of_one_device(runs, name):
    assert_same(runs / "one", runs / name)
    assert verify_run(runs / name).faults == []


GOES_ON = [f"deepspeed-2 to {other}" for other in ("ddp-1", "fsdp-2", "deepspeed-3")]


@pytest.mark.parametrize("name", ["ddp-1 to deepspeed-2", *GOES_ON])
def test_a_run_goes_on_under_another_strategy_and_number_of_devices(runs, name):
    assert_same(runs / "one", runs / name, begin=HALF["max_steps"])


def test_a_checkpoint_is_that_of_one_device(runs):
    expected, found = last(runs / "first-ddp-1"), last(runs / "first-deepspeed-2")
    assert found.keys() == expected.keys()
    (ours,), (theirs,) = found["optimizer_states"], expected["optimizer_states"]
    assert ours["param_groups"] == theirs["param_groups"]
    assert len(ours["param_groups"]) == 2
    shapes = [
        {n: {k: v.shape for k, v in state.items()} for n, state in by_name(checkpoint).items()}
        for checkpoint in (found, expected)
    ]
    assert shapes[0] == shapes[1]


def test_two_ranks_hold_half_of_the_moments_each(runs):
    whole = facts(runs / "ddp-2")["bytes"]["local"]
    for file in ("facts.json", "facts-1.json"):
        held = json.loads((runs / "stage 2" / file).read_text())["bytes"]["local"]
        assert 0.45 <= held / whole <= 0.55


def test_stage_2_keeps_no_whole_gradient_between_micro_batches(runs):
    whole = sum(value.nbytes for value in last(runs / "one")["state_dict"].values())
    tied = last(runs / "one")["state_dict"]["output.weight"].nbytes  # the embedding's as well
    assert facts(runs / "stage 1 in parts")["gradient_bytes"] == whole - tied
    assert facts(runs / "stage 2 in parts")["gradient_bytes"] == 0


def test_nothing_is_compiled(runs):
    assert not (runs / "compiled").exists()


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_step_that_is_not_finite_is_not_applied(runs, policy):
    lines = ledger_lines(runs / f"two {policy}")
    assert any(not line["is_finite"] for line in lines)
    assert_same(runs / f"one {policy}", runs / f"two {policy}")


def test_mixed_precision_uses_the_same_samples_and_nearly_the_same_losses(runs):
    for expected, line in zip(ledger_lines(runs / "one"), ledger_lines(runs / "bf16"), strict=True):
        assert line["digest"] == expected["digest"]
        assert line["loss"] == pytest.approx(expected["loss"], rel=2e-2)
        assert line["loss"] != expected["loss"]


def test_adapters_on_a_base_in_bfloat16_are_those_of_ddp(runs):
    assert_same(runs / "lora ddp", runs / "lora deepspeed")
    types = {value.dtype for value in last(runs / "lora deepspeed")["state_dict"].values()}
    assert types == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("stage", [1, 2])
def test_the_micro_batch_that_was_found_gives_the_run_of_its_number(runs, stage):
    auto, given = (runs / f"{name}, stage {stage}" for name in ("rehearsed", "given"))
    assert facts(auto)["micro_batch_size"] == facts(given)["micro_batch_size"] == 4
    for a, b in zip(ledger_lines(auto), ledger_lines(given), strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}
    torch.testing.assert_close(last(auto)["state_dict"], last(given)["state_dict"], rtol=0, atol=0)


def test_a_killed_run_goes_on_with_one_device(tmp_path):
    script = ["-m", "tests.distributed.toy_run", str(tmp_path), "--fit_only"]
    script += ["--precision", "32-true"]
    killed = run(*script, "--devices", "2", "--strategy", "deepspeed", "--kill_at", "10")
    assert "the connection to another rank is lost" in " ".join(killed.stdout.split())
    resumed = run(*script, "--resume")
    assert resumed.returncode == 0, resumed.stdout
    verdict = verify_run(tmp_path)
    assert (verdict.faults, verdict.finished_epochs, verdict.attempts) == ([], 4, [2, 1])

"""Benchmark of one GPU, at toy sizes and with rows that only pretend to measure."""

import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from lit_models.causal_lm.network import PRESETS
from lit_models.config_files import find_config
from lit_models.training.strategies import leave_group
from tests.benchmarks import gpu, gpu_kernels, gpu_rows
from tests.benchmarks.figures import Aim, Figure
from tests.benchmarks.gpu import AIMS, CEILINGS, CODER, SHAKESPEARE, Row, figures_of, measure_all
from tests.benchmarks.gpu_kernels import PRODUCTS
from tests.benchmarks.gpu_rows import ROUNDS, SIZES
from tests.distributed.launch import run

PRINTED = "Traceback\nRuntimeError: the cause\n\nrank 0, step 1. `unisono replay X`\n"


def options(small: bool = False, only: str = "") -> Namespace:
    return Namespace(small=small, only=only, text=Path("input.txt"), trace=None, module="gpu")


def measured_rows(path: Path, monkeypatch: pytest.MonkeyPatch, only: str, broken: str) -> list[str]:
    """Pretend to measure the rows whose names begin so; all rows named `broken` fail."""

    def measured(name: str, row: Row, options: Namespace) -> list[Figure]:
        if name == broken:
            raise gpu.RowFailed(PRINTED)
        return [Figure("GPU", name, "tokens/s", [100.0, 120.0])]

    monkeypatch.setattr(gpu, "measured", measured)
    return measure_all(gpu.rows(options()), options(only=only), AIMS, path)


def test_a_row_that_fails_is_named_and_the_file_keeps_all_others(tmp_path, monkeypatch):
    path, log = tmp_path / "x.json", tmp_path / "gpu" / "1b-compiled.log"
    failures = measured_rows(path, monkeypatch, "", "1b, compiled")
    assert failures == [f"1b, compiled: RuntimeError: the cause; all that it printed is in {log}"]
    assert log.read_text() == PRINTED
    assert measured_rows(path, monkeypatch, CODER, "") == []
    rows = [(row["what"], row["peer"]) for row in json.loads(path.read_text())["figures"]]
    names = {what for what, _ in rows}
    assert {"gpt2-124m, compiled", "7b, LoRA, compiled", "1b, eager", CODER, SHAKESPEARE} <= names
    assert "1b, compiled" not in names  # the row failed: no figures, no comparison
    assert rows.count(("gpt2-124m, compiled", "gpt2-124m, eager")) == 1


@pytest.mark.parametrize("module", [gpu, gpu_kernels])
def test_aims_and_peers_are_rows(module):
    rows = module.rows(options())
    names = {peer for row in rows.values() for peer in row.peers}
    assert names <= rows.keys()
    assert {what.removesuffix(", forward") for what, _ in module.AIMS} <= rows.keys()


def test_the_row_of_gpt2_trains_what_is_shipped():
    path = find_config("causal_lm/pretrain_gpt2_124m.yaml")
    size, shipped = SIZES["gpt2-124m"], yaml.safe_load(path.read_text("utf-8"))
    module, data = (shipped[part]["init_args"] for part in ("model", "data"))
    assert (size.config, module["computation"]) == (PRESETS[module["network"]], {"compile": True})
    assert (size.rows, size.length) == (data["micro_batch_size"], data["context_length"])
    assert size.filled_vocabulary == 50_304  # as the peers pad it


def test_a_row_stands_beside_its_peers_and_what_the_device_does_at_most():
    values = {CEILINGS: [8.0], "x": [4.0, 6.0], "y": [2.0, 4.0]}
    found = {name: [Figure("GPU", name, "TFLOP/s", ours)] for name, ours in values.items()}
    table = dict.fromkeys(found, Row(lambda _: [])) | {
        "x": Row(lambda _: [], peers={"y": Aim(1.25)})
    }
    rows = figures_of(table, found, {("x", "TFLOP/s"): 4.5}).rows
    by = {(row.what, row.unit, row.peer): row for row in rows}
    assert by["x", "TFLOP/s", ""].is_met
    assert by["x", "of the ceiling", ""].ours == [0.5, 0.75]
    beside = by["x", "TFLOP/s", "y"]
    assert (beside.of("ratio"), beside.is_met) == ([2, 1.5], False)
    assert (CEILINGS, "of the ceiling", "") not in by


@pytest.mark.filterwarnings("ignore:.*have no `validation_step`")
def test_a_language_model_is_measured_at_a_toy_size(tmp_path, monkeypatch):
    monkeypatch.setenv(gpu_rows.TRACE, str(tmp_path / "trace.json"))
    found = gpu_rows.language_model(SIZES["1b"].small(), False, tmp_path)
    rows = {(row.what, row.unit): row for row in found}
    assert all(rate > 0 for rate in rows["", "tokens/s"].ours)
    assert len(rows[", a step, all on", "ms"].theirs) == ROUNDS
    assert rows[", positions of padding", "share"].ours == [0.0] * ROUNDS
    steps = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len({e["name"] for e in steps if e["name"].startswith("ProfilerStep#")}) == 3


QUICK = (CEILINGS, "attention, packed 8 x 4,096, own", "loss, 50,257 tokens, own")
LONGER = (
    *("search", "float32 top", "1b writes, 1 at once", "1b, stands still for a checkpoint, shards"),
    *(f"{CODER}, prediction", "gpt2-124m, bfloat16 beside float32", "step, 1b, policy"),
    *("attention, packed 8 x 4,096, mask", "loss, 50,257 tokens, full logits"),
    *("loss, 50,257 tokens, torch's linear_cross_entropy", f"loss, 50,257 tokens, {PRODUCTS}"),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in LONGER)]
)
def test_a_row_is_measured_at_a_toy_size(tmp_path, own_environment, name):
    asked = options(small=True)
    found = {**gpu.rows(asked), **gpu_kernels.rows(asked)}[name].measure(tmp_path)
    leave_group()
    assert all(value > 0 for row in found if row.unit != "share" for value in row.ours)
    json.dumps([asdict(row) for row in found])


@pytest.mark.slow
def test_the_tests_of_a_gpu_run_on_a_cpu():
    few = "not compiled and not lora and (Qwen2 or without_fsdp or masks or (bits and toy))"
    command = ["-m", "pytest", "-q", "-n0", "-m", "gpu", "tests/gpu", "-k", few]
    done = run(*command, ACCELERATOR="cpu", PYTHONWARNINGS="")
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout

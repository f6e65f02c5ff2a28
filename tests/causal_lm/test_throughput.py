"""Measured throughput of a language model, which stays compiled."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from lit_models.causal_lm.module import ComputationOptions, LitCausalLM
from lit_models.causal_lm.network import DecoderConfig, compile_blocks
from lit_models.training import ExactDropout, Throughput, default_callbacks
from lit_models.training.memory import Rehearsal
from tests.causal_lm.tiny import BLOCKS, SENTENCE, SMALL, run
from tests.toy import json_rows, losses


def fit(folder, own, compile=False, **options):
    module = LitCausalLM(
        partial(torch.optim.AdamW, lr=0.01),
        network=DecoderConfig(dropout=0.1, **SMALL),
        computation=ComputationOptions(compile=compile),
    )
    callbacks = [c for c in default_callbacks() if not isinstance(c, Throughput)]
    callbacks = [callbacks[0], *own, *callbacks[1:]]
    limits = {"max_epochs": 1, "log_every_n_steps": 2, "callbacks": callbacks}
    run(folder, module, limits=limits, content=SENTENCE * 8, **{**BLOCKS, **options})
    return module


def test_the_arithmetic_is_counted(tmp_path):
    measured = fit(tmp_path, [Throughput(peak_flops=1e9)])
    # Forward and backward: 6 FLOPs per weight in matrix products, 12 per layer for attention.
    weights = sum(p.numel() for n, p in measured.named_parameters() if p.dim() == 2)
    expected = 6 * weights + 12 * SMALL["num_layers"] * SMALL["hidden_size"] * 16
    assert measured.flops(np.array([16.0])) == expected * 16
    assert all(row["mfu"] > 0 for row in json_rows(tmp_path / "throughput.jsonl"))


@pytest.fixture
def compiled_by(monkeypatch):
    """Sets the backend of torch.compile and clears compiled code."""

    def use(backend):
        compiles = partial(compile_blocks, backend=backend)
        monkeypatch.setattr("lit_models.causal_lm.module.compile_blocks", compiles)
        torch._dynamo.reset()

    yield use
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
def test_a_compiled_network_stays_compiled_for_one_shape_and_is_counted(tmp_path, compiled_by):
    """With dropout by sample, accumulation, a block that is cut, a short last step, validation."""
    graphs, calls, shapes = [], [], []

    def counting(graph, inputs):
        graphs.append(1)
        return lambda *args: calls.append(1) or graph(*args)

    def noting(trainer, pl_module, batch, batch_idx):
        shapes.append((len(batch["weight"]), *batch["input_ids"].shape))

    compiled_by(counting)
    for compiles in (False, True):
        folder = tmp_path / f"{compiles}"
        own = [Throughput(peak_flops=1e9), ExactDropout()]
        fit(folder, [*own, LambdaCallback(on_train_batch_start=noting)], compile=compiles)
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), rel=1e-5)
    assert len(graphs) == 3  # validation, training, and training with two pieces in a block
    # The one layer runs in 10 training micro-batches, in 2 of validation before and 2 after.
    assert len(calls) == 10 + 2 + 2
    assert (shapes[0], shapes[-1]) == ((4, 4, 16), (1, 4, 16))
    assert all(row["mfu"] > 0 for row in json_rows(folder / "throughput.jsonl"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
def test_what_a_rehearsal_compiled_for_many_sizes_does_not_serve_the_run(tmp_path, compiled_by):
    compiled = []  # for each graph, whether its sizes are dynamic

    def noting(graph, inputs):
        values = [n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder"]
        sizes = [size for value in values for size in getattr(value, "shape", [value])]
        compiled.append(any(isinstance(size, torch.SymInt) for size in sizes))
        return graph

    compiled_by(noting)
    endless = SimpleNamespace(capacity_bytes=100, start=lambda: None, peak_bytes=lambda: 1)
    rehearsed = LambdaCallback(on_sanity_check_start=lambda *_: compiled.append("rehearsed"))
    callbacks = [rehearsed, Rehearsal(endless)]
    fit(tmp_path / "run", callbacks, compile=True, micro_batch_size="auto")
    rehearsal = compiled.index("rehearsed")
    assert True in compiled[:rehearsal]
    assert compiled[rehearsal + 1] is False

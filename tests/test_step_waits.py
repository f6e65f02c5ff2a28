"""Every family starts on a GPU, and no training step waits for one.

The tests run on torch's device "meta", whose tensors have shapes but no values: code that reads a
value, or a size that depends on values, fails at exactly the line that would wait for a GPU.

Three waits are allowed and not tested here: NonFinite waits if the optimizer does not know
`found_inf`, since such an optimizer cannot skip an update by itself; transformers' encoders check
once per forward pass whether they need a mask; log lines fetch values (test_start_counts.py).
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from lit_models.causal_lm import loss
from lit_models.training.dropout import SampleKeys, key_dropout
from lit_models.training.exact import ExactModule
from lit_models.training.faults import NonFinite
from lit_models.training.optim import MuonAdamW
from lit_models.training.sharding import whole
from lit_models.training.strategies import leave_group
from tests.causal_lm.tiny import Made
from tests.distributed import families
from tests.distributed.lens_family import JOINT_START
from tests.distributed.test_matrix import write_tables
from tests.toy import toy_trainer

META = torch.device("meta")
# Float operations that torch.use_deterministic_algorithms refuses on a GPU: unordered sums.
NO_ORDER = re.compile("aten::(nll_loss2d|cumsum|histc|put_|_ctc_loss|grid_sampler|reflection_pad)")
EVERY = {**families.FAMILIES, **families.PRETRAINED, "lora": families.SPECIAL["lora"]}
CHUNKED, AT_ONCE = 0, loss.SMALL_BYTES  # a language model computes its loss in chunks or at once
# Family, optimizer steps before the step under test, samples of that step.
CASES: dict[str, tuple[families.Family, int, int]] = {
    "occupation_coder": (families.FAMILIES["occupation_coder"], 1, 50),
    "causal_lm": (families.FAMILIES["causal_lm"], 1, 4),
    "gpt2": (families.SPECIAL["gpt2"], 1, 4),
    "pretrained": (families.PRETRAINED["Qwen2"], 1, 4),
    "grouped_heads": (partial(families.SPECIAL["llama"], layout="blocks"), 1, 4),
    "documents": (partial(families.FAMILIES["causal_lm"], layout="documents"), 1, 4),
    "lens_warm_up": (families.FAMILIES["consistency_lens"], 1, 4),
    "lens_together": (families.FAMILIES["consistency_lens"], JOINT_START + 2, 4),
    "text_scorer": (families.FAMILIES["text_scorer"], 1, 8),
    "ranker": (families.FAMILIES["ranker"], 1, 4),
    "retriever": (families.FAMILIES["retriever"], 1, 8),
    "snippet_writer": (families.FAMILIES["snippet_writer"], 1, 4),
    "sparse": (families.SPECIAL["sparse_retriever"], 1, 8),
    "seq2seq": (families.FAMILIES["seq2seq"], 1, 4),
}


class Copies(TorchFunctionMode):
    """Records functions that copy the host's numbers to the device and wait for the copy."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        place = {torch.tensor: 0, torch.as_tensor: 0, Tensor.to: 0}.get(func)
        place = 1 if func in (Tensor.new_tensor, Tensor.copy_) else place
        if place is not None and result.is_meta and not getattr(args[place], "is_meta", False):
            self.names.append(func.__name__)
        return result


def without_order(made: Made) -> set[str]:
    """Return the operations of `NO_ORDER` that ran on floats."""
    sums = [(name, args[0]) for name, _, args in made.seen if NO_ORDER.match(name)]
    return {name for name, summands in sums if summands.is_floating_point()}


class LastBatch(Callback):
    """Keeps the latest training batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        self.batch = batch


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("waits")
    write_tables(folder)
    families.pretrained_files(folder)
    return folder


@pytest.fixture
def no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable autocast, which does not know the device "meta" and which no test here needs."""
    autocast, is_on = torch.autocast, torch.is_autocast_enabled

    def entered(kind: str, **options: Any) -> Any:
        return contextlib.nullcontext() if kind == "meta" else autocast(kind, **options)

    monkeypatch.setattr(torch, "autocast", entered)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind != "meta" and is_on(kind))


def trained(
    family: families.Family, folder: Path, steps: int, size: int
) -> tuple[ExactModule, Any]:
    """Return a module on the device "meta" that has trained some steps, and a batch there."""
    module, data = family(folder / "job", {"global_batch_size": size})
    last = LastBatch()
    quiet = {"limit_val_batches": 0, "enable_checkpointing": False, "callbacks": [last]}
    trainer = toy_trainer(folder / "run", max_steps=steps, max_epochs=-1, precision=32, **quiet)
    trainer.fit(module, data)
    module.log = lambda *_, **__: None  # type: ignore[method-assign, assignment]  # no loop runs
    module.to(META).train()
    return module, data.transfer_batch_to_device(last.batch, META, 0)


def step(module: ExactModule, batch: Any) -> None:
    """Do the host's part of one step: loss, gradients, their norm, update, and record."""
    settings = module.configure_optimizers()
    optimizer = settings["optimizer"] if isinstance(settings, dict) else settings
    module.training_step(batch, 0).backward()
    module.on_after_backward()
    if isinstance(optimizer, MuonAdamW):  # torch's fused AdamW handles `found_inf` itself
        NonFinite().on_before_optimizer_step(Mock(precision_plugin=None), module, optimizer)
    module.step_record.gradient_norm(optimizer)
    module.configure_gradient_clipping(optimizer, 1.0, "norm")
    optimizer.step()
    assert module.step_record.vector(stop=True, save=False).is_meta


class FirstWeights(Callback):
    """Keeps the weights at the start of training."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.weights = {n: whole(w).detach().clone() for n, w in pl_module.named_parameters()}


def first_weights(
    family: families.Family, folder: Path, steps: int, **options: Any
) -> dict[str, Tensor]:
    seed_everything(0, verbose=False)  # strategies of several processes seed again
    module, data = family(folder / "job", {"global_batch_size": 8})
    first = FirstWeights()
    few = {"max_steps": steps, "max_epochs": -1, "limit_val_batches": steps}
    quiet = {"enable_checkpointing": False, "callbacks": [first]}
    trainer = toy_trainer(folder / "run", **few, **quiet, **{"precision": "32-true", **options})
    trainer.fit(module, data)
    assert trainer.global_step == steps
    return first.weights


@pytest.fixture(scope="module")
def on_host(files: Path) -> Callable[[str], dict[str, Tensor]]:
    """Family -> the weights at its start on one CPU."""
    return cache(lambda name: first_weights(EVERY[name], files, 0))


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated")
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    ("strategy", "precision", "steps"),
    [
        ("auto", "32-true", 0),
        pytest.param("ddp", "bf16-true", 1, marks=pytest.mark.slow),
        pytest.param("fsdp", "32-true", 0, marks=pytest.mark.slow),
    ],
)
def test_a_network_starts_from_the_same_weights_in_a_device_s_context(
    files, on_host, own_environment, monkeypatch, name, strategy, precision, steps
):
    """Lightning enters the device context of one GPU around `configure_model`, also under ddp. In
    the context of "meta", used here and under fsdp, tensors would have no values, and transformers
    would require accelerate."""
    expected = on_host(name)

    @contextlib.contextmanager
    def on_device(self: Strategy, empty_init: bool | None = None) -> Iterator[None]:
        with META, self.precision_plugin.tensor_init_context():
            yield

    for kind in (Strategy, ModelParallelStrategy):
        monkeypatch.setattr(kind, "tensor_init_context", on_device)
    found = first_weights(EVERY[name], files, steps, strategy=strategy, precision=precision)
    leave_group()
    assert found.keys() == expected.keys()
    for parameter, weight in found.items():
        assert torch.equal(weight, expected[parameter].to(weight.dtype)), parameter


@pytest.mark.parametrize("case", CASES)
def test_a_step_asks_the_device_for_nothing(files, no_autocast, monkeypatch, case):
    module, batch = trained(*CASES[case][:1], files, *CASES[case][1:])
    if case == "occupation_coder":
        assert len(batch["num_with_codes"]) == 3  # so that the search for the best order runs
    for small in (AT_ONCE, CHUNKED):
        monkeypatch.setattr(loss, "SMALL_BYTES", small)
        with Copies() as copies, Made() as made:
            step(module, batch)
        assert not without_order(made)
    assert not copies.names  # from the second step on: some tensors are kept after the first


@pytest.mark.parametrize("name", ["gpt2", "retriever_dropout"])
def test_dropout_by_sample_asks_the_device_for_nothing(files, no_autocast, name):
    module, batch = trained(families.SPECIAL[name], files, 1, 8)
    keys = SampleKeys()
    assert key_dropout(module, keys)
    for _ in range(2):
        with Copies() as copies:
            keys.begin(1, batch["sample_id"])
            step(module, batch)
    assert not copies.names


def test_copies_to_the_device_are_recorded():
    x = torch.zeros(3, device=META)
    with Copies() as copies:
        x.to(torch.float64).copy_(x)
        torch.zeros(2, device=META).fill_(1.0)
        assert copies.names == []
        torch.tensor([1, 2], device=META)
        torch.as_tensor(1, device=META)
        x.new_tensor([1, 2])
        torch.zeros(3).to(META)
        x.copy_(torch.zeros(3))
    assert copies.names == ["tensor", "as_tensor", "new_tensor", "to", "copy_"]


class TorchCount(Callback):
    """Counts the first micro-batch's arithmetic with torch's counter, and keeps its lengths."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
        ids = batch["sample_id"][batch["weight"] > 0].numpy()
        self.lengths = trainer.datamodule.datasets["train"].lengths[ids].astype(float)
        self.counter = FlopCounterMode(display=False).__enter__()

    def on_after_backward(self, *_: Any) -> None:
        self.counter.__exit__(None, None, None)


@pytest.mark.parametrize("name", ["occupation_coder", "causal_lm", "consistency_lens"])
def test_the_arithmetic_of_a_family_is_near_what_torch_counts(files, tmp_path, name):
    module, data = families.FAMILIES[name](files / f"counted {name}", {"global_batch_size": 8})
    counts, few = TorchCount(), {"max_steps": 1, "max_epochs": -1, "limit_val_batches": 0}
    toy_trainer(tmp_path / "run", callbacks=[counts], **few).fit(module, data)
    # In such small networks uncounted parts (embeddings, attention, norms) weigh much.
    found = module.flops(counts.lengths) / counts.counter.get_total_flops()
    assert 0.4 < found < 1.3

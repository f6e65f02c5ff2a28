"""One GPU: `pytest -m gpu tests/gpu`, at most ten minutes.

With ACCELERATOR=cpu before it, tests that need no CUDA run on a CPU.
Every family starts on the GPU from a CPU's weights, learns the same in float64, waits for nothing
in its steps, and runs training, test and prediction.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, seed_everything
from torch import nn

from lit_models.causal_lm import loss
from lit_models.causal_lm.generation import GenerationOptions
from lit_models.causal_lm.module import ComputationOptions
from lit_models.causal_lm.network import attend, documents_of
from lit_models.training import BitwiseSum, default_callbacks
from lit_models.training.dropout import SampleKeys, key_dropout
from lit_models.training.ledger import HostCopy
from lit_models.training.strategies import FullyShardedStrategy, leave_group
from tests.causal_lm.tiny import Made
from tests.distributed.families import FAMILIES, PRETRAINED, SPECIAL, Family, causal_lm, pretrained
from tests.test_step_waits import EVERY, first_weights, without_order
from tests.toy import ledger_lines, losses, toy_trainer

ACCELERATOR = os.environ.get("ACCELERATOR", "gpu")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch reads it at its first product
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("own_environment"),  # leaves no process group
    *([needs_cuda] if ACCELERATOR == "gpu" else []),
]
# NonFinite fetches the gradient norm unless the optimizer skips an update by itself.
fused = partial(torch.optim.AdamW, lr=0.01, fused=True)


def compiled(folder: Path, options: Any, family: Family) -> Any:
    # Rows of this length hold several documents each: other code handles rows of a single document.
    module, data = family(folder, {"context_length": 64, **options})
    module.computation = ComputationOptions(compile=True)
    return module, data


# All steps have the first step's shapes: compiling anew measures, and waits.
BLOCKS = {
    "llama": partial(SPECIAL["llama"], layout="blocks"),
    "Qwen2": partial(pretrained, family=partial(causal_lm, layout="blocks"), name="Qwen2"),
}
COMPILED = {f"compiled {name}": partial(compiled, family=family) for name, family in BLOCKS.items()}
LEARNERS = {name: family for name, family in EVERY.items() if name not in ("toy", "tied")}
# transformers' encoders check in each forward pass whether they need a mask.
ASKING = [n for n in PRETRAINED if n not in ("GPT2", "Llama", "Qwen2", "Qwen2 lora")]


class NoWaits(Callback):
    """Raises an error at any wait for the device, from the second step on."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step > 0 and torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, *_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")

    on_exception = on_train_batch_end


def fitted(family: Family, folder: Path, run: Path, **options: Any) -> tuple[Any, Any, Any]:
    """Return trainer, module and data after a training of three steps."""
    seed_everything(1, verbose=False)
    resume = options.pop("resume", None)
    sizes = {"global_batch_size": 8, **options.pop("sizes", {})}
    module, data = family(folder / f"{run.parent.name}-{run.name}", sizes)
    given = {"accelerator": ACCELERATOR, "max_steps": 3, "max_epochs": -1, **options}
    trainer = toy_trainer(run, limit_val_batches=1, **given)
    trainer.fit(module, data, ckpt_path=resume, weights_only=True)
    return trainer, module, data


@pytest.mark.parametrize("name", EVERY)
def test_a_training_starts_from_the_weights_of_a_cpu(files, monkeypatch, name):
    is_there = "transformers.integrations.accelerate.is_accelerate_available"
    monkeypatch.setattr(is_there, lambda *_: False)  # no test needs it
    on_cpu = first_weights(EVERY[name], files, 0)
    on_gpu = first_weights(EVERY[name], files, 0, accelerator=ACCELERATOR)
    for parameter, weight in on_cpu.items():
        assert torch.equal(on_gpu[parameter].cpu(), weight), parameter


# transformers' CANINE mask is infinity times zero in float64; Muon uses bfloat16 on a GPU.
@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("CANINE", "causal_lm")])
def test_the_losses_in_float64_are_those_of_a_cpu(files, tmp_path, name):
    fitted(EVERY[name], files, tmp_path / "cpu", accelerator="cpu")
    fitted(EVERY[name], files, tmp_path / "gpu")
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-8)


@pytest.mark.filterwarnings("ignore")  # the compiler's own warnings
@pytest.mark.parametrize("way", ["32-true", "bf16-mixed", "bf16-mixed fsdp", "bf16-true"])
@pytest.mark.parametrize("name", [*LEARNERS, *COMPILED])
def test_a_family_learns_without_a_wait_and_predicts(files, tmp_path, name, way):
    precision, _, strategy = way.partition(" ")

    def family(folder: Path, options: Any) -> Any:
        module, data = (LEARNERS | COMPILED)[name](folder, options)
        if module.optimizer.func is torch.optim.AdamW:
            module.optimizer = fused
        return module, data

    callbacks = [*([] if name in ASKING else [NoWaits()]), *default_callbacks()]
    few = {"precision": precision, "strategy": strategy or "auto", "callbacks": callbacks}
    trainer, module, data = fitted(family, files, tmp_path / "run", **few)
    assert all(line["is_finite"] for line in ledger_lines(tmp_path / "run"))
    trainer.test(module, data, verbose=False)
    module.generation = GenerationOptions(max_new_tokens=20)  # of families that generate texts
    if way in ("32-true", "bf16-mixed fsdp"):
        trainer.predict(module, data, return_predictions=False)
        assert list(files.glob(f"{tmp_path.name}-run/*"))


@pytest.mark.filterwarnings("ignore")  # the compiler's own warnings
@pytest.mark.parametrize("name", BLOCKS)
def test_compiled_blocks_learn_what_others_learn(files, tmp_path, name):
    given = {"precision": "32-true", "sizes": {"context_length": 64}}
    fitted(BLOCKS[name], files, tmp_path / "plain", **given)
    fitted(COMPILED[f"compiled {name}"], files, tmp_path / "compiled", precision="32-true")
    expected = pytest.approx(losses(tmp_path / "plain"), rel=1e-4)
    assert losses(tmp_path / "compiled") == expected


@pytest.mark.parametrize("option", ["auto", "", "sharded_checkpoint", "cpu_offload"])
def test_one_gpu_learns_and_goes_on_with_and_without_fsdp(files, tmp_path, option):
    family = FAMILIES["causal_lm"]
    fitted(family, files, tmp_path / "plain", max_steps=5, precision="32-true")
    given = {option: True} if option else {}
    way = partial(str, "auto") if option == "auto" else partial(FullyShardedStrategy, **given)
    fitted(family, files, tmp_path / "first", strategy=way(), precision="32-true")
    leave_group()
    last = tmp_path / "first" / "checkpoints" / "last.ckpt"
    more = {"max_steps": 5, "resume": last, "precision": "32-true"}
    fitted(family, files, tmp_path / "rest", strategy=way(), **more)
    found = [*losses(tmp_path / "first"), *losses(tmp_path / "rest")]
    assert found == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "retriever"])
def test_bitwise_sums_give_the_same_bits_twice(files, tmp_path, name):
    found = []
    for run in (tmp_path / "one", tmp_path / "two"):
        given = {"precision": "32-true", "sizes": {"micro_batch_size": 1}}
        callbacks = [*default_callbacks(), BitwiseSum()]
        with Made() as made:
            _, module, _ = fitted(FAMILIES[name], files, run, callbacks=callbacks, **given)
        assert not without_order(made)  # also in validation; a GPU would reject them
        found.append({n: p.detach().cpu() for n, p in module.named_parameters()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@needs_cuda
@pytest.mark.filterwarnings("ignore")  # the compiler's own warnings
@pytest.mark.parametrize("compiles", [False, True])
def test_the_loss_by_chunks_is_that_of_float64(monkeypatch, compiles):
    memory = torch.cuda.get_device_properties(0).total_memory
    monkeypatch.setattr(loss, "CHUNKS_IN_GPU", memory // 300_000)  # four chunks of float32 logits
    given = [torch.randn(300, 64).bfloat16(), torch.randn(1000, 64).mul(0.1).bfloat16()]
    exact, labels = [x.double().requires_grad_() for x in given], torch.randint(1000, (1, 300))
    expected = F.cross_entropy(F.linear(*exact), labels[0], reduction="sum")
    expected.backward()
    rows, head = (x.float().cuda().requires_grad_() for x in given)
    places = torch.arange(300, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        total, _ = loss.nats_at(rows[None], head, labels.cuda(), places, compiles)
    total.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-3)
    for found, other in zip((rows, head), exact, strict=True):
        assert (found.grad.cpu() - other.grad).norm() < 0.01 * other.grad.norm()


def test_packed_rows_in_one_kernel_are_as_by_a_mask_in_float64():
    device, found = "cuda" if ACCELERATOR == "gpu" else "cpu", []
    ids = torch.tensor([[0] * 300 + [1] * 200 + [-1] * 12, [2] * 512], device=device)
    given = [torch.randn(2, heads, 512, 64).bfloat16() for heads in (8, 2, 2)]
    for dtype in (torch.float64, torch.bfloat16):
        q, k, v = (x.to(device, dtype).requires_grad_() for x in given)
        documents = documents_of(ids, q, 64, as_mask=dtype == torch.float64)
        attended = attend(q, k, v, documents)
        attended.square().sum().backward()
        found.append([attended, q.grad, k.grad, v.grad])
    assert documents.bounds is not None
    for exact, other in zip(*found, strict=True):
        assert (other.double() - exact).norm() < 0.02 * exact.norm()


def test_dropout_by_sample_has_the_masks_of_a_cpu():
    masks = []
    for device in ("cpu", "cuda" if ACCELERATOR == "gpu" else "cpu"):
        keys, net = SampleKeys(), nn.Sequential(nn.Dropout(0.3))
        key_dropout(net, keys)
        keys.begin(7, torch.arange(50, device=device))
        masks.append(net(torch.ones(50, 12, 32, device=device)).cpu())
    assert torch.equal(*masks)


@needs_cuda
def test_numbers_on_their_way_to_the_host_are_not_waited_for():
    vector = torch.ones(3, dtype=torch.float64, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    copy = HostCopy(vector * 2)
    assert not torch.cuda.current_stream().query()  # the GPU still sleeps, and the host has gone on
    assert copy.read() == [2.0, 2.0, 2.0]


@needs_cuda
def test_a_micro_batch_is_found_where_memory_is_short(files, tmp_path):
    """The allocator may use only a little more than the process already holds."""
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**28) / total)
    wide = {"hidden_size": 512, "num_heads": 8, "num_kv_heads": 8, "feed_forward": 512}
    family = partial(SPECIAL["llama"], **wide)
    try:
        _, _, data = fitted(family, files, tmp_path / "run", precision="32-true")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 1 <= data.batching.micro_batch_size <= 8

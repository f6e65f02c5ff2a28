"""Rows of the GPU benchmark: each trains one network at one size and says how fast.

Beside ours stand a loop as nanoGPT has it, and transformers with accelerate.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from datamodules.core.planned import PlannedDataset, Stage
from datamodules.files.splitting import TRAIN
from datamodules.text.packing import BlockDataset
from lit_models import LitCausalLM
from lit_models.causal_lm.adapters import LoraOptions
from lit_models.causal_lm.loss import PADDED_TO_ON_GPU
from lit_models.causal_lm.module import ComputationOptions
from lit_models.causal_lm.network import PRESETS, Decoder, DecoderConfig
from lit_models.cli import built
from lit_models.config_files import find_config
from lit_models.training import default_callbacks
from lit_models.training.run import default_loggers
from lit_models.training.throughput import FILE_NAME
from tests.benchmarks.language_models import RaggedData, adamw, plain_logits
from tests.distributed.launch import ROOT
from tests.text_corpora import StreamStore

# Compiling and the allocator's growth end in the warm-up; a round is one interval of the logs.
WARM_UP, ROUNDS, STEPS_OF_ROUND = 10, 3, 10
STEPS = WARM_UP + ROUNDS * STEPS_OF_ROUND
CLIP = 1.0
COPIED_FLOATS, FEW_FLOATS = 2**30, 2**20
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAKESPEARE = ROOT.parent / "shared" / "data" / "shakespeare" / "input.txt"
SMALL = {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "max_positions": 64}
ONE_B = DecoderConfig(
    vocab_size=128_256,
    max_positions=2048,
    hidden_size=2048,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    feed_forward=8192,
    rope_theta=500_000.0,
)
SEVEN_B = replace(
    ONE_B,
    **{"vocab_size": 32_000, "hidden_size": 4096, "num_layers": 32, "num_heads": 32},
    **{"num_kv_heads": 32, "feed_forward": 11_008, "tied": False, "rope_theta": 10_000.0},
)


@dataclass(frozen=True)
class Size:
    """One shape of a language model, and how much of it a step takes.

    Args:
        config: of the network.
        rows: of a step, in one micro-batch, all of `length` positions.
        length: positions of a row.
        lora: train adapters on a bfloat16 base.
    """

    config: DecoderConfig
    rows: int
    length: int
    lora: bool = False

    def small(self) -> Size:
        """Return the same at a toy size, for a machine without a GPU."""
        heads = {"num_kv_heads": None, "feed_forward": None}
        return replace(self, config=replace(self.config, **SMALL, **heads), rows=2, length=64)

    @property
    def filled_vocabulary(self) -> int:
        """V as nanoGPT has it, and our loss by itself: products of a multiple of 128 are faster."""
        return -(-(self.config.vocab_size or 0) // PADDED_TO_ON_GPU) * PADDED_TO_ON_GPU

    @property
    def flops_per_token(self) -> float:
        """Of forward and backward."""
        return flops_per_token(self.config, self.length, are_weights_learnt=not self.lora)


SIZES = {
    "gpt2-124m": Size(PRESETS["gpt2-124m"], rows=32, length=1024),
    "1b": Size(ONE_B, rows=8, length=2048),
    "7b, LoRA": Size(SEVEN_B, rows=4, length=2048, lora=True),
}
ENCODER, DECODER = (f"model.init_args.{part}.init_args" for part in ("encoder", "decoder"))
BASE = {"width": 768, "num_heads": 12, "feed_forward": 3072}
CODER: dict[str, Any] = {ENCODER: {"num_layers": 12, **BASE}, DECODER: {"num_layers": 6, **BASE}}
MINI = {"width": 384, "num_layers": 6, "num_heads": 12, "feed_forward": 1536}
RETRIEVER: dict[str, Any] = {ENCODER: MINI}


def flops_per_token(config: DecoderConfig, length: int, are_weights_learnt: bool = True) -> float:
    """Return the FLOPs of forward and backward for one token, recomputation not counted, attention
    as if it were not causal.

    Weights that stand still need no gradient of their own, a third of the arithmetic; of adapters
    themselves nothing is counted. Source: Chowdhery et al. 2022, appendix B.
    """
    total, looked_up = num_weights(config)
    attention = 12 * config.num_layers * config.hidden_size * length
    return (6 if are_weights_learnt else 4) * (total - looked_up) + attention


@cache
def num_weights(config: DecoderConfig) -> tuple[int, int]:
    """Return how many weights a network has, and how many of them no product takes."""
    with torch.device("meta"):
        network = Decoder(config)
    tables = [network.positions] if network.positions is not None else []
    if not config.tied:
        tables.append(network.embedding)
    looked_up = sum(table.weight.numel() for table in tables)
    return sum(p.numel() for p in network.parameters()), looked_up


class Found(NamedTuple):
    """What a row says of itself; plain values.

    Args:
        unit: of the rates.
        rates: of each round.
        flops: of one of the unit, forward and backward; none where they are not known.
        memory_gib: the most that tensors of a step took on the GPU.
        steps_ms: milliseconds of a step, of each round.
        loop_ms: those of a plain loop over the same module and batches; none where there is none.
        lines: of `throughput.jsonl`, of each round.
    """

    unit: str
    rates: list[float]
    flops: float | None = None
    memory_gib: float = 0.0
    steps_ms: tuple[float, ...] = ()
    loop_ms: tuple[float, ...] = ()
    lines: tuple[dict[str, Any], ...] = ()


class Rounds(Callback):
    """Notes the seconds of each round of steps, for which alone a GPU is waited; and then trains
    on the batches of each round again, by a plain loop.

    Args:
        unit: samples or tokens, of a batch's load.
    """

    def __init__(self, unit: str = "tokens") -> None:
        self.unit = unit
        self.seconds: list[float] = []
        self.amounts: list[int] = []
        self.loop_seconds: list[float] = []
        self.peak_bytes = 0
        self._batches: list[Any] = []
        self._began, self._steps, self._amount = 0.0, 0, 0

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._steps >= WARM_UP:
            self._batches.append(batch)
        self.note(batch["load"][self.unit])

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        self.peak_bytes = peak_bytes()
        for start in range(0, len(self._batches), STEPS_OF_ROUND):
            batches = self._batches[start : start + STEPS_OF_ROUND]
            self.loop_seconds.append(loop_seconds(trainer, module, batches))

    def note(self, amount: int) -> None:
        """Count a step that trained on so much."""
        self._steps, self._amount = self._steps + 1, self._amount + amount
        if self._steps < WARM_UP or (self._steps - WARM_UP) % STEPS_OF_ROUND:
            return
        now = clock()
        if self._steps > WARM_UP:
            self.seconds.append(now - self._began)
            self.amounts.append(self._amount)
        elif torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # building a network may take more than a step
        self._began, self._amount = now, 0

    def found(self, flops: float | None = None, lines: Any = ()) -> Found:
        """Return what the row says of itself."""
        rates = [amount / s for amount, s in zip(self.amounts, self.seconds, strict=True)]
        steps, loop = (
            tuple(1e3 * s / STEPS_OF_ROUND for s in seconds)
            for seconds in (self.seconds, self.loop_seconds)
        )
        unit = "rows/s" if self.unit == "samples" else "tokens/s"
        memory = (self.peak_bytes or peak_bytes()) / 2**30
        return Found(unit, rates, flops, memory, steps, loop, tuple(lines))


def clock() -> float:
    """Return the seconds at which the GPU has done all that it was asked for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_bytes() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def loop_seconds(trainer: Trainer, module: Any, batches: list[Any]) -> float:
    """Return the seconds of a round of the loop that one would write by hand: the same network,
    compiled or not, the same loss, precision, clipping and optimizer, on batches that lie there."""
    (optimizer,) = trainer.optimizers
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    begun = clock()
    for batch in batches:
        optimizer.zero_grad()
        with trainer.precision_plugin.forward_context():
            terms = module.training_terms(batch)
            loss = sum(t.total / t.count for t in terms.values() if t.total.requires_grad)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
    return clock() - begun


def trained(folder: Path, module: Any, data: Any, unit: str, flops: float | None) -> Found:
    """Train with everything on but checkpoints, in bfloat16; return what was found."""
    rounds = Rounds(unit)
    # Those of a billion weights would take longer than the steps.
    callbacks = [c for c in default_callbacks() if not isinstance(c, Checkpoint)]
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        precision="bf16-mixed",
        max_steps=STEPS,
        log_every_n_steps=STEPS_OF_ROUND,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        gradient_clip_val=CLIP,
        logger=default_loggers(str(folder), None),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(folder),
        callbacks=[*callbacks, rounds],
    )
    trainer.fit(module, data)
    written = (folder / FILE_NAME).read_text("utf-8").splitlines()
    lines = [json.loads(line) for line in written]
    return rounds.found(flops, [line for line in lines if line["step"] > WARM_UP])


class EqualBlocks(RaggedData):
    """A random text in blocks of equal length, each a row: `layout: blocks` without its short end,
    so that no step is of another shape, and none is compiled for it."""

    def __init__(self, size: Size) -> None:
        rng = np.random.default_rng(0)
        number = size.rows * STEPS * size.length + 1
        text = rng.integers(size.config.vocab_size, size=number)
        batch = {"global_batch_size": size.rows, "micro_batch_size": size.rows}
        super().__init__([text], longest=size.length, **batch)

    def build(self, stage: Stage) -> PlannedDataset:
        store: Any = StreamStore(self.stream, self.tokenizer, "random")
        return BlockDataset(store, TRAIN, self.context_length, seed=None)


def language_model(size: Size, compiles: bool, folder: Path) -> Found:
    """Pre-train, or train adapters, as the command line does."""
    seed_everything(0, verbose=False)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    module = LitCausalLM(
        adamw,
        network=size.config,
        lora=LoraOptions(targets, 16, 32.0, base_dtype="bfloat16") if size.lora else None,
        computation=ComputationOptions(compile=compiles),
    )
    return trained(folder, module, EqualBlocks(size), "tokens", size.flops_per_token)


def of_config(name: str, changes: dict[str, Any], rows: int, folder: Path) -> Found:
    """Train the model of a shipped config at another size, on the data that it makes itself.

    Args:
        name: of the config.
        changes: dotted key -> value.
        rows: of a step, in one micro-batch.
        folder: of the run.
    """
    config = yaml.safe_load(find_config(name).read_text("utf-8"))
    batch = {f"data.init_args.{key}_batch_size": rows for key in ("global", "micro")}
    for key, value in {**changes, **batch}.items():
        *groups, last = key.split(".")
        node = config
        for group in groups:
            node = node[group]
        node[last] = value
    seed_everything(0, verbose=False)
    module, data = built(config)
    return trained(folder, module, data, "samples", None)


def nanogpt_loop(size: Size, folder: Path) -> Found:
    """Train the same network as nanoGPT does: all of it compiled, autocast, full logits of a
    vocabulary that is filled up."""
    torch.manual_seed(0)
    with DEVICE:
        network = Decoder(replace(size.config, vocab_size=size.filled_vocabulary))

    def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(plain_logits(network, inputs).flatten(0, 1), labels.flatten())

    return steps(size, torch.compile(loss_of), list(network.parameters()))


def transformers_loop(size: Size, folder: Path) -> Found:
    """Train the same shape of transformers under accelerate."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(_config(size), dtype=torch.float32)
    model = Accelerator(mixed_precision="bf16").prepare(model.train())

    def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
        logits = model(inputs, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return steps(size, loss_of, list(model.parameters()))


def _config(size: Size) -> Any:
    """Return the network's shape as transformers has it; without dropout, as ours."""
    from transformers import GPT2Config, LlamaConfig

    c = size.config
    if c.positions == "learned":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2Config(
            vocab_size=size.filled_vocabulary,
            n_positions=size.length,
            n_embd=c.hidden_size,
            n_layer=c.num_layers,
            n_head=c.num_heads,
            **dropout,
        )
    return LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.kv_heads,
        intermediate_size=c.inner_size,
        tie_word_embeddings=c.tied,
        max_position_embeddings=size.length,
    )


def steps(size: Size, loss_of: Callable[[Tensor, Tensor], Tensor], parameters: list[Any]) -> Found:
    """Return what a loop finds that trains on random rows, which lie on the device already.

    Args:
        loss_of: inputs and labels -> mean loss.
    """
    rounds, optimizer = Rounds(), adamw(parameters)
    shape = (size.rows, size.length + 1)
    for _ in range(STEPS):
        ids = torch.randint(size.config.vocab_size, shape, device=DEVICE)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = loss_of(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        rounds.note(size.rows * size.length)
    return rounds.found(size.flops_per_token)


def ceilings(is_small: bool, folder: Path) -> dict[str, float]:
    """Return what the device does at most: FLOP/s of a matrix product in bfloat16, and bytes/s
    that a copy within its memory reads and writes."""

    def least_seconds(rounds: int, work: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(rounds):
            begun = clock()
            work()
            seconds.append(clock() - begun)
        return min(seconds)

    size = 256 if is_small else 8192
    a = torch.randn(size, size, device=DEVICE).to(torch.bfloat16)
    source = torch.ones(FEW_FLOATS if is_small else COPIED_FLOATS, device=DEVICE)
    target = torch.empty_like(source)
    product = 2 * size**3 / least_seconds(20, lambda: torch.mm(a, a))
    copy = 2 * source.nbytes / least_seconds(10, lambda: target.copy_(source))
    return {"product": product, "copy": copy}


def to_its_loss(text: Path, folder: Path) -> dict[str, float]:
    """Train the published Shakespeare run by the command line; return its best validation loss in
    nats per character, its seconds, the start included, and the tokens/s of its median step."""
    begun = time.perf_counter()
    command = ["-m", "lit_models", "fit", "--config", "causal_lm/shakespeare_gpu.yaml"]
    command += [f"--data.train_files={text}", f"--trainer.default_root_dir={folder}"]
    # Not by `run`, whose mark would hide it from the one that ends this process in time.
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr).strip()[-2000:])
    seconds = time.perf_counter() - begun
    header, *rows = (folder / "metrics.csv").read_text("utf-8").splitlines()
    column = header.split(",").index("val/loss")
    losses = [float(value) for row in rows if (value := row.split(",")[column])]
    lines = (json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines())
    steps = [line["targets"]["tokens"] / line["seconds"] for line in lines if "seconds" in line]
    return {"loss": min(losses), "seconds": seconds, "rate": statistics.median(steps)}

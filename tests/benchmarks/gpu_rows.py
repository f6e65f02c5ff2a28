"""The rows of the GPU benchmark: each trains one network and says how fast, in its own process."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint

from lit_models import LitCausalLM
from lit_models.causal_lm.building import ComputationOptions
from lit_models.causal_lm.lora import LoraOptions
from lit_models.causal_lm.network import Decoder, DecoderConfig
from lit_models.causal_lm.presets import PRESETS
from lit_models.commands._run_config import built
from lit_models.config_files import find_config
from lit_models.training.callbacks import default_callbacks
from lit_models.training.loggers import default_loggers
from tests.benchmarks.language_model_peers import plain_logits
from tests.benchmarks.language_model_runs import RaggedData
from tests.benchmarks.test_gpu_pretraining import flops_per_token

WARM_UP, ROUNDS, STEPS_OF_ROUND = 5, 3, 5
STEPS = WARM_UP + ROUNDS * STEPS_OF_ROUND
SEVEN_B = replace(
    PRESETS["1b"],
    **{"vocab_size": 32_000, "hidden_size": 4096, "num_layers": 32, "num_heads": 32},
    **{"num_kv_heads": 32, "feed_forward": 11_008, "tied": False},
)
ONE_B = replace(PRESETS["1b"], vocab_size=128_256)
SMALL = {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "max_positions": 64}
adamw = partial(torch.optim.AdamW, lr=1e-4, fused=True)


@dataclass(frozen=True)
class Size:
    """One shape of a language model, and how much of it a step takes.

    Args:
        config: of the network.
        rows: of a micro-batch, all of `length` positions.
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
    def flops_per_token(self) -> float:
        """Of forward and backward; without the gradients of weights that stand still."""
        whole = flops_per_token(self.config, self.length)
        return whole * 2 / 3 if self.lora else whole


SIZES = {
    "gpt2-124m": Size(PRESETS["gpt2-124m"], rows=32, length=1024),
    "1b": Size(ONE_B, rows=8, length=2048),
    "7b, LoRA": Size(SEVEN_B, rows=4, length=2048, lora=True),
}


class Rounds(Callback):
    """Notes the seconds of each round of steps; a GPU is waited for between rounds alone."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.amounts: list[int] = []
        self._began, self._steps, self._amount = 0.0, 0, 0

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.note(batch["load"]["tokens"])

    def note(self, amount: int) -> None:
        """Count a step that trained on so much."""
        self._steps, self._amount = self._steps + 1, self._amount + amount
        if self._steps < WARM_UP or (self._steps - WARM_UP) % STEPS_OF_ROUND:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._steps > WARM_UP:
            self.seconds.append(now - self._began)
            self.amounts.append(self._amount)
        self._began, self._amount = now, 0

    def found(self, unit: str, flops: float | None = None) -> dict[str, Any]:
        """Return what the row says of itself."""
        rates = [amount / s for amount, s in zip(self.amounts, self.seconds, strict=True)]
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        return {"rates": rates, "unit": unit, "flops": flops, "memory_gib": peak / 2**30}


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def trained(folder: Path, module: Any, data: Any, unit: str, flops: float | None) -> dict[str, Any]:
    """Train with everything on but checkpoints, in bfloat16 on a GPU; return what was found."""
    rounds = Rounds()
    # Those of a billion weights would take longer than the steps.
    callbacks = [c for c in default_callbacks() if not isinstance(c, Checkpoint)]
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
        max_steps=STEPS,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        logger=default_loggers(folder, None),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(folder),
        callbacks=[*callbacks, rounds],
    )
    trainer.fit(module, data)
    return rounds.found(unit, flops)


def documents(size: Size) -> list[np.ndarray]:
    """Return rows of random tokens, enough for all steps, without padding."""
    rng = np.random.default_rng(0)
    number = size.rows * (STEPS + 1)
    return list(rng.integers(size.config.vocab_size, size=(number, size.length + 1)))


def ours(size: Size, folder: Path, compiles: bool) -> dict[str, Any]:
    seed_everything(0, verbose=False)
    lora = LoraOptions(["q_proj", "k_proj", "v_proj", "o_proj"], 16, 32.0, base_dtype="bfloat16")
    module = LitCausalLM(
        adamw,
        network=size.config,
        lora=lora if size.lora else None,
        computation=ComputationOptions(compile=compiles),
    )
    data = RaggedData(documents(size), longest=size.length, global_batch_size=size.rows)
    return trained(folder, module, data, "tokens/s", size.flops_per_token)


def loop(size: Size, folder: Path) -> dict[str, Any]:
    """Train the same network as nanoGPT does: compiled, autocast, full logits."""
    torch.manual_seed(0)
    network = Decoder(size.config).to(device())
    logits = torch.compile(partial(plain_logits, network))
    return plain_steps(size, lambda ids: logits(ids), list(network.parameters()))


def transformers_model(size: Size, folder: Path) -> dict[str, Any]:
    """Train the same shape of transformers under accelerate."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    c = size.config
    if c.positions == "learned":
        config: Any = GPT2Config(
            vocab_size=c.vocab_size, n_positions=size.length, n_embd=c.hidden_size,
            n_layer=c.num_layers, n_head=c.num_heads,
        )  # fmt: skip
    else:
        config = LlamaConfig(
            vocab_size=c.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads, num_key_value_heads=c.kv_heads,
            intermediate_size=c.inner_size, tie_word_embeddings=c.tied,
            max_position_embeddings=size.length,
        )  # fmt: skip
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    model = accelerator.prepare(AutoModelForCausalLM.from_config(config))
    return plain_steps(size, lambda ids: model(ids).logits, list(model.parameters()))


def plain_steps(
    size: Size, logits: Callable[[torch.Tensor], torch.Tensor], parameters: list[Any]
) -> dict[str, Any]:
    """Return what a loop finds that trains on random rows, its loss read in every step."""
    rounds, optimizer = Rounds(), adamw(parameters)
    for _ in range(STEPS):
        ids = torch.randint(size.config.vocab_size, (size.rows, size.length + 1)).to(device())
        with torch.autocast(device().type, torch.bfloat16, enabled=torch.cuda.is_available()):
            loss = torch.nn.functional.cross_entropy(
                logits(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten()
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        rounds.note(size.rows * size.length)
    return rounds.found("tokens/s", size.flops_per_token)


def of_config(name: str, changes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train the model of a shipped config at another size, on the data that it makes itself."""
    config = yaml.safe_load(find_config(name).read_text("utf-8"))
    for key, value in changes.items():
        *groups, last = key.split(".")
        node = config
        for group in groups:
            node = node[group]
        node[last] = value
    seed_everything(0, verbose=False)
    return trained(folder, *built(config), "tokens/s", None)


def has_accelerate() -> bool:
    return importlib.util.find_spec("accelerate") is not None

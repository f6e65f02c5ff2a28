"""What the GPU benchmark trains: shapes of networks, how much a step takes, and its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from lit_models.causal_lm.network import PRESETS, Decoder, DecoderConfig
from tests.distributed.launch import ROOT

SHAKESPEARE = ROOT.parent / "shared" / "data" / "shakespeare" / "input.txt"
SMALL = {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "max_positions": 64}
# As nanoGPT has it: 50,257 is a multiple of nothing, and its products take another, slower kernel.
GPT2 = replace(PRESETS["gpt2-124m"], vocab_size=50_304)
ONE_B = replace(PRESETS["1b"], vocab_size=128_256)
SEVEN_B = replace(
    PRESETS["1b"],
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

    def halved(self, times: int) -> Size:
        """Return the same with so many times half the rows, at least one."""
        return replace(self, rows=max(1, self.rows >> times))

    @property
    def flops_per_token(self) -> float:
        """Of forward and backward."""
        return flops_per_token(self.config, self.length, are_weights_learnt=not self.lora)


SIZES = {
    "gpt2-124m": Size(GPT2, rows=32, length=1024),
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
    themselves nothing is counted.

    Source: Chowdhery et al. 2022, appendix B.
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

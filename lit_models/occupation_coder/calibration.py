"""Temperatures that make both heads' probabilities honest, found while validating.

The nats of the true codes are summed at a fixed set of temperatures; the best of them, refined by a
parabola, is kept. Sums over records are exact on any number of devices, and no logits are stored.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_models.occupation_coder.loss import best_orders, flat_nats
from lit_models.occupation_coder.network import Memory, OccupationNetwork
from lit_models.occupation_coder.scoring import legal_log_softmax
from lit_models.occupation_coder.trie import NONE

TERMS = ("seq2seq", "flat")  # each has a temperature
LOWEST, HIGHEST, NUM_TEMPERATURES = 0.35, 5.0, 13


class TemperatureSearch(Metric):
    """Weighted nats at each temperature; `compute` gives the best temperature."""

    full_state_update = False
    nats: Tensor

    def __init__(self) -> None:
        super().__init__()
        zeros = torch.zeros(NUM_TEMPERATURES, dtype=torch.float64)
        self.add_state("nats", zeros, dist_reduce_fx="sum")

    def set_dtype(self, dst_type: torch.dtype | str) -> "TemperatureSearch":
        """Keeps float64 whatever the precision of the module."""
        return self

    def update(self, nats: Tensor, weight: Tensor) -> None:
        """Adds records. Args: nats [B, temperatures], weight [B]."""
        nats = nats.double().masked_fill((weight == 0)[:, None], 0.0)
        self.nats = self.nats + (nats * weight.double()[:, None]).sum(0)

    def compute(self) -> Tensor:
        """Temperature of the fewest nats, [] float64; 1 before any record."""
        if not self.nats.any():
            return torch.ones((), dtype=torch.float64)
        steps = temperatures().log()
        best = int(self.nats.argmin().clamp(1, NUM_TEMPERATURES - 2))
        below, at, above = self.nats[best - 1 : best + 2].unbind()
        bend = below - 2 * at + above
        shift = (0.5 * (below - above) / bend).clamp(-1, 1) if bend > 0 else torch.zeros_like(at)
        return (steps[best] + shift.cpu() * (steps[1] - steps[0])).exp()


def temperatures() -> Tensor:
    """The temperatures tried, evenly spaced in their logarithm [NUM_TEMPERATURES] float64."""
    ends = torch.tensor([LOWEST, HIGHEST], dtype=torch.float64).log()
    return torch.linspace(*ends.tolist(), NUM_TEMPERATURES, dtype=torch.float64).exp()


def given_temperature(given: Mapping[str, float]) -> dict[str, float]:
    """Return the temperature of each head, 1 where none is given.

    Raises:
        ValueError: of a head that there is not, or not above 0.
    """
    for name, value in given.items():
        if name not in TERMS:
            raise ValueError(f"temperature has {name!r}; its names are {' and '.join(TERMS)}.")
        if not 0 < value < math.inf:
            raise ValueError(
                f"temperature.{name} must be a number above 0, got {value}; 1 changes nothing."
            )
    return {**dict.fromkeys(TERMS, 1.0), **given}


@torch.no_grad()
def nats_by_temperature(
    network: OccupationNetwork, memory: Memory, flat_logits: Tensor, batch: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Nats of the true codes, "seq2seq" (in their best order) and "flat" [B, temperatures].

    Args:
        network: in eval mode.
        memory: of B records.
        flat_logits: [B, C].
        batch: `code_ids` [B, K], NONE where there is no code, and its `num_with_codes`.
    """
    trie = network.trie
    code_ids = batch["code_ids"]
    ordered = best_orders(network.decoder, memory, code_ids, batch["num_with_codes"])
    targets = trie.targets(ordered)
    logits = network.decoder(targets, memory)
    legal = trie.legal_targets(ordered, targets.shape[1])
    seq2seq, flat = [], []
    for temperature in temperatures().tolist():
        steps = legal_log_softmax(logits, legal, temperature)
        chosen = steps.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
        seq2seq.append(-torch.where(targets == NONE, 0.0, chosen).sum(1))
        flat.append(flat_nats(flat_logits / temperature, code_ids))
    return {"seq2seq": torch.stack(seq2seq, 1), "flat": torch.stack(flat, 1)}

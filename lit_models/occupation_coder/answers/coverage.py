"""Sets of codes that hold the truth in a given share of records.

Split conformal prediction: a set has every code whose probability is at least a limit, which is the
k-th smallest of n held-out records' probabilities of their least likely true code, with k =
floor((1 - coverage) (n + 1)). Of records like those, it then holds all true codes in the share
`coverage` or more, whatever the model.

Source: Vovk, Gammerman and Shafer 2005, "Algorithmic Learning in a Random World"; Angelopoulos and
Bates 2023, "Conformal Prediction: A Gentle Introduction".
Shapes: B batch, K codes per record, C codes, W beams.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric

from lit_models.occupation_coder.decoding import DecodingOptions, beam_search
from lit_models.occupation_coder.network import Memory, OccupationNetwork
from lit_models.training.metrics import SumCount

SHIFT = 12  # bits of a float32 below those that are kept: sign, exponent, 11 of the fraction
NUM_BINS = (0x3F800000 >> SHIFT) + 1  # up to 1.0
LEAST_BEAMS = 20
LIMITS = "set_limits"  # key of the recipe


@torch.no_grad()
def code_marginals(
    network: OccupationNetwork, memory: Memory, flat_logits: Tensor, options: DecodingOptions
) -> Tensor:
    """Probability that each code is among those of a text [B, C] float32, by the method's heads.

    The decoder's is the sum over the beams that hold the code. Temperatures are left out: the
    validation that finds a limit finds them at the same time.
    """
    share = options.share
    marginals = share * flat_logits.float().sigmoid()
    if share < 1:
        width = max(options.beam_size, LEAST_BEAMS)
        beams = beam_search(network.decoder, memory, width, num_results=width)
        num_codes = network.trie.num_codes
        column = torch.where(beams.code_ids < 0, num_codes, beams.code_ids).flatten(1)
        weight = beams.log_probability.exp()[..., None].expand_as(beams.code_ids).flatten(1)
        found = weight.new_zeros(len(weight), num_codes + 1).scatter_add(1, column, weight)
        marginals = marginals + (1 - share) * found[:, :num_codes].float()
    return marginals.clamp(0, 1)


class LimitSearch(Metric):
    """Counts of records by the probability of their least likely true code.

    A bin holds the probabilities of equal first 20 bits, less than 0.05 % apart: sums over them are
    exact on any devices, and the limit, a bin's lowest value, is never too high.
    """

    counts: Tensor

    def __init__(self, coverage: float) -> None:
        super().__init__()
        self.coverage = coverage
        zeros = torch.zeros(NUM_BINS, dtype=torch.float64)
        self.add_state("counts", zeros, dist_reduce_fx="sum")

    def update(self, probability: Tensor, weight: Tensor) -> None:
        """Adds records. Args: probabilities [B] float32, and weights [B], 0 or 1."""
        bins = (probability.contiguous().view(torch.int32) >> SHIFT).long()
        self.counts = self.counts.double().index_add(0, bins, weight.double())

    def compute(self) -> Tensor:
        """The limit [] float32; 0, which every code reaches, where the records are too few."""
        number = round(float(self.counts.sum()))
        place = math.floor(round((1 - self.coverage) * (number + 1), 6))
        if place < 1:
            return torch.zeros(())
        found = int((self.counts.cumsum(0) < place).sum())
        return torch.tensor([found << SHIFT], dtype=torch.int32).view(torch.float32)[0]


class PlausibleSets(nn.Module):
    """The sets of a module's decoding options, their limit and their coverage in a test."""

    def __init__(self, options: DecodingOptions) -> None:
        super().__init__()
        assert options.coverage is not None
        self.options, self.name = options, f"{options.coverage:g}"
        self.search = LimitSearch(options.coverage)
        self.scores = nn.ModuleDict({"set_coverage": SumCount(), "set_size": SumCount()})

    def observe(
        self, network: OccupationNetwork, memory: Memory, flat: Tensor, batch: Mapping[str, Any]
    ) -> None:
        """Add a batch of held-out records with these flat logits [B, C]."""
        marginals = code_marginals(network, memory, flat, self.options)
        self.search.update(least_likely(marginals, batch["code_ids"]), batch["weight"])

    def limits(self) -> dict[str, float]:
        """What the recipe keeps of the records so far, which are forgotten."""
        limit = float(self.search.compute())
        self.search.reset()
        return {self.name: limit}

    def limit(self, recipe: Mapping[str, Any]) -> float:
        """The limit that a checkpoint keeps; ValueError where it has none of this coverage."""
        limits = recipe.get(LIMITS, {})
        if self.name not in limits:
            raise ValueError(
                f"decoding.coverage is {self.name}, and the checkpoint has "
                f"{'a limit for ' + ', '.join(limits) if limits else 'no limit for sets'}: train "
                "with that coverage, or let one step without a rate find it (fit with "
                "--model.init_from=CKPT --model.optimizer.lr=0 --trainer.max_steps=1)."
            )
        return limits[self.name]

    def score(
        self,
        recipe: Mapping[str, Any],
        network: OccupationNetwork,
        memory: Memory,
        flat: Tensor,
        batch: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Add a batch of a test; return the metrics by name: share of records whose set holds all
        their codes, and codes per set."""
        marginals, weight = code_marginals(network, memory, flat, self.options), batch["weight"]
        limit = self.limit(recipe)
        is_held = least_likely(marginals, batch["code_ids"]) >= limit
        self.scores["set_coverage"].update(is_held * weight, weight)
        self.scores["set_size"].update((marginals >= limit).sum(1) * weight, weight)
        return dict(self.scores.items())

    def told(
        self, recipe: Mapping[str, Any], network: OccupationNetwork, memory: Memory, flat: Tensor
    ) -> dict[str, Tensor]:
        """Return `plausible` [B, ceil(C / 8)] uint8, a bit per code, from the lowest."""
        is_in = code_marginals(network, memory, flat, self.options) >= self.limit(recipe)
        bits = F.pad(is_in, (0, -is_in.shape[1] % 8)).view(len(is_in), -1, 8)
        values = bits * (1 << torch.arange(8, device=bits.device))
        return {"plausible": values.sum(-1).to(torch.uint8)}


def least_likely(marginals: Tensor, code_ids: Tensor) -> Tensor:
    """The probability of each record's least likely true code [B], of codes [B, K], NONE where
    there is none."""
    found = marginals.gather(1, code_ids.clamp(min=0))
    return found.masked_fill(code_ids < 0, 1.0).amin(1)

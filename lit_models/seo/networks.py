"""Networks around a text encoder and their losses: bi-encoder, cross-encoder, scoring heads.

Shapes: R rows, P pairs, B texts or queries, K documents per query, C chunks, T positions, D hidden,
W width of vectors, L levels, classes or labels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from datamodules.core.batches import RetrievalBatch, ScoredTextBatch
from datamodules.core.plan import check_range
from datamodules.search.candidates import DISTILLED
from datamodules.search.queries import NO_DOCUMENT
from lit_models.seo.encoders import TextEncoder
from lit_models.training.dropout import keyed_texts
from lit_models.training.metrics import LossSum, in_float32

TEMPERATURES = (0.005, 1.0)


@dataclass(frozen=True)
class TemperatureOptions:
    """Temperature that divides cosines before the softmax, between 0.005 and 1.

    Args:
        start: initial value, and the constant value if it is not trained.
        learns: whether it is trained.
    """

    start: float = 0.05
    learns: bool = True

    def __post_init__(self) -> None:
        low, high = TEMPERATURES
        if not low < self.start < high:
            raise ValueError(f"temperature.start must be between {low} and {high}: {self.start}.")


class Temperature(nn.Module):
    """Temperature, whose logarithm is a sigmoid of the parameter, scaled to the bounds."""

    def __init__(self, options: TemperatureOptions) -> None:
        super().__init__()
        bounds = torch.tensor(TEMPERATURES, dtype=torch.float64).log()
        self.low, self.width = float(bounds[0]), float(bounds[1] - bounds[0])
        share = (torch.tensor(options.start, dtype=torch.float64).log() - self.low) / self.width
        # In the default dtype, as a checkpoint of a float64 run is loaded before Lightning converts
        # the module, and would lose half its digits in a float32 parameter.
        self.position = nn.Parameter(torch.full((1,), share.logit().item()), options.learns)

    def forward(self) -> Tensor:
        """Return the temperature []."""
        return (self.low + self.width * in_float32(self.position).sigmoid()).exp().squeeze(0)


class BiEncoder(nn.Module):
    """One encoder for queries and documents."""

    def __init__(self, encoder: TextEncoder, temperature: TemperatureOptions) -> None:
        super().__init__()
        self.encoder, self.temperature = encoder, Temperature(temperature)

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return unit vectors [R, W] of texts [R, T]."""
        return F.normalize(in_float32(self.encoder(input_ids, attention_mask)), dim=-1)

    def encode_samples(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        is_query: bool,
        num_samples: int,
        chunk: int | None,
    ) -> Tensor:
        """Return unit vectors [R, W] for a training step.

        Args:
            input_ids, attention_mask: [R, T]; the texts of a sample are adjacent rows.
            num_samples: in the micro-batch, a divisor of R.
            chunk: number of rows whose activations are in memory at a time; the backward pass
                recomputes each chunk. `None` keeps all activations.

        Source of the idea: Gao et al. 2021, "Scaling deep contrastive learning batch size under
        memory limited setup"; here autograd recomputes the chunks in one backward pass.
        """
        per_sample = len(input_ids) // num_samples
        row = torch.arange(len(input_ids), device=input_ids.device)
        sample, text = row // per_sample, row % per_sample + (0 if is_query else 1)

        def encoded(part: slice) -> Tensor:
            with keyed_texts(self, sample[part], text[part]):
                return self.encode(input_ids[part], attention_mask[part])

        if chunk is None:
            return encoded(slice(0, len(row)))
        parts = [slice(start, start + chunk) for start in range(0, len(row), chunk)]
        return torch.cat([checkpoint(encoded, part, use_reentrant=False) for part in parts])


def in_batch_loss(
    queries: Tensor,
    answers: Tensor,
    documents: Tensor,
    document: Tensor,
    known: Tensor,
    temperature: Tensor,
    weight: Tensor,
) -> LossSum:
    """Return the cross-entropy of each query's answer among all documents, in nats.

    Args:
        queries, answers: [B, W] unit vectors of queries and of the documents that answer them.
        documents: [M, W] unit vectors of all documents of the step, including the answers.
        document: [M] int64, indices of the documents; -1 = never a negative.
        known: [B, R] int64, documents that are not negatives of the query: known relevant ones, and
            its answer, so that copies of it do not count; padded with -1.
        temperature: [].
        weight: [B], 0 for a filler row.

    Source: van den Oord et al. 2018, "Representation learning with contrastive predictive coding".
    """
    own = (queries * answers).sum(-1, keepdim=True) / temperature  # [B, 1]
    others = queries @ documents.T / temperature  # [B, M]
    is_known = (known[:, :, None] == document).any(1)
    others = others.masked_fill(is_known | (document == NO_DOCUMENT), -torch.inf)
    nats = torch.cat([own, others], 1).logsumexp(1) - own.squeeze(1)
    return LossSum.of(nats, weight)


def shortened(vectors: Tensor, size: int | None) -> Tensor:
    """Return the first `size` components of unit vectors [R, W], normalised; `None` takes all."""
    return vectors if size is None else F.normalize(vectors[:, :size], dim=-1)


def nested(
    sizes: Sequence[int], queries: Tensor, answers: Tensor, documents: Tensor, *rest: Tensor
) -> LossSum:
    """Return the mean of `in_batch_loss` over vectors of these sizes; if empty, over whole vectors.
    Source: Kusupati et al. 2022, Matryoshka representation learning, equation 1, equal weights."""
    vectors = (queries, answers, documents)
    losses = [in_batch_loss(*(shortened(x, n) for x in vectors), *rest) for n in sizes or (None,)]
    total = torch.stack([loss.total for loss in losses]).sum() / len(losses)
    return LossSum(total, losses[0].count)


@dataclass(frozen=True)
class Distillation:
    """Distillation of a ranker's scores for each query's own documents, in addition to the loss
    over all documents; `data.negatives` reads the scores from the ranker's run.

    Args:
        weight: factor of this loss.
        temperature: divides the ranker's scores; the retriever has its own temperature.

    Source: Ren et al. 2021, RocketQAv2, equation 5, with a fixed teacher.
    """

    weight: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_range("distillation", 1e-6, weight=self.weight, temperature=self.temperature)


def taught_terms(
    options: Distillation | None,
    queries: Tensor,
    documents: Tensor,
    batch: RetrievalBatch,
    temperature: Tensor,
) -> dict[str, LossSum]:
    """Return KL(ranker || retriever) of the softmax over a query's documents, in nats, times its
    weight; 0 for queries with fewer than two scored documents. Without options, return {}.

    Args:
        queries: [B, W] unit vectors; documents: [B * K, W].
        temperature: [] of the retriever.
    """
    if options is None:
        return {}
    scores = batch["teacher"]  # [B, K], NaN = missing
    own = (queries[:, None] * documents.view(*scores.shape, -1)).sum(-1) / temperature
    takes_part = ~scores.isnan() & (~scores.isnan()).sum(1, keepdim=True).gt(1)
    hidden = own.new_tensor(-1e9)  # probability and gradient become 0
    target = torch.where(takes_part, scores.to(own) / options.temperature, hidden).log_softmax(1)
    predicted = torch.where(takes_part, own, hidden).log_softmax(1)
    nats = (target.exp() * (target - predicted) * takes_part).sum(1)
    return {DISTILLED: LossSum.of(options.weight * nats, batch["weight"])}


class CrossEncoder(nn.Module):
    """Scores a query and a document in one row.

    Args:
        adds_prior: add the first stage's score times a learned weight. The network's own score is
            initially 0, so that it starts with the first stage's order.
        has_offset: whether the score has a bias. If the loss depends only on differences of scores,
            the bias's gradient would be only rounding errors.
    """

    def __init__(
        self, encoder: TextEncoder, adds_prior: bool = False, has_offset: bool = False
    ) -> None:
        super().__init__()
        self.encoder = encoder
        # Without this layer, the bias of the encoder's last norm would only shift all scores.
        self.dense = nn.Linear(encoder.width, encoder.width)
        self.score = nn.Linear(encoder.width, 1, bias=has_offset)
        self.prior_weight: nn.Parameter | None = None
        if adds_prior:
            for parameter in self.score.parameters():
                nn.init.zeros_(parameter)
            self.prior_weight = nn.Parameter(torch.ones(1))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        segment_ids: Tensor,
        lengths: np.ndarray,
        num_parts: int = 1,
    ) -> Tensor:
        """Return scores [P] of rows [P, T].

        Args:
            input_ids, attention_mask, segment_ids: of a RankingBatch.
            lengths: [P] number of tokens of each row.
            num_parts: number of consecutive parts in which the rows are computed, at most P.
        """
        bounds, scores = [len(lengths) * part // num_parts for part in range(num_parts + 1)], []
        for start, end in pairwise(bounds):
            columns = (slice(start, end), slice(int(lengths[start:end].max())))
            rows = (input_ids[columns], attention_mask[columns], segment_ids[columns])
            vector = self.encoder(*rows).to(self.dense.weight.dtype)  # of a base in bfloat16
            scores.append(self.score(torch.tanh(self.dense(vector))).squeeze(-1))
        return in_float32(torch.cat(scores))

    def candidates(self, pairs: Tensor, index: Tensor, prior: Tensor) -> Tensor:
        """Return scores [B, K], -inf for missing candidates.

        Args:
            pairs: [P] scores of rows.
            index: [B, K] int64, row of each candidate; -1 = no candidate.
            prior: [B, K] score of the first stage.
        """
        scores = pairs[index.clamp(min=0)]
        if self.prior_weight is not None:
            scores = scores + self.prior_weight * prior.to(scores)
        return scores.masked_fill(index < 0, -torch.inf)


Kind = Literal["listnet", "bce", "lambda"]
NONE = -1e9  # logit of excluded candidates: probability and gradient are 0


@dataclass(frozen=True)
class RankingLoss:
    """Loss of a ranker, a mean or sum within each query, in nats.

    Only judged candidates take part, as unjudged ones may be relevant. A query whose candidates do
    not determine an order has loss 0 and counts in the mean.

    Args:
        kind: `listnet`, cross-entropy of the candidates' softmax against their grades; `bce`,
            binary cross-entropy per candidate, relevant from grade 1 on; `lambda`, pairs of
            different grades, weighted by the change of NDCG if they are swapped.
    """

    kind: Kind = "listnet"

    def __call__(self, scores: Tensor, grades: Tensor) -> Tensor:
        """Return the loss of each query [B]. Args: scores [B, K], -inf for missing candidates;
        grades [B, K], NaN = unjudged."""
        # Scores of NaN take part, so that the run stops instead of ignoring them.
        takes_part = ~grades.isnan() & ((scores > -torch.inf) | scores.isnan())
        scores, grades = scores.masked_fill(~takes_part, 0), grades.masked_fill(~takes_part, 0)
        return LOSSES_OF_QUERIES[self.kind](scores, grades, takes_part)


def listnet(scores: Tensor, grades: Tensor, takes_part: Tensor) -> Tensor:
    """Return the cross-entropy between normalised grades and the softmax of the scores [B].

    Source: Cao et al. 2007, Learning to rank: top-one probabilities with the increasing function
    φ(g) = g for grades, so that grade 0 has no probability, and exp for scores. If all grades are
    equal, they determine no order, and the loss is 0.
    """
    low = grades.masked_fill(~takes_part, torch.inf).amin(1, keepdim=True)
    tells = grades.amax(1, keepdim=True) > low
    grades = grades.clamp(min=0) * tells
    target = grades / grades.sum(1, keepdim=True).clamp(min=1e-9)
    return -(target * scores.masked_fill(~takes_part, NONE).log_softmax(1)).sum(1)


def pointwise_bce(scores: Tensor, grades: Tensor, takes_part: Tensor) -> Tensor:
    """Return the mean binary cross-entropy of the judged candidates [B]; scores are log-odds."""
    nats = F.binary_cross_entropy_with_logits(scores, grades.clamp(0, 1), reduction="none")
    return (nats * takes_part).sum(1) / takes_part.sum(1).clamp(min=1)


def lambda_loss(scores: Tensor, grades: Tensor, takes_part: Tensor) -> Tensor:
    """Return the weighted sum [B] of log(1 + exp(-(better - worse))) over pairs of unequal grades.

    Let G be the gain 2**grade - 1, divided by the DCG of the ideal ranking, r the rank by score and
    D(r) = log2(1 + r). A pair's weight is |G_i - G_j| (ρ + 10 δ), where
    ρ = |1/D(r_i) - 1/D(r_j)| and δ = |1/D(|r_i - r_j|) - 1/D(|r_i - r_j| + 1)|.

    Source: NDCG-Loss2++ of Wang et al. 2018, The LambdaLoss framework for ranking metric
    optimization, with μ = 10 as there, and natural logarithms. Only judged candidates are ranked;
    ties keep the order of the candidates.
    """
    gains = grades.clamp(min=0).exp2() - 1
    ranks = torch.arange(1, scores.shape[1] + 1, device=scores.device).to(scores)
    best = (gains.sort(dim=1, descending=True).values / (1 + ranks).log2()).sum(1)
    gains = gains / best.clamp(min=1e-9)[:, None]
    ranked = scores.detach().masked_fill(~takes_part, -torch.inf)
    order = ranked.argsort(dim=1, descending=True, stable=True)
    rank = torch.zeros_like(scores).scatter(1, order, ranks.expand_as(scores))
    inverse = 1 / (1 + rank).log2()
    exchanged = (inverse[:, :, None] - inverse[:, None]).abs()
    apart = (rank[:, :, None] - rank[:, None]).abs()
    between = 1 / (1 + apart.clamp(min=1)).log2() - 1 / (2 + apart).log2()
    discounts = exchanged + 10 * between * (apart > 0)
    weights = (gains[:, :, None] - gains[:, None]).abs() * discounts
    nats = F.softplus(scores[:, None] - scores[:, :, None])
    is_pair = takes_part[:, :, None] & takes_part[:, None] & (grades[:, :, None] > grades[:, None])
    return (weights * nats * is_pair).sum((1, 2))


LOSSES_OF_QUERIES = {"listnet": listnet, "bce": pointwise_bce, "lambda": lambda_loss}


LossName = Literal["mse", "huber", "mae", "cumulative", "cross_entropy"]
LOSSES: dict[str, tuple[LossName, ...]] = {  # kind -> losses, the default first
    "regression": ("mse", "huber", "mae"),
    "ordinal": ("cumulative", "cross_entropy"),
    "binary": ("cross_entropy",),
    "multiclass": ("cross_entropy",),
    "multilabel": ("cross_entropy",),
}
ELEMENTWISE: dict[str, Callable[..., Tensor]] = {  # losses of one number per label
    "mse": F.mse_loss,
    "huber": F.huber_loss,
    "mae": F.l1_loss,
    "cross_entropy": F.binary_cross_entropy_with_logits,
}
SMALLEST_GAP = 1e-3  # between thresholds, so that every level keeps a probability


@dataclass(frozen=True)
class HeadOptions:
    """Loss of a head.

    Args:
        loss: regression: `mse`, `huber` (linear beyond one standard deviation) or `mae`, of labels
            in standard deviations of the training rows; ordinal: `cumulative` or `cross_entropy`;
            other kinds: `cross_entropy`. `None` takes the first of these.
        weight: factor of the loss; 0 reports the head without training it.
    """

    loss: LossName | None = None
    weight: float = 1.0

    def loss_of(self, name: str, kind: str) -> LossName:
        """Return the loss of a head of this name and kind."""
        loss = self.loss or LOSSES[kind][0]
        if loss not in LOSSES[kind]:
            raise ValueError(
                f'model.heads.{name}: loss "{loss}" does not fit a {kind} head; take '
                f"{' or '.join(LOSSES[kind])}."
            )
        return loss


class Head(nn.Module):
    """Linear head with one output, or one per level, class or label.

    Args: facts of the recipe: `kind`, `classes`, and for a regression `mean` and `std`; loss, which
    must fit the kind; width of the vectors."""

    def __init__(self, facts: dict[str, Any], loss: LossName, width: int) -> None:
        super().__init__()
        self.kind, self.loss_name = facts["kind"], loss
        self.mean, self.std = facts.get("mean", 0.0), facts.get("std", 1.0)
        levels = len(facts["classes"] or ())
        if loss == "cumulative":
            # Thresholds replace the bias.
            self.output = nn.Linear(width, 1, bias=False)
            start = torch.linspace(-1.0, 1.0, levels - 1) * (levels - 2) / 2
            self.first = nn.Parameter(start[:1].clone())
            self.gaps = nn.Parameter(torch.full((levels - 2,), 0.5))
        else:
            size = levels if self.kind in ("ordinal", "multiclass", "multilabel") else 1
            self.output = nn.Linear(width, size)

    def forward(self, vectors: Tensor) -> Tensor:
        """Return outputs [B, P] of vectors [B, D]: a value in standard deviations, logits, or for
        `cumulative` log-probabilities of the levels."""
        scores = in_float32(self.output(vectors.to(self.output.weight.dtype)))
        return self._log_levels(scores) if self.loss_name == "cumulative" else scores

    def loss(self, outputs: Tensor, target: Tensor, is_labelled: Tensor, weight: Tensor) -> LossSum:
        """Return the loss over the labels that are not missing.

        Args:
            outputs: [B, P] from `forward`.
            target: [B], or [B, L] of a multilabel head; any number for missing labels.
            is_labelled: bool, of the target's shape.
            weight: [B], 0 for a filler row.
        """
        counted = is_labelled * (weight if target.dim() == 1 else weight[:, None])
        return LossSum.of(self._losses(outputs, target, counted > 0), counted)

    def loss_of_texts(self, outputs: Tensor, target: Tensor, is_labelled: Tensor) -> Tensor:
        """Return the mean loss over each text's labels [B], 0 without any. Args: as in `loss`."""
        losses = self._losses(outputs, target, is_labelled)
        known = is_labelled.to(losses.dtype).reshape(len(losses), -1)
        return (losses.reshape(known.shape) * known).sum(1) / known.sum(1).clamp(min=1)

    def prediction(self, outputs: Tensor) -> Tensor:
        """Return predictions [B, P] float64: a regression's value in the unit of its labels, else
        probabilities of the positive class, or of the levels, classes or labels."""
        outputs = outputs.double()
        if self.kind == "regression":
            return outputs * self.std + self.mean
        if self.kind in ("binary", "multilabel"):
            return outputs.sigmoid()
        return outputs.softmax(-1)

    def _losses(self, outputs: Tensor, target: Tensor, is_there: Tensor) -> Tensor:
        # Replaced before the loss, as 0 x NaN would make the gradient NaN.
        target = target.where(is_there, 0.0)
        if self.kind in ("ordinal", "multiclass"):
            return F.cross_entropy(outputs, target.long(), reduction="none")
        if self.kind == "regression":
            target = (target - self.mean) / self.std  # before the cast below loses digits
        outputs = outputs.reshape(target.shape)  # [B], or [B, L] of a multilabel head
        return ELEMENTWISE[self.loss_name](outputs, target.to(outputs), reduction="none")

    def _log_levels(self, scores: Tensor) -> Tensor:
        """Log-probabilities [B, L] of proportional odds: P(level <= k) = sigmoid(threshold k -
        score), thresholds ascending (McCullagh 1980, Regression Models for Ordinal Data)."""
        steps = F.softplus(in_float32(self.gaps)) + SMALLEST_GAP
        sums = steps.expand(len(steps), -1).tril().sum(1)  # `cumsum` is not deterministic on GPUs
        distance = torch.cat([self.first, self.first + sums]) - scores  # [B, L - 1]
        # sigmoid(b) - sigmoid(a) = sigmoid(b) sigmoid(-a) (1 - exp(a - b)), without cancellation
        lowest, highest = F.logsigmoid(distance[:, :1]), F.logsigmoid(-distance[:, -1:])
        between = F.logsigmoid(distance[:, 1:]) + F.logsigmoid(-distance[:, :-1])
        return torch.cat([lowest, between + torch.log(-torch.expm1(-steps)), highest], 1)


def baseline(facts: dict[str, Any]) -> Tensor:
    """Return the prediction [P] float64 without reading any text, in the units of
    `Head.prediction`: the mean of the training labels, or the shares of classes."""
    if facts["kind"] == "regression":
        return torch.tensor([facts["mean"]], dtype=torch.float64)
    shares = torch.tensor(facts["shares"], dtype=torch.float64)
    return shares[1:] if facts["kind"] == "binary" else shares


PREFIX = "head_"  # of module names, as a head may have the name of a method of nn.Module


class TextScorer(nn.Module):
    """Text encoder with several heads; a text's vector is the mean over its chunks. With
    `learns_weights`, there is one trained log-variance per head."""

    def __init__(self, encoder: TextEncoder, heads: dict[str, Head], learns_weights: bool) -> None:
        super().__init__()
        self.encoder = encoder
        self.heads = nn.ModuleDict({PREFIX + name: head for name, head in heads.items()})
        self.log_variances = nn.ParameterDict(
            {PREFIX + name: nn.Parameter(torch.zeros(1)) for name in heads if learns_weights}
        )

    def forward(self, batch: ScoredTextBatch) -> dict[str, Tensor]:
        """Return head -> outputs [B, P]."""
        chunk_of = batch["chunk_of"]
        row = torch.arange(len(chunk_of), device=chunk_of.device)
        place = row - torch.searchsorted(chunk_of, chunk_of)  # index among the text's chunks
        with keyed_texts(self, chunk_of, place):
            chunks = self.encoder(batch["input_ids"], batch["attention_mask"])
        vectors = pooled_chunks(chunks, chunk_of, len(batch["weight"]))
        return {name.removeprefix(PREFIX): head(vectors) for name, head in self.heads.items()}


def pooled_chunks(chunks: Tensor, chunk_of: Tensor, num_texts: int) -> Tensor:
    """Return the mean of each text's chunks [B, D]. Args: chunks [C, D]; `chunk_of` [C] int64, text
    of each chunk, ascending; every text has at least one chunk."""
    if len(chunks) == num_texts:  # the common case of one chunk per text
        return chunks
    is_of = chunk_of == torch.arange(num_texts, device=chunk_of.device)[:, None]  # [B, C]
    # A matrix product, as its order of summation is fixed on a GPU, too.
    return (is_of.to(chunks) @ chunks) / is_of.sum(1, keepdim=True)

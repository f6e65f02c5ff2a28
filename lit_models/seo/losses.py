"""Losses of rankings: over the candidates of a query, and over all documents of a step.

Each is a mean or sum within a query, in nats unless said otherwise, and counts one per query: the
plan knows that number. Only judged candidates take part (of the teacher's loss, those that it has
scored): nothing is taken for irrelevant because nobody has judged it. A query whose candidates
say nothing has loss 0 and counts. Scores of missing candidates are -inf, their grades NaN.
Shapes: B queries of this device, K candidates of a query, M documents of all devices, W width of
vectors, R documents that are known of a query.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datamodules.search.queries import NO_DOCUMENT
from lit_models.training.metrics import LossSum


@dataclass(frozen=True)
class TemperatureOptions:
    """By what cosines are divided before they become probabilities.

    Args:
        start: its value at the beginning; also for good where it does not learn.
        learns: whether it is trained.
        lowest: it stays above this.
        highest: it stays below this.

    Raises:
        ValueError: not 0 < lowest < start < highest.
    """

    start: float = 0.05
    learns: bool = True
    lowest: float = 0.005
    highest: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.lowest < self.start < self.highest:
            raise ValueError(
                f"temperature.start must lie between lowest {self.lowest} and highest "
                f"{self.highest}, all above 0, got {self.start}."
            )


class Temperature(nn.Module):
    """A temperature between two bounds, which it nears and never sticks to.

    Its logarithm is a sigmoid of the parameter, stretched over the logarithms of the bounds.
    """

    def __init__(self, options: TemperatureOptions) -> None:
        super().__init__()
        bounds = torch.tensor([options.lowest, options.highest], dtype=torch.float64).log()
        self.low, self.width = float(bounds[0]), float(bounds[1] - bounds[0])
        share = (torch.tensor(options.start, dtype=torch.float64).log() - self.low) / self.width
        # In the dtype of all others: a checkpoint of a float64 run is read before Lightning
        # converts the module, and would lose half its digits in float32.
        self.position = nn.Parameter(torch.full((1,), share.logit().item()), options.learns)

    def forward(self) -> Tensor:
        """Return the temperature []."""
        return (self.low + self.width * self.position.sigmoid()).exp().squeeze(0)


def in_batch_loss(
    queries: Tensor,
    answers: Tensor,
    documents: Tensor,
    document: Tensor,
    known: Tensor,
    temperature: Tensor,
    weight: Tensor,
) -> LossSum:
    """Return the cross-entropy of finding each query's answer among all documents, in nats.

    A query's own answer is told by its vector, not by its place: nothing here depends on which
    part of the documents is this device's.

    Args:
        queries: [B, W] unit vectors.
        answers: [B, W] unit vectors of the documents that answer them.
        documents: [M, W] unit vectors of all documents of the step, answers included.
        document: [M] int64, their numbers; -1 = no negative of anything.
        known: [B, R] int64, documents that are no negatives of a query, its answer among them, so
            that copies of the answer are none either; -1 = none.
        temperature: [].
        weight: [B], 0 for a filler.

    Source: van den Oord et al. 2018, "Representation learning with contrastive predictive coding".
    """
    own = (queries * answers).sum(-1, keepdim=True) / temperature  # [B, 1]
    others = queries @ documents.T / temperature  # [B, M]
    is_known = (known[:, :, None] == document).any(1)
    others = others.masked_fill(is_known | (document == NO_DOCUMENT), -torch.inf)
    nats = torch.cat([own, others], 1).logsumexp(1) - own.squeeze(1)
    return LossSum.of(nats, weight)


Kind = Literal["listnet", "bce", "ranknet", "lambda", "margin_mse"]
NONE = -1e9  # logit of a candidate that takes no part: its probability is 0, its gradient too


@dataclass(frozen=True)
class RankingLoss:
    """Which loss a ranker learns with.

    Args:
        kind: `listnet`, cross-entropy of the candidates' softmax against their grades; `bce`, each
            candidate by itself; `ranknet`, pairs of different grades; `lambda`, such pairs by what
            their exchange does to NDCG; `margin_mse`, score differences of a teacher.
        top_grade: of bce: the grade that is probability 1, smaller ones are parts of it.
        relevant_above: of bce: grades above it are 1, others 0; instead of `top_grade`.
        weighting: of lambda: `ndcg_loss2pp`, `ndcg_loss2` or `lambdarank`.
        gain: of lambda: of grade g: g, or 2**g - 1.

    Raises:
        ValueError: an option of another kind, both options of bce, or a top grade of 0 or less.
    """

    kind: Kind = "listnet"
    top_grade: float | None = None
    relevant_above: float | None = None
    weighting: Literal["ndcg_loss2pp", "ndcg_loss2", "lambdarank"] | None = None
    gain: Literal["exponential", "linear"] | None = None

    def __post_init__(self) -> None:
        own = {"bce": ("top_grade", "relevant_above"), "lambda": ("weighting", "gain")}
        for kind, names in own.items():
            for name in names:
                if kind != self.kind and getattr(self, name) is not None:
                    raise ValueError(
                        f"loss.{name} {getattr(self, name)!r} has no effect on kind "
                        f'"{self.kind}"; leave it out, or choose kind "{kind}".'
                    )
        if self.top_grade is not None and self.relevant_above is not None:
            raise ValueError(
                f"loss.top_grade {self.top_grade} and loss.relevant_above {self.relevant_above} "
                "both say what a grade is worth; leave one out."
            )
        if self.top_grade is not None and not self.top_grade > 0:
            raise ValueError(f"loss.top_grade must be above 0, got {self.top_grade}.")

    @property
    def reads_teacher(self) -> bool:
        """Whether the targets are a teacher's scores, not grades."""
        return self.kind == "margin_mse"

    @property
    def reads_offset(self) -> bool:
        """Whether the loss changes when all scores of a query grow alike."""
        return self.kind == "bce"

    def __call__(self, scores: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each query [B]; arguments as for `summed`."""
        if self.kind == "bce":
            return pointwise_bce(scores, self._probabilities(target))
        if self.kind == "lambda":
            weighting, gain = self.weighting or "ndcg_loss2pp", self.gain or "exponential"
            return lambda_loss(scores, target, weighting, gain)
        losses = {"listnet": listnet, "ranknet": ranknet, "margin_mse": margin_mse}
        return losses[self.kind](scores, target)

    def _probabilities(self, grades: Tensor) -> Tensor:
        if self.relevant_above is not None:
            return (grades > self.relevant_above).to(grades).where(~grades.isnan(), grades)
        return (grades / (self.top_grade or 1.0)).clamp(0, 1)


def summed(loss: RankingLoss, scores: Tensor, target: Tensor, weight: Tensor) -> LossSum:
    """Return the sum over queries, and their number.

    Args:
        loss: of a query.
        scores: [B, K], -inf where there is no candidate.
        target: [B, K] grades, or the teacher's scores; NaN = none.
        weight: [B], 0 for a filler.
    """
    losses = loss(scores, target.to(scores))
    return LossSum.of(losses, weight)


def listnet(scores: Tensor, relevance: Tensor) -> Tensor:
    """Return the cross-entropy between shares of the grades and the softmax of the scores, [B].

    Source: Cao et al. 2007, Learning to rank: top-one probabilities with the increasing function
    φ(g) = g for grades, so that a grade of 0 takes no probability, and exp for scores. Where all
    grades are equal they tell no order, and the loss is 0.
    """
    scores, grades, takes_part = _judged(scores, relevance)
    low = grades.masked_fill(~takes_part, torch.inf).amin(1, keepdim=True)
    tells = grades.amax(1, keepdim=True) > low
    grades = grades.clamp(min=0) * tells
    target = grades / grades.sum(1, keepdim=True).clamp(min=1e-9)
    return -(target * scores.masked_fill(~takes_part, NONE).log_softmax(1)).sum(1)


def pointwise_bce(scores: Tensor, probabilities: Tensor) -> Tensor:
    """Return the mean cross-entropy of the judged candidates, scores being log-odds, [B]."""
    scores, target, takes_part = _judged(scores, probabilities)
    nats = F.binary_cross_entropy_with_logits(scores, target, reduction="none")
    return _mean(nats, takes_part, (1,))


def ranknet(scores: Tensor, relevance: Tensor) -> Tensor:
    """Return the mean over pairs of different grades of log(1 + exp(-(better - worse))), [B].

    Source: Burges et al. 2005, Learning to rank using gradient descent.
    """
    scores, grades, takes_part = _judged(scores, relevance)
    return _mean(_pair_nats(scores), _pairs(grades, takes_part), (1, 2))


def lambda_loss(
    scores: Tensor, relevance: Tensor, weighting: str = "ndcg_loss2pp", gain: str = "exponential"
) -> Tensor:
    """Return the sum over pairs of different grades of their weight times RankNet's loss, [B].

    With G the gain over that of the ideal ranking and D(r) = log2(1 + r) of the rank r that the
    scores give, a pair weighs |G_i - G_j| times: lambdarank ρ = |1/D(r_i) - 1/D(r_j)|; ndcg_loss2
    δ = |1/D(|r_i - r_j|) - 1/D(|r_i - r_j| + 1)|; ndcg_loss2pp ρ + 10 δ.

    Source: Wang et al. 2018, The LambdaLoss framework for ranking metric optimization, with μ = 10
    as there, and natural logarithms. Equal scores are ranked in the order of the candidates. Only
    judged candidates are ranked.
    """
    scores, grades, takes_part = _judged(scores, relevance)
    gains = grades.clamp(min=0)
    gains = gains if gain == "linear" else gains.exp2() - 1
    ranks = torch.arange(1, scores.shape[1] + 1, device=scores.device).to(scores)
    best = (gains.sort(dim=1, descending=True).values / (1 + ranks).log2()).sum(1)
    gains = gains / best.clamp(min=1e-9)[:, None]
    ranked = scores.detach().masked_fill(~takes_part, -torch.inf)
    order = ranked.argsort(dim=1, descending=True, stable=True)
    rank = torch.zeros_like(scores).scatter(1, order, ranks.expand_as(scores))
    weights = (gains[:, :, None] - gains[:, None]).abs() * _discounts(rank, weighting)
    return (weights * _pair_nats(scores) * _pairs(grades, takes_part)).sum((1, 2))


def margin_mse(scores: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean over all pairs of the squared difference of the two margins, [B].

    In squared units of the teacher's scores.

    Source: Hofstätter et al. 2020, Improving efficient neural ranking models with
    cross-architecture knowledge distillation; over every pair of candidates that the teacher has
    scored, whatever their grades, instead of one relevant and one other.
    """
    scores, target, takes_part = _judged(scores, teacher)
    error = scores - target
    squares = (error[:, :, None] - error[:, None]).square()
    num = takes_part.shape[1]
    above = torch.ones(num, num, dtype=torch.bool, device=scores.device).triu(1)
    return _mean(squares, takes_part[:, :, None] & takes_part[:, None] & above, (1, 2))


def _judged(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return both with 0 where a candidate takes no part, and where it does."""
    takes_part = ~target.isnan() & (scores > -torch.inf)
    # A score that is no number takes part: the run must stop rather than go on without it.
    takes_part = takes_part | (scores.isnan() & ~target.isnan())
    return scores.masked_fill(~takes_part, 0.0), target.masked_fill(~takes_part, 0.0), takes_part


def _pairs(grades: Tensor, takes_part: Tensor) -> Tensor:
    """Return [B, K, K] bool: the first candidate has the higher grade."""
    both = takes_part[:, :, None] & takes_part[:, None]
    return both & (grades[:, :, None] > grades[:, None])


def _pair_nats(scores: Tensor) -> Tensor:
    return F.softplus(scores[:, None] - scores[:, :, None])


def _discounts(rank: Tensor, weighting: str) -> Tensor:
    """Return what a pair weighs by its ranks [B, K, K]; of a candidate with itself nothing."""
    inverse = 1 / (1 + rank).log2()
    exchanged = (inverse[:, :, None] - inverse[:, None]).abs()
    if weighting == "lambdarank":
        return exchanged
    apart = (rank[:, :, None] - rank[:, None]).abs()
    between = 1 / (1 + apart.clamp(min=1)).log2() - 1 / (2 + apart).log2()
    between = between * (apart > 0)
    return between if weighting == "ndcg_loss2" else exchanged + 10 * between


def _mean(values: Tensor, counts: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the mean over what counts, 0 where nothing does."""
    return (values * counts).sum(dims) / counts.sum(dims).clamp(min=1)

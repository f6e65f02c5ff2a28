"""How well a retriever finds, exact over ranks: all vectors are kept, and searched at the end.

Shapes: B texts of a batch, Q queries, D documents, W width of vectors, J most judgements of one
query, F documents of a first stage, k documents that are ranked.
"""

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from datamodules.core.batches import EncodeBatch
from lit_models.seo.feedback import Feedback, searched
from lit_models.seo.fusion import WEIGHTS, fused
from lit_models.seo.ranking_metrics import RankedQueries, RankingMetrics, rank_queries

OWN, BM25, FUSED = SYSTEMS = ("retriever", "bm25", "fused")
DEFAULT_METRICS = ("ndcg@10", "mrr@10", "recall@10", "recall@100")
OF_QUERIES = ("judged", "grade", "first_document", "first_score")


class CollectedTexts:
    """The texts of a split, each once; queries and documents in the order of their numbers.

    A plain class: of a tuple or dataclass, torchmetrics would squeeze tensors of one element.

    Args:
        queries, query: [Q, W] vectors and [Q] int64 numbers.
        documents, document: [D, W] and [D] int64.
        judged, grade: [Q, J] int64 documents, -1 = none, and float32 grades, NaN = none.
        first_document, first_score: [Q, F] int64, BM25's, -1 = none, and float32.
    """

    def __init__(
        self,
        queries: Tensor,
        query: Tensor,
        documents: Tensor,
        document: Tensor,
        judged: Tensor,
        grade: Tensor,
        first_document: Tensor,
        first_score: Tensor,
    ) -> None:
        self.queries, self.query = queries, query
        self.documents, self.document = documents, document
        self.judged, self.grade = judged, grade
        self.first_document, self.first_score = first_document, first_score


class EncodedTexts(Metric):
    """Keeps vectors and judgements; `compute` returns them in order, without fillers."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("vectors", "text_index", "is_query", "weight", *OF_QUERIES):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, vectors: Tensor, batch: EncodeBatch) -> None:
        """Add a batch. Args: vectors [B, W]; batch of an evaluation."""
        self.vectors.append(vectors.detach())
        for name in ("text_index", "is_query", "weight", *OF_QUERIES):
            getattr(self, name).append(batch[name])  # type: ignore[literal-required]

    def compute(self) -> CollectedTexts:
        """Return all texts of all ranks."""
        vectors, index, is_query, weight = (
            _whole(getattr(self, name)) for name in ("vectors", "text_index", "is_query", "weight")
        )
        documents = _in_order(index, (~is_query) & (weight > 0))
        queries = _in_order(index, is_query & (weight > 0))
        place = (is_query.cumsum(0) - 1)[queries]  # among all queries, fillers too
        of_queries = [_whole(getattr(self, name))[place] for name in OF_QUERIES]
        return CollectedTexts(
            vectors[queries], index[queries], vectors[documents], index[documents], *of_queries
        )


def deepest(metrics: Sequence[str]) -> int:
    """Return how many ranks metrics look at.

    Raises:
        ValueError: a metric that looks at all of them.
    """
    depths = [re.search(r"@(\d+)$", name) for name in metrics]
    for name, depth in zip(metrics, depths, strict=True):
        if depth is None:
            raise ValueError(
                f"metric {name!r} looks at every rank, and a retriever ranks only so many "
                f"documents; write a number of ranks, such as {name}@100."
            )
    return max((int(depth[1]) for depth in depths if depth), default=1)


class Rankings:
    """The rankings of all systems over the same texts.

    Args:
        texts: of the split.
        depth: ranks that are looked at.
        feedback: how queries are moved before they search; none leaves them.
    """

    def __init__(self, texts: CollectedTexts, depth: int, feedback: Feedback | None = None) -> None:
        self.texts = texts
        self.has_first = texts.first_document.shape[1] > 0 and len(texts.query) > 0
        depth = max(depth, texts.first_document.shape[1])
        device = texts.queries.device
        found = searched(texts.queries, texts.documents, depth, device, feedback)
        self.scores = found.scores.to(texts.document.device)
        rows = found.documents.to(texts.document.device)
        self.documents = torch.where(rows >= 0, texts.document[rows.clamp(min=0)], rows)

    @property
    def own(self) -> RankedQueries:
        """The retriever's."""
        return self._ranked(self.documents, self.scores)

    @property
    def bm25(self) -> RankedQueries:
        """The first stage's, over the documents that were encoded."""
        first = self._first()
        return self._ranked(first, self.texts.first_score)

    def fused(self, weight: float) -> RankedQueries:
        """Both together. Args: weight of BM25."""
        first, scores = self._first(), self.texts.first_score
        return self._ranked(*fused(self.documents, self.scores, first, scores, weight))

    def _first(self) -> Tensor:
        """BM25's documents; those that were not encoded, in a limited run, are none."""
        first = self.texts.first_document
        return first.masked_fill(~torch.isin(first, self.texts.document), -1)

    def _ranked(self, documents: Tensor, scores: Tensor) -> RankedQueries:
        relevance = graded(documents, self.texts.judged, self.texts.grade)
        grades = self.texts.grade.clamp(min=0)
        return rank_queries(scores, relevance, documents >= 0, grades, documents)


class RetrievalEvaluation(nn.Module):
    """Collects the texts of a split and measures all systems over them.

    Attributes:
        texts: of the last evaluation.
        ranked: system -> its rankings in the last evaluation.
        found: [Q, k] int64 numbers of the retriever's first documents there, -1 = none.

    Args:
        metrics: names with the number of ranks.
        depth: ranks that they look at.
    """

    def __init__(self, metrics: Sequence[str], depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.encoded = EncodedTexts()
        self.systems = nn.ModuleDict({name: RankingMetrics(metrics) for name in SYSTEMS})
        self.texts: CollectedTexts | None = None
        self.ranked: dict[str, RankedQueries] = {}
        self.found: Tensor | None = None

    def rankings(self, feedback: Feedback | None = None) -> Rankings:
        """Return the rankings over all ranks' texts, and forget those."""
        rankings = Rankings(self.encoded.compute(), self.depth, feedback)
        self.encoded.reset()
        return rankings

    def measure(self, rankings: Rankings, fusion_weight: float | None) -> dict[str, Metric]:
        """Return name -> metric of all systems, the retriever's own without a prefix."""
        self.texts, self.ranked = rankings.texts, {OWN: rankings.own}
        self.found = rankings.documents
        if rankings.has_first:
            self.ranked[BM25] = rankings.bm25
            if fusion_weight is not None:
                self.ranked[FUSED] = rankings.fused(fusion_weight)
        found: dict[str, Metric] = {}
        for system, ranked in self.ranked.items():
            metrics = self.systems[system]
            assert isinstance(metrics, RankingMetrics)
            # Every rank has all queries, and adds them: a mean over copies is the same mean.
            metrics.update(ranked, torch.ones_like(ranked.is_evaluated, dtype=torch.float64))
            prefix = "" if system == OWN else f"{system}_"
            found |= {f"{prefix}{name}": metric for name, metric in metrics.items()}
        return found

    def per_query(self) -> dict[str, dict[str, Tensor]]:
        """Return system -> metric -> values of the queries [Q] float64, in their order."""
        return {
            system: self.systems[system].per_query(ranked)  # type: ignore[operator]
            for system, ranked in self.ranked.items()
        }


def best_weight(rankings: Rankings, values_of: Callable[[RankedQueries], Tensor]) -> float:
    """Return the weight of BM25 that is best on average over queries, the smallest of equals."""
    if not rankings.has_first:  # a limited run may have seen no query
        return 0.0
    means = [float(values_of(rankings.fused(weight)).mean()) for weight in WEIGHTS]
    return WEIGHTS[max(range(len(WEIGHTS)), key=lambda n: (round(means[n], 12), -n))]


def graded(documents: Tensor, judged: Tensor, grade: Tensor) -> Tensor:
    """Return the grades of documents [Q, k] float32, NaN where nobody judged.

    Args:
        documents: [Q, k] numbers.
        judged: [Q, J] numbers of the judged ones; -1 = none.
        grade: [Q, J].
    """
    if not judged.shape[1]:
        return torch.full(documents.shape, torch.nan, device=documents.device)
    numbers, order = judged.sort(dim=1)
    place = torch.searchsorted(numbers, documents.contiguous()).clamp(max=judged.shape[1] - 1)
    is_judged = (numbers.gather(1, place) == documents) & (documents >= 0)
    return grade.gather(1, order).gather(1, place).masked_fill(~is_judged, torch.nan)


def _whole(values: Tensor | list[Tensor]) -> Tensor:
    """A state before or after the ranks' were joined."""
    return torch.cat(values) if isinstance(values, list) else values


def _in_order(index: Tensor, is_chosen: Tensor) -> Tensor:
    """Rows of chosen texts, in the order of their numbers."""
    rows = is_chosen.nonzero()[:, 0]
    return rows[index[rows].argsort()]

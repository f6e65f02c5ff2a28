"""Bi-encoder for retrieval, its fusion with BM25, and its evaluation.

Batches: RetrievalBatch in training, else EncodeBatch. Shapes: Q queries, D documents, W width of
vectors, k documents found per query, B texts of a batch, A and F documents in the rankings of the
retriever and of the first stage, J maximum number of judgements per query.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from datamodules.core.batches import EncodeBatch, RetrievalBatch
from datamodules.core.plan import check_range
from datamodules.core.planned import ModelFacts
from datamodules.core.store import write_whole
from datamodules.search.candidates import DISTILLED, FIRST_DEPTH, Hits, open_bm25
from datamodules.search.datamodule import TERM
from datamodules.search.queries import NO_DOCUMENT, QueryJudgements, Ranking
from datamodules.text.encoding import TextEncoding
from lit_models.seo.base import TEXTS_AT_ONCE, EncodedTextModule
from lit_models.seo.encoders import TextEncoder
from lit_models.seo.metrics import (
    GatheredRows,
    QueryTable,
    QueryValues,
    RankedQueries,
    first_relevant,
    log_means,
    rank_queries,
    values_per_query,
)
from lit_models.seo.nearest import (
    ExactSearch,
    Feedback,
    Found,
    IndexSearch,
    SearchOptions,
    ShardedSearch,
    Vectors,
)
from lit_models.seo.networks import (
    BiEncoder,
    Distillation,
    TemperatureOptions,
    nested,
    shortened,
    taught_terms,
)
from lit_models.training.metrics import LossSum, evaluating, texts_for

QUERIES_OF_RUN = 8192  # queries per chunk; each chunk reads all documents once
METRICS = ("ndcg@10", "mrr@10", "recall@10", "recall@100")  # the first chooses fusion.weight
DEPTH = 100  # number of ranks that METRICS need
CHOSEN_WEIGHT = "fusion_weight"  # key in a checkpoint's recipe
WEIGHTS = tuple(step / 20 for step in range(21))  # candidates for fusion.weight


@dataclass(frozen=True)
class Fusion:
    """Weighted sum of BM25's and the retriever's scores, each for its best `FIRST_DEPTH` documents
    and scaled to 0 … 1 per query, see `unit_range`.

    Args:
        weight: of BM25, 0 to 1; the retriever has the rest. `None` chooses the weight with the best
            first metric on the validation queries; a checkpoint keeps it.
    """

    weight: float | None = None

    def __post_init__(self) -> None:
        check_range("fusion", 0, 1, weight=self.weight)


def unit_range(scores: Tensor, is_there: Tensor, is_open: bool) -> Tensor:
    """Return each query's scores [Q, A] scaled to (score - low) / (high - low), float64; 0 where
    there is no document. `is_open`: low is 0 for rankings with gaps, as in BM25."""
    scores = scores.double()
    if not scores.shape[1]:
        return scores
    low = scores.masked_fill(~is_there, torch.inf).amin(1, keepdim=True)
    high = scores.masked_fill(~is_there, -torch.inf).amax(1, keepdim=True)
    if is_open:
        low = torch.where(is_there.all(1, keepdim=True), low, torch.zeros_like(low))
    span = high - low
    shifted = torch.where(span > 0, (scores - low) / span, torch.ones_like(scores))
    return shifted.masked_fill(~is_there, 0.0)


def fused(
    documents: Tensor, scores: Tensor, first: Tensor, first_scores: Tensor, weight: float
) -> tuple[Tensor, Tensor]:
    """Return documents [Q, 2 F], best first, ties in the order of documents, and their scores from
    0 to 1, float64; padded with -1 and -inf.

    Args:
        documents, scores: [Q, A] of the retriever, best first, padded with -1; the first F count.
        first, first_scores: [Q, F] of BM25.
        weight: of BM25.
    """
    documents, scores = documents[:, : first.shape[1]], scores[:, : first.shape[1]]
    parts = (
        (1 - weight) * unit_range(scores, documents >= 0, is_open=False),
        weight * unit_range(first_scores, first >= 0, is_open=True),
    )
    numbers, order = torch.cat([documents, first], 1).sort(dim=1, stable=True)
    values = torch.cat(parts, 1).gather(1, order)
    is_second = torch.zeros_like(numbers, dtype=torch.bool)
    is_second[:, 1:] = (numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, 1:] >= 0)
    # Each ranking has a document at most once, so that at most two neighbours are equal.
    values[:, :-1] += (values * is_second)[:, 1:]
    numbers = numbers.masked_fill(is_second, NO_DOCUMENT)
    values = values.masked_fill(numbers < 0, -torch.inf)
    order = values.argsort(dim=1, descending=True, stable=True)  # ties stay in ascending order
    return numbers.gather(1, order), values.gather(1, order)


OWN, BM25, FUSED = "retriever", "bm25", "fused"  # systems


class RetrievalEvaluation(nn.Module):
    """Collects the vectors of a split and evaluates all systems on them."""

    def __init__(self, search_class: type[ShardedSearch] = ShardedSearch) -> None:
        super().__init__()
        self.search_class = search_class
        self.of_queries = GatheredRows("vector")
        self.of_documents = GatheredRows("vector", gathers=False)
        self.ranked: dict[str, RankedQueries] = {}  # system -> its rankings in the last evaluation

    def update(self, vectors: Tensor, batch: EncodeBatch) -> None:
        """Add a batch. Args: vectors [B, W]; batch of an evaluation."""
        counted, is_query, number = batch["weight"] > 0, batch["is_query"], batch["text_index"]
        self.of_documents.update(counted & ~is_query, id=number, vector=vectors)
        self.of_queries.update(counted & is_query, id=number, vector=vectors)

    def search(
        self,
        known: Callable[[np.ndarray], tuple[QueryJudgements, Hits]],
        feedback: Feedback | None = None,
    ) -> None:
        """Rank all documents by the retriever, and release the vectors. Args: known:
        `TextsDataset.known` of the dataset."""
        queries, own = self.of_queries.take(), self.of_documents.take()
        self.numbers, documents = queries.id.cpu().numpy(), self.search_class(own.id, own.vector)
        judged, hits = known(self.numbers)
        columns = (torch.from_numpy(each).to(own.id.device) for each in (*judged, *hits))
        self.judged, self.grades, first, scores = columns
        self.num_documents = len(documents.all_ids)
        best = documents.search(queries.vector, max(DEPTH, first.shape[1]), feedback)
        self.best = Found(*(each.to(own.id.device) for each in best))
        # A limited run does not encode all documents: drop the others from BM25's ranking.
        first = first.where(torch.isin(first, documents.all_ids), NO_DOCUMENT)
        self.first, self.ranked = Found(first, scores), {OWN: self._ranked(*self.best)}

    def fused(self, weight: float) -> RankedQueries:
        """Return the fused ranking. Args: weight of BM25."""
        return self._ranked(*fused(*self.best, *self.first, weight))

    def best_weight(self) -> float:
        """Return the weight of BM25 with the best first metric; the smallest in a tie."""
        if not self.first.documents.numel():  # a limited run may have seen no query
            return 0.0
        name, ranked = METRICS[0], map(self.fused, WEIGHTS)
        means = [round(float(values_per_query(own, [name])[name].mean()), 12) for own in ranked]
        return WEIGHTS[means.index(max(means))]

    def measure(self, fusion_weight: float | None) -> dict[str, Tensor]:
        """Return name -> mean [] float64 of all systems, the retriever's own without a prefix."""
        if self.first.documents.numel():
            self.ranked[BM25] = self._ranked(*self.first)
            if fusion_weight is not None:
                self.ranked[FUSED] = self.fused(fusion_weight)
        named: dict[str, Tensor] = {}
        self.values: dict[str, dict[str, Tensor]] = {}  # system -> metric -> values [Q] float64
        for system, ranked in self.ranked.items():
            values = self.values[system] = values_per_query(ranked, METRICS)
            prefix = "" if system == OWN else f"{system}_"
            named |= {f"{prefix}{name}": each.mean() for name, each in values.items()}
        return named

    def _ranked(self, documents: Tensor, scores: Tensor) -> RankedQueries:
        judged, grade = self.judged, self.grades  # [Q, J] each
        relevance = torch.full(documents.shape, torch.nan, device=documents.device)
        if judged.shape[1]:
            numbers, order = judged.sort(dim=1)
            place = torch.searchsorted(numbers, documents.contiguous())
            place = place.clamp(max=judged.shape[1] - 1)
            is_judged = (numbers.gather(1, place) == documents) & (documents >= 0)
            relevance = grade.gather(1, order).gather(1, place).masked_fill(~is_judged, torch.nan)
        return rank_queries(scores, relevance, documents >= 0, grade.clamp(min=0))


class LitRetriever(EncodedTextModule):
    """Bi-encoder: encodes queries and documents separately, and ranks by cosine.

    Logs val/METRIC of the encoder alone, val/bm25_METRIC, and val/fused_METRIC of both.

    Args:
        temperature: divides cosines in the loss.
        encode_chunk: number of texts of a training step whose activations are in memory at a time,
            for steps that do not fit into memory; takes about a third more time.
        fusion: adds BM25's scores in evaluation and prediction; `None` does not.
        feedback: moves queries towards the documents of a first search, in evaluation and
            prediction; `None` does not.
        search: search method outside of evaluation.
        sizes: vector sizes to train, each the first components; empty trains only whole vectors.
        size: number of components in evaluation, prediction and search; `None` takes all.
        distillation: trains on a ranker's scores, too; `None` does not.
        shared: optimizer, encoder and more, see `EncodedTextModule`.
    """

    search_class: type[ExactSearch] = ExactSearch
    sharded_class: type[ShardedSearch] = ShardedSearch  # the same over the documents of all ranks
    learnt_facts = (CHOSEN_WEIGHT,)
    own_terms: tuple[str, ...] = ()  # names of loss terms that a subclass adds
    uneven_steps = ()
    monitor = "val/ndcg@10"
    monitor_mode = "max"
    tables_of = ("validate", "test")
    may_accumulate = False  # the loss compares every query of a step with all its documents

    def __init__(
        self,
        temperature: TemperatureOptions = TemperatureOptions(),  # noqa: B008 - frozen
        encode_chunk: int | None = None,
        fusion: Fusion | None = None,
        feedback: Feedback | None = None,
        search: SearchOptions = SearchOptions(),  # noqa: B008 - frozen
        sizes: list[int] | None = None,
        size: int | None = None,
        distillation: Distillation | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(**shared)
        self.encode_chunk, self.fusion, self.feedback = encode_chunk, fusion, feedback
        self.temperature, self.search_options = temperature, search
        self.sizes, self.size, self.distillation = sizes or [], size, distillation
        self.evaluation = RetrievalEvaluation(self.sharded_class)

    def make_network(self, encoder: TextEncoder) -> nn.Module:
        for size in (*self.sizes, self.size):
            check_range("model", 1, encoder.width, size=size)
        return BiEncoder(encoder, self.temperature)

    def own_callbacks(self) -> list[Callback]:
        return [*super().own_callbacks(), QueryTable()]

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.evaluation.ranked = {}  # of an earlier call
        if self.fusion is not None and self.trainer.datamodule.bm25 is None:
            raise ValueError(
                "model.fusion adds BM25's scores, and data.bm25 is none; give its options, or "
                "leave the fusion out."
            )

    def model_facts(self) -> ModelFacts:
        terms = [*self.own_terms, *[DISTILLED] * (self.distillation is not None)]
        return replace(super().model_facts(), options={"search": self.rankings, "terms": terms})

    def forward(self, batch: EncodeBatch) -> Tensor:
        """Return unit vectors [B, W]."""
        return self.compact(self.network.encode(batch["input_ids"], batch["attention_mask"]))

    def compact(self, vectors: Tensor) -> Tensor:
        """Return the part of encoded texts that is searched."""
        return shortened(vectors, self.size)

    def training_terms(self, batch: RetrievalBatch) -> dict[str, LossSum]:
        size, weight = len(batch["weight"]), batch["weight"]
        options = (size, self.encode_chunk)
        encode = self.network.encode_samples
        queries = encode(batch["query_ids"], batch["query_mask"], True, *options)
        documents = encode(batch["document_ids"], batch["document_mask"], False, *options)
        temperature = self.network.temperature()
        per_sample = len(documents) // size
        is_filler = weight.repeat_interleave(per_sample) == 0
        number = batch["document"].masked_fill(is_filler, NO_DOCUMENT)
        gathered = self.all_gather(documents, sync_grads=True).flatten(0, -2)
        numbers, answers = self.all_gather(number).flatten(), documents[::per_sample]
        known = batch["known"]
        loss = nested(self.sizes, queries, answers, gathered, numbers, known, temperature, weight)
        term = LossSum(temperature.detach() * loss.count, loss.count)  # its mean is the temperature
        more = self.more_terms(queries, documents, batch, temperature)
        return {TERM: loss, "temperature": term, **more}

    def more_terms(self, *tensors: Any) -> dict[str, LossSum]:
        """Return further loss terms, such as `own_terms`; args as in `taught_terms`."""
        return taught_terms(self.distillation, *tensors)

    def term_weights(self) -> dict[str, float]:
        return {"temperature": 0.0}

    def validation_step(self, batch: EncodeBatch, batch_idx: int) -> None:
        self.evaluation.update(self(batch), batch)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        self._evaluate("val")

    def on_test_epoch_end(self) -> None:
        self._evaluate("test")

    def on_predict_start(self) -> None:
        super().on_predict_start()
        self.fusion_weight()  # raises for a missing weight before texts are encoded

    on_test_start = on_predict_start

    def predict_step(self, batch: EncodeBatch, batch_idx: int) -> dict[str, Tensor]:
        return {"vector": self(batch).float()}

    def encode(self, texts: Sequence[str], is_query: bool) -> Tensor:
        """Return unit vectors [n, W] of texts, in their order, on the module's device; a document
        is its title and text, separated by a line break."""
        texts = texts_for(self, texts)
        encoding, parts = TextEncoding(self.recipe), []
        prompt = encoding.prompts["query" if is_query else "document"]
        most = encoding.limits.max_query_length if is_query else None
        order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
        for start in range(0, len(order), TEXTS_AT_ONCE):
            chosen = order[start : start + TEXTS_AT_ONCE]
            ids = encoding.ids_of([prompt + texts[n] for n in chosen])
            rows = encoding.rows([one[:most] for one in ids])
            columns = (rows[name].to(self.device) for name in ("input_ids", "attention_mask"))
            with evaluating(self), torch.no_grad():
                parts.append(self.compact(self.network.encode(*columns)))
        if not parts:
            return self.compact(torch.zeros(0, self.network.encoder.width, device=self.device))
        return torch.cat(parts)[torch.tensor(order, device=self.device).argsort()]

    def index(self, documents: Vectors, queries: Vectors, k: int) -> ExactSearch:
        """Return a search over encoded documents [D, W], by the `search` options; an index is tuned
        on a sample of these encoded queries for k documents."""
        exact = self.search_class(documents, self.device)
        return self.search_options.opened(exact, queries, k, self.feedback)

    def search(self, queries: Sequence[str], documents: Vectors | ExactSearch, k: int) -> Found:
        """Return the k best rows of encoded documents [D, W] for each query, by exact search unless
        `documents` comes from `index`."""
        if not isinstance(documents, ExactSearch):
            documents = self.search_class(documents, self.device)
        return documents.search(self.encode(queries, True), k, self.feedback)

    def fuse(self, found: Found, hits: Hits) -> Found:
        """Return the fused ranking of found documents and BM25's hits; requires `fusion`."""
        first, first_scores = map(torch.from_numpy, hits)
        return Found(*fused(*found, first, first_scores, self.fusion_weight() or 0.0))

    def rankings(
        self, queries: np.ndarray, documents: np.ndarray, ids: Sequence[str], folder: Path
    ) -> Iterator[Ranking]:
        """Yield the rankings of a prediction's queries, fused with BM25 if `fusion` is set.

        Args:
            queries: [Q, W] in their order; documents: [D, W] of the whole collection, with `ids`.
            folder: gets search.json if an approximate index is used.
        """
        data = self.trainer.datamodule
        bm25 = None if self.fusion is None else open_bm25(data.collection, data.bm25)
        depth = data.predict_depth if bm25 is None else max(data.predict_depth, FIRST_DEPTH)
        records = list(data.datasets["predict"].queries)
        opened = self.index(documents, queries, depth)
        if isinstance(opened, IndexSearch):
            write_whole(folder / "search.json", json.dumps(opened.facts, indent=1) + "\n")
        for start in range(0, len(records), QUERIES_OF_RUN):
            part = slice(start, start + QUERIES_OF_RUN)
            best = opened.search(queries[part], depth, self.feedback)
            if bm25 is not None:
                hits = bm25.search([query.text for query in records[part]], FIRST_DEPTH)
                best = self.fuse(best, hits)
            for query, rows, scores in zip(records[part], *best, strict=True):
                numbers = rows[rows >= 0][: data.predict_depth].tolist()
                yield Ranking(query.id, [ids[n] for n in numbers], scores[: len(numbers)].tolist())

    @property
    def fusion_is_open(self) -> bool:
        """Whether a fit chooses the weight on the validation queries."""
        return self.fusion is not None and self.fusion.weight is None

    def fusion_weight(self) -> float | None:
        """Return the weight of BM25; `None` without a fusion.

        Raises:
            ValueError: the weight is chosen on validation queries, but no validation has run.
        """
        if not self.fusion_is_open:
            return None if self.fusion is None else self.fusion.weight
        if CHOSEN_WEIGHT not in self.recipe:
            raise ValueError(
                "fusion.weight is chosen on the validation queries, and this model has seen none; "
                "train with validation, or give model.fusion.weight."
            )
        return self.recipe[CHOSEN_WEIGHT]

    def query_values(self, split: str) -> QueryValues | None:
        """Return the last evaluation for `QueryTable`."""
        evaluation = self.evaluation
        if not evaluation.ranked:
            return None
        collection = self.trainer.datamodule.collection
        numbers, among = evaluation.numbers.tolist(), evaluation.num_documents
        title = f"{len(numbers)} queries over {among} documents"
        if among < len(collection.documents):
            title += f" of {len(collection.documents)}, which is easier than all"
        notes = []
        if FUSED in evaluation.ranked:
            how = ", chosen on these queries" * (split == "val" and self.fusion_is_open)
            notes.append(f"fused: BM25 weighs {self.fusion_weight():g}{how}")
        names = [collection.queries[number].id for number in numbers]
        # Queries whose first document is not relevant, sorted by the first metric, lowest first.
        metric, values = METRICS[0], evaluation.values[OWN][METRICS[0]].tolist()
        ranks = first_relevant(evaluation.ranked[OWN]).tolist()
        errors = [["input", "truth", "answer", "sample", metric]]
        order = sorted(range(len(names)), key=lambda place: (values[place], names[place]))
        for place in (place for place in order if ranks[place] != 1):
            relevant = evaluation.judged[place][evaluation.grades[place] > 0].tolist()
            truth = " ".join(collection.documents[number].id for number in relevant)
            answer = f"rank {ranks[place]}" if ranks[place] else "none found"
            text = collection.queries[numbers[place]].text
            errors.append([text, truth, answer, names[place], f"{values[place]:.3g}"])
        return QueryValues(names, evaluation.values, title, notes, errors)

    def _evaluate(self, split: str) -> None:
        evaluation = self.evaluation
        dataset = self.trainer.datamodule.datasets["test" if split == "test" else "validation"]
        evaluation.search(dataset.known, self.feedback)
        if self.trainer.state.fn == "fit" and self.fusion_is_open:
            self.recipe[CHOSEN_WEIGHT] = evaluation.best_weight()
        means = evaluation.measure(self.fusion_weight())
        log_means(self, {f"{split}/{name}": mean for name, mean in means.items()})

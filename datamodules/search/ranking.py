"""RankingDataModule: queries with their candidates as planned batches for the ranker.

Shapes: B queries in the micro-batch, K candidates of one, P pairs, J judgements of one.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from datamodules.core.plan import rng_for
from datamodules.core.planned import PlannedDataset, Stage
from datamodules.core.store import digest_of
from datamodules.search.bm25 import open_bm25
from datamodules.search.candidates import (
    CandidateOptions,
    GroupOptions,
    Lists,
    bm25_lists,
    run_lists,
)
from datamodules.search.collection import Collection
from datamodules.search.datamodule import (
    TERM,
    SearchDataModule,
    kept_documents,
    kept_queries,
    tokens_per_byte,
)
from datamodules.search.formats import Files
from datamodules.search.queries import (
    NO_DOCUMENT,
    JudgedQueries,
    Queries,
    QueryJudgements,
    Ranking,
    looked_up,
    rows_of,
    write_run,
)
from datamodules.text.encoding import Framed, TextEncoding, padded

ROWS_OF_PART = 64  # with fewer, what is saved of padding is lost by smaller matrix products
RUN_NAME = "ranked.trec"
TAG, DECIMALS = "unisono", 6
MOST_LISTED = 100  # candidates of a list, where `top` does not say
MOST_NAMED = 3  # queries of a message
log = logging.getLogger(__name__)


class RankingExample(NamedTuple):
    """One query: rows of its K pairs, and arrays [K] but for `all_relevance` [J]."""

    pairs: list[Framed]
    document: np.ndarray
    relevance: np.ndarray
    prior: np.ndarray
    first_stage: np.ndarray
    bm25: np.ndarray
    teacher: np.ndarray
    all_relevance: np.ndarray


class RankingDataset(PlannedDataset):
    """Queries, each with all its candidates: for evaluation and prediction.

    Args:
        judgements: of these queries; `None` in prediction for a file of queries.
        teacher: scores of a teacher.
        with_baselines: whether the scores of the first stage and of BM25 come along.
        is_even: whether all batches are as wide as the longest list, so that results join.
    """

    def __init__(
        self,
        collection: Collection,
        encoding: TextEncoding,
        queries: Queries,
        options: CandidateOptions,
        judgements: JudgedQueries | None = None,
        teacher: Lists | None = None,
        with_baselines: bool = False,
        is_even: bool = False,
    ) -> None:
        self.collection, self.encoding, self.queries = collection, encoding, queries
        self.options, self.judgements, self.teacher = options, judgements, teacher
        self.with_baselines = with_baselines
        self.bm25 = None if options.bm25 is None else open_bm25(collection, options.bm25)
        self.lists: Lists | None = None
        most = MOST_LISTED if options.top is None else options.top
        if options.source == "run":
            self.lists = run_lists(options.run, collection, queries, most, "candidates.run")
        elif options.source == "bm25":
            assert options.bm25 is not None
            self.lists = bm25_lists(options.bm25, collection, queries, most)
        self.document_tokens = kept_documents(collection, encoding)
        self.query_tokens = kept_queries(queries, encoding)
        self._tokens_per_byte = tokens_per_byte(encoding, collection)
        places = range(len(queries))
        lengths = np.fromiter(map(self._length, places), np.int64, len(places))
        self.lengths = np.maximum(1, lengths)
        lists = [lists.fingerprint for lists in (self.lists, teacher) if lists]
        facts = [collection.fingerprint, encoding.digest, lists, len(places), self._options()]
        self.fingerprint = digest_of([*facts, options.bm25 and asdict(options.bm25)])
        self.target_counts = {TERM: None}
        widths = (len(self.candidates(place)) for place in places) if is_even else ()
        self.width = max(widths, default=1)

    @property
    def baselines(self) -> list[str]:
        """What a test shows beside a ranker: `first`, a run, and `bm25`."""
        is_run, has_bm25 = self.options.source == "run", self.bm25 is not None
        return [name for name, there in (("first", is_run), ("bm25", has_bm25)) if there]

    def judged(self, place: int) -> QueryJudgements:
        """Return the judgements of a query."""
        if self.judgements is None:
            return QueryJudgements(np.zeros(0, np.int64), np.zeros(0, np.float32))
        return self.judgements.judged(place)

    def listed(self, place: int) -> np.ndarray:
        """Return the documents of a query's list, best first; none where the source is judged."""
        return np.zeros(0, np.int64) if self.lists is None else self.lists.of(place)[0]

    def candidates(self, place: int) -> np.ndarray:
        """Return the documents that are ranked for a query, ascending."""
        if self.lists is None:
            return self.judged(place).documents
        return np.sort(self.listed(place))

    def graded(self, sample_id: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the candidates of this epoch [K] int64, ascending, and their grades [K] float32,
        NaN = unjudged."""
        documents = self.candidates(sample_id)
        return documents, looked_up(documents, *self.judged(sample_id))

    def bm25_scores(self, place: int, documents: np.ndarray) -> np.ndarray:
        """Return what BM25 gives documents, [n] float32; 0 where BM25 is left out."""
        if self.bm25 is None:
            return np.zeros(len(documents), np.float32)
        return self.bm25.scores(self.queries.text(place), documents).astype(np.float32)

    def first_scores(self, place: int, documents: np.ndarray) -> np.ndarray:
        """Return what the first stage gives documents, [n] float32, 0 where there is none.

        A document that a run does not list has the lowest score of the query's list.
        """
        if self.options.source != "run":
            return self.bm25_scores(place, documents)
        assert self.lists is not None
        listed, values = self.lists.of(place)
        if not len(listed):
            return np.zeros(len(documents), np.float32)
        scores = looked_up(documents, listed, values)
        return np.where(np.isnan(scores), values.min(), scores)

    def example(self, sample_id: int, epoch: int) -> RankingExample:
        """Return one query with its candidates of this epoch."""
        judged = self.judged(sample_id)
        documents, grades = self.graded(sample_id, epoch)
        scores = self.first_scores(sample_id, documents)
        # Of the query's whole list, so that a training step's draw does not move the prior.
        known = (
            self.first_scores(sample_id, judged.documents)
            if self.lists is None
            else self.lists.of(sample_id)[1]
        )
        mean = float(known.mean()) if len(known) else 0.0
        deviation = (float(known.std()) if len(known) else 1.0) or 1.0
        teacher = np.full(len(documents), np.nan, np.float32)
        if self.teacher is not None:
            teacher = looked_up(documents, *self.teacher.of(sample_id))
        texts = map(self.document_tokens.__getitem__, documents.tolist())
        return RankingExample(
            pairs=self.encoding.framing.pairs(self.query_tokens[sample_id], texts),
            document=documents,
            relevance=grades,
            prior=(scores - mean) / deviation,
            first_stage=scores,
            bm25=self.bm25_scores(sample_id, documents) if self.with_baselines else scores,
            teacher=teacher,
            all_relevance=judged.grades,
        )

    def collate(self, examples: list[RankingExample]) -> dict[str, Any]:
        """Return the padded batch."""
        sizes = np.array([len(example.pairs) for example in examples])
        index = np.full((len(examples), max(self.width, *sizes)), NO_DOCUMENT)
        width = index.shape[1]
        pairs = [pair for example in examples for pair in example.pairs]
        order = np.argsort([-len(pair.ids) for pair in pairs], kind="stable")
        row_of = np.empty(len(pairs), np.int64)
        row_of[order] = np.arange(len(pairs))
        index[np.arange(width) < sizes[:, None]] = row_of
        longest_first = [pairs[place] for place in order.tolist()]
        # Where no query has a candidate there is one empty row.
        rows = padded(longest_first or [self.encoding.framing.single(np.zeros(0, np.int64))])
        batch = {
            **rows,
            "pair_lengths": rows["attention_mask"].sum(1).numpy(),
            "num_parts": self.num_parts(len(examples)),
            "pair_index": torch.from_numpy(index),
            "document": _rows([e.document for e in examples], NO_DOCUMENT, width),
            "relevance": _rows([e.relevance for e in examples], np.nan, width),
            "prior": _rows([e.prior for e in examples], 0.0, width),
            "all_relevance": _rows([e.all_relevance for e in examples], np.nan, 1),
        }
        if self.teacher is not None:
            batch["teacher"] = _rows([e.teacher for e in examples], np.nan, width)
        if self.with_baselines:
            scores = {
                "first": [e.first_stage for e in examples],
                "bm25": [e.bm25 for e in examples],
            }
            batch["baselines"] = {n: _rows(scores[n], 0.0, width) for n in self.baselines}
        return batch

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the query, and the grades of its candidates of this epoch."""
        documents, grades = self.graded(sample_id, epoch)
        names = [self.collection.document_id(int(number)) for number in documents]
        shown = (f"{name}:{grade:g}" for name, grade in zip(names, grades.tolist(), strict=True))
        return {"query": self.queries.text(sample_id), "candidates": " ".join(shown)}

    def num_parts(self, num_queries: int) -> int:
        """Return in how many parts a training step computes the rows of so many queries."""
        return 1

    def row_lengths(self, documents: np.ndarray) -> np.ndarray:
        """Return about how many positions the rows of documents have, [n] int64."""
        limits = self.encoding.limits
        num_bytes = self.collection.document_lengths[documents] * self._tokens_per_byte
        longest = limits.max_length - limits.max_query_length
        return np.minimum(num_bytes.astype(np.int64), longest) + limits.max_query_length // 2

    def _options(self) -> Any:
        return None

    def _length(self, place: int) -> int:
        """Return about how many positions the rows of a query have together."""
        return int(self.row_lengths(self.candidates(place)).sum())


class GroupDataset(RankingDataset):
    """Queries, each with a group of candidates that is drawn anew in every epoch: for training.

    Args:
        groups: how they are drawn.
        seed: key of the draw, together with epoch and sample id.
        ranking: as of `RankingDataset`.
    """

    def __init__(self, groups: GroupOptions, seed: int, *ranking: Any) -> None:
        self.groups, self.seed = groups, seed
        super().__init__(*ranking)

    def graded(self, sample_id: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the group of this epoch."""
        judged, minable = self._pool(sample_id)
        rng = rng_for(self.seed, epoch, sample_id)
        chosen = self.groups.drawn(judged.grades, len(minable), rng)
        mined_grade = 0.0 if self.groups.unjudged_as_negative else np.nan
        documents = np.append(judged.documents, minable)[chosen]
        grades = np.append(judged.grades, np.full(len(minable), mined_grade, np.float32))[chosen]
        order = np.argsort(documents)
        return documents[order], grades[order]

    def num_parts(self, num_queries: int) -> int:
        # By the size that groups may have, which is the same on all replicas; each has a pair.
        return max(1, min(num_queries, num_queries * self.groups.size // ROWS_OF_PART))

    def _pool(self, place: int) -> tuple[QueryJudgements, np.ndarray]:
        judged = self.judged(place)
        return judged, self.groups.minable(self.listed(place), judged.documents)

    def _options(self) -> Any:
        return asdict(self.groups)

    def _length(self, place: int) -> int:
        """Return the expected length: that of a mean document, times the size of the group."""
        judged, minable = self._pool(place)
        size = sum(self.groups.sizes(len(judged.documents), len(minable)))
        documents = np.append(judged.documents, minable)
        return int(size * self.row_lengths(documents).mean())


class RankingDataModule(SearchDataModule):
    """Deals queries with their candidates; a prediction is a run, TREC's file of rankings.

    Without a file of queries it predicts the judged queries of the test part.

    Args:
        candidates: which documents of a query are ranked, in evaluation and prediction; in
            training they are where hard negatives are mined.
        groups: the candidates of a query in a training step.
        teacher: runs with a teacher's scores of training queries, for a loss that imitates them;
            those of other queries, where there are any, are for the loss of an evaluation.
        search: collection, output, tokenizer and more, see `SearchDataModule`.

    Raises:
        ValueError: options in conflict.
    """

    def __init__(
        self,
        candidates: CandidateOptions = CandidateOptions(),  # noqa: B008 - frozen
        groups: GroupOptions = GroupOptions(),  # noqa: B008 - frozen
        teacher: Files = None,
        **search: Any,
    ) -> None:
        super().__init__(**search)
        self.candidates, self.groups, self.teacher = candidates, groups, teacher
        if groups.mined and candidates.source == "judged":
            raise ValueError(
                f"groups.mined is {groups.mined}, but candidates.source judged has nothing to mine "
                "from; choose source bm25 or run."
            )
        if groups.mined and not groups.unjudged_as_negative and not teacher:
            raise ValueError(
                f"groups.mined is {groups.mined}, but mined documents are unjudged and count in no "
                "loss; set groups.unjudged_as_negative=true if they shall count as irrelevant, or "
                "give a teacher's scores."
            )
        if self.predict_queries is not None and candidates.source == "judged":
            raise ValueError(
                f"nothing is judged for data.predict_queries {self.predict_queries}; set "
                "data.candidates.source to bm25 or run."
            )

    def check_stage(self, stage: Stage) -> None:
        """Raise where the stage has no query, or its file of them breaks a rule."""
        self._queries(stage)

    def prepare_tokens(self, stage: Stage, encoding: TextEncoding, recipe: dict[str, Any]) -> None:
        """Make BM25's index, the candidates of a stage and all tokens in the cache."""
        self._dataset(stage, encoding)

    def build(self, stage: Stage) -> PlannedDataset:
        """Return the dataset of one stage.

        Raises:
            FileNotFoundError: a file is not there.
            ValueError: no query is judged in it, or a run or file of queries breaks a rule.
        """
        assert self.encoding is not None
        return self._dataset(stage, self.encoding)

    @property
    def scores_first(self) -> bool:
        """Whether each candidate, in training too, has the score of a first stage."""
        return self.candidates.source == "run" or self.candidates.bm25 is not None

    def setup(self, stage: str) -> None:
        """Build the datasets; refuse to write where a table lies that is not of this prediction."""
        super().setup(stage)
        if stage != "predict" or self.predict_output is None or not self.shows_found:
            return
        beside = self.predict_output_path.with_suffix(".csv")
        if beside.exists():
            raise FileExistsError(
                f"{beside} exists and is not overwritten, but the table of what was found goes "
                "there; move it, or choose another data.predict_output."
            )

    @property
    def predict_output_path(self) -> Path:
        """Where the run goes."""
        path = self.output_path(RUN_NAME)
        if path.suffix == ".csv":
            raise ValueError(
                f"data.predict_output {path} is a run of TREC, and the table of what was found "
                "stands beside it as .csv; name it .trec."
            )
        return path

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write the run, best first, equal scores in the order of documents; for queries of a file,
        and for pages, a table of the best beside it (.csv).

        Scores are rounded to 6 decimals: the others are rounding errors in single precision.

        Args:
            results: `score` [N, K], of the candidates in the order of documents.
        """
        dataset = self.datasets["predict"]
        assert isinstance(dataset, RankingDataset)
        queries = dataset.queries
        write_run(path, self._rankings(dataset, results["score"]), TAG)
        if self.shows_found:
            rankings = self._rankings(dataset, results["score"])
            self.write_found(path.with_suffix(".csv"), rankings, queries)
        if lacking := [n for n in range(len(queries)) if not len(dataset.candidates(n))]:
            names = ", ".join(queries.id(place) for place in lacking[:MOST_NAMED])
            log.warning(
                "%d of %d queries have no candidate and are not in %s, such as %s.",
                *(len(lacking), len(queries), path, names),
            )

    def _rankings(self, dataset: RankingDataset, scores: np.ndarray) -> Iterator[Ranking]:
        for place in range(len(dataset.queries)):
            documents = dataset.candidates(place)
            own = scores[place, : len(documents)].astype(np.float64).round(DECIMALS)
            order = np.argsort(-own, kind="stable")
            ids = [self.collection.document_id(int(index)) for index in documents[order]]
            yield Ranking(dataset.queries.id(place), ids, own[order].tolist())

    def _dataset(self, stage: Stage, encoding: TextEncoding) -> RankingDataset:
        collection, (queries, judgements) = self.collection_of(stage), self._queries(stage)
        teacher = None
        if self.teacher is not None and stage != "predict":
            facts = (self.teacher, self.collection, queries, None, "data.teacher")
            teacher = run_lists(*facts, may_lack_all=stage != "train")
        ranking = (collection, encoding, queries, self.candidates, judgements, teacher)
        if stage == "train":
            return GroupDataset(self.groups, self.seed, *ranking)
        return RankingDataset(*ranking, stage == "test", is_even=stage == "predict")

    def _queries(self, stage: Stage) -> tuple[Queries, JudgedQueries | None]:
        if stage == "predict" and (queries := self.queries_of_file()) is not None:
            return queries, None
        judgements = self.judged(stage)
        return self.queries(judgements.queries), judgements


def _rows(values: Sequence[np.ndarray], filler: float, width: int) -> torch.Tensor:
    return torch.from_numpy(rows_of(values, filler, width))

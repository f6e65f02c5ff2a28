"""RankingDataModule: queries with candidates become planned batches for the ranker."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.core.planned import PlannedDataset, Stage
from datamodules.files.splitting import PART_NAMES
from datamodules.search.candidates import CandidateOptions, FirstStage, Lists, run_lists
from datamodules.search.collection import Triples
from datamodules.search.collection_tokens import is_among, kept_collection, read_collection
from datamodules.search.datamodule import RelevanceDataModule
from datamodules.search.groups import GroupOptions
from datamodules.search.judged_queries import JudgedQueries
from datamodules.search.queries import CollectionQueries, FileQueries, Queries
from datamodules.search.ranking_batches import GroupDataset, RankingDataset, TripleDataset
from datamodules.search.ranking_source import PairTexts, RankingSource, kept_pools
from datamodules.search.request import Files
from datamodules.search.runs import Ranking, write_run
from datamodules.text.encoding import TextEncoding

RUN_NAME = "ranked.trec"
TAG, DECIMALS = "unisono", 6
MOST_NAMED = 3  # queries of a message
log = logging.getLogger(__name__)


class RankingDataModule(RelevanceDataModule):
    """Deals queries with their candidates; a prediction is a run, TREC's file of rankings.

    Args:
        candidates: which documents of a query are ranked, in evaluation and prediction; in
            training they are where hard negatives are mined.
        groups: the candidates of a query in a training step.
        teacher: runs with a teacher's scores of training queries, for a loss that imitates them;
            those of other queries, where there are any, are for the loss of an evaluation.
        predict_queries: a file as `FileQueries` reads it; None predicts the judged queries of the
            test part.
        relevance: collection, output, tokenizer and more, see `RelevanceDataModule`.

    Raises:
        ValueError: options in conflict.
    """

    def __init__(
        self,
        candidates: CandidateOptions = CandidateOptions(),  # noqa: B008 - frozen
        groups: GroupOptions = GroupOptions(),  # noqa: B008 - frozen
        teacher: Files = None,
        predict_queries: str | None = None,
        **relevance: Any,
    ) -> None:
        super().__init__(**relevance)
        self.candidates, self.groups = candidates, groups
        self.teacher, self.predict_queries = teacher, predict_queries
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
        if groups.triples and teacher:
            raise ValueError("a teacher has no scores for groups.triples; leave one of them out.")
        if predict_queries is not None and candidates.source == "judged":
            raise ValueError(
                f"nothing is judged for data.predict_queries {predict_queries}; set "
                "data.candidates.source to bm25 or run."
            )

    def check_stage(self, stage: Stage) -> None:
        """Raise where the stage has no query, or its file of them breaks a rule."""
        self._queries(stage)

    def prepare_tokens(self, stage: Stage, encoding: TextEncoding, recipe: dict[str, Any]) -> None:
        """Make BM25's index, the candidates of a stage and all tokens in the cache."""
        source = self._source(stage, encoding)
        if stage == "train" and not self.groups.triples:
            kept_pools(source, self.groups)

    def build(self, stage: Stage) -> PlannedDataset:
        """Return the dataset of one stage.

        Raises:
            FileNotFoundError: a file is not there.
            ValueError: no query is judged in it, or a run or file of queries breaks a rule.
        """
        assert self.encoding is not None
        source = self._source(stage, self.encoding)
        if stage != "train":
            return RankingDataset(source, stage == "test", is_even=stage == "predict")
        if self.groups.triples:
            return TripleDataset(source)
        return GroupDataset(source, self.groups, self.seed)

    @property
    def scores_first(self) -> bool:
        """Whether each candidate, in training too, has the score of a first stage."""
        return self.candidates.scores_first and not self.groups.triples

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
            path: of the run.
        """
        dataset = self.datasets["predict"]
        assert isinstance(dataset, RankingDataset)
        queries = dataset.source.queries
        write_run(path, self._rankings(results["score"]), TAG)
        if self.shows_found:
            self.write_found(path.with_suffix(".csv"), self._rankings(results["score"]), queries)
        if lacking := [n for n in range(len(queries)) if not len(dataset.candidates(n))]:
            names = ", ".join(queries.id(place) for place in lacking[:MOST_NAMED])
            log.warning(
                "%d of %d queries have no candidate and are not in %s, such as %s.",
                *(len(lacking), len(queries), path, names),
            )

    def _rankings(self, scores: np.ndarray) -> Iterator[Ranking]:
        dataset = self.datasets["predict"]
        assert isinstance(dataset, RankingDataset)
        for place in range(len(dataset.source.queries)):
            documents = dataset.candidates(place)
            found = scores[place, : len(documents)].astype(np.float64).round(DECIMALS)
            order = np.argsort(-found, kind="stable")
            ids = [self.collection.document_id(int(index)) for index in documents[order]]
            yield Ranking(dataset.source.queries.id(place), ids, found[order].tolist())

    def _source(self, stage: Stage, encoding: TextEncoding) -> RankingSource:
        """Return what a stage's queries are ranked from; `build` says what is raised."""
        queries, judgements = self._queries(stage)
        candidates = self.candidates
        if stage == "train" and self.groups.triples:
            candidates = replace(candidates, source="judged", top=None, run=None, bm25=None)
        collection = self.collection_of(stage)
        first = FirstStage(candidates, collection, queries)
        tokens = (
            read_collection(collection, encoding.ids, queries)
            if stage == "predict"  # of a few queries, perhaps
            else kept_collection(
                collection, encoding, queries.indices, self._ranked(first.lists, judgements)
            )
        )
        texts = PairTexts(collection, encoding, tokens)
        return RankingSource(texts, queries, first, judgements, self._teacher(stage, queries))

    def _ranked(self, lists: Lists | None, judgements: JudgedQueries | None) -> np.ndarray:
        """Return which documents, [D] bool, are a candidate of a query, of triples where nothing
        is judged."""
        numbers = [] if lists is None else [lists.documents]
        if judgements is None:
            numbers += [self._triples().positive, self._triples().negative]
        else:
            numbers.append(judgements.judgements.document)
        return is_among(self.collection.num_documents, *numbers)

    def _queries(self, stage: Stage) -> tuple[Queries, JudgedQueries | None]:
        if stage == "predict" and self.predict_queries is not None:
            return FileQueries(Path(self.predict_queries).expanduser()), None
        if stage == "train" and self.groups.triples:
            return CollectionQueries(self.collection, self._triples().query), None
        part = PART_NAMES.index("test" if stage == "predict" else stage)
        judgements = JudgedQueries(self.collection.judgements(part))
        if not len(judgements.queries):
            raise ValueError(
                f"no query is judged for {stage}; name its judgements in data.collection."
            )
        return CollectionQueries(self.collection, judgements.queries), judgements

    def _teacher(self, stage: Stage, queries: Queries) -> Lists | None:
        if self.teacher is None or stage == "predict":
            return None
        facts = (self.teacher, self.collection, queries, None, "data.teacher")
        return run_lists(*facts, may_lack_all=stage != "train")

    def _triples(self) -> Triples:
        triples = self.collection.triples
        if triples is None:
            raise ValueError(
                "data.groups.triples: the collection has no triples; name their file with "
                "data.collection.files.triples, or leave groups.triples out."
            )
        return triples

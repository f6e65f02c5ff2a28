"""Datamodule of rankers: queries with their candidates as planned batches.

Shapes: B queries in the micro-batch, K candidates per query, P pairs, J judgements per query.
"""

import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from datamodules.core.batches import padded
from datamodules.core.plan import rng_for
from datamodules.core.planned import PlannedDataset, Stage
from datamodules.core.store import digest_of
from datamodules.search.candidates import (
    Bm25Options,
    CandidateOptions,
    GroupOptions,
    candidate_lists,
    open_bm25,
)
from datamodules.search.collection import Collection
from datamodules.search.datamodule import TERM, SearchDataModule, kept_texts
from datamodules.search.queries import (
    NO_DOCUMENT,
    NO_GRADE,
    NO_SCORE,
    Queries,
    Ranking,
    values_of,
)
from datamodules.text.encoding import TextEncoding

ROWS_OF_PART = 64  # smaller parts save padding but lose more to small matrix products
NO_TEXT = np.zeros(0, np.int64)
DECIMALS = 6  # of a written score
MOST_NAMED = 3  # queries named in a message
log = logging.getLogger(__name__)


class RankingDataset(PlannedDataset):
    """Queries with all their candidates, in training with a group drawn from them. In the test the
    scores of the first stage and of BM25 come along as baselines.

    Args:
        queries: the queries with any judgements they have.
        groups: how each training epoch draws candidates.
        seed: key of the draw, with epoch and sample id.
    """

    def __init__(
        self,
        collection: Collection,
        encoding: TextEncoding,
        queries: Queries,
        options: CandidateOptions,
        bm25: Bm25Options | None,
        stage: Stage,
        groups: GroupOptions = GroupOptions(),  # noqa: B008 - frozen
        seed: int = 0,
    ) -> None:
        self.collection, self.encoding, self.queries = collection, encoding, queries
        self.options, self.stage = options, stage
        self.groups, self.seed = groups if stage == "train" else None, seed
        self.bm25 = None if bm25 is None else open_bm25(collection, bm25)
        # Rankings that a test compares with the ranker's.
        self.baselines = ["first"] * (options.source == "run") + ["bm25"] * (bm25 is not None)
        listed = (options.top, collection, queries, "data.candidates")
        self.lists = candidate_lists(options, bm25, *listed)
        self.document_tokens, self.query_tokens = kept_texts(collection, encoding, queries)
        places, sizes = range(len(queries)), self.document_tokens.sizes
        lengths = [self._length(place, sizes) for place in places]
        self.lengths = np.maximum(1, np.array(lengths, np.int64))
        lists = [self.lists.fingerprint] if self.lists else []
        group_options = self.groups and asdict(self.groups)
        which = queries.digest if stage == "predict" else len(places)  # fingerprint covers parts
        facts = [collection.fingerprint, encoding.digest, lists, which, group_options]
        self.fingerprint = digest_of([*facts, bm25 and asdict(bm25)])
        self.target_counts = {TERM: None}
        # All prediction batches have the width of the longest list, so that results concatenate.
        even = places if stage == "predict" else ()
        self.width = max((len(self.candidates(place)) for place in even), default=1)

    def listed(self, place: int) -> np.ndarray:
        """Return the documents listed for a query, best first, else the judged ones, ascending."""
        lists = self.lists
        return self.queries.judged(place).documents if lists is None else lists.of(place)[0]

    def candidates(self, place: int) -> np.ndarray:
        """Return the documents that are ranked for a query, ascending."""
        return np.sort(self.listed(place))

    def graded(self, place: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return a query's candidates of this epoch [K] int64, ascending, and their grades [K]
        float32, NaN = unjudged; `rng` is the sample's generator of the epoch."""
        judged = self.queries.judged(place)
        if self.groups is None:
            documents = self.candidates(place)
            return documents, values_of(documents, *judged)
        minable = self.groups.minable(self.listed(place), judged.documents)
        chosen = self.groups.draw(judged.grades, len(minable), rng)
        documents = np.append(judged.documents, minable)[chosen]
        grades = np.append(judged.grades, np.zeros(len(minable), np.float32))[chosen]
        order = np.argsort(documents)
        return documents[order], grades[order]

    def bm25_scores(self, place: int, documents: np.ndarray) -> np.ndarray:
        """Return BM25 scores of documents, [n] float32; all 0 without BM25."""
        if self.bm25 is None:
            return np.zeros(len(documents), np.float32)
        return self.bm25.scores(self.queries[place].text, documents).astype(np.float32)

    def first_scores(self, place: int, documents: np.ndarray) -> np.ndarray:
        """Return the first stage's scores of documents, [n] float32; all 0 without a first stage.

        A document that the run does not list gets the lowest score in the query's list.
        """
        if self.options.source != "run":
            return self.bm25_scores(place, documents)
        assert self.lists is not None
        listed, values = self.lists.of(place)
        if not len(listed):
            return np.zeros(len(documents), np.float32)
        scores = values_of(documents, listed, values)
        return np.where(np.isnan(scores), values.min(), scores)

    def prior(self, place: int, scores: np.ndarray) -> np.ndarray:
        """Return first-stage scores [K] standardised by mean and standard deviation of the query's
        whole list, so that they do not depend on the candidates drawn in a training step."""
        if self.lists is None:
            known = self.first_scores(place, self.queries.judged(place).documents)
        else:
            known = self.lists.of(place)[1]
        if not len(known):
            return scores
        return (scores - float(known.mean())) / (float(known.std()) or 1.0)

    def batch(self, sample_ids: np.ndarray, epoch: int) -> dict[str, Any]:
        """Return the padded batch of queries with this epoch's candidates."""
        places = sample_ids.tolist()
        groups = [self.graded(place, rng_for(self.seed, epoch, place)) for place in places]
        each = [(place, documents) for place, (documents, _) in zip(places, groups, strict=True)]
        sizes = np.array([len(documents) for _, documents in each])
        index = np.full((len(places), max(self.width, *sizes)), NO_DOCUMENT)
        width = index.shape[1]
        texts = [self.document_tokens[number] for _, own in each for number in own.tolist()]
        queries = [self.query_tokens[place] for place, own in each for _ in own]
        # If no query has a candidate, the batch has one empty row.
        rows = self.encoding.rows(texts or [NO_TEXT], queries or [NO_TEXT])
        order = rows["attention_mask"].sum(1).argsort(descending=True, stable=True)
        row_of = order.argsort()[: len(texts)]
        if self.groups is None:
            # Copies of a document have the score of the first: no rounding error orders them.
            known: dict[bytes, int] = {}
            ids = rows["input_ids"].numpy()[: len(texts)]
            row_of = row_of[[known.setdefault(own.tobytes(), n) for n, own in enumerate(ids)]]
        rows = {name: values[order] for name, values in rows.items()}
        index[np.arange(width) < sizes[:, None]] = row_of
        first = [self.first_scores(*own) for own in each]
        all_grades = [self.queries.judged(place).grades for place in places]
        columns = {
            "relevance": padded([grades for _, grades in groups], NO_GRADE, width),
            "prior": padded(list(map(self.prior, places, first)), NO_SCORE, width),
            "all_relevance": padded(all_grades, NO_GRADE, 1),
        }
        num_parts = 1
        if self.groups is not None:
            # From the largest group size, so that all replicas agree; each part has a pair.
            most = len(places) * self.groups.size // ROWS_OF_PART
            num_parts = max(1, min(len(places), most))
        batch = {
            **rows,
            **{name: torch.from_numpy(values) for name, values in columns.items()},
            "pair_lengths": rows["attention_mask"].sum(1).numpy(),
            "num_parts": num_parts,
            "pair_index": torch.from_numpy(index),
        }
        if self.stage == "test":
            scores = {"first": first, "bm25": [self.bm25_scores(*own) for own in each]}
            batch["baselines"] = {
                name: torch.from_numpy(padded(scores[name], NO_SCORE, width))
                for name in self.baselines
            }
        return batch

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the query and the grades of this epoch's candidates."""
        documents, grades = self.graded(sample_id, rng_for(self.seed, epoch, sample_id))
        names = [self.collection.documents[int(number)].id for number in documents]
        shown = (f"{name}:{grade:g}" for name, grade in zip(names, grades.tolist(), strict=True))
        return {"query": self.queries[sample_id].text, "candidates": " ".join(shown)}

    def _length(self, place: int, sizes: np.ndarray) -> int:
        """Return the positions of all rows of a query; for a drawn group, its size times the mean.
        `sizes` are the tokens of each document of the collection."""
        of_query = 1 + min(len(self.query_tokens[place]), self.encoding.limits.max_query_length)
        if self.groups is None:
            return int(self.encoding.positions(of_query + sizes[self.candidates(place)]).sum())
        judged = self.queries.judged(place).documents
        minable = self.groups.minable(self.listed(place), judged)
        positions = self.encoding.positions(of_query + sizes[np.append(judged, minable)])
        return int(sum(self.groups.sizes(len(judged), len(minable))) * positions.mean())


class RankingDataModule(SearchDataModule):
    """Serves queries with their candidates. A prediction is a run, TREC's file format of rankings.

    Args:
        candidates: the documents that are ranked for a query in evaluation and prediction, and
            from which training mines hard negatives.
        groups: the candidates of a query in a training step.
        predict_part: part whose judged queries a prediction ranks if there is no file of queries.
        search: collection, output, tokenizer and more, see `SearchDataModule`.

    Raises:
        ValueError: options contradict each other.
    """

    default_output = "ranked.trec"

    def __init__(
        self,
        candidates: CandidateOptions = CandidateOptions(),  # noqa: B008 - frozen
        groups: GroupOptions = GroupOptions(),  # noqa: B008 - frozen
        predict_part: Literal["train", "validation", "test"] = "test",
        **search: Any,
    ) -> None:
        super().__init__(**search)
        self.candidates, self.groups, self.predict_part = candidates, groups, predict_part
        # Whether every candidate, also in training, has a first-stage score.
        self.scores_first = candidates.source == "run" or self.bm25 is not None
        if groups.mined and candidates.source == "judged":
            raise ValueError(
                f"groups.mined is {groups.mined}, but candidates.source judged has nothing to mine "
                "from; choose source bm25 or run."
            )
        if self.predict_queries is not None and candidates.source == "judged":
            raise ValueError(
                f"nothing is judged for data.predict_queries {self.predict_queries}; set "
                "data.candidates.source to bm25 or run."
            )

    def check_stage(self, stage: Stage) -> None:
        """Raise if the stage has no query, or its file of queries breaks a rule."""
        self._queries(stage)

    def make_dataset(
        self, stage: Stage, encoding: TextEncoding, recipe: dict[str, Any]
    ) -> RankingDataset:
        """Return the dataset of one stage.

        Raises:
            FileNotFoundError: a file does not exist.
            ValueError: the stage has no judged query, or a run or file of queries breaks a rule.
        """
        facts = (self.candidates, self.bm25, stage, self.groups, self.seed)
        return RankingDataset(self.collection_of(stage), encoding, self._queries(stage), *facts)

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write the run, best first, ties in document order; for queries of a file, and for pages,
        also a .csv of the best documents, see `write_rankings`.

        `results["score"]` [N, K], by candidates in document order, is rounded to 6 decimals, since
        further digits are rounding errors of single precision.
        """
        dataset = self.datasets["predict"]
        assert isinstance(dataset, RankingDataset)
        queries = dataset.queries

        def rankings() -> Iterator[Ranking]:
            for place, query in enumerate(queries):
                documents = dataset.candidates(place)
                own = results["score"][place, : len(documents)].astype(np.float64).round(DECIMALS)
                order = np.argsort(-own, kind="stable")
                ids = [self.collection.documents[n].id for n in documents[order].tolist()]
                yield Ranking(query.id, ids, own[order].tolist())

        table = path.with_name(f"{path.name}.csv")
        self.write_rankings(path, table, rankings(), queries)
        if lacking := [n for n in range(len(queries)) if not len(dataset.candidates(n))]:
            names = ", ".join(queries[place].id for place in lacking[:MOST_NAMED])
            share = f"{len(lacking)} of {len(queries)} queries"
            log.warning(f"{share} have no candidate and are not in {path}, such as {names}.")

    def _queries(self, stage: Stage) -> Queries:
        if stage != "predict":
            return self.judged(stage)
        return self.queries_of_file() or self.judged(self.predict_part)

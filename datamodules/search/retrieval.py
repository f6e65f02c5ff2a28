"""RetrievalDataModule: a collection becomes planned batches for the retriever."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from datamodules.core.planned import PlannedDataset, Stage
from datamodules.files.splitting import PART_NAMES
from datamodules.search.bm25 import Bm25Options
from datamodules.search.datamodule import RelevanceDataModule
from datamodules.search.encoded_collection import EncodedCollection, NumberType, write_encoded
from datamodules.search.judged_queries import JudgedQueries
from datamodules.search.negatives import HardNegatives, check_negatives
from datamodules.search.queries import CollectionQueries, FileQueries, Queries
from datamodules.search.retrieval_texts import TextsDataset, chosen_documents, kept_evaluation
from datamodules.search.training_mix import TrainingMix, pair_counts, pair_tokens
from datamodules.search.training_pairs import PairDataset
from datamodules.text.encoding import TextEncoding

QueryPart = Literal["train", "validation", "test", "all"]


def no_search(encoded: EncodedCollection) -> None:
    """Leave encoded texts as they are."""


class RetrievalDataModule(RelevanceDataModule):
    """Deals pairs for training, and single texts to encode for everything else.

    In evaluation and prediction a sample is a query or a document, and each is encoded once.

    Args:
        mix: how often each kind of pair comes in an epoch.
        negatives: which documents come along as hard negatives.
        num_others: evaluation searches the judged documents and so many others instead of the
            whole collection, which is easier: its figures say so. None searches all.
        bm25: the first stage that is measured beside the retriever, and fused with it; none
            leaves it out.
        bm25_depth: documents of the first stage for each query.
        predict_part: part whose judged queries a prediction encodes and searches with.
        predict_queries: a file as `FileQueries` reads it, instead of a part.
        predict_depth: documents of each query in the run that a prediction writes.
        predict_type: numbers of the matrices that a prediction writes.
        relevance: collection, output, tokenizer and more, see `RelevanceDataModule`.

    Raises:
        ValueError: a number below 1, or of others below 0, or options in conflict.
    """

    def __init__(
        self,
        mix: TrainingMix = TrainingMix(),  # noqa: B008 - frozen
        negatives: HardNegatives = HardNegatives(),  # noqa: B008 - frozen
        num_others: int | None = None,
        bm25: Bm25Options | None = Bm25Options(),  # noqa: B008 - frozen
        bm25_depth: int = 1000,
        predict_part: QueryPart = "test",
        predict_queries: str | None = None,
        predict_depth: int = 1000,
        predict_type: NumberType = "float32",
        **relevance: Any,
    ) -> None:
        super().__init__(**relevance)
        for name, value in (("bm25_depth", bm25_depth), ("predict_depth", predict_depth)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if num_others is not None and num_others < 0:
            raise ValueError(f"num_others must be 0 or more, got {num_others}.")
        self.mix, self.negatives, self.num_others = mix, negatives, num_others
        self.bm25, self.bm25_depth = bm25, bm25_depth
        if predict_queries is not None and predict_part != "test":
            raise ValueError(
                f"predict_part {predict_part} has no effect beside predict_queries "
                f"{predict_queries}; leave one of them out."
            )
        self.predict_part, self.predict_queries = predict_part, predict_queries
        self.predict_depth = predict_depth
        self.predict_type: NumberType = predict_type
        self.search_encoded: Callable[[EncodedCollection], None] = no_search

    @property
    def predict_output_path(self) -> Path:
        """The folder of encoded texts that a prediction makes."""
        return self.output_path("encoded")

    def check_stage(self, stage: Stage) -> None:
        """Raise where there is nothing to train on, or no query to evaluate or search with."""
        if stage == "predict":
            self._predicted()
            return
        judged = self._judged(stage)
        if stage == "train":
            collection = self.collection_of(stage)
            check_negatives(self.negatives, collection, judged)
            pair_counts(collection, judged.with_relevant(), self.mix)

    def prepare_tokens(self, stage: Stage, encoding: TextEncoding, recipe: dict[str, Any]) -> None:
        """Make the tokens of the stage's texts in the cache."""
        if stage == "predict":
            return
        judged, collection = self._judged(stage), self.collection_of(stage)
        if stage == "train":
            pair_tokens(collection, encoding, judged, self.mix, self.negatives)
        else:
            documents = self._searched(judged)
            is_whole = self.mix.reads_whole
            kept_evaluation(collection, encoding, judged.queries, documents, is_whole)

    def build(self, stage: Stage) -> PlannedDataset:
        """Return the dataset of one stage.

        Raises:
            ValueError: there is nothing to train on, or no query to evaluate or search with.
        """
        assert self.encoding is not None
        collection, encoding = self.collection_of(stage), self.encoding
        if stage == "train":
            facts = (self._judged(stage), self.mix, self.negatives, self.seed)
            return PairDataset(collection, encoding, *facts)
        if stage == "predict":
            everything = np.arange(collection.num_documents)
            return TextsDataset(collection, encoding, self._predicted(), everything)
        judged = self._judged(stage)
        documents, is_whole = self._searched(judged), self.mix.reads_whole
        first = (self.bm25, self.bm25_depth, is_whole)
        queries = CollectionQueries(collection, judged.queries)
        return TextsDataset(collection, encoding, queries, documents, judged, *first)

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write the encoded texts, and whatever `search_encoded` finds in them."""
        dataset = self.datasets["predict"]
        assert isinstance(dataset, TextsDataset)
        vectors, num_queries = results["vector"], len(dataset.queries)
        collection = self.collection
        write_encoded(
            path,
            {"queries": vectors[:num_queries], "documents": vectors[num_queries:]},
            {
                "queries": (dataset.queries.id(place) for place in range(num_queries)),
                "documents": (collection.document_id(int(n)) for n in dataset.documents),
            },
            self.predict_type,
            {
                "collection": collection.fingerprint,
                "queries": self.predict_queries or self.predict_part,
            },
            self.search_encoded,
        )

    def _searched(self, judged: JudgedQueries) -> np.ndarray:
        """Return the numbers of the documents that an evaluation searches, ascending."""
        return chosen_documents(judged, self.collection.num_documents, self.num_others)

    def _judged(self, stage: Stage) -> JudgedQueries:
        """Return the judgements of a stage; training can do without."""
        judged = JudgedQueries(self.collection.judgements(PART_NAMES.index(stage)))
        if stage != "train" and not len(judged.queries):
            raise ValueError(
                f"no query is judged for {stage}; name its judgements in data.collection."
            )
        return judged

    def _predicted(self) -> Queries:
        """Return the queries that a prediction searches with."""
        if self.predict_queries is not None:
            return FileQueries(Path(self.predict_queries).expanduser())
        if self.predict_part == "all":
            return CollectionQueries(self.collection, np.arange(self.collection.num_queries))
        judgements = self.collection.judgements(PART_NAMES.index(self.predict_part))
        queries = np.unique(judgements.query)
        if not len(queries):
            raise ValueError(
                f"predict_part is {self.predict_part}, and no query is judged there; take "
                "another part, or all."
            )
        return CollectionQueries(self.collection, queries)

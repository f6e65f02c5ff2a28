"""RelevanceDataModule: what the data of rankers and retrievers shares, a collection."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from datamodules.core.planned import Stage
from datamodules.files.audit import Audit, AuditPart, MakeModel
from datamodules.files.rows import hand_over_rejected
from datamodules.files.splitting import PART_NAMES
from datamodules.files.tables import TableWriter
from datamodules.search.collection import Collection, CollectionRequest, open_collection
from datamodules.search.queries import Queries
from datamodules.search.runs import Ranking
from datamodules.search.texts import TextRecord
from datamodules.text.encoding import EncodedTextDataModule
from datamodules.text.terms import sentences_of, words_of

MOST_TOKENIZER_TEXTS = 200_000
NUM_FOUND = 10  # documents of a query in the table for people
FOUND_COLUMNS = ("query_id", "query", "rank", "score", "address", "title", "snippet")
SNIPPET_LENGTH, LONGEST_READ = 200, 50_000  # characters


class RelevanceDataModule(EncodedTextDataModule):
    """Opens a collection of documents, queries and judgements; a family builds its datasets.

    Args:
        collection: which files, in which format; embedded demo data without any.
        on_bad_rows: `error` names the first 20, `reject` leaves them out.
        predict_output: where a prediction goes; none is a name in the run folder.
        encoded: tokenizer, lengths, batch sizes, plan and loader, see `EncodedTextDataModule`.
    """

    def __init__(
        self,
        collection: CollectionRequest = CollectionRequest(),  # noqa: B008 - frozen
        on_bad_rows: Literal["error", "reject"] = "error",
        predict_output: str | None = None,
        **encoded: Any,
    ) -> None:
        super().__init__(**encoded)
        self.collection_request, self.on_bad_rows = collection, on_bad_rows
        self.predict_output = predict_output
        self._collection: Collection | None = None
        self._without_leak: Collection | None = None

    @property
    def collection(self) -> Collection:
        """The documents, queries and judgements; made in the cache at first use."""
        if self._collection is None:
            self._collection = open_collection(self.collection_request, self.on_bad_rows)
        return self._collection

    def collection_of(self, stage: Stage) -> Collection:
        """Return the collection as a stage may read it, see `Collection.without_leak`."""
        if stage == "predict":
            return self.collection
        if self._without_leak is None:
            self._without_leak = self.collection.without_leak()
        return self._without_leak

    def write_found(self, path: Path, rankings: Iterable[Ranking], queries: Queries) -> None:
        """Write the best 10 documents of each query as a table, with their addresses, titles and
        what they say of the query; an older table is replaced.

        Args:
            path: .csv, .tsv or .parquet.
            rankings: of queries by their ids.
            queries: that have these ids.
        """
        texts = {queries.id(place): queries.text(place) for place in range(len(queries))}
        rows: dict[str, list[Any]] = {name: [] for name in FOUND_COLUMNS}
        for ranking in rankings:
            pairs = list(zip(ranking.documents, ranking.scores, strict=True))[:NUM_FOUND]
            for rank, (id, score) in enumerate(pairs, start=1):
                index, query = self.collection.document_index(id), texts[ranking.query]
                document = self.collection.document(index)
                place = (self.collection.address(index), document.title)
                shown = snippet(document.text, query)
                values = (ranking.query, query, rank, round(score, 6), *place, shown)
                for column, value in zip(rows.values(), values, strict=True):
                    column.append(value)
        with TableWriter(path, overwrite=True) as table:
            table.write(pa.RecordBatch.from_pydict(rows))

    @property
    def shows_found(self) -> bool:
        """Whether a prediction writes a table of what was found, for people."""
        is_asked = getattr(self, "predict_queries", None) is not None
        return is_asked or self.collection.facts["format"] == "pages"

    def prepare_data(self) -> None:
        """Make collection and tokenizer in the cache; copy rejected rows to the run folder."""
        made = open_collection(self.collection_request, self.on_bad_rows)
        run_folder = self.trainer.default_root_dir if self.trainer is not None else "."
        hand_over_rejected(made.folder, Path(run_folder))
        super().prepare_data()

    def training_texts(self) -> Iterator[str]:
        """Yield documents with their titles; of very many, evenly spread ones."""
        count = self.collection.num_documents
        for index in range(0, count, 1 + count // MOST_TOKENIZER_TEXTS):
            yield self.collection.document_text(index)

    def texts_digest(self) -> str:
        return self.collection.fingerprint

    def audit(self, make_model: MakeModel | None = None) -> Audit:
        """Return what is in the collection, and what is wrong with it, whatever the model."""
        collection = open_collection(self.collection_request, "reject")
        facts, contents = collection.facts, collection.queries.column("contents")
        audit = Audit("queries", "bytes", bad_rows=collection.bad_rows)
        judged: list[np.ndarray] = []
        for number, name in enumerate(PART_NAMES):
            judgements = collection.judgements(number)
            queries, is_relevant = np.unique(judgements.query), judgements.grade > 0
            judged.append(queries)
            if not len(queries):
                continue
            num_relevant = int(is_relevant.sum())
            columns: dict[str, int | str] = {
                "judgements": len(judgements.query),
                "relevant": num_relevant,
                "relevant per query": f"{num_relevant / len(queries):.1f}",
            }
            lengths = np.asarray(collection.query_lengths)[queries]
            audit.parts.append(AuditPart(name, lengths, contents[queries], columns))
            grades, counts = np.unique(judgements.grade, return_counts=True)
            named = (f"{grade:g}" for grade in grades)
            audit.labels[f"{name} grades"] = dict(zip(named, counts.tolist(), strict=True))
            num_without = len(queries) - len(np.unique(judgements.query[is_relevant]))
            if num_without:
                audit.warnings.append(
                    f"{name} queries with no document above grade 0: {num_without:,}"
                )
        documents = collection.documents.column("contents")
        is_empty = documents == np.uint64(TextRecord("", "", "").content_hash)
        num_repeated = (~is_empty).sum() - len(np.unique(documents[~is_empty]))
        lengths = np.asarray(collection.document_lengths)
        middle, high, most = np.quantile(lengths, [0.5, 0.95, 1]).round().astype(int)
        sentence = f"bytes: median {middle:,}, 95 % up to {high:,}, longest {most:,}"
        audit.notes.append(("documents", f"{len(lengths):,}; {sentence}"))
        if facts["num_triples"]:
            audit.notes.append(("triples", f"{facts['num_triples']:,}"))
        num_unjudged = collection.num_queries - len(np.unique(np.concatenate(judged)))
        sentence = f"{num_unjudged:,} queries have no judgement and are in no part"
        audit.notes.append(("unjudged", sentence))
        for count, sentence in (
            (is_empty.sum(), "documents with neither title nor text"),
            (num_repeated, "documents with the words of an earlier one"),
            (facts["queries"]["num_merged"], "queries that stand in two files alike, taken once"),
            (facts["num_merged_judgements"], "judgements that repeat another, taken once"),
            (facts["num_fractional_grades"], "grades that are no whole numbers, taken as they are"),
        ):
            if count:
                audit.warnings.append(f"{sentence}: {count:,}")
        return audit

    def output_path(self, default_name: str) -> Path:
        """Return where a prediction goes."""
        if self.predict_output is not None:
            return Path(self.predict_output).expanduser()
        folder = self.trainer.default_root_dir if self.trainer is not None else "."
        return Path(folder) / default_name


def snippet(text: str, query: str) -> str:
    """Return what a text says of a query: from the sentence with most of its words, on one line."""
    words = {word.casefold() for word in words_of(query)}
    sentences = sentences_of(text[:LONGEST_READ].split("\n"))
    shared = [len(words & {word.casefold() for word in words_of(s)}) for s in sentences]
    first = shared.index(max(shared)) if shared else 0
    found = " ".join(sentences[first : first + SNIPPET_LENGTH])[: SNIPPET_LENGTH + 1]
    return (
        found if len(found) <= SNIPPET_LENGTH else found[:SNIPPET_LENGTH].rpartition(" ")[0] + " …"
    )

"""Base datamodule of rankers and retrievers: a collection, its tokens, and tables of results."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from datamodules.core.planned import Stage
from datamodules.core.store import text_hash
from datamodules.files.audit import Audit, AuditPart
from datamodules.files.rows import OnBadRows, hand_over_rejected, read_rejected
from datamodules.files.splitting import PART_NAMES
from datamodules.files.tables import write_batches
from datamodules.search.candidates import Bm25Options
from datamodules.search.collection import Collection, CollectionRequest, TextTable, open_collection
from datamodules.search.queries import Queries, Ranking, file_queries, read_run, write_run
from datamodules.text.encoding import (
    EncodedTextDataModule,
    TextEncoding,
    TokenRows,
    kept_tokens,
    sentences_of,
    words_of,
)

TERM = "queries"  # name of the loss term, a mean over queries
MOST_TOKENIZER_TEXTS = 200_000
NUM_FOUND = 10  # documents per query in the table for people
FOUND_COLUMNS = ("query_id", "query", "rank", "score", "address", "title", "snippet")
SNIPPET_LENGTH, LONGEST_READ = 200, 50_000  # characters


def kept_texts(
    collection: Collection, encoding: TextEncoding, queries: Queries
) -> tuple[TokenRows, TokenRows]:
    """Return the uncut tokens of all documents and of all queries, cached at first use."""
    prompts, documents = encoding.prompts, collection.documents
    whole = (prompts["document"] + document.whole for document in documents)
    asked = (prompts["query"] + query.text for query in queries)
    return (
        kept_tokens(["documents", collection.fingerprint], encoding, whole, None),
        kept_tokens(["queries", queries.digest], encoding, asked, None),
    )


class SearchDataModule(EncodedTextDataModule):
    """Opens a collection of documents, queries and judgements; subclasses build the datasets.

    Args:
        collection: the files and their options; without a folder, demo data.
        on_bad_rows: `error` fails and names the first, `reject` skips all (see rejected.csv).
        predict_output: output of a prediction; `None` picks a name in the run folder.
        predict_queries: file of queries to predict for (txt lines, a table or jsonl), instead of
            the collection's judged queries.
        bm25: options of BM25, the first stage and a baseline; `None` leaves BM25 out, which saves
            indexing the collection.
        encoded: tokenizer, lengths, batch sizes, plan and loader, see `EncodedTextDataModule`.
    """

    def __init__(
        self,
        collection: CollectionRequest = CollectionRequest(),  # noqa: B008 - frozen
        on_bad_rows: OnBadRows = "error",
        predict_output: str | None = None,
        predict_queries: str | None = None,
        bm25: Bm25Options | None = Bm25Options(),  # noqa: B008 - frozen
        **encoded: Any,
    ) -> None:
        super().__init__(**encoded)
        self.collection_request, self.on_bad_rows = collection, on_bad_rows
        self.predict_output, self.predict_queries = predict_output, predict_queries
        self.bm25 = bm25

    @cached_property
    def collection(self) -> Collection:
        """Documents, queries and judgements; cached at first use."""
        return open_collection(self.collection_request, self.on_bad_rows)

    def collection_of(self, stage: Stage) -> Collection:
        """Return the collection for a stage; all but prediction use `Collection.without_leak`."""
        return self.collection if stage == "predict" else self.collection.without_leak()

    def judged(self, part: str, may_lack: bool = False) -> Queries:
        """Return the queries of a part that have judgements.

        Raises:
            ValueError: there are none, and not `may_lack`.
        """
        judgements = self.collection.judgements(PART_NAMES.index(part))
        judged = Queries(self.collection.queries, self.collection.fingerprint, judgements)
        if not (may_lack or len(judged)):
            raise ValueError(
                f"no query is judged for {part}; name its judgements in data.collection, a share "
                "in its split, or leave it out: --test_after_fit=false, another data.predict_part."
            )
        return judged

    def queries_of_file(self, mode: OnBadRows | None = None) -> Queries | None:
        """Return the queries of `predict_queries`, if given; `mode` replaces `on_bad_rows`."""
        if self.predict_queries is None:
            return None
        return file_queries(Path(self.predict_queries).expanduser(), mode or self.on_bad_rows)

    def prepare_data(self) -> None:
        """Make collection and tokenizer in the cache; copy rejected rows to the run folder."""
        hand_over_rejected(self.collection.folder, self.run_folder)
        if self._trainer_stage() == "predict" and (queries := self.queries_of_file()) is not None:
            hand_over_rejected(queries.table.folder, self.run_folder)
        super().prepare_data()

    def training_texts(self) -> Iterator[str]:
        """Yield documents with titles: all, or an even sample of a large collection."""
        count = len(self.collection.documents)
        for index in range(0, count, 1 + count // MOST_TOKENIZER_TEXTS):
            yield self.collection.documents[index].whole

    def texts_digest(self) -> str:
        return self.collection.fingerprint

    def audit(self) -> Audit:
        """Return contents and faults of the collection; needs no model."""
        collection = open_collection(self.collection_request, "reject")
        contents = _contents(collection.queries)
        audit = Audit("queries", "bytes", bad_rows=read_rejected(collection.folder))
        for number, name in enumerate(PART_NAMES):
            judgements = collection.judgements(number)
            queries, is_relevant = np.unique(judgements.query), judgements.grade > 0
            if not len(queries):
                continue
            num_relevant = int(is_relevant.sum())
            columns: dict[str, int | str] = {
                "judgements": len(judgements.query),
                "relevant": num_relevant,
                "relevant per query": f"{num_relevant / len(queries):.1f}",
            }
            lengths = collection.queries.lengths[queries]
            audit.parts.append(AuditPart(name, lengths, contents[queries], columns))
            grades, counts = np.unique(judgements.grade, return_counts=True)
            names = (f"{grade:g}" for grade in grades)
            audit.labels[f"{name} grades"] = dict(zip(names, counts.tolist(), strict=True))
            if count := len(queries) - len(np.unique(judgements.query[is_relevant])):
                audit.warnings.append(f"{name} queries with no document above grade 0: {count:,}")
        num_unjudged = len(collection.queries) - sum(len(part.lengths) for part in audit.parts)
        if (to_predict := self.queries_of_file("reject")) is not None:
            part = AuditPart("predict", to_predict.table.lengths, _contents(to_predict.table))
            audit.parts.append(part)
            audit.bad_rows += read_rejected(to_predict.table.folder)
        documents, lengths = _contents(collection.documents), collection.documents.lengths
        middle, high, most = np.quantile(lengths, [0.5, 0.95, 1]).round().astype(int)
        sentence = f"bytes: median {middle:,}, 95 % up to {high:,}, longest {most:,}"
        audit.notes.append(("documents", f"{len(lengths):,}; {sentence}"))
        sentence = f"{num_unjudged:,} queries have no judgement and are in no part"
        audit.notes.append(("unjudged", sentence))
        full = documents[documents != text_hash("")]
        if count := len(documents) - len(full):
            audit.warnings.append(f"documents with neither title nor text: {count:,}")
        if count := len(full) - len(np.unique(full)):
            audit.warnings.append(f"documents with the words of an earlier one: {count:,}")
        return audit

    def write_rankings(
        self, path: Path, table: Path, rankings: Iterable[Ranking], queries: Queries
    ) -> None:
        """Write rankings as a run. For queries of a file, and for pages, also write a .csv with the
        best 10 documents of each query: address, title and snippet. Raises FileExistsError, before
        anything is written, if either file exists."""
        has_table = self.predict_queries is not None or self.collection.facts["format"] == "pages"
        if has_table and table.exists():
            raise FileExistsError(f"{table} exists and is not overwritten; move it away.")
        write_run(path, rankings)
        if not has_table:
            return
        texts = {query.id: query.text for query in queries}
        rows: list[tuple[Any, ...]] = []
        for ranking in read_run(path):
            query = texts[ranking.query]
            numbers = self.collection.documents.indices_of(ranking.documents[:NUM_FOUND]).tolist()
            for rank, hit in enumerate(zip(numbers, ranking.scores, strict=False), 1):
                rows.append((ranking.query, query, rank, *self.shown(query, *hit)[1:]))
        columns = zip(*rows, strict=True) if rows else [()] * len(FOUND_COLUMNS)
        batch = pa.RecordBatch.from_arrays([*map(pa.array, columns)], FOUND_COLUMNS)
        write_batches(table, [batch])

    def shown(self, query: str, number: int, score: float) -> tuple[int, float, str, str, str]:
        """Return number, score, address or id, title and snippet of a retrieved document."""
        document = self.collection.documents[number]
        place = (document.address or document.id, document.title)
        return number, round(score, 6), *place, snippet(document.text, query)


def snippet(text: str, query: str) -> str:
    """Return one line of a text, from the sentence that shares the most words with the query."""
    words = {word.casefold() for word in words_of(query)}
    sentences = sentences_of(text[:LONGEST_READ].split("\n"))
    shared = [len(words & {word.casefold() for word in words_of(s)}) for s in sentences]
    first = shared.index(max(shared)) if shared else 0
    best = " ".join(sentences[first : first + SNIPPET_LENGTH])[: SNIPPET_LENGTH + 1]
    if len(best) <= SNIPPET_LENGTH:
        return best
    return best[:SNIPPET_LENGTH].rpartition(" ")[0] + " …"


def _contents(table: TextTable) -> np.ndarray:
    """Return [n] integers, equal for texts that differ only in case and spacing."""
    words = (" ".join(f"{text.title} {text.text}".casefold().split()) for text in table)
    return np.array([text_hash(one) for one in words], np.uint64)

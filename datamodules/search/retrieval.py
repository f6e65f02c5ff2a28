"""RetrievalDataModule: pairs to train a retriever, single texts for everything else.

Shapes: B samples of the micro-batch, K documents of one, R most documents that are known, Q queries
among the texts of a batch, J most judgements of one query, F documents of a first stage.
"""

import json
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from datamodules.core.batches import padded
from datamodules.core.plan import check_range, hash_ids, rng_for, rngs_for
from datamodules.core.planned import PlannedDataset, Stage
from datamodules.core.store import (
    cache_folder,
    digest_of,
    made_once,
    naming,
    replacing,
    write_arrays,
)
from datamodules.files.splitting import PART_NAMES
from datamodules.search.candidates import (
    FIRST_DEPTH,
    Bm25Options,
    HardNegatives,
    Hits,
    candidate_lists,
    open_bm25,
)
from datamodules.search.collection import Collection, Judgements
from datamodules.search.datamodule import (
    TERM,
    SearchDataModule,
    kept_documents,
    kept_queries,
    tokens_per_byte,
)
from datamodules.search.queries import (
    NO_DOCUMENT,
    NO_GRADE,
    RELEVANT_ABOVE,
    JudgedQueries,
    Queries,
    numbers_digest,
)
from datamodules.text.encoding import TextEncoding, TokenRows, sentences_of, write_token_rows

KINDS = ("judged", "titles", "sentences")  # of training pairs
FEWEST_WORDS = 4  # of a sentence that can stand for a query
SAMPLE_KEY = 1_607  # of the documents that are drawn; any number
OWN_VERSION = 2  # of the rows of a document's own texts


@dataclass(frozen=True)
class TrainingMix:
    """How often each kind of pair comes in an epoch: the ratio of a mixed training.

    Args:
        judged: times that each judged query is taken, with one of its relevant documents, drawn
            anew each time in proportion to its grade.
        titles: times that each document gives its title as query and its text as answer.
        sentences: times that each document gives one of its sentences as query, drawn anew each
            time, and itself as answer.
        removal: probability that such a sentence is then missing from the document.
        token_dropout: probability that a distinct token is missing from a query or a document in
            this epoch; a text of one token keeps it.

    Raises:
        ValueError: a negative number, nothing at all, or a removal or dropout that is no
            probability.
    """

    judged: int = 1
    titles: int = 0
    sentences: int = 0
    removal: float = 0.9
    token_dropout: float = 0.0

    def __post_init__(self) -> None:
        times = [getattr(self, name) for name in KINDS]
        if min(times) < 0 or not any(times):
            raise ValueError(
                f"mix.{', mix.'.join(KINDS)} must be 0 or more, one of them above 0, got {times}."
            )
        check_range("mix", 0, 1, removal=self.removal, token_dropout=self.token_dropout)

    def counts(self, collection: Collection, judged: JudgedQueries) -> dict[str, int]:
        """Return kind -> how many pairs of it there are, each counted once.

        Args:
            judged: queries that have a relevant document.

        Raises:
            ValueError: nothing is left to train on.
        """
        num_documents = len(collection.documents)
        counts = dict(zip(KINDS, (len(judged.queries), num_documents, num_documents), strict=True))
        if not any(counts[kind] and getattr(self, kind) for kind in KINDS):
            raise ValueError(
                "there is no pair to train on: the training part has no relevant document. Name "
                "judgements in data.collection, or let the documents teach themselves with "
                "data.mix.sentences."
            )
        return counts


def document_sentences(text: str) -> tuple[list[str], list[int]]:
    """Return the sentences of a text, at least one, which may have no word, and the places of
    those that can stand for a query: short ones where there are no others.

    The ends of lines mean nothing, as texts may be wrapped.
    """
    line = " ".join(text.split())
    sentences = sentences_of([line]) or [line]
    long = [n for n, one in enumerate(sentences) if len(one.split()) >= FEWEST_WORDS]
    return sentences, long or list(range(len(sentences)))


class OwnTexts(TokenRows):
    """Titles and sentences of documents, and the documents without them, as mapped tokens.

    The rows of a document of S sentences: its title, its text without it, its sentences, title and
    second sentence, title and first sentence, and the S - 1 others as they stand behind another.

    Attributes:
        first_rows: [documents + 1] int64, the first row of each document.
        can_ask: [rows] bool, whether a row can stand for a query.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.first_rows, self.can_ask = self.arrays["first_rows"], self.arrays["can_ask"]

    def drawn(
        self, number: int, kind: str, removal: float, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the tokens of a query that a document asks itself, and those of the document
        without it; `None` is all of it.

        Args:
            number: of the document.
            kind: `titles`, which a document without one passes over, or `sentences`.
            removal: probability that a sentence is taken out; a single one stays.
        """
        first, end = self.first_rows[number : number + 2].tolist()
        if kind == "titles" and self.can_ask[first]:
            return self[first], self[first + 1]
        num_sentences = (end - first - 2) // 2
        places = self.can_ask[first + 2 : first + 2 + num_sentences].nonzero()[0]
        place = int(places[rng.integers(len(places)) if len(places) > 1 else 0])
        query = self[first + 2 + place]
        if rng.random() >= removal or num_sentences == 1:
            return query, None
        starts, part = self.starts, end - num_sentences
        before = self.tokens[starts[part - (place == 0)] : starts[part + place]]
        behind = self.tokens[starts[part + max(place, 1) + 1] : starts[end]]
        return query, np.concatenate([before, behind])


def own_texts(collection: Collection, encoding: TextEncoding) -> OwnTexts:
    """Return the texts that documents have of their own, tokenised once into the cache."""

    def make(folder: Path) -> None:
        first_rows, can_ask = array("q", [0]), array("b")

        def rows() -> Iterator[np.ndarray]:
            for document in collection.documents:
                title, (sentences, places) = document.title, document_sentences(document.text)
                # Some texts begin with their title, by which they would be found without learning.
                body = document.text.removeprefix(title)
                heads = [document._replace(text=one).whole for one in sentences[1::-1]]
                own = encoding.ids_of([title, body, *sentences, *heads])
                own += encoding.ids_behind(sentences[1:])
                yield from own
                first_rows.append(first_rows[-1] + len(own))
                asks = {0} if title else set()
                asks |= {2 + place for place in places}
                can_ask.extend(row in asks for row in range(len(own)))

        write_token_rows(folder, encoding, rows())
        write_arrays(folder, {"first_rows": first_rows, "can_ask": np.array(can_ask, bool)})

    facts = [OWN_VERSION, collection.fingerprint, encoding.digest]
    return OwnTexts(made_once(cache_folder("own_texts", facts), make))


def estimated_lengths(encoding: TextEncoding, collection: Collection) -> np.ndarray:
    """Return about how many positions each document takes, [documents] int64: its bytes by the
    tokens per byte of some, cut at the encoder's length."""
    sizes = collection.documents.lengths
    positions = np.ceil(sizes * tokens_per_byte(encoding, collection)).astype(np.int64)
    return np.clip(positions + encoding.num_marks, 1, encoding.limits.max_length)


class Pair(NamedTuple):
    """One draw: its kind, token ids of the query, numbers of the document that answers and of hard
    negatives [K], their token ids, and all documents known to answer [R]."""

    kind: str
    query: np.ndarray
    documents: np.ndarray
    texts: list[np.ndarray]
    known: np.ndarray


class PairDataset(PlannedDataset):
    """Pairs of the training part, and of the documents themselves.

    Args:
        judged: queries of the training part that have a relevant document.
        queries: the same, with their texts.
        mix: how often each kind comes.
        negatives: which documents come along as hard negatives.
        bm25: how it scores, where it finds them.
        seed: key of all that is drawn, together with epoch and sample id.

    Raises: as of `run_lists`, and ValueError where nothing is left to train on, or negatives are to
        be judged ones and nobody was found not relevant.
    """

    def __init__(
        self,
        collection: Collection,
        encoding: TextEncoding,
        judged: JudgedQueries,
        queries: Queries,
        mix: TrainingMix,
        negatives: HardNegatives,
        bm25: Bm25Options | None,
        seed: int,
    ) -> None:
        self.collection, self.encoding, self.mix, self.seed = collection, encoding, mix, seed
        self.judged, self.queries, self.negatives = judged, queries, negatives
        judgements, lists = judged.judgements, None
        if negatives.count:
            listed = (negatives.depth, collection, queries, "data.negatives")
            lists = candidate_lists(negatives, bm25, *listed)
            if lists is None and not (judgements.grade <= RELEVANT_ABOVE).any():
                raise ValueError(
                    'negatives.source is "judged", but no document was judged and found not '
                    "relevant (grade 0); take bm25 or run, or set negatives.count to 0."
                )
        self.lists = lists
        self.counts = mix.counts(collection, judged)
        self.ends = np.cumsum([self.counts[kind] * getattr(mix, kind) for kind in KINDS]).tolist()
        self.document_tokens = kept_documents(collection, encoding)
        self.query_tokens = kept_queries(queries, encoding)
        of_document = estimated_lengths(encoding, collection)
        self.own = own_texts(collection, encoding) if mix.titles or mix.sentences else None
        is_relevant = judgements.grade > RELEVANT_ABOVE
        self.relevant = JudgedQueries(Judgements(*(column[is_relevant] for column in judgements)))
        # Of the relevant documents of a query, cumulated in their order: for the draw of one.
        self.shares = np.ones(len(self.relevant.judgements.query))
        of_query = np.zeros(len(queries), np.int64)
        for place in range(len(queries)):
            documents, grades = self.relevant.judged(place)
            of_query[place] = of_document[documents].mean()
            if len(documents) > 1:
                shares = np.cumsum(grades.astype(np.float64) / grades.sum(dtype=np.float64))
                self.shares[self.relevant.part(place)] = shares / shares[-1]
        of_kinds = zip(KINDS, (of_query, of_document, of_document), strict=True)
        self.lengths = np.concatenate([np.tile(own, getattr(mix, kind)) for kind, own in of_kinds])
        drawn = asdict(negatives) | {"run": None, "bm25": bm25 and asdict(bm25)}
        pool = [drawn, lists and lists.fingerprint]
        self.fingerprint = digest_of([asdict(mix), pool, collection.fingerprint, encoding.digest])
        self.target_counts = {TERM: None}

    def pool(self, place: int) -> np.ndarray:
        """Return the documents [n] int64 that negatives of a query are drawn from, those of lists
        in the order of their ranks; relevant ones may be there."""
        if self.lists is not None:
            return self.lists.of(place)[0][self.negatives.skip :]
        documents, grades = self.judged.judged(place)
        return documents[grades <= RELEVANT_ABOVE]

    def pair(self, sample_id: int, rng: np.random.Generator) -> Pair:
        """Draw the pair of a sample."""
        place = bisect_right(self.ends, sample_id)
        kind, first = KINDS[place], self.ends[place - 1] if place else 0
        number = (sample_id - first) % self.counts[kind]
        if kind == "judged":
            part = self.relevant.part(number)
            known = self.relevant.judgements.document[part]
            # As `rng.choice` draws, but faster.
            place = int(self.shares[part].searchsorted(rng.random(), side="right"))
            documents = known[place : place + 1]
            if self.negatives.count:
                pool = np.setdiff1d(self.pool(number), known)
                count = min(self.negatives.count, len(pool))
                documents = np.append(documents, rng.choice(pool, count, replace=False))
            query = self.query_tokens[number]
            texts = [self.document_tokens[document] for document in documents.tolist()]
        else:
            assert self.own is not None
            query, rest = self.own.drawn(number, kind, self.mix.removal, rng)
            documents = known = np.array([number])
            texts = [self.document_tokens[number] if rest is None else rest]
        if self.mix.token_dropout:
            texts = [self._kept(ids, rng) for ids in texts]
            query = self._kept(query, rng)
        return Pair(kind, query, documents, texts, known)

    def batch(self, sample_ids: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        """Return the padded batch of several samples [B] as they are in this epoch."""
        rngs = rngs_for(self.seed, epoch, sample_ids)
        pairs = [self.pair(*own) for own in zip(sample_ids.tolist(), rngs, strict=True)]
        width, most = 1 + self.negatives.count, self.encoding.limits.max_query_length
        missing = [np.zeros(0, np.int64)] * width
        texts = [ids for pair in pairs for ids in [*pair.texts, *missing[len(pair.texts) :]]]
        queries = self.encoding.rows([pair.query[:most] for pair in pairs])
        rows = self.encoding.rows(texts)
        documents = padded([pair.documents for pair in pairs], NO_DOCUMENT, width)
        return {
            "query_ids": queries["input_ids"],
            "query_mask": queries["attention_mask"],
            "document_ids": rows["input_ids"],
            "document_mask": rows["attention_mask"],
            "document": torch.from_numpy(documents.ravel()),
            "known": torch.from_numpy(padded([pair.known for pair in pairs], NO_DOCUMENT)),
        }

    def _kept(self, ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return token ids without those that are dropped in this epoch."""
        if not len(ids):
            return ids
        distinct, which = np.unique(ids, return_inverse=True)
        is_kept = rng.random(len(distinct)) >= self.mix.token_dropout
        return ids[is_kept[which]] if is_kept.any() else ids

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the kind, the query as it is read, and the ids of the documents."""
        pair = self.pair(sample_id, rng_for(self.seed, epoch, sample_id))
        query = self.encoding.tokenizer.decode(pair.query)
        answer, *others = (self.collection.documents[n].id for n in pair.documents.tolist())
        return {"kind": pair.kind, "query": query, "answer": answer, "negatives": " ".join(others)}


class TextsDataset(PlannedDataset):
    """Queries, then documents, each once; a sample is a text: for evaluation and prediction.

    Args:
        documents: [D] numbers of those that are encoded, ascending.
        judged: judgements of the queries; `None` in prediction.
        bm25: how the first stage scores; `None` leaves it out.
    """

    def __init__(
        self,
        collection: Collection,
        encoding: TextEncoding,
        queries: Queries,
        documents: np.ndarray,
        judged: JudgedQueries | None = None,
        bm25: Bm25Options | None = None,
    ) -> None:
        self.collection, self.encoding = collection, encoding
        self.queries, self.documents, self.judged = queries, documents, judged
        self.document_tokens = kept_documents(collection, encoding)
        self.query_tokens = kept_queries(queries, encoding)
        self.bm25 = None if bm25 is None else open_bm25(collection, bm25)
        self.depth = min(FIRST_DEPTH, len(documents)) if bm25 else 0
        of_queries = np.full(len(queries), encoding.limits.max_query_length)
        of_documents = estimated_lengths(encoding, collection)[documents]
        self.lengths = np.concatenate([of_queries, of_documents]).astype(np.int64)
        chosen = digest_of([queries.digest, numbers_digest(documents)])
        options = [bm25 and asdict(bm25), self.depth, judged is not None]
        self.fingerprint = digest_of([collection.fingerprint, encoding.digest, chosen, options])
        self.target_counts = {}

    def batch(self, sample_ids: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        """Return the padded batch; widths of judgements do not depend on it."""
        is_query = sample_ids < len(self.queries)
        places, most = sample_ids[is_query], self.encoding.limits.max_query_length
        numbers = np.empty(len(sample_ids), np.int64)
        numbers[is_query] = self.queries.numbers[places]
        numbers[~is_query] = self.documents[sample_ids[~is_query] - len(self.queries)]
        ids = [
            self.query_tokens[sample_id][:most] if is_one else self.document_tokens[number]
            for sample_id, is_one, number in zip(
                sample_ids.tolist(), is_query.tolist(), numbers.tolist(), strict=True
            )
        ]
        rows = self.encoding.rows(ids)
        batch = {
            "input_ids": rows["input_ids"],
            "attention_mask": rows["attention_mask"],
            "is_query": torch.from_numpy(is_query),
            "text_index": torch.from_numpy(numbers),
        }
        if self.judged is None:
            return batch
        judged = [self.judged.judged(place) for place in places]
        first = Hits(np.zeros((len(places), 0), np.int64), np.zeros((len(places), 0), np.float32))
        if self.bm25 is not None:
            asked = [self.queries[place].text for place in places]
            first = self.bm25.search(asked, self.depth, self.documents)
        width = self.judged.most
        columns = {
            "judged": padded([own.documents for own in judged], NO_DOCUMENT, width),
            "grade": padded([own.grades for own in judged], NO_GRADE, width),
            "first_document": first.documents,
            "first_score": first.scores,
        }
        return batch | {name: torch.from_numpy(values) for name, values in columns.items()}

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the id of the text."""
        if sample_id < len(self.queries):
            return {"query": self.queries[sample_id].id}
        number = int(self.documents[sample_id - len(self.queries)])
        return {"document": self.collection.documents[number].id}


def chosen_documents(
    judged: JudgedQueries, num_documents: int, num_others: int | None
) -> np.ndarray:
    """Return the documents that queries are searched among, ascending.

    Args:
        judged: queries with their judgements.
        num_others: documents besides those that are judged, which depend on nothing but their
            number; `None` takes all.
    """
    everything = np.arange(num_documents)
    if num_others is None:
        return everything
    of_queries = np.unique(judged.judgements.document)
    others = np.setdiff1d(everything, of_queries)
    drawn = others[np.argsort(hash_ids(others, SAMPLE_KEY), kind="stable")[:num_others]]
    return np.sort(np.concatenate([of_queries, drawn]))


class RetrievalDataModule(SearchDataModule):
    """Deals pairs for training, and single texts to encode for everything else.

    In evaluation and prediction a sample is a query or a document, and each is encoded once.

    Args:
        mix: how often each kind of pair comes in an epoch.
        negatives: which documents come along as hard negatives.
        num_others: evaluation searches the judged documents and so many others instead of the
            whole collection, which is easier: its figures say so. `None` searches all.
        predict_part: part whose judged queries a prediction encodes and searches with.
        predict_depth: documents of each query in the run that a prediction writes.
        search: collection, output, tokenizer and more, see `SearchDataModule`.

    Raises:
        ValueError: a number below 1, or of others below 0.
    """

    default_output = "encoded"  # a folder

    def __init__(
        self,
        mix: TrainingMix = TrainingMix(),
        negatives: HardNegatives = HardNegatives(),  # noqa: B008 - frozen
        num_others: int | None = None,
        predict_part: Literal["train", "validation", "test", "all"] = "test",
        predict_depth: int = 1000,
        **search: Any,
    ) -> None:
        super().__init__(**search)
        check_range("data", 1, predict_depth=predict_depth)
        check_range("data", 0, num_others=num_others)
        self.mix, self.negatives, self.num_others = mix, negatives, num_others
        self.predict_part, self.predict_depth = predict_part, predict_depth

    def check_stage(self, stage: Stage) -> None:
        """Raise where there is nothing to train on, or no query to evaluate or search with."""
        if stage == "predict":
            self._predicted()
        elif (judged := self.judged(stage, may_lack=stage == "train")) and stage == "train":
            self.mix.counts(self.collection, judged.with_relevant())

    def make_dataset(
        self, stage: Stage, encoding: TextEncoding, recipe: dict[str, Any]
    ) -> PairDataset | TextsDataset:
        """Return the dataset of one stage.

        Raises:
            ValueError: there is nothing to train on, or no query to evaluate or search with.
        """
        collection = self.collection_of(stage)
        num_documents = len(collection.documents)
        if stage == "predict":
            documents = np.arange(num_documents)
            return TextsDataset(collection, encoding, self._predicted(), documents)
        judged = self.judged(stage, may_lack=stage == "train")
        if stage == "train":
            own = judged.with_relevant()
            queries = self.queries(own.queries)
            facts = (self.mix, self.negatives, self.bm25, self.seed)
            return PairDataset(collection, encoding, own, queries, *facts)
        documents = chosen_documents(judged, num_documents, self.num_others)
        queries = self.queries(judged.queries)
        return TextsDataset(collection, encoding, queries, documents, judged, self.bm25)

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write the encoded texts, and whatever the model's `search` finds in them, whole or not
        at all.

        Args:
            results: `vector` [Q + D, W], larger than memory where it is mapped.

        Raises:
            FileExistsError: the folder is there.
        """
        if path.exists():
            raise FileExistsError(f"{path} exists and is not overwritten; move it away.")
        dataset, vectors = self.datasets["predict"], results["vector"]
        assert isinstance(dataset, TextsDataset)
        queries, documents = np.split(vectors, [len(dataset.queries)])
        ids = [record.id for record in self.collection.documents]
        texts = {
            "queries": (queries, [query.id for query in dataset.queries]),
            "documents": (documents, ids),
        }
        with replacing(path, is_new=True) as unfinished:
            with naming(path):
                unfinished.mkdir()
                for name, (own, names) in texts.items():
                    np.save(unfinished / f"{name}.npy", own)
                    with (unfinished / f"{name}.ids.jsonl").open("w", encoding="utf-8") as file:
                        file.writelines(json.dumps(one) + "\n" for one in names)
            if search := self.model.options.get("search"):
                run, table = unfinished / "run.trec", unfinished / "found.csv"
                self.write_rankings(run, table, search(queries, documents, ids), dataset.queries)

    def _predicted(self) -> Queries:
        """Return the queries that a prediction searches with."""
        if (queries := self.queries_of_file()) is not None:
            return queries
        if self.predict_part == "all":
            return self.queries(np.arange(len(self.collection.queries)))
        judgements = self.collection.judgements(PART_NAMES.index(self.predict_part))
        numbers = np.unique(judgements.query)
        if not len(numbers):
            raise ValueError(
                f"predict_part is {self.predict_part}, and no query is judged there; take "
                "another part, or all."
            )
        return self.queries(numbers)

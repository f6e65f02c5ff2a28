"""Datamodule of retrievers: pairs for training, single texts for evaluation and prediction.

Shapes: B samples of the micro-batch, K documents per sample, R the most relevant documents of a
query, Q queries, J the most judgements of a query, F documents of a first stage.
"""

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from datamodules.core.plan import check_range, hash_ids, keys_for, uniforms_for
from datamodules.core.planned import PlannedDataset, Stage
from datamodules.core.store import (
    cache_folder,
    digest_of,
    made_once,
    naming,
    replacing,
    write_arrays,
)
from datamodules.search.candidates import (
    DISTILLED,
    FIRST_DEPTH,
    Bm25Options,
    CandidateOptions,
    HardNegatives,
    Hits,
    candidate_lists,
)
from datamodules.search.collection import Collection, Judgements
from datamodules.search.datamodule import TERM, SearchDataModule, kept_texts
from datamodules.search.queries import (
    NO_DOCUMENT,
    RELEVANT_ABOVE,
    Queries,
    QueryJudgements,
    numbers_digest,
)
from datamodules.text.encoding import (
    TextEncoding,
    TokenRows,
    prompts_of,
    sentences_of,
    write_token_rows,
)

KINDS = ("judged", "titles", "sentences")  # of training pairs
FEWEST_WORDS = 4  # of a sentence that can serve as a query
SAMPLE_KEY = 1_607  # hash key that draws `num_others` documents; arbitrary
OWN_VERSION = 3  # version of the store of `own_texts`
DRAWS_VERSION = 2  # version of the random draws: a run does not resume with other draws
NUM_DRAWS = 2  # uniform draws of a sample, keys 0 and 1; further hash keys follow
NEGATIVES, OF_QUERY, OF_DOCUMENTS = 2, 3, 4
NO_HASH = np.uint64(2**64 - 1)  # sorts behind all others
NO_TOKENS = np.empty(0, np.int64)
TITLES = KINDS.index("titles")


@dataclass(frozen=True)
class TrainingMix:
    """How often each kind of training pair occurs in an epoch.

    Args:
        judged: pairs per epoch of each judged query with one of its relevant documents, drawn anew
            each time in proportion to the grades.
        titles: pairs per epoch of each document's title, as the query, with its text.
        sentences: pairs per epoch of one of each document's sentences, drawn anew each time, as
            the query, with the document.
        removal: probability that this sentence is removed from the document.
        token_dropout: probability that a distinct token is removed from a query or a document in
            an epoch; a text that would lose all its tokens keeps them.

    Raises:
        ValueError: a negative count, no pairs at all, or a removal or dropout outside 0 to 1.
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

    def counts(self, collection: Collection, queries: Queries) -> list[int]:
        """Return the number of distinct pairs of each kind; `queries` are those with a relevant
        document.

        Raises:
            ValueError: nothing is left to train on.
        """
        counts = [len(queries), *[len(collection.documents)] * 2]
        times = [getattr(self, kind) for kind in KINDS]
        if not np.dot(counts, times):
            raise ValueError(
                "there is no pair to train on: the training part has no relevant document. Name "
                "judgements in data.collection, or let the documents teach themselves with "
                "data.mix.sentences."
            )
        return counts


def document_sentences(text: str) -> tuple[list[str], list[int]]:
    """Return the sentences of a text, at least one (which may be empty), and the indices of those
    that can serve as queries: the long enough ones, or all if none is.

    Line ends do not end a sentence, as texts may be wrapped.
    """
    line = " ".join(text.split())
    sentences = sentences_of([line]) or [line]
    long = [n for n, one in enumerate(sentences) if len(one.split()) >= FEWEST_WORDS]
    return sentences, long or list(range(len(sentences)))


class OwnTexts(TokenRows):
    """Documents' titles and sentences as queries, and the documents without them; mapped tokens.

    Attributes:
        arrays: asking [queries, 3, 2] int64, token ranges (start, end) of a query and of the
            document's text before and behind it; for each document its title, if any, then the
            sentences that can serve as queries; first_asking [documents + 1] int64, where each
            document's queries begin; has_title [documents] bool.
    """

    def draw(
        self, numbers: np.ndarray, is_title: np.ndarray, removal: float, draws: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw a query from each document: its ranges [n, 3, 2] as in `asking`, and [n] bool,
        whether it is removed from the document.

        Args:
            numbers: [n] document numbers.
            is_title: [n] bool, whether the title is the query; without one, a sentence is drawn.
            removal: probability that the sentence is removed; a document's only one never is.
            draws: [n, 2] float64 in [0, 1), for the sentence and for its removal.
        """
        has_title, starts = self.arrays["has_title"][numbers], self.arrays["first_asking"]
        first, end = starts[numbers] + has_title, starts[numbers + 1]
        sentence = first + (draws[:, 0] * (end - first)).astype(np.int64)
        is_title = is_title & has_title
        ranges = self.arrays["asking"][np.where(is_title, first - 1, sentence)]
        is_missing = is_title | (draws[:, 1] < removal)
        return ranges, is_missing & (ranges[:, 1:, 0] < ranges[:, 1:, 1]).any(axis=1)


def own_texts(collection: Collection, encoding: TextEncoding) -> OwnTexts:
    """Return the queries that documents provide themselves, tokenised into the cache once."""

    def make(folder: Path) -> None:
        asking, first_asking, has_title = array("q"), array("q", [0]), array("b")

        def rows() -> Iterator[np.ndarray]:
            start = 0
            query, document_prompt = encoding.prompts["query"], encoding.prompts["document"]
            for document in collection.documents:
                title, (sentences, places) = document.title, document_sentences(document.text)
                # A text that begins with its title would match it without any learning.
                body = document.text.removeprefix(title)
                heads = [document._replace(text=one).whole for one in sentences[1::-1]]
                query_texts = [title and query + title, *(query + one for one in sentences)]
                heads = [document_prompt + one for one in (body, *heads)]
                own = encoding.ids_of([query_texts[0], heads[0], *query_texts[1:], *heads[1:]])
                own += encoding.ids_behind(sentences[1:])
                yield from own
                # In `own`: title, body, all sentences, title with second and with first sentence,
                # then the second and later sentences as they are tokenised behind another one.
                ends = [start, *(np.cumsum([len(ids) for ids in own]) + start).tolist()]
                start, part = ends[-1], len(own) - len(sentences)
                has_title.append(len(own[0]) > 0)
                if has_title[-1]:
                    asking.extend([*ends[:2], *ends[1:3], 0, 0])
                for place in places:
                    asking.extend(ends[2 + place : 4 + place])
                    if len(sentences) == 1:
                        asking.extend([0] * 4)
                    else:
                        asking.extend([ends[part - (place == 0)], ends[part + place]])
                        asking.extend([ends[part + max(place, 1) + 1], start])
                first_asking.append(len(asking) // 6)

        write_token_rows(folder, encoding.tokenizer.vocab_size, rows())
        titles, queries = np.array(has_title, bool), np.reshape(asking, (-1, 3, 2))
        write_arrays(folder, {"asking": queries, "first_asking": first_asking, "has_title": titles})

    facts = [OWN_VERSION, collection.fingerprint, encoding.digest]
    return OwnTexts(made_once(cache_folder("own_texts", facts), make))


class PairDataset(PlannedDataset):
    """Training pairs of judged queries, and of documents with their own titles and sentences.

    Args:
        queries: training queries that have a relevant document.
        negatives: how hard negatives are chosen.
        bm25: options of BM25 if it finds the negatives.
        seed: key of all draws, with epoch and sample id.
        terms: names of further loss terms, such as the distillation of a run's scores.

    Raises: the errors of `candidate_lists`, and ValueError if there is no pair to train on, judged
        negatives are asked for but no document has grade 0, or distillation has no run.
    """

    def __init__(
        self,
        collection: Collection,
        encoding: TextEncoding,
        queries: Queries,
        mix: TrainingMix,
        negatives: HardNegatives,
        bm25: Bm25Options | None,
        seed: int,
        terms: Sequence[str] = (),
    ) -> None:
        self.collection, self.encoding, self.mix, self.seed = collection, encoding, mix, seed
        self.queries, self.negatives = queries, negatives
        judgements, lists = queries.judgements, None
        if negatives.count:
            listed = (negatives.depth, collection, queries, "data.negatives")
            lists = candidate_lists(negatives, bm25, *listed)
            if lists is None and not (judgements.grade <= RELEVANT_ABOVE).any():
                raise ValueError(
                    'negatives.source is "judged", but no document was judged and found not '
                    "relevant (grade 0); take bm25 or run, or set negatives.count to 0."
                )
        if DISTILLED in terms and (lists is None or negatives.source != "run"):
            raise ValueError(
                "model.distillation learns the scores of a ranker's run; give "
                "data.negatives.source=run, data.negatives.run and data.negatives.count, or leave "
                "the distillation out."
            )
        self.lists, self.teacher_lists = lists, lists if DISTILLED in terms else None
        self.counts = np.array(mix.counts(collection, queries))
        self.ends = np.cumsum(self.counts * [getattr(mix, kind) for kind in KINDS])
        self.document_tokens, self.query_tokens = kept_texts(collection, encoding, queries)
        of_document = encoding.positions(self.document_tokens.sizes)
        self.own = own_texts(collection, encoding) if mix.titles or mix.sentences else None
        is_relevant = judgements.grade > RELEVANT_ABOVE
        relevant = queries.of(Judgements(*(column[is_relevant] for column in judgements)))
        # Cumulative shares of the grades of a query's relevant documents, from which one is drawn.
        shares = np.ones(len(relevant.judgements.query))
        of_query = np.zeros(len(queries), np.int64)
        for place in range(len(queries)):
            documents, grades = relevant.judged(place)
            of_query[place] = of_document[documents].mean()
            own = np.cumsum(grades.astype(np.float64) / grades.sum(dtype=np.float64))
            shares[relevant.part(place)] = own / own[-1]
        self.relevant = queries.of(relevant.judgements._replace(grade=shares))
        of_kinds = zip(KINDS, (of_query, of_document, of_document), strict=True)
        self.lengths = np.concatenate([np.tile(own, getattr(mix, kind)) for kind, own in of_kinds])
        pool_options = asdict(negatives) | {"run": None, "bm25": bm25 and asdict(bm25)}
        pool = [pool_options, lists and lists.fingerprint]
        facts = [DRAWS_VERSION, asdict(mix), pool, collection.fingerprint, encoding.digest]
        self.fingerprint = digest_of(facts)
        self.target_counts = dict.fromkeys((TERM, *terms))

    def pools(self, places: np.ndarray) -> np.ndarray:
        """Return the documents [n, P] to draw negatives of queries [n] from, -1 = none; they may
        include relevant ones."""
        if self.lists is not None:
            return self.lists[places].documents[:, self.negatives.skip :]
        documents, grades = self.queries.padded(places)
        return np.where(grades <= RELEVANT_ABOVE, documents, NO_DOCUMENT)

    def batch(self, sample_ids: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        """Return the padded batch of samples [B] as drawn in this epoch."""
        keys = keys_for(self.seed, epoch, sample_ids)
        draws = uniforms_for(self.seed, epoch, sample_ids, NUM_DRAWS)
        kinds = np.searchsorted(self.ends, sample_ids, side="right")
        # Places of the queries for judged pairs, numbers of the documents for the others.
        numbers = (sample_ids - self.ends[kinds]) % self.counts[kinds]
        judged, own = np.flatnonzero(kinds == 0), np.flatnonzero(kinds)
        places, num_queries = numbers[judged], len(sample_ids)
        relevant, shares = self.relevant.padded(places, 1)
        known = np.full((num_queries, relevant.shape[1]), NO_DOCUMENT)
        known[:, 0], known[judged] = numbers, relevant
        documents = np.full((num_queries, 1 + self.negatives.count), NO_DOCUMENT)
        chosen = (shares <= draws[judged, :1]).sum(axis=1)
        documents[:, 0], documents[judged, 0] = numbers, relevant[np.arange(len(judged)), chosen]
        if self.negatives.count:
            pools = self.pools(places)
            is_out = (pools == NO_DOCUMENT) | (pools[:, :, None] == relevant[:, None]).any(axis=2)
            own_keys = hash_ids(keys[judged], NEGATIVES)[:, None]
            hashes = np.where(is_out, NO_HASH, hash_ids(own_keys + pools.astype(np.uint64)))
            first = hashes.argsort(axis=1, kind="stable")[:, : self.negatives.count]
            drawn = np.take_along_axis(np.where(is_out, NO_DOCUMENT, pools), first, axis=1)
            documents[judged, 1 : 1 + drawn.shape[1]] = drawn

        asked, width = [NO_TOKENS] * num_queries, documents.shape[1]
        for row, place in zip(judged.tolist(), places.tolist(), strict=True):
            asked[row] = self.query_tokens[place]
        read = [
            NO_TOKENS if number == NO_DOCUMENT else self.document_tokens[number]
            for number in documents.ravel().tolist()
        ]
        if self.own is not None:
            is_title, tokens = kinds[own] == TITLES, self.own.tokens
            cuts = self.own.draw(numbers[own], is_title, self.mix.removal, draws[own])
            for row, ranges, is_cut in zip(own.tolist(), *cuts, strict=True):
                asked[row], *rest = (tokens[start:end] for start, end in ranges.tolist())
                if is_cut:
                    read[row * width] = np.concatenate(rest)
        asked = [ids[: self.encoding.limits.max_query_length] for ids in asked]
        read = [ids[: self.encoding.room] for ids in read]
        if self.mix.token_dropout:
            asked = list(map(self._kept, asked, hash_ids(keys, OF_QUERY)))
            of_documents = hash_ids(keys, OF_DOCUMENTS)[:, None] + np.arange(width, dtype=np.uint64)
            read = list(map(self._kept, read, hash_ids(of_documents).ravel()))
        queries, texts = self.encoding.rows(asked), self.encoding.rows(read)
        batch = {
            "query_ids": queries["input_ids"],
            "query_mask": queries["attention_mask"],
            "document_ids": texts["input_ids"],
            "document_mask": texts["attention_mask"],
            "document": torch.from_numpy(documents.ravel()),
            "known": torch.from_numpy(known),
        }
        if self.teacher_lists is not None:
            teacher = np.full(documents.shape, np.nan, np.float32)
            teacher[judged] = self.teacher_lists.scores_of(places, documents[judged])
            batch["teacher"] = torch.from_numpy(teacher)
        return batch

    def _kept(self, ids: np.ndarray, key: np.uint64) -> np.ndarray:
        """Return the tokens of a text after token dropout, all of them if none would be left."""
        is_kept = hash_ids(key + ids.astype(np.uint64)) >= self.mix.token_dropout * 2.0**64
        return ids[is_kept] if is_kept.any() else ids

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return kind, query as the model reads it, and document ids."""
        batch = self.batch(np.array([sample_id]), epoch)
        kind = KINDS[np.searchsorted(self.ends, sample_id, side="right")]
        query = self.encoding.tokenizer.decode(batch["query_ids"][0].numpy())
        documents = [n for n in batch["document"].tolist() if n != NO_DOCUMENT]
        answer, *others = (self.collection.documents[n].id for n in documents)
        return {"kind": kind, "query": query, "answer": answer, "negatives": " ".join(others)}


class TextsDataset(PlannedDataset):
    """Queries, then documents, for evaluation and prediction; each text is one sample.

    Args:
        queries: the queries, in evaluation with their judgements.
        documents: [D] numbers of the documents to encode, ascending.
        bm25: options of the first stage; `None` leaves it out.
    """

    def __init__(
        self,
        collection: Collection,
        encoding: TextEncoding,
        queries: Queries,
        documents: np.ndarray,
        bm25: Bm25Options | None = None,
    ) -> None:
        self.collection, self.encoding = collection, encoding
        self.queries, self.numbers = queries, np.concatenate([queries.numbers, documents])
        self.document_tokens, self.query_tokens = kept_texts(collection, encoding, queries)
        among = documents if len(documents) < len(collection.documents) else None
        facts = (bm25, FIRST_DEPTH, collection, queries, "data.bm25", among)
        self.first = candidate_lists(CandidateOptions("bm25"), *facts) if bm25 else None
        depth = min(FIRST_DEPTH, len(documents)) if bm25 else 0
        of_queries = np.minimum(self.query_tokens.sizes, encoding.limits.max_query_length)
        sizes = np.concatenate([of_queries, self.document_tokens.sizes[documents]])
        self.lengths = encoding.positions(sizes)
        chosen = digest_of([queries.digest, numbers_digest(documents)])
        options = [bm25 and asdict(bm25), depth, queries.most > 0]
        self.fingerprint = digest_of([collection.fingerprint, encoding.digest, chosen, options])
        self.target_counts = {}

    def batch(self, sample_ids: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        """Return the padded batch of texts [B], the same in every epoch."""
        is_query, numbers = sample_ids < len(self.queries), self.numbers[sample_ids]
        columns = (each.tolist() for each in (is_query, sample_ids, numbers))
        most = self.encoding.limits.max_query_length
        ids = [
            self.query_tokens[place][:most] if is_one else self.document_tokens[number]
            for is_one, place, number in zip(*columns, strict=True)
        ]
        own = {"is_query": torch.from_numpy(is_query), "text_index": torch.from_numpy(numbers)}
        return {**self.encoding.rows(ids), **own}

    def known(self, numbers: np.ndarray) -> tuple[QueryJudgements, Hits]:
        """Return the judgements [Q, J] of the queries with these numbers [Q], and the documents
        that BM25 finds for them [Q, F]."""
        places = np.searchsorted(self.queries.numbers, numbers)
        none = np.zeros((len(places), 0), np.int64)
        hits = Hits(none, none.astype(np.float32))
        if self.first is not None:
            hits = self.first[places]
        return self.queries.padded(places, self.queries.most), hits

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the id of the text."""
        if sample_id < len(self.queries):
            return {"query": self.queries[sample_id].id}
        return {"document": self.collection.documents[int(self.numbers[sample_id])].id}


def chosen_documents(queries: Queries, num_documents: int, num_others: int | None) -> np.ndarray:
    """Return the documents to search, ascending: those judged for queries and `num_others` more, or
    all documents for `None`. The draw depends only on the documents' numbers."""
    everything = np.arange(num_documents)
    if num_others is None:
        return everything
    of_queries = np.unique(queries.judgements.document)
    others = np.setdiff1d(everything, of_queries)
    drawn = others[np.argsort(hash_ids(others, SAMPLE_KEY), kind="stable")[:num_others]]
    return np.sort(np.concatenate([of_queries, drawn]))


class RetrievalDataModule(SearchDataModule):
    """Serves pairs for training, and single texts to encode for evaluation and prediction.

    In evaluation and prediction a sample is a query or a document, and each is encoded once.

    Args:
        mix: how often each kind of training pair occurs in an epoch.
        negatives: how hard negatives are chosen.
        num_others: how many documents evaluation searches besides those judged for its queries;
            `None` searches the whole collection. Fewer are easier, and the results say so.
        predict_part: part whose judged queries a prediction encodes and searches with.
        predict_depth: documents per query in the run that a prediction writes.
        search: collection, output, tokenizer and more, see `SearchDataModule`.

    Raises:
        ValueError: predict_depth is below 1, or num_others below 0.
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

    def recipe_facts(self) -> dict[str, Any]:
        return prompts_of(self.model.tokenizer)

    def check_stage(self, stage: Stage) -> None:
        """Raise if there is no pair to train on, or no query to evaluate or search with."""
        if stage == "predict":
            self._predicted()
        elif stage == "train":
            self.mix.counts(self.collection, self.judged(stage, may_lack=True).with_relevant())
        else:
            self.judged(stage)

    def make_dataset(
        self, stage: Stage, encoding: TextEncoding, recipe: dict[str, Any]
    ) -> PairDataset | TextsDataset:
        """Return the dataset of one stage.

        Raises:
            ValueError: there is no pair to train on, or no query to evaluate or search with.
        """
        collection = self.collection_of(stage)
        num_documents = len(collection.documents)
        if stage == "predict":
            documents = np.arange(num_documents)
            return TextsDataset(collection, encoding, self._predicted(), documents)
        queries = self.judged(stage, may_lack=stage == "train")
        if stage == "train":
            facts = (self.mix, self.negatives, self.bm25, self.seed)
            terms = self.model.options.get("terms", ())  # further loss terms
            return PairDataset(collection, encoding, queries.with_relevant(), *facts, terms)
        documents = chosen_documents(queries, num_documents, self.num_others)
        return TextsDataset(collection, encoding, queries, documents, self.bm25)

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write the encoded texts, `results["vector"]` [Q + D, W] (possibly memory-mapped), and the
        rankings of the model's `search`, atomically.

        Raises:
            FileExistsError: the folder exists.
        """
        dataset, vectors = self.datasets["predict"], results["vector"]
        assert isinstance(dataset, TextsDataset)
        queries, documents = np.split(vectors, [len(dataset.queries)])
        ids = [record.id for record in self.collection.documents]
        query_ids = [query.id for query in dataset.queries]
        texts = {"queries": (queries, query_ids), "documents": (documents, ids)}
        with replacing(path, is_new=True) as unfinished:
            with naming(path):
                unfinished.mkdir()
                for name, (own, names) in texts.items():
                    np.save(unfinished / f"{name}.npy", own)
                    with (unfinished / f"{name}.ids.jsonl").open("w", encoding="utf-8") as file:
                        file.writelines(json.dumps(one) + "\n" for one in names)
            if search := self.model.options.get("search"):
                run, table = unfinished / "run.trec", unfinished / "found.csv"
                rankings = search(queries, documents, ids, unfinished)
                self.write_rankings(run, table, rankings, dataset.queries)

    def _predicted(self) -> Queries:
        """Return the queries that a prediction searches with."""
        if (queries := self.queries_of_file()) is not None:
            return queries
        table, is_all = self.collection.queries, self.predict_part == "all"
        numbers = np.arange(len(table)) if is_all else self.judged(self.predict_part).numbers
        return Queries(table, self.collection.fingerprint, numbers=numbers)

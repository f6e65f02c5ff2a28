"""RetrievalDataModule: pairs to train a retriever, single texts for everything else.

Shapes: B samples of the micro-batch, K documents of one, R most documents that are known, Q
queries, J most judgements of one, F documents of a first stage.
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
    joined,
    prompts_of,
    sentences_of,
    write_token_rows,
)

KINDS = ("judged", "titles", "sentences")  # of training pairs
FEWEST_WORDS = 4  # of a sentence that can stand for a query
SAMPLE_KEY = 1_607  # of the documents that are drawn; any number
OWN_VERSION = 3  # of the rows of a document's own texts
DRAWS_VERSION = 2  # of what a sample draws: a run does not go on with other draws
NUM_DRAWS = 2  # of a sample, which have the keys 0 and 1; those of its other draws follow
NEGATIVES, OF_QUERY, OF_DOCUMENTS = 2, 3, 4
NO_HASH = np.uint64(2**64 - 1)  # behind all others
QUERIES, DOCUMENTS, OWN = range(3)  # arrays that tokens come from
TITLES = KINDS.index("titles")


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
            this epoch; one that would lose all of them keeps them.

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

    def counts(self, collection: Collection, queries: Queries) -> list[int]:
        """Return how many pairs of each kind there are, each counted once; `queries` are those
        that have a relevant document.

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
    """Return the sentences of a text, at least one, which may have no word, and the places of
    those that can stand for a query: short ones where there are no others.

    The ends of lines mean nothing, as texts may be wrapped.
    """
    line = " ".join(text.split())
    sentences = sentences_of([line]) or [line]
    long = [n for n, one in enumerate(sentences) if len(one.split()) >= FEWEST_WORDS]
    return sentences, long or list(range(len(sentences)))


class OwnTexts(TokenRows):
    """The queries that documents ask themselves, and the documents without them, as mapped tokens.

    Attributes:
        arrays: asking [queries, 3, 2] int64, from which token to before which one goes the query,
            then what stands before it and what behind it; of a document its title, where it has
            one, then the sentences that can stand for a query; first_asking [documents + 1] int64,
            where those of each document begin there; has_title [documents] bool.
    """

    def drawn(
        self, numbers: np.ndarray, is_title: np.ndarray, removal: float, draws: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw a query of each document: [n, 3, 2] as in `asking`, and [n] bool, whether it is then
        missing from the document.

        Args:
            numbers: [n] of the documents.
            is_title: [n] bool, whether the title asks; where there is none, a sentence does.
            removal: probability that a sentence is missing then; a single one never is.
            draws: [n, 2] float64 in [0, 1), of the sentence and of its removal.
        """
        has_title, starts = self.arrays["has_title"][numbers], self.arrays["first_asking"]
        first, end = starts[numbers] + has_title, starts[numbers + 1]
        sentence = first + (draws[:, 0] * (end - first)).astype(np.int64)
        is_title = is_title & has_title
        ranges = self.arrays["asking"][np.where(is_title, first - 1, sentence)]
        is_missing = is_title | (draws[:, 1] < removal)
        return ranges, is_missing & (ranges[:, 1:, 0] < ranges[:, 1:, 1]).any(axis=1)


def own_texts(collection: Collection, encoding: TextEncoding) -> OwnTexts:
    """Return the texts that documents have of their own, tokenised once into the cache."""

    def make(folder: Path) -> None:
        asking, first_asking, has_title = array("q"), array("q", [0]), array("b")

        def rows() -> Iterator[np.ndarray]:
            start = 0
            query, document_prompt = encoding.prompts["query"], encoding.prompts["document"]
            for document in collection.documents:
                title, (sentences, places) = document.title, document_sentences(document.text)
                # Some texts begin with their title, by which they would be found without learning.
                body = document.text.removeprefix(title)
                heads = [document._replace(text=one).whole for one in sentences[1::-1]]
                asked = [title and query + title, *(query + one for one in sentences)]
                heads = [document_prompt + one for one in (body, *heads)]
                own = encoding.ids_of([asked[0], heads[0], *asked[1:], *heads[1:]])
                own += encoding.ids_behind(sentences[1:])
                yield from own
                # Title, body, sentences, title and second sentence, title and first sentence, and
                # the other sentences as they stand behind another.
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
    """Pairs of the training part, and of the documents themselves.

    Args:
        queries: of the training part, those that have a relevant document.
        negatives: which documents come along as hard negatives.
        bm25: how it scores, where it finds them.
        seed: key of all that is drawn, together with epoch and sample id.
        terms: names of losses beside that of the pairs, such as that of a run's scores.

    Raises: as of `candidate_lists`, and ValueError where nothing is left to train on, negatives are
        to be judged ones and nobody was found not relevant, or scores to be learnt and no run's.
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
        self.lists, self.taught = lists, lists if DISTILLED in terms else None
        self.counts = np.array(mix.counts(collection, queries))
        self.ends = np.cumsum(self.counts * [getattr(mix, kind) for kind in KINDS])
        self.document_tokens, self.query_tokens = kept_texts(collection, encoding, queries)
        of_document = encoding.positions(self.document_tokens.sizes)
        self.own = own_texts(collection, encoding) if mix.titles or mix.sentences else None
        is_relevant = judgements.grade > RELEVANT_ABOVE
        relevant = queries.of(Judgements(*(column[is_relevant] for column in judgements)))
        # Of the relevant documents of a query, cumulated in their order: for the draw of one.
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
        drawn = asdict(negatives) | {"run": None, "bm25": bm25 and asdict(bm25)}
        pool = [drawn, lists and lists.fingerprint]
        facts = [DRAWS_VERSION, asdict(mix), pool, collection.fingerprint, encoding.digest]
        self.fingerprint = digest_of(facts)
        self.target_counts = dict.fromkeys((TERM, *terms))

    def pools(self, places: np.ndarray) -> np.ndarray:
        """Return the documents [n, P] that negatives of queries [n] are drawn from, -1 = none;
        relevant ones may be there."""
        if self.lists is not None:
            return self.lists[places].documents[:, self.negatives.skip :]
        documents, grades = self.queries.padded(places)
        return np.where(grades <= RELEVANT_ABOVE, documents, NO_DOCUMENT)

    def batch(self, sample_ids: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        """Return the padded batch of several samples [B] as they are in this epoch."""
        keys = keys_for(self.seed, epoch, sample_ids)
        draws = uniforms_for(self.seed, epoch, sample_ids, NUM_DRAWS)
        kinds = np.searchsorted(self.ends, sample_ids, side="right")
        # Of judged pairs the places of their queries, else the numbers of the documents.
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

        # The queries, then the documents, each joined from one or two ranges of tokens.
        ranges = np.zeros((num_queries + documents.size, 2, 2), np.int64)
        which = np.repeat([QUERIES, DOCUMENTS], [num_queries, documents.size])
        arrays = [self.query_tokens.tokens, self.document_tokens.tokens]
        ranges[judged, 0] = self.query_tokens.ranges(places)
        ranges[num_queries:, 0] = self.document_tokens.ranges(documents.ravel())
        ranges[num_queries:][documents.ravel() == NO_DOCUMENT] = 0
        if self.own is not None:
            arrays.append(self.own.tokens)
            options = (self.mix.removal, draws[own])
            drawn, is_cut = self.own.drawn(numbers[own], kinds[own] == TITLES, *options)
            cut = num_queries + own[is_cut] * documents.shape[1]
            which[own], ranges[own, 0] = OWN, drawn[:, 0]
            which[cut], ranges[cut] = OWN, drawn[is_cut, 1:]
        limits = [self.encoding.limits.max_query_length, self.encoding.room]
        most = np.repeat(limits, [num_queries, documents.size])
        tokens, sizes = joined(arrays, which, ranges, most)
        if self.mix.token_dropout:
            of_documents = np.arange(documents.shape[1], dtype=np.uint64)
            of_documents = hash_ids(hash_ids(keys, OF_DOCUMENTS)[:, None] + of_documents)
            text_keys = np.concatenate([hash_ids(keys, OF_QUERY), of_documents.ravel()])
            text = np.repeat(np.arange(len(sizes)), sizes)
            hashes = hash_ids(text_keys[text] + tokens.astype(np.uint64))
            is_kept = hashes >= self.mix.token_dropout * 2.0**64
            kept = np.bincount(text[is_kept], minlength=len(sizes))
            is_kept |= (kept == 0)[text]
            tokens, sizes = tokens[is_kept], np.where(kept == 0, sizes, kept)
        end = sizes[:num_queries].sum()
        queries = self.encoding.marked((tokens[:end], sizes[:num_queries]))
        texts = self.encoding.marked((tokens[end:], sizes[num_queries:]))
        batch = {
            "query_ids": queries["input_ids"],
            "query_mask": queries["attention_mask"],
            "document_ids": texts["input_ids"],
            "document_mask": texts["attention_mask"],
            "document": torch.from_numpy(documents.ravel()),
            "known": torch.from_numpy(known),
        }
        if self.taught is not None:
            teacher = np.full(documents.shape, np.nan, np.float32)
            teacher[judged] = self.taught.scores_of(places, documents[judged])
            batch["teacher"] = torch.from_numpy(teacher)
        return batch

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the kind, the query as it is read, and the ids of the documents."""
        batch = self.batch(np.array([sample_id]), epoch)
        kind = KINDS[np.searchsorted(self.ends, sample_id, side="right")]
        query = self.encoding.tokenizer.decode(batch["query_ids"][0].numpy())
        documents = [n for n in batch["document"].tolist() if n != NO_DOCUMENT]
        answer, *others = (self.collection.documents[n].id for n in documents)
        return {"kind": kind, "query": query, "answer": answer, "negatives": " ".join(others)}


class TextsDataset(PlannedDataset):
    """Queries, then documents, each once; a sample is a text: for evaluation and prediction.

    Args:
        queries: in an evaluation with their judgements.
        documents: [D] numbers of those that are encoded, ascending.
        bm25: how the first stage scores; `None` leaves it out.
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
        """Return the padded batch of several texts [B], the same in every epoch."""
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
        """Return the judgements [Q, J] of queries of these numbers [Q], and what BM25 finds among
        the documents [Q, F]."""
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
    """Return the documents that queries are searched among, ascending: the judged ones, and so many
    others (`None`: all), which depend on nothing but their number."""
    everything = np.arange(num_documents)
    if num_others is None:
        return everything
    of_queries = np.unique(queries.judgements.document)
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

    def recipe_facts(self) -> dict[str, Any]:
        return prompts_of(self.model.tokenizer)

    def check_stage(self, stage: Stage) -> None:
        """Raise where there is nothing to train on, or no query to evaluate or search with."""
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
            ValueError: there is nothing to train on, or no query to evaluate or search with.
        """
        collection = self.collection_of(stage)
        num_documents = len(collection.documents)
        if stage == "predict":
            documents = np.arange(num_documents)
            return TextsDataset(collection, encoding, self._predicted(), documents)
        queries = self.judged(stage, may_lack=stage == "train")
        if stage == "train":
            facts = (self.mix, self.negatives, self.bm25, self.seed)
            terms = self.model.options.get("terms", ())  # of other losses
            return PairDataset(collection, encoding, queries.with_relevant(), *facts, terms)
        documents = chosen_documents(queries, num_documents, self.num_others)
        return TextsDataset(collection, encoding, queries, documents, self.bm25)

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write the encoded texts, `vector` [Q + D, W] of the results, which may be mapped, and
        whatever the model's `search` finds in them, whole or not at all.

        Raises:
            FileExistsError: the folder is there.
        """
        dataset, vectors = self.datasets["predict"], results["vector"]
        assert isinstance(dataset, TextsDataset)
        queries, documents = np.split(vectors, [len(dataset.queries)])
        ids = [record.id for record in self.collection.documents]
        asked = [query.id for query in dataset.queries]
        texts = {"queries": (queries, asked), "documents": (documents, ids)}
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

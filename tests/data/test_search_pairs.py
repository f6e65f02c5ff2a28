"""Training pairs of a retriever: their kinds, their draws and their negatives."""

import pickle
from collections import Counter

import numpy as np
import pytest
import torch

from datamodules.core.plan import hash_ids, keys_for, uniforms_for
from datamodules.files.splitting import TRAIN
from datamodules.search.candidates import Bm25Options, HardNegatives, open_bm25
from datamodules.search.collection import Collection, CollectionRequest, open_collection
from datamodules.search.queries import Queries, Ranking, write_run
from datamodules.search.retrieval import PairDataset, TrainingMix, document_sentences
from datamodules.text.encoding import TextEncoding
from datamodules.tokenizers.text import TokenizerOptions, make_tokenizer
from tests.search_collections import SIZES, write_collection

LIMITS = {"max_length": 24, "max_query_length": 8, "lower_case": True}


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Collection:
    folder = write_collection(tmp_path_factory.mktemp("small"))
    return open_collection(CollectionRequest(str(folder)))


def pairs(
    collection: Collection,
    mix: TrainingMix = TrainingMix(),  # noqa: B008 - frozen
    negatives: HardNegatives = HardNegatives(),  # noqa: B008 - frozen
    tokenizer: str = "bytes",
    **text: str,
) -> PairDataset:
    texts = (document.whole.lower() for document in collection.documents)
    made = make_tokenizer(TokenizerOptions(tokenizer), texts).to_dict()
    encoding = TextEncoding({"tokenizer": made, "text": {**LIMITS, **text}})
    judged = Queries(collection.queries, collection.fingerprint, collection.judgements(TRAIN))
    facts = (mix, negatives, Bm25Options())
    return PairDataset(collection, encoding, judged.with_relevant(), *facts, seed=5)


def drawn(dataset: PairDataset, sample_id: int, epoch: int) -> tuple[list[int], list[int]]:
    """Return the documents of a sample, the first of them its answer, and all known answers."""
    batch = dataset.batch(np.array([sample_id]), epoch)
    return batch["document"].tolist(), batch["known"][0].tolist()


def test_each_kind_comes_as_often_as_the_mix_says(collection):
    dataset = pairs(collection, TrainingMix(judged=3, titles=1, sentences=2))
    kinds = Counter(dataset.describe(n, 0)["kind"] for n in range(len(dataset.lengths)))
    assert kinds == {"judged": 3 * SIZES["train"], "titles": 40, "sentences": 80}


@pytest.mark.parametrize("source", ["judged", "bm25"])
def test_no_relevant_document_is_a_negative(collection, source):
    dataset = pairs(collection, negatives=HardNegatives(3, source, depth=30))
    found = 0
    for sample_id in range(SIZES["train"]):
        for epoch in range(3):
            (answer, *others), known = drawn(dataset, sample_id, epoch)
            others = [other for other in others if other >= 0]
            found += len(others)
            assert len(set(others)) == len(others)
            assert not set(others) & set(known)
            assert answer in known
            if source == "judged":
                assert set(others) <= set(dataset.pools(np.array([sample_id]))[0].tolist())
    assert found > 0


def test_a_run_gives_the_negatives_of_its_ranks(collection, tmp_path):
    names = [f"d{n}" for n in range(40)]
    write_run(tmp_path / "a.run", [Ranking("train-0", names, [-float(n) for n in range(40)])])
    options = HardNegatives(40, "run", str(tmp_path / "a.run"), depth=6, skip=2)
    dataset = pairs(collection, negatives=options)
    place = int(
        np.searchsorted(dataset.queries.numbers, collection.queries.indices_of(["train-0"])[0])
    )
    documents, known = drawn(dataset, place, 0)
    assert set(documents[1:]) - {-1} == {2, 3, 4, 5} - set(known)


@pytest.mark.parametrize(
    ("text", "sentences", "places"),
    [
        (
            "the lift of a thin wing\nis measured .\na slip stream, e.g. of\na screw, adds lift .",
            [
                "the lift of a thin wing is measured .",
                "a slip stream, e.g. of a screw, adds lift .",
            ],
            [0, 1],
        ),
        (
            "all in small letters, cf. smith.\nthis holds for\nmany a text.",
            ["all in small letters, cf. smith.", "this holds for many a text."],
            [0, 1],
        ),
        (
            "Dr. Smith measured\nit in 3.5 hours.\nWrite it down. She wrote it down.",
            ["Dr. Smith measured it in 3.5 hours.", "Write it down.", "She wrote it down."],
            [0, 2],
        ),
        ("Short. Shorter.", ["Short.", "Shorter."], [0, 1]),
        ("", [""], [0]),
        ("*** .", ["*** ."], [0]),
    ],
)
def test_sentences_are_whole_and_short_ones_are_no_queries(text, sentences, places):
    assert document_sentences(text) == (sentences, places)


def test_a_batch_has_the_documents_of_a_sample_side_by_side(collection):
    dataset = pairs(collection, negatives=HardNegatives(2, "judged"))
    batch = dataset.batch(np.arange(4), 0)
    assert batch["query_ids"].shape[0] == 4
    assert batch["document_ids"].shape[0] == batch["document"].shape[0] == 12
    assert batch["document"][::3].tolist() == [drawn(dataset, n, 0)[0][0] for n in range(4)]
    assert batch["document_mask"].any(1).all()  # even a missing document has a token
    assert (batch["document"] == -1).any()


DRAWS = TrainingMix(judged=1, titles=1, sentences=1, removal=0.5, token_dropout=0.3)


def hashed(number: int, key: int = 0) -> int:
    return int(hash_ids(np.array([number % 2**64], np.uint64), key)[0])


def kept(ids: np.ndarray, key: int) -> list[int]:
    drop = DRAWS.token_dropout * 2**64
    return [n for n in ids.tolist() if hashed(key + n) >= drop] or ids.tolist()


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [("bytes", {}), ("bpe", {}), ("words", {}), ("words", {"stemmer": "english"})],
    ids=["bytes", "bpe", "words", "stems"],
)
def test_a_pair_draws_documents_sentence_and_tokens_in_this_order(collection, tokenizer, text):
    dataset = pairs(collection, DRAWS, HardNegatives(2), tokenizer, **text)
    epoch, ways = 4, Counter[str]()
    encoding, encode = dataset.encoding, dataset.encoding.ids
    for sample_id in range(len(dataset.lengths)):
        sample, number = np.array([sample_id]), (sample_id - SIZES["train"]) % 40
        (key,), ((first, second),) = keys_for(5, epoch, sample), uniforms_for(5, epoch, sample, 2)
        others: list[int] = []
        if sample_id < SIZES["train"]:
            judged, of_judged = dataset.queries.judged(sample_id)
            relevant, grades = judged[of_judged > 0], of_judged[of_judged > 0]
            shares = grades.astype(np.float64) / grades.sum()
            chosen = next(n for n, end in enumerate(np.cumsum(shares)) if first < end)
            answer = collection.documents[int(relevant[chosen])].whole
            query_number = int(dataset.queries.numbers[sample_id])
            pool = set(dataset.pools(np.array([sample_id]))[0].tolist()) - {-1, *relevant.tolist()}
            others = sorted(pool, key=lambda other: hashed(hashed(int(key), 2) + other))[:2]
            query, way = collection.queries[query_number].text, f"judged, {len(others)} negatives"
        elif sample_id < SIZES["train"] + 40 and collection.documents[number].title:
            document, way = collection.documents[number], "title"
            query, answer = document.title, document.text.removeprefix(document.title)
        else:
            document = collection.documents[number]
            sentences, _ = document_sentences(document.text)
            long = [text for text in sentences if len(text.split()) >= 4] or sentences
            query = long[int(first * len(long))]
            is_removed = second < DRAWS.removal and len(sentences) > 1
            left = list(sentences)
            left.remove(query)
            rest = document._replace(text=" ".join(left))
            answer, way = (rest if is_removed else document).whole, f"sentence, {is_removed}"
        texts = [answer, *(collection.documents[other].whole for other in others)]
        of_texts = [hashed(hashed(int(key), 4) + n) for n in range(len(texts))]
        read = zip([encode(text)[: encoding.room] for text in texts], of_texts, strict=True)
        expected = encoding.rows([np.array(kept(*own), np.int64) for own in read])
        query_ids = kept(encode(query)[: LIMITS["max_query_length"]], hashed(int(key), 3))
        batch = dataset.batch(np.array([sample_id]), epoch)
        assert torch.equal(batch["query_ids"], encoding.rows([np.array(query_ids)])["input_ids"])
        width = expected["input_ids"].shape[1]
        assert torch.equal(batch["document_ids"][: len(texts), :width], expected["input_ids"])
        lengths = expected["attention_mask"].sum(1)
        assert torch.equal(batch["document_mask"][: len(texts)].sum(1), lengths)
        ways[way] += 1
    assert {"judged, 0 negatives", "judged, 1 negatives"} <= set(ways)
    assert {"title", "sentence, True", "sentence, False"} <= set(ways)


def test_lists_of_negatives_are_made_before_the_run(collection):
    dataset = pairs(collection, negatives=HardNegatives(2, "bm25", depth=9, skip=3))
    assert len(pickle.dumps(dataset.lists)) < 500
    hits = open_bm25(collection).search([dataset.queries[0].text], 9)
    expected = [number for number in hits.documents[0].tolist()[3:] if number >= 0]
    assert [n for n in dataset.pools(np.array([0]))[0].tolist() if n >= 0] == expected

"""What a training pair draws, by a plain reference."""

import numpy as np
import pytest

from datamodules.core.plan import rng_for, uniforms_for
from datamodules.files.splitting import TRAIN
from datamodules.search.collection import Collection, open_collection
from datamodules.search.judged_queries import JudgedQueries
from datamodules.search.negatives import HardNegatives
from datamodules.search.request import CollectionRequest
from datamodules.search.training_mix import TrainingMix
from datamodules.search.training_pairs import PairDataset
from datamodules.text.encoding import TextEncoding
from datamodules.tokenizers.text_tokenizer import TokenizerOptions, make_tokenizer
from tests.seo.retrieval_collection import SIZES, write_collection

LIMITS = {"max_length": 64, "max_query_length": 16, "lower_case": True}
MIX = TrainingMix(judged=1, sentences=1, removal=0.5, token_dropout=0.3)
SEED, EPOCH = 5, 4


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PairDataset:
    folder = write_collection(tmp_path_factory.mktemp("small"))
    collection: Collection = open_collection(CollectionRequest("beir", str(folder)))
    tokenizer = make_tokenizer(TokenizerOptions("bytes"), iter(()))
    encoding = TextEncoding({"tokenizer": tokenizer.to_dict(), "text": LIMITS})
    judged = JudgedQueries(collection.judgements(TRAIN))
    return PairDataset(collection, encoding, judged, MIX, HardNegatives(2, "judged"), SEED)


def shares_of(sample_id: int) -> np.ndarray:
    return uniforms_for(SEED, EPOCH, np.array([sample_id]), 2)[0]


def kept(ids: np.ndarray, rng: np.random.Generator) -> list[int]:
    stays = {token: rng.random() >= MIX.token_dropout for token in sorted({*ids.tolist()})}
    return [token for token in ids.tolist() if stays[token]] or ids.tolist()


def framed(dataset: PairDataset, query: list[int], texts: list[list[int]]) -> list[list[int]]:
    framing = dataset.encoding.framing
    rows = [framing.query(np.array(query)), *(framing.single(np.array(ids)) for ids in texts)]
    return [row.ids.tolist() for row in rows]


def found(dataset: PairDataset, sample_id: int) -> list[list[int]]:
    example = dataset.example(sample_id, EPOCH)
    given = example.texts[: int((example.document >= 0).sum())]
    return [row.ids.tolist() for row in (example.query, *given)]


def test_a_judged_pair_draws_its_document_its_negatives_and_its_tokens(dataset) -> None:
    for sample_id in range(SIZES["train"]):
        rng, documents = rng_for(SEED, EPOCH, sample_id), dataset.tokens.documents
        relevant, grades = dataset.judged.relevant(sample_id)
        share = shares_of(sample_id)[0]
        answer = relevant[(np.cumsum(grades / grades.sum()) <= share).sum()]
        query = int(dataset.judged.queries[sample_id])
        pool = np.setdiff1d(dataset.judged.irrelevant_of(query), relevant)
        others = rng.choice(pool, min(2, len(pool)), replace=False)
        texts = [kept(documents[int(number)], rng) for number in (answer, *others)]
        expected = framed(dataset, kept(dataset.tokens.queries[query], rng), texts)
        assert found(dataset, sample_id) == expected


def test_a_sentence_is_drawn_before_it_is_taken_out_and_tokens_are_dropped(dataset) -> None:
    parts, kinds = dataset.tokens.parts, set()
    for number in range(40):
        sample_id = SIZES["train"] + number
        rng, is_long = rng_for(SEED, EPOCH, sample_id), parts.long_ones(number)
        long = is_long.nonzero()[0] if is_long.any() else np.arange(len(is_long))
        shares = shares_of(sample_id)
        sentence = int(long[int(shares[0] * len(long))])
        is_removed = bool(shares[1] < MIX.removal) and len(is_long) > 1
        whole = dataset.tokens.documents[number]
        answer = kept(parts.without(number, sentence) if is_removed else whole, rng)
        expected = framed(dataset, kept(parts.sentence(number, sentence), rng), [answer])
        assert found(dataset, sample_id) == expected
        kinds.add((len(long) > 1, is_removed))
    assert kinds >= {(True, True), (True, False), (False, False)}

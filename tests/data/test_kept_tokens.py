"""Tokens that are kept are those that the tokenizer gives, whatever is drawn from them."""

import json
import pickle

import numpy as np
import pytest
from tokenizers import Tokenizer, models, trainers

from datamodules.core.plan import rng_for, uniforms_for
from datamodules.files.splitting import TRAIN
from datamodules.search.collection import Collection, Document, open_collection
from datamodules.search.judged_queries import JudgedQueries
from datamodules.search.negatives import HardNegatives
from datamodules.search.request import CollectionRequest
from datamodules.search.training_mix import TrainingMix
from datamodules.search.training_pairs import PairDataset, PairExample
from datamodules.text.encoding import TextEncoding, TextLimits
from datamodules.text.terms import sentences_of
from datamodules.tokenizers.text_tokenizer import TextTokenizer, TokenizerOptions, make_tokenizer
from tests.seo.retrieval_collection import write_collection

SEED = 5
ODD = [
    ("A title", "Ends of lines\nmean  nothing, e.g. here. What\tfollows? A third one stands here."),
    ("", "Nothing but this one sentence."),
    ("Of nothing", ""),
    ("", "*** ."),
    ("Title first", "Title first begins this text. Short. “Quoted so!” she said, I think."),
    ("Ωδή ", "Ο ΛΟΓΟΣ. Ἐν ἀρχῇ ἦν ὁ λόγος. 3.5 Σ ends it<|endoftext|> Not quite so, I say."),
    ("", " A blank in front of it. the 's and 'll are marks. And then some more words here. "),
]
MIX = TrainingMix(judged=1, titles=2, sentences=3, removal=0.8)


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Collection:
    folder = write_collection(tmp_path_factory.mktemp("odd"))
    with (folder / "corpus.jsonl").open("a") as file:
        for number, (title, text) in enumerate(ODD):
            row = {"_id": f"odd{number}", "title": title, "text": text}
            file.write(json.dumps(row) + "\n")
    return open_collection(CollectionRequest("beir", str(folder)))


def encoding_of(collection: Collection, kind: str, **limits) -> TextEncoding:
    limits = {"max_length": 20, "max_query_length": 7, **limits}
    known = TextLimits(**limits)
    texts = [known.normalised(collection.document_text(n)) for n in range(len(ODD) + 40)]
    texts += [known.normalised(collection.query(n)) for n in range(collection.num_queries)]
    if kind == "over_blanks":
        tokenizer = over_blanks(texts)
    else:
        size = {"vocab_size": 400} if kind in ("bpe", "words") else {}
        tokenizer = make_tokenizer(TokenizerOptions(kind, **size), iter(texts))
    return TextEncoding({"tokenizer": tokenizer.to_dict(), "text": limits})


def over_blanks(texts: list[str]) -> TextTokenizer:
    """Returns byte pairs of whole texts, whose tokens may hold a blank in the middle."""
    backend = Tokenizer(models.BPE(unk_token="?"))
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=300, show_progress=False, special_tokens=["?"])
    )
    backend.add_special_tokens(["<|endoftext|>"])
    end_id = backend.token_to_id("<|endoftext|>")
    return TextTokenizer(backend, end_id, special_tokens=(("unk_token", "?"),))


def slow_example(data: PairDataset, sample_id: int, epoch: int) -> list[np.ndarray]:
    """Returns the query and its answer from texts that are tokenised whole when they are drawn."""
    rng, mix = rng_for(SEED, epoch, sample_id), data.mix
    shares = uniforms_for(SEED, epoch, np.array([sample_id]), 2)[0]
    kind, number = data._place(sample_id)
    document = data.collection.document(number)
    if kind == "judged":
        documents, grades = data.judged.relevant(number)
        place = int((np.cumsum(grades / grades.sum()) <= shares[0]).sum())
        answer = data.collection.document(int(documents[place]))
        query = data.collection.query(int(data.judged.queries[number]))
    elif kind == "titles" and document.title:
        query, answer = document.title, Document("", document.text.removeprefix(document.title))
    else:
        text = " ".join(document.text.split())
        sentences = sentences_of([text]) or [text]
        long = [n for n, text in enumerate(sentences) if len(text.split()) >= 4]
        choices = long or range(len(sentences))
        drawn = choices[int(shares[0] * len(choices))]
        query, answer = sentences[drawn], document
        if shares[1] < mix.removal and len(sentences) > 1:
            rest = " ".join(s for n, s in enumerate(sentences) if n != drawn)
            answer = Document(document.title, rest)
    found = []
    for text in (answer.whole, query):
        ids = data.encoding.ids_once(text)
        if mix.token_dropout and len(ids):
            distinct, which = np.unique(ids, return_inverse=True)
            is_kept = rng.random(len(distinct)) >= mix.token_dropout
            ids = ids[is_kept[which]] if is_kept.any() else ids
        found.append(ids)
    framing = data.encoding.framing
    return [framing.query(found[1]).ids, framing.single(found[0]).ids]


def pairs(collection: Collection, encoding: TextEncoding, mix: TrainingMix = MIX) -> PairDataset:
    judged = JudgedQueries(collection.judgements(TRAIN))
    return PairDataset(collection, encoding, judged, mix, HardNegatives(0), SEED)


def check(data: PairDataset) -> None:
    for epoch in range(3):
        for sample_id in range(len(data.lengths)):
            example: PairExample = data.example(sample_id, epoch)
            query, answer = slow_example(data, sample_id, epoch)
            assert example.query.ids.tolist() == query.tolist(), (sample_id, epoch)
            assert example.texts[0].ids.tolist() == answer.tolist(), (sample_id, epoch)


@pytest.mark.parametrize("kind", ["bytes", "characters", "words", "bpe"])
def test_pairs_from_kept_tokens_are_those_of_tokenised_texts(
    collection: Collection, kind: str
) -> None:
    data = pairs(collection, encoding_of(collection, kind))
    check(data)
    assert data.tokens.parts is not None
    assert data.tokens.parts.is_divisible.mean() > 0.9


@pytest.mark.parametrize(
    "limits", [{"lower_case": False}, {"stemmer": "english", "stopwords": "english"}]
)
def test_so_they_are_whatever_is_done_to_a_text_first(collection: Collection, limits: dict) -> None:
    check(pairs(collection, encoding_of(collection, "bpe", **limits)))


def test_tokens_are_dropped_from_whole_texts(collection: Collection) -> None:
    mix = TrainingMix(judged=1, titles=1, sentences=2, token_dropout=0.3)
    check(pairs(collection, encoding_of(collection, "bpe", max_length=8, max_query_length=3), mix))


def test_a_tokenizer_whose_words_go_over_blanks_gives_its_own_tokens(
    collection: Collection,
) -> None:
    data = pairs(collection, encoding_of(collection, "over_blanks"))
    assert data.tokens.parts is not None
    assert not data.tokens.parts.is_divisible.any()
    check(data)


def test_no_epoch_tokenises_and_no_process_has_a_copy(
    collection: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = encoding_of(collection, "bpe")
    pairs(collection, encoding)

    def refuse(self, texts):
        raise AssertionError("a text is tokenised again")

    monkeypatch.setattr(TextEncoding, "ids_of", refuse)
    again = pairs(collection, encoding)  # such as another rank's
    monkeypatch.setattr(TextTokenizer, "encode_batch", refuse)
    for sample_id in range(len(again.lengths)):
        again.example(sample_id, epoch=1)
    documents = again.tokens.documents
    assert len(pickle.dumps(documents)) < 500
    assert np.array_equal(pickle.loads(pickle.dumps(documents))[3], documents[3])
    assert documents.tokens.base is not None  # a view of the mapped file
    parts = pickle.loads(pickle.dumps(again.tokens.parts))
    assert parts.without(0, 0).tolist() == again.tokens.parts.without(0, 0).tolist()
    assert documents.tokens.dtype == np.uint16


@pytest.mark.parametrize(
    "mix", [{"titles": 1}, {"sentences": 2, "removal": 0.0}, {"sentences": 2, "removal": 1.0}]
)
def test_so_are_those_of_a_mix_that_keeps_fewer_parts(collection: Collection, mix: dict) -> None:
    data = pairs(collection, encoding_of(collection, "bpe"), TrainingMix(judged=1, **mix))
    check(data)
    parts = data.tokens.parts
    assert parts is not None
    assert (len(parts.titles) > 0) == ("titles" in mix)
    assert (len(parts._pieces) > 0) == (mix.get("removal") != 0)

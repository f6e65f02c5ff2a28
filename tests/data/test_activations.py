"""Activations as data: drawn positions, attributes of documents, planned samples, statistics."""

from collections.abc import Iterator
from itertools import pairwise
from math import comb
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules import ActivationDataModule, TextSplit, TokenizerOptions
from datamodules.activations.datamodule import ActivationDataset, seen_words
from datamodules.activations.documents import (
    NONE,
    DocumentFacts,
    Pieces,
    PositionRule,
    drawn_positions,
    first_tokens,
    group_names,
)
from datamodules.activations.store import Chunk, statistics_of
from datamodules.text.store import TokenStore
from tests.search_collections import write_lines
from tests.text_corpora import (
    SPACE,
    TAIL,
    TEXTS,
    WORD,
    request,
    rows_file,
    sentence_piece,
    text_file,
    text_rows,
)

CORPORA = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2**64 - 1)), max_size=30)
RULES = st.builds(PositionRule, st.integers(0, 12), st.integers(1, 9), st.integers(0, 5))


def drawn(corpus: list[tuple[int, int]], rule: PositionRule) -> list[list[int]]:
    """Return the positions of each document."""
    sizes = np.array([size for size, _ in corpus], np.int64)
    hashes = np.array([key for _, key in corpus], np.uint64)
    documents, positions = drawn_positions(sizes, hashes, rule)
    assert documents.dtype == positions.dtype == np.int64
    assert (np.diff(documents) >= 0).all()
    return [positions[documents == number].tolist() for number in range(len(corpus))]


@given(CORPORA, RULES)
@settings(deadline=None)
def test_positions_are_distinct_ascending_in_range_and_as_many_as_there_are(corpus, rule):
    for (size, _), found in zip(corpus, drawn(corpus, rule), strict=True):
        assert len(found) == min(max(0, size - rule.min_position), rule.per_document)
        assert found == sorted(set(found))
        assert all(rule.min_position <= position < size for position in found)


@given(CORPORA, RULES, st.randoms())
@settings(deadline=None)
def test_a_document_draws_the_same_whatever_stands_around_it(corpus, rule, random):
    whole = drawn(corpus, rule)
    order = list(range(len(corpus)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert drawn([corpus[i] for i in order], rule) == [whole[i] for i in order]
    for i, one in enumerate(corpus[:3]):
        assert drawn([one], rule) == [whole[i]]


def test_every_choice_is_as_likely_as_any_other():
    """Pairs of 5 places over 20,000 documents, by a chi-squared test with 9 degrees of freedom."""
    keys = np.random.default_rng(0).integers(0, 2**63, 20_000).astype(np.uint64)
    rule = PositionRule(min_position=3, per_document=2)
    _, positions = drawn_positions(np.full(20_000, 8), keys, rule)
    pairs, counts = np.unique(positions.reshape(-1, 2), axis=0, return_counts=True)
    assert len(pairs) == comb(5, 2)
    expected = 20_000 / len(pairs)
    assert float(((counts - expected) ** 2 / expected).sum()) < 27.9  # quantile 0.999


def test_other_seeds_draw_other_positions():
    corpus = [(40, key) for key in range(100)]
    first, other = (drawn(corpus, PositionRule(6, 4, seed)) for seed in (0, 1))
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 5


def test_a_negative_position_is_refused():
    for name, least in (("min_position", 0), ("per_document", 1)):
        with pytest.raises(ValueError, match=f"positions.{name} must be at least {least}, got -1"):
            PositionRule(**{name: -1})


def test_long_documents_are_cut_and_no_position_is_lost(tmp_path):
    texts = ["a" * 5, "b" * 23, "c", "d" * 12]
    paths = [tmp_path / f"{i}.txt" for i in range(len(texts))]  # type: ignore[operator]
    files = [text_file(path, text) for path, text in zip(paths, texts, strict=True)]
    pieces = Pieces(request(files).open(), 0, context_length=8)
    # Bytes between a begin and an end token: 6, 24, 2 and 13 positions, cut at 7.
    assert pieces.sizes.tolist() == [6, 7, 7, 7, 3, 2, 7, 6]
    assert pieces.document.tolist() == [0, 1, 1, 1, 1, 2, 3, 3]
    assert max(len(pieces.tokens(i)) for i in range(len(pieces.starts))) == 8
    for document, text in enumerate(texts):
        own = [pieces.tokens(i) for i in np.flatnonzero(pieces.document == document)]
        read = np.concatenate([own[0][:1], *(tokens[1:] for tokens in own)])
        assert pieces.store.tokenizer.decode(read) == text
        assert all(a[-1] == b[0] for a, b in pairwise(own))
    assert len(set(pieces.hashes.tolist())) == len(pieces.starts)
    assert pieces.hashes[0] == pieces.stream.hashes[0]


ROWS = [
    {"text": "an owl at home", "attributes": {"pet": "owl"}},
    {"text": "a cat at sea", "attributes": {"place": "sea", "pet": "cat"}},
    {"text": "nothing is known"},
    {"text": "a hen", "attributes": {"pet": None, "place": None}},
]


def facts(files: list[Path]) -> tuple[TokenStore, DocumentFacts]:
    data = ActivationDataModule(
        train_files=[str(path) for path in files],
        tokenizer=TokenizerOptions("words"),
        split=TextSplit(0),
    )
    data.store = data.open_store()
    return data.store, data.facts(0)


def words(store: TokenStore, found: DocumentFacts) -> list[list[str | None]]:
    """Return the attributes of each document as words, by name."""
    decode, order = store.tokenizer.decode, [found.names.index(name) for name in ("pet", "place")]
    rows = found.attributes[:, order].tolist()
    return [[None if t == NONE else decode([t]).strip() for t in row] for row in rows]


EXPECTED = [["owl", None], ["cat", "sea"], [None, None], [None, None]]


@pytest.mark.parametrize("kind", ["jsonl", "struct", "map"])
def test_words_of_rows_become_tokens(tmp_path, kind):
    path, text = tmp_path / "mine.parquet", pa.array([row["text"] for row in ROWS])
    given = [row.get("attributes") for row in ROWS]
    pairs = [None if row is None else list(row.items()) for row in given]
    as_map = pa.array(pairs, pa.map_(pa.string(), pa.string()))
    column = as_map if kind == "map" else pa.array(given)
    pq.write_table(pa.table({"text": text, "attributes": column}), path)
    if kind == "jsonl":
        path = Path(rows_file(tmp_path / "mine.jsonl", ROWS))
    store, found = facts([path])
    assert found.names == ["pet", "place"]
    assert words(store, found) == EXPECTED


def test_a_word_that_the_tokenizer_cannot_spell_is_named(tmp_path):
    path = rows_file(tmp_path / "mine.jsonl", [{"text": "an owl", "attributes": {"pet": "yeti"}}])
    with pytest.raises(ValueError, match='does not know the word "yeti"'):
        facts([path])


@pytest.mark.parametrize("wrong", ["owl", ["owl"], 3, {"pet": ["owl"]}])
def test_other_than_a_mapping_to_words_is_refused_with_its_place(tmp_path, wrong):
    path = rows_file(tmp_path / "mine.jsonl", [ROWS[0], {"text": "x y", "attributes": wrong}])
    message = 'mine.jsonl:2: "attributes" must map names to words, .*; mend it, or give'
    with pytest.raises(ValueError, match=message):
        facts([path])


def test_documents_know_their_file_of_any_kind(tmp_path):
    files = [
        rows_file(tmp_path / "rows.jsonl", ROWS[:2]),
        text_file(tmp_path / "text.txt", "an owl flew\n"),
        rows_file(tmp_path / "more.jsonl", [{"text": "a hen sat"}]),
    ]
    _, found = facts(files)
    assert found.group.tolist() == [0, 0, 1, 2]
    assert found.group_names == ["rows", "text", "more"]


@pytest.mark.parametrize("named", [{}, {"test_files": "test"}])
def test_folders_of_texts_and_what_is_drawn_of_training_are_one_group(own_folder, named):
    for number in range(40):
        for folder in ("train", "test"):
            write_lines(Path(folder, f"{number}.txt"), f"{folder} {number}")
    split, spelling = TextSplit(0.2, 0.2), TokenizerOptions("bytes")
    data = ActivationDataModule(train_files="train", split=split, tokenizer=spelling, **named)
    data.store = data.open_store()
    found = data.facts(2)
    assert (set(found.group.tolist()), found.group_names) == ({0}, ["all"])


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["a/one.txt", "b/two.txt"], ["one", "two"]),
        (["a/one.txt", "b/one.txt"], ["a/one.txt", "b/one.txt"]),
        (["a/all.jsonl", "a/two.txt"], ["a/all.jsonl", "a/two.txt"]),
    ],
)
def test_no_two_files_have_one_name_and_none_is_all(files, names):
    assert group_names([Path(file) for file in files]) == names


def test_a_token_of_white_space_alone_is_passed_over():
    tokenizer = sentence_piece()
    assert tokenizer.encode(" n").tolist() == [SPACE, TAIL]
    assert tokenizer.encode(" hen").tolist() == [WORD, TAIL]
    assert first_tokens(["n", "hen", ""], tokenizer) == {"n": TAIL, "hen": WORD, "": NONE}


WIDTH = 4


@pytest.fixture
def dataset(tmp_path: Path) -> ActivationDataset:
    """All positions of twenty texts; each activation is filled with its own number."""
    store = request([Path(text_rows(tmp_path))]).open()
    pieces = Pieces(store, 0, 30)
    piece, position = drawn_positions(pieces.sizes, pieces.hashes, PositionRule(2, 5))
    np.save(
        store.folder / "train.activations.npy",
        np.repeat(np.arange(len(piece), dtype=np.float32)[:, None], WIDTH, 1),
    )
    attributes = np.full((len(TEXTS), 2), NONE)
    attributes[:, 0] = ord("o")
    facts = DocumentFacts(["a", "b"], attributes, np.arange(len(TEXTS)), [])
    return ActivationDataset(pieces, piece, position, facts, "x", 7, True)


def batch_of(dataset: ActivationDataset, numbers: list[int], epoch: int = 0) -> dict:
    return dataset.batch(np.array(numbers), epoch)


def test_a_batch_holds_what_each_sample_holds_alone(dataset: ActivationDataset) -> None:
    numbers = [3, 40, 17, 60]
    batch = batch_of(dataset, numbers)
    for row, number in enumerate(numbers):
        tokens = dataset.pieces.tokens(int(dataset.piece[number]))
        assert batch["lengths"][row] == len(tokens)
        assert batch["input_ids"][row].tolist()[: len(tokens)] == tokens.tolist()
        assert not batch["input_ids"][row, len(tokens) :].any()
        assert batch["position"][row] == dataset.position[number]
        assert batch["activation"][row].tolist() == [number] * WIDTH
        alone = batch_of(dataset, [number])
        for name in ("noise_key", "document", "group", "attributes"):
            assert batch[name][row].tolist() == alone[name][0].tolist()
        other = int(dataset.others[number])  # type: ignore[index]
        assert batch["other"]["activation"][row].tolist() == [other] * WIDTH


def test_keys_differ_by_sample_and_epoch_and_not_by_batch(dataset: ActivationDataset) -> None:
    everyone = list(range(len(dataset.lengths)))
    first, second = (batch_of(dataset, everyone, epoch)["noise_key"] for epoch in (0, 1))
    assert len({*first.tolist(), *second.tolist()}) == 2 * len(everyone)
    assert (first >= 0).all()
    assert batch_of(dataset, [9, 4])["noise_key"].tolist() == first[[9, 4]].tolist()


def test_seen_words_stand_before_the_position_and_are_not_the_current_token() -> None:
    rows = np.array([[5, 6, 7, 8, 6, 9], [5, 6, 7, 8, 6, 9], [5, 5, 5, 0, 0, 0]])
    words = np.array([[5, 8, 9], [6, 7, NONE], [5, 0, NONE]])
    found = seen_words(words, rows, np.array([3, 4, 2]))
    assert found.tolist() == [[5, NONE, NONE], [NONE, 7, NONE], [NONE, NONE, NONE]]


def test_describe_shows_the_text_on_both_sides(dataset: ActivationDataset) -> None:
    shown = dataset.describe(8, 0)
    text = dataset.pieces.store.tokenizer.decode(
        dataset.pieces.tokens(int(dataset.piece[8])), skip_special_tokens=False
    )
    assert shown["text"] + shown["goes on"] == text
    assert shown["position"] == str(dataset.position[8])


NUM, FEATURES = 700, 12


def sample(offset: float = 3.0) -> Chunk:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((NUM, FEATURES)) @ rng.standard_normal((FEATURES, FEATURES)) + offset
    return x.astype(np.float32), rng.integers(0, 9, NUM) * 5, rng.integers(2, 6, NUM)


def cut(arrays: Chunk, size: int) -> Iterator[Chunk]:
    for start in range(0, NUM, size):
        x, tokens, positions = (values[start : start + size] for values in arrays)
        yield x, tokens, positions


def test_they_are_those_of_plain_numpy() -> None:
    x32, tokens, positions = sample()
    x, found = x32.astype(np.float64), statistics_of(cut(sample(), 64))
    np.testing.assert_allclose(found.mean, x.mean(0), rtol=1e-13)
    assert found.variance == pytest.approx(x.var(0).mean(), rel=1e-12)
    lengths = np.linalg.norm(x, axis=1)
    np.testing.assert_allclose(found.unit_mean, (x / lengths[:, None]).mean(0), rtol=1e-12)
    expected = (lengths.mean(), lengths.std(), lengths.max())
    assert found.norms == pytest.approx(expected, rel=1e-12)
    assert found.token_ids.tolist() == sorted(set(tokens.tolist()))
    for token, mean in zip(found.token_ids, found.token_means, strict=True):
        np.testing.assert_allclose(mean, x[tokens == token].mean(0), rtol=2e-6)
    assert len(found.position_means) == 6
    for position in range(6):
        at = x[positions == position] if position > 1 else x  # 0 and 1 are absent: overall mean
        np.testing.assert_allclose(found.position_means[position], at.mean(0), rtol=2e-6)


def test_components_are_those_of_the_singular_values_with_a_fixed_sign() -> None:
    x = sample()[0].astype(np.float64)
    found = statistics_of(cut(sample(), 64)).components
    _, _, rows = np.linalg.svd(x - x.mean(0), full_matrices=False)
    assert found.shape == (FEATURES, FEATURES)
    np.testing.assert_allclose(np.abs((found * rows).sum(1)), 1, atol=1e-5)
    assert (found[np.arange(FEATURES), np.abs(found).argmax(1)] > 0).all()


def test_chunks_change_rounding_at_most_and_equal_chunks_nothing() -> None:
    first, other = statistics_of(cut(sample(), 64)), statistics_of(cut(sample(), 101))
    again = statistics_of(cut(sample(), 64))
    for name, value in vars(first).items():
        np.testing.assert_allclose(vars(other)[name], value, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(vars(again)[name], value)
    np.testing.assert_allclose(first.mean, other.mean, rtol=1e-13)


def test_a_large_common_offset_swallows_no_variance() -> None:
    """Some features of real models lie thousands away from zero."""
    x = sample(offset=1e6)[0].astype(np.float64)
    found = statistics_of(cut(sample(offset=1e6), 64))
    assert found.variance == pytest.approx(x.var(0).mean(), rel=1e-9)


def test_a_value_that_is_no_number_is_refused() -> None:
    x, tokens, positions = sample()
    x[3, 3] = np.inf
    with pytest.raises(ValueError, match="no finite numbers.*take 32-true"):
        statistics_of([(x, tokens, positions)])

"""Texts as planned batches, with the tokenizer of the options or of the model."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from datamodules import TextDataModule, TextSplit, TokenizerOptions
from datamodules.core.planned import ModelFacts
from datamodules.files.splitting import TEST, TRAIN, VALIDATION
from datamodules.text.packing import BlockDataset, TokenDataset, best_fit
from datamodules.text.store import TokenStream
from datamodules.tokenizers.text import make_tokenizer
from tests.text_corpora import (
    TEXTS,
    StreamStore,
    saved_tokenizer,
    text_file,
    text_module,
    text_rows,
    texts_of,
)

pytestmark = pytest.mark.usefixtures("own_cache")


def plain_best_fit(lengths, capacity):
    """Return the sorted lengths of every row, packing one piece at a time."""
    rows = []  # in the order in which they reached their room
    for size in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + size <= capacity]
        if not fitting:
            rows.append([])
            fitting = rows[-1:]
        chosen = max(fitting, key=sum)
        rows.append([*chosen, size])
        rows.remove(chosen)
    return sorted(rows)


@settings(deadline=None)
@example((30, [1, 2, 4, 25, 27]))  # two rows with equal room
@given(
    st.integers(1, 40).flatmap(
        lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=60))
    )
)
def test_every_piece_is_in_one_row_and_rows_are_those_of_plain_best_fit(case):
    capacity, lengths = case
    order, offsets = best_fit(np.array(lengths, np.int64), capacity)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert offsets[0] == 0
    assert offsets[-1] == len(lengths)
    rows = [order[a:b].tolist() for a, b in pairwise(offsets)]
    assert all(row == sorted(row) and row for row in rows)
    sizes = [sorted((lengths[i] for i in row), reverse=True) for row in rows]
    assert all(sum(row) <= capacity for row in sizes)
    assert sorted(sizes) == plain_best_fit(lengths, capacity)


TOKENIZER = make_tokenizer(TokenizerOptions(), iter(()))
END = 256


def stream_of(sizes):
    """Return documents of these numbers of tokens, an end token between two, tokens distinct."""
    tokens, starts = [END], []
    for size in sizes:
        starts.append(len(tokens) - 1)
        tokens += [*range(len(tokens), len(tokens) + size), END]
    positions, hashes = np.array(sizes, np.int64) + 1, np.arange(len(sizes), dtype=np.uint64)
    return TokenStream(np.array(tokens, np.uint32), np.array(starts), positions, hashes)


def plain_rows(examples, in_one_row):
    """Return the rows of a batch, built one position at a time, without padding."""
    rows, document = [], 0
    for sample, pieces in enumerate(examples):
        if not (in_one_row and rows):
            rows.append([])
        for piece in pieces:
            for place, pair in enumerate(zip(piece.input_ids, piece.labels, strict=True)):
                rows[-1].append((*pair, place, document, sample))
            document += 1
    return rows


NAMES = ("input_ids", "labels", "position_ids", "document_ids", "sample_index")
SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=12)
LAYOUTS = st.sampled_from(["packed", "documents"])


@settings(deadline=None)
@given(SIZES, st.integers(1, 17), LAYOUTS)
def test_a_batch_of_all_documents_has_each_token_as_a_target_once(sizes, context, layout):
    stream = stream_of(sizes)
    data = TokenDataset(StreamStore(stream, TOKENIZER), TRAIN, context, layout)
    examples = [data.example(i, 0) for i in range(len(data.lengths))]
    batch, labels = data.collate(examples), sorted(stream.tokens[1:].tolist())
    assert sorted(batch["labels"][batch["labels"] >= 0].tolist()) == labels
    assert data.lengths.sum() == len(labels) == data.target_counts["tokens"].sum()
    assert data.lengths.max() <= context
    pieces = [piece for pieces in examples for piece in pieces]
    assert all((piece.labels[:-1] == piece.input_ids[1:]).all() for piece in pieces)
    sizes = [len(piece.labels) for piece in pieces]
    assert data.document_lengths(np.arange(len(examples))).tolist() == sizes
    rows = plain_rows(examples, layout == "documents")
    assert len(rows) == len(batch["labels"])
    for number, row in enumerate(rows):
        for name, values in zip(NAMES, zip(*row, strict=True), strict=True):
            assert batch[name].dtype == torch.int64
            assert batch[name][number, : len(row)].tolist() == list(values)
        padding = {name: set(batch[name][number, len(row) :].tolist()) for name in NAMES}
        assert padding["labels"] <= {-100}
        assert padding["document_ids"] <= {-1}
        assert padding["sample_index"] <= {number}


@settings(deadline=None)
@given(SIZES, st.integers(1, 17), st.integers(0, 5), st.integers(0, 3))
def test_blocks_use_each_position_once_in_every_epoch(sizes, context, seed, epoch):
    stream = stream_of(sizes)
    data = BlockDataset(StreamStore(stream, TOKENIZER), TRAIN, context, seed)
    num = len(stream.tokens) - 1
    assert len(data.lengths) == -(-num // context)
    pieces = [piece for i in range(len(data.lengths)) for piece in data.example(i, epoch)]
    pairs = [
        (a, b) for p in pieces for a, b in zip(p.input_ids.tolist(), p.labels.tolist(), strict=True)
    ]
    assert sorted(pairs) == sorted(pairwise(stream.tokens.tolist()))
    sizes = [sum(len(p.labels) for p in data.example(i, epoch)) for i in range(len(data.lengths))]
    assert sizes == data.lengths.tolist()
    assert data.target_counts["tokens"].sum() == num


def test_blocks_begin_elsewhere_in_each_epoch_and_evaluation_at_the_beginning():
    stream = stream_of([500])
    data = BlockDataset(StreamStore(stream, TOKENIZER), TRAIN, 16, 7)
    phases = [data.phase(epoch) for epoch in (0, 1, 2, 1, 0)]
    assert len(set(phases[:3])) == 3
    assert phases[:2] == phases[:2:-1]
    assert data.phase(0) != BlockDataset(StreamStore(stream, TOKENIZER), TRAIN, 16, 8).phase(0)
    (first,) = BlockDataset(StreamStore(stream, TOKENIZER), TRAIN, 16, None).example(0, 5)
    assert first.input_ids.tolist() == stream.tokens[:16].tolist()


CHARACTERS = TokenizerOptions(kind="characters")


@pytest.fixture
def corpus(tmp_path):
    return text_rows(tmp_path)


def test_txt_jsonl_parquet_and_folders_give_the_same_tokens(tmp_path, corpus):
    folder = tmp_path / "folder"
    (folder / "deeper").mkdir(parents=True)
    for i, text in enumerate(TEXTS):
        text_file(folder / ("deeper" if i < 10 else ".") / f"{i:02}.txt", text)
    pq.write_table(pa.table({"content": TEXTS}), tmp_path / "a.parquet")
    modules = [
        text_module(corpus),
        text_module(str(tmp_path / "a.parquet"), text_column="content"),
        text_module([str(folder / "deeper"), str(folder / "*.txt")]),
    ]
    found = []
    for module in modules:
        module.setup("fit")
        found.append([texts_of(module.store, part) for part in (TRAIN, VALIDATION)])
    assert found[0] == found[1] == found[2]  # the draw depends on the text only


def test_without_files_the_demo_text_is_divided_by_documents(monkeypatch):
    monkeypatch.undo()  # the tests' shared cache probably has the demo
    data = TextDataModule(split=TextSplit(0.1, 0.05))
    data.setup("fit")
    counts = [len(data.store.stream(part).hashes) for part in (TRAIN, VALIDATION, TEST)]
    assert sum(counts) > 1500
    assert [round(count / sum(counts), 2) for count in counts] == [0.85, 0.1, 0.05]
    assert data.datasets["train"].describe(0, 0)["document 1"].startswith("<|endoftext|>")


def test_validation_and_test_files_are_read_as_they_are(tmp_path, corpus):
    held = [str(text_file(tmp_path / f"{name}.txt", name)) for name in ("held", "tested")]
    data = text_module(corpus, validation_files=held[0], test_files=held[1])
    data.setup("fit")
    data.setup("test")
    counts = [len(data.store.stream(part).hashes) for part in (TRAIN, VALIDATION, TEST)]
    assert counts == [20, 1, 1]
    data = text_module(corpus, test_files=held[1], split=TextSplit(0.2, 0.2))
    data.setup("fit")
    counts = [len(data.store.stream(part).hashes) for part in (TRAIN, VALIDATION, TEST)]
    assert counts == [16, 4, 1]


def test_a_part_without_text_names_the_option(corpus):
    data = text_module(corpus)
    said = "no documents are for test; name data.test_files, give .*single text with .*by=tail"
    with pytest.raises(ValueError, match=said):
        data.setup("test")
    with pytest.raises(ValueError, match="predict needs files"):
        data.setup("predict")


def trainer_of(stage):
    """Return the attributes of a Trainer that show its stage."""
    state = SimpleNamespace(fn=SimpleNamespace(value=stage))
    return SimpleNamespace(state=state, default_root_dir=".")


def test_evaluation_uses_the_tokenizer_of_the_model(corpus):
    trained = make_tokenizer(CHARACTERS, iter([*TEXTS, "zß"]))
    data = text_module(corpus, tokenizer=CHARACTERS)
    data.trainer, data.model = trainer_of("validate"), ModelFacts({"tokenizer": trained.to_dict()})
    data.prepare_data()
    assert data.open_store("validate").tokenizer.digest == trained.digest
    data.trainer = trainer_of("fit")
    assert data.open_store("fit").tokenizer.backend.token_to_id("ß") is None


def test_evaluation_takes_the_store_of_training_and_needs_no_training_text(tmp_path, corpus):
    held = str(text_file(tmp_path / "held.txt", "Document words"))
    divided, data = (
        text_module(corpus, tokenizer=CHARACTERS, validation_files=files) for files in (None, held)
    )
    recipes = []
    for module in (divided, data):
        module.prepare_data()
        module.setup("fit")
        recipes.append({"tokenizer": module.tokenizer.to_dict()})
    again = text_module(corpus, tokenizer=CHARACTERS)
    again.model = ModelFacts(recipes[0])
    assert again.open_store("validate").folder == divided.store.folder
    elsewhere = text_module(str(tmp_path / "gone.txt"), validation_files=held)
    elsewhere.model = ModelFacts(recipes[1])
    store = elsewhere.open_store("validate")
    assert store.tokenizer.digest == data.tokenizer.digest
    tokens = [one.stream(VALIDATION).tokens.tolist() for one in (store, data.store)]
    assert tokens[0] == tokens[1]
    assert len(store.stream(TRAIN).tokens) == 0
    elsewhere.model = ModelFacts()
    with pytest.raises(FileNotFoundError, match=r"data.train_files: .*gone.txt does not exist"):
        elsewhere.prepare_data()


@pytest.fixture
def pretrained(tmp_path):
    """A folder whose tokenizer knows a letter that the corpus lacks."""
    made = make_tokenizer(CHARACTERS, iter([*TEXTS, "q"]))
    return str(saved_tokenizer(made, tmp_path / "pretrained"))


def test_a_pretrained_model_brings_its_tokenizer(corpus, pretrained):
    data = text_module(corpus)
    data.model = ModelFacts(tokenizer=pretrained)
    data.prepare_data()
    assert data.open_store("fit").tokenizer.backend.token_to_id("q") is not None
    data.tokenizer_options = TokenizerOptions(kind="folder", path=pretrained)
    assert data.open_store("fit").tokenizer.backend.token_to_id("q") is not None
    data.tokenizer_options = CHARACTERS
    with pytest.raises(ValueError, match=r"data.tokenizer is kind characters, and the pretrained "):
        data.prepare_data()
    data.model = ModelFacts()
    assert data.open_store("fit").tokenizer.backend.token_to_id("q") is None


def test_a_chat_template_joins_the_tokenizer_of_a_pretrained_model(corpus, pretrained):
    data = text_module(corpus, tokenizer=TokenizerOptions(chat_template="plain"))
    data.model = ModelFacts(tokenizer=pretrained)
    for tokenizer in (data.open_store("fit").tokenizer, data.prompt_tokenizer()):
        assert tokenizer.backend.token_to_id("q") is not None
        assert tokenizer.render([{"role": "user", "content": "q"}]) == "user:\nq\n\n"
    data.tokenizer_options = TokenizerOptions()
    with pytest.raises(ValueError, match=r"kind bytes.* leave data.tokenizer out \(null\)"):
        data.prompt_tokenizer()

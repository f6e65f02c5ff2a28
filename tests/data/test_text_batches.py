"""Every token of every document is a target once; rows say what belongs together."""

import pickle
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.core.plan import PlanOptions
from datamodules.core.planned import PlannedDataModule
from datamodules.text.packing import Piece, one_row, padded_rows
from datamodules.text.store import TokenStream
from datamodules.text.texts import BlockDataset, TokenDataset, cut_into_pieces
from datamodules.tokenizers.text_tokenizer import TokenizerOptions, make_tokenizer

TOKENIZER = make_tokenizer(TokenizerOptions(), iter(()))
END = 256


def stream_of(sizes):
    """Return documents of these numbers of tokens, one end token between two, tokens distinct."""
    tokens, starts = [END], []
    for size in sizes:
        starts.append(len(tokens) - 1)
        tokens += [*range(len(tokens), len(tokens) + size), END]
    positions = [size + 1 for size in sizes]
    return TokenStream(
        np.array(tokens, np.uint32), np.array(starts, np.int64), np.array(positions, np.int64)
    )


def plain_rows(examples, in_one_row):
    """Return the rows of a batch, built one position at a time; padding is left out."""
    rows, document = [], 0
    for sample, pieces in enumerate(examples):
        if not (in_one_row and rows):
            rows.append([])
        for piece in pieces:
            for place in range(len(piece.labels)):
                rows[-1].append(
                    (piece.input_ids[place], piece.labels[place], place, document, sample)
                )
            document += 1
    return rows


NAMES = ("input_ids", "labels", "position_ids", "document_ids", "sample_index")
SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=12)
LAYOUTS = st.sampled_from(["packed", "documents"])


@settings(deadline=None)
@given(SIZES, st.integers(1, 17), LAYOUTS)
def test_every_token_of_every_document_is_a_target_once(sizes, context, layout):
    stream = stream_of(sizes)
    data = TokenDataset(stream, "x", context, layout, TOKENIZER)
    batch = data.collate([data.example(i, 0) for i in range(len(data.lengths))])
    labels = batch["labels"][batch["labels"] >= 0]
    assert sorted(labels.tolist()) == sorted(stream.tokens[1:].tolist())
    assert data.lengths.sum() == len(labels) == data.target_counts["tokens"].sum()
    assert data.lengths.max() <= context
    # Where a document goes on, the label is the token of the next position.
    same = batch["document_ids"][:, 1:] == batch["document_ids"][:, :-1]
    same &= batch["document_ids"][:, 1:] >= 0
    assert torch.equal(batch["labels"][:, :-1][same], batch["input_ids"][:, 1:][same])
    begins = batch["position_ids"][batch["document_ids"] >= 0] == 0
    assert int(begins.sum()) == len(data.sizes) == int(batch["document_ids"].max()) + 1


@settings(deadline=None)
@given(SIZES, st.integers(1, 17), LAYOUTS)
def test_batches_are_those_of_a_plain_loop(sizes, context, layout):
    data = TokenDataset(stream_of(sizes), "x", context, layout, TOKENIZER)
    examples = [data.example(i, 0) for i in range(min(5, len(data.lengths)))]
    batch = data.collate(examples)
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
    data = BlockDataset(stream, "x", context, TOKENIZER, seed)
    num = len(stream.tokens) - 1
    assert len(data.lengths) == -(-num // context)
    pieces = [piece for i in range(len(data.lengths)) for piece in data.example(i, epoch)]
    pairs = [
        (a, b) for p in pieces for a, b in zip(p.input_ids.tolist(), p.labels.tolist(), strict=True)
    ]
    assert sorted(pairs) == sorted(pairwise(stream.tokens.tolist()))
    assert [
        sum(len(p.labels) for p in data.example(i, epoch)) for i in range(len(data.lengths))
    ] == (data.lengths.tolist())
    assert data.target_counts["tokens"].sum() == num


def test_blocks_begin_elsewhere_in_each_epoch_and_evaluation_at_the_beginning():
    stream = stream_of([500])
    data = BlockDataset(stream, "x", 16, TOKENIZER, 7)
    phases = [data.phase(epoch) for epoch in (0, 1, 2, 1, 0)]
    assert len(set(phases[:3])) == 3
    assert phases[:2] == phases[:2:-1]
    assert data.phase(0) != BlockDataset(stream, "x", 16, TOKENIZER, 8).phase(0)
    validation = BlockDataset(stream, "x", 16, TOKENIZER, None)
    (first,) = validation.example(0, 5)
    assert first.input_ids.tolist() == stream.tokens[:16].tolist()


def test_a_long_document_is_cut_into_pieces_without_a_gap():
    starts, sizes = cut_into_pieces(stream_of([9, 2]), 4)
    assert starts.tolist() == [0, 4, 8, 10]
    assert sizes.tolist() == [4, 4, 2, 3]


def test_rows_worked_out_by_hand():
    a, b, c = (
        Piece(np.array(x), np.array(y)) for x, y in (([1, 2], [2, 3]), ([4], [5]), ([6], [7]))
    )
    batch = padded_rows([[a, b], [c]])
    assert batch["input_ids"].tolist() == [[1, 2, 4], [6, 0, 0]]
    assert batch["labels"].tolist() == [[2, 3, 5], [7, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 0], [0, 0, 0]]
    assert batch["document_ids"].tolist() == [[0, 0, 1], [2, -1, -1]]
    assert batch["sample_index"].tolist() == [[0, 0, 0], [1, 1, 1]]
    batch = one_row([[a, b], [c]])
    assert batch["labels"].tolist() == [[2, 3, 5, 7]]
    assert batch["document_ids"].tolist() == [[0, 0, 1, 2]]
    assert batch["sample_index"].tolist() == [[0, 0, 0, 1]]


def test_describe_shows_the_text_with_its_special_tokens():
    tokens = np.array([END, *TOKENIZER.encode("Hi"), END, *TOKENIZER.encode("you"), END], np.uint16)
    stream = TokenStream(tokens, np.array([0, 3]), np.array([3, 4]))
    data = TokenDataset(stream, "x", 8, "packed", TOKENIZER)
    assert data.describe(0, 0) == {
        "positions": "7",
        "document 1": "<|endoftext|>Hi<|endoftext|>",
        "document 2": "<|endoftext|>you<|endoftext|>",
    }
    assert data.lengths.tolist() == [7]


def test_a_dataset_that_is_sent_to_a_process_gives_the_same():
    data = BlockDataset(stream_of([20, 30]), "x", 8, TOKENIZER, 1)
    sent = pickle.loads(pickle.dumps(data))
    assert str([data.example(i, 2) for i in range(7)]) == str(
        [sent.example(i, 2) for i in range(7)]
    )


class Given(PlannedDataModule):
    def __init__(self, data, **planned):
        super().__init__(**planned)
        self.data = data

    def build(self, stage):
        return self.data


@pytest.mark.parametrize(("layout", "share"), [("documents", 0.0), ("packed", None)])
def test_documents_have_no_padding_and_the_plan_says_so(layout, share):
    data = TokenDataset(stream_of([3, 9, 1, 5, 2, 11, 4, 8]), "x", 12, layout, TOKENIZER)
    module = Given(data, global_batch_size=4, plan=PlanOptions(seed=0))
    module.setup("fit")
    found = [batch["document_ids"] for batch in module.train_dataloader()]
    padding = sum(int((ids < 0).sum()) for ids in found) / sum(ids.numel() for ids in found)
    assert module.plan_facts.padding_share == pytest.approx(padding)
    assert share is None or padding == share


def test_collating_eight_documents_takes_less_than_a_millisecond():
    data = TokenDataset(stream_of([180] * 8), "x", 512, "documents", TOKENIZER)
    examples = [data.example(i, 0) for i in range(8)]
    seconds = []
    for collate in (one_row, padded_rows):
        for _ in range(20):
            started = time.perf_counter()
            collate(examples)
            seconds.append(time.perf_counter() - started)
    assert min(seconds) < 1e-3  # 50 µs on a quiet machine

"""Audits of data files: hand-counted figures, and their layout."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import datamodules
from datamodules import (
    InstructionDataModule,
    PagesDataModule,
    RankingDataModule,
    RetrievalDataModule,
    TextDataModule,
    TextSplit,
    TokenizerOptions,
)
from datamodules.files.audit import WIDTH, Audit, AuditPart
from datamodules.files.splitting import Split
from datamodules.search.collection import CollectionRequest
from tests.search_collections import TEST, TRAIN, write_beir, write_qrels
from tests.text_corpora import rows_file

CHATS = TokenizerOptions("bytes", chat_template="plain")


def instructions(folder: Path, *rows: dict, **options: Any) -> Audit:
    options = {"tokenizer": CHATS, "split": TextSplit(validation_share=0), **options}
    return InstructionDataModule(rows_file(folder / "mine.jsonl", rows), **options).audit()


def sample(prompt: str, completion: str) -> dict:
    return {"prompt": prompt, "completion": completion}


def shown(audit: Audit) -> str:
    out = io.StringIO()
    audit.show(Console(file=out, width=WIDTH, color_system=None))
    return out.getvalue()


def test_samples_tokens_targets_and_rows_are_counted(tmp_path):
    rows = [sample("ab", "cde"), sample("é", "f"), sample("ab", "cde")]
    (part,) = instructions(tmp_path, *rows, context_length=10).parts
    assert list(part.lengths) == [7, 5, 7]  # begin, prompt, completion, end; é is two bytes
    assert part.columns == {
        "tokens": 19,
        "trained on": 4 + 2 + 4,
        "rows": 2,
        "used": f"{100 * (6 + 4 + 6) / 20:.1f} %",
    }
    assert part.num_duplicates == 1


def test_losses_are_counted(tmp_path):
    user = {"role": "user", "content": "u" * 40}
    chat = {"messages": [{"role": "assistant", "content": "a"}, user]}
    rows = [sample("p" * 9, "c"), sample("p", "c" * 30), chat]
    long, empty = instructions(tmp_path, *rows, context_length=10).warnings
    assert "3 train samples exceed data.context_length 10" in long
    assert "2 lose a part of an answer" in long  # the second and the chat
    assert "1 train samples have no target" in empty


def test_overlap_counts_different_samples(tmp_path):
    same, other = sample("a", "b"), sample("c", "d")
    validation = rows_file(tmp_path / "v.jsonl", [same, same, other, sample("e", "f")])
    audit = instructions(tmp_path, same, other, sample("x", "y"), validation_files=validation)
    assert list(audit.leaks()) == [("train", "validation", 2)]
    assert [part.num_duplicates for part in audit.parts] == [0, 1]
    assert "2 different validation samples are also in train" in shown(audit)


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ho"}]
PAGE = {"text": "Hens.", "title": "Hen"}
TO_PREDICT = {  # training rows, and rows to predict: one known, two new, and bad ones
    "TextDataModule": ([{"text": "Hi"}], [{"prompt": "Hi"}, {"prompt": "a"}, {"prompt": "b"}, {}]),
    "InstructionDataModule": (
        [sample("Hi", "ho"), {"messages": CHAT}],
        [{"messages": CHAT[:1]}, {"prompt": "ho"}, {"prompt": ""}, {"prompt": 3}],
    ),
    "PreferenceDataModule": (
        [{"prompt": "Hi", "chosen": "ho", "rejected": "no"}],
        [{"prompt": "Hi"}, {"prompt": "ho"}, {"prompt": "no"}, {"messages": []}],
    ),
    "PagesDataModule": ([PAGE], [{"text": "Hens."}, {"text": "Hen"}, {"text": "Cow"}, {"text": 1}]),
    "Seq2SeqDataModule": (
        [{"source": "Hi ", "target": "ho"}],
        [{"source": " Hi"}, {"source": "ho"}, {"source": "hi"}, {"source": ""}],
    ),
}


@pytest.mark.parametrize("name", TO_PREDICT)
def test_what_is_to_be_predicted_is_counted_with_what_was_trained_on(tmp_path, name):
    files = [rows_file(tmp_path / f"{n}.jsonl", rows) for n, rows in enumerate(TO_PREDICT[name])]
    options = {"train_files": files[0], "predict_files": files[1], "tokenizer": CHATS}
    audit = getattr(datamodules, name)(**options, split=TextSplit(validation_share=0)).audit()
    predict = audit.parts[-1]
    assert (predict.name, len(predict.lengths)) == ("predict", 3)
    assert list(audit.leaks()) == [("train", "predict", 1)]
    assert [(Path(bad.file).name, bad.line) for bad in audit.bad_rows] == [("1.jsonl", 4)]


def test_queries_to_predict_are_counted_with_those_that_were_trained_on(tmp_path):
    folder, queries = write_beir(tmp_path / "beir"), tmp_path / "queries.csv"
    queries.write_text("id,query\na,what is  LIFT\nb,\na,other\nc,new\n")
    collection = CollectionRequest(str(folder), split=Split(validation_share=0.0))
    audit = RetrievalDataModule(collection=collection, predict_queries=str(queries)).audit()
    assert [(part.name, len(part.keys)) for part in audit.parts][-1] == ("predict", 2)
    assert ("train", "predict", 1) in audit.leaks()
    assert [bad.line for bad in audit.bad_rows] == [3, 4]  # no query, and a repeated id


def test_parts_that_share_documents_overlap_where_their_texts_do(tmp_path):
    rows = ["abcd", "cdab", "qrst"]
    path = rows_file(tmp_path / "mine.jsonl", [{"text": text} for text in rows])
    audit = TextDataModule(path, split=TextSplit(0.5, by="tail")).audit()
    assert list(audit.leaks()) == [("train", "validation", 2)]  # "cd" and "ab"; "st" is new
    assert len(set(audit.parts[0].keys)) == 3


def test_pages_with_a_long_target_are_left_out_and_counted(tmp_path):
    path = rows_file(tmp_path / "pages.jsonl", [{"text": "a" * 9, "title": "b" * 99}])
    sizes = {"context_length": 64, "max_target_tokens": 24, "split": TextSplit(validation_share=0)}
    (sentence,) = PagesDataModule(train_files=path, **sizes).audit().warnings
    assert sentence == "1 train samples exceed data.context_length 64: they are left out"


@pytest.mark.parametrize("layout", ["packed", "documents"])
def test_it_fits_80_columns_and_counts_what_is_too_long(tmp_path, layout):
    rows = [sample("x" * (i % 30), "y" * (1 + i * i)) for i in range(60)]
    audit = instructions(tmp_path, *rows, layout=layout, context_length=1000)
    text = shown(audit)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "; 28 longer than 1,001" in " ".join(text.split())
    assert ("used" in audit.parts[0].columns) == (layout != "documents")


def test_counts_of_a_large_corpus_stand_beside_the_names():
    columns: dict[str, int | str] = {"tokens": 9_035_582_198, "trained on": 9_035_582_198}
    columns |= {"rows": 8_823_810, "used": "100.0 %"}
    names = ("train", "validation")
    parts = [AuditPart(name, np.array([9_035_582_198]), np.zeros(1), columns) for name in names]
    text = shown(Audit("documents", "tokens", parts))
    row = next(line for line in text.splitlines() if line.lstrip().startswith("validation"))
    assert row.split()[1:4] == ["1", "9,035,582,198", "9,035,582,198"]


def doubtful_collection(folder: Path) -> Audit:
    """A collection with one case of each doubt."""
    write_beir(folder)
    with (folder / "corpus.jsonl").open("a") as file:
        file.write('{"_id": "d4", "text": "Wings LIFT  of a wing"}\n')
        file.write('{"_id": "d5", "text": ""}\n{"_id": "d6", "text": " "}\n{"_id": "d6"}\n')
    with (folder / "queries.jsonl").open("a") as file:
        file.write('{"_id": "q4", "text": "What is  lift"}\n{"_id": "q5", "text": "never"}\n')
    train = [*TRAIN, ("q1", "d1", "2"), ("q2", "d3", "0.5"), ("q9", "d1", "1")]
    write_qrels(folder / "qrels" / "train.tsv", train)
    write_qrels(folder / "qrels" / "test.tsv", [*TEST, ("q4", "d1", "0")])
    split = Split(validation_share=0.0)
    return RankingDataModule(collection=CollectionRequest(str(folder), split=split)).audit()


def test_parts_grades_and_doubts_of_a_collection_are_counted_and_printed(tmp_path):
    audit = doubtful_collection(tmp_path)
    train, test = audit.parts
    assert (len(train.keys), train.columns["judgements"], train.columns["relevant"]) == (2, 4, 3)
    assert audit.labels["train grades"] == {"0": 1, "0.5": 1, "1": 1, "2": 1}
    assert (len(test.keys), list(train.lengths)) == (2, [12, 12])
    assert list(audit.leaks()) == [("train", "test", 1)]
    assert [(Path(bad.file).name, bad.line, bad.kind) for bad in audit.bad_rows] == [
        ("corpus.jsonl", 7, "columns"),
        ("train.tsv", 7, "unknown query"),
    ]
    text = shown(audit)
    lines = [line for line in text.splitlines() if str(tmp_path) not in line]  # never broken
    assert max(map(len, lines)) <= WIDTH
    for finding in (
        "documents  6; bytes: median",
        "unjudged   1 queries have no judgement and are in no part",
        "warning    documents with neither title nor text: 2",
        "warning    documents with the words of an earlier one: 1",
        "warning    test queries with no document above grade 0: 1",
        "overlap    1 different test queries are also in train",
    ):
        assert finding in text

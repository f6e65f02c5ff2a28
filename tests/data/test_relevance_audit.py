"""`unisono check` of a collection: everything counted, nothing guessed."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from datamodules.audits import WIDTH
from datamodules.search.audit import Audit, audit_collection
from datamodules.search.request import CollectionRequest, QuerySplit
from lit_models.commands.check import check
from tests.relevance_collections import TEST, TRAIN, write_beir, write_qrels


def audited(folder: Path) -> Audit:
    """A collection with one of each doubt."""
    write_beir(folder)
    with (folder / "corpus.jsonl").open("a") as file:
        file.write('{"_id": "d4", "text": "Wings LIFT  of a wing"}\n')
        file.write('{"_id": "d5", "text": ""}\n{"_id": "d6", "text": " "}\n{"_id": "d6"}\n')
    with (folder / "queries.jsonl").open("a") as file:
        file.write('{"_id": "q4", "text": "What is  lift"}\n{"_id": "q5", "text": "never"}\n')
    train = [*TRAIN, ("q1", "d1", "2"), ("q2", "d3", "0.5"), ("q9", "d1", "1")]
    write_qrels(folder / "qrels" / "train.tsv", train)
    write_qrels(folder / "qrels" / "test.tsv", [*TEST, ("q4", "d1", "0")])
    split = QuerySplit(validation_share=0.0)
    return audit_collection(CollectionRequest("beir", str(folder), split=split))


def printed(audit: Audit) -> str:
    output = io.StringIO()
    audit.show(Console(file=output, width=WIDTH))
    return output.getvalue()


def test_parts_grades_and_doubts_are_counted(tmp_path: Path) -> None:
    audit = audited(tmp_path)
    train, validation, test = audit.parts
    assert (train.num_queries, train.num_judgements, train.num_relevant) == (2, 4, 3)
    assert train.grades == {0.0: 1, 0.5: 1, 1.0: 1, 2.0: 1}
    assert (validation.num_queries, validation.grades) == (0, {})
    assert (test.num_queries, test.num_without) == (2, 1)
    assert len(audit.document_lengths) == 6
    assert audit.query_lengths.tolist() == [12, 12, 12, 13, 5]
    assert (audit.num_unjudged, audit.num_empty, audit.num_repeated_texts) == (1, 2, 1)
    assert (audit.num_merged_judgements, audit.num_fractional_grades) == (1, 1)
    assert audit.overlap == {("train", "test"): 1}
    assert [(Path(bad.file).name, bad.line, bad.kind) for bad in audit.bad_rows] == [
        ("corpus.jsonl", 7, "documents"),
        ("train.tsv", 7, "unknown query"),
    ]


def test_the_audit_is_printed_in_80_columns(tmp_path: Path) -> None:
    text = printed(audited(tmp_path))
    assert max(map(len, text.splitlines())) <= WIDTH
    for finding in (
        "documents  6; bytes: median",
        "unjudged   1 queries have no judgement and are in no part",
        "warning    documents with neither title nor text: 2",
        "warning    documents with the words of an earlier one: 1",
        "warning    judgements that repeat another, and are taken once: 1",
        "warning    grades that are no whole numbers, and are taken as they are: 1",
        "warning    test queries with no document above grade 0: 1",
        "warning    queries of train with the words of one of test: 1",
    ):
        assert finding in text


def test_the_command_takes_options_of_a_collection_and_fails_on_bad_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_beir(tmp_path / "beir")
    mine = write_qrels(tmp_path / "mine.tsv", [*TRAIN, ("q9", "d1", "1")])
    collection = {"format": "beir", "folder": str(folder), "split": {"validation_share": 0.0}}
    data = "--data=datamodules.search.ranking.RankingDataModule"
    assert check([data, f"--data.collection={json.dumps(collection)}"]) == 0
    assert "every row can be used" in capsys.readouterr().out
    collection["files"] = {"test": str(mine)}
    assert check([data, f"--data.collection={json.dumps(collection)}"]) == 1
    shown = capsys.readouterr().out
    assert "mine.tsv:5: no query has the id" in " ".join(shown.split())
    assert "--data.on_bad_rows=reject" in shown

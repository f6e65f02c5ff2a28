"""What a report shows of a family's worst: texts of TensorBoard, queries, rows."""

import json
from pathlib import Path

import pytest

from lit_models.reporting.board import board_texts, records
from lit_models.reporting.reading import RunRecord
from lit_models.reporting.samples import markdown, worst_samples
from tests.commands.run_folders import text_of

TABLE = "| count | true | given |\n|---|---|---|\n| 3 | 11 Smith | 12 <b>Tailor |\n"


def shown(folder: Path) -> tuple[str, list[str]]:
    run = RunRecord(folder, [], {})
    return text_of(f"<body>{''.join(worst_samples(run))}"), run.notes


def write_board(folder: Path) -> Path:
    """Write texts and a number of two steps; return the events file."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        writer.add_text("val/confused_codes", "old", 1)
        writer.add_scalar("train/loss", 1.0, 1)
        writer.add_text("val/confused_codes", TABLE, 2)
        writer.add_text("samples/0", "```\nOnce <upon>\n a time\n```", 2)
    [path] = (folder / "tensorboard").iterdir()
    return path


def test_the_newest_text_of_each_name_is_read_and_a_torn_end_passed_over(tmp_path: Path) -> None:
    path = write_board(tmp_path)
    texts = board_texts(tmp_path, [])
    assert [(text.name, text.step) for text in texts] == [
        ("samples/0", 2),
        ("val/confused_codes", 2),
    ]
    assert texts[1].text == TABLE
    path.write_bytes(path.read_bytes()[:-9])
    assert [(text.name, text.step) for text in board_texts(tmp_path, [])] == [
        ("val/confused_codes", 2)
    ]


def test_a_damaged_record_ends_its_file_alone_and_becomes_a_note(tmp_path: Path) -> None:
    path = write_board(tmp_path)
    *_, last = records(path)
    content = path.read_bytes()
    at = content.index(last)
    (tmp_path / "tensorboard" / "events.out.tfevents.0").write_bytes(content)
    path.write_bytes(content[:at] + b"\xff" * 8 + content[at + 8 :])
    words, [note] = shown(tmp_path)
    assert "samples/0, step 2" in words  # of the other file
    assert note.startswith(f"tensorboard/{path.name} is damaged (a record of {len(last)} bytes")
    path.write_bytes(content[: at - 12] + b"\xff" * 8 + content[at - 4 :])
    words, [note] = shown(tmp_path)
    assert f"({2**64 - 1} bytes at {at} of {len(content)})" in note
    path.write_bytes(content[: at + 3])
    assert shown(tmp_path)[1] == []  # torn, as a kill leaves it


def test_a_table_stays_a_table_and_a_sample_its_lines(tmp_path: Path) -> None:
    write_board(tmp_path)
    words, notes = shown(tmp_path)
    assert "val/confused codes, step 2 true given count 11 Smith 12 <b>Tailor 3" in words
    assert "samples/0, step 2 Once <upon> a time" in words
    assert notes == []
    assert "<pre>Once &lt;upon&gt;\n a time</pre>" in markdown("```\nOnce <upon>\n a time\n```")


def test_queries_come_worst_first_beside_the_other_systems(tmp_path: Path) -> None:
    rows = ["query,system,ndcg@10,mrr", "a,ranker,0.5,1", "a,bm25,1.0,1", "b,ranker,0.25,1"]
    (tmp_path / "ranking_queries.csv").write_text("\n".join([*rows, "b,bm25,0,1"]) + "\n")
    found = {"retriever": {"mrr@10": {"x": 1.0, "y": 0.125}}, "bm25": {"mrr@10": {"x": 0.5}}}
    (tmp_path / "retrieval-val.json").write_text(json.dumps({"per_query": found}))
    words, notes = shown(tmp_path)
    assert "Queries ranked worst (ndcg@10) query ranker bm25 b 0.250 0 a 0.500 1" in words
    assert "(mrr@10, retrieval-val) query retriever bm25 y 0.125 – x 1 0.500" in words
    assert notes == []


@pytest.mark.parametrize("content", ["{", "[]", '{"title": "a"}', '{"per_query": {}}'])
def test_a_file_that_is_not_what_it_should_be_becomes_a_note(tmp_path: Path, content: str) -> None:
    (tmp_path / "errors-test.csv").write_text("input,loss\na\n")
    (tmp_path / "retrieval-test.json").write_text(content)
    (tmp_path / "ranking_queries.csv").write_text("query\n")
    words, notes = shown(tmp_path)
    assert words == ""
    assert [note.split()[0] for note in notes] == [
        "ranking_queries.csv",
        "retrieval-test.json",
        "errors-test.csv",
    ]


def test_a_query_of_a_retriever_is_told_with_its_text(tmp_path: Path) -> None:
    found = {"retriever": {"mrr@10": {"x": 1.0, "y": 0.0}}}
    told = [{"query": "y", "text": "salt <by> weight", "first_relevant": None},
            {"query": "x", "text": "old iron", "first_relevant": 1}]  # fmt: skip
    (tmp_path / "retrieval-test.json").write_text(json.dumps({"per_query": found, "worst": told}))
    words = "query text retriever rank of the first relevant y salt <by> weight 0 – x old iron 1 1"
    assert words in shown(tmp_path)[0]


def test_the_errors_of_a_test_stand_in_place_of_a_validation_s_and_are_linked(
    tmp_path: Path,
) -> None:
    head = "input,truth,answer,sample,loss"
    (tmp_path / "errors-val.csv").write_text(f"{head}\nof val,11,12,3,0.5\n")
    assert "of val" in shown(tmp_path)[0]
    rows = [f"text {number},11,12,{number},0.5" for number in range(20)]
    (tmp_path / "errors-test.csv").write_text("\n".join([head, *rows, ""]))
    words, notes = shown(tmp_path)
    assert words.startswith(
        "Errors of the test, the worst first input truth answer sample loss text 0 11 12 0 0.5"
    )
    assert words.endswith("text 11 11 12 11 0.5 12 of 20 rows; all of them: errors-test.csv")
    assert notes == []
    assert 'href="errors-test.csv"' in "".join(worst_samples(RunRecord(tmp_path, [], {})))

"""A collection is read by number and id from any process, and never from a file that changed."""

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np

from datamodules.files.splitting import TEST, TRAIN, VALIDATION
from datamodules.search.collection import Collection, CollectionRequest, QuerySplit, open_collection
from tests.search_collections import DOCUMENTS, write_beir, write_lines, write_qrels

MEMORY_SCRIPT = """
import resource, sys
from pathlib import Path
from datamodules.search.collection import open_collection
from datamodules.search.collection import CollectionRequest

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def make(folder, num_documents):
    folder.mkdir()
    with (folder / "collection.tsv").open("w") as file:
        for i in range(num_documents):
            file.write(f"{i}\\t{'a passage of several words ' * 15}{i}\\n")
    (folder / "queries.train.tsv").write_text("1\\tq\\n")
    (folder / "qrels.train.tsv").write_text("1\\t0\\t7\\t1\\n")
    collection = open_collection(CollectionRequest("msmarco", str(folder)))
    step = num_documents // 10_000
    for i in range(0, num_documents, step):
        assert collection.document(i).text.endswith(str(i))
    assert collection.document_index("9999") == 9999
    return peak_mib()

folder = Path(sys.argv[1])
print(make(folder / "small", 20_000), make(folder / "large", 200_000))
"""


def with_queries(folder: Path, count: int) -> CollectionRequest:
    """A collection with many training queries, in a folder made for it."""
    write_beir(folder)
    rows = [{"_id": f"q{i}", "text": f"query {i}"} for i in range(count)]
    write_lines(folder / "queries.jsonl", *map(json.dumps, rows))
    write_qrels(folder / "qrels" / "train.tsv", [(f"q{i}", "d1", "1") for i in range(count)])
    (folder / "qrels" / "test.tsv").unlink()
    return CollectionRequest("beir", str(folder))


def queries_of(collection: Collection, part: int) -> set[str]:
    return {collection.query_id(q) for q in collection.judgements(part).query.tolist()}


def test_two_processes_read_one_pickled_collection(tmp_path: Path) -> None:
    collection = open_collection(CollectionRequest("beir", str(write_beir(tmp_path))))
    before = [collection.document(i) for i in range(3)]  # handles and maps stay here
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(collection.document, range(3), chunksize=1) == before
    copy = pickle.loads(pickle.dumps(collection))
    assert [copy.document_index(id) for id, *_ in DOCUMENTS] == [0, 1, 2]
    assert copy.fingerprint == collection.fingerprint


def test_missing_parts_are_drawn_from_the_training_queries_by_their_ids(tmp_path: Path) -> None:
    request = with_queries(tmp_path / "a", 400)
    shares = QuerySplit(validation_share=0.2, test_share=0.1)
    drawn = open_collection(CollectionRequest("beir", request.folder, split=shares))
    parts = [queries_of(drawn, part) for part in (TRAIN, VALIDATION, TEST)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 400
    assert 50 < len(parts[VALIDATION]) < 110
    assert 20 < len(parts[TEST]) < 60
    fewer = with_queries(tmp_path / "b", 200)  # other queries move none of these
    few = open_collection(CollectionRequest("beir", fewer.folder, split=shares))
    for part in (TRAIN, VALIDATION, TEST):
        assert queries_of(few, part) <= parts[part]
    seeded = QuerySplit(validation_share=0.2, test_share=0.1, seed=1)
    other = open_collection(CollectionRequest("beir", request.folder, split=seeded))
    assert queries_of(other, VALIDATION) != parts[VALIDATION]


def test_a_part_with_files_of_its_own_is_left_alone(tmp_path: Path) -> None:
    request = with_queries(tmp_path, 50)
    write_qrels(tmp_path / "qrels" / "dev.tsv", [("q3", "d1", "1")])
    collection = open_collection(request)
    assert queries_of(collection, VALIDATION) == {"q3"}
    assert len(queries_of(collection, TRAIN)) == 50
    assert queries_of(collection, TEST) == set()


def test_judgements_are_sorted_whatever_the_order_of_their_lines(tmp_path: Path) -> None:
    rows = [("q2", "d3", "1"), ("q1", "d2", "2"), ("q2", "d1", "0"), ("q1", "d1", "1")]
    folder = write_beir(tmp_path, rows)
    whole = QuerySplit(validation_share=0.0)
    found = open_collection(CollectionRequest("beir", str(folder), split=whole)).judgements(TRAIN)
    assert found.query.tolist() == [0, 0, 1, 1]
    assert found.document.tolist() == [0, 1, 0, 2]
    assert found.grade.tolist() == [1, 2, 0, 1]
    assert (found.query.dtype, found.grade.dtype) == (np.int64, np.float32)


def test_a_changed_file_changes_no_open_collection_and_is_indexed_anew(tmp_path: Path) -> None:
    folder = write_beir(tmp_path)
    request = CollectionRequest("beir", str(folder))
    collection = open_collection(request)
    corpus = folder / "corpus.jsonl"
    status, content = corpus.stat(), corpus.read_text()
    corpus.write_text(content.replace("lift of a wing", "LIFT of a wing"))
    os.utime(corpus, ns=(status.st_atime_ns, status.st_mtime_ns))  # same size, same time
    assert collection.document(0).text == "lift of a wing"
    anew = open_collection(request)
    assert anew.document(0).text == "LIFT of a wing"
    assert anew.fingerprint != collection.fingerprint


def test_the_same_files_elsewhere_have_the_same_fingerprint(tmp_path: Path) -> None:
    first, second = (
        open_collection(CollectionRequest("beir", str(write_beir(tmp_path / name))))
        for name in ("a", "b")
    )
    assert first.fingerprint == second.fingerprint
    assert first.folder != second.folder


def test_memory_stays_flat_over_ten_times_the_documents(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path)],
        env=os.environ | {"UNISONO_CACHE": str(tmp_path / "cache")},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    small, large = map(float, done.stdout.split())
    assert large - small < 45, f"{small:.0f} MiB, then {large:.0f} MiB; the texts are 80 MiB"

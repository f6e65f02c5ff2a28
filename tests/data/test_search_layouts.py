"""Collections in the layouts of MS MARCO and ESCI, read and searched by BM25."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules.files.rows import read_rejected
from datamodules.search.candidates import open_bm25
from datamodules.search.collection import CollectionRequest, open_collection
from tests.search_collections import write_lines

PRODUCTS = {
    "product_id": ["B1", "B1", "B2", "B3"],
    "product_title": ["red kettle", "roter Kessel", "kettle lid", None],
    "product_description": [None, None, "fits all", "a pan"],
    "product_bullet_point": ["boils fast", None, None, None],
    "product_brand": ["Acme", "Acme", None, "Other"],
    "product_color": ["red", None, None, None],
    "product_locale": ["us", "de", "us", "us"],
}
EXAMPLES = {
    "example_id": [0, 1, 2, 3],
    "query": ["kettle", "kettle", "kettle", "pan"],
    "query_id": [7, 7, 7, 9],
    "product_id": ["B1", "B2", "B3", "B3"],
    "product_locale": ["us"] * 4,
    "esci_label": ["E", "C", "I", "E"],
    "split": ["train", "train", "train", "test"],
}


def ms_marco(folder: Path) -> CollectionRequest:
    write_lines(folder / "collection.tsv", "0\tsalt of the sea", "1\tbread and salt", "2\tiron")
    write_lines(folder / "queries.train.tsv", "10\twhat is iron", "12\tunjudged")
    for name in ("dev.small", "dev"):  # as in MS MARCO's archive, one in the other
        write_lines(folder / f"queries.{name}.tsv", "11\tsea salt")
    write_lines(folder / "qrels.train.tsv", "10\t0\t2\t1")
    write_lines(folder / "qrels.dev.small.tsv", "11\t0\t0\t1")
    return CollectionRequest(str(folder))


def esci(folder: Path, examples: dict[str, list[object]] = EXAMPLES) -> CollectionRequest:
    for name, columns in (("products", PRODUCTS), ("examples", examples)):
        pq.write_table(pa.table(columns), folder / f"shopping_queries_dataset_{name}.parquet")
    return CollectionRequest(str(folder))


def test_passages_of_ms_marco_are_read_by_their_columns(tmp_path):
    collection = open_collection(ms_marco(tmp_path))
    assert collection.facts["format"] == "msmarco"
    texts = [(document.id, document.whole) for document in collection.documents]
    assert texts == [("0", "salt of the sea"), ("1", "bread and salt"), ("2", "iron")]
    assert sorted(query.id for query in collection.queries) == ["10", "11", "12"]
    (query,), (document,), (grade,) = collection.judgements(1)
    assert (collection.queries[query].text, int(document), float(grade)) == ("sea salt", 0, 1.0)
    assert open_bm25(collection).search(["sea salt"], 3).documents.tolist() == [[0, 1, -1]]


def test_products_of_esci_get_the_gains_of_their_labels(tmp_path):
    collection = open_collection(esci(tmp_path))
    ids = [document.id for document in collection.documents]
    assert ids == ["us-B1", "de-B1", "us-B2", "us-B3"]
    assert collection.documents[0].whole == "red kettle\nAcme\nred\nboils fast"
    assert collection.documents[3].whole == "Other\na pan"
    assert [query.text for query in collection.queries] == ["kettle", "pan"]
    train, test = collection.judgements(0), collection.judgements(2)
    assert train.document.tolist() == [0, 2, 3]
    assert train.grade.tolist() == pytest.approx([1.0, 0.01, 0.0])
    assert test.document.tolist() == [3]
    assert sorted(open_bm25(collection).search(["kettle"], 2).documents[0].tolist()) == [0, 2]


def test_rows_that_break_a_rule_are_named_or_left_out(tmp_path):
    request = ms_marco(tmp_path)
    write_lines(tmp_path / "collection.tsv", "0\tsalt", "no tab", "1\tbread")
    with pytest.raises(ValueError, match=r"collection\.tsv:2: .*with a tab between them"):
        open_collection(request)
    (tmp_path / "collection.tsv").write_bytes("0\tsalt\n1\tpâté\n2\tiron\n".encode("cp1252"))
    with pytest.raises(ValueError, match=r"collection\.tsv:2: byte 0xE2 is not in the encoding"):
        open_collection(request)
    (tmp_path / "shop").mkdir()
    unlabelled = {name: values for name, values in EXAMPLES.items() if name != "split"}
    with pytest.raises(ValueError, match=r'examples\.parquet has no column "split"'):
        open_collection(esci(tmp_path / "shop", unlabelled))
    wrong = EXAMPLES | {"split": ["train"] * 3 + ["later"], "esci_label": ["E", "C", "X", "E"]}
    wrong["query"] = ["kettle", "pot", "kettle", "pan"]  # two texts for one query
    collection = open_collection(esci(tmp_path / "shop", wrong), "reject")
    assert {row.value for row in read_rejected(collection.folder)} == {"7", "later", "X"}
    (tmp_path / "shop/shopping_queries_dataset_examples.parquet").unlink()
    with pytest.raises(FileNotFoundError, match="examples"):
        open_collection(CollectionRequest(str(tmp_path / "shop")))

"""Small collections in the exact formats of their field."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DOCUMENTS = [
    ("d1", "Wings", "lift of a wing"),
    ("d2", "", "drag of a body"),
    ("d3", "Heat", "flow"),
]
QUERIES = [("q1", "what is lift"), ("q2", "what is drag"), ("q3", "what is heat")]
TRAIN = [("q1", "d1", "2"), ("q1", "d2", "0"), ("q2", "d2", "1")]
TEST = [("q3", "d3", "1")]
PASSAGES = [("0", 'He said "lift" and left'), ("1", '"Drag'), ("2", "a\u00a0b, 5' 6\"")]


def write_lines(path: Path, *lines: str) -> Path:
    """Write a text file, every line with its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return path


def write_qrels(path: Path, rows: list[tuple[str, str, str]], header: bool = True) -> Path:
    """Write qrels as BEIR has them."""
    lines = ["\t".join(row) for row in rows]
    return write_lines(path, *(["query-id\tcorpus-id\tscore"] if header else []), *lines)


def write_beir(folder: Path, train: list[tuple[str, str, str]] = TRAIN) -> Path:
    """Write a folder in BEIR's layout, with judgements of train and test."""
    rows = [{"_id": i, "title": t, "text": x, "metadata": {}} for i, t, x in DOCUMENTS]
    write_lines(folder / "corpus.jsonl", *map(json.dumps, rows))
    rows = [{"_id": i, "text": x, "metadata": {}} for i, x in QUERIES]
    write_lines(folder / "queries.jsonl", *map(json.dumps, rows))
    write_qrels(folder / "qrels" / "train.tsv", train)
    write_qrels(folder / "qrels" / "test.tsv", TEST)
    return folder


def write_beir_parquet(folder: Path) -> Path:
    """Write the same collection in the newer layout, documents in two shards."""
    rows = [{"_id": i, "title": t, "text": x} for i, t, x in DOCUMENTS]
    write_parquet(folder / "corpus" / "corpus-00000-of-00002.parquet", rows[:2])
    write_parquet(folder / "corpus" / "corpus-00001-of-00002.parquet", rows[2:])
    rows = [{"_id": i, "title": "", "text": x} for i, x in QUERIES]
    write_parquet(folder / "queries" / "queries-00000-of-00001.parquet", rows)
    for name, judged in (("train", TRAIN), ("test", TEST)):
        rows = [{"query-id": q, "corpus-id": d, "score": float(g)} for q, d, g in judged]
        write_parquet(folder / "default" / f"{name}-00000-of-00001.parquet", rows)
    return folder


def write_msmarco(folder: Path) -> Path:
    """Write passages with quotes, queries of three files, TREC's qrels and triples."""
    write_lines(folder / "collection.tsv", *("\t".join(row) for row in PASSAGES))
    write_lines(folder / "queries.train.tsv", "10\twhat is lift", '11\t"drag" meaning')
    write_lines(folder / "queries.dev.tsv", "20\thow tall", "21\tnever judged")
    write_lines(folder / "queries.dev.small.tsv", "20\thow tall")
    write_lines(folder / "qrels.train.tsv", "10\t0\t0\t1", "11\t0\t1\t1")
    write_lines(folder / "qrels.dev.small.tsv", "20 0 2 1")
    write_lines(folder / "triples.tsv", "10\t0\t1", "11\t1\t2")
    return folder


def example(number: int, product: str, label: str, **changed: Any) -> dict[str, Any]:
    """Return a row of ESCI's examples."""
    row = {
        "example_id": number,
        "query": "red shoe",
        "query_id": 1,
        "product_id": product,
        "product_locale": "us",
        "esci_label": label,
        "small_version": 1,
        "large_version": 1,
        "split": "train",
    }
    return row | changed


def product(id: str, title: str | None, locale: str = "us") -> dict[str, Any]:
    """Return a row of ESCI's products."""
    return {
        "product_id": id,
        "product_title": title,
        "product_description": None,
        "product_bullet_point": "soft\nlight",
        "product_brand": "Acme",
        "product_color": None,
        "product_locale": locale,
    }


EXAMPLES = [
    example(0, "A", "E"),
    example(1, "B", "S"),
    example(2, "C", "C"),
    example(3, "D", "I"),
    example(4, "A", "I", query="tent", query_id=2, split="test", small_version=0),
    example(5, "A", "E", query="zapato", query_id=3, product_locale="es"),
    example(6, "B", "E", query="boot", query_id=4, split="test"),
]
PRODUCTS = [
    *(product(id, f"shoe {id}") for id in "ABCD"),
    product("A", "zapato A", "es"),
    product("never judged", "hat"),
]


def write_esci(
    folder: Path, examples: list[dict[str, Any]] = EXAMPLES, products: Any = PRODUCTS
) -> Path:
    """Write examples and products."""
    write_parquet(folder / "shopping_queries_dataset_examples.parquet", examples)
    write_parquet(folder / "shopping_queries_dataset_products.parquet", products)
    return folder


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as a parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path

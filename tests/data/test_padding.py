"""Padding of each family, counted in the batches of an epoch at the default settings: what a device
computes for nothing. Lengths are spread as those of real texts are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datamodules import (
    ActivationDataModule,
    InstructionDataModule,
    PagesDataModule,
    PlanOptions,
    RankingDataModule,
    RetrievalDataModule,
    ScoredTextDataModule,
    SplitOptions,
    TokenizerOptions,
)
from datamodules.activations.documents import PositionRule
from datamodules.scored.store import LabelOptions
from datamodules.search.candidates import CandidateOptions
from datamodules.search.collection import CollectionRequest
from tests.occupation_tables import module as occupation_module
from tests.text_corpora import text_module

NUMBER, BATCH = 800, 16
BYTES = TokenizerOptions("bytes")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNISONO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Different texts of 2 to 60 words."""
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(2.2, 0.6, NUMBER).astype(int).clip(2, 60)
    return [" ".join(f"{n}w{rng.integers(9)}" for _ in range(size)) for n, size in enumerate(sizes)]


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def collection(folder: Path, texts: list[str]) -> CollectionRequest:
    """Return one of these documents; each of as many queries has some that are judged."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    rows = [{"_id": f"{n}", "title": "", "text": text} for n, text in enumerate(texts)]
    written(folder / "corpus.jsonl", rows)
    written(folder / "queries.jsonl", [{**row, "text": "which one"} for row in rows])
    judged = [f"{n}\t{(n + k) % len(rows)}\t{1 - k}\n" for n in range(len(rows)) for k in (0, 1)]
    for part, lines in (("train", judged), ("validation", judged[:2]), ("test", judged[:2])):
        header = "query-id\tcorpus-id\tscore\n"
        (folder / "qrels" / f"{part}.tsv").write_text(header + "".join(lines))
    return CollectionRequest(str(folder))


def text(folder: Path, texts: list[str], **options: Any) -> Any:
    path = written(folder / "text.jsonl", [{"text": text} for text in texts])
    return text_module(path, layout="packed", tokenizer=BYTES, context_length=512, **options)


def occupation(folder: Path, texts: list[str], **options: Any) -> Any:
    rows = [(text[:120], "en", str(10000 + n % 4), "") for n, text in enumerate(texts)]
    return occupation_module(folder, rows, split=SplitOptions(), **options)


def retrieval(folder: Path, texts: list[str], **options: Any) -> Any:
    request = collection(folder, texts)
    return RetrievalDataModule(collection=request, tokenizer=BYTES, bm25=None, **options)


def ranking(folder: Path, texts: list[str], **options: Any) -> Any:
    request, none = collection(folder, texts), CandidateOptions(bm25=None)
    return RankingDataModule(collection=request, tokenizer=BYTES, candidates=none, **options)


def scored(folder: Path, texts: list[str], **options: Any) -> Any:
    path = written(folder / "s.jsonl", [{"text": t, "grade": n} for n, t in enumerate(texts)])
    heads = {"grade": LabelOptions("regression")}
    return ScoredTextDataModule({"train": path}, heads=heads, tokenizer=BYTES, **options)


def pages(folder: Path, texts: list[str], **options: Any) -> Any:
    rows = [{"text": text, "title": f"title {n}"} for n, text in enumerate(texts)]
    path = written(folder / "p.jsonl", rows)
    return PagesDataModule(train_files=path, tokenizer=BYTES, **options)


def instructions(folder: Path, texts: list[str], **options: Any) -> Any:
    path = written(folder / "i.jsonl", [{"prompt": text, "completion": "yes"} for text in texts])
    return InstructionDataModule(path, tokenizer=BYTES, context_length=512, **options)


def lens(folder: Path, texts: list[str], **options: Any) -> Any:
    path = written(folder / "l.jsonl", [{"text": text} for text in texts])
    rule = PositionRule(min_position=2, per_document=1)
    given = {"tokenizer": BYTES, "positions": rule, "context_length": 512}
    return ActivationDataModule(train_files=path, **given, **options)


SORTED, PACKED = 0.10, 0.02
FAMILIES: dict[str, tuple[Callable[..., Any], float]] = {
    "text": (text, PACKED),
    "pages": (pages, PACKED),
    "instructions": (instructions, PACKED),
    "occupation": (occupation, SORTED),
    "retrieval": (retrieval, SORTED),
    "scored": (scored, SORTED),
    "lens": (lens, SORTED),
    "ranking": (ranking, 0.45),  # candidates of one query are of any length, and stay together
}


def counted(batch: dict[str, Any]) -> tuple[int, int]:
    """Return the tokens of a batch, and the positions that are computed."""
    for name in ("attention_mask", "document_mask"):
        if name in batch:
            return int(batch[name].sum()), batch[name].numel()
    if "document_ids" in batch:
        return int((batch["document_ids"] >= 0).sum()), batch["document_ids"].numel()
    return int(batch["lengths"].sum()), batch["input_ids"].numel()


def padding(data: Any) -> float:
    """Return the share of an epoch's positions that hold no token."""
    data.prepare_data()
    data.setup("fit")
    found = np.array([counted(batch) for batch in data.train_dataloader()])
    tokens, positions = found.sum(0)
    return 1 - tokens / positions


@pytest.mark.parametrize("family", FAMILIES)
def test_little_of_what_is_computed_is_padding(
    family: str, texts: list[str], tmp_path: Path
) -> None:
    made, most = FAMILIES[family]
    share = padding(made(tmp_path, texts, global_batch_size=BATCH))
    unsorted = PlanOptions(bucket_window=1)
    plain = padding(made(tmp_path, texts, global_batch_size=BATCH, plan=unsorted))
    assert share < most
    assert most == PACKED or plain > 1.5 * share

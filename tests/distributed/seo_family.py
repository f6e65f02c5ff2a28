"""Modules of seo whose whole run takes a second, and their files."""

from pathlib import Path
from typing import Any

import numpy as np

from datamodules import ScoredTextDataModule, SplitOptions, TokenizerOptions
from datamodules.core.planned import LoaderOptions, PlannedDataModule
from datamodules.scored.datamodule import ChunkOptions
from datamodules.scored.store import LabelOptions
from datamodules.search.candidates import CandidateOptions, GroupOptions
from datamodules.text.encoding import TextLimits
from lit_models import LitTextScorer
from lit_models.seo.networks import HeadOptions, RankingLoss
from lit_models.training.exact import ExactModule
from tests.distributed.seo_retriever import retriever
from tests.search_collections import write_collection
from tests.seo.pages import pages_of, write_pages, writer
from tests.seo.small_collection import adamw, ranker, ranking_data, small_encoder
from tests.text_corpora import rows_file

HEADS = {
    "price": LabelOptions("regression"),
    "stars": LabelOptions("ordinal"),
    "trade": LabelOptions("multiclass"),
    "tags": LabelOptions("multilabel", classes=["old", "cheap"], separator=";"),
}


def scored_texts(path: Path) -> None:
    """Write 50 texts of one to three chunks; labels are missing here and there, once all."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(50):
        trade = str(rng.choice(["baker", "smith", "weaver"]))
        words = rng.choice(["old", "cheap", "good", "bread", "iron"], rng.integers(2, 14))
        labels: dict[str, Any] = {
            "price": round(float(rng.normal(3, 2)), 2),
            "stars": int(rng.integers(1, 4)),
            "trade": trade,
            "tags": [tag for tag in ("old", "cheap") if tag in words],
        }
        for place, name in enumerate(labels):
            if number % 4 == place or number == 7:
                labels[name] = None
        rows.append({"text": f"{trade} {' '.join(words)}", **labels})
    rows_file(path, rows)


def text_scorer(folder: Path, options: dict[str, Any]) -> tuple[ExactModule, PlannedDataModule]:
    path = str(folder.parent / "scored.jsonl")
    data = ScoredTextDataModule(
        files=dict.fromkeys(("train", "validation", "test", "predict"), path),
        predict_output=str(folder / "coded.jsonl"),
        heads=HEADS,
        split=SplitOptions(0.0, 0.0),
        chunks=ChunkOptions(most=3, stride=4),
        tokenizer=TokenizerOptions("words"),
        text=TextLimits(max_length=7, max_query_length=4),
        loader=LoaderOptions(num_workers=0),
        **{"global_batch_size": 8, **options},
    )
    heads = {"price": HeadOptions("huber", 2.0), "tags": HeadOptions(weight=0.5)}
    module = LitTextScorer(
        heads, task_weights="uncertainty", optimizer=adamw, encoder=small_encoder
    )
    return module, data


def text_ranker(folder: Path, options: dict[str, Any]) -> tuple[ExactModule, PlannedDataModule]:
    data = ranking_data(
        folder.parent / "collection",
        candidates=CandidateOptions("bm25", top=10),
        groups=GroupOptions(size=6, mined=3, unjudged_as_negative=True),
        predict_output=str(folder / "coded.trec"),
        **options,
    )
    return ranker(loss=RankingLoss("lambda"), prior=True, pairs_per_forward=16), data


def snippet_writer(folder: Path, options: dict[str, Any]) -> tuple[ExactModule, PlannedDataModule]:
    path = str(folder.parent / "pages.jsonl")
    data = pages_of(
        path,
        predict_files=path,
        predict_output=str(folder / "coded.jsonl"),
        loader=LoaderOptions(num_workers=0),
        **{"global_batch_size": 8, **options},
    )
    return writer(rate=0.01), data


SEO = {
    "text_scorer": text_scorer,
    "ranker": text_ranker,
    "retriever": retriever,
    "snippet_writer": snippet_writer,
}


def seo_files(folder: Path) -> None:
    """Write the files that these modules read."""
    scored_texts(folder / "scored.jsonl")
    write_collection(folder / "collection")
    write_pages(folder / "pages.jsonl", 40)

"""The modules of `seo`, so small that a whole run of one takes a second."""

from pathlib import Path
from typing import Any

from datamodules.planned import PlannedDataModule
from datamodules.relevance.candidates import CandidateOptions
from datamodules.relevance.groups import GroupOptions
from lit_models.seo.losses import RankingLoss
from lit_models.training.exact import ExactModule
from tests.seo.small_collection import ranker, ranking_data, relevance_files


def seo_files(folder: Path) -> None:
    """Write what the families below read."""
    relevance_files(folder / "relevance")


def text_ranker(folder: Path, options: dict[str, Any]) -> tuple[ExactModule, PlannedDataModule]:
    options = {**options}
    options.pop("num_samples", None)
    data = ranking_data(
        folder.parent / "relevance",
        candidates=CandidateOptions("bm25", top=10),
        groups=GroupOptions(size=6, mined=3, unjudged_as_negative=True),
        predict_output=str(folder / "coded.trec"),
        **options,
    )
    return ranker(loss=RankingLoss("lambda"), prior=True, pairs_per_forward=16), data


SEO = {"ranker": text_ranker}

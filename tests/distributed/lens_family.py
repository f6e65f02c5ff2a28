"""A consistency lens whose whole run takes a second, and its documents."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datamodules import ActivationDataModule
from datamodules.activations.documents import PositionRule
from datamodules.core.planned import LoaderOptions, PlannedDataModule
from datamodules.tokenizers.text import TokenizerOptions
from lit_models import LitConsistencyLens
from lit_models.causal_lm.network import DecoderConfig
from lit_models.consistency_lens.lens import LensOptions
from lit_models.consistency_lens.loss import LensLosses, LossWeight, TemperatureSchedule
from lit_models.consistency_lens.subject import SubjectOptions
from lit_models.training.exact import ExactModule
from tests.text_corpora import rows_file

adamw = partial(torch.optim.AdamW, lr=0.01)


def story_files(folder: Path) -> None:
    """Write documents of 9 to 16 words with two attributes each: 40 to train on, and a few more."""
    rng = np.random.default_rng(0)
    words = ["the", "old", "baker", "sold", "bread", "and", "salt", "by", "weight"]
    for part, number in (("train", 40), ("validation", 9), ("test", 11)):
        rows = []
        for _ in range(number):
            text = [str(word) for word in rng.choice(words, rng.integers(9, 17))]
            known = {"third": text[2], "last": text[-1]}
            rows.append({"text": " ".join(text), "attributes": known})
        rows_file(folder / f"stories-{part}.jsonl", rows)


JOINT_START = 6
LENS_LOSSES = LensLosses(
    teacher_text=LossWeight(1.0, end=JOINT_START),
    teacher_reconstruction=LossWeight(1.0, end=4),  # then the reconstructor waits
    reconstruction=LossWeight(1.0, begin=JOINT_START),
    reference=LossWeight(0.1, begin=JOINT_START),
    effect=LossWeight(0.1, begin=JOINT_START + 1),
    fluency=LossWeight(0.01, begin=JOINT_START + 1),
)


LENS_SUBJECT = SubjectOptions(
    layer=0, network=DecoderConfig(max_positions=32, hidden_size=8, num_layers=2, num_heads=2)
)


def lens_documents(folder: Path, min_position: int = 4) -> dict[str, Any]:
    """Return options of a datamodule that reads the stories beside a job's folder."""
    files = {
        f"{part}_files": str(folder.parent / f"stories-{part}.jsonl")
        for part in ("train", "validation", "test")
    }
    rule = PositionRule(min_position=min_position, per_document=3)
    options = {"tokenizer": TokenizerOptions("words"), "context_length": 16, "positions": rule}
    return files | options


def consistency_lens(
    folder: Path, options: dict[str, Any], layers: list[int] | None = None
) -> tuple[ExactModule, PlannedDataModule]:
    data = ActivationDataModule(
        **lens_documents(folder),
        predict_output=str(folder / "coded.jsonl"),
        loader=LoaderOptions(num_workers=0),
        **{"global_batch_size": 8, **options},
    )
    module = LitConsistencyLens(
        adamw,
        LENS_SUBJECT,
        LENS_LOSSES,
        lens=LensOptions(num_words=3),
        temperature=TemperatureSchedule(begin=JOINT_START, until=JOINT_START + 4),
        rates={"reconstructor": 0.5},
        layers=layers,
    )
    return module, data

"""A small run of the family, for the tests that all families share."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datamodules import Seq2SeqDataModule
from datamodules.core.planned import LoaderOptions
from lit_models import LitSeq2Seq
from lit_models.seq2seq.decoding import Seq2SeqDecoding
from lit_models.seq2seq.network import Seq2SeqConfig
from tests.text_corpora import table

SMALL = Seq2SeqConfig(width=16, num_encoder_layers=1, num_decoder_layers=2, num_heads=2)


def pair_files(folder: Path) -> None:
    """Write 50 pairs of several lengths, two of equal source, and fewer to evaluate on."""
    rng, words = np.random.default_rng(0), ("smith", "old baker", "wool weaver", "tailor")
    rows = [(f"{rng.choice(words)[::2]} {n % 49}", str(rng.choice(words))) for n in range(50)]
    table(folder / "pairs.csv", rows)
    table(folder / "judged_pairs.csv", rows[:20])


def seq2seq(folder: Path, options: dict[str, Any]) -> tuple[LitSeq2Seq, Seq2SeqDataModule]:
    pairs, judged = (str(folder.parent / f"{name}.csv") for name in ("pairs", "judged_pairs"))
    data = Seq2SeqDataModule(
        train_files=pairs,
        validation_files=judged,
        test_files=judged,
        predict_files=pairs,
        predict_output=str(folder / "coded.csv"),
        loader=LoaderOptions(num_workers=0),
        **{"global_batch_size": 8, **options},
    )
    # Some texts end early, so that ranks decode different numbers of tokens.
    decoding = Seq2SeqDecoding(max_new_tokens=6, temperature=1.0)
    adamw = partial(torch.optim.AdamW, lr=0.01)
    return LitSeq2Seq(adamw, network=SMALL, decoding=decoding), data

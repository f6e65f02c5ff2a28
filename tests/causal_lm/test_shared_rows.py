"""Samples that share a row are refused where dropout is keyed by sample, before the first step."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from datamodules import InstructionDataModule, TextDataModule
from lit_models.causal_lm.module import LitCausalLM
from lit_models.causal_lm.network import DecoderConfig
from lit_models.training import ExactDropout, default_callbacks
from tests.toy import toy_trainer

SHAPE = {"max_positions": 16, "hidden_size": 16, "num_layers": 1, "num_heads": 2}
ROWS = [{"text": f"t{i}", "prompt": f"p{i}", "completion": f"c{i}"} for i in range(12)]


def fit(folder: Path, kind: type, layout: str, dropout: float) -> None:
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    sizes = {"context_length": 16, "global_batch_size": 4, "micro_batch_size": 4}
    module = LitCausalLM(
        partial(torch.optim.AdamW, lr=0.05), network=DecoderConfig(**SHAPE, dropout=dropout)
    )
    callbacks = [*default_callbacks(), ExactDropout()]
    trainer = toy_trainer(folder / "run", max_steps=1, callbacks=callbacks, limit_val_batches=0)
    trainer.fit(module, kind(str(path), layout=layout, **sizes))


@pytest.mark.parametrize("kind", [TextDataModule, InstructionDataModule])
def test_exact_dropout_needs_rows_that_are_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="exact_dropout needs data.layout packed or blocks"):
        fit(tmp_path, kind, "documents", 0.1)
    fit(tmp_path, kind, "documents", 0.0)
    fit(tmp_path, kind, "packed", 0.1)

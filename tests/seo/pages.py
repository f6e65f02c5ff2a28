"""Small pages, and a run of a writer on them."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything

from datamodules import PagesDataModule, PlanOptions, TokenizerOptions
from lit_models.causal_lm.generation import GenerationOptions
from lit_models.causal_lm.network import DecoderConfig
from lit_models.seo.writer import LitSnippetWriter
from lit_models.training.predictions import PredictionWriter
from tests.text_corpora import rows_file
from tests.toy import json_rows, toy_trainer

NETWORK = DecoderConfig(max_positions=48, hidden_size=64, num_layers=2, num_heads=2)
SIZES = {"context_length": 48, "max_target_tokens": 16}
ANIMALS = ("hen", "cow", "ant", "dog", "cat", "owl", "fox")


def write_pages(path: Path, number: int = 4) -> str:
    """Write pages about animals, some with html; return the path."""
    rows: list[dict[str, Any]] = []
    for i in range(number):
        name = ANIMALS[i % len(ANIMALS)] * (1 + i // len(ANIMALS))
        text = f"The {name} is here. It eats."
        page: dict[str, Any] = {"text": text}
        if i % 2:
            page = {"html": f"<title>x</title><h1>Big {name}</h1><p>{text}</p>", "url": "nowhere"}
        own = {"title": f"Big {name}", "query": f"{name} food", "id": i}
        rows.append({**page, "description": "Animals.", **own})
    return rows_file(path, rows)


def writer(rate: float = 0.003, **options: Any) -> LitSnippetWriter:
    """Return a writer of titles."""
    seed_everything(1)
    optimizer = partial(torch.optim.AdamW, lr=rate)
    generation = GenerationOptions(max_new_tokens=12)
    given = {"network": NETWORK, "generation": generation, **options}
    return LitSnippetWriter(optimizer=optimizer, **given)


def pages_of(path: str, **options: Any) -> PagesDataModule:
    """Return pages for training, validation and test."""
    given = {"global_batch_size": 4, "plan": PlanOptions(seed=1), **options}
    return PagesDataModule(
        train_files=path,
        validation_files=path,
        test_files=path,
        **SIZES,
        tokenizer=TokenizerOptions("bpe", vocab_size=300),
        **given,
    )


def predict(folder, module, path, **options):
    """Predict with a trained module; return the rows of the output."""
    output = folder / "out.jsonl"
    quiet = {"callbacks": [PredictionWriter()], "enable_checkpointing": False, "precision": 32}
    trainer = toy_trainer(folder, **quiet)
    files = {"predict_files": str(path), "predict_output": str(output)}
    trainer.ckpt_path = options.pop("ckpt_path", None)
    data = PagesDataModule(global_batch_size=3, **files, **SIZES, **options)
    trainer.predict(module, data, return_predictions=False, weights_only=True)
    return json_rows(output)

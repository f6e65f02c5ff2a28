"""Small documents, a small subject, and activation dumps of it, for tests."""

from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Trainer

from datamodules import ActivationDumpDataModule, TokenizerOptions
from datamodules.activations.documents import PositionRule
from datamodules.activations.store import ActivationStore
from lit_models import LitSubject
from lit_models.causal_lm.network import DecoderConfig
from lit_models.consistency_lens.subject import SubjectOptions
from lit_models.training.predictions import PredictionWriter
from tests.text_corpora import rows_file
from tests.toy import toy_trainer

PETS, PLACES = ("owl", "cat", "dog", "hen"), ("hill", "town", "farm")
RULE = PositionRule(min_position=2, per_document=3)
WORDS = TokenizerOptions(kind="words")
SHAPE = DecoderConfig(max_positions=16, hidden_size=16, num_layers=3, num_heads=2)


def stories(folder: Path, number: int, name: str = "mine.jsonl", seed: int = 0) -> str:
    """Write different stories of 3 to 30 words with two attributes; return the file's path."""
    rng, rows, seen = np.random.default_rng(seed), [], set()
    while len(rows) < number:
        pet, place = str(rng.choice(PETS)), str(rng.choice(PLACES))
        more = " ".join(rng.choice([*PETS, *PLACES, "and", "the"], rng.integers(0, 28)))
        text = f"a {pet} at {place} {more} ".strip()
        if text not in seen:
            seen.add(text)
            rows.append({"text": text, "attributes": {"pet": pet, "place": place}})
    return rows_file(folder / name, rows)


def documents(files: str | list[str] | None, **options: Any) -> dict[str, Any]:
    """Return the datamodule options that read the documents of `stories`."""
    given = {
        "train_files": files,
        "tokenizer": WORDS,
        "context_length": 16,
        "positions": RULE,
        "global_batch_size": 8,
    }
    return given | options


def subject(layer: int = 1, **options: Any) -> SubjectOptions:
    """Return a subject with random weights, or the one at a path."""
    given = {"network": SHAPE} if "path" not in options else {}
    return SubjectOptions(layer=layer, **given, **options)


def trainer(folder: Path, **options: Any) -> Trainer:
    """Return a trainer that writes predictions and prints nothing."""
    writer = PredictionWriter()
    writer.part_batches = 2
    given = {"enable_checkpointing": False, "callbacks": [writer], "precision": 32, **options}
    return toy_trainer(folder, **given)


def dumped(
    target: Path,
    files: str | list[str] | None,
    of: SubjectOptions | None = None,
    precision: Any = "32-true",
    **options: Any,
) -> ActivationStore:
    """Write a dump and return its store."""
    data = ActivationDumpDataModule(str(target), **documents(files, **options))
    runs = trainer(target.parent, precision=precision)
    runs.predict(LitSubject(of or subject()), data, return_predictions=False)
    return ActivationStore(target)


def contents(folder: Path) -> dict[str, bytes]:
    """Return name -> bytes of each file."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def plain_activations(
    model: Any, layer: int, batches: list[tuple[np.ndarray, np.ndarray, list[np.ndarray]]]
) -> np.ndarray:
    """Return [N, D] activations by a plain loop over a model of transformers with a hook.

    Args:
        model: without its head.
        layer: index of the block.
        batches: input_ids [R, T] and attention_mask [R, T] int64, and the positions of each row.
    """
    import torch

    blocks = model.h if hasattr(model, "h") else model.layers
    found: list[torch.Tensor] = []

    def keep(block: Any, given: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    handle, kept = blocks[layer].register_forward_hook(keep), []
    with torch.no_grad():
        for ids, mask, positions in batches:
            model(
                input_ids=torch.from_numpy(ids),
                attention_mask=torch.from_numpy(mask),
                use_cache=False,
            )
            hidden = found.pop()
            kept += [hidden[row, at].numpy() for row, at in enumerate(positions)]
    handle.remove()
    return np.concatenate(kept)

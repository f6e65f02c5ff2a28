"""Explanations as a jsonl file, one line for each activation.

Shapes: N activations, t words, C controls.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.activations.dataset import ActivationDataset
from datamodules.activations.token_texts import context_of
from datamodules.files.splitting import PART_NAMES
from datamodules.files.tables import naming
from datamodules.text.prompts import new_json_file

NEAREST = 3  # controls that a line names


def write_explanations(
    dataset: ActivationDataset,
    results: dict[str, np.ndarray],
    controls: tuple[str, ...],
    path: Path,
) -> None:
    """Write one line per activation: whole or not at all, and never over an existing file.

    Args:
        dataset: of the activations.
        results: token_ids [N, t], error [N] and control_errors [N, C].
        controls: names of the C controls.
        path: .jsonl.

    Raises:
        FileExistsError: the file exists.
    """
    with new_json_file(path) as file:
        for number in range(len(results["error"])):
            values = {name: found[number] for name, found in results.items()}
            line = json.dumps(
                explanation_line(dataset, number, values, controls), ensure_ascii=False
            )
            with naming(path):
                file.write(line + "\n")


def explanation_line(
    dataset: ActivationDataset,
    number: int,
    values: dict[str, np.ndarray],
    controls: tuple[str, ...],
) -> dict[str, Any]:
    """Return what is told of one activation.

    document: part and index. position: from 0. before, token, after: the text around it; the
    token is the last one that the activation knows of. explanation. error: squared, in units of
    the training part's variance. nearest_controls: those that come nearest to the activation, and
    their errors.

    Args:
        dataset: of the activations.
        number: of the sample.
        values: token_ids [t], error [] and control_errors [C].
        controls: names of the C controls.
    """
    pieces, piece = dataset.pieces, int(dataset.piece[number])
    position, tokenizer = int(dataset.position[number]), pieces.store.tokenizer
    errors = dict(zip(controls, values["control_errors"].tolist(), strict=True))
    nearest = sorted(errors, key=lambda name: (errors[name], name))
    return {
        "document": f"{PART_NAMES[pieces.part]}:{int(pieces.document[piece])}",
        "position": position,
        **context_of(tokenizer, pieces.tokens(piece), position)._asdict(),
        "explanation": tokenizer.decode(values["token_ids"]),
        "error": round(float(values["error"]), 6),
        "nearest_controls": {name: round(errors[name], 6) for name in nearest[:NEAREST]},
    }

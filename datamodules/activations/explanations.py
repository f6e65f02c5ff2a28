"""Explanations as a jsonl file, one line for each activation.

Shapes: N activations, t words, C controls.
"""

import json
import os
from pathlib import Path

import numpy as np

from datamodules.activations.dataset import ActivationDataset
from datamodules.splitting import PART_NAMES
from datamodules.table_writer import naming

AROUND = 8  # tokens before and after the position that a line shows


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
    if path.exists():
        raise FileExistsError(
            f"{path} exists and is not overwritten; move it away, or name another file with "
            "--data.predict_output."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path), open(unfinished, "w", encoding="utf-8") as file:
            for number in range(len(results["error"])):
                line = _line(dataset, results, controls, number)
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _line(
    dataset: ActivationDataset,
    results: dict[str, np.ndarray],
    controls: tuple[str, ...],
    number: int,
) -> dict[str, object]:
    pieces, piece = dataset.pieces, int(dataset.piece[number])
    tokens, position = pieces.tokens(piece), int(dataset.position[number])
    decode = pieces.store.tokenizer.decode
    errors = dict(zip(controls, results["control_errors"][number].tolist(), strict=True))
    nearest = sorted(errors, key=lambda name: (errors[name], name))
    return {
        "document": f"{PART_NAMES[pieces.part]}:{int(pieces.document[piece])}",
        "position": position,
        "before": decode(tokens[max(0, position - AROUND) : position]),
        "token": decode(tokens[position : position + 1], skip_special_tokens=False),
        "after": decode(tokens[position + 1 : position + 1 + AROUND]),
        "explanation": decode(results["token_ids"][number]),
        "error": round(float(results["error"][number]), 6),
        "nearest_controls": {name: round(errors[name], 6) for name in nearest[:3]},
    }

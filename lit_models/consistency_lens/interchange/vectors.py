"""Explanations of activations in a parquet file.

Shapes: n rows, D features.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from datamodules.activations.interchange import COLUMN, VectorFile, write_vectors
from lit_models.consistency_lens.lens import AT_ONCE, best_reading, index_of, rows_of, worth
from lit_models.training.metrics import evaluating

if TYPE_CHECKING:
    from lit_models.consistency_lens.module import LitConsistencyLens


@torch.no_grad()
def explain_vectors(
    module: "LitConsistencyLens", source: str | Path, target: str | Path, best_of: int = 1
) -> None:
    """Write the rows of a parquet file plus explanation, confidence, cosine and fve of each
    activation, as in `Reading`, and a sidecar; few rows are in memory at a time.

    Raises:
        FileNotFoundError: the file or its sidecar is missing.
        FileExistsError: the target exists.
        ValueError: the activations are of another width, layer or subject than the lens's.
    """
    file, subject = VectorFile.open(source), module.recipe["subject"]
    layer = file.layer if file.layer in module.layers else subject["layer"]
    own = {"width": subject["hidden_size"], "layer": layer, "subject": subject["digest"]}
    known = {name: getattr(file, name) for name in own}
    changed = [n for n, value in known.items() if value is not None and value != own[n]]
    if changed:
        diff = "; ".join(f"{n}: {known[n]} there, {own[n]} here" for n in changed)
        raise ValueError(
            f"{file.path} holds other activations ({diff}) than this lens explains; use a lens for "
            "these, or activations of this lens's subject and layer."
        )

    index, of_all = index_of(module.layers, file.layer), len(module.layers)

    def pieces() -> Iterator[dict[str, Any]]:
        lens, first = module.lens, 0
        for rows, found in file.pieces():
            explanations: list[str] = []
            numbers: list[torch.Tensor] = []
            for true in torch.from_numpy(found).to(lens.mean).split(AT_ONCE):
                keys = torch.arange(first, first + len(true), device=true.device)
                layer = rows_of(index, len(true), of_all, true.device)
                one = best_reading(lens, true, keys, best_of, layer)
                explanations += [module.tokenizer.decode(ids) for ids in one.token_ids.tolist()]
                numbers.append(torch.stack(worth(lens, true, one, layer), dim=1))
                first += len(true)
            columns = {name: rows.column(name) for name in rows.schema.names if name != COLUMN}
            values = torch.cat(numbers).float().cpu().numpy().T
            named = dict(zip(("confidence", "cosine", "fve"), values, strict=True))
            yield {COLUMN: found, **columns, "explanation": explanations, **named}

    facts = {"d_model": file.width, "layer_index": module.layers[index]}
    more = {"unisono": {"subject": own["subject"], "best_of": best_of}}
    with evaluating(module):
        write_vectors(Path(target).expanduser(), facts | more, pieces(), "choose another name")

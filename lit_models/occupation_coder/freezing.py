"""Fine-tuning of a trained encoder: its languages, layers that stand still or learn slowly."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from lit_models.occupation_coder.encoders import Encoder


def freeze_encoder(encoder: Encoder, freeze: Literal["none", "encoder"] | int) -> None:
    """Stop gradients of the whole encoder, or of its lowest layers with the embeddings.

    Args:
        encoder: changed in place.
        freeze: `none`, `encoder`, or a number of layers from the lowest.

    Raises:
        ValueError: not one of these, or more layers than there are.
    """
    blocks = encoder.blocks()
    if freeze == "none" or freeze == 0:
        return
    if freeze == "encoder":
        encoder.requires_grad_(False)
        return
    if not isinstance(freeze, int) or not 0 < freeze <= len(blocks):
        raise ValueError(
            f"freeze must be none, encoder, or 0 to {len(blocks)} layers of this encoder, got "
            f"{freeze!r}: choose one of them."
        )
    lowest, others = blocks[:freeze], blocks[freeze:]
    in_others = {id(p) for block in others for p in block.parameters()}
    top = {id(p) for p in encoder.norm.parameters()} if hasattr(encoder, "norm") else set()
    frozen = {id(p) for block in lowest for p in block.parameters()}
    for parameter in encoder.parameters():
        if id(parameter) in frozen or id(parameter) not in in_others | top:
            parameter.requires_grad_(False)


def language_rows(rows: Tensor, trained: Sequence[str], wanted: Sequence[str]) -> Tensor:
    """The embeddings [wanted, D] of these languages; one not trained on begins as the unknown one.

    Args:
        rows: embeddings [trained, D].
        trained: names of the rows, the unknown language first.
        wanted: names of the languages of the new data.
    """
    index = {name: row for row, name in enumerate(trained)}
    return rows[[index.get(name, 0) for name in wanted]]

"""How deep each parameter of an encoder lies: layer-wise learning rates go by it."""

from typing import Any

from torch import nn


def layer_depths(root: nn.Module, encoder: Any) -> dict[str, int]:
    """Name of each encoder parameter in `root` -> how many layers it lies below the heads.

    The highest layer has 1; embeddings lie below the lowest layer.

    Args:
        root: of the names.
        encoder: in `root`, with `blocks()` from the lowest up, and its last norm as `norm` if it
            has one.
    """
    blocks = encoder.blocks()
    depth_of = {id(p): len(blocks) - i for i, b in enumerate(blocks) for p in b.parameters()}
    top = {id(p): 1 for p in encoder.norm.parameters()} if hasattr(encoder, "norm") else {}
    own = {id(p) for p in encoder.parameters()}
    return {
        name: {**depth_of, **top}.get(id(parameter), len(blocks) + 1)
        for name, parameter in root.named_parameters()
        if id(parameter) in own
    }

"""Parameters that stand still, chosen by name."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

SHOWN_NAMES = 4


def freeze(network: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Stop the gradients of parameters whose name fits a pattern, and return their names.

    It must happen before the strategy wraps the network: DDP never synchronises a parameter that
    was frozen then, so nothing is unfrozen later.

    Args:
        network: changed in place.
        patterns: of names as `layers.0.attention.q_proj.weight`; `*` stands for any text, dots
            included, such as in `layers.0.*`.

    Raises:
        ValueError: a pattern fits no name, or nothing is left to train.
    """
    parameters = dict(network.named_parameters(remove_duplicate=False))  # tied ones by each name
    frozen = []
    for pattern in patterns:
        found = [name for name in parameters if fnmatchcase(name, pattern)]
        if not found:
            near = get_close_matches(pattern, parameters, SHOWN_NAMES, cutoff=0.0)
            raise ValueError(
                f'freeze names "{pattern}", which fits no parameter; near it are '
                f"{', '.join(near)}. `*` stands for any text, such as in layers.0.*."
            )
        frozen += found
    for name in frozen:
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ValueError(
            f"freeze {list(patterns)} leaves nothing to train; name fewer parameters, or use "
            "`unisono validate`."
        )
    return sorted(set(frozen))

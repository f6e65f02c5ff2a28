"""What `init_from` takes of another checkpoint: the whole encoder, and heads that mean the same."""

import logging
from collections.abc import Callable, Mapping

from torch import Tensor

from lit_models.causal_lm.lora import is_of_adapter

log = logging.getLogger(__name__)
ENCODER, QUERY_ENCODER = "network.encoder.", "network.query_encoder."
SHOWN = 3


def start_weights(
    own: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    is_same_head: Callable[[str], bool],
    source: str,
) -> dict[str, Tensor]:
    """Return the weights to begin with, under the names of `own`.

    A second tower that the checkpoint lacks begins as its encoder does; adapters that it lacks
    begin as new ones.

    Args:
        own: weights of the new module.
        given: of the checkpoint.
        is_same_head: name of a weight besides the encoder's -> whether both mean the same by it.
        source: of the checkpoint, for messages.

    Raises:
        ValueError: the encoders differ in any weight.
    """
    given = dict(given)
    if not any(name.startswith(QUERY_ENCODER) for name in given):
        towers = {n.replace(ENCODER, QUERY_ENCODER, 1): t for n, t in given.items()}
        given |= {n: t for n, t in towers.items() if n in own and n.startswith(QUERY_ENCODER)}
    _check_encoder(own, given, source)
    taken = {
        name: tensor
        for name, tensor in given.items()
        if name in own
        and own[name].shape == tensor.shape
        and (name.startswith((ENCODER, QUERY_ENCODER)) or is_same_head(name))
    }
    if left := sorted(given.keys() - taken.keys()):
        log.info("init_from %s: nothing here means the same as %s", source, ", ".join(left))
    new = sorted(name for name in own.keys() - taken.keys() if name.startswith("network."))
    if new:
        log.info("init_from %s: these begin anew: %s", source, ", ".join(new))
    return {**own, **taken}


def _check_encoder(own: Mapping[str, Tensor], given: Mapping[str, Tensor], source: str) -> None:
    here, there = (
        {n: list(t.shape) for n, t in weights.items() if n.startswith((ENCODER, QUERY_ENCODER))}
        for weights in (own, given)
    )
    if not any(name.startswith(QUERY_ENCODER) for name in here):  # documents' tower alone
        there = {n: shape for n, shape in there.items() if n.startswith(ENCODER)}
    wrong = [
        f"{name.removeprefix('network.')} {there.get(name, 'missing')} there, "
        f"{here.get(name, 'missing')} here"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name) and not (name not in there and is_of_adapter(name))
    ]
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ValueError(
            f"init_from {source} has another encoder: {'; '.join(wrong[:SHOWN])}{more}. All of its "
            "weights must fit: give model.encoder, model.pretrained and model.lora the values of "
            "that run, or leave init_from out."
        )

"""Learning rates and gradient clipping of parts of a lens.

A part is the beginning of names inside the lens, such as verbalizer, verbalizer.network or
verbalizer.map (weights and biases); of two that fit the longer one counts.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from lit_models.training.sharding import local_parts, total_norm

PREFIX = "lens."


def check_parts(module: nn.Module, option: str, values: Mapping[str, float]) -> None:
    """Raise ValueError for a value below 0, or a part without a parameter that learns."""
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    for part, value in values.items():
        if value < 0 or not any(name.startswith(f"{PREFIX}{part}") for name in names):
            tops = sorted({".".join(name.removeprefix(PREFIX).split(".")[:2]) for name in names})
            raise ValueError(
                f"{option}.{part} {value} must be 0 or more, of a part of the lens that learns; "
                f"name verbalizer, reconstructor, or one of {', '.join(tops)}."
            )


def by_beginning(values: Mapping[str, float]) -> dict[str, float]:
    """Return beginning of a parameter's name -> value of its part, the longest first."""
    parts = sorted(values, key=len, reverse=True)
    return {f"{PREFIX}{part}": values[part] for part in parts}


def clip_parts(
    named: Iterable[tuple[str, nn.Parameter]], norms: Mapping[str, float], others: float | None
) -> None:
    """Scale the gradient of each part, by itself, to at most its norm; that of all other parameters
    to `others`, where that is above 0. One collective for each where parameters are sharded."""
    of_part, gradients = by_beginning(norms), dict[str, list[Tensor]]()
    for name, parameter in named:
        if parameter.grad is not None:
            part = next((begin for begin in of_part if name.startswith(begin)), "")
            gradients.setdefault(part, []).append(parameter.grad)
    for part, grads in gradients.items():
        if most := of_part.get(part, others or 0.0):
            scale = (most / (total_norm(grads) + 1e-6)).clamp(max=1.0)
            for grad in local_parts(grads):
                grad.mul_(scale.to(grad))

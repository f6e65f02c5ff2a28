"""What one batch does in a network: losses by sample, gradients by block, the first bad tensor."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lit_models.training.exact import ExactModule, share_of_step

Place = tuple[str, str, str]  # module, kind, tensor
Forward = Callable[[dict[str, Any]], Tensor]  # batch -> its share of the step's loss


@dataclass
class Fault:
    """A tensor that is not finite.

    Attributes:
        module: name of the module that it belongs to.
        kind: weight, input, output, loss or gradient.
        tensor: which one of that kind; empty where there is one.
        holds: nan, inf or -inf.
        count: how many of its values.
        size: of all its values.
        samples: ids of the samples in which it is the first one.
    """

    module: str
    kind: str
    tensor: str
    holds: str
    count: int
    size: int
    samples: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class SampleLoss:
    """One sample by itself.

    Attributes:
        sample_id: index in the split.
        terms: name -> mean over the sample's own targets; none where it has none.
        share: what it adds to the loss of the step.
    """

    sample_id: int
    terms: dict[str, float | None]
    share: float


def sample_loss(module: ExactModule, batch: dict[str, Any]) -> SampleLoss:
    """Return the losses of a batch of one sample."""
    terms = module.training_terms(batch)
    share = share_of_step(terms, batch, module.term_weights())
    means = {
        name: float(total) / float(count) if float(count) else None
        for name, (total, count) in terms.items()
    }
    return SampleLoss(int(batch["sample_id"][0]), means, float(share))


class FaultSearch:
    """Watches forward passes for the first tensor that is not finite, sample by sample.

    NaN and +inf count at once. -inf is what masks are made of: it counts only where the loss is
    not finite, nothing else was found, and no sample with a finite loss has it at the same place.

    Args:
        module: whose submodules are watched while this is used as a context.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.faults: dict[Place, Fault] = {}
        self._names = {part: name for name, part in module.named_modules()}
        self._weights = dict(_bad_weights(module))
        self._first: Fault | None = None
        self._minus: dict[Place, Fault] = {}  # -inf in the sample under way
        self._masks: set[Place] = set()  # -inf in samples whose loss is finite
        self._open: list[tuple[SampleLoss, list[Fault]]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> "FaultSearch":
        for part in self._names:
            self._handles.append(part.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(part.register_forward_hook(self._after))
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def end_sample(self, loss: SampleLoss) -> None:
        """Note what the pass of one sample showed, and begin the next."""
        if self._first is not None:
            self._add(self._first, loss.sample_id)
        elif math.isfinite(loss.share):
            self._masks |= self._minus.keys()
        else:
            self._open.append((loss, list(self._minus.values())))
        self._first, self._minus = None, {}

    def all_faults(self) -> list[Fault]:
        """Return what was found: first tensors of samples, then other weights, without samples."""
        for loss, suspects in self._open:
            causes = [fault for fault in suspects if _place(fault) not in self._masks]
            wrong = " ".join(name for name, value in loss.terms.items() if not _is_finite(value))
            itself = Fault("", "loss", wrong, _word(loss.share), 1, 1)
            self._add(causes[0] if causes else itself, loss.sample_id)
        self._open = []
        seen = list(self.faults.values())
        return [*seen, *(weight for weight in self._weights.values() if weight not in seen)]

    def _add(self, fault: Fault, sample_id: int) -> None:
        self.faults.setdefault(_place(fault), fault).samples.append(sample_id)

    def _before(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        if self._first is None and part in self._weights:
            self._first = self._weights[part]
        is_one = len(args) == 1 and not kwargs
        self._look(part, "input", args[0] if is_one else {**dict(enumerate(args)), **kwargs})

    def _after(self, part: nn.Module, args: Any, output: Any) -> None:
        self._look(part, "output", output)

    def _look(self, part: nn.Module, kind: str, values: Any) -> None:
        if self._first is not None:
            return
        for label, tensor in _tensors(values):
            fault = _fault(self._name(part), kind, label, tensor)
            if fault is None:
                continue
            if fault.holds != "-inf":
                self._first = fault
                return
            self._minus.setdefault(_place(fault), fault)

    def _name(self, part: nn.Module) -> str:
        return self._names[part] or type(part).__name__


def gradients(
    module: ExactModule, batches: Iterator[dict[str, Any]], forward: Forward
) -> tuple[float, Fault | None]:
    """Leave the gradient of a step in the parameters; return its loss, and the first gradient on
    the way back that is not finite.

    Args:
        module: whose gradients are cleared before.
        batches: micro-batches of the step.
        forward: gives the share of a micro-batch in the loss.
    """
    first: list[Fault] = []
    handles = [
        parameter.register_hook(lambda grad, name=name: _note(first, name, grad))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    module.zero_grad(set_to_none=True)
    total = 0.0
    try:
        for batch in batches:
            share = forward(batch)
            share.backward()
            total += float(share.detach())
    finally:
        for handle in handles:
            handle.remove()
    return total, first[0] if first else None


def gradient_norms(module: nn.Module) -> dict[str, float]:
    """Return the gradient norm of each block: a numbered layer, or a module above its weights."""
    squares: dict[str, float] = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            block = block_of(name)
            norm = float(parameter.grad.double().norm())
            squares[block] = squares.get(block, 0.0) + norm**2
    return {block: math.sqrt(square) for block, square in squares.items()}


def block_of(name: str) -> str:
    """Return the block of a parameter: up to the first number of its name, else at most three
    steps down and never the parameter itself."""
    numbered = re.match(r"(.*?\.\d+)\.", name)
    if numbered:
        return numbered[1]
    steps = name.split(".")
    return ".".join(steps[:-1][:3]) or name


def highest_dropout(module: nn.Module) -> float:
    """Return the largest dropout probability in a network; 0 where there is none."""
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
    return max((m.p for m in module.modules() if isinstance(m, kinds)), default=0.0)


def _note(first: list[Fault], name: str, grad: Tensor) -> None:
    if not first:
        fault = _fault(block_of(name), "gradient", name, grad)
        if fault is not None:
            first.append(fault)


def _bad_weights(module: nn.Module) -> Iterator[tuple[nn.Module, Fault]]:
    for path, part in module.named_modules():
        own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        for name, tensor in own:
            fault = _fault(path or type(part).__name__, "weight", name, tensor)
            if fault is not None and (fault.holds != "-inf" or isinstance(tensor, nn.Parameter)):
                yield part, fault  # a buffer of -inf is a mask
                break


def _fault(module: str, kind: str, label: str, tensor: Tensor) -> Fault | None:
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return None
    tensor = tensor.detach()
    bad = ~torch.isfinite(tensor)
    count = int(bad.sum())
    if not count:
        return None
    holds = "-inf"
    if bool(torch.isnan(tensor).any()):
        holds = "nan"
    elif bool((tensor.real == math.inf).any()):
        holds = "inf"
    return Fault(module, kind, label, holds, count, tensor.numel())


def _tensors(values: Any, label: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all tensors in nested dicts, sequences and dataclasses."""
    if isinstance(values, Tensor):
        yield label, values
        return
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        values = vars(values)
    elif isinstance(values, tuple) and hasattr(values, "_asdict"):
        values = values._asdict()
    elif isinstance(values, list | tuple):
        values = dict(enumerate(values))
    if isinstance(values, dict) or hasattr(values, "items"):
        for name, value in values.items():
            yield from _tensors(value, f"{label}.{name}".lstrip("."))


def _place(fault: Fault) -> Place:
    return fault.module, fault.kind, fault.tensor


def _is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def _word(value: float) -> str:
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"

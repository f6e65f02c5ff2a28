"""Loss of a language model, its logits never held whole, and its exact metrics.

Shapes: R rows, T positions, N positions with a target, D hidden, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from datamodules.core.batches import IGNORED, TERM, TextBatch
from lit_models.training.metrics import LossSum, SumCount

PLAIN = "nats"
# Where `chunk_size` is auto, the logits of one chunk take up to so much; on a CPU a chunk is also
# short enough to stay near its cores, see the card.
CHUNK_BYTES, CHUNK_BYTES_ON_GPU = 256 << 20, 512 << 20
CHUNK_ROWS_ON_CPU = 512
# Logits up to this size are left to torch's own few kernels, whose calls are what then costs time.
SMALL_BYTES = 4 << 20
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LossOptions:
    """What is trained on, and in which portions it is computed.

    Args:
        label_smoothing: share of a target's mass that goes to all tokens alike, 0 to below 1.
        z_loss: factor of the squared logarithm of the softmax's normaliser (PaLM, Chowdhery et
            al. 2022, section 5); 0 leaves it out.
        chunk_size: positions whose logits are there at the same time; auto takes up to
            512 in 256 MiB, on a GPU as many as fit in 512 MiB.

    Raises:
        ValueError: one of them is outside its range.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_size: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"loss.label_smoothing must be 0 to below 1, got {self.label_smoothing}; usual is "
                "0 or 0.1."
            )
        if self.z_loss < 0:
            raise ValueError(f"loss.z_loss must be 0 or more, got {self.z_loss}; usual is 1e-4.")
        if self.chunk_size != "auto" and self.chunk_size < 1:
            raise ValueError(
                f"loss.chunk_size must be at least 1 position, got {self.chunk_size}; leave it at "
                "auto."
            )

    @property
    def is_plain(self) -> bool:
        """Whether the objective is the cross-entropy and nothing else."""
        return not (self.label_smoothing or self.z_loss)


def language_model_loss(
    hidden: Tensor,
    head_weight: Tensor,
    batch: TextBatch,
    options: LossOptions,
) -> dict[str, LossSum]:
    """Return sums over the target tokens of weight-1 samples, and their number, in training.

    "tokens" is the objective, with label smoothing and z-loss; where it has one of these, "nats" is
    the plain cross-entropy beside it, to be reported only (its weight in the loss is 0).

    Args:
        hidden: [R, T, D].
        head_weight: [V, D].
        batch: its labels, `sample_index`, `weight` and `num_targets`.
        options: of the objective.
    """
    is_used = batch["weight"][batch["sample_index"]] > 0
    if options.is_plain and options.chunk_size == "auto" and _are_small(hidden, head_weight):
        return {TERM: _at_once(hidden, head_weight, batch["labels"], is_used)}
    is_target = is_used & (batch["labels"] != IGNORED)
    places = _places(is_target, batch)
    objective, nats = _at_places(hidden, head_weight, batch["labels"], places, options)
    count = is_target.sum(dtype=torch.float64)  # not the plan's, which it thereby checks
    terms = {TERM: LossSum(objective, count)}
    return terms if options.is_plain else {**terms, PLAIN: LossSum(nats.sum(), count)}


def sample_nats(
    hidden: Tensor, head_weight: Tensor, batch: TextBatch, options: LossOptions
) -> tuple[LossSum, Tensor]:
    """Return the plain cross-entropy of the weight-1 samples' targets, and the mean nats per target
    of each sample [B], 0 where it has none.

    Args:
        hidden: [R, T, D].
        head_weight: [V, D].
        batch: its labels, `sample_index`, `weight` and `num_targets`.
        options: how many positions are computed at a time.
    """
    index = batch["sample_index"]
    is_target = (batch["weight"][index] > 0) & (batch["labels"] != IGNORED)
    places = _places(is_target, batch)
    plain = LossOptions(chunk_size=options.chunk_size)
    total, nats = _at_places(hidden, head_weight, batch["labels"], places, plain)
    sums = torch.zeros(2, len(batch["weight"]), dtype=torch.float64, device=nats.device)
    values = torch.stack([nats.double(), torch.ones_like(nats, dtype=torch.float64)])
    totals, counts = sums.index_add_(1, index.flatten()[places], values)
    return LossSum(total, counts.sum()), totals / counts.clamp(min=1)


def _places(is_target: Tensor, batch: TextBatch) -> Tensor:
    """Return the positions [N] of the flattened rows that are targets; the batch knows how many
    they are, for which a GPU would have to be waited for."""
    return torch.nonzero_static(is_target.flatten(), size=batch["num_targets"][TERM]).squeeze(1)


def _at_once(hidden: Tensor, head_weight: Tensor, labels: Tensor, is_used: Tensor) -> LossSum:
    """Return the plain cross-entropy of the labels that are used [R, T]."""
    targets = labels.masked_fill(~is_used, IGNORED).flatten()
    logits = F.linear(hidden, head_weight).flatten(0, 1)
    logits = logits.to(_softmax_dtype(logits.dtype))
    nats = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return LossSum(nats, (targets != IGNORED).sum(dtype=torch.float64))


def _are_small(hidden: Tensor, head_weight: Tensor) -> bool:
    logits = hidden.shape[0] * hidden.shape[1] * head_weight.shape[0]
    return logits * head_weight.element_size() <= SMALL_BYTES


def _at_places(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, places: Tensor, options: LossOptions
) -> tuple[Tensor, Tensor]:
    """Return the objective's sum [] and nats [N] of some positions of the flattened rows."""
    rows, targets = hidden.flatten(0, 1), labels.flatten()
    if len(places) < len(rows):
        rows, targets = rows.index_select(0, places), targets.index_select(0, places)
    return _ChunkedObjective.apply(rows, head_weight, targets, options, torch.is_grad_enabled())


class _ChunkedObjective(torch.autograd.Function):
    """Objective and nats of rows of hidden states, chunk by chunk.

    A chunk's logits are turned into the gradients while they are there: nothing is computed twice,
    and no tensor but those of the shape of the head's weight grows with the vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        targets: Tensor,
        options: LossOptions,
        keeps_graph: bool,
    ) -> tuple[Tensor, Tensor]:
        """Args: rows [N, D]; weight [V, D]; targets [N] int64; keeps_graph: gradients are due."""
        wants_rows, wants_weight = (keeps_graph and wanted for wanted in ctx.needs_input_grad[:2])
        dtype = _product_dtype(rows, weight)
        with torch.autocast(rows.device.type, enabled=False):
            sums = _Sums.zeros(rows, weight, wants_rows, wants_weight)
            head, size = weight.to(dtype), _chunk_size(options, weight)
            for start in range(0, len(rows), size):
                part = slice(start, start + size)
                chunk = _Chunk(rows[part].to(dtype), head, targets[part], options)
                sums.add(part, chunk, options, weight.dtype)
        ctx.save_for_backward(sums.grad_rows, sums.grad_weight)
        ctx.mark_non_differentiable(sums.nats)
        return sums.objective, sums.nats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_objective: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            None if saved is None else _scaled(saved, grad_objective.to(saved.dtype))
            for saved in ctx.saved_tensors
        ]
        return (*gradients, None, None, None)


def _scaled(saved: Tensor, factor: Tensor) -> Tensor:
    """Return the product in rows, as parameters are, whatever the order of `saved`: at once, since
    a further copy would be as large as the head."""
    rows = torch.empty_like(saved, memory_format=torch.contiguous_format)
    return torch.mul(saved, factor, out=rows)


@dataclass
class _Sums:
    """What the chunks fill in: objective [], nats [N], gradients [N, D] and [V, D] or none."""

    objective: Tensor
    nats: Tensor
    grad_rows: Tensor | None
    wants_weight: bool
    grad_weight: Tensor | None = None

    @classmethod
    def zeros(cls, rows: Tensor, weight: Tensor, wants_rows: bool, wants_weight: bool) -> "_Sums":
        dtype = _softmax_dtype(_product_dtype(rows, weight))
        return cls(
            rows.new_zeros((), dtype=dtype),
            rows.new_zeros(len(rows), dtype=dtype),
            torch.empty_like(rows) if wants_rows else None,
            wants_weight,
            torch.zeros_like(weight) if wants_weight and not len(rows) else None,
        )

    def add(self, part: slice, chunk: "_Chunk", options: LossOptions, dtype: torch.dtype) -> None:
        """Take in the chunk at some of the rows; the weight's gradient is of `dtype`."""
        self.nats[part] = chunk.nats
        self.objective.add_(chunk.objective(options))
        if self.grad_rows is None and not self.wants_weight:
            return
        grad = chunk.gradient(options)
        if self.grad_rows is not None:
            self.grad_rows[part] = grad @ chunk.head
        if not self.wants_weight:
            return
        if self.grad_weight is None:
            self.grad_weight = (grad.T @ chunk.rows).to(dtype)
        elif dtype == grad.dtype:
            self.grad_weight.addmm_(grad.T, chunk.rows)
        else:
            self.grad_weight.add_(grad.T @ chunk.rows)


class _Chunk:
    """The softmax [n, V] of some positions; logits are there only meanwhile."""

    def __init__(self, rows: Tensor, head: Tensor, targets: Tensor, options: LossOptions) -> None:
        self.rows, self.head, self.targets = rows, head, targets.unsqueeze(1)
        logits = F.linear(rows, head)
        logits = logits.to(_softmax_dtype(logits.dtype))
        largest, of_target = logits.amax(1), logits.gather(1, self.targets).squeeze(1)
        self.mean = logits.mean(1) if options.label_smoothing else None
        in_place = logits if logits.device.type == "cpu" else None
        self.softmax = torch.softmax(logits, 1, out=in_place)
        rest = self.softmax.amax(1).log()  # less the logarithm of the sum of exp(logit - largest)
        self.normaliser = largest - rest  # [n]
        self.nats = (largest - of_target) - rest

    def objective(self, options: LossOptions) -> Tensor:
        """Return the sum [] of what is minimised."""
        total = self.nats.sum()
        if self.mean is not None:
            everywhere = (self.normaliser - self.mean).sum()
            total = total + options.label_smoothing * (everywhere - total)
        if options.z_loss:
            total = total + options.z_loss * self.normaliser.square().sum()
        return total

    def gradient(self, options: LossOptions) -> Tensor:
        """Return the objective's gradient [n, V] in place of the softmax, which is used up."""
        smoothing, num_tokens = options.label_smoothing, self.softmax.shape[1]
        grad = self.softmax
        if options.z_loss:
            grad.mul_(1 + 2 * options.z_loss * self.normaliser.unsqueeze(1))
        if smoothing:
            grad.sub_(smoothing / num_tokens)
        share = grad.new_full((), smoothing - 1).expand(self.targets.shape)
        return grad.scatter_add_(1, self.targets, share).to(self.rows.dtype)


def _product_dtype(rows: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the products: that of autocast where it is on."""
    kind = rows.device.type
    if torch.is_autocast_enabled(kind) and rows.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return torch.promote_types(rows.dtype, weight.dtype)


def _softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALVES else dtype


def _chunk_size(options: LossOptions, weight: Tensor) -> int:
    if options.chunk_size != "auto":
        return options.chunk_size
    on_cpu = weight.device.type == "cpu"
    row_bytes = weight.shape[0] * torch.finfo(_softmax_dtype(weight.dtype)).bits // 8
    rows = max(1, (CHUNK_BYTES if on_cpu else CHUNK_BYTES_ON_GPU) // row_bytes)
    return min(rows, CHUNK_ROWS_ON_CPU) if on_cpu else rows


class Perplexity(SumCount):
    """The exponential of the mean nats per token."""

    def compute(self) -> Tensor:
        """Return the perplexity, [] float64; infinity where it is beyond all numbers."""
        return super().compute().exp()


class BitsPerByte(SumCount):
    """Bits per UTF-8 byte of the text that the targets spell: comparable over tokenizers."""

    def compute(self) -> Tensor:
        """Return the bits per byte, [] float64."""
        return super().compute() / math.log(2)


class TextMetrics(nn.ModuleDict):
    """The metrics of one split, by the name that they are logged under.

    Args:
        byte_lengths: [V] bytes that each token spells; none where the tokenizer does not say, and
            there are no bits per byte.
    """

    def __init__(self, byte_lengths: Tensor | None) -> None:
        super().__init__({"loss": SumCount(), "perplexity": Perplexity()})
        self.register_buffer("byte_lengths", byte_lengths, persistent=False)
        if byte_lengths is not None:
            self["bits_per_byte"] = BitsPerByte()

    def add_batch(self, nats: LossSum, batch: TextBatch) -> None:
        """Add one batch.

        Args:
            nats: sum over its targets that count, and their number.
            batch: whose labels they are.
        """
        for name in ("loss", "perplexity"):
            self[name].update(*nats)
        if "bits_per_byte" in self:
            labels = batch["labels"]
            weights = batch["weight"][batch["sample_index"]] * (labels != IGNORED)
            spelled = self.byte_lengths[labels.clamp(min=0)]  # [R, T]
            self["bits_per_byte"].update(nats.total, (spelled * weights).double().sum())


def byte_table(byte_lengths: Any, vocab_size: int) -> Tensor | None:
    """Return the lengths [V] int64 for a vocabulary that may be larger than the tokenizer's.

    Args:
        byte_lengths: [tokenizer's size] integers, or none.
        vocab_size: V.
    """
    if byte_lengths is None:
        return None
    table = torch.zeros(vocab_size, dtype=torch.int64)
    table[: len(byte_lengths)] = torch.as_tensor(byte_lengths)
    return table

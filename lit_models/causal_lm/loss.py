"""Loss of a language model, its logits never held whole, and its exact metrics.

Shapes: R rows, T positions, N positions with a target, D hidden, V vocabulary.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from datamodules.core.batches import IGNORED, TERM, TextBatch
from lit_models.training.metrics import LossSum, SumCount

# The logits of one chunk take up to so much; on a CPU a chunk is also short enough to stay near its
# cores, see the card.
CHUNK_BYTES, CHUNK_BYTES_ON_GPU = 256 << 20, 512 << 20
CHUNK_ROWS_ON_CPU = 512
# Logits up to this size are left to torch's own few kernels, whose calls are what then costs time.
SMALL_BYTES = 4 << 20


def language_model_loss(hidden: Tensor, head_weight: Tensor, batch: TextBatch) -> LossSum:
    """Return the cross-entropy in nats of the target tokens of weight-1 samples, and their number.

    Args:
        hidden: [R, T, D].
        head_weight: [V, D].
        batch: its labels, `sample_index`, `weight` and `num_targets`.
    """
    is_used = batch["weight"][batch["sample_index"]] > 0
    is_target = is_used & (batch["labels"] != IGNORED)
    count = is_target.sum(dtype=torch.float64)  # not the plan's, which it thereby checks
    num_logits = hidden.shape[0] * hidden.shape[1] * head_weight.shape[0]
    if num_logits * head_weight.element_size() <= SMALL_BYTES:
        logits = F.linear(hidden, head_weight).flatten(0, 1)
        logits = logits.to(_softmax_dtype(logits.dtype))
        targets = batch["labels"].masked_fill(~is_used, IGNORED).flatten()
        nats = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        return LossSum(nats, count)
    total, _ = nats_at(hidden, head_weight, batch["labels"], _places(is_target, batch))
    return LossSum(total, count)


def sample_nats(hidden: Tensor, head_weight: Tensor, batch: TextBatch) -> tuple[LossSum, Tensor]:
    """Return the sum of `language_model_loss`, and the mean nats per target of each sample [B]
    float64, 0 where it has none. Arguments as there."""
    index = batch["sample_index"]
    is_target = (batch["weight"][index] > 0) & (batch["labels"] != IGNORED)
    places = _places(is_target, batch)
    total, nats = nats_at(hidden, head_weight, batch["labels"], places)
    sums = torch.zeros(2, len(batch["weight"]), dtype=torch.float64, device=nats.device)
    values = torch.stack([nats.double(), torch.ones_like(nats, dtype=torch.float64)])
    totals, counts = sums.index_add_(1, index.flatten()[places], values)
    return LossSum(total, counts.sum()), totals / counts.clamp(min=1)


def _places(is_target: Tensor, batch: TextBatch) -> Tensor:
    """Return the positions [N] of the targets in the flattened rows; the batch knows their number,
    for which a GPU would have to be waited for."""
    return torch.nonzero_static(is_target.flatten(), size=batch["num_targets"][TERM]).squeeze(1)


def nats_at(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the sum [] and the nats [N] of ascending positions [N] of the flattened rows, of
    hidden states [R, T, D], a head [V, D] and labels [R, T] int64."""
    rows, targets = hidden.flatten(0, 1), labels.flatten()
    if len(places) < len(rows):
        rows, targets = rows.index_select(0, places), targets.index_select(0, places)
    return _ChunkedNats.apply(rows, head_weight, targets, torch.is_grad_enabled())


class _ChunkedNats(torch.autograd.Function):
    """Sum [] and nats [N] of rows of hidden states, chunk by chunk.

    A chunk's logits are turned into the gradients while they are there: nothing is computed twice,
    and no tensor but those of the shape of the head's weight grows with the vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor, keeps_graph: bool
    ) -> tuple[Tensor, Tensor]:
        """Args: rows [N, D]; weight [V, D]; targets [N] int64; keeps_graph: gradients are due."""
        wants_rows, wants_weight = (keeps_graph and wanted for wanted in ctx.needs_input_grad[:2])
        device = rows.device.type
        dtype = torch.promote_types(rows.dtype, weight.dtype)  # of the products
        if torch.is_autocast_enabled(device) and rows.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        row_bytes = weight.shape[0] * torch.finfo(_softmax_dtype(weight.dtype)).bits // 8
        size = max(1, (CHUNK_BYTES if device == "cpu" else CHUNK_BYTES_ON_GPU) // row_bytes)
        if device == "cpu":
            size = min(size, CHUNK_ROWS_ON_CPU)
        total = rows.new_zeros((), dtype=_softmax_dtype(dtype))
        nats = rows.new_zeros(len(rows), dtype=_softmax_dtype(dtype))
        grad_rows = torch.empty_like(rows) if wants_rows else None
        grad_weight = torch.zeros_like(weight) if wants_weight and not len(rows) else None
        with torch.autocast(device, enabled=False):
            head = weight.to(dtype)
            for start in range(0, len(rows), size):
                part = slice(start, start + size)
                chunk, target = rows[part].to(dtype), targets[part].unsqueeze(1)
                nats_of_chunk, softmax = _softmax(chunk, head, target)
                nats[part] = nats_of_chunk
                total.add_(nats_of_chunk.sum())
                if not (wants_rows or wants_weight):
                    continue
                minus_one = softmax.new_full((), -1).expand(target.shape)
                grad = softmax.scatter_add_(1, target, minus_one).to(dtype)  # of the logits [n, V]
                if grad_rows is not None:
                    grad_rows[part] = grad @ head
                if not wants_weight:
                    continue
                if grad_weight is None:
                    grad_weight = (grad.T @ chunk).to(weight.dtype)
                elif grad_weight.dtype == grad.dtype:
                    grad_weight.addmm_(grad.T, chunk)
                else:
                    grad_weight.add_(grad.T @ chunk)
        ctx.save_for_backward(grad_rows, grad_weight)
        ctx.mark_non_differentiable(nats)
        return total, nats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # In rows, as parameters are, whatever the order of what was kept: at once, since a further
        # copy would be as large as the head.
        gradients: list[Tensor | None] = [None] * 4
        for place, kept in enumerate(ctx.saved_tensors):
            if kept is not None:
                whole = torch.empty_like(kept, memory_format=torch.contiguous_format)
                gradients[place] = torch.mul(kept, grad_total.to(kept.dtype), out=whole)
        return tuple(gradients)


def _softmax(rows: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return nats [n] and softmax [n, V] of rows [n, D] with targets [n, 1]."""
    logits = F.linear(rows, head)
    logits = logits.to(_softmax_dtype(logits.dtype))
    largest, of_target = logits.amax(1), logits.gather(1, targets).squeeze(1)
    softmax = torch.softmax(logits, 1, out=logits if logits.device.type == "cpu" else None)
    rest = softmax.amax(1).log()  # less the logarithm of the sum of exp(logit - largest)
    return (largest - of_target) - rest, softmax


def _softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class Perplexity(SumCount):
    """The exponential of the mean nats per token, [] float64; infinity beyond all numbers."""

    def compute(self) -> Tensor:
        return super().compute().exp()


class BitsPerByte(SumCount):
    """Bits per UTF-8 byte of the text that the targets spell: comparable over tokenizers."""

    def compute(self) -> Tensor:
        return super().compute() / math.log(2)


class TextMetrics(nn.ModuleDict):
    """The metrics of one split, by the name that they are logged under.

    Args:
        byte_lengths: bytes that each token of the tokenizer spells; `None` leaves bits per byte
            out.
        vocab_size: V of the network, which may have more tokens.
    """

    def __init__(self, byte_lengths: Any, vocab_size: int) -> None:
        super().__init__({"loss": SumCount(), "perplexity": Perplexity()})
        table = None
        if byte_lengths is not None:
            table = torch.zeros(vocab_size, dtype=torch.int64)
            table[: len(byte_lengths)] = torch.as_tensor(byte_lengths)
            self["bits_per_byte"] = BitsPerByte()
        self.register_buffer("byte_lengths", table, persistent=False)

    def add_batch(self, nats: LossSum, batch: TextBatch) -> None:
        """Add the sum over the targets of a batch that count, and their number."""
        for name in ("loss", "perplexity"):
            self[name].update(*nats)
        if "bits_per_byte" in self:
            labels = batch["labels"]
            weights = batch["weight"][batch["sample_index"]] * (labels != IGNORED)
            spelled = self.byte_lengths[labels.clamp(min=0)]  # [R, T]
            self["bits_per_byte"].update(nats.total, (spelled * weights).double().sum())

"""Loss of a language model, computed in chunks of logits, and its exact metrics.

Shapes: R rows, T positions, N positions with a target, n of these in a chunk, D hidden, V
vocabulary, W vocabulary padded for the products.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from datamodules.core.batches import IGNORED, TERM, TextBatch
from lit_models.training.metrics import LossSum, SumCount, in_float32

# Maximum size of a chunk's logits. On a GPU it is a share of the memory, as each chunk reads and
# writes the accumulated gradient of the head; on a CPU the rows are limited, too, to fit the cache.
CHUNK_BYTES, CHUNKS_IN_GPU = 256 << 20, 32
CHUNK_ROWS_ON_CPU = 512
# The vocabulary is padded to a multiple of this: other sizes take slower kernels on a GPU.
PADDED_TO_ON_CPU, PADDED_TO_ON_GPU = 1, 128
# Logits up to this size take PyTorch's few kernels, as the number of calls then limits the speed.
SMALL_BYTES = 4 << 20


def language_model_loss(
    hidden: Tensor, head_weight: Tensor, batch: TextBatch, compiles: bool = False
) -> LossSum:
    """Return the summed cross-entropy in nats over the targets of weight-1 samples, and the count.

    Args:
        hidden: [R, T, D].
        head_weight: [V, D].
        batch: uses its `labels`, `sample_index`, `weight` and `num_targets`.
        compiles: compute large logits and their gradients with torch.compile.
    """
    is_used = batch["weight"][batch["sample_index"]] > 0
    is_target = is_used & (batch["labels"] != IGNORED)
    count = is_target.sum(dtype=torch.float64)  # counted again, which checks the plan's number
    num_logits = hidden.shape[0] * hidden.shape[1] * head_weight.shape[0]
    if num_logits * head_weight.element_size() <= SMALL_BYTES:
        logits = F.linear(hidden, head_weight).flatten(0, 1)
        targets = batch["labels"].masked_fill(~is_used, IGNORED).flatten()
        nats = F.cross_entropy(in_float32(logits), targets, ignore_index=IGNORED, reduction="sum")
        return LossSum(nats, count)
    places = _places(is_target, batch)
    total, _ = nats_at(hidden, head_weight, batch["labels"], places, compiles)
    return LossSum(total, count)


def sample_nats(hidden: Tensor, head_weight: Tensor, batch: TextBatch) -> tuple[LossSum, Tensor]:
    """Return the result of `language_model_loss`, and each sample's mean nats per target [B]
    float64, 0 without targets. Args: as in `language_model_loss`."""
    index = batch["sample_index"]
    is_target = (batch["weight"][index] > 0) & (batch["labels"] != IGNORED)
    places = _places(is_target, batch)
    total, nats = nats_at(hidden, head_weight, batch["labels"], places)
    sums = torch.zeros(2, len(batch["weight"]), dtype=torch.float64, device=nats.device)
    values = torch.stack([nats.double(), torch.ones_like(nats, dtype=torch.float64)])
    totals, counts = sums.index_add_(1, index.flatten()[places], values)
    return LossSum(total, counts.sum()), totals / counts.clamp(min=1)


def _places(is_target: Tensor, batch: TextBatch) -> Tensor:
    """Return the targets' positions [N] in the flattened rows; the batch has their number, so that
    a GPU need not synchronize."""
    return torch.nonzero_static(is_target.flatten(), size=batch["num_targets"][TERM]).squeeze(1)


def nats_at(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, places: Tensor, compiles: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the sum [] and the nats [N] of the targets at ascending positions [N] of the flattened
    rows. Args: hidden states [R, T, D], head [V, D], labels [R, T] int64."""
    rows, targets = hidden.flatten(0, 1), labels.flatten()
    if len(places) < len(rows):
        rows, targets = rows.index_select(0, places), targets.index_select(0, places)
    return _ChunkedNats.apply(rows, head_weight, targets, torch.is_grad_enabled(), compiles)


def most_probable(hidden: Tensor, head_weight: Tensor, places: Tensor) -> Tensor:
    """Return the most probable tokens [N] int64 at `places`. Args: as in `nats_at`."""
    rows = hidden.flatten(0, 1).index_select(0, places)
    parts = rows.split(_chunk_rows(rows, head_weight))
    return torch.cat([F.linear(part, head_weight).argmax(1) for part in parts])


class _ChunkedNats(torch.autograd.Function):
    """Sum [] and nats [N] of rows of hidden states, chunk by chunk.

    The forward pass turns a chunk's logits into gradients at once: nothing is computed twice, and
    besides one chunk only tensors of the shape of the head's weight grow with the vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor, keeps_graph: bool, compiles: bool
    ) -> tuple[Tensor, Tensor]:
        """Args: rows [N, D]; weight [V, D]; targets [N] int64; keeps_graph: gradients are needed;
        compiles: use `compiled_chunk`."""
        wants_rows, wants_weight = (keeps_graph and needs for needs in ctx.needs_input_grad[:2])
        device = rows.device.type
        dtype = torch.promote_types(rows.dtype, weight.dtype)  # of the products
        if torch.is_autocast_enabled(device) and rows.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        size = _chunk_rows(rows, weight)
        of_chunk = compiled_chunk() if compiles and (wants_rows or wants_weight) else chunk_nats
        nats = in_float32(rows.new_zeros(len(rows), dtype=dtype))
        grad_rows = torch.empty_like(rows) if wants_rows else None
        grad_weight = torch.zeros_like(weight) if wants_weight and not len(rows) else None
        with torch.autocast(device, enabled=False):
            head = _head(weight, dtype)
            for start in range(0, len(rows), size):
                part = slice(start, start + size)
                chunk, target = rows[part].to(dtype), targets[part].unsqueeze(1)
                nats_of_chunk, grad = of_chunk(chunk, head, target, len(weight))
                nats[part] = nats_of_chunk
                if grad_rows is not None:
                    grad_rows[part] = grad @ head
                if wants_weight:
                    sum_dtype = torch.promote_types(weight.dtype, torch.float32)
                    grad_weight = with_product(grad_weight, grad.T, chunk, sum_dtype)
        if grad_weight is not None:
            grad_weight = grad_weight[: len(weight)]
        ctx.save_for_backward(grad_rows, grad_weight)
        ctx.dtypes = rows.dtype, weight.dtype
        ctx.mark_non_differentiable(nats)
        return nats.sum(), nats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # The product is written as contiguous rows, like parameters, as a later copy would be as
        # large as the head. A 0-dim factor would be rounded to half precision: it gets a dimension.
        gradients: list[Tensor | None] = [None] * 5
        for place, (grad, dtype) in enumerate(zip(ctx.saved_tensors, ctx.dtypes, strict=True)):
            if grad is not None:
                rows = torch.empty_like(grad, dtype=dtype, memory_format=torch.contiguous_format)
                gradients[place] = torch.mul(grad, grad_total.unsqueeze(0), out=rows)
        return tuple(gradients)


def _chunk_rows(rows: Tensor, weight: Tensor) -> int:
    """Return the number of rows per chunk of logits, of rows [N, D]."""
    row_bytes = len(weight) * torch.promote_types(weight.dtype, torch.float32).itemsize
    if rows.device.type == "cpu":
        return max(1, min(CHUNK_BYTES // row_bytes, CHUNK_ROWS_ON_CPU))
    most = CHUNK_BYTES
    if rows.is_cuda:
        most = torch.cuda.get_device_properties(rows.device).total_memory // CHUNKS_IN_GPU
    number = max(1, -(-len(rows) * row_bytes // most))
    return max(1, -(-len(rows) // number))  # chunks of equal size compile once


def _head(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a head [V, D] in the products' dtype and padded with zeros [W, D], in one copy."""
    more = -len(weight) % (PADDED_TO_ON_CPU if weight.device.type == "cpu" else PADDED_TO_ON_GPU)
    if not more:
        return weight.to(dtype)
    head = weight.new_zeros(len(weight) + more, weight.shape[1], dtype=dtype)
    head[: len(weight)] = weight
    return head


def chunk_nats(
    rows: Tensor, head: Tensor, targets: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return nats [n], and the gradient of their sum for the logits [n, W].

    Args: rows [n, D], head [W, D], targets [n, 1] int64, num_tokens V."""
    logits = F.linear(rows, head)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    is_compiling = torch.compiler.is_compiling()
    logits[:, num_tokens:] = -math.inf  # padding of the vocabulary has no probability
    in_place = logits.device.type == "cpu" and not is_compiling
    logits = logits.to(dtype) if in_place else logits
    largest, of_target = logits.amax(1).to(dtype), logits.gather(1, targets).squeeze(1).to(dtype)
    softmax = torch.softmax(logits, 1, dtype=dtype, out=logits if in_place else None)
    rest = softmax.amax(1).log()  # = -log of the sum of exp(logit - largest)
    nats = (largest - of_target) - rest
    if is_compiling:  # fuses with the lines above
        is_target = torch.arange(len(head), device=targets.device) == targets
        return nats, (softmax - is_target.to(dtype)).to(rows.dtype)
    minus_one = softmax.new_full((), -1).expand(targets.shape)
    return nats, softmax.scatter_add_(1, targets, minus_one).to(rows.dtype)


@cache
def compiled_chunk() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the compiled `chunk_nats`."""
    return torch.compile(chunk_nats, fullgraph=True)


def with_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return total + a @ b in `dtype`, added in place; `None` counts as 0."""
    if a.dtype == dtype:
        return a @ b if total is None else total.addmm_(a, b)
    if dtype != torch.float32 or a.device.type not in ("cuda", "meta"):
        product = a @ b
        return product.to(dtype) if total is None else total.add_(product)
    if total is None:  # a GPU can return the product in `dtype` without rounding it first
        return torch.mm(a, b, out_dtype=dtype)
    return torch.addmm(total, a, b, out_dtype=dtype, out=total)


class Perplexity(SumCount):
    """Exponential of the mean nats per token, [] float64; infinity on overflow."""

    def compute(self) -> Tensor:
        return super().compute().exp()


class BitsPerByte(SumCount):
    """Bits per UTF-8 byte of the targets' text, which is comparable across tokenizers."""

    def compute(self) -> Tensor:
        return super().compute() / math.log(2)


class TextMetrics(nn.ModuleDict):
    """Metrics of one split by log name; bits per byte only with `byte_lengths`, each token's number
    of UTF-8 bytes. `vocab_size` is the network's, which may exceed the tokenizer's."""

    def __init__(self, byte_lengths: Any, vocab_size: int) -> None:
        super().__init__({"loss": SumCount(), "perplexity": Perplexity()})
        table = None
        if byte_lengths is not None:
            table = torch.zeros(vocab_size, dtype=torch.int64)
            table[: len(byte_lengths)] = torch.as_tensor(byte_lengths)
            self["bits_per_byte"] = BitsPerByte()
        self.register_buffer("byte_lengths", table, persistent=False)

    def add_batch(self, nats: LossSum, batch: TextBatch) -> None:
        """Add a batch's summed nats and number of targets."""
        for name in ("loss", "perplexity"):
            self[name].update(*nats)
        if "bits_per_byte" in self:
            labels = batch["labels"]
            weights = batch["weight"][batch["sample_index"]] * (labels != IGNORED)
            spelled = self.byte_lengths[labels.clamp(min=0)]  # [R, T]
            self["bits_per_byte"].update(nats.total, (spelled * weights).double().sum())

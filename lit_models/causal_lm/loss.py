"""Loss of a language model, its logits never held whole, and its exact metrics.

Shapes: R rows, T positions, N positions with a target, n of a chunk, D hidden, V vocabulary, W the
vocabulary as it is multiplied.
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
from lit_models.training.metrics import LossSum, SumCount

# The logits of one chunk take up to so much; on a GPU a share of its memory, for each chunk reads
# and writes the sum of the head's gradients; on a CPU a chunk is also short enough to stay near its
# cores, see the card.
CHUNK_BYTES, CHUNKS_IN_GPU = 256 << 20, 32
CHUNK_ROWS_ON_CPU = 512
# Rows of logits begin at multiples of so many numbers: on a GPU others take slower kernels.
PADDED_TO_ON_CPU, PADDED_TO_ON_GPU = 1, 128
# Logits up to this size are left to torch's own few kernels, whose calls are what then costs time.
SMALL_BYTES = 4 << 20


def language_model_loss(
    hidden: Tensor, head_weight: Tensor, batch: TextBatch, compiles: bool = False
) -> LossSum:
    """Return the cross-entropy in nats of the target tokens of weight-1 samples, and their number.

    Args:
        hidden: [R, T, D].
        head_weight: [V, D].
        batch: its labels, `sample_index`, `weight` and `num_targets`.
        compiles: large logits and their gradients are computed by torch.compile.
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
    places = _places(is_target, batch)
    total, _ = nats_at(hidden, head_weight, batch["labels"], places, compiles)
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
    hidden: Tensor, head_weight: Tensor, labels: Tensor, places: Tensor, compiles: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the sum [] and the nats [N] of ascending positions [N] of the flattened rows, of
    hidden states [R, T, D], a head [V, D] and labels [R, T] int64."""
    rows, targets = hidden.flatten(0, 1), labels.flatten()
    if len(places) < len(rows):
        rows, targets = rows.index_select(0, places), targets.index_select(0, places)
    return _ChunkedNats.apply(rows, head_weight, targets, torch.is_grad_enabled(), compiles)


def most_probable(hidden: Tensor, head_weight: Tensor, places: Tensor) -> Tensor:
    """Return the most probable tokens [N] int64 at places; arguments as of `nats_at`."""
    rows = hidden.flatten(0, 1).index_select(0, places)
    parts = rows.split(_chunk_rows(rows, head_weight))
    return torch.cat([F.linear(part, head_weight).argmax(1) for part in parts])


class _ChunkedNats(torch.autograd.Function):
    """Sum [] and nats [N] of rows of hidden states, chunk by chunk.

    A chunk's logits are turned into the gradients while they are there: nothing is computed twice,
    and no tensor but those of the shape of the head's weight grows with the vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor, keeps_graph: bool, compiles: bool
    ) -> tuple[Tensor, Tensor]:
        """Args: rows [N, D]; weight [V, D]; targets [N] int64; keeps_graph: gradients are due;
        compiles: by `compiled_chunk`."""
        wants_rows, wants_weight = (keeps_graph and wanted for wanted in ctx.needs_input_grad[:2])
        device = rows.device.type
        dtype = torch.promote_types(rows.dtype, weight.dtype)  # of the products
        if torch.is_autocast_enabled(device) and rows.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        size = _chunk_rows(rows, weight)
        of_chunk = compiled_chunk() if compiles and (wants_rows or wants_weight) else chunk_nats
        nats = rows.new_zeros(len(rows), dtype=_softmax_dtype(dtype))
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
                    sum_dtype = _softmax_dtype(weight.dtype)
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
        # In rows, as parameters are, whatever the order of what was kept: at once, since a further
        # copy would be as large as the head. A factor without a dimension would be rounded to half.
        gradients: list[Tensor | None] = [None] * 5
        for place, (kept, dtype) in enumerate(zip(ctx.saved_tensors, ctx.dtypes, strict=True)):
            if kept is not None:
                rows = torch.empty_like(kept, dtype=dtype, memory_format=torch.contiguous_format)
                gradients[place] = torch.mul(kept, grad_total.unsqueeze(0), out=rows)
        return tuple(gradients)


def _chunk_rows(rows: Tensor, weight: Tensor) -> int:
    """Return how many rows [N, D] have their logits made at once."""
    row_bytes = len(weight) * torch.finfo(_softmax_dtype(weight.dtype)).bits // 8
    if rows.device.type == "cpu":
        return max(1, min(CHUNK_BYTES // row_bytes, CHUNK_ROWS_ON_CPU))
    most = CHUNK_BYTES
    if rows.is_cuda:
        most = torch.cuda.get_device_properties(rows.device).total_memory // CHUNKS_IN_GPU
    number = max(1, -(-len(rows) * row_bytes // most))
    return max(1, -(-len(rows) // number))  # of equal sizes, for which code is compiled once


def _head(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a head [V, D] in the dtype of the products, filled up with rows of zeros [W, D] in the
    copy that a change of dtype makes anyway."""
    more = -len(weight) % (PADDED_TO_ON_CPU if weight.device.type == "cpu" else PADDED_TO_ON_GPU)
    if not more:
        return weight.to(dtype)
    head = weight.new_zeros(len(weight) + more, weight.shape[1], dtype=dtype)
    head[: len(weight)] = weight
    return head


def chunk_nats(
    rows: Tensor, head: Tensor, targets: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return nats [n], and their sum's gradient for the logits [n, W], of rows [n, D] with targets
    [n, 1] int64 and a head [W, D] of `num_tokens` tokens."""
    logits = F.linear(rows, head)
    dtype, is_compiling = _softmax_dtype(logits.dtype), torch.compiler.is_compiling()
    logits[:, num_tokens:] = -math.inf  # what fills the head up takes no probability
    in_place = logits.device.type == "cpu" and not is_compiling
    logits = logits.to(dtype) if in_place else logits
    largest, of_target = logits.amax(1).to(dtype), logits.gather(1, targets).squeeze(1).to(dtype)
    softmax = torch.softmax(logits, 1, dtype=dtype, out=logits if in_place else None)
    rest = softmax.amax(1).log()  # less the logarithm of the sum of exp(logit - largest)
    nats = (largest - of_target) - rest
    if is_compiling:  # one pass with the above
        is_target = torch.arange(len(head), device=targets.device) == targets
        return nats, (softmax - is_target.to(dtype)).to(rows.dtype)
    minus_one = softmax.new_full((), -1).expand(targets.shape)
    return nats, softmax.scatter_add_(1, targets, minus_one).to(rows.dtype)


@cache
def compiled_chunk() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `chunk_nats` by torch.compile."""
    return torch.compile(chunk_nats, fullgraph=True)


def with_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return total + a @ b in a dtype, in place; `None` is 0."""
    if a.dtype == dtype:
        return a @ b if total is None else total.addmm_(a, b)
    if dtype != torch.float32 or a.device.type not in ("cuda", "meta"):
        product = a @ b
        return product.to(dtype) if total is None else total.add_(product)
    if total is None:  # a GPU need not round the product on its way
        return torch.mm(a, b, out_dtype=dtype)
    return torch.addmm(total, a, b, out_dtype=dtype, out=total)


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
    """The metrics of one split, by the name that they are logged under; bits per byte are left out
    without the bytes that each token of the tokenizer spells. The network may have more tokens."""

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

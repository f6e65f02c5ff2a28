"""Parts of a language model's step, measured alone on one GPU beside other implementations.

python -m tests.benchmarks.gpu_kernels attention   over documents of packed rows
python -m tests.benchmarks.gpu_kernels loss        head and cross-entropy
python -m tests.benchmarks.gpu_kernels step        a step of the 1b, under autocast and by policy

Rates count the arithmetic of forward and backward that documents and targets need. Options, files
and processes are those of `tests.benchmarks.gpu`.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from lit_models.causal_lm.loss import nats_at
from lit_models.causal_lm.network import Documents, attend, documents_of
from tests.benchmarks.figures import Aim, Figure
from tests.benchmarks.gpu import CEILINGS, Row, Rows, main
from tests.benchmarks.gpu_rows import DEVICE, SIZES, ceilings, language_model, looped

HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
SHAPES = {  # rows, positions, positions of each document (0: lengths vary)
    "packed 8 x 4,096": (8, 4096, 0),
    "1 x 32,768": (1, 32_768, 32_768),
    "4 x 8,192, documents of 512": (4, 8192, 512),
}
MEAN_LENGTH = 350  # mean length of documents whose lengths vary
BACKWARD = 2.5  # arithmetic of attention's backward pass, as a multiple of its forward pass
VOCABULARIES, TARGETS, WIDTH = (50_257, 50_304, 128_256), 16_384, 2048
LEAST_BY_MASK, LEAST_BY_PRODUCTS, LEAST_BY_AUTOCAST = 3.0, 0.8, 1.15
AIMS = {("attention, packed 8 x 4,096, flash 3, forward", "TFLOP/s"): 450.0}
Sizes = tuple[int, int, int]
Attended = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [R, H, T, K], k and v [R, G, T, K]


def own(as_mask: bool, ids: Tensor) -> Attended:
    """Return our networks' attention. Args: ids, of documents [R, T] int64."""
    documents = Documents(mask=visible(ids)) if as_mask else Documents()
    if not as_mask and ids.any():  # without ids each row is one document
        documents = documents_of(ids, torch.empty(0, dtype=torch.bfloat16), HEAD_SIZE)
    return lambda q, k, v: attend(q, k, v, documents)


def visible(ids: Tensor) -> Tensor:
    """Return which positions each position may attend to, [R, 1, T, T] bool."""
    return (ids[:, None, :, None] == ids[:, None, None, :]).tril()


def flash(version: str, ids: Tensor) -> Attended:
    """Return torch's attention over sequences of varying lengths. Args: version, FA2 or FA3."""
    if version != "FA2":
        activate_flash_attention_impl(version)
    is_first = F.pad(ids.diff(dim=1) != 0, (1, 0), value=True).flatten()
    cuts = F.pad(is_first.nonzero()[:, 0], (0, 1), value=ids.numel()).int()
    most = int(cuts.diff().max())

    def attended(*qkv: Tensor) -> Tensor:
        flat = (x.transpose(1, 2).flatten(0, 1) for x in qkv)  # [R T, H, K]
        sizes = (cuts, cuts, most, most)
        found = varlen_attn(*flat, *sizes, window_size=(-1, 0), enable_gqa=True)
        return found.unflatten(0, ids.shape).transpose(1, 2)

    return attended


def cudnn(ids: Tensor) -> Attended:
    """Return cuDNN's attention, with a mask."""
    mask = visible(ids)

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    return attended


def flex(ids: Tensor) -> Attended:
    """Return FlexAttention, compiled by torch for our rule of visibility."""

    def sees(row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (ids[row, q] == ids[row, k]) & (q >= k)

    rows, length = ids.shape
    blocks = create_block_mask(sees, rows, None, length, length, device=DEVICE)
    return partial(torch.compile(flex_attention), block_mask=blocks, enable_gqa=True)


WAYS: dict[str, Callable[[Tensor], Attended]] = {
    "own": partial(own, False),
    "mask": partial(own, True),
    "flash 2": partial(flash, "FA2"),
    "flash 3": partial(flash, "FA3"),
    "cuDNN": cudnn,
    "flex": flex,
}


def document_ids(rows: int, length: int, size: int) -> Tensor:
    """Return the ids [R, T] int64 of documents that fill rows."""
    if size:
        return (torch.arange(length, device=DEVICE) // size).expand(rows, -1)
    return (torch.rand(rows, length, device=DEVICE) < 1 / MEAN_LENGTH).cumsum(1)


def attention(shape: Sizes, way: str, heads: Sizes, folder: Path) -> list[Figure]:
    """Measure attention. Args: shape, as in SHAPES; heads, H, G and K."""
    torch.manual_seed(0)
    rows, length, _ = shape
    ids, (num_heads, kv_heads, size) = document_ids(*shape), heads
    q, k, v = (
        torch.randn(rows, length, n, size, device=DEVICE, dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for n in (num_heads, kv_heads, kv_heads)
    )
    apart = ids + length * torch.arange(rows, device=DEVICE)[:, None]  # ids unique over all rows
    lengths = apart.unique(return_counts=True)[1]
    pairs = float((lengths * (lengths + 1) / 2).sum())
    work = 4e-12 * pairs * num_heads * size
    attended = WAYS[way](ids)
    gradient = torch.randn_like(attended(q, k, v))
    all_work = (1 + BACKWARD) * work
    both = looped(lambda: attended(q, k, v).backward(gradient), all_work, "TFLOP/s")
    forward = looped(lambda: attended(q, k, v), work, "TFLOP/s")
    return [*both.figures(), *forward.figures(", forward")]


def liger(rows: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight.to(rows), rows, labels)


def fused(rows: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    options = {"reduction": "sum", "options": nn.LinearCrossEntropyOptions()}
    return F.linear_cross_entropy(rows, weight.to(rows), labels, **options)


def whole(rows: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(rows, weight.to(rows)).float(), labels, reduction="sum")


def chunks(compiles: bool, rows: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    places = torch.arange(len(rows), device=DEVICE)
    return nats_at(rows[None], weight, labels[None], places, compiles)[0]


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {  # rows [N, D], head, labels [N]
    "own, compiled": partial(chunks, True),
    "own": partial(chunks, False),
    "torch's linear_cross_entropy": fused,
    "Liger": liger,
    "full logits": whole,
}
PRODUCTS = "its three products alone"


def loss(vocabulary: int, targets: int, width: int, kind: str, folder: Path) -> list[Figure]:
    """Measure loss and gradients of a head [V, D] and of the rows [N, D] that it reads."""
    torch.manual_seed(0)
    rows = torch.randn(targets, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, width, device=DEVICE).mul_(0.02).requires_grad_()
    labels = torch.randint(vocabulary, (targets,), device=DEVICE)
    head, logits = weight.detach().to(rows.dtype), None
    if kind == PRODUCTS:
        logits = torch.empty(targets, vocabulary, device=DEVICE, dtype=rows.dtype)

    def step() -> None:
        if logits is not None:
            found = rows.detach()
            torch.mm(found, head.T, out=logits)
            torch.mm(logits, head)
            torch.mm(logits.T, found)
            return
        rows.grad = weight.grad = None
        with torch.autocast(DEVICE.type, torch.bfloat16):
            nats = LOSSES[kind](rows, weight, labels)
        nats.backward()

    return looped(step, 6e-12 * targets * width * vocabulary, "TFLOP/s").figures()


def rows(options: argparse.Namespace) -> Rows:
    """Return the rows of this command by name: those that begin with the part asked for."""
    is_small = options.small
    found = {CEILINGS: Row(partial(ceilings, is_small))}
    heads = (4, 2, 32) if is_small else (HEADS, KV_HEADS, HEAD_SIZE)
    by_mask = Aim(LEAST_BY_MASK, is_least=True)
    for shape, (number, length, size) in SHAPES.items():
        sizes = (number, length // 64, size // 64) if is_small else (number, length, size)
        name = f"attention, {shape}"
        for way in WAYS:
            peers = {f"{name}, {peer}": by_mask if peer == "mask" else None for peer in WAYS}
            del peers[f"{name}, {way}"]
            of_way = partial(attention, sizes, way, heads)
            found[f"{name}, {way}"] = Row(of_way, peers=peers if way == "own" else {})
    for vocabulary in VOCABULARIES:
        sizes = (500, 64, 32) if is_small else (vocabulary, TARGETS, WIDTH)
        name = f"loss, {vocabulary:,} tokens"
        for kind in (*LOSSES, PRODUCTS):
            by_products = {f"{name}, {PRODUCTS}": Aim(LEAST_BY_PRODUCTS, is_least=True)}
            peers = by_products if kind in LOSSES else {}
            found[f"{name}, {kind}"] = Row(partial(loss, *sizes, kind), peers=peers)
    size = SIZES["1b"].small() if is_small else SIZES["1b"]
    by_autocast = {"step, 1b, autocast": Aim(LEAST_BY_AUTOCAST, is_least=True)}
    policy = partial(language_model, size, not is_small, strategy="fsdp")
    found["step, 1b, policy"] = Row(policy, peers=by_autocast)
    found["step, 1b, autocast"] = Row(partial(language_model, size, not is_small))
    return found


if __name__ == "__main__":
    main("tests.benchmarks.gpu_kernels", __doc__, rows, AIMS)

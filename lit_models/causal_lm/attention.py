"""Causal attention in which documents of a row do not see each other.

Shapes: R rows, T positions, H heads, K head size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_models.causal_lm.cache import GrowingLayerCache, LayerCache


class Documents(NamedTuple):
    """Which positions may see each other, found once per batch and used by every layer.

    Args:
        sizes: positions of each document, row after row, padding counted as documents of its own;
            none where a mask is used.
        mask: [R, 1, T, T] bool, true where a position sees another; none where every row is one
            document.
        past: of the layer, keys and values of the positions before these (generation).
    """

    sizes: list[int] | None = None
    mask: Tensor | None = None
    past: LayerCache | GrowingLayerCache | None = None


def has_single_documents(document_ids: Tensor) -> bool:
    """Return whether each row holds one document and at most padding after it.

    It reads the values: ask before a batch goes to a GPU, which would have to be waited for.

    Args:
        document_ids: [R, T] int64, ascending in a row; -1 = padding, at its end.
    """
    return bool(((document_ids == document_ids[:, :1]) | (document_ids < 0)).all())


def documents_of(
    document_ids: Tensor, are_single: bool = False, as_mask: bool = False
) -> Documents:
    """Return which positions see each other.

    On a CPU documents are computed one by one, which costs no more than their own positions; on a
    GPU a mask says the same without asking the device for numbers.

    Args:
        document_ids: [R, T] int64, ascending in a row; -1 = padding, at its end.
        are_single: `has_single_documents` of them. A document does not see what comes after it, so
            that causal attention over the row is enough: the fastest kernels take no mask.
        as_mask: a mask on a CPU too.
    """
    if are_single:
        return Documents()
    if as_mask or document_ids.device.type != "cpu":
        length = document_ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
        same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
        return Documents(mask=same & causal)
    number = torch.arange(len(document_ids), device=document_ids.device)
    rows = number[:, None] * (document_ids.max() + 2)  # no id in two rows
    _, sizes = torch.unique_consecutive((document_ids + rows).flatten(), return_counts=True)
    if len(sizes) == len(document_ids):
        return Documents()
    return Documents(sizes=sizes.tolist())


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """Return the attention's output [R, H, T, K].

    Args:
        q: [R, H, T, K].
        k: [R, H or fewer, T, K]; fewer heads are each used by several of q.
        v: as k.
        documents: of the batch.
    """
    if documents.past is not None:
        k, v = documents.past.extended(k, v)
    if documents.mask is not None:
        return F.scaled_dot_product_attention(q, *_one_each(q, k, v), documents.mask)
    if documents.sizes is None:
        return _causal(q, k, v)
    # Split, not sliced: the backward pass of a slice makes a whole tensor of zeros for each.
    each = zip(*(_one_row(x).split(documents.sizes, dim=2) for x in (q, k, v)), strict=True)
    # Heads last but one, as the next layer reads them: no further copy.
    attended = torch.cat([_causal(*document).transpose(1, 2) for document in each], dim=1)
    return attended[0].unflatten(0, (len(q), q.shape[2])).transpose(1, 2)


def _one_row(x: Tensor) -> Tensor:
    """Return x [R, H, T, K] with its rows one after the other, [1, H, R T, K]."""
    return x.transpose(0, 1).flatten(1, 2)[None]


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    is_half = v.dtype in (torch.bfloat16, torch.float16)
    if q.device.type != "cpu" and not is_half:
        k, v = _one_each(q, k, v)
    grouped = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def _one_each(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v with a head for each of q.

    On a GPU only the flash kernel, which takes half precision and no mask, shares heads; in its
    place comes one that keeps all scores [R, H, T, T].
    """
    share = q.shape[1] // k.shape[1]
    if share == 1:
        return k, v
    return k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)

"""Losses of the coder as sums and counts over records; weights of training rows.

Shapes: B batch, K blocks, T target positions, V symbols, C codes, O orders of a record's codes,
N training rows.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.core.plan import check_range
from datamodules.files.splitting import TRAIN
from datamodules.occupations.store import OccupationStore
from datamodules.tokenizers.codes import CodeBook, TextOptions, decode
from lit_models.occupation_coder.linear import LinearOptions
from lit_models.occupation_coder.network import NONE, BlockDecoder, Memory
from lit_models.training.metrics import LossSum, evaluating


@dataclass
class OccupationLossOptions:
    """Loss, seq2seq_weight x seq2seq + (1 - seq2seq_weight) x flat, in nats per record.

    Args:
        seq2seq_weight: share of the decoder's loss, 0 to 1.
        label_smoothing: share of each symbol's target spread over all symbols.
        flat_dropout: dropout before the flat head; a linear head has none.
        linear: makes the flat head a linear support vector machine, best with few distinct
            texts. It is solved before the first step and then frozen; its loss is only reported.
        repeats: the n training rows of one text weigh n ** repeats together, 0 to 1; at 0 all
            distinct texts weigh the same, at 1 all rows do.
        unused_codes: also train on descriptions of codes that no other training row has.
    """

    seq2seq_weight: float = 0.5
    label_smoothing: float = 0.0
    flat_dropout: float = 0.0
    linear: LinearOptions | None = None
    repeats: float = 1.0
    unused_codes: bool = True

    def __post_init__(self) -> None:
        names = ("seq2seq_weight", "label_smoothing", "flat_dropout", "repeats")
        check_range("loss", 0, 1, **{name: getattr(self, name) for name in names})
        if self.linear is not None and self.seq2seq_weight == 0:
            raise ValueError(
                "loss.seq2seq_weight is 0 and loss.linear is solved before the first step: no step "
                "has anything to train; raise seq2seq_weight."
            )

    @property
    def term_weights(self) -> dict[str, float]:
        """Factor of each term in the loss."""
        return {"seq2seq": self.seq2seq_weight, "flat": 1 - self.seq2seq_weight}


def record_losses(
    memory: Memory,
    flat_logits: Tensor,
    decoder: BlockDecoder,
    batch: Mapping[str, Any],
    label_smoothing: float = 0.0,
) -> dict[str, Tensor]:
    """Terms "seq2seq" and "flat" in nats per record [B]. Args: flat logits [B, C]; batch with
    `code_ids` [B, K], padded with NONE, and `num_with_codes`, see `best_orders`."""
    code_ids = batch["code_ids"]
    ordered = best_orders(decoder, memory, code_ids, batch["num_with_codes"])
    nats = sequence_nats(decoder, memory, ordered, label_smoothing)
    return {"seq2seq": nats, "flat": flat_nats(flat_logits, code_ids)}


def summed(
    losses: Mapping[str, Tensor], weight: Tensor, importance: Tensor | float = 1.0
) -> dict[str, LossSum]:
    """Total and count of each term [B] over the records whose `weight` [B] is not 0; `importance`
    [B] multiplies each record's losses."""
    # masked, not multiplied: a filler row of weight 0 may have an infinite loss, and 0 x inf is NaN
    return {
        name: LossSum.of((values * importance).masked_fill(weight == 0, 0.0), weight)
        for name, values in losses.items()
    }


def sequence_nats(
    decoder: BlockDecoder, memory: Memory, code_ids: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Negative log-likelihood of codes [B x O, K] in the given order, summed over symbols [B x O];
    the O orders of one record are adjacent rows."""
    targets = decoder.trie.targets(code_ids)
    logits = decoder(targets, memory)
    nats = F.cross_entropy(  # flattened: over [B, V, T] a GPU's kernel is not deterministic
        logits.flatten(0, 1),
        targets.flatten(),
        ignore_index=NONE,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    return nats.view_as(targets).sum(1)


def flat_nats(logits: Tensor, code_ids: Tensor) -> Tensor:
    """Binary cross-entropy [B], summed over the code book: nats per record, as in `seq2seq`."""
    batch, num_codes = logits.shape
    column = torch.where(code_ids < 0, num_codes, code_ids)
    truth = logits.new_zeros(batch, num_codes + 1).scatter(1, column, 1.0)[:, :num_codes]
    return F.binary_cross_entropy_with_logits(logits, truth, reduction="none").sum(1)


@torch.no_grad()
def best_orders(
    decoder: BlockDecoder, memory: Memory, code_ids: Tensor, num_with_codes: Sequence[int]
) -> Tensor:
    """code_ids [B, K] with the codes of each record in their likeliest order, then NONE.

    Records of two or more codes are scored in every order, without dropout: the search draws no
    random numbers and so does not change the training of other records.

    Args: num_with_codes: number of records with 0, 1 ... codes; saves a device synchronization.
    """
    ordered = code_ids.gather(1, (code_ids < 0).to(torch.int8).argsort(dim=1, stable=True))
    if not any(num_with_codes[2:]):
        return ordered
    num_codes = (ordered >= 0).sum(1)
    with evaluating(decoder):
        for size, num_rows in enumerate(num_with_codes):
            if size > 1 and num_rows:
                rows = torch.nonzero_static(num_codes == size, size=num_rows).squeeze(1)
                orders = all_orders(ordered[rows, :size])  # [R, O, size]
                nats = sequence_nats(decoder, memory.select(rows), orders.flatten(0, 1))
                best = nats.view(len(rows), -1).argmin(1)
                ordered[rows, :size] = orders[torch.arange(len(rows), device=rows.device), best]
    return ordered


def all_orders(code_ids: Tensor) -> Tensor:
    """All permutations [R, n!, n] of each row's codes; code_ids [R, n] holds no NONE."""
    return code_ids[:, _orders(code_ids.shape[1], code_ids.device)]


@cache
def _orders(size: int, device: torch.device) -> Tensor:
    """Permutations [n!, n]; cached, as a copy to a GPU blocks the host."""
    return torch.tensor(list(permutations(range(size))), device=device)


log = logging.getLogger(__name__)
MOST_TEXTS = 20_000  # distinct texts that a linear head is solved on


def row_weights(store: OccupationStore, options: OccupationLossOptions) -> Tensor:
    """Weight of each training row [N] float32, in the order of sample ids: the n rows of one text
    share n ** repeats. Without `unused_codes`, a description whose code no other row has gets 0."""
    rows = store.rows(TRAIN)
    text_ids = store.arrays["text_id"][rows]
    weights = np.bincount(text_ids)[text_ids].astype(np.float32) ** (options.repeats - 1)
    if options.unused_codes:
        return torch.from_numpy(weights)
    book = CodeBook.from_dict(store.recipe["code_book"])
    normalised = TextOptions.from_recipe(store.recipe)
    codes = store.code_sets(rows)
    num_rows = np.bincount(np.concatenate(codes), minlength=len(book.codes))
    for place, (code_ids, points) in enumerate(zip(codes, store.texts(rows), strict=True)):
        if len(code_ids) == 1 and num_rows[code_ids[0]] == 1 and len(points):
            description = normalised(book.descriptions[code_ids[0]])
            if decode(points) == description[: len(points)]:
                weights[place] = 0.0
    return torch.from_numpy(weights)


def linear_examples(
    store: OccupationStore, options: OccupationLossOptions
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Return the distinct pairs of training text and set of codes, evenly thinned to `MOST_TEXTS`:
    code points, has_code [texts, C] bool, and weight [texts] float64, above 0."""
    assert options.linear is not None
    rows, row_weight = store.rows(TRAIN), row_weights(store, options).double().tolist()
    weight: dict[tuple[int, bytes], float] = {}
    row_of: dict[tuple[int, bytes], int] = {}
    for row, one, ids in zip(rows.tolist(), row_weight, store.code_sets(rows), strict=True):
        key = (int(store.arrays["text_id"][row]), np.sort(ids).tobytes())
        if one > 0:
            weight[key] = weight.get(key, 0.0) + one
            row_of.setdefault(key, row)
    keys = list(row_of)
    if len(keys) > MOST_TEXTS:
        log.warning(
            "the linear head is solved on %s of %s distinct texts; with so many "
            "the decoder deserves the greater share: lower model.decoding.flat_share.",
            *(f"{MOST_TEXTS:,}", f"{len(keys):,}"),
        )
        keys = [keys[i * len(keys) // MOST_TEXTS] for i in range(MOST_TEXTS)]
    chosen = np.array([row_of[key] for key in keys])
    has_code = np.zeros((len(keys), len(store.recipe["code_book"]["codes"])), bool)
    for place, ids in enumerate(store.code_sets(chosen)):
        has_code[place, ids] = True
    return store.texts(chosen), has_code, np.array([weight[key] for key in keys])

"""The loops that the occupation coder is measured against: plain PyTorch on the same network.

`padded` is the way of the systems that this one replaces: every row is padded to 128 characters,
tokenised when it is fetched, and each decoding step runs the whole prefix. `fair` tokenises once,
pads to the longest row of the batch and decodes with the key-value cache.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datamodules.core.batches import padded_texts
from datamodules.tokenizers.characters import TextNormalisation, encode
from lit_models.occupation_coder.decoding import Decoded, DecodingOptions, decode
from lit_models.occupation_coder.loss import record_losses, summed
from lit_models.occupation_coder.network import BEGIN, PAD, OccupationNetwork

PADDED_LENGTH = 128
ONE = {"seq2seq": 1.0, "flat": 1.0}


class Texts:
    """Rows of one table in the order of the file, normalised and encoded by the same functions."""

    def __init__(self, texts: list[str], code_ids: list[int], normalise: TextNormalisation) -> None:
        self.texts, self.normalise = texts, normalise
        self.code_ids = torch.tensor(code_ids)
        self.encoded = [encode(normalise(text), PADDED_LENGTH).code_points for text in texts]

    def batch(self, rows: np.ndarray, is_padded: bool) -> dict[str, Any]:
        """Return one batch; `is_padded` tokenises anew and pads to the full length."""
        if not is_padded:
            batch = padded_texts([self.encoded[row] for row in rows])
        else:
            points = [
                encode(self.normalise(self.texts[r]), PADDED_LENGTH).code_points for r in rows
            ]
            batch = padded_texts([*points, np.zeros(PADDED_LENGTH, np.int32)])
            batch = {name: value[:-1] for name, value in batch.items()}
            batch["attention_mask"] = batch["input_ids"] != 0
        batch["language_id"] = torch.zeros(len(rows), dtype=torch.int64)
        batch["code_ids"] = self.code_ids[rows][:, None]
        batch["num_with_codes"] = [0, len(rows)]
        batch["weight"] = torch.ones(len(rows))
        return batch

    def batches(self, size: int, is_padded: bool, seed: int | None) -> Iterator[dict[str, Any]]:
        """Yield batches, in random order where a seed is given."""
        order = np.arange(len(self.texts))
        if seed is not None:
            np.random.default_rng(seed).shuffle(order)
        for start in range(0, len(order), size):
            yield self.batch(order[start : start + size], is_padded)


def train(
    network: OccupationNetwork, texts: Texts, size: int, steps: int, is_padded: bool
) -> float:
    """Return rows per second of a plain training loop, the first steps left out."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
    network.train()
    begin, rows, warm = 0.0, 0, 5
    for step, batch in enumerate(texts.batches(size, is_padded, seed=0)):
        if step == warm:
            begin, rows = time.perf_counter(), 0
        if step == warm + steps:
            break
        memory, flat = network(batch["input_ids"], batch["attention_mask"], batch["language_id"])
        losses = record_losses(memory, flat, network.decoder, batch)
        terms = summed(losses, batch["weight"])
        loss = sum(0.5 * term.total / term.count for term in terms.values())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rows += len(batch["weight"])
    return rows / (time.perf_counter() - begin)


@torch.inference_mode()
def greedy_by_whole_prefix(network: OccupationNetwork, batch: dict[str, Tensor]) -> Tensor:
    """Return symbols [B, K x L]: all positions, each from the whole prefix, no early end."""
    trie = network.trie
    memory, _ = network(batch["input_ids"], batch["attention_mask"], batch["language_id"])
    symbols = torch.full((len(memory.hidden), 0), PAD)
    for _ in range(trie.max_codes * trie.block_size):
        asked = torch.cat([symbols, symbols.new_full((len(symbols), 1), BEGIN)], dim=1)
        best = network.decoder(asked, memory)[:, -1].argmax(-1)
        symbols = torch.cat([symbols, best[:, None]], dim=1)
    return symbols


@torch.inference_mode()
def beam_by_whole_prefix(network: OccupationNetwork, batch: dict[str, Tensor], size: int) -> Tensor:
    """Return symbols [B, K x L] of the best beam; encoder and prefix run for every beam."""
    trie, num_rows = network.trie, len(batch["input_ids"])
    repeated = {n: batch[n].repeat_interleave(size, 0) for n in ("input_ids", "attention_mask")}
    language_id = batch["language_id"].repeat_interleave(size, 0)
    memory, _ = network(repeated["input_ids"], repeated["attention_mask"], language_id)
    symbols = torch.full((num_rows * size, 0), PAD)
    scores = torch.full((num_rows, size), -1e9)
    scores[:, 0] = 0
    for _ in range(trie.max_codes * trie.block_size):
        asked = torch.cat([symbols, symbols.new_full((len(symbols), 1), BEGIN)], dim=1)
        steps = network.decoder(asked, memory)[:, -1].log_softmax(-1)
        every = scores[..., None] + steps.view(num_rows, size, -1)
        scores, chosen = every.flatten(1).topk(size, dim=1)
        parents = chosen // steps.shape[-1] + torch.arange(num_rows)[:, None] * size
        new = (chosen % steps.shape[-1]).flatten()[:, None]
        symbols = torch.cat([symbols[parents.flatten()], new], dim=1)
    return symbols.view(num_rows, size, -1)[:, 0]


@torch.inference_mode()
def cached(
    network: OccupationNetwork, batch: dict[str, Tensor], options: DecodingOptions
) -> Decoded:
    """Return decoded codes with the encoder run once and the key-value cache."""
    memory, flat = network(batch["input_ids"], batch["attention_mask"], batch["language_id"])
    return decode(network, memory, flat, options, ONE)


def predict(
    texts: Texts, size: int, is_padded: bool, one_batch: Callable[[dict[str, Tensor]], object]
) -> float:
    """Return rows per second of a plain prediction loop over all rows, in file order."""
    begin = time.perf_counter()
    for batch in texts.batches(size, is_padded, seed=None):
        one_batch(batch)
    return len(texts.texts) / (time.perf_counter() - begin)

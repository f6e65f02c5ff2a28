"""Texts to unit vectors whose product says how well a document answers a query.

Shapes: R rows, T positions, D hidden, W width of vectors.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from datamodules.text.encoding import TextEncoding, padded
from lit_models.seo.contrastive import Temperature, TemperatureOptions
from lit_models.seo.encoders import Pooling, TextEncoder
from lit_models.training.dropout import keyed_texts

Towers = Literal["shared", "two"]
TEXTS_AT_ONCE = 64


class BiEncoder(nn.Module):
    """One encoder for queries and documents, or one for each that begin alike.

    Args:
        encoder: of documents, and of queries where the tower is shared.
        towers: one or two.
        pooling: how a row becomes one vector.
        dimensions: W, by a projection; none keeps the encoder's width.
        temperature: of the loss.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        towers: Towers,
        pooling: Pooling,
        dimensions: int | None,
        temperature: TemperatureOptions,
    ) -> None:
        super().__init__()
        self.encoder, self.pooling = encoder, pooling
        self.query_encoder = copy.deepcopy(encoder) if towers == "two" else None
        self.project = (
            nn.Identity()
            if dimensions is None
            else nn.Linear(encoder.width, dimensions, bias=False)
        )
        self.temperature = Temperature(temperature)

    def towers(self) -> list[TextEncoder]:
        """Return the encoders."""
        return [self.encoder] if self.query_encoder is None else [self.encoder, self.query_encoder]

    def encode(self, input_ids: Tensor, attention_mask: Tensor, is_query: bool) -> Tensor:
        """Return unit vectors [R, W] of queries or of documents [R, T]."""
        tower = self.query_encoder if is_query and self.query_encoder is not None else self.encoder
        vectors = tower.vectors_of(input_ids, attention_mask, how=self.pooling)
        return F.normalize(self.project(vectors), dim=-1)

    def encode_texts(
        self, texts: Sequence[str], is_query: bool, encoding: TextEncoding, device: torch.device
    ) -> Tensor:
        """Return unit vectors [n, W] of texts in their order, on the device."""
        frame = encoding.framing.query if is_query else encoding.framing.single
        parts = []
        order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
        for start in range(0, len(order), TEXTS_AT_ONCE):
            chosen = order[start : start + TEXTS_AT_ONCE]
            rows = padded([frame(encoding.ids_once(texts[n])) for n in chosen])
            ids, mask = (rows[k].to(device) for k in ("input_ids", "attention_mask"))
            parts.append(self.encode(ids, mask, is_query))
        if not parts:
            return torch.zeros(0, 0, device=device)
        return torch.cat(parts)[torch.tensor(order, device=device).argsort()]

    def encode_mixed(self, input_ids: Tensor, attention_mask: Tensor, is_query: Tensor) -> Tensor:
        """Return unit vectors [R, W] of rows that are queries or not, is_query [R] bool."""
        if self.query_encoder is None:
            return self.encode(input_ids, attention_mask, False)
        rows, parts = [], []
        for kind, chosen in (
            (True, is_query.nonzero()[:, 0]),
            (False, (~is_query).nonzero()[:, 0]),
        ):
            if len(chosen):
                rows.append(chosen)
                parts.append(self.encode(input_ids[chosen], attention_mask[chosen], kind))
        return torch.cat(parts)[torch.cat(rows).argsort()]

    def encode_samples(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        is_query: bool,
        num_samples: int,
        chunk: int | None,
    ) -> Tensor:
        """Return unit vectors [R, W] for a training step.

        Args:
            input_ids, attention_mask: [R, T]; the texts of a sample lie side by side.
            is_query: what they are.
            num_samples: in the micro-batch, a divisor of R.
            chunk: rows whose activations are in memory at a time, those of others are computed
                again in the backward pass; none keeps all. Every device makes as many calls.

        Source: of the idea, Gao et al. 2021, "Scaling deep contrastive learning batch size under
        memory limited setup"; here autograd repeats the chunks, so that it stays one backward pass.
        """
        per_sample = len(input_ids) // num_samples
        row = torch.arange(len(input_ids), device=input_ids.device)
        sample, text = row // per_sample, row % per_sample + (0 if is_query else 1)

        def encoded(part: slice) -> Tensor:
            with keyed_texts(self, sample[part], text[part]):
                return self.encode(input_ids[part], attention_mask[part], is_query)

        return _in_chunks(encoded, len(input_ids), chunk)


def _in_chunks(encoded: Callable[[slice], Tensor], num_rows: int, chunk: int | None) -> Tensor:
    if chunk is None:
        return encoded(slice(0, num_rows))
    parts = [slice(start, start + chunk) for start in range(0, num_rows, chunk)]
    return torch.cat([checkpoint(encoded, part, use_reentrant=False) for part in parts])

"""Sparse retriever: token weights of queries and documents, their penalty, exact search.

Source: Formal et al. 2021, "SPLADE v2", equation 6; FLOPS penalty, Paria et al. 2020. Shapes: R
rows, T positions, D hidden or documents, V vocabulary, L kept tokens per text, Q queries, k found.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import csr_array
from torch import Tensor, nn

from datamodules.core.batches import RetrievalBatch
from datamodules.search.queries import NO_DOCUMENT
from lit_models.seo.encoders import PretrainedEncoder, TextEncoder
from lit_models.seo.nearest import ExactSearch, Found, ShardedSearch, Vectors
from lit_models.seo.networks import BiEncoder, TemperatureOptions
from lit_models.seo.retriever import LitRetriever
from lit_models.training.metrics import LossSum, in_float32

SCORES_AT_ONCE = 2**24  # per chunk of a search, to bound its memory
PENALTY = "flops"  # name of the loss term
START = 10.0  # initial logit of a state in the direction of a token, without the bias


@dataclass(frozen=True)
class Penalty:
    """FLOPS penalty on token weights: the sum over tokens of the squared mean weight over texts.

    Args:
        query: factor of queries.
        document: factor of documents.
        steps: optimizer steps in which the factors grow quadratically from 0; 0 starts with them.
    """

    query: float = 3e-4
    document: float = 1e-4
    steps: int = 0

    def factors(self, step: int) -> tuple[float, float]:
        """Return the factors of queries and documents at an optimizer step, from 0."""
        share = min(1.0, ((step + 1) / self.steps) ** 2) if self.steps else 1.0
        return share * self.query, share * self.document


class MaskedEncoder(PretrainedEncoder):
    """Model of transformers with its masked-language-model head: V logits per token."""

    auto_class = "AutoModelForMaskedLM"

    def __init__(self, content: dict[str, Any], folder: str | Path | None = None) -> None:
        super().__init__(content, folder)
        self.width = self.model.config.vocab_size

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor | None = None
    ) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask.long()).logits


class SparseBiEncoder(BiEncoder):
    """Encodes queries and documents as token weights of at least 0; training makes most of them 0.

    An encoder without a masked-language-model head gets a head over normalised states, initialised
    with its normalised token embeddings: initially a text has its own tokens and nearly no others.
    """

    def __init__(self, encoder: TextEncoder, temperature: TemperatureOptions) -> None:
        super().__init__(encoder, temperature)
        encoder.keeps_tokens, self.head = True, None
        if not isinstance(encoder, MaskedEncoder):
            tables = [m.weight for m in encoder.modules() if isinstance(m, nn.Embedding)]
            table = max(tables, key=len)
            self.head = nn.Linear(encoder.width, len(table))
            nn.init.constant_(self.head.bias, -START / 2)
            with torch.no_grad():
                self.head.weight.copy_(START * F.normalize(table, dim=-1))

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return token weights [R, V] of texts [R, T]."""
        hidden = self.encoder(input_ids, attention_mask)  # [R, T, D]
        logits = hidden if self.head is None else self.head(F.normalize(hidden, dim=-1))
        highest = logits.masked_fill(~attention_mask[..., None], -torch.inf).amax(1)
        return in_float32(highest).relu().log1p()


class InvertedSearch(ExactSearch):
    """Exact search with an inverted index over documents [D, 2 L] of `LitSparseRetriever.compact`;
    scores are summed token by token in float64 and rounded to float32."""

    def __init__(self, documents: Vectors, device: torch.device | str = "cpu") -> None:
        super().__init__(documents, device)
        tokens = documents[:, : documents.shape[1] // 2]
        if documents.shape[1] % 2 or (tokens % 1 != 0).any():
            raise ValueError(
                "documents are dense vectors, no token weights; encode them with this retriever."
            )
        self.num_tokens = 1 + int(tokens.max()) if len(documents) else 1
        self.postings = csr_array(_matrix(documents, self.num_tokens).T)  # [V, D]

    def nearest(self, queries: Tensor, k: int) -> Found:
        """Return the k best documents of each query [Q, 2 L], at most D."""
        number = self.postings.shape[1]
        k, at_once = min(k, number), 1 + SCORES_AT_ONCE // (number + 1)
        documents, scores = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), "f4")
        rows = _matrix(queries, self.num_tokens)
        for start in range(0, len(queries) if k else 0, at_once):
            products = (rows[start : start + at_once] @ self.postings).toarray().astype(np.float32)
            for row, own in enumerate(products, start):
                worst = np.partition(own, number - k)[number - k]
                best = np.flatnonzero(own >= worst)
                best = best[np.argsort(-own[best], kind="stable")][:k]
                documents[row], scores[row] = best, own[best]
        return Found(torch.from_numpy(documents), torch.from_numpy(scores))


class ShardedInvertedSearch(ShardedSearch, InvertedSearch):
    """The same over the documents of all ranks."""


def _matrix(rows: Vectors, num_tokens: int) -> csr_array:
    """Return rows of `compact` as a sparse matrix [n, V], without tokens of V or above."""
    tokens, weights = np.split(np.asarray(torch.as_tensor(rows).cpu(), np.float64), 2, axis=1)
    row, place = np.nonzero((weights > 0) & (tokens < num_tokens))
    values = (weights[row, place], (row, tokens[row, place].astype(np.int64)))
    return csr_array(values, shape=(len(rows), num_tokens))


class LitSparseRetriever(LitRetriever):
    """Retriever that ranks by products of token weights. Logs the same as `LitRetriever`.

    Args:
        penalty: penalty on token weights.
        num_kept: L, number of a text's largest weights in evaluation, prediction and search.
        retriever: see `LitRetriever`, except `feedback`, `size`, `sizes` and `search.kind`.
    """

    encoder_class = MaskedEncoder
    search_class, sharded_class = InvertedSearch, ShardedInvertedSearch
    own_terms = (PENALTY,)

    def __init__(self, penalty: Penalty = Penalty(), num_kept: int = 256, **retriever: Any) -> None:
        super().__init__(**retriever)
        self.penalty, self.num_kept = penalty, num_kept
        if self.feedback or self.size or self.sizes or self.search_options.kind != "exact":
            raise ValueError(
                "a sparse retriever has no model.feedback, .size, .sizes and .search.kind; leave "
                "them out."
            )

    def make_network(self, encoder: TextEncoder) -> nn.Module:
        super().make_network(encoder)
        return SparseBiEncoder(encoder, self.temperature)

    def compact(self, vectors: Tensor) -> Tensor:
        """Return the ids of the L heaviest tokens and then their weights [R, 2 L], of [R, V]."""
        best = vectors.topk(min(self.num_kept, vectors.shape[1]))
        return torch.cat([best.indices.to(vectors), best.values], 1)

    def more_terms(
        self, queries: Tensor, documents: Tensor, batch: RetrievalBatch, temperature: Tensor
    ) -> dict[str, LossSum]:
        weight, total = batch["weight"], queries.new_zeros(())
        rows = weight.repeat_interleave(len(documents) // len(weight))
        texts = ((queries, weight), (documents, (batch["document"] != NO_DOCUMENT) & (rows > 0)))
        factors = self.penalty.factors(self.trainer.global_step)
        for factor, (own, is_there) in zip(factors, texts, strict=True):
            number = self.all_gather(is_there.sum()).sum().clamp(min=1)
            sums = self.all_gather(in_float32(own * is_there[:, None]).sum(0), sync_grads=True)
            total = total + factor * (sums.view(-1, own.shape[1]).sum(0) / number).square().sum()
        terms = super().more_terms(queries, documents, batch, temperature)
        return {**terms, PENALTY: LossSum(total * weight.sum(), weight.sum())}

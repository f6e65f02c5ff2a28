"""The contract between datamodules and modules: one TypedDict per kind of batch.

Shape legend: B samples in the micro-batch, S characters, K codes of the richest record; R rows of
tokens, T positions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

IGNORED = -100  # label of a position without a loss
TERM = "tokens"  # the language models' loss term, counted by labels
# Terms of the lens's loss, each counted once per sample.
TERMS = (
    *("teacher_text", "teacher_reconstruction", "reconstruction"),
    *("reference", "effect", "fluency", "contrast"),
)
ALL = "all"  # group of all files, in metrics by file
PADDING_ID = 0


class PlannedBatch(TypedDict):
    """Keys of every batch of every family."""

    sample_id: Tensor  # [B] int64, index in the split
    weight: Tensor  # [B] float32, 1; 0 for a filler, which must count nowhere
    step_index: int  # global step in the epoch; an int, as reading a tensor would wait for a GPU
    step_denominators: dict[str, float]  # loss term -> count over the optimizer step; no tensors,
    # which half precision would round
    num_targets: dict[str, int]  # loss term -> count over this micro-batch, known without a GPU
    load: NotRequired[dict[str, int]]  # samples and tokens without fillers; positions with padding


class OccupationBatch(PlannedBatch):
    """Job descriptions and, except in prediction, their codes."""

    input_ids: Tensor  # [B, S] int64, Unicode code points of the normalised text, 0 = padding
    attention_mask: Tensor  # [B, S] bool
    language_id: Tensor  # [B] int64, index in the recipe's languages, 0 = unknown
    code_ids: NotRequired[Tensor]  # [B, K] int64, index in the code book, -100 = none
    num_with_codes: NotRequired[list[int]]  # [K + 1] records that have 0 to K codes, fillers too
    is_seen_text: NotRequired[Tensor]  # [B] bool, evaluation only: the string occurs in training
    is_seen_code: NotRequired[Tensor]  # [B] bool, evaluation only: all its codes occur in training
    source_id: NotRequired[Tensor]  # [B] int32, evaluation only, where a column names the source


class TextBatch(PlannedBatch):
    """Rows of tokens. A row holds one or more documents; none attends to another."""

    input_ids: Tensor  # [R, T] int64
    labels: Tensor  # [R, T] int64, the token that follows each position; -100 = not trained on
    position_ids: Tensor  # [R, T] int64, from 0 in every document
    document_ids: Tensor  # [R, T] int64, counted over the batch, ascending in a row; -1 = padding
    sample_index: Tensor  # [R, T] int64, entry of `weight` that the position belongs to
    document_bounds: Tensor  # [N + 1] int32, from the function `document_bounds`
    longest_document: int  # positions, rounded up; an int, known before the batch is on a device
    has_single_documents: bool  # whether every row is one document


def document_bounds(document_ids: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the bounds of N documents in the concatenated rows [R, T], [N + 1] int32, and an upper
    bound of the longest one; the padding of a row counts as a document.

    Both N (by empty documents at the end) and the longest document are rounded up to powers of two,
    so that code compiled for one batch fits others.
    """
    begins = np.ones(document_ids.shape, bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    bounds = np.append(np.flatnonzero(begins), document_ids.size).astype(np.int32)
    number = 1 << (len(bounds) - 2).bit_length()
    longest = 1 << (int(np.diff(bounds).max()) - 1).bit_length()
    return np.pad(bounds, (0, number + 1 - len(bounds)), mode="edge"), longest


class PromptBatch(PlannedBatch):
    """Prompts to continue."""

    input_ids: Tensor  # [B, S] int64, padded at the right with 0
    lengths: Tensor  # [B] int64, tokens of each prompt, at least 1


class SnippetBatch(TextBatch):
    """Pages with their titles or descriptions, as training text and as prompts to continue."""

    prompt_ids: Tensor  # [B, S] int64, padded at the right with 0
    prompt_lengths: Tensor  # [B] int64
    texts: list[str]  # [B] visible text, with line breaks
    targets: list[str]  # [B] title or description
    queries: list[str]  # [B] search query, "" where there is none


class ChoiceBatch(TextBatch):
    """Continuations to score: each is a document with its prompt, labelled by its own tokens."""

    choice_documents: Tensor  # [B, C] int64, document of each choice; -1 = the sample has fewer


class DumpBatch(PlannedBatch):
    """Documents, with the positions whose activations are stored."""

    input_ids: Tensor  # [R, T] int64, padded at the right with 0
    positions: Tensor  # [R, K] int64; -1 = the document has fewer


class ActivationBatch(PlannedBatch):
    """Activations of a subject, with the documents that they come from.

    D features, A attributes, W activations of other samples.
    """

    layer: NotRequired[Tensor]  # [B] int64, index of the layer; absent where there is but one
    activation: NotRequired[Tensor]  # [B, D]; absent where they are computed from the documents
    wrong: NotRequired[Tensor]  # [B, W, D], of other samples; only in training with a contrast
    input_ids: Tensor  # [B, T] int64, padded at the right with 0
    lengths: Tensor  # [B] int64, tokens of the document
    position: Tensor  # [B] int64, position of the activation in the document
    noise_key: Tensor  # [B] int64, hash of (seed, epoch, sample id), the key of all random draws
    document: Tensor  # [B] int64, hash of the document
    group: NotRequired[Tensor]  # [B] int64, index of the document's file; evaluation only
    attributes: NotRequired[Tensor]  # [B, A] int64, tokens seen before the position; -1 = none
    other: NotRequired["ActivationBatch"]  # B samples of other documents, one each; test only


class ScoredTextBatch(PlannedBatch):
    """Texts with their scores or labels; a long text is several chunks.

    C chunks, L labels of a multilabel head.
    """

    input_ids: Tensor  # [C, T] int64, padded at the right with 0
    attention_mask: Tensor  # [C, T] bool
    chunk_of: Tensor  # [C] int64, sample of each chunk, ascending
    text_index: NotRequired[Tensor]  # [B] int64, equal for equal texts; not in prediction
    targets: NotRequired[dict[str, Tensor]]  # head -> [B] or [B, L] float64; not in prediction
    is_labelled: NotRequired[dict[str, Tensor]]  # head -> the same shape, bool


class RankingBatch(PlannedBatch):
    """Queries, each with its candidates: P pairs in the micro-batch, at most K of one query.

    Rows are sorted by length, the longest first, so that parts of them need less padding.
    """

    input_ids: Tensor  # [P, T] int64, query and document, padded at the right with 0
    attention_mask: Tensor  # [P, T] bool
    segment_ids: Tensor  # [P, T] int64, 0 = query, 1 = document
    pair_lengths: np.ndarray  # [P] int64, tokens of each row; on the host, so that no step waits
    num_parts: int  # parts in which a training step computes the rows; equal on every replica
    pair_index: Tensor  # [B, K] int64, row of each candidate, documents ascending; -1 = none
    relevance: Tensor  # [B, K] float32 grades; NaN = unjudged
    prior: Tensor  # [B, K] float32, score of the first-stage search, normalised within the query
    baselines: NotRequired[dict[str, Tensor]]  # test only: name -> scores [B, K] float32
    all_relevance: NotRequired[Tensor]  # [B, J] float32, every grade of the query; NaN = none


class RetrievalBatch(PlannedBatch):
    """Queries, each with one relevant document and K - 1 negatives.

    Of the B x K documents, rows i * K to i * K + K - 1 were chosen for sample i.
    """

    query_ids: Tensor  # [B, S] int64, padded at the right with 0
    query_mask: Tensor  # [B, S] bool
    document_ids: Tensor  # [B * K, T] int64; the first of each sample is the relevant one
    document_mask: Tensor  # [B * K, T] bool
    document: Tensor  # [B * K] int64, index in the collection; -1 = the sample has fewer
    known: Tensor  # [B, R] int64, documents that must not be negatives of the query; -1 = none
    teacher: NotRequired[Tensor]  # [B, K] float32, scores of the teacher's run file; NaN = none


class EncodeBatch(PlannedBatch):
    """Single texts to encode: queries and documents of a collection."""

    input_ids: Tensor  # [B, T] int64, padded at the right with 0
    attention_mask: Tensor  # [B, T] bool
    is_query: Tensor  # [B] bool
    text_index: Tensor  # [B] int64, of the query or the document in the collection


def list_of_texts(texts: Iterable[str]) -> list[str]:
    """Return the texts that a Python caller passes, such as a pandas column, as a list; ValueError
    for a single string or a value that is not a string."""
    if isinstance(texts, str):
        raise ValueError(f"texts must be a list of texts, got one string: write [{texts!r}].")
    for place, text in enumerate(listed := list(texts)):
        if not isinstance(text, str):
            raise ValueError(f'texts[{place}] is {text!r}, no text; write "" where there is none.')
    return listed


def padded_texts(texts: list[np.ndarray]) -> dict[str, Any]:
    """Return input_ids [B, S] int64 and attention_mask [B, S] bool of code points or tokens."""
    input_ids = padded(texts, PADDING_ID)
    mask = np.arange(input_ids.shape[1]) < np.array([[len(text)] for text in texts])
    return {"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(mask)}


def padded(rows: Sequence[np.ndarray], filler: int | np.float32, width: int = 0) -> np.ndarray:
    """Return rows of different lengths as one array [B, S], filled on the right, in the dtype of
    the filler; S is at least `width`."""
    sizes = np.array([len(row) for row in rows], np.int64)
    values = np.full((len(rows), sizes.max(initial=width)), filler)
    if sizes.any():
        values[np.arange(values.shape[1]) < sizes[:, None]] = np.concatenate(rows)
    return values


@dataclass(frozen=True)
class SubjectFacts:
    """Model, layer and site that the activations were read from."""

    digest: str  # hex, of the subject's configuration and weights
    layer: int  # index of the block whose output is read, from 0
    site: str  # where in the block
    hidden_size: int  # D
    num_layers: int  # blocks of the subject

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

IGNORED = -100  # label of a position that is not trained on
TERM = "tokens"  # name of the language models' loss, whose count is that of the labels
# Terms of the lens's loss, each counted once per sample.
TERMS = (
    *("teacher_text", "teacher_reconstruction", "reconstruction"),
    *("reference", "effect", "fluency", "contrast"),
)
ALL = "all"  # the group of all files
PADDING_ID = 0


class PlannedBatch(TypedDict):
    """What every batch carries, whatever its family."""

    sample_id: Tensor  # [B] int64, index in the split
    weight: Tensor  # [B] float32, 1; 0 for a filler, which must count nowhere
    step_index: int  # the global step in the epoch; a tensor would make the ledger wait for a GPU
    step_denominators: dict[str, float]  # term -> its count over the optimizer step; no tensors,
    # which a run in half precision would round
    num_targets: dict[str, int]  # term -> its count over this micro-batch; for no GPU to be asked
    load: NotRequired[dict[str, int]]  # samples and tokens without fillers, and all positions


class OccupationBatch(PlannedBatch):
    """Job descriptions and, but for prediction, their codes."""

    input_ids: Tensor  # [B, S] int64, Unicode code points of the normalised text, 0 = padding
    attention_mask: Tensor  # [B, S] bool
    language_id: Tensor  # [B] int64, index in the recipe's languages, 0 = unknown
    code_ids: NotRequired[Tensor]  # [B, K] int64, index in the code book, -100 = none
    num_with_codes: NotRequired[list[int]]  # [K + 1] records that have 0 to K codes, fillers too
    is_seen_text: NotRequired[Tensor]  # [B] bool, evaluation only: the string occurs in training
    is_seen_code: NotRequired[Tensor]  # [B] bool, evaluation only: all its codes occur in training
    source_id: NotRequired[Tensor]  # [B] int32, evaluation only, where a column names the source


class TextBatch(PlannedBatch):
    """Rows of tokens. A row holds one document, or several that must not see each other."""

    input_ids: Tensor  # [R, T] int64
    labels: Tensor  # [R, T] int64, the token that follows each position; -100 = not trained on
    position_ids: Tensor  # [R, T] int64, from 0 in every document
    document_ids: Tensor  # [R, T] int64, counted over the batch, ascending in a row; -1 = padding
    sample_index: Tensor  # [R, T] int64, entry of `weight` that the position belongs to
    document_bounds: Tensor  # [N + 1] int32, of documents, as of `document_bounds`
    longest_document: int  # positions, rounded up; known before a device has the batch, as is
    has_single_documents: bool  # whether every row is one document


def document_bounds(document_ids: np.ndarray) -> tuple[np.ndarray, int]:
    """Return where documents begin and end in rows [R, T] that follow each other, [N + 1] int32,
    and positions that the longest has at most; padding is a document of its row.

    What is compiled for one batch is to fit others: N, by empty documents at the end, and the
    longest one are rounded up to powers of two.
    """
    begins = np.ones(document_ids.shape, bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    bounds = np.append(np.flatnonzero(begins), document_ids.size).astype(np.int32)
    number = 1 << (len(bounds) - 2).bit_length()
    longest = 1 << (int(np.diff(bounds).max()) - 1).bit_length()
    return np.pad(bounds, (0, number + 1 - len(bounds)), mode="edge"), longest


class PromptBatch(PlannedBatch):
    """Texts to go on from."""

    input_ids: Tensor  # [B, S] int64, padded at the right with 0
    lengths: Tensor  # [B] int64, tokens of each prompt, at least 1


class SnippetBatch(TextBatch):
    """Pages with what people wrote of each, as text and as a prompt to go on from."""

    prompt_ids: Tensor  # [B, S] int64, padded at the right with 0
    prompt_lengths: Tensor  # [B] int64
    texts: list[str]  # [B] visible text, its lines apart
    targets: list[str]  # [B] title or description
    queries: list[str]  # [B] "" where there is none


class ChoiceBatch(TextBatch):
    """Continuations to rate: each is a document with its prompt, and its tokens are the labels."""

    choice_documents: Tensor  # [B, C] int64, document of each choice; -1 = the sample has fewer


class DumpBatch(PlannedBatch):
    """Documents of which some activations are kept."""

    input_ids: Tensor  # [R, T] int64, padded at the right with 0
    positions: Tensor  # [R, K] int64; -1 = the document has fewer


class ActivationBatch(PlannedBatch):
    """Activations of a subject, with the documents that they come from.

    D features, A attributes.
    """

    layer: NotRequired[Tensor]  # [B] int64, index of the layer; absent where there is but one
    activation: NotRequired[Tensor]  # [B, D]; absent where they are computed from the documents
    wrong: NotRequired[Tensor]  # [B, W, D], of other samples; training with a contrast only
    input_ids: Tensor  # [B, T] int64, padded at the right with 0
    lengths: Tensor  # [B] int64, tokens of the document
    position: Tensor  # [B] int64, where the activation is
    noise_key: Tensor  # [B] int64, of (seed, epoch, sample id): for whatever is drawn
    document: Tensor  # [B] int64, hash of the document
    group: NotRequired[Tensor]  # [B] int64, file of the document; evaluation only
    attributes: NotRequired[Tensor]  # [B, A] int64, tokens seen before the position; -1 = none
    other: NotRequired["ActivationBatch"]  # as many others, each of another document; test only


class ScoredTextBatch(PlannedBatch):
    """Texts with what people said of them; a long text is several chunks.

    C chunks, L labels of a multilabel head.
    """

    input_ids: Tensor  # [C, T] int64, padded at the right with 0
    attention_mask: Tensor  # [C, T] bool
    chunk_of: Tensor  # [C] int64, sample of each chunk, ascending
    targets: NotRequired[dict[str, Tensor]]  # head -> [B] or [B, L] float64; not in prediction
    is_labelled: NotRequired[dict[str, Tensor]]  # head -> the same shape, bool


class RankingBatch(PlannedBatch):
    """Queries, each with its candidates. P pairs of the micro-batch, K most candidates of one.

    Rows stand by their lengths, the longest first: parts of them need less padding than all.
    """

    input_ids: Tensor  # [P, T] int64, query and document, padded at the right with 0
    attention_mask: Tensor  # [P, T] bool
    segment_ids: Tensor  # [P, T] int64, 0 = query, 1 = document
    pair_lengths: np.ndarray  # [P] int64, tokens of each row; on the host, which is not to wait
    num_parts: int  # in which a training step computes the rows, on every replica as many
    pair_index: Tensor  # [B, K] int64, row of each candidate, documents ascending; -1 = none
    relevance: Tensor  # [B, K] float32 grades; NaN = unjudged
    prior: Tensor  # [B, K] float32, score of the first stage, normalised within the query
    baselines: NotRequired[dict[str, Tensor]]  # test only: name -> scores [B, K] float32
    all_relevance: NotRequired[Tensor]  # [B, J] float32, every grade of the query; NaN = none


class RetrievalBatch(PlannedBatch):
    """Queries, each with a document that answers it and K - 1 others.

    Of the B x K documents, rows i * K to i * K + K - 1 were chosen for sample i.
    """

    query_ids: Tensor  # [B, S] int64, padded at the right with 0
    query_mask: Tensor  # [B, S] bool
    document_ids: Tensor  # [B * K, T] int64; the first of each sample answers its query
    document_mask: Tensor  # [B * K, T] bool
    document: Tensor  # [B * K] int64, index in the collection; -1 = the sample has fewer
    known: Tensor  # [B, R] int64, documents that may be no negatives of the query; -1 = none
    teacher: NotRequired[Tensor]  # [B, K] float32, of a run that is distilled; NaN = none


class EncodeBatch(PlannedBatch):
    """Single texts to encode: queries and documents of a collection."""

    input_ids: Tensor  # [B, T] int64, padded at the right with 0
    attention_mask: Tensor  # [B, T] bool
    is_query: Tensor  # [B] bool
    text_index: Tensor  # [B] int64, of the query or the document in the collection


def list_of_texts(texts: Iterable[str]) -> list[str]:
    """Return texts that are given in Python, such as a column of pandas, as a list; ValueError for
    a single string, or a value that is no text."""
    if isinstance(texts, str):
        raise ValueError(f"texts must be a list of texts, got one string: write [{texts!r}].")
    for place, text in enumerate(listed := list(texts)):
        if not isinstance(text, str):
            raise ValueError(f'texts[{place}] is {text!r}, no text; write "" where there is none.')
    return listed


def padded_texts(texts: list[np.ndarray]) -> dict[str, Any]:
    """input_ids [B, S] int64 and attention_mask [B, S] bool of code points or tokens."""
    input_ids = padded(texts, PADDING_ID)
    mask = np.arange(input_ids.shape[1]) < np.array([[len(text)] for text in texts])
    return {"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(mask)}


def padded(rows: Sequence[np.ndarray], filler: int | np.float32, width: int = 0) -> np.ndarray:
    """[B, S] of rows of several lengths, filled up on the right, of the dtype of the filler;
    `width` is the least S."""
    sizes = np.array([len(row) for row in rows], np.int64)
    values = np.full((len(rows), sizes.max(initial=width)), filler)
    if sizes.any():
        values[np.arange(values.shape[1]) < sizes[:, None]] = np.concatenate(rows)
    return values


@dataclass(frozen=True)
class SubjectFacts:
    """Which numbers of which model the activations are."""

    digest: str  # hex, of the subject's configuration and weights
    layer: int  # index of the block whose output is read, from 0
    site: str  # where in the block
    hidden_size: int  # D
    num_layers: int  # blocks of the subject

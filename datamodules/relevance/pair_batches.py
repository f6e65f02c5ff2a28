"""Batches of training pairs of which nothing is drawn but a query and its answer, made at once.

They are those that `PairDataset` makes of its samples one by one, in a fifth of the time.
Shapes: B samples of the micro-batch, of which n are of a kind; R most known documents of one.
"""

import numpy as np
import torch

from datamodules.framing import Framing
from datamodules.keyed_draws import KeptWords, below_each, uniform
from datamodules.relevance.judged_queries import JudgedQueries
from datamodules.relevance.tables import NO_DOCUMENT
from datamodules.relevance.training_mix import KINDS, PairTokens
from datamodules.token_spans import TokenSpans

JUDGED, TITLES = KINDS.index("judged"), KINDS.index("titles")
FIRST_WORDS = 2  # of a generator: most that choose a query and its answer


class PairBatches:
    """Makes the batches of a `PairDataset` without triples, hard negatives and dropped tokens.

    Args:
        judged: queries of the training part that have a relevant document.
        tokens: that pairs are made of.
        framing: of the texts.
        removal: see `TrainingMix`.
        words: the first two of each sample's generator.
        counts: kind -> how many pairs of it there are.
        ends: [kinds] behind the last sample of each kind.
    """

    def __init__(
        self,
        judged: JudgedQueries,
        tokens: PairTokens,
        framing: Framing,
        removal: float,
        words: KeptWords,
        counts: dict[str, int],
        ends: list[int],
    ) -> None:
        self.judged, self.tokens, self.framing = judged, tokens, framing
        self.removal, self.words = removal, words
        self.ends, self.begins = np.array(ends), np.array([0, *ends[:-1]])
        self.counts = np.array([counts[kind] for kind in KINDS])

    def batch(self, sample_ids: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        """Return what `PairDataset.collate` returns of these samples [B]."""
        words = self.words.of(sample_ids, epoch)
        kind = self.ends.searchsorted(sample_ids, "right")
        number = (sample_ids - self.begins[kind]) % self.counts[kind]
        limits, count = self.framing.limits, len(sample_ids)
        queries = TokenSpans(count, limits.max_query_length)
        answers = TokenSpans(count, limits.max_length - self.framing.num_marks)
        is_judged = kind == JUDGED
        documents, known = number.copy(), number[:, None]  # of a document by itself
        rows = is_judged.nonzero()[0]
        if len(rows):
            documents[rows], of_rows = self._judged(number[rows], words[rows, 0])
            known = np.full((count, of_rows.shape[1]), NO_DOCUMENT)
            known[:, 0], known[rows] = number, of_rows
            spans = self.tokens.queries.spans(self.judged.queries[number[rows]])
            queries.add(rows, self.tokens.queries.tokens, *spans)
        is_whole = is_judged
        if self.tokens.parts is not None:
            is_titled = (kind == TITLES) & self.tokens.parts.has_title[number]
            self._add_titles(is_titled.nonzero()[0], number, queries, answers)
            rows = (~(is_judged | is_titled)).nonzero()[0]
            is_removed = self._add_sentences(rows, number[rows], words[rows], queries, answers)
            is_whole = is_judged.copy()
            is_whole[rows] = ~is_removed
        rows = is_whole.nonzero()[0]
        spans = self.tokens.documents.spans(documents[rows])
        answers.add(rows, self.tokens.documents.tokens, *spans)
        return self._collated(queries, answers, documents, known)

    def _collated(
        self, queries: TokenSpans, answers: TokenSpans, documents: np.ndarray, known: np.ndarray
    ) -> dict[str, torch.Tensor]:
        asked, answered = queries.padded(self.framing), answers.padded(self.framing)
        return {
            "query_ids": asked["input_ids"],
            "query_mask": asked["attention_mask"],
            "document_ids": answered["input_ids"],
            "document_mask": answered["attention_mask"],
            "document": torch.from_numpy(documents),
            "known": torch.from_numpy(known),
        }

    def _judged(self, places: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the answer of each judged query [n], and all its relevant documents [n, R].

        Args:
            places: [n] among the judged queries.
            words: [n] uint64 that decide.
        """
        relevant, shares = self.judged.relevant_ones, self.judged.shares
        first = relevant.offsets[places]
        sizes = relevant.offsets[places + 1] - first
        column = np.arange(int(sizes.max()))
        is_there = column < sizes[:, None]
        found = np.where(is_there, first[:, None] + column, 0)
        is_passed = (shares[found] <= uniform(words)[:, None]) & is_there
        answers = relevant.documents[first + is_passed.sum(1)]
        return answers, np.where(is_there, relevant.documents[found], NO_DOCUMENT)

    def _add_titles(
        self, rows: np.ndarray, number: np.ndarray, queries: TokenSpans, answers: TokenSpans
    ) -> None:
        """Let titles ask for the texts of their documents."""
        parts = self.tokens.parts
        assert parts is not None
        if len(rows):
            queries.add(rows, parts.titles.tokens, *parts.titles.spans(number[rows]))
            answers.add(rows, parts.bodies.tokens, *parts.bodies.spans(number[rows]))

    def _add_sentences(
        self,
        rows: np.ndarray,
        documents: np.ndarray,
        words: np.ndarray,
        queries: TokenSpans,
        answers: TokenSpans,
    ) -> np.ndarray:
        """Let sentences ask for their documents; return of which they are taken out, [n] bool.

        The documents of the others are still to be added.
        """
        parts = self.tokens.parts
        assert parts is not None
        if not len(rows):
            return np.zeros(0, bool)
        first, end = parts.firsts[documents], parts.firsts[documents + 1]
        sentences, is_removed = drawn_sentences(first, end, parts.long_ids, words, self.removal)
        queries.add(rows, parts.sentences.tokens, *parts.sentences.spans(sentences))
        places = sentences - first
        can_join = is_removed & parts.is_divisible[documents]
        chosen = can_join.nonzero()[0]
        if len(chosen):
            for span in parts.spans_without(documents[chosen], places[chosen]):
                answers.add(rows[chosen], *span)
        for n in (is_removed & ~can_join).nonzero()[0].tolist():
            ids = parts.without(int(documents[n]), int(places[n]))
            answers.add(rows[n : n + 1], ids, np.zeros(1, np.int64), np.array([len(ids)]))
        return is_removed


def drawn_sentences(
    first: np.ndarray, end: np.ndarray, long_ids: np.ndarray, words: np.ndarray, removal: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return `drawn_sentence` of n documents: the sentence of each [n], its number among those of
    all documents, and whether it is taken out [n] bool.

    Args:
        first: [n] int64, first sentence of each document.
        end: [n] int64, behind its last.
        long_ids: [L] int64, those of all sentences that are long, in rising order.
        words: [n, 2] uint64, the first of each sample's generator.
        removal: probability that a sentence is taken out.
    """
    sizes = end - first
    begin, behind = long_ids.searchsorted(first), long_ids.searchsorted(end)
    has_long = behind > begin
    count = np.where(has_long, behind - begin, sizes)  # without a long one, all of them
    place = below_each(words[:, 0], count)
    sentence = first + place
    sentence[has_long] = long_ids[(begin + place)[has_long]]
    of_removal = np.where(count > 1, words[:, 1], words[:, 0])  # of a single one, none is drawn
    return sentence, (uniform(of_removal) < removal) & (sizes > 1)

"""Metrics of sets of codes, as means over records; a linear baseline.

Shapes: B batch, K codes per record, C codes of the book, G confidence bins.
"""

import time
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric

from datamodules.files.splitting import TEST, TRAIN
from datamodules.tokenizers.codes import decode
from lit_models.occupation_coder.decoding import Decoded, least_likely
from lit_models.occupation_coder.loss import summed
from lit_models.occupation_coder.network import NONE, CodeTrie
from lit_models.training.metrics import SumCount

MOST_DIGITS = 5
CONFIDENCE_BINS = 100
BINS_PER_CALIBRATION_BIN = 10
SCORES = ("accuracy", "precision", "recall", "f1", "exact_match")
SET_SCORES = ("set_coverage", "set_size")  # in tests with `decoding.coverage`


def set_scores(true_ids: Tensor, predicted_ids: Tensor) -> dict[str, Tensor]:
    """Scores of each record's set of codes, [B] float64 each, 0 to 1.

    Accuracy is |T and P| / max(|T|, |P|). Two empty sets score 1.

    Args:
        true_ids: [B, K], padded with NONE; repeated codes count once.
        predicted_ids: as true_ids; its K may differ.
    """
    true_ids, predicted_ids = distinct(true_ids), distinct(predicted_ids)
    is_pair = (true_ids[:, :, None] == predicted_ids[:, None, :]) & (true_ids >= 0)[:, :, None]
    common = is_pair.sum((1, 2)).double()
    num_true = (true_ids >= 0).sum(1).double()
    num_predicted = (predicted_ids >= 0).sum(1).double()
    both_empty = (num_true + num_predicted) == 0
    ratios = {
        "accuracy": common / torch.maximum(num_true, num_predicted).clamp(min=1),
        "precision": common / num_predicted.clamp(min=1),
        "recall": common / num_true.clamp(min=1),
        "f1": 2 * common / (num_true + num_predicted).clamp(min=1),
        "exact_match": ((common == num_true) & (common == num_predicted)).double(),
    }
    return {name: ratio.masked_fill(both_empty, 1.0) for name, ratio in ratios.items()}


def distinct(code_ids: Tensor) -> Tensor:
    """code_ids [B, K] with repeated codes replaced by NONE."""
    same = code_ids[:, :, None] == code_ids[:, None, :]
    return code_ids.masked_fill(same.tril(-1).any(-1), NONE)


class OccupationMetrics(nn.ModuleDict):
    """All scores and losses of one split by their log names.

    Names: SCORES; f1 of the first digits (`f1_digits_2`); f1 per language (`f1_language_en`); f1 on
    texts and codes seen or unseen in training (`f1_unseen_text`); `calibration_error` of the set's
    confidence against exact match; `loss_seq2seq`, `loss_flat` and their weighted sum `loss`, in
    nats per record. `languages` is indexed by language_id, 0 is the unknown one.
    """

    path: Tensor

    def __init__(
        self, trie: CodeTrie, languages: list[str], term_weights: Mapping[str, float]
    ) -> None:
        super().__init__()
        self.languages, self.term_weights = list(languages), dict(term_weights)
        self.num_levels = min(MOST_DIGITS, trie.block_size)
        self.register_buffer("path", trie.path, persistent=False)
        names = [f"loss_{term}" for term in term_weights] + ["loss", *SCORES]
        names += [f"f1_digits_{digits}" for digits in range(1, self.num_levels + 1)]
        names += [f"f1_language_{language}" for language in languages]
        names += [f"f1_{seen}_{kind}" for kind in ("text", "code") for seen in ("seen", "unseen")]
        for name in names:
            self[name] = SumCount()
        self["calibration_error"] = CalibrationBins()

    def update(self, decoded: Decoded, batch: Mapping[str, Any]) -> None:
        """Adds a batch with `code_ids` [B, K], `weight` [B], `language_id` [B], and, if known,
        `is_seen_text` and `is_seen_code` [B] bool."""
        true_ids, weight = batch["code_ids"], batch["weight"].double()
        scores = set_scores(true_ids, decoded.code_ids)
        for name, score in scores.items():
            self._add(name, score, weight)
        nodes = [  # [B, K, L + 1] each; equal where the first digits are
            self.path[ids.clamp(min=0)].masked_fill((ids < 0)[..., None], NONE)
            for ids in (true_ids, decoded.code_ids)
        ]
        for digits in range(1, self.num_levels + 1):
            truncated = set_scores(*(part[..., digits] for part in nodes))
            self._add(f"f1_digits_{digits}", truncated["f1"], weight)
        for index, language in enumerate(self.languages):
            is_spoken = batch["language_id"] == index
            self._add(f"f1_language_{language}", scores["f1"], weight * is_spoken)
        for kind in ("text", "code"):
            if f"is_seen_{kind}" in batch:
                is_seen = batch[f"is_seen_{kind}"]
                self._add(f"f1_seen_{kind}", scores["f1"], weight * is_seen)
                self._add(f"f1_unseen_{kind}", scores["f1"], weight * ~is_seen)
        self["calibration_error"].update(decoded.set_confidence, scores["exact_match"], weight)

    def add_losses(self, losses: Mapping[str, Tensor], weight: Tensor) -> Tensor:
        """Add losses [B] of each term over the records whose weight [B] is not 0; return each
        record's weighted sum of both terms [B]."""
        terms, shares = summed(losses, weight), self.term_weights.items()
        for name, term in terms.items():
            self[f"loss_{name}"].update(*term)
        both = [share * terms[name].total for name, share in shares]
        self["loss"].update(torch.stack(both), weight)
        return torch.stack([share * losses[name] for name, share in shares]).sum(0)

    def add_sets(self, marginals: Tensor, limit: float, batch: Mapping[str, Any]) -> None:
        """Adds a batch to SET_SCORES: share of records whose set holds all their codes, and number
        of codes per set. Args: probability of each code [B, C]; the lowest one in a set."""
        is_held, weight = least_likely(marginals, batch["code_ids"]) >= limit, batch["weight"]
        self._add("set_coverage", is_held, weight)
        self._add("set_size", (marginals >= limit).sum(1), weight)

    def _add(self, name: str, score: Tensor, weight: Tensor) -> None:
        self[name].update(score * weight, weight)


class CalibrationBins(Metric):
    """Expected calibration error from sums of confidence, hits and counts per confidence bin.

    Bins are fine, so that `limit` can use the same sums; the error merges them into ten.
    """

    confidence: Tensor
    hits: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("confidence", "hits", "count"):
            bins = torch.zeros(CONFIDENCE_BINS, dtype=torch.float64)
            self.add_state(name, bins, dist_reduce_fx="sum")

    def update(self, confidence: Tensor, is_hit: Tensor, weight: Tensor) -> None:
        """Adds records. Args: confidences, hits (0 or 1) and weights, [B] each."""
        # Sums are widened, too: a run in half precision converts them with its module.
        confidence, weight = confidence.detach().double(), weight.double()
        bins = (confidence * CONFIDENCE_BINS).long().clamp(0, CONFIDENCE_BINS - 1)
        self.confidence = self.confidence.double().index_add(0, bins, confidence * weight)
        self.hits = self.hits.double().index_add(0, bins, is_hit.double() * weight)
        self.count = self.count.double().index_add(0, bins, weight)

    def compute(self) -> Tensor:
        """Mean absolute difference of confidence and accuracy over ten bins, weighted by count."""
        confidence, hits = (
            bins.view(-1, BINS_PER_CALIBRATION_BIN).sum(1) for bins in (self.confidence, self.hits)
        )
        return (confidence - hits).abs().sum() / self.count.sum().clamp(min=1)

    def limit(self, precision: float) -> tuple[float, float, float]:
        """Lowest bin edge at which at least `precision` of the records at or above it are hits.

        Returns (edge, share of records at or above it, their share of hits); (1.01, 0, 0) if no
        edge qualifies. Edges of empty bins do not count.
        """
        hits, count = self.hits.flip(0).cumsum(0), self.count.flip(0).cumsum(0)
        share, accuracy = count / count[-1].clamp(min=1), hits / count.clamp(min=1)
        reached = ((accuracy >= precision) & (self.count.flip(0) > 0)).nonzero().flatten()
        if not len(reached):
            return 1.01, 0.0, 0.0
        place = int(reached[-1])
        limit = (CONFIDENCE_BINS - 1 - place) / CONFIDENCE_BINS
        return limit, float(share[place]), float(accuracy[place])


NGRAM_SIZES = (1, 5)
MOST_TEXTS, MOST_FEATURES = 20_000, 20_000  # limits of distinct strings and of n-grams
TOLERANCE = 0.1  # lower values double the time without changing the scores


class LinearBaseline(Callback):
    """Prints the scores of a linear SVM on character n-gram TF-IDF beside the model's.

    The SVM trains on the distinct strings of the training part and predicts one code for each
    record of the test. It runs on rank 0 after the test; `scores` then holds `f1` and `accuracy`,
    means over the test records.
    """

    def __init__(self) -> None:
        self.scores: dict[str, float] = {}

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        store = trainer.datamodule.store  # type: ignore[attr-defined]
        start, train_rows, test_rows = time.perf_counter(), store.rows(TRAIN), store.rows(TEST)
        if not len(train_rows):
            print("linear baseline: none, since the data of this test hold no training rows")
            return
        # Label of each distinct string: the most frequent first code of its rows.
        first_code = store.arrays["code_ids"][store.arrays["code_offsets"][train_rows]].tolist()
        trained, tested = (list(map(decode, store.texts(rows))) for rows in (train_rows, test_rows))
        code_of_text: dict[str, int] = {}
        for (text, code), _ in Counter(zip(trained, first_code, strict=True)).most_common():
            code_of_text.setdefault(text, code)
        texts = list(dict.fromkeys(trained))
        step = max(1.0, len(texts) / MOST_TEXTS)
        texts = [texts[int(i * step)] for i in range(min(len(texts), MOST_TEXTS))]
        predicted = self._predicted(texts, [code_of_text[text] for text in texts], tested)
        true_sets = [set(ids.tolist()) for ids in store.code_sets(test_rows)]
        hits = np.array([code in true for code, true in zip(predicted, true_sets, strict=True)])
        num_true = np.array(list(map(len, true_sets)))
        f1 = float(np.mean(2 * hits / (num_true + 1)))
        self.scores = {"f1": f1, "accuracy": float(np.mean(hits / np.maximum(num_true, 1)))}
        for logger in trainer.loggers:
            logger.log_metrics({"test/baseline_f1": f1}, step=trainer.global_step)

        lines = [f"{f'test, {len(test_rows):,} records':<40} F1      accuracy"]
        model = [trainer.callback_metrics.get(f"test/{name}") for name in ("f1", "accuracy")]
        if model[0] is not None and model[1] is not None:
            lines.append(f"{'this model':<40} {float(model[0]):.4f}  {float(model[1]):.4f}")
        lines.append(
            f"{'character n-gram TF-IDF + linear SVM':<40} {f1:.4f}  {self.scores['accuracy']:.4f}"
            f"  ({len(texts):,} training strings, {time.perf_counter() - start:.1f} s)"
        )
        if model[0] is not None and float(model[0]) < f1:
            lines.append(
                f"the baseline is ahead by {f1 - float(model[0]):.4f}: the linear head of "
                "occupation_coder/table.yaml is such a model,\nwith --model.decoding.flat_share=1 "
                "it has the whole vote"
            )
        print("\n".join(lines))

    def _predicted(self, texts: list[str], codes: list[int], test_texts: list[str]) -> list[int]:
        """The linear model's code for each test text."""
        if len(set(codes)) == 1:
            return [codes[0]] * len(test_texts)
        # Seconds of import that only this baseline needs.
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.svm import LinearSVC

        options = {"ngram_range": NGRAM_SIZES, "max_features": MOST_FEATURES}
        ngrams = TfidfVectorizer(analyzer="char", sublinear_tf=True, **options)
        features = ngrams.fit_transform(texts)
        with warnings.catch_warnings():  # these tables have many codes with few texts each
            warnings.filterwarnings("ignore", "The number of unique classes")
            model = LinearSVC(tol=TOLERANCE, random_state=0).fit(features, codes)
        return model.predict(ngrams.transform(test_texts)).tolist()

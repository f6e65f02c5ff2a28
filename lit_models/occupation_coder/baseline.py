"""A linear baseline beside the model's test scores: is the network worth its cost on these data?"""

import time
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer

from datamodules.files.splitting import TEST, TRAIN
from datamodules.occupations.store import OccupationStore
from datamodules.tokenizers.characters import decode

NGRAM_SIZES = (1, 5)
# Coarse, as the scores no longer move below it while the time doubles.
TOLERANCE = 0.1
WITHOUT_LINEAR_HEAD = (
    "train with --config occupation_coder/table.yaml,\nwhich votes with such a model's better kin "
    "beside the decoder"
)
WITH_LINEAR_HEAD = (
    "give the linear head the whole vote,\n--model.decoding.flat_share=1 with test and predict, "
    "and more rows to both"
)


class BaselineScores(NamedTuple):
    """f1 and accuracy: means over test records, 0 to 1; num_texts distinct strings trained on."""

    f1: float
    accuracy: float
    num_records: int
    num_texts: int
    seconds: float


class LinearBaseline(Callback):
    """Prints the scores of a character n-gram TF-IDF with a linear SVM beside the model's.

    The SVM trains on the distinct strings of the training part, names one code per text and is
    judged on the records that the model was judged on. Rank 0 does it after the test.

    Args:
        max_texts: most distinct training strings, at least 2; more are thinned out evenly.
        max_features: most n-grams, the frequent ones first, at least 1.
    """

    def __init__(self, max_texts: int = 20_000, max_features: int = 20_000) -> None:
        if max_texts < 2 or max_features < 1:
            raise ValueError(
                f"max_texts must be at least 2 and max_features at least 1, got {max_texts} and "
                f"{max_features}; drop the callback to do without a baseline."
            )
        self.max_texts = max_texts
        self.max_features = max_features
        self.scores: BaselineScores | None = None

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Trains, judges and prints, on rank 0 alone."""
        if not trainer.is_global_zero or trainer.sanity_checking:
            return
        data = getattr(trainer, "datamodule", None)
        store = getattr(data, "store", None)
        if not isinstance(store, OccupationStore):
            raise ValueError(
                "LinearBaseline reads its texts through an OccupationDataModule, but the data are "
                f"{type(data).__name__}; drop the callback."
            )
        train_rows = store.rows(TRAIN)
        if not len(train_rows):
            print("linear baseline: none, since the data of this test hold no training rows")
            return
        self.scores = self.judge(store, train_rows, store.rows(TEST))
        for logger in trainer.loggers:
            logger.log_metrics({"test/baseline_f1": self.scores.f1}, step=trainer.global_step)
        model = {name: trainer.callback_metrics.get(f"test/{name}") for name in ("f1", "accuracy")}
        told = {k: None if v is None else float(v) for k, v in model.items()}
        print(_table(self.scores, told))
        if told["f1"] is not None and told["f1"] < self.scores.f1:
            is_linear = getattr(getattr(pl_module, "loss", None), "linear", None) is not None
            remedy = WITH_LINEAR_HEAD if is_linear else WITHOUT_LINEAR_HEAD
            print(f"the baseline is ahead by {self.scores.f1 - told['f1']:.4f}; {remedy}")

    def judge(
        self, store: OccupationStore, train_rows: np.ndarray, test_rows: np.ndarray
    ) -> BaselineScores:
        """The baseline's scores on the test rows of a store."""
        start = time.perf_counter()
        texts, codes = self._training_pairs(store, train_rows)
        test_texts = [decode(store.code_points(row)) for row in test_rows]
        predicted = fit_and_predict(texts, codes, test_texts, self.max_features)
        num_true, hits = np.empty(len(test_rows)), np.empty(len(test_rows))
        for i, row in enumerate(test_rows):
            true_codes = set(store.code_ids(row).tolist())
            num_true[i], hits[i] = len(true_codes), predicted[i] in true_codes
        return BaselineScores(
            f1=float(np.mean(2 * hits / (num_true + 1))),
            accuracy=float(np.mean(hits / np.maximum(num_true, 1))),
            num_records=len(test_rows),
            num_texts=len(texts),
            seconds=time.perf_counter() - start,
        )

    def _training_pairs(
        self, store: OccupationStore, rows: np.ndarray
    ) -> tuple[list[str], list[int]]:
        """Distinct strings with the first code that most of their rows have."""
        text_id = store.arrays["text_id"][rows]
        first_code = store.arrays["code_ids"][store.arrays["code_offsets"][rows]]
        pairs = Counter(zip(text_id.tolist(), first_code.tolist(), strict=True))
        code_of_text: dict[int, int] = {}
        for (text, code), _ in pairs.most_common():
            code_of_text.setdefault(text, code)
        chosen = sorted(code_of_text)
        step = len(chosen) / min(len(chosen), self.max_texts)
        chosen = [chosen[int(i * step)] for i in range(min(len(chosen), self.max_texts))]
        row_of_text = dict(zip(text_id.tolist(), rows.tolist(), strict=True))
        texts = [decode(store.code_points(row_of_text[text])) for text in chosen]
        return texts, [code_of_text[text] for text in chosen]


def fit_and_predict(
    texts: Sequence[str], codes: Sequence[int], test_texts: Sequence[str], max_features: int
) -> list[int]:
    """The code that the linear model names for each test text.

    Args:
        texts: training strings, lower case or not.
        codes: one code per training string.
        test_texts: strings to code.
        max_features: most n-grams.
    """
    if len(set(codes)) == 1:
        return [codes[0]] * len(test_texts)
    # Seconds of import that only this baseline needs.
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.svm import LinearSVC

    ngrams = TfidfVectorizer(
        analyzer="char", ngram_range=NGRAM_SIZES, sublinear_tf=True, max_features=max_features
    )
    features = ngrams.fit_transform(texts)
    with warnings.catch_warnings():  # many codes of few texts each are what these tables have
        warnings.filterwarnings("ignore", "The number of unique classes")
        model = LinearSVC(tol=TOLERANCE, random_state=0).fit(features, codes)
    return model.predict(ngrams.transform(test_texts)).tolist()


def _table(baseline: BaselineScores, model: dict[str, float | None]) -> str:
    title = f"test, {baseline.num_records:,} records"
    lines = [f"{title:<40} F1      accuracy"]
    if model["f1"] is not None and model["accuracy"] is not None:
        lines.append(f"{'this model':<40} {model['f1']:.4f}  {model['accuracy']:.4f}")
    lines.append(
        f"{'character n-gram TF-IDF + linear SVM':<40} {baseline.f1:.4f}  {baseline.accuracy:.4f}"
        f"  ({baseline.num_texts:,} training strings, {baseline.seconds:.1f} s)"
    )
    return "\n".join(lines)

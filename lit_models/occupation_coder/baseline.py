"""A linear baseline beside the model's test scores: is the network worth its cost on these data?"""

import time
import warnings
from collections import Counter

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


class LinearBaseline(Callback):
    """Prints the scores of a character n-gram TF-IDF with a linear SVM beside the model's.

    The SVM trains on the distinct strings of the training part, names one code per text and is
    judged on the records that the model was judged on. Rank 0 does it after the test; `scores` then
    has `f1` and `accuracy`, means over the test records.

    Args:
        max_texts: most distinct training strings; more are thinned out evenly.
        max_features: most n-grams, the frequent ones first.
    """

    def __init__(self, max_texts: int = 20_000, max_features: int = 20_000) -> None:
        self.max_texts, self.max_features = max_texts, max_features
        self.scores: dict[str, float] = {}

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or trainer.sanity_checking:
            return
        store = getattr(getattr(trainer, "datamodule", None), "store", None)
        if not isinstance(store, OccupationStore):
            raise ValueError(
                "LinearBaseline reads its texts through an OccupationDataModule; drop the callback."
            )
        start, train_rows, test_rows = time.perf_counter(), store.rows(TRAIN), store.rows(TEST)
        if not len(train_rows):
            print("linear baseline: none, since the data of this test hold no training rows")
            return
        texts, codes = self._training_pairs(store, train_rows)
        predicted = self._predicted(texts, codes, list(map(decode, store.texts(test_rows))))
        true_sets = [set(ids.tolist()) for ids in store.code_sets(test_rows)]
        hits = np.array([code in true for code, true in zip(predicted, true_sets, strict=True)])
        num_true = np.array(list(map(len, true_sets)))
        f1 = float(np.mean(2 * hits / (num_true + 1)))
        self.scores = {"f1": f1, "accuracy": float(np.mean(hits / np.maximum(num_true, 1)))}
        for logger in trainer.loggers:
            logger.log_metrics({"test/baseline_f1": f1}, step=trainer.global_step)

        title = f"test, {len(test_rows):,} records"
        lines = [f"{title:<40} F1      accuracy"]
        model = [trainer.callback_metrics.get(f"test/{name}") for name in ("f1", "accuracy")]
        if model[0] is not None and model[1] is not None:
            lines.append(f"{'this model':<40} {float(model[0]):.4f}  {float(model[1]):.4f}")
        lines.append(
            f"{'character n-gram TF-IDF + linear SVM':<40} {f1:.4f}  {self.scores['accuracy']:.4f}"
            f"  ({len(texts):,} training strings, {time.perf_counter() - start:.1f} s)"
        )
        if model[0] is not None and float(model[0]) < f1:
            is_linear = getattr(getattr(pl_module, "loss", None), "linear", None) is not None
            remedy = WITH_LINEAR_HEAD if is_linear else WITHOUT_LINEAR_HEAD
            lines.append(f"the baseline is ahead by {f1 - float(model[0]):.4f}; {remedy}")
        print("\n".join(lines))

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
        most = min(len(chosen), self.max_texts)
        step = len(chosen) / most
        chosen = [chosen[int(i * step)] for i in range(most)]
        row_of_text = dict(zip(text_id.tolist(), rows.tolist(), strict=True))
        first = np.array([row_of_text[text] for text in chosen])
        return list(map(decode, store.texts(first))), [code_of_text[text] for text in chosen]

    def _predicted(self, texts: list[str], codes: list[int], test_texts: list[str]) -> list[int]:
        """The code that the linear model names for each test text."""
        if len(set(codes)) == 1:
            return [codes[0]] * len(test_texts)
        # Seconds of import that only this baseline needs.
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.svm import LinearSVC

        most = self.max_features
        ngrams = TfidfVectorizer(
            analyzer="char", ngram_range=NGRAM_SIZES, sublinear_tf=True, max_features=most
        )
        features = ngrams.fit_transform(texts)
        with warnings.catch_warnings():  # many codes of few texts each are what these tables have
            warnings.filterwarnings("ignore", "The number of unique classes")
            model = LinearSVC(tol=TOLERANCE, random_state=0).fit(features, codes)
        return model.predict(ngrams.transform(test_texts)).tolist()

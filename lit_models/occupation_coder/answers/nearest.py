"""Training texts that are like a text."""

from typing import Any

from datamodules.files.splitting import TRAIN
from datamodules.occupations.datamodule import OccupationDataset
from datamodules.occupations.store import open_store
from datamodules.tokenizers.codes import decode


class NearestTexts:
    """Rows of the training part of an OccupationDataModule, as they were written, by the likeness
    of their letters; of each text one."""

    def __init__(self, data: Any) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer

        self.rows = OccupationDataset(open_store(data.store_request(), data.on_bad_rows), TRAIN)
        texts = self.rows.store.texts(self.rows.row_ids)
        self.number_of = {decode(text): number for number, text in enumerate(texts)}  # the last
        self.ngrams = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4))
        self.known = self.ngrams.fit_transform(self.number_of)

    def find(self, text: str, number: int) -> list[dict[str, str]]:
        """Return the nearest rows, the nearest first, as their dataset describes them."""
        likeness = (self.known @ self.ngrams.transform([text]).T).toarray()[:, 0]
        numbers = list(self.number_of.values())
        return [self.rows.describe(numbers[n], 0) for n in likeness.argsort()[::-1][:number]]

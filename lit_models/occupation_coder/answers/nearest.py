"""Search for similar training texts."""

from typing import Any

from datamodules.files.splitting import TRAIN
from datamodules.occupations.datamodule import OccupationDataset
from datamodules.occupations.store import open_store
from datamodules.tokenizers.codes import decode


class NearestTexts:
    """Search for similar rows in the training part of an OccupationDataModule, one row per distinct
    text, by cosine similarity of character n-grams (TF-IDF)."""

    def __init__(self, data: Any) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer

        self.rows = OccupationDataset(open_store(data.store_request(), data.on_bad_rows), TRAIN)
        texts = self.rows.store.texts(self.rows.row_ids)
        self.number_of = {decode(text): number for number, text in enumerate(texts)}  # last row
        self.ngrams = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4))
        self.known = self.ngrams.fit_transform(self.number_of)

    def find(self, text: str, number: int) -> list[dict[str, str]]:
        """Return `OccupationDataset.describe` of the `number` nearest rows, nearest first."""
        likeness = (self.known @ self.ngrams.transform([text]).T).toarray()[:, 0]
        numbers = list(self.number_of.values())
        return [self.rows.describe(numbers[n], 0) for n in likeness.argsort()[::-1][:number]]

"""RelevanceDataModule: what the data of rankers and retrievers shares, a collection."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from datamodules.audits import Audit, MakeModel
from datamodules.encoded_texts import EncodedTextDataModule
from datamodules.files.bad_rows import hand_over_rejected
from datamodules.relevance.collection import Collection, CollectionRequest, open_collection

MOST_TOKENIZER_TEXTS = 200_000


class RelevanceDataModule(EncodedTextDataModule):
    """Opens a collection of documents, queries and judgements; a family builds its datasets.

    Args:
        collection: which files, in which format; embedded demo data without any.
        on_bad_rows: `error` names the first 20, `reject` leaves them out.
        predict_output: where a prediction goes; none is a name in the run folder.
        encoded: tokenizer, lengths, batch sizes, plan and loader, see `EncodedTextDataModule`.
    """

    predict_example: ClassVar[str] = "FOLDER"

    def __init__(
        self,
        collection: CollectionRequest = CollectionRequest(),  # noqa: B008 - frozen
        on_bad_rows: Literal["error", "reject"] = "error",
        predict_output: str | None = None,
        **encoded: Any,
    ) -> None:
        super().__init__(**encoded)
        self.collection_request, self.on_bad_rows = collection, on_bad_rows
        self.predict_output = predict_output
        self._collection: Collection | None = None

    @property
    def collection(self) -> Collection:
        """The documents, queries and judgements; made in the cache at first use."""
        if self._collection is None:
            self._collection = open_collection(self.collection_request, self.on_bad_rows)
        return self._collection

    def prepare_data(self) -> None:
        """Make collection and tokenizer in the cache; copy rejected rows to the run folder."""
        made = open_collection(self.collection_request, self.on_bad_rows)
        run_folder = self.trainer.default_root_dir if self.trainer is not None else "."
        hand_over_rejected(made.folder, Path(run_folder))
        super().prepare_data()

    def training_texts(self) -> Iterator[str]:
        """Yield documents with their titles; of very many, evenly spread ones."""
        count = self.collection.num_documents
        for index in range(0, count, 1 + count // MOST_TOKENIZER_TEXTS):
            yield self.collection.document_text(index)

    def texts_digest(self) -> str:
        return self.collection.fingerprint

    def audit(self, make_model: MakeModel | None = None) -> Audit:
        """Return what is in the collection, and what is wrong with it, whatever the model."""
        from datamodules.relevance.audit import audit_collection

        return audit_collection(self.collection_request)

    def output_path(self, default_name: str) -> Path:
        """Return where a prediction goes."""
        if self.predict_output is not None:
            return Path(self.predict_output).expanduser()
        folder = self.trainer.default_root_dir if self.trainer is not None else "."
        return Path(folder) / default_name

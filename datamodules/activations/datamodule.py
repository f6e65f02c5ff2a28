"""ActivationDataModule: the activations that a consistency lens explains."""

import json
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import numpy as np

from datamodules.activations.dataset import ActivationDataset, explanation_line
from datamodules.activations.documents import (
    DocumentFacts,
    DocumentsDataModule,
    Pieces,
    check_activations,
    check_parts,
)
from datamodules.activations.store import ActivationStore
from datamodules.core.planned import Stage
from datamodules.files.audit import Audit
from datamodules.files.splitting import PART_NAMES, TEST
from datamodules.files.tables import naming
from datamodules.text.prompts import check_output, new_json_file
from datamodules.text.store import TokenStore

OF_THE_DUMP = (
    *("train_files", "validation_files", "test_files", "tokenizer", "split", "text_column"),
    *("attributes_column", "documents_by", "context_length", "positions"),
)


def check_agrees(options: dict[str, Any], store: ActivationStore) -> None:
    """Refuse options that belong to the dump, and would change nothing.

    Args:
        options: as a `DocumentsDataModule` takes them.
        store: that was dumped with others.

    Raises:
        ValueError: one differs from its default and from the store's.
    """
    stored = {"context_length": store.context_length, "positions": store.positions}
    for name in OF_THE_DUMP:
        default = signature(DocumentsDataModule).parameters[name].default
        if options.get(name, default) not in (default, stored.get(name, default)):
            known = f" with {stored[name]}" if name in stored else ", its documents read"
            raise ValueError(
                f"data.{name} is {options[name]}, and {store.folder} was dumped{known}: leave it "
                "out, or dump the activations again with it."
            )


STATISTICS_SAMPLES, STATISTICS_BATCH = 4096, 64  # of documents whose activations are not kept


class ActivationDataModule(DocumentsDataModule):
    """Deals activations of a store, or documents whose activations the module computes.

    Args:
        activations: folder of the store; `None` computes the activations in each step from the
            documents that are named here, or the embedded ones.
        predict_part: the part whose activations `predict` explains.
        predict_output: jsonl; `None` makes `explanations.jsonl` in the run folder.
        documents: files, tokenizer, positions and split where there is no store, see
            `DocumentsDataModule`.

    Without a store the plan, the samples and what is drawn for them are the same as with a store of
    these documents. The statistics are then those of the first activations of training only; where
    training has no more, losses are the same as well.

    Raises:
        ValueError: predict_output is of another kind.
    """

    def __init__(
        self,
        activations: str | None = None,
        predict_part: Literal["train", "validation", "test"] = "test",
        predict_output: str | None = None,
        **documents: Any,
    ) -> None:
        super().__init__(**documents)
        self.options = documents
        self.folder = None if activations is None else Path(activations).expanduser()
        self.predict_part, self.predict_output = predict_part, predict_output
        if predict_output is not None:
            check_output(Path(predict_output))

    def open_store(self) -> TokenStore:
        """Return the store: of activations where one is named, else of tokens.

        Raises:
            FileNotFoundError: there is no store of this name.
            ValueError: it is incomplete, or of other options than those that are given.
        """
        if self.folder is None:
            return super().open_store()
        store = ActivationStore(self.folder)
        check_agrees(self.options, store)
        self.context_length, self.positions = store.context_length, store.positions
        return store

    def build(self, stage: Stage) -> ActivationDataset:
        """Return the activations of one part.

        Raises:
            ValueError: it has none.
        """
        part = PART_NAMES.index(self.predict_part if stage == "predict" else stage)
        pieces, piece, position = self.places(part)
        check_activations(len(piece), PART_NAMES[part])
        return ActivationDataset(
            pieces,
            piece,
            position,
            path=None if self.folder is None else self.store.path(part, "activations"),
            facts=self.facts(part) if stage != "train" else None,
            fingerprint=f"{self.store.fingerprint}-{part}-{len(piece)}-{position.sum()}",
            seed=self.seed if stage == "train" else 0,
            pairs_others=stage in ("test", "predict"),
        )

    def places(self, part: int) -> tuple[Pieces, np.ndarray, np.ndarray]:
        """Return the documents of a part, and the piece [N] and position [N] of each activation."""
        if self.folder is None:
            return super().places(part)
        pieces = Pieces(self.store, part, self.context_length)
        return pieces, self.store.array(part, "piece"), self.store.array(part, "position")

    def facts(self, part: int) -> DocumentFacts:
        """Return the attributes and files of a part's documents."""
        if self.folder is None:
            return super().facts(part)
        name = PART_NAMES[part]
        attributes, group = (self.store.array(part, kind) for kind in ("attributes", "group"))
        names, groups = (self.store.schema[kind][name] for kind in ("attributes", "groups"))
        return DocumentFacts(names, attributes, group, groups)

    def audit(self) -> Audit:
        """Return what is in the store, all of which is read, or in the documents.

        Raises:
            ValueError: the store is damaged, or documents are in two parts.
        """
        audit = super().audit()
        if self.folder is None:
            return audit
        store = self.store
        check_parts(store)
        if damaged := store.damaged():
            names = ", ".join(path.name for path in damaged[:3])
            raise ValueError(
                f"{store.folder} is damaged: {len(damaged)} files do not hold what was written "
                f"({names}); copy the store again, or dump the activations again."
            )
        subject, files = store.subject, store.schema["files"]
        size = sum(facts["bytes"] for facts in files.values())
        audit.notes += [
            (
                "subject",
                f"block {subject.layer} of 0 to {subject.num_layers - 1}, {subject.site}, "
                f"{subject.hidden_size:,} features, {store.schema['dtype']}; digest "
                f"{subject.digest}",
            ),
            ("files", f"{len(files)} files, {size / 1e6:,.1f} MB, hold what was written"),
        ]
        return audit

    def training_sample(self) -> Iterator[dict[str, Any]]:
        """Yield batches of the first activations of the training part, always the same ones."""
        dataset = self.datasets.get("train") or self.build("train")
        last = min(len(dataset.lengths), STATISTICS_SAMPLES)
        for first in range(0, last, STATISTICS_BATCH):
            numbers = range(first, min(first + STATISTICS_BATCH, last))
            yield dataset.collate([dataset.example(number, 0) for number in numbers])

    @property
    def group_names(self) -> list[str]:
        """The files of the test part, which are reported one by one."""
        return self.facts(TEST).group_names

    @property
    def attribute_names(self) -> list[str]:
        """What is known of the documents."""
        return self.facts(TEST).names

    @property
    def predict_output_path(self) -> Path:
        """Where the explanations go."""
        if self.predict_output is not None:
            return Path(self.predict_output).expanduser()
        return Path(self.trainer.default_root_dir) / "explanations.jsonl"

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write a line per activation, whole or not at all; `results` as `predict_step` returns
        them."""
        dataset = self.datasets["predict"]
        assert isinstance(dataset, ActivationDataset)
        controls = self.model.options["controls"]
        with new_json_file(path) as file:
            for number in range(len(results["error"])):
                values = {name: found[number] for name, found in results.items()}
                line = explanation_line(dataset, number, values, controls)
                with naming(path):
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")

"""Datamodule of the consistency lens: activations as planned samples, explanations as jsonl.

Shapes: N activations, B per micro-batch, W wrong activations per sample, T tokens of the longest
document, D features, L layers, A attributes.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datamodules.activations import interchange
from datamodules.activations.documents import (
    NONE,
    DocumentFacts,
    DocumentsDataModule,
    Pieces,
    check_activations,
)
from datamodules.activations.store import (
    ActivationStatistics,
    ActivationStore,
    Chunk,
    LayeredActivations,
    one_thread,
    open_stores,
    statistics_of,
)
from datamodules.core.batches import TERMS
from datamodules.core.plan import hash_ids
from datamodules.core.planned import PlannedDataset, Stage
from datamodules.core.store import new_file
from datamodules.files.audit import Audit
from datamodules.files.rows import JSON_SUFFIXES
from datamodules.files.splitting import PART_NAMES
from datamodules.files.tables import Files, paths
from datamodules.text.prompts import OTHER_OUTPUT
from datamodules.text.store import TokenStore
from datamodules.tokenizers.text import TextTokenizer

AROUND = 8  # tokens of context before and after a token
NEAREST = 3  # controls in a line of the output
IN_PARQUET = ("document", "position", "before", "token", "after", "explanation", "error")
EPOCHS_APART = 1_000_003  # distance of the keys of two seeds; more than there are epochs
STATISTICS_SAMPLES, STATISTICS_BATCH = 4096, 64  # activations for statistics without a store


def partners(document: np.ndarray) -> np.ndarray:
    """Return for each activation [N] a partner, of another document if there is one.

    Samples are sorted by a random order of documents, and each takes the one half a round ahead, so
    that each is the partner of exactly one, unless one document holds more than half of them.
    """
    order = np.lexsort((np.arange(len(document)), document, hash_ids(document, 1)))
    others = np.empty(len(document), np.int64)
    others[order] = np.roll(order, -(len(order) // 2))
    alone = np.flatnonzero(document[others] == document)  # all of one document
    if len(alone):
        rest = order[document[order] != document[alone[0]]]
        others[alone] = np.resize(rest, len(alone)) if len(rest) else others[alone]
    return others


class WrongOnes:
    """W wrong activations for each sample of a part, drawn from other samples with the same current
    token [N], so that the token alone does not tell them apart."""

    def __init__(self, tokens: np.ndarray, number: int) -> None:
        self.tokens, self.number = tokens, number
        self.order, self.counts = np.argsort(tokens, kind="stable"), np.bincount(tokens)
        self.ends = np.cumsum(self.counts)

    def of(self, numbers: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return [B, W] int64 for samples [B], drawn by their keys [B] uint64; never the sample
        itself, unless no other one has its token."""
        tokens, turns = self.tokens[numbers], np.arange(self.number, dtype=np.uint64)
        drawn = hash_ids(keys[:, None] + turns, 1)  # [B, W]
        ends, counts = self.ends[tokens][:, None], self.counts[tokens][:, None]  # [B, 1]
        places = (drawn % np.maximum(counts - 1, 1).astype(np.uint64)).astype(np.int64)
        others = self.order[ends - counts + places]
        # Draws exclude a token's last sample, which replaces draws of the sample itself.
        return np.where(others == numbers[:, None], self.order[ends - 1], others)


class ActivationDataset(PlannedDataset):
    """One part of a store of activations, or of documents whose activations the step computes.

    Args:
        piece: [N] piece of each activation.
        position: [N] position of each activation in its piece.
        facts: attributes and files of the documents; `None` in training.
        fingerprint: digest of the store and the part.
        seed: key of all draws of a sample.
        pairs_others: whether each sample gets a partner from another document.
        num_wrong: W, wrong activations for each sample.
        layers: layers read at each position, see `LayeredActivations`.
        stores: the store of each layer; by default the documents' own store.
    """

    def __init__(
        self,
        pieces: Pieces,
        piece: np.ndarray,
        position: np.ndarray,
        facts: DocumentFacts | None,
        fingerprint: str,
        seed: int,
        pairs_others: bool = False,
        num_wrong: int = 0,
        layers: Sequence[int] = (0,),
        stores: Sequence[TokenStore] = (),
    ) -> None:
        self.pieces, self.layers, self.stores = pieces, layers, stores or [pieces.store]
        self.facts, self.seed, self.fingerprint = facts, seed, fingerprint
        self.others = partners(pieces.document[piece]) if pairs_others else None
        self.wrong = None
        if num_wrong:
            tokens = pieces.stream.tokens[pieces.starts[piece] + position].astype(np.int64)
            self.wrong = WrongOnes(tokens, num_wrong)
        if len(layers) > 1:  # from activations to samples: one per layer
            piece, position = (np.repeat(values, len(layers)) for values in (piece, position))
        self.piece, self.position, self.lengths = piece, position, pieces.sizes[piece]
        self.target_counts = dict.fromkeys(TERMS)

    @property
    def activations(self) -> np.ndarray | LayeredActivations | None:
        """[N, D], memory-mapped; `None` if the step computes them."""
        name = f"{PART_NAMES[self.pieces.part]}.activations"
        arrays: list[Any] = [store.arrays.get(name) for store in self.stores]
        return arrays[0] if len(arrays) == 1 else LayeredActivations(arrays)

    def batch(self, sample_ids: np.ndarray, epoch: int) -> dict[str, Any]:
        """Return the batch of samples [B], with their partners, if any, in `other`."""
        batch = self._batch(sample_ids, epoch)
        if self.others is not None:
            place, layer = np.divmod(sample_ids, len(self.layers))
            batch["other"] = self._batch(self.others[place] * len(self.layers) + layer, epoch)
        return batch

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the document's text up to the position, and its continuation."""
        tokens, position = self.pieces.tokens(int(self.piece[sample_id])), self.position[sample_id]
        decode = self.pieces.store.tokenizer.decode
        return {
            **{name: str(value) for name, value in self.layer_of(sample_id).items()},
            "position": str(position),
            "text": decode(tokens[: position + 1], skip_special_tokens=False),
            "goes on": decode(tokens[position + 1 :], skip_special_tokens=False),
        }

    def layer_of(self, sample_id: int) -> dict[str, int]:
        """Return the `layer` of a sample; {} for a lens of a single layer."""
        several = len(self.layers) > 1
        return {"layer": self.layers[sample_id % len(self.layers)]} if several else {}

    def explanation_line(
        self, number: int, values: dict[str, np.ndarray], controls: Sequence[str]
    ) -> dict[str, Any]:
        """Return the output line of one sample, from its token_ids [t], error [], control_errors
        [C] and the names of the C controls.

        document: part and index. layer: if there are several. position: from 0. before, token,
        after: the text around the position; the token is the last one the subject has read there.
        explanation. error: squared error in units of the training part's variance.
        nearest_controls: the controls with the smallest errors, and these errors.
        """
        pieces, piece = self.pieces, int(self.piece[number])
        position, tokenizer = int(self.position[number]), pieces.store.tokenizer
        errors = dict(zip(controls, values["control_errors"].tolist(), strict=True))
        nearest = sorted(errors, key=lambda name: (errors[name], name))
        return {
            "document": f"{PART_NAMES[pieces.part]}:{int(pieces.document[piece])}",
            **self.layer_of(number),
            "position": position,
            **context_of(tokenizer, pieces.tokens(piece), position),
            "explanation": tokenizer.decode(values["token_ids"]),
            "error": round(float(values["error"]), 6),
            "nearest_controls": {name: round(errors[name], 6) for name in nearest[:NEAREST]},
        }

    def _batch(self, numbers: np.ndarray, epoch: int) -> dict[str, Any]:
        piece, position = self.piece[numbers], np.asarray(self.position[numbers])
        lengths = self.pieces.sizes[piece] + 1  # with the token after the last position
        rows = self.pieces.rows(piece, lengths)
        keys = hash_ids(numbers, self.seed * EPOCHS_APART + epoch) >> np.uint64(1)
        hashes = self.pieces.document_hashes[piece]
        batch = {
            "input_ids": torch.from_numpy(rows),
            "lengths": torch.from_numpy(lengths),
            "position": torch.from_numpy(position),
            "noise_key": torch.from_numpy(keys.astype(np.int64)),
            "document": torch.from_numpy(hashes.astype(np.int64)),
        }
        place, layer = np.divmod(numbers, len(self.layers))
        if len(self.layers) > 1:
            batch["layer"] = torch.from_numpy(layer)
        if (activations := self.activations) is not None:
            batch["activation"] = torch.from_numpy(activations[numbers])
            if self.wrong is not None:
                wrong = self.wrong.of(place, keys) * len(self.layers) + layer[:, None]
                batch["wrong"] = torch.from_numpy(activations[wrong])  # [B, W, D]
        if self.facts is not None:
            document = self.pieces.document[piece]
            attributes = seen_words(self.facts.attributes[document], rows, position)
            batch["group"] = torch.from_numpy(self.facts.group[document])
            batch["attributes"] = torch.from_numpy(attributes)
        return batch


def seen_words(words: np.ndarray, rows: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return the words [B, A] int64 that occur in rows [B, T] before positions [B] and differ from
    the current token, else -1."""
    is_before = np.arange(rows.shape[1]) < position[:, None]  # [B, T]
    has_stood = ((words[:, :, None] == rows[:, None]) & is_before[:, None]).any(2)
    current = rows[np.arange(len(rows)), position]
    return np.where(has_stood & (words != current[:, None]), words, NONE)


def context_of(tokenizer: TextTokenizer, ids: np.ndarray, position: int) -> dict[str, str]:
    """Return the text `before`, at (`token`) and `after` a position of a document with token ids
    [n]; \ufffd stands for an incomplete character."""
    places = {
        "before": slice(max(0, position - AROUND), position),
        "token": slice(position, position + 1),
        "after": slice(position + 1, position + 1 + AROUND),
    }
    decode = tokenizer.decode_continuation
    return {name: decode(ids[at], skip_special_tokens=False) for name, at in places.items()}


class ActivationDataModule(DocumentsDataModule):
    """Serves stored activations, or documents whose activations the lens computes in each step.

    Args:
        activations: folder of a store, or a list of folders, one per layer; `None` computes
            the activations in each step, from the documents named here or from demo stories.
        predict_output: explanations of the test part as jsonl; with a store also parquet with the
            activations. `None` writes `explanations.jsonl` to the run folder.
        documents: files, tokenizer, positions and split if there is no store, see
            `DocumentsDataModule`; a store brings its own.

    Plan, samples and draws are the same with and without a store of the same documents. Without
    one, statistics are taken from the first training activations only; if these are all, losses
    are the same, too.

    Raises:
        ValueError: there are files beside a store, or parquet is asked for with several stores.
    """

    default_output = "explanations.jsonl"
    output_suffixes = (*JSON_SUFFIXES, ".parquet")

    def __init__(
        self, activations: Files = None, predict_output: str | None = None, **documents: Any
    ) -> None:
        super().__init__(**documents)
        self.folders = [Path(folder).expanduser() for folder in paths(activations)]
        self.stores: list[ActivationStore] = []
        self.predict_output = predict_output
        if len(self.folders) > 1 and str(predict_output).lower().endswith(".parquet"):
            raise ValueError(
                f"data.predict_output is {predict_output}, and such a file holds one layer alone; "
                "name a jsonl file, or one store with data.activations and a lens of its layer."
            )
        if self.folders and any(self.files.values()):
            raise ValueError(
                f"data.activations is {activations}, whose documents were read when it was dumped; "
                "leave data.train_files and the like out, or dump the activations of these files."
            )

    def open_store(self) -> TokenStore:
        """Return the store of tokens, or of activations if named (the first layer's of several)."""
        if not self.folders:
            return super().open_store()
        self.stores = open_stores(self.folders)
        store = self.stores[0]
        self.context_length, self.positions = store.context_length, store.positions
        return store

    def build(self, stage: Stage) -> ActivationDataset:
        """Return the dataset of one stage; ValueError if its part has no activations."""
        part = PART_NAMES.index("test" if stage == "predict" else stage)
        pieces, piece, position = self.places(part)
        check_activations(len(piece), PART_NAMES[part])
        layers = self.model.options.get("layers", [0])
        fingerprint = "-".join(one.fingerprint for one in self.stores or [self.store])
        return ActivationDataset(
            pieces,
            piece,
            position,
            facts=self.facts(part) if stage != "train" else None,
            fingerprint=f"{fingerprint}-{part}-{len(piece)}-{position.sum()}",
            seed=self.seed if stage == "train" else 0,
            pairs_others=stage in ("test", "predict"),
            num_wrong=self.model.options.get("num_wrong", 0) if stage == "train" else 0,
            layers=[one.subject.layer for one in self.stores] or layers,
            stores=self.stores,
        )

    def places(self, part: int) -> tuple[Pieces, np.ndarray, np.ndarray]:
        if not self.folders:
            return super().places(part)
        pieces = Pieces(self.store, part, self.context_length)
        return pieces, self.store.array(part, "piece"), self.store.array(part, "position")

    def facts(self, part: int) -> DocumentFacts:
        if not self.folders:
            return super().facts(part)
        name = PART_NAMES[part]
        attributes, group = (self.store.array(part, kind) for kind in ("attributes", "group"))
        names, groups = (self.store.schema[kind][name] for kind in ("attributes", "groups"))
        return DocumentFacts(names, attributes, group, groups)

    def audit(self) -> Audit:
        """Return contents and faults of the documents, or of the store, which is read whole;
        ValueError if it is damaged."""
        audit = super().audit()
        if not self.folders:
            return audit
        for store in self.stores:
            store.check_files(reads_all=True)
            subject, files = store.subject, store.schema["files"]
            size = sum(facts["bytes"] for facts in files.values())
            block = f"block {subject.layer} of 0 to {subject.num_layers - 1}, {subject.site}"
            width = f"{subject.hidden_size:,} features, {store.schema['dtype']}"
            written = f"{len(files)} files, {size / 1e6:,.1f} MB, hold what was written"
            audit.notes.append(("subject", f"{block}, {width}; digest {subject.digest}"))
            audit.notes.append(("files", written))
        return audit

    def training_sample(
        self, most: int = STATISTICS_SAMPLES, index: int = 0
    ) -> Iterator[dict[str, Any]]:
        """Yield batches of the first `most` training activations, at the layer with this index;
        they are the same in every run."""
        dataset: Any = self.datasets.get("train") or self.build("train")
        every = len(dataset.layers)
        places = np.arange(min(len(dataset.lengths) // every, most))
        for first in range(0, len(places), STATISTICS_BATCH):
            yield dataset.batch(places[first : first + STATISTICS_BATCH] * every + index, 0)

    def statistics(
        self, index: int, activation_of: Callable[[Any], Tensor]
    ) -> ActivationStatistics:
        """Return the training part's statistics at the layer with this index, from the store or
        from the first activations, which `activation_of` computes, [B, D] of a batch."""
        if self.stores:
            return self.stores[index].statistics

        def chunks() -> Iterator[Chunk]:
            for batch in self.training_sample(index=index):
                position = batch["position"]
                token = batch["input_ids"].gather(1, position[:, None])[:, 0]
                with one_thread():
                    activation = activation_of(batch).cpu().double()
                yield activation.numpy(), token.numpy(), position.numpy()

        return statistics_of(chunks())

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write one line or row per activation, atomically, from the `results` of the module's
        `predict_step`; a parquet file also has the activations, read in pieces from the store.

        Raises:
            FileExistsError: the file exists.
            ValueError: a parquet file is to have activations that do not come from a store.
        """
        dataset: Any = self.datasets["predict"]
        controls = self.model.options["controls"]

        def line(number: int) -> dict[str, Any]:
            values = {name: result[number] for name, result in results.items()}
            return dataset.explanation_line(number, values, controls)

        if path.suffix.lower() != ".parquet":
            with new_file(path, way_out=OTHER_OUTPUT) as file:
                for number in range(len(results["error"])):
                    file.write(json.dumps(line(number), ensure_ascii=False) + "\n")
            return
        if not self.stores:
            raise ValueError(
                f"{path.name} would hold activations, which are computed in each step here and not "
                "kept; dump them and name the store with data.activations, or write jsonl."
            )
        vectors, store = dataset.activations, self.stores[0]

        def pieces() -> Iterator[dict[str, Any]]:
            for first in range(0, len(vectors), interchange.ROWS):
                last = min(first + interchange.ROWS, len(vectors))
                lines = [line(number) for number in range(first, last)]
                columns = {name: [one[name] for one in lines] for name in IN_PARQUET}
                yield {interchange.COLUMN: vectors[first:last], **columns}

        subject = store.subject
        more = {"subject": subject.digest, "site": subject.site, "store": store.fingerprint}
        facts = {"d_model": subject.hidden_size, "layer_index": subject.layer, "unisono": more}
        interchange.write_vectors(path, facts, pieces(), OTHER_OUTPUT)

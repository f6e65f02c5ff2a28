"""Stores of activations, memory-mapped beside their tokens; their dump and their statistics.

Statistics are summed in float64 by one thread in a fixed order, so that no bit depends on devices.
Shapes: N activations of a part, D features, v tokens, T positions, K components; in a dump P or R
pieces that are read, and K the most positions of a piece.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datamodules.activations.documents import (
    DocumentsDataModule,
    Pieces,
    PositionRule,
    check_activations,
)
from datamodules.core.batches import SubjectFacts
from datamodules.core.planned import PlannedDataset, Stage
from datamodules.core.store import ArrayFile, content_digest, digest_of, naming, replacing
from datamodules.files.splitting import PART_NAMES, TRAIN
from datamodules.text.store import TokenStore

NUM_COMPONENTS = 32
SCHEMA, STATISTICS = "schema.json", "statistics.npz"
STORE_VERSION = 3
CHUNK = 4096  # activations summed at once; another value changes the last bits
NO_POSITION = -1
OF_ONE_STORE = ("fingerprint", "files", "norms")  # keys of a schema that differ between layers
COPY_AGAIN = "copy the store again, or dump the activations again"


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch with one thread: how many threads share a matrix product changes the order of its
    sums, and so the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class ActivationStatistics:
    """Statistics of the training part."""

    mean: np.ndarray  # [D] float64
    unit_mean: np.ndarray  # [D] float64, mean of the activations at length 1
    variance: float  # mean over features of their variances
    norms: tuple[float, float, float]  # mean, standard deviation and maximum of the lengths
    token_ids: np.ndarray  # [v] int64, current tokens that occur, ascending
    token_means: np.ndarray  # [v, D] float32, mean activation at each of these tokens
    position_means: np.ndarray  # [T, D] float32; `mean` for positions that do not occur
    components: np.ndarray  # [K, D] float32, principal components, by descending variance


Chunk = tuple[np.ndarray, np.ndarray, np.ndarray]  # activations [n, D], tokens [n], positions [n]


def statistics_of(chunks: Iterable[Chunk]) -> ActivationStatistics:
    """Return the statistics of one or more chunks of activations, whose bounds must be the same in
    every run.

    A first guess of the mean is subtracted before summing, since squares of large numbers would
    swallow small differences.

    Raises:
        ValueError: an activation is not finite.
    """
    count, lengths, guess = 0, [0.0, 0.0, 0.0], np.zeros(0)  # lengths: sum, sum of squares, maximum
    total = unit_total = products = guess
    of_token: dict[int, tuple[int, np.ndarray | float]] = {}  # count and sum
    of_position: dict[int, tuple[int, np.ndarray | float]] = {}
    for activations, tokens, positions in chunks:
        if not np.isfinite(activations).all():
            raise ValueError(
                "the subject's activations hold values that are no finite numbers; its weights are "
                "damaged, or trainer.precision is too narrow for them: take 32-true."
            )
        x = activations.astype(np.float64)
        if not count:
            guess, width = x.mean(0), x.shape[1]
            total, unit_total, products = np.zeros(width), np.zeros(width), np.zeros((width, width))
        count += len(x)
        norms = np.sqrt((x * x).sum(1))
        lengths[0] += float(norms.sum())
        lengths[1] += float((norms * norms).sum())
        lengths[2] = max(lengths[2], float(norms.max()))
        unit_total += (x / np.maximum(norms, 1e-12)[:, None]).sum(0)
        x = x - guess
        total += x.sum(0)
        with one_thread():
            copied = torch.tensor(x)  # a copy: memory alignment changes bits, too
            products += (copied.T @ copied).numpy()
        for keys, known in ((tokens, of_token), (positions, of_position)):
            order = np.argsort(keys, kind="stable")
            distinct, starts, numbers = np.unique(
                keys[order], return_index=True, return_counts=True
            )
            sums = np.add.reduceat(x[order], starts)
            for key, number, more in zip(distinct.tolist(), numbers.tolist(), sums, strict=True):
                before, so_far = known.get(key, (0, 0.0))
                known[key] = (before + number, so_far + more)
    above, length = total / count, lengths[0] / count
    covariance = products / count - np.outer(above, above)
    with one_thread():
        vectors = torch.linalg.eigh(torch.tensor(covariance)).eigenvectors.numpy()
    components = vectors[:, ::-1][:, :NUM_COMPONENTS].T
    # The sign of a component is arbitrary: make its largest entry positive.
    largest = components[np.arange(len(components)), np.abs(components).argmax(1)]
    components = components * np.sign(largest)[:, None]
    position_means = np.tile(guess + above, (max(of_position) + 1, 1))
    for position, (number, so_far) in of_position.items():
        position_means[position] = guess + so_far / number
    # Filled row by row, as a float64 copy for a large vocabulary would double the memory.
    token_means = np.empty((len(of_token), len(above)), np.float32)
    for row, token in enumerate(sorted(of_token)):
        number, so_far = of_token[token]
        token_means[row] = guess + so_far / number
    return ActivationStatistics(
        mean=guess + above,
        unit_mean=unit_total / count,
        variance=float(np.trace(covariance)) / len(above),
        norms=(length, max(0.0, lengths[1] / count - length**2) ** 0.5, lengths[2]),
        token_ids=np.array(sorted(of_token), np.int64),
        token_means=token_means,
        position_means=position_means.astype(np.float32),
        components=components.astype(np.float32),
    )


class ActivationStore(TokenStore):
    """Folder of activations, as made by `ActivationDumpDataModule`, opened read-only.

    Raises:
        FileNotFoundError: the folder or its schema does not exist.
        ValueError: the store has another version, or is damaged.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / SCHEMA
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} holds no {SCHEMA}, so it is no complete store of activations; make it "
                "with: unisono predict --config consistency_lens/dump.yaml "
                f"--data.predict_output={folder}, which goes on where it was interrupted."
            )
        super().__init__(folder)
        try:
            self.schema: dict[str, Any] = json.loads(path.read_text("utf-8"))
            version = self.schema["version"]
            self.check_files()
        except (json.JSONDecodeError, KeyError) as error:
            raise ValueError(f"{path} is damaged ({error}); {COPY_AGAIN}.") from error
        if version != STORE_VERSION:
            raise ValueError(
                f"{path} has version {version}, and this program reads version {STORE_VERSION}; "
                "dump the activations again."
            )
        self.subject = SubjectFacts(**self.schema["subject"])
        self.positions = PositionRule(**self.schema["positions"])
        self.context_length: int = self.schema["context_length"]

    def check_files(self, reads_all: bool = False) -> None:
        """Raise ValueError for files that are missing or whose size (or content, with `reads_all`)
        differs from the schema."""
        bad = []
        for name, facts in self.schema["files"].items():
            path = self.folder / name
            is_sound = path.is_file() and path.stat().st_size == facts["bytes"]
            if not is_sound or (reads_all and content_digest(path) != facts["digest"]):
                bad.append(name)
        if bad:
            raise ValueError(
                f"{self.folder} is damaged: {len(bad)} files are gone or do not hold what was "
                f"written ({', '.join(bad[:3])}); {COPY_AGAIN}."
            )

    @property
    def fingerprint(self) -> str:
        """Hex digest of the tokens, the subject and the positions."""
        return self.schema["fingerprint"]

    @cached_property
    def statistics(self) -> ActivationStatistics:
        with np.load(self.folder / STATISTICS, allow_pickle=False) as file:
            values = {**file}
        variance, norms = float(values["variance"]), tuple(values["norms"].tolist())
        return ActivationStatistics(**{**values, "variance": variance, "norms": norms})

    def array(self, part: int, kind: str) -> np.ndarray:
        """Return one array of a part, memory-mapped: `activations` [N, D], `piece` [N], `position`
        [N], `attributes` [documents, A] or `group` [documents]."""
        return self.arrays[f"{PART_NAMES[part]}.{kind}"]


def open_stores(folders: Sequence[Path]) -> list[ActivationStore]:
    """Return the stores sorted by layer.

    Raises:
        FileNotFoundError, ValueError: a folder is not a store, or is damaged.
        ValueError: two stores have the same layer, or differ in more than the layer.
    """
    stores = sorted((ActivationStore(one) for one in folders), key=lambda one: one.subject.layer)
    way_out = "dump all layers in one reading with unisono predict … --model.layers=[…]"
    for one, other in pairwise(stores):
        if one.subject.layer == other.subject.layer:
            raise ValueError(
                f"{one.folder} and {other.folder} both hold layer {one.subject.layer}; name each "
                f"layer's store once in data.activations, or {way_out}."
            )
        facts, others = (
            {**store.schema, "subject": store.schema["subject"] | {"layer": None}}
            for store in (one, other)
        )
        if changed := [n for n in facts if n not in OF_ONE_STORE and facts[n] != others[n]]:
            raise ValueError(
                f"{one.folder} and {other.folder} differ in {', '.join(changed)}, and the stores "
                f"of a lens over several layers may differ in the layer alone; {way_out}."
            )
    return stores


class LayeredActivations:
    """Memory-mapped activations of L layers, [N, D] each, indexed as one array [N * L, D].

    Sample i is activation i // L at layer i % L, with ascending layers, so that any leading part
    of a test covers all layers.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = arrays

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        """Return [..., D] of samples [...]."""
        place, layer = np.divmod(numbers, len(self.arrays))
        activations = np.empty((*numbers.shape, self.arrays[0].shape[1]), self.arrays[0].dtype)
        for index, one in enumerate(self.arrays):
            activations[layer == index] = one[place[layer == index]]
        return activations


class DumpDataset(PlannedDataset):
    """The pieces of all parts that have activations, part by part.

    A sample is a piece up to its last position; tokens behind it change no activation.
    `positions` are for each part the piece [n] and the position [n] of its activations.
    """

    def __init__(self, parts: list[Pieces], positions: list[list[np.ndarray]]) -> None:
        self.parts, self.positions = parts, positions
        counted = [np.unique(piece, return_counts=True) for piece, _ in positions]
        self.piece = [piece for piece, _ in counted]  # pieces that have activations
        self.first = np.cumsum([0, *map(len, self.piece)])
        counts = np.concatenate([counts for _, counts in counted])
        is_drawn = np.arange(counts.max(initial=1)) < counts[:, None]  # [P, K]
        self.drawn = np.full(is_drawn.shape, NO_POSITION)
        self.drawn[is_drawn] = np.concatenate([position for _, position in positions])
        self.lengths = self.drawn.max(1, initial=NO_POSITION) + 1
        self.target_counts = {}
        content = hashlib.sha256(parts[0].store.fingerprint.encode())
        for values in (self.first, *self.piece, self.drawn):
            content.update(values.tobytes())
        self.fingerprint = content.hexdigest()[:32]

    def batch(self, numbers: np.ndarray, epoch: int) -> dict[str, Any]:
        """Return input_ids [R, T] and positions [R, K], int64, of samples [R]."""
        lengths = self.lengths[numbers]
        ids = np.zeros((len(numbers), int(lengths.max())), np.int64)
        part = np.searchsorted(self.first, numbers, side="right") - 1
        for one in np.unique(part).tolist():
            rows = np.flatnonzero(part == one)
            pieces = self.piece[one][numbers[rows] - self.first[one]]
            tokens = self.parts[one].rows(pieces, lengths[rows])
            ids[rows, : tokens.shape[1]] = tokens
        return {
            "input_ids": torch.from_numpy(ids),
            "positions": torch.from_numpy(self.drawn[numbers]),
        }

    def chunks(self, part: int, activations: np.ndarray) -> Iterator[Chunk]:
        """Yield the activations [n, D] of a part in order, from those of all pieces [P, K, D], with
        current tokens [n] and positions [n]."""
        pieces, (piece, position) = self.parts[part], self.positions[part]
        first, end = self.first[part : part + 2]
        row, slot = np.nonzero(self.drawn[first:end] != NO_POSITION)
        for start in range(0, len(piece), CHUNK):
            here = slice(start, start + CHUNK)
            tokens = pieces.stream.tokens[pieces.starts[piece[here]] + position[here]]
            chunk = activations[first + row[here], slot[here]]
            yield chunk, tokens.astype(np.int64), position[here]


class ActivationDumpDataModule(DocumentsDataModule):
    """Serves every document of every part to `predict`, and writes their activations to a store.

    Until the store is complete the activations are on disk three times: as written by each device,
    put in order, and in the store. Memory holds few of them at a time.

    Args:
        predict_output: folder of the store; `None` is `activations` in the run folder.
        documents: files, tokenizer, positions and split, see `DocumentsDataModule`.
    """

    default_output = "activations"

    def __init__(self, predict_output: str | None = None, **documents: Any) -> None:
        super().__init__(**documents)
        self.predict_output = predict_output

    def setup(self, stage: str) -> None:
        if stage != "predict":
            raise ValueError("a dump only predicts; run unisono predict.")
        super().setup(stage)

    def build(self, stage: Stage) -> DumpDataset:
        places = [self.places(part) for part in range(len(PART_NAMES))]
        check_activations(len(places[TRAIN][1]), PART_NAMES[TRAIN])
        return DumpDataset([pieces for pieces, *_ in places], [drawn for _, *drawn in places])

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write the store, or a folder with one store per layer, from the `results` of
        `LitSubject.predict_step`.

        Raises:
            FileExistsError: the folder exists.
            ValueError: an activation is not finite.
            OSError: the disk is full; the folder is then not created.
        """
        subject: SubjectFacts = self.model.options["subject"]
        if (layers := self.model.options.get("layers")) is None:
            self.write_store(results["activations"], path, subject)
            return
        with naming(path), replacing(path, is_new=True) as unfinished:
            unfinished.mkdir()
            for layer in layers:
                facts = replace(subject, layer=layer)
                activations = results[f"activations-{layer}"]
                self.write_store(activations, unfinished / f"layer-{layer}", facts)

    def write_store(self, activations: np.ndarray, path: Path, subject: SubjectFacts) -> None:
        """Write one layer's store with its activations [P, K, D]; see `write_predictions`."""
        dataset = self.datasets["predict"]
        assert isinstance(dataset, DumpDataset)
        facts = {name: self.facts(part) for part, name in enumerate(PART_NAMES)}
        with naming(path), replacing(path, is_new=True) as unfinished:
            unfinished.mkdir()  # with the modes of the user's umask
            for file in self.store.folder.iterdir():
                shutil.copyfile(file, unfinished / file.name)
            for part, (name, of_part) in enumerate(facts.items()):
                piece, position = dataset.positions[part]
                np.save(unfinished / f"{name}.piece.npy", piece)
                np.save(unfinished / f"{name}.position.npy", position)
                np.save(unfinished / f"{name}.attributes.npy", of_part.attributes)
                np.save(unfinished / f"{name}.group.npy", of_part.group)
                # Written sequentially, not through a memory map: a full disk then raises an error
                # instead of ending the process by a signal.
                row = (unfinished / f"{name}.activations.npy", activations.dtype)
                with ArrayFile(*row, activations.shape[-1:]) as array:
                    for chunk, _, _ in dataset.chunks(part, activations):
                        array.add(chunk)
            statistics = statistics_of(dataset.chunks(TRAIN, activations))
            np.savez(unfinished / STATISTICS, **vars(statistics))
            facts_of_all = {
                "subject": asdict(subject),
                "tokens": self.store.fingerprint,
                "positions": asdict(self.positions),
                "context_length": dataset.parts[TRAIN].context_length,
            }
            schema = {
                **facts_of_all,
                "fingerprint": digest_of(facts_of_all),
                "version": STORE_VERSION,
                "dtype": str(activations.dtype),
                "tokenizer": self.store.tokenizer.digest,
                "norms": dict(zip(("mean", "deviation", "largest"), statistics.norms, strict=True)),
                "num_documents": {name: len(one.group) for name, one in facts.items()},
                "num_activations": {
                    name: len(dataset.positions[part][0]) for part, name in enumerate(PART_NAMES)
                },
                "attributes": {name: one.names for name, one in facts.items()},
                "groups": {name: one.group_names for name, one in facts.items()},
                "files": {
                    file.name: {"bytes": file.stat().st_size, "digest": content_digest(file)}
                    for file in sorted(unfinished.iterdir())
                },
            }
            text = json.dumps(schema, indent=1, sort_keys=True)
            (unfinished / SCHEMA).write_text(text + "\n", encoding="utf-8")

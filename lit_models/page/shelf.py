"""Runs and models that the page shows, and search in a collection. Torch is imported only where it
is needed."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from glob import iglob
from importlib import import_module
from os.path import expanduser
from pathlib import Path
from typing import Any, NamedTuple

from datamodules.core.store import cache_root
from lit_models.config_files import newest_config, read_config
from lit_models.errors import UsageError

MOST_ASKED = 64  # queries that an index is tuned by


class Model(NamedTuple):
    """A trained module: name of its run or file, name of its class, path of its weights, and its
    run folder, `None` for weights without a run."""

    name: str
    kind: str
    weights: Path
    run: Path | None = None


class Shelf:
    """Runs and models of a place: a run folder, a folder of runs, an exported one or a checkpoint.
    Only `place`, `also` and the cache are read. Modules compute in one thread for all visitors.
    UsageError: a place does not exist or holds none of these."""

    uploads: Path  # temporary folder for the files of visitors

    def __init__(self, place: Path, also: Sequence[Path] = ()) -> None:
        if lacking := [path for path in (place, *also) if not path.exists()]:
            raise UsageError(f"there is no {lacking[0]}; name a run folder such as runs/demo.")
        self.place = place.resolve()
        self._readable = [path.resolve() for path in (place, *also, cache_root())]
        self._worker = ThreadPoolExecutor(1, "model")
        self._held: dict[Any, Any] = {}  # key -> time of its file, value
        self._alone: list[Model] = []  # if the place holds no run
        if not self.runs():
            from lit_models.run_files import read_checkpoint

            try:
                content = read_checkpoint(self.place, mmap=True, every_byte=False)
                kind = content["hyper_parameters"]["_class_path"].rpartition(".")[2]
            except (KeyError, OSError, ValueError) as error:
                raise UsageError(
                    f"{place} holds no run, no exported folder and no checkpoint; a fit writes a "
                    f"run: unisono fit --config occupation_coder/demo.yaml ({error})"
                ) from error
            self._alone = [Model(self.place.stem, kind, self.place)]

    def runs(self) -> dict[str, Path]:
        """Return name -> folder of every run that exists now."""
        ledgers = [f"{'*/' * depth}ledger.jsonl" for depth in range(4)]
        runs = [path.parent for names in ledgers for path in sorted(self.place.glob(names))]
        top = self.place.parent if self.place in runs else self.place
        return {run.relative_to(top).as_posix(): run for run in runs}

    def models(self, *kinds: str) -> dict[str, Model]:
        """Return name -> model of these classes, or all: the best of each run, else its last."""
        models = list(self._alone)
        for name, run in self.runs().items():
            files = [run / "checkpoints" / file for file in ("best.ckpt", "last.ckpt")]
            with suppress(FileNotFoundError, KeyError, TypeError, ValueError):  # shown by its view
                path = newest_config(run)
                config = self.once(path, path, read_config, path)
                kind = config["model"]["class_path"].rpartition(".")[2]
                models += [Model(name, kind, path, run) for path in files if path.exists()][:1]
        return {model.name: model for model in models if not kinds or model.kind in kinds}

    async def compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function in the thread in which modules compute, and return its result."""
        return await asyncio.wrap_future(self._worker.submit(function, *arguments))

    async def module(self, model: Model) -> Any:
        """Return the module of a model in eval mode, loaded again only if its weights change."""
        return await self.compute(self.once, model.weights, model.weights, self._module, model)

    async def data(self, model: Model) -> Any:
        """Return the datamodule that a model was trained with; it is built once and not set up."""
        return await self.compute(self.once, model.run, None, self._data, model)

    def once(self, key: Any, file: Path | None, make: Callable[..., Any], *arguments: Any) -> Any:
        """Return the cached value of a key, made anew if `file` changes; runs in `compute`."""
        when = file and file.stat().st_mtime_ns
        if key not in self._held or self._held[key][0] != when:
            self._held[key] = when, make(*arguments)
        return self._held[key][1]

    def _check(self, model: Model, values: Any) -> None:
        """Raise ValueError if values of an untrusted file name a path not given to this page."""
        if isinstance(values, dict):
            values = [v for k, v in values.items() if k not in ("separator", "targets", "freeze")]
        if isinstance(values, list):
            for value in values:
                self._check(model, value)
        elif isinstance(values, str):
            for path in iglob(expanduser(values), recursive=True):
                if not any(Path(path).resolve().is_relative_to(p) for p in self._readable):
                    raise ValueError(
                        f"{model.name} needs {path}, which lies outside of what this page was "
                        f"given; start it again with --also {path}"
                    )

    def _module(self, model: Model) -> Any:
        from lit_models.run_files import read_checkpoint
        from lit_models.training import ExactModule

        self._check(model, read_checkpoint(model.weights, mmap=True)["hyper_parameters"])
        return ExactModule.from_exported(model.weights).requires_grad_(False)

    def _data(self, model: Model) -> Any:
        from lit_models.training.hyperparameters import UNTRUSTED

        if model.run is None:
            raise ValueError(f"{model.name} came without its data; show the folder of its run.")
        config = read_config(newest_config(model.run))
        UNTRUSTED.check_spec(model.run, "data", config["data"])
        self._check(model, config["data"])
        return import_module("lit_models.cli").built(config, "data")


class Finder:
    """Search in a collection by BM25, by a LitRetriever, which encodes the collection here, and by
    both fused, or by a LitRanker. `grades`: text of a judged query -> document number -> grade."""

    def __init__(self, module: Any, data: Any) -> None:
        from datamodules.search.candidates import FIRST_DEPTH, Bm25Options, open_bm25

        self.module, self.data, self.documents = module, data, data.collection.documents
        self.depth = FIRST_DEPTH
        self.bm25 = open_bm25(data.collection, data.bm25 or Bm25Options())
        self.grades: dict[str, dict[int, float]] = {}
        for queries in (data.judged("validation", True), data.judged("test", True)):
            for place, query in enumerate(queries):
                self.grades[query.text] = dict(zip(*queries.judged(place), strict=True))
        if hasattr(module, "encode"):
            vectors = module.encode([document.whole for document in self.documents], False)
            queries = [query.text for query in data.collection.queries][:MOST_ASKED]
            self.index = module.index(vectors, module.encode(queries, True), self.depth)

    def find(self, query: str) -> dict[str, Any]:
        """Return search method -> its ten best documents, as the datamodule shows them."""
        results: dict[str, Any] = {"BM25": (first := self.bm25.search([query], self.depth))}
        if hasattr(self.module, "encode"):
            results["Retriever"] = own = self.module.search([query], self.index, self.depth)
            if (weight := self.module.fusion_weight()) is not None:
                results[f"Fused, BM25 weighs {weight:g}"] = self.module.fuse(own, first)
        elif size := min(self.data.candidates.top, (first.documents >= 0).sum()):
            numbers, prior = (values[0, :size] for values in first)
            texts = [self.documents[number].whole for number in numbers]
            scores = self.module.rank(query, texts, prior if self.module.adds_prior else None)
            order = scores.argsort(descending=True).tolist()
            results["Re-ranked"] = numbers[None, order], scores[None, order]
        for way, hits in results.items():
            best = zip(*(values[0, :10].tolist() for values in hits), strict=True)
            results[way] = [self.data.shown(query, *hit) for hit in best if hit[0] >= 0]
        return results

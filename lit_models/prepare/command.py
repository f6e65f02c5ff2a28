"""The command `prepare`, which runs a recipe as stages of datatrove on one machine or many."""

import inspect
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from datamodules.core.plan import check_range
from datamodules.core.store import digest_of, write_whole
from datamodules.files.documents import text_files
from datamodules.shards.remote import is_url, list_urls
from datamodules.tokenizers.text import TokenizerOptions
from lit_models.config_files import did_you_mean, find_config, near_names, read_config
from lit_models.errors import UsageError, say, usage_errors

# Keys of a recipe, explained in configs/prepare/text.yaml, with their default values.
RECIPE: dict[str, Any] = {
    "sources": [],
    "to": None,
    "text_column": "text",
    "filters": [],
    "near_duplicates": None,
    "tokenizer": {"kind": "bytes"},
    "tokens_per_shard": 1 << 28,
    "executor": {"kind": "local"},
}
TASKS = 64  # default on any machine, as it decides which documents share a shard
TOKENIZERS = ("bytes", "bpe", "folder")  # others need all texts, not a sample


def prepare(recipe: str, *, sources: list[str] | None = None, to: str | None = None) -> int:
    """Read, filter and tokenise texts on one machine or many, into shards that training reads.

    The same command resumes an interrupted preparation. At the end a table shows what each step
    dropped, as TO/audit.json does; TO/audit has a line on every dropped document.

    Args:
        recipe: a YAML file, such as prepare/text.yaml.
        sources: a file, pattern or folder of texts, in place of the recipe's; repeatable.
        to: folder of the shards, in place of the recipe's.

    Returns:
        0 if the shards are complete, or the jobs are submitted.

    Raises:
        UsageError: the recipe is not valid, or a package is missing.
        ValueError: a file cannot be read; the message names file and line.
        RuntimeError: tasks failed.
    """
    os.environ["TQDM_DISABLE"] = "1"  # read at import
    overrides = {name: value for name, value in (("sources", sources), ("to", to)) if value}
    with usage_errors():
        values = checked(recipe, read_config(find_config(recipe)) | overrides, RECIPE)
        try:
            preparation = Preparation(RECIPE | values)
        except ImportError as error:
            raise UsageError(f"{error}: pip install 'unisono[prepare]'.") from error
    return preparation.run()


def checked(place: str, values: dict[str, Any], known: Any) -> dict[str, Any]:
    """Return values if all their names are known; else a ValueError suggests the nearest."""
    for name in values:
        if name not in known:
            near = did_you_mean(near_names(name, known))
            raise ValueError(f"{place} has no `{name}`.{near} It has: {', '.join(known)}.")
    return values


def made(factory: Any, place: str, options: dict[str, Any] | None, **ours: Any) -> Any:
    """Return an instance of a datatrove class from the user's options and our own."""
    known = [name for name in inspect.signature(factory).parameters if name not in ours]
    return factory(**checked(place, options or {}, known), **ours)


class Preparation:
    """One recipe: its folder, its files, and an executor for each stage.

    Raises:
        ValueError: a value is not valid, or the folder belongs to another recipe.
        FileNotFoundError: a source does not exist.
        ImportError: a package is missing.
    """

    def __init__(self, recipe: dict[str, Any]) -> None:
        from lit_models.prepare.steps import SUFFIXES, Work

        if not recipe["sources"] or not recipe["to"] or is_url(recipe["to"]):
            raise ValueError(
                "name what is read with --sources=…, and a new folder with --to=…, on storage that "
                "all tasks share; what is in it may be copied to object storage afterwards."
            )
        self.to = Path(recipe["to"]).expanduser().absolute()
        named = [recipe["sources"]] if isinstance(recipe["sources"], str) else recipe["sources"]
        paths = text_files([name for name in named if not is_url(name)], "sources", SUFFIXES)
        sizes = {str(path.absolute()): path.stat().st_size for path in paths}
        for name in filter(is_url, named):
            sizes |= list_urls(name, SUFFIXES)
        self.options = dict(recipe["executor"])
        self.kind = self.options.pop("kind", "local")
        self.tasks = min(self.options.pop("tasks", TASKS), len(sizes))
        least = {"tasks": self.tasks, "tokens_per_shard": recipe["tokens_per_shard"]}
        check_range("prepare", 1, **least)
        options = {k: v for k, v in recipe["tokenizer"].items() if k != "sample_megabytes"}
        tokenizer = made(TokenizerOptions, "tokenizer", options)
        if (kind := tokenizer.kind) not in TOKENIZERS:
            raise ValueError(f"tokenizer.kind must be {', '.join(TOKENIZERS)}, got {kind}.")
        self.work = Work(self.to, recipe, tokenizer)
        self.executors = dict[str, Any]()
        for name, (pipeline, tasks) in self._stages(recipe, self.work).items():
            self.executors[name] = self._executor(name, pipeline, tasks)
        facts = {name: value for name, value in recipe.items() if name not in ("executor", "to")}
        facts |= {"sources": digest_of(sorted(sizes)), "executor.tasks": self.tasks}
        self._begin(facts, sizes)

    def _begin(self, facts: dict[str, Any], sizes: dict[str, int]) -> None:
        """Write the recipe and the sources into the folder, or compare them with those there."""
        path = self.to / "recipe.json"
        if not path.exists():
            if self.to.exists() and any(self.to.iterdir()):
                raise ValueError(f"{self.to} holds other files; name a new folder with --to.")
            # Large files first, dealt in turns, so that tasks have similar sizes.
            files = sorted(sizes.items(), key=lambda pair: (-pair[1], pair[0]))
            write_whole(self.to / "work" / "files.json", json.dumps(files))
            if self.work.options.kind != "bpe":
                self.work.write_tokenizer(iter(()))
            write_whole(path, json.dumps(facts, indent=1) + "\n")
        old = json.loads(path.read_text("utf-8"))
        changed = [name for name in facts if old[name] != facts[name]]
        for account in self.work.audit.glob("read/*.json"):
            for name, mark in json.loads(account.read_text("utf-8"))["files"]:
                size = sizes.get(name, mark)  # the mark of earlier versions
                if mark != size and mark != self.work.mark_of(name, size):
                    changed.append(name)
        if changed:
            raise ValueError(
                f"{self.to} was begun with another {' and '.join(changed)}; name a new folder with "
                "--to, or delete that one."
            )

    def _stages(self, recipe: dict[str, Any], work: Any) -> dict[str, tuple[list[Any], int]]:
        """Return steps and number of tasks of each stage, in order.

        If near-duplicates are looked for or a tokenizer is trained, the remaining texts are written
        and read again; otherwise one stage does everything.
        """
        from datatrove.pipeline import dedup, filters
        from datatrove.pipeline.writers import JsonlWriter

        from lit_models.prepare import steps

        own = {"Language": steps.Language, "WithoutTests": steps.WithoutTests}
        known = [name for name in dir(filters) if name.endswith("Filter") and name != "BaseFilter"]
        first, last = [work.read_files], [work.read_texts]
        for entry in recipe["filters"]:
            ((name, values),) = checked("filters", entry, [*own, *known]).items()
            factory = own.get(name) or getattr(filters, name)
            ours: dict[str, Any] = {"exclusion_writer": work.account(name)}
            if "language" in inspect.signature(factory).parameters:
                ours["language"] = steps.Words()
            first.append(made(factory, f"filters.{name}", values, **ours))
        is_trained, near = work.options.kind == "bpe", recipe["near_duplicates"]
        stages: dict[str, tuple[list[Any], int]] = {}
        if near is None and not is_trained:
            stages["tokenise"] = ([*first, work.tokenise], self.tasks)
        else:
            first.append(JsonlWriter(str(work.texts), compression="zstd"))
            stages["read"] = (first, self.tasks)
        if near is not None:
            config = made(dedup.MinhashConfig, "near_duplicates", near)
            folders = [f"{self.to}/work/{name}" for name in ("signatures", "pairs", "clusters")]
            first.append(dedup.MinhashDedupSignature(folders[0], config, steps.Words()))
            buckets = dedup.MinhashDedupBuckets(*folders[:2], config=config)
            stages["buckets"] = ([buckets], config.num_buckets)
            stages["clusters"] = ([dedup.MinhashDedupCluster(*folders[1:], config)], 1)
            last.append(dedup.MinhashDedupFilter(folders[2], work.account("near duplicates")))
        if is_trained:
            stages["tokenizer"] = ([work.train_tokenizer], 1)
        stages.setdefault("tokenise", ([*last, work.tokenise], self.tasks))
        return stages | {"finish": ([work.finish], 1)}

    def _executor(self, stage: str, pipeline: list[Any], tasks: int) -> Any:
        """Return datatrove's executor of one stage; on SLURM it waits for the stage before."""
        from datatrove import executor
        from loguru import logger

        from lit_models.prepare.steps import QuietExecutor

        kinds = {
            "local": QuietExecutor,
            "slurm": executor.SlurmPipelineExecutor,
            "ray": executor.RayPipelineExecutor,
        }
        checked("executor.kind", {self.kind: None}, kinds)
        options, ours = dict(self.options), {"pipeline": pipeline, "tasks": tasks}
        ours |= {"logging_dir": f"{self.to}/work/logs/{stage}", "depends": None}
        if self.kind == "slurm":
            before = next(reversed(self.executors.values()), None)
            ours |= {"depends": before, "job_name": f"prepare-{stage}"}
        if self.kind == "local":
            logger.disable("datatrove")
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per process
            options["workers"] = min(options.get("workers", os.cpu_count() or 1), tasks)
        return made(kinds[self.kind], "executor", options, **ours)

    def run(self) -> int:
        """Run the stages that are not complete; print the audit at the end."""
        begun = time.monotonic()
        if not (self.to / "manifest.json").exists():
            if self.kind == "slurm":
                self.executors["finish"].run()  # submits those before it, too
                say("The jobs are submitted; when they end, the same command shows the audit.")
                return 0
            for name, executor in self.executors.items():
                try:
                    executor.run()
                except (ValueError, OSError, RuntimeError) as error:  # raised by a task's process
                    kind = ValueError if isinstance(error, ValueError) else RuntimeError
                    raise kind(str(error)) from error
                if missing := executor.get_incomplete_ranks():
                    raise RuntimeError(
                        f"{len(missing)} of {executor.world_size} tasks of {name} failed; "
                        f"{self.to}/work/logs/{name} says why. The same command goes on."
                    )
                say(f"{name}: {executor.world_size} tasks, {time.monotonic() - begun:.1f} s")
        for folder in (self.to / "work").iterdir():  # with texts and signatures
            if folder.is_dir() and folder.name != "logs":
                shutil.rmtree(folder)
        audit = json.loads((self.to / "audit.json").read_text("utf-8"))
        print("\n".join([*table(audit), f"written to {self.to}"]))
        return 0


def table(audit: dict[str, Any]) -> list[str]:
    """Return lines of 80 columns: documents and bytes that were read, dropped and kept."""

    def line(name: str, values: dict[str, Any]) -> str:
        return f"{name:50.50}{values['documents']:>16,}{values['bytes'] / 1e6:>13,.1f}"

    read, kept = audit["read"], audit["kept"]
    lines = [f"{'':50}{'documents':>16}{'MB':>13}", line(f"read, {read['files']:,} files", read)]
    for step, reasons in audit["dropped"].items():
        lines += [f"dropped by {step}{'' if reasons else ': none'}"]
        for reason, counts in reasons.items():
            lines += [line(f"  {reason}", counts), f"    {counts['examples'][0]}"[:79]]
    return [*lines, line(f"left, {kept['tokens']:,} tokens in {kept['shards']:,} shards", kept)]

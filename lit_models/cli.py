"""LightningCLI behind `unisono fit|validate|test|predict`, independent of the model families."""

import functools
import json
import logging
import multiprocessing
import os
import re
import shlex
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc import locate
from types import FrameType
from typing import Any, ClassVar, Literal, NoReturn

import torch
import torch.distributed as dist
import yaml
from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import ModelSummary, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from datamodules.core.planned import PlannedDataModule
from datamodules.core.store import digest_of, write_whole
from lit_models import config_files, run_files
from lit_models.commands.report import shown
from lit_models.engines import complete_rendezvous, in_launched_world
from lit_models.errors import Refusal, UsageError, say, say_first, screen, usage_errors
from lit_models.training import bitwise, checkpoints, default_callbacks, rules
from lit_models.training import run as runs
from lit_models.training.bitwise import BitwiseSum
from lit_models.training.dropout import ExactDropout
from lit_models.training.exact import ExactModule, follows_plan, missing_kinds
from lit_models.training.faults import REPEATED_WITHIN_S, REQUEUE_SIGNALS, USR1, Preemption
from lit_models.training.hyperparameters import StoredClasses, known_arguments
from lit_models.training.ledger import Ledger, ledger_of
from lit_models.training.memory import Rehearsal, choose_strategy
from lit_models.training.predictions import ErrorTable, PredictionWriter
from lit_models.training.rules import is_first_process
from lit_models.training.strategies import DEPRECATIONS, replicated, strategy_name

TRUST = "trust_checkpoint"
REQUEUE, INTERRUPTED = 75, 130  # EX_TEMPFAIL of sysexits.h; 128 + SIGINT
FORWARDED = (*REQUEUE_SIGNALS, signal.SIGINT)
NO_WEIGHTS = ("optimizer", "lr_scheduler")
NO_STEPS = "no step would be made: trainer.limit_train_batches, max_epochs or max_steps is 0."
NOISE = (
    *("💡 Tip", "GPU available", "TPU available: ", "HPU available: "),
    *("Checkpoint directory", "The number of training batches", "The `srun` command is available"),
    "You are using a CUDA device",  # runs.Topology decides on TF32
    *DEPRECATIONS,
)
BRIEF_HELP = """\
usage: unisono {} --config FILE [--config FILE …] [--KEY=VALUE …]

  --data.train_files=FILES           training files
  --data.predict_files=FILES         files to predict
  --data.columns.text=NAME           column with the text
  --data.global_batch_size=N         samples of a step, over all devices
  --model.pretrained=FOLDER          a Hugging Face model to start from
  --model.init_from=CKPT             a checkpoint of another run to start from
  --model.optimizer.lr=RATE          learning rate
  --trainer.max_epochs=N             passes over the data
  --trainer.devices=N                devices on each machine
  --trainer.strategy=NAME            ddp, ddp_spawn, fsdp
  --trainer.precision=NAME           default: bf16-mixed on GPUs, else 32-true
  --trainer.default_root_dir=FOLDER  run folder
  --ckpt_path=auto                   newest checkpoint; to evaluate, the best
  --seed_everything=N                random seed

--print_config shows all keys with their values, --help=all what they mean,
--model.help=CLASS, --data.help=CLASS those of a class. `unisono --help` lists
shipped configs. Other flags: lit_models/migration.md. Ray: lit_models/engines."""


class UnisonoParser(LightningArgumentParser):
    """Parser whose errors fit on one screen and suggest the nearest option."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise Refusal(message, getattr(ex, "subcommand_parser", None) or self) from ex


class GPUOfTask(CUDAAccelerator):
    """CUDA accelerator for clusters that show each task only its own GPU, always as number 0."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """Returns the indices unchanged; Lightning's method refuses duplicates."""
        return devices


@dataclass
class Options:
    """Options of a run besides model, data and trainer.

    Args:
        test_after_fit: Test the best checkpoint after fit.
        trust_checkpoint: Import any class that a checkpoint or an exported folder names.
        exactness: What is equal on any number of devices: gradients up to rounding, or all bits.
        exact_dropout: Key dropout masks by sample, so that any number of devices draws the same.
    """

    test_after_fit: bool = False
    trust_checkpoint: bool = False
    exactness: Literal["gradient", "bitwise"] = "gradient"
    exact_dropout: bool = False


class RunConfig(Callback):
    """Writes `config.yaml`, or `config-2.yaml`, … where the folder holds other configs already.

    Lightning's SaveConfigCallback refuses to start if the file exists, or overwrites it. This one
    writes when the run begins, so that a failed start leaves no file.
    """

    def __init__(self, text: str) -> None:
        self.text, self.is_written = text, False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_written or trainer.fast_dev_run or not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir)
        verb = trainer.state.fn.value if trainer.state.fn else "fit"
        stem = "config" if verb == "fit" else f"config-{verb}"
        number, path = 1, folder / f"{stem}.yaml"
        while path.exists() and path.read_text(encoding="utf-8") != self.text:
            number += 1
            path = folder / f"{stem}-{number}.yaml"
        write_whole(path, self.text)
        self.is_written = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":  # fit's sanity check precedes its training
            self.on_train_start(trainer, pl_module)

    on_test_start = on_predict_start = on_validation_start


class UnisonoCLI(LightningCLI):
    """Runs one verb in the run folder of `choice`; config paths in `argv` are resolved already. The
    checkpoint's hyperparameters are defaults, which config files and options override."""

    verdict: rules.Verdict  # set once the command line is parsed
    needs_checkpoint: ClassVar[bool] = True  # for an evaluation

    def __init__(self, argv: list[str], choice: runs.Run, is_stage: bool = False) -> None:
        self.argv, self.choice, self.is_stage = argv, choice, is_stage
        trust = config_files.given_value(argv, TRUST) is True
        self.classes = StoredClasses(trust, config_files.given_words(argv))
        path = choice.ckpt_path
        stored = ({}, None) if path is None else stored_values(path, self.classes)
        self.checkpoint_model, self.resumed_step = stored
        config_files.read_in_parsers()
        super().__init__(
            LightningModule,
            LightningDataModule,
            save_config_callback=None,  # RunConfig writes it
            parser_class=UnisonoParser,
            seed_everything_default=0,  # a random one would differ between ranks of torchrun
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
        )

    @property
    def options(self) -> Any:
        """The parsed options of the verb."""
        return self.config[self.argv[0]]

    @functools.cached_property
    def config_text(self) -> str:
        """The text of config.yaml; to be read once all options are final."""
        return self.verb_parser.dump(self.options, skip_none=False, skip_validation=True)

    @property
    def values(self) -> dict[str, Any]:
        """The options as plain values, as in config.yaml."""
        return dict(yaml.load(self.config_text, config_files.PLAIN_LOADER))

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        return super().init_parser(allow_abbrev=False, **kwargs)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Returns only the verb of this run, so that the other three parsers are not built."""
        return {self.argv[0]: LightningCLI.subcommands()[self.argv[0]]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(Options)
        self.verb_parser = parser
        if self.checkpoint_model:
            parser.set_defaults({"model": self.checkpoint_model})

    def parse_verb(self) -> None:
        """Parses with the verb's parser alone; the top-level parser would validate all again."""
        verb, *words = self.argv
        with usage_errors():
            if any(name == "print_config" for name, _ in config_files.options(words)):
                self.parser.parse_args(self.argv)  # prints and exits
            config = self.verb_parser.parse_args(words)
        for name, value in config_files.options(words):  # a dataclass field parses null as "None"
            *path, last = name.split(".")
            node: Any = config if value in ("null", "~") else None
            for part in path:
                node = node.get("init_args", node).get(part) if hasattr(node, "get") else None
            if hasattr(node, "get") and node.get(last) == "None":  # not a list, like callbacks
                node[last] = None
        self.config = Namespace(subcommand=verb, **{verb: config})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.parse_verb()
        if self.is_stage or self.argv[0] != "fit" or self.choice.ckpt_path is not None:
            return
        with usage_errors():
            started = start_values(self.options.model, self.classes)
        if started:  # weights need the network that they were trained in
            self.verb_parser.set_defaults({"model": started})
            self.parse_verb()

    def _parse_ckpt_path(self) -> None:
        """Reports options that differ from the checkpoint; Lightning's method would replace them.

        Raises:
            UsageError: the checkpoint is of another class, or an evaluation changes an option that
                the class lists in `settled_options`.
        """
        path, config, model = self.choice.ckpt_path, self.options.model, self.checkpoint_model
        if path is None:
            return
        trained = model.get("class_path")
        if trained and config.class_path.rpartition(".")[2] != trained.rpartition(".")[2]:
            raise UsageError(
                f"{path} is a checkpoint of {trained}, but --model is {config.class_path}. Take a "
                "checkpoint of that class, or leave --model out."
            )
        then, now = model.get("init_args", {}), config.as_dict().get("init_args") or {}
        settled = getattr(locate(config.class_path), "settled_options", ())
        # Only options that both have: exports and checkpoints of scripts do not store all of them.
        changed = [c for c in config_files.changes(then, now) if config_files.ABSENT not in c[1:]]
        refused = [c for c in changed if c[0].split(".")[0] in settled and self.argv[0] != "fit"]
        if refused:
            both = "; ".join(f"model.{n} {old} there and {new} here" for n, old, new in refused)
            raise UsageError(
                f"an evaluation computes what the weights of {path} were trained for, and other "
                f"values have no effect: {both}. Leave them out, or take its run's config.yaml."
            )
        for name, old, new in changed:
            say_first(f"model.{name}: the checkpoint has {old}, this run uses {new}")

    def before_instantiate_classes(self) -> None:
        config = self.options
        config.trainer.default_root_dir = self.choice.folder
        config.ckpt_path = None  # so that the saved config starts a new run
        with usage_errors():
            self.verdict = rules.check(config, os.environ, StrategyRegistry.available_strategies())
            *_, empty = known_arguments(None, self.values)
            if empty:
                raise ValueError(
                    f"{', '.join(empty)} must not be null: give a value, or leave it out."
                )
        self.config_dump = self.values  # for hyperparameters; Lightning's dump validates all again
        # A subject, which is never trained, has no loss.
        loss = getattr(locate(config.model.class_path), "training_terms", None)
        is_untrained = self.choice.ckpt_path is None and loss is not ExactModule.training_terms
        if self.subcommand != "fit" and self.needs_checkpoint and is_untrained:
            self.verdict.warnings.append(
                "no --ckpt_path: the model is used as it is built; --ckpt_path auto takes the "
                "newest checkpoint of this run"
            )
        if self.choice.notice:
            say_first(self.choice.notice)
        for line in self.verdict.warnings:
            say_first(screen(line, "warning"))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config, verdict = self.config_init[self.subcommand].trainer, self.verdict
        is_fit, strategy = self.subcommand == "fit", config.strategy
        name, _ = rules.strategy_of(self.options.trainer.strategy)
        is_bitwise = self.options.exactness == "bitwise"
        precision = config.precision
        if is_fit and precision is None:
            with usage_errors():
                precision = self._default_precision(name)
            kwargs["precision"] = precision
        if name == "auto":
            chosen = choose_strategy(verdict, self.model, is_fit, precision)
            if chosen is not None:
                strategy, line = chosen
                name = strategy_name(strategy) if isinstance(strategy, Strategy) else strategy
                say_first(line)
        if is_fit and is_bitwise:
            with usage_errors():
                bitwise.check_run(name, precision, verdict.world_size)
        kwargs["strategy"] = (isinstance(strategy, str) and replicated(strategy)) or strategy
        callbacks = config.callbacks or []
        callbacks = list(callbacks) if isinstance(callbacks, list) else [callbacks]
        # ExactDropout precedes the default callback Rehearsal, which then uses the run's dropout.
        own: list[Callback] = [ExactDropout()] if self.options.exact_dropout else []
        # Ranks compare this digest: another torch may compute other bits, and each rank chooses
        # by its own GPU a strategy or precision that is not given.
        facts = [self.config_text, runs.code_facts(), f"{torch.__version__} {name} {precision}"]
        choice = replace(self.choice, digest=digest_of(facts)[:12])
        own += [*self._default_callbacks(), runs.RunFolder(choice)]
        own += [runs.Topology(verdict.warnings, takes_tf32=is_fit and not is_bitwise)]
        has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        own += [] if has_bar or config.enable_progress_bar is False else [runs.ProgressLine()]
        own += [BitwiseSum()] if is_bitwise else []
        kwargs["logger"] = self._loggers((self.resumed_step or 0) if is_fit else None) or False
        kwargs |= {"accelerator": verdict.accelerator, "devices": verdict.devices}
        if isinstance(verdict.devices, list) and verdict.devices.count(0) > 1:
            kwargs["accelerator"] = GPUOfTask()
        if not any(isinstance(callback, ModelSummary) for callback in callbacks):
            kwargs["enable_model_summary"] = bool(config.enable_model_summary)  # else the banner's
        # The ledger precedes callbacks that ask it whether a step has ended; RunConfig comes last.
        callbacks = [*missing_kinds(own, callbacks), *callbacks, RunConfig(self.config_text)]
        trainer = super().instantiate_trainer(callbacks=callbacks, **kwargs)
        if config.limit_val_batches == 0:
            trainer.limit_val_batches = 0  # fast_dev_run sets 1, but there may be no data
        return trainer

    def _loggers(self, resumed_step: int | None) -> list[Logger]:
        """Returns the loggers of the config, and the default loggers of other classes; the defaults
        replace their rows after `resumed_step`, the step that a resumed training starts from."""
        config = self.config_init[self.subcommand].trainer.logger
        loggers = config if isinstance(config, list) else [config]
        loggers = [logger for logger in loggers if isinstance(logger, Logger)]
        defaults = runs.default_loggers(self.choice.folder, resumed_step)
        return [] if config is False else [*missing_kinds(defaults, loggers), *loggers]

    def _default_precision(self, strategy: str | None) -> str | None:
        """Returns the precision of a `fit` without trainer.precision: that of the resumed run, else
        on GPUs bf16-mixed (32-true if bitwise or without bf16), else `None`: Lightning's."""
        path, verdict = self.choice.ckpt_path, self.verdict
        facts = topology_of(Path(self.choice.folder) if path is None else Path(path).parent.parent)
        if facts or verdict.accelerator not in ("gpu", "cuda"):
            return facts.get("precision")
        is_rank = rules.START_METHODS.get(strategy or "", "popen") == "popen"  # CUDA may start here
        is_slow = is_rank and not torch.cuda.is_bf16_supported(including_emulation=False)
        if is_slow or self.options.exactness == "bitwise":
            return "32-true"
        say_first("precision bf16-mixed, as GPUs train; --trainer.precision=32-true is float32")
        return "bf16-mixed"

    def _default_callbacks(self) -> list[Callback]:
        """Returns the default callbacks that suit the run: without a plan, none that need one."""
        module, data = self.model, self.datamodule
        with usage_errors():
            is_exact = follows_plan(module, data)
        is_planned = isinstance(data, PlannedDataModule)
        left_out: tuple[type[Callback], ...] = () if is_exact else (Ledger, Preemption)
        left_out += () if is_planned else (Rehearsal, PredictionWriter, ErrorTable)
        if self.config_init[self.subcommand].trainer.enable_checkpointing is False:
            left_out += (checkpoints.LastCheckpoint, checkpoints.BestCheckpoint)
        if not (is_exact or (is_planned and self.subcommand != "fit")):
            written = "" if is_planned else ", and no predictions are written"
            what = (
                f"{type(module).__name__} on {type(data).__name__} is plain Lightning: there is no "
                f"ledger, losses and metrics may change with the number of devices{written}. "
                "lit_models/README.md shows an ExactModule on a PlannedDataModule."
            )
            say_first(screen(what, "warning"))
        return [c for c in default_callbacks() if not isinstance(c, left_out)]

    def fit(self, **kwargs: Any) -> None:
        """Trains and, with `test_after_fit`, tests the best checkpoint; prints its score, path
        and the commands to use next."""
        folder, trainer = Path(self.choice.folder), self.trainer
        if 0 in (trainer.limit_train_batches, trainer.max_epochs):  # max_steps=0 only fills caches
            raise UsageError(NO_STEPS)
        self.datamodule.tests_after_fit = self.options.test_after_fit
        self.trainer.fit(**self._from_choice(kwargs))
        self.trainer.ckpt_path = None  # no longer the state of the checkpoint resumed from
        is_stopping = getattr(ledger_of(self.trainer), "is_stopping", False)
        is_stopped = self.trainer.interrupted or is_stopping
        newest = None if self.trainer.global_step else checkpoints.newest_checkpoint(folder)
        if newest is not None:
            # Spawned processes have trained; this one learns of it only from their files. It logs
            # after their last step, and not as a resumed run, whose loggers would replace rows.
            is_stopped = is_stopped or run_files.stop_reason(folder) is not None
            content = run_files.read_checkpoint(newest, mmap=True, every_byte=False)
            if "loops" in content:  # else it holds weights alone
                self.trainer.fit_loop.load_state_dict(content["loops"]["fit_loop"])
            self.trainer.loggers = self._loggers(None)
        if is_stopped or not (newest or self.trainer.global_step or self.trainer.fast_dev_run):
            return
        tested: dict[str, float] = {}
        if self.options.test_after_fit:
            paths = [getattr(c, "best_model_path", "") for c in self.trainer.checkpoint_callbacks]
            best = next((path for path in paths if path), None)
            where = {"ckpt_path": best, "weights_only": True, "verbose": False}
            tested = self._show(self.trainer.test(self.model, self.datamodule, **where))
        path = checkpoints.checkpoint_to_use(folder)  # fast_dev_run keeps none
        if path is None or self.trainer.fast_dev_run or not is_first_process():
            return
        content = run_files.read_checkpoint(path, mmap=True, every_byte=False)
        states = content.get("callbacks", {}).values() if path.name == "best.ckpt" else ()
        best_states = [s for s in states if s.get("best_model_score") is not None][:1]
        words = [f"{s['monitor']} {shown(float(s['best_model_score']))}" for s in best_states]
        words.append(f"step {content['global_step']}, {path}")
        watched = "/" + getattr(self.model, "monitor", "").rpartition("/")[2]
        words += [f"{n} {shown(v)}" for n, v in tested.items() if n.endswith(watched)]
        say(f"best: {', '.join(words)}")
        say(f"report: unisono report {shlex.quote(str(folder))}")
        config = shlex.quote(str(config_files.newest_config(folder)))
        command = f"unisono predict --config {config} --ckpt_path {shlex.quote(str(path))}"
        hint = getattr(self.datamodule, "predict_hint", None)
        say(f"next: {hint(command) if hint else command}")

    def validate(self, **kwargs: Any) -> None:
        """Evaluates on the validation data."""
        self._evaluate(self.trainer.validate, kwargs)

    def test(self, **kwargs: Any) -> None:
        """Evaluates on the test data."""
        self._evaluate(self.trainer.test, kwargs)

    def _evaluate(self, run: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        results = run(**{**self._from_choice(kwargs), "verbose": False})
        if kwargs.get("verbose", True):
            self._show(results)

    def _show(self, results: Sequence[Mapping[str, float]] | None) -> dict[str, float]:
        """Returns the metrics of an evaluation; prints them unless the module prints a table."""
        metrics = {name: value for result in results or () for name, value in result.items()}
        verb = "test" if self.subcommand == "fit" else self.subcommand
        if verb not in getattr(self.model, "tables_of", ()):
            for name, value in metrics.items():
                say_first(f"{name:<{max(map(len, metrics))}}  {shown(value)}")
        return metrics

    def predict(self, **kwargs: Any) -> None:
        """Streams predictions to a file; keeps none in memory."""
        self.trainer.predict(**{**self._from_choice(kwargs), "return_predictions": False})

    def _from_choice(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        # Set on the trainer, not passed to the call: data and model read it before Lightning does.
        self.trainer.ckpt_path = self.choice.ckpt_path
        return {**kwargs, "weights_only": True}


class ParsedCLI(UnisonoCLI):
    """Parses a command line, as typed, like its run, and runs nothing. `is_stage`: the weights to
    start from may be missing, because an earlier stage writes them.

    Raises:
        UsageError: a config cannot be read, the parser refuses an option, or the weights to start
            from are missing.
    """

    def __init__(self, argv: list[str], is_stage: bool = False) -> None:
        with usage_errors():
            argv = in_launched_world([argv[0], *config_files.expand_configs(argv[1:])], {})
        super().__init__(argv, runs.Run("runs"), is_stage)

    def before_instantiate_classes(self) -> None:
        """Skip the checks of this machine: the job runs on another one."""

    def _set_seed(self) -> None:
        """Draw nothing."""

    def instantiate_classes(self) -> None:
        """Build no model."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Train nothing."""


def check_run(argv: list[str], processes: int, is_stage: bool = False) -> None:
    """Refuse a command line that the job itself would refuse; the run's own parser reads it.

    Args:
        processes: number of processes of the job, on all machines together.
        is_stage: files that earlier stages write may be missing.

    Raises:
        UsageError: the parser refuses it, or the strategy or the batch does not fit the job.
    """
    with usage_errors():
        config = ParsedCLI(argv, is_stage).options
        strategy, _ = rules.strategy_of(config.trainer.strategy)
        rules.check_strategy(strategy, StrategyRegistry.available_strategies())
        rules.check_world(processes, strategy, {"SLURM_NTASKS": str(processes)})
        rules.check_batch(config, processes)


@contextmanager
def quiet_trainer(level: int, **options: Any) -> Iterator[Trainer]:
    """Yields a Trainer in one process, whatever the launcher, without evaluation, output and files;
    log messages up to `level` are left out meanwhile."""
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options |= {"limit_val_batches": 0, "num_sanity_val_steps": 0, **dict.fromkeys(names, False)}
    logging.disable(level)
    try:
        with tempfile.TemporaryDirectory() as folder:
            plugins = [LightningEnvironment()]
            yield Trainer(devices=1, plugins=plugins, default_root_dir=folder, **options)
    finally:
        logging.disable(logging.NOTSET)


def built(config: dict[str, Any], key: Literal["model", "data"]) -> Any:
    """Returns the module or the datamodule that a config describes; set its seed first.

    Raises:
        UsageError: a value is not valid, or no longer.
    """
    config_files.read_in_parsers()
    parser = UnisonoParser()
    base = {"model": LightningModule, "data": LightningDataModule}[key]
    parser.add_lightning_class_args(base, key, subclass_mode=True)
    with usage_errors():
        parsed = parser.parse_object({key: config[key]})
    return parser.instantiate_classes(parsed)[key]


def stored_values(path: str, classes: StoredClasses) -> tuple[dict[str, Any], int | None]:
    """Returns the `model` key that a checkpoint stores, {} if it stores none, and its number of
    optimizer steps.

    Args:
        path: a checkpoint or an exported folder.
        classes: the classes that it may name.

    Raises:
        FileNotFoundError, ValueError: it is missing or damaged, or names a class not allowed.
    """
    content = run_files.read_checkpoint(path, mmap=True, classes=classes, every_byte=False)
    values, step = dict(content.get("hyper_parameters", {})), content.get("global_step")
    class_path, _ = values.pop("_class_path", None), values.pop("_instantiator", None)
    if class_path is None:
        return {}, step
    classes.check(path, class_path, values)
    known, gone, _ = known_arguments(locate(class_path), values)
    if gone:
        say_first(f"{path} is of another version; {', '.join(gone)} has no effect any more")
    init_args = {name: value for name, value in known.items() if name not in run_files.START_ONLY}
    return {"class_path": class_path, "init_args": init_args}, step


def topology_of(folder: Path) -> dict[str, Any]:
    """Returns topology.json of a run folder, {} before a run has begun; ValueError if damaged."""
    path = folder / "topology.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except (TypeError, ValueError) as error:
        raise run_files.damaged_file(path, error) from error


def start_values(config: Any, classes: StoredClasses) -> dict[str, Any]:
    """Returns the `model` key with the networks of the checkpoint that a run takes weights from.

    Args:
        config: the parsed `model` key; its init_from names the checkpoint, `None` gives {}.
        classes: the classes that the checkpoint may name.

    Raises:
        FileNotFoundError: the checkpoint or the folder of `pretrained` is missing.
        ValueError: it is damaged, names a class not allowed, or init_from_part has no init_from.
    """
    options = (config or {}).get("init_args") or {}
    init_from, part, pretrained = map(options.get, ("init_from", "init_from_part", "pretrained"))
    if init_from is None and part is not None:
        raise ValueError(
            f"model.init_from_part is {part}, but model.init_from names no checkpoint: the run "
            "would train from scratch. Give --model.init_from=BEST.ckpt, or set "
            "--model.init_from_part=null."
        )
    if isinstance(pretrained, str) and not Path(pretrained).expanduser().is_dir():
        raise FileNotFoundError(
            f"model.pretrained: {pretrained} is no folder; name that of a Hugging Face model on "
            "this machine with --model.pretrained=…, or null, to start from random weights."
        )
    if init_from is None:
        return {}
    try:
        model, _ = stored_values(init_from, classes)
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"model.init_from: {error}") from error
    init_args = model.get("init_args", {})
    taken = [name for name in init_args if name not in NO_WEIGHTS and part in (None, name)]
    parts = {name: init_args[name] for name in taken if isinstance(init_args[name], dict)}
    networks = {name: value for name, value in parts.items() if "class_path" in value}
    return {**model, "init_args": networks} if networks else {}


def chosen_run(argv: list[str]) -> runs.Run:
    """Returns the run that a command line with resolved config paths means; see `decide`."""
    is_fit, root = argv[0] == "fit", config_files.run_root(argv).expanduser()
    newest = checkpoints.newest_checkpoint if is_fit else checkpoints.checkpoint_to_use
    is_asked = config_files.given_option(argv, config_files.ROOT) is not None
    folders = [path.parent for path in reversed(config_files.config_paths(argv))]
    own = None if is_fit or is_asked else next(filter(runs.holds_run, folders), None)
    ckpt_path = os.path.expanduser(str(config_files.given_value(argv, "ckpt_path") or ""))
    return runs.decide(argv[0], root, ckpt_path or None, newest, is_asked, own)


def launch(argv: list[str], kind: Callable[[list[str], Any], UnisonoCLI] = UnisonoCLI) -> int:
    """Runs fit, validate, test or predict.

    Returns:
        0; 75 if a signal ended the run and its state is saved, so that the sender restarts it: on
        the first rank, under srun on all ranks; 130 after Ctrl-C.

    Raises:
        UsageError: the command line cannot be run.
    """
    verb, wants_help = argv[0], "-h" in argv or "--help" in argv
    with usage_errors():
        options = config_files.expand_configs(argv[1:])
        argv = [verb, *(f"--{TRUST}=true" if word == f"--{TRUST}" else word for word in options)]
        if wants_help:
            print(BRIEF_HELP.format(verb))
            return 0
        argv = in_launched_world(argv, os.environ)
        if any(re.match(r"[^=]*(\.help|--help|--print_config)(=|$)", word) for word in argv):
            UnisonoCLI(["--help" if a == "--help=all" else a for a in argv], runs.Run("runs"))
            return 0
        num_nodes = config_files.given_value(argv, "trainer.num_nodes")
        complete_rendezvous(os.environ, num_nodes if isinstance(num_nodes, int) else 1)
        choose = functools.partial(chosen_run, argv)
        run = runs.locked(choose) if verb == "fit" and is_first_process() else choose()
    silence_noise(verb)
    try:
        runs.check_writable(Path(run.folder))
        passed_on = forward_signals()
        is_stopped = getattr(ledger_of(kind(argv, run).trainer), "is_stopping", False)
        if USR1 in passed_on:  # Python drops handlers before it exits
            signal.signal(USR1, signal.SIG_IGN)
        has_group = dist.is_available() and dist.is_initialized()
        if is_srun_rank(os.environ):
            # With --kill-on-bad-exit srun kills all ranks as soon as one exits with 75. A rank that
            # exits a moment later would die by that signal, and its status would hide that the run
            # is saved: the ranks of a stopped run wait for each other. A complete run ignores
            # SIGUSR1, as a warning that arrives while Python exits would requeue it.
            for signum in REQUEUE_SIGNALS if is_stopped else (USR1,):
                signal.signal(signum, signal.SIG_IGN)
            if is_stopped and has_group:
                dist.barrier()
        if has_group:  # else gloo's threads sometimes end a successful run with 134
            dist.destroy_process_group()
    except Exception as error:
        error.__dict__["run_folder"] = run.folder  # for the traceback
        raise
    finally:
        runs.release(Path(run.folder))
    if not is_first_process():
        return REQUEUE if is_stopped and is_srun_rank(os.environ) else 0
    reason = run_files.stop_reason(Path(run.folder)) if verb == "fit" else None
    if reason is None:
        return 0
    say(f"stopped by {reason}; everything is saved: the same command with --ckpt_path auto goes on")
    return INTERRUPTED if reason == signal.SIGINT.name else REQUEUE


def forward_signals() -> set[int]:
    """Forwards signals to spawned processes, which train while this one waits for them; returns
    the set of forwarded signals, to which the handler adds.

    A job's script repeats SIGUSR1: once it was forwarded, it does not end this process either.
    """
    first_interrupt: float | None = None
    passed_on: set[int] = set()

    def forward(signum: int, frame: FrameType | None) -> None:
        nonlocal first_interrupt
        # Dataloader workers are daemons: with no other children, this process does the training.
        children = [c for c in multiprocessing.active_children() if not c.daemon]
        for child in children:
            if child.pid is not None:
                os.kill(child.pid, signum)
        if children:
            passed_on.add(signum)
        elif signum != USR1 or signum not in passed_on:
            signal.signal(signum, before[signal.Signals(signum)])
            os.kill(os.getpid(), signum)
        if signum == signal.SIGINT:
            now, first = time.monotonic(), first_interrupt
            first_interrupt = first or now
            if first and now - first > REPEATED_WITHIN_S:
                # The second Ctrl-C ends the children without a result, and this process awaits one.
                raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        return passed_on  # a thread of an engine, whose process gets the signals
    before = {signum: signal.signal(signum, forward) for signum in FORWARDED}
    return passed_on


def is_srun_rank(environ: Mapping[str, str]) -> bool:
    """Returns whether srun started several ranks, this one included; it reads each exit status."""
    is_step = "SLURM_STEP_ID" in environ and "TORCHELASTIC_RUN_ID" not in environ
    return is_step and int(environ.get("SLURM_NTASKS") or 1) > 1


def silence_noise(verb: str = "fit") -> None:
    """Suppresses Lightning's messages that repeat the banner and the run folder."""
    moved = ("The dirpath has changed from ",) if verb != "fit" else ()  # it writes no checkpoints
    for text in (*NOISE, *moved):
        warnings.filterwarnings("ignore", message=re.escape(text))
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: not record.getMessage().startswith(NOISE)
    )

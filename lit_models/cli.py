"""unisono fit|validate|test|predict: a LightningCLI that knows no family."""

import contextlib
import io
import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from datamodules.core.planned import PlannedDataModule
from lit_models import checkpoint_values, config_files
from lit_models.errors import (
    COLUMNS,
    USAGE,
    OneScreenErrors,
    UsageError,
    is_first_process,
    say,
    screen,
)
from lit_models.training import bitwise, rules
from lit_models.training.bitwise import BitwiseSum
from lit_models.training.callbacks import default_callbacks
from lit_models.training.callbacks.error_table import ErrorTable
from lit_models.training.callbacks.predictions import PredictionWriter
from lit_models.training.callbacks.progress import ProgressLine
from lit_models.training.callbacks.run_config import RunConfig
from lit_models.training.callbacks.topology import Topology
from lit_models.training.checkpoints import checkpoint_to_use, newest_checkpoint, read_checkpoint
from lit_models.training.dropout import ExactDropout
from lit_models.training.exact import follows_plan
from lit_models.training.faults import Preemption
from lit_models.training.hyperparameters import StoredClasses
from lit_models.training.ledger import Ledger, ledger_of
from lit_models.training.lineage import stop_reason
from lit_models.training.loggers import default_loggers
from lit_models.training.memory import Rehearsal, StateCheck, StrategyChoice, choose_strategy
from lit_models.training.run_folder import WORDS, Run
from lit_models.training.strategies import replicated

TRUST = "trust_checkpoint"
HELP = ("-h", "--help")
# What `COMMAND --help` shows: the first fifteen that the command and its classes have.
OF_VERB = {
    "fit": {
        "data.train_files": "training files",
        "data.validation_files": "validation files",
        "model.pretrained": "Hugging Face folder",
        "model.optimizer.lr": "learning rate",
        "trainer.max_epochs": "passes over the data",
        "trainer.max_steps": "optimizer steps",
    },
    "validate": {"data.validation_files": "validation files"},
    "test": {"data.test_files": "test files"},
    "predict": {
        "data.predict_files": "files to predict",
        "data.predict_output": "file to write",
    },
}
KEYS = {
    "data.columns.text": "column of the text",
    "data.columns.codes": "columns of codes",
    "data.global_batch_size": "samples of a step",
    "data.micro_batch_size": "of them at once",
    "trainer.devices": "on each machine",
    "trainer.strategy": "ddp, ddp_spawn, fsdp",
    "trainer.precision": "such as bf16-mixed",
    "trainer.default_root_dir": "folder of the run",
    "ckpt_path": "auto: go on, newest",
}
LAST = {  # of a training
    "model.init_from": "weights to begin with",
    "seed_everything": "seed",
    "test_after_fit": "test the best at last",
    "trainer.val_check_interval": "steps or share",
}


class UnisonoParser(OneScreenErrors, LightningArgumentParser):
    """The parser whose errors name the nearest option."""


class UnisonoCLI(LightningCLI):
    """Runs one verb in one run folder; the checkpoint's values lie below all given ones.

    Args:
        argv: the verb and its options, config files found already.
        choice: the run folder and the checkpoint.
        parser_class: of the command line.
    """

    def __init__(
        self, argv: list[str], choice: Run, parser_class: type[UnisonoParser] = UnisonoParser
    ) -> None:
        self.argv, self.choice = argv, choice
        self.verdict: rules.Verdict | None = None
        trust = config_files.given_value(argv, TRUST) is True
        self.classes = StoredClasses(trust, config_files.given_words(argv))
        self.checkpoint_model = checkpoint_values.model_values(choice.ckpt_path, self.classes)
        config_files.refuse_in_parsers()
        super().__init__(
            LightningModule,
            LightningDataModule,
            save_config_callback=RunConfig,
            parser_class=parser_class,
            seed_everything_default=0,  # a random one would differ between ranks of torchrun
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        return super().init_parser(allow_abbrev=False, **kwargs)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Returns the verb of this run alone: the parsers of the other three are not built."""
        verb = self.argv[0]
        return {verb: LightningCLI.subcommands()[verb]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--test_after_fit", type=bool, default=False, help="Test the best checkpoint after fit."
        )
        parser.add_argument(
            "--on_missing_devices",
            type=rules.OnMissing,
            default="error",
            help="What to do about devices that are not there.",
        )

        parser.add_argument(
            f"--{TRUST}",
            type=bool,
            default=False,
            help="Import whatever a checkpoint or an exported folder names as a class.",
        )
        parser.add_argument(
            "--exactness",
            type=Literal["gradient", "bitwise"],
            default="gradient",
            help="What is equal on any number of devices: gradients but for rounding, or all bits.",
        )
        parser.add_argument(
            "--exact_dropout",
            type=bool,
            default=False,
            help="Key dropout masks by sample: the same on any number of devices.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        verb, *options = self.argv
        below = checkpoint_values.as_first_config(self.checkpoint_model)
        self.config = parser.parse_args([verb, *below, *options])
        if verb == "fit" and self.choice.ckpt_path is None:
            try:
                started = checkpoint_values.start_values(self.config[verb].model, self.classes)
            except (ValueError, FileNotFoundError) as error:
                raise UsageError(str(error)) from error
            if started:  # weights fit the network that they were trained in
                below = checkpoint_values.as_first_config(started)
                self.config = parser.parse_args([verb, *below, *options])

    def _parse_ckpt_path(self) -> None:
        """Replaces Lightning's, in which the checkpoint's values win over explicit ones."""
        verb, path = self.config.subcommand, self.choice.ckpt_path
        if path is None:
            return
        config = self.config[verb].model
        try:
            lines = checkpoint_values.differences(
                self.checkpoint_model, config, path, verb != "fit"
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
        if is_first_process():
            for line in lines:
                say(line)

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        config.trainer.default_root_dir = self.choice.folder
        config.ckpt_path = None  # a saved config starts a run of its own
        loggers = config.trainer.logger
        for logger in loggers if isinstance(loggers, list) else [loggers]:
            options = getattr(logger, "init_args", None)
            if options is not None and options.get("save_dir") == ".":  # the default of W&B's
                options.save_dir = self.choice.folder
        self._check_evaluates(config.trainer)
        known = StrategyRegistry.available_strategies()
        settings = rules.settings_of(config)
        try:
            self.verdict = rules.check(settings, rules.this_machine(), os.environ, known)
            if self.subcommand == "fit" and config.exactness == "bitwise":
                precision, world_size = config.trainer.precision, self.verdict.world_size
                bitwise.check_run(settings.strategy, precision, world_size)
        except (ValueError, FileNotFoundError) as error:
            raise UsageError(str(error)) from error
        if self.subcommand != "fit" and self.choice.ckpt_path is None:
            self.verdict.warnings.append(
                "no --ckpt_path: the model is used as it is built; --ckpt_path auto takes the "
                "newest checkpoint of this run"
            )
        if is_first_process():
            for line in self.verdict.warnings:
                say(screen(line, "warning"))

    def _check_evaluates(self, trainer: Any) -> None:
        """Refuses an evaluation of nothing, as of a recipe that trains without validation."""
        name = {"validate": "limit_val_batches", "test": "limit_test_batches"}.get(self.subcommand)
        if name is not None and trainer[name] == 0:
            raise UsageError(
                f"trainer.{name} is 0, so that `{self.subcommand}` has nothing to evaluate; give "
                f"--trainer.{name}=1.0 for all of it, or a number of batches."
            )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        given, verdict = self._get(self.config_init, "trainer"), self.verdict
        assert verdict is not None
        callbacks = given.callbacks or []
        callbacks = list(callbacks) if isinstance(callbacks, list) else [callbacks]
        own: list[Callback] = [Topology(verdict.fallback, verdict.warnings)]
        own += [ProgressLine()] if given.enable_progress_bar is not False else []
        # Before the rehearsal of the default ones: the size of the state, and the real dropout.
        first: list[Callback] = [ExactDropout()] if self._get(self.config, "exact_dropout") else []
        own += [BitwiseSum()] if self._get(self.config, "exactness") == "bitwise" else []
        chosen = self._chosen_strategy(verdict)
        strategy = given.strategy if chosen is None else chosen.strategy
        if isinstance(strategy, str):
            kwargs["strategy"] = replicated(strategy) or strategy
        if chosen is not None and chosen.unchecked_bytes is not None:
            first.append(StateCheck(chosen.unchecked_bytes))
        missing = missing_kinds([*first, *self._default_callbacks(), *own], callbacks)
        if given.logger is not False:
            named = given.logger if isinstance(given.logger, list) else [given.logger]
            named = [logger for logger in named if logger not in (None, True)]
            step = checkpoint_values.resumed_step(self.choice.ckpt_path)
            defaults = default_loggers(self.choice.folder, step)
            kwargs["logger"] = [*missing_kinds(defaults, named), *named]
        kwargs |= {"accelerator": verdict.accelerator, "devices": verdict.devices}
        if not any(isinstance(callback, ModelSummary) for callback in callbacks):
            kwargs["enable_model_summary"] = bool(given.enable_model_summary)  # else the banner's
        # The ledger before those that ask it whether a step has ended.
        trainer = super().instantiate_trainer(callbacks=[*missing, *callbacks], **kwargs)
        if given.limit_val_batches == 0:
            trainer.limit_val_batches = 0  # fast_dev_run has made it 1, where there may be no data
        return trainer

    def _default_callbacks(self) -> list[Callback]:
        """Returns those that fit the module and the data; of plain ones none that needs a plan."""
        module, data = self.model, self.datamodule
        try:
            is_exact = follows_plan(module, data)
        except ValueError as error:
            raise UsageError(str(error)) from error
        is_planned = isinstance(data, PlannedDataModule)
        left_out: tuple[type[Callback], ...] = () if is_exact else (Ledger, Preemption)
        left_out += () if is_planned else (Rehearsal, PredictionWriter, ErrorTable)
        if is_first_process() and not (is_exact or (is_planned and self.subcommand != "fit")):
            written = "" if is_planned else ", and no predictions are written"
            say(
                screen(
                    f"{type(module).__name__} on {type(data).__name__} is plain Lightning: there "
                    "is no ledger, losses and metrics may change with the number of devices"
                    f"{written}. lit_models/README.md shows an ExactModule on a PlannedDataModule.",
                    "warning",
                )
            )
        return [c for c in default_callbacks() if not isinstance(c, left_out)]

    def _chosen_strategy(self, verdict: rules.Verdict) -> StrategyChoice | None:
        """Returns what `trainer.strategy: auto` becomes, and prints why; None where it stays."""
        config, is_training = self.config[self.subcommand], self.subcommand == "fit"
        settings, precision = rules.settings_of(config), config.trainer.precision
        try:
            chosen = choose_strategy(settings, verdict, self.model, is_training, precision)
            if chosen is not None and is_training and config.exactness == "bitwise":
                bitwise.check_run(chosen.strategy, precision, verdict.world_size)
        except ValueError as error:
            raise UsageError(str(error)) from error
        if chosen is not None and is_first_process():
            say(chosen.line)
        return chosen

    def fit(self, **kwargs: Any) -> None:
        """Trains; with `test_after_fit` the best checkpoint is tested at the end."""
        self.trainer.fit(**self._from_choice(kwargs))
        self.trainer.ckpt_path = None  # what follows is not of the checkpoint that it began with
        ledger = ledger_of(self.trainer)
        is_stopped = self.trainer.interrupted or (ledger is not None and ledger.is_stopping)
        is_trained = self.trainer.global_step > 0
        if not is_trained:
            # Spawned processes may have trained; this one knows of it by the files alone.
            folder = Path(self.choice.folder)
            is_trained = bool(self.trainer.fast_dev_run) or newest_checkpoint(folder) is not None
            is_stopped = is_stopped or stop_reason(folder) is not None
        if is_stopped or not is_trained:
            return
        tested: dict[str, float] = {}
        if self._get(self.config, "test_after_fit"):
            best = best_checkpoint(self.trainer)
            where = {"ckpt_path": best, "weights_only": True, "verbose": False}
            tested = self._show(self.trainer.test(self.model, self.datamodule, **where))
        if not self.trainer.fast_dev_run and is_first_process():  # which keeps no checkpoint
            self._say_end(tested)

    def validate(self, **kwargs: Any) -> None:
        """Evaluates on the validation data."""
        options = {**self._from_choice(kwargs), "verbose": False}
        self._show(self.trainer.validate(**options), kwargs.get("verbose", True))

    def test(self, **kwargs: Any) -> None:
        """Evaluates on the test data."""
        options = {**self._from_choice(kwargs), "verbose": False}
        self._show(self.trainer.test(**options), kwargs.get("verbose", True))

    def _show(
        self, results: Sequence[Mapping[str, float]] | None, verbose: bool = True
    ) -> dict[str, float]:
        """Prints the figures of an evaluation, that of the monitored metric first."""
        found = {name: value for result in results or () for name, value in result.items()}
        _, _, watched = getattr(self.model, "monitor", "").rpartition("/")
        names = sorted(found, key=lambda name: name.rpartition("/")[2] != watched)
        verb = "test" if self.subcommand == "fit" else self.subcommand
        is_shown = verb in getattr(self.model, "tables_of", ())
        if found and verbose and not is_shown and is_first_process():
            width = max(map(len, names))
            for name in names:
                say(f"{name:<{width}}  {figure(found[name])}")
        return found

    def predict(self, **kwargs: Any) -> None:
        """Streams predictions to a file; keeps none in memory."""
        self.trainer.predict(**{**self._from_choice(kwargs), "return_predictions": False})

    def _from_choice(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        path = self.choice.ckpt_path
        if self.subcommand == "fit" and path in WORDS:  # Lightning finds out what they stand for
            return {**kwargs, "ckpt_path": path, "weights_only": True}
        # Named by the trainer, not by the call: data and model look into it before Lightning.
        self.trainer.ckpt_path = path
        return {**kwargs, "weights_only": True}

    def _say_end(self, tested: dict[str, float]) -> None:
        """Prints where the best weights are, how good they are, and what to do with them."""
        folder = Path(self.choice.folder)
        path = checkpoint_to_use(folder)
        if path is None:
            return
        content = read_checkpoint(path, mmap=True)
        words = []
        states = content.get("callbacks", {}).values()
        kept = next((state for state in states if state.get("best_model_score") is not None), None)
        if path.name == "best.ckpt" and kept is not None:
            words.append(f"{kept['monitor']} {figure(float(kept['best_model_score']))}")
        words.append(f"step {content['global_step']}, {path}")
        watched = "/" + getattr(self.model, "monitor", "").rpartition("/")[2]
        words += [f"{n} {figure(v)}" for n, v in tested.items() if n.endswith(watched)]
        say(f"best: {', '.join(words)}")
        say(f"report: unisono report {shlex.quote(str(folder))}")
        from lit_models.commands._run_config import newest_config  # which parses as this file does

        own = shlex.quote(str(newest_config(folder)))
        command = f"unisono predict --config {own} --ckpt_path {shlex.quote(str(path))}"
        hint = getattr(self.datamodule, "predict_hint", None)
        say(f"next: {hint(command) if hint else command}")


def figure(value: float) -> str:
    """Returns a number in four digits; a dash for one that is not there."""
    return "–" if math.isnan(value) else f"{value:.4g}"


def values_of(argv: list[str]) -> dict[str, Any]:
    """Returns every key of a command line with its value, as --print_config prints them."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        UnisonoCLI([*argv, "--print_config"], Run("runs"))
    if not printed.getvalue():
        raise SystemExit(USAGE)  # the parser has said what is wrong
    return yaml.safe_load(printed.getvalue())


def with_help_classes(argv: list[str]) -> list[str]:
    """Returns the arguments with --KEY.help=CLASS for --KEY.help, the class that this command line
    takes; and --help for --help=all.

    Raises:
        UsageError: the key has no class.
    """
    out = ["--help" if word == "--help=all" else word for word in argv]
    for place, word in enumerate(out):
        if not word.startswith("--") or not word.endswith(".help"):
            continue
        key = word.removeprefix("--").removesuffix(".help")
        node: Any = values_of([w for w in out if w != word])
        for part in key.split("."):
            node = node.get("init_args", node).get(part) if isinstance(node, dict) else None
        if not isinstance(node, dict) or "class_path" not in node:
            raise UsageError(
                f"{word}: no class is named there. Name one, {word}=CLASS, or see what the key is "
                f"with --{key.split('.')[0]}.help."
            )
        out[place] = f"{word}={node['class_path']}"
    return out


def brief_help(argv: list[str]) -> str:
    """Returns a verb's help on one screen: the keys that are changed most, and their values."""
    verb = argv[0]
    values = {
        key.replace("init_args.", ""): value if isinstance(value, str) else json.dumps(value)
        for key, value in config_files.flat(values_of([a for a in argv if a not in HELP]))
    }
    shown = OF_VERB[verb] | KEYS | (LAST if verb == "fit" else {})
    known = [(key, words) for key, words in shown.items() if key in values]
    files = " ".join(config_files.short_name(path) for path in config_files.config_paths(argv))
    lines = [f"usage: unisono {verb} --config FILE [--config FILE …] [--KEY=VALUE …]", ""]
    lines.append(f"Keys, and their values in {files or 'a run without a config'}:"[:COLUMNS])
    for key, words in known[:15]:
        value = values[key] if len(values[key]) < 19 else f"{values[key][:17]}…"
        lines.append(f"  --{key:<26} {value:<18}  {words}"[:COLUMNS])
    more = (
        "All keys with their values: --print_config. What they mean: --model.help,\n"
        "--data.help, --model.optimizer.help and so on; of the trainer: --help=all.\n"
        "Shipped configs: `unisono --help`. From other programs: lit_models/migration.md."
    )
    return "\n".join([*lines, "", more])


class ParsedCLI(UnisonoCLI):
    """Parses a command line as its run does, and does nothing with it."""

    def before_instantiate_classes(self) -> None:
        """Look at nothing of this machine: the run has another one."""

    def _set_seed(self) -> None:
        """Draw nothing."""

    def instantiate_classes(self) -> None:
        """Build no model."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Train nothing."""


def missing_kinds(defaults: list[Any], named: list[Any]) -> list[Any]:
    """Returns the defaults of which the configuration names none of the same kind."""
    return [d for d in defaults if not any(isinstance(n, type(d)) for n in named)]


def best_checkpoint(trainer: Trainer) -> str | None:
    """Returns the path of the best checkpoint by the monitored metric, or None."""
    paths = [getattr(c, "best_model_path", "") for c in trainer.checkpoint_callbacks]
    return next((path for path in paths if path), None)

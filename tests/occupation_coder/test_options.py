"""Every row of the migration page for users of scripts: each option has the effect described."""

import re
import shlex
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn

from datamodules import Augmentation
from datamodules.tokenizers.codes import CodeBook
from lit_models.cli import UnisonoCLI, launch
from lit_models.run_files import read_checkpoint
from tests.text_corpora import table
from tests.toy import csv_rows, ledger_lines

QUIET = ["--trainer.enable_model_summary=false", "--trainer.enable_progress_bar=false"]
COLUMNS = ["--data.columns.text=job", "--data.columns.language=lang", "--data.columns.codes=[occ]"]
FILES = ["--data.train_files=train.csv", "--data.validation_files=dev.csv", *COLUMNS]
TRADES = {"smith": "83110", "baker": "77610", "weaver": "75400", "clerk": "39310"}
PLACES = ["town", "ship", "mill", "farm", "royal", "old", "young", "poor"]
SCHEDULE = "--model.lr_scheduler=lit_models.training.optim.WarmupDecay"
EVERYTHING = [
    *FILES,
    SCHEDULE,
    *shlex.split("""
--trainer.default_root_dir=mine --data.global_batch_size=12 --trainer.max_steps=7
--trainer.max_epochs=5 --model.optimizer.lr=0.02 --model.lr_scheduler.warmup=3
--model.encoder.dropout=0.1 --model.decoder.dropout=0.2 --model.loss.flat_dropout=0.3
--model.decoder.feed_forward=48 --model.loss.seq2seq_weight=0.75 --model.freeze=encoder
--data.text.max_length=9 --data.augmentation.delete=0.1 --data.augmentation.num_edits=3
--data.augmentation.drop_language=0.5 --trainer.log_every_n_steps=3
--trainer.callbacks+=lit_models.training.LastCheckpoint --trainer.callbacks.every_n_steps=2
--trainer.callbacks.every_epoch=false --data.loader.num_workers=1
--trainer.precision=bf16-mixed
"""),
]


def write_tables(folder: Path) -> None:
    """Makes train.csv (32 rows) and dev.csv (4 rows)."""
    rows = [(f"{place} {trade}", "en", code) for place in PLACES for trade, code in TRADES.items()]
    table(folder / "train.csv", rows, ("job", "lang", "occ"))
    dev = [(f"second {trade}", "da", code) for trade, code in TRADES.items()]
    table(folder / "dev.csv", dev, ("job", "lang", "occ"))


class Gradients(Callback):
    """Keeps, for each optimizer step, the parameters whose gradient is not zero."""

    def __init__(self) -> None:
        self.moved: list[set[str]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        named = pl_module.named_parameters()
        self.moved.append({name for name, p in named if p.grad is not None and p.grad.any()})


def build(folder: Path, *options: str, config: str = "debug") -> SimpleNamespace:
    """Parses a command line and builds trainer, model and data, without training."""
    made: dict[str, Any] = {}
    with chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnisonoCLI, "fit", lambda cli, **_: made.update(cli=cli))
        launch(["fit", "--config", f"occupation_coder/{config}.yaml", *QUIET, *options])
    cli = made["cli"]
    return SimpleNamespace(trainer=cli.trainer, model=cli.model, data=cli.datamodule, folder=folder)


def fit(run: SimpleNamespace) -> SimpleNamespace:
    """Trains what `build` built."""
    run.gradients = Gradients()
    run.trainer.callbacks.append(run.gradients)
    with chdir(run.folder):
        run.trainer.fit(run.model, datamodule=run.data)
    return run


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run of 7 steps with many options at once."""
    folder = tmp_path_factory.mktemp("everything")
    write_tables(folder)
    run = fit(build(folder, *EVERYTHING))
    run.network = run.model.network
    run.ledger = ledger_lines(folder / "mine")
    run.checkpoints = {
        path.stem: read_checkpoint(path) for path in (folder / "mine/checkpoints").glob("*.ckpt")
    }
    return run


def codes_of(data: Any) -> list[str]:
    return CodeBook.from_dict(data.recipe["code_book"]).codes


def dropouts(module: nn.Module) -> set[float]:
    return {m.p for m in module.modules() if isinstance(m, nn.Dropout)}


def steps_with(folder: Path, metric: str) -> list[int]:
    """Returns the steps at which metrics.csv has a value of a metric."""
    return [int(row["step"]) for row in csv_rows(folder / "metrics.csv") if row.get(metric)]


EFFECTS: dict[str, Callable[[Any], bool]] = {
    "save folder": lambda run: (run.folder / "mine" / "config.yaml").is_file(),
    "training file": lambda run: len(run.data.datasets["train"].row_ids) == 32,
    "validation file": lambda run: len(run.data.datasets["validation"].row_ids) == 4,
    "target columns": lambda run: set(TRADES.values()) < set(codes_of(run.data)),
    "language column": lambda run: run.data.recipe["languages"] == ["unk", "en"],
    "batch size": lambda run: [line["samples"] for line in run.ledger[:3]] == [12, 12, 8],
    "steps before epochs": lambda run: run.trainer.global_step == 7,
    "learning rate": lambda run: run.trainer.optimizers[0].param_groups[0]["initial_lr"] == 0.02,
    "warm-up steps": lambda run: (
        [run.trainer.lr_scheduler_configs[0].scheduler.factor(i) for i in (0, 3)] == [0.25, 1.0]
    ),
    "dropout of the encoder": lambda run: dropouts(run.network.encoder) == {0.1},
    "dropout of the decoder": lambda run: dropouts(run.network.decoder) == {0.2},
    "dropout of the flat head": lambda run: dropouts(run.network.flat) == {0.3},
    "feed-forward": lambda run: run.network.decoder.layers[0].expand.out_features == 48,
    "weight of the loss": lambda run: (
        run.model.loss.term_weights == {"seq2seq": 0.75, "flat": 0.25}
    ),
    "frozen encoder": lambda run: not any("encoder" in n for n in set.union(*run.gradients.moved)),
    "trained decoder": lambda run: any("decoder" in name for name in run.gradients.moved[0]),
    "maximal length": lambda run: run.data.datasets["train"].lengths.max() == 9,
    "augmentation": lambda run: (
        run.data.datasets["train"].augmentation
        == Augmentation(delete=0.1, num_edits=3, drop_language=0.5)
    ),
    "workers": lambda run: run.data.train_dataloader().loader.num_workers == 1,
    "log interval": lambda run: steps_with(run.folder / "mine", "train/loss") == [3, 6],
    "save interval": lambda run: (
        [run.checkpoints[name]["global_step"] for name in ("previous", "last")] == [4, 6]
    ),
    "amp": lambda run: run.trainer.precision == "bf16-mixed" and run.ledger[-1]["step"] == 7,
}


def test_every_option_of_the_migration_page_is_tried_here():
    page = (Path(__file__).parents[2] / "lit_models/migration.md").read_text()
    table = page.partition("## `finetune.py`")[2].partition("| launch |")[0]
    table = " ".join(line.partition(" | ")[2] for line in table.splitlines())
    named = set(re.findall(r"--[a-z]\w*(?:\.\w+)*", table))
    options_here = set(re.findall(r"--[a-z]\w*(?:\.\w+)*", Path(__file__).read_text()))
    elsewhere = (
        "ckpt_path data.test_files trainer.logger.project data.context_length seed_everything"
    )
    elsewhere += " model.pretrained trainer.accelerator trainer.gradient_clip_val trainer.strategy"
    elsewhere = [*elsewhere.split(), "model.optimizer.weight_decay"]
    assert len(named) > 30
    assert named - options_here == {f"--{name}" for name in elsewhere}


UNTRAINED = shlex.split("""
--data.train_files=[dt]*.csv --data.columns.text=job --data.columns.codes=[occ]
--data.columns.default_language=sv --data.split.validation_share=0.5 --data.split.test_share=0
--data.code_book.path=books/book.csv --data.on_bad_rows=reject --trainer.logger=false
--trainer.devices=1
""")


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Many more options at once, without training."""
    folder = tmp_path_factory.mktemp("untrained")
    write_tables(folder)
    with (folder / "train.csv").open("a") as file:
        file.write("captain,en,9x\n")
    (folder / "books").mkdir()
    rows = [(code, trade) for trade, code in {**TRADES, "tailor": "79100"}.items()]
    table(folder / "books" / "book.csv", rows, ("code", "description"))
    return ready(folder, *UNTRAINED)


FURTHER_EFFECTS: dict[str, Callable[[Any], bool]] = {
    "several files by a pattern, bad rows left out": lambda run: (
        len(run.data.store.arrays["part"]) == 36
    ),
    "one language for all": lambda run: run.data.recipe["languages"] == ["unk", "sv"],
    "share for validation": lambda run: 0.35 < (run.data.store.arrays["part"] == 1).mean() < 0.65,
    "code book": lambda run: "79100" in codes_of(run.data),
    "no logger": lambda run: run.trainer.loggers == [],
    "not distributed": lambda run: run.trainer.world_size == 1,
}


@pytest.mark.parametrize("name", [*EFFECTS, *FURTHER_EFFECTS])
def test_an_option_has_its_effect(request, name):
    run = request.getfixturevalue("everything" if name in EFFECTS else "untrained")
    assert {**EFFECTS, **FURTHER_EFFECTS}[name](run)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with both tables."""
    write_tables(tmp_path)
    return tmp_path


def ready(folder: Path, *options: str) -> SimpleNamespace:
    """Builds a run and reads its tables."""
    run = build(folder, *options)
    with chdir(folder):
        run.data.prepare_data()
        run.data.setup("fit")
    return run


def test_several_target_columns_or_one_with_a_separator(folder):
    header = ("job", "lang", "first", "second", "both")
    rows = [("smith and clerk", "en", "83110", "39310", "83110;39310")] * 2
    table(folder / "train.csv", rows, header)
    for codes in (
        ["--data.columns.codes=first,second"],
        ["--data.columns.codes=[both]", "--data.columns.code_separator=;"],
    ):
        files = ["--data.train_files=train.csv", "--data.validation_files=train.csv"]
        data = ready(folder, *files, "--data.columns.text=job", *codes).data
        train = data.datasets["train"]
        assert train.batch(np.array([0]), 0)["code_ids"].shape == (1, 2)


OWN, LEVELS = "--data.code_system=datamodules.CodeSystem", ["1,1,12,0", "1,30,1,0"]
CODE_SYSTEMS = {  # options -> codes, and numbers of a code's symbols and of a record's codes
    "--data.code_system=occ1950": (["007", "120"], (3, 2)),
    "--data.code_system=from_data": (["A", "BCD"], (3, 1)),
    f"{OWN} --data.code_system.length=8 --data.code_system.max_codes=3": (LEVELS, (8, 3)),
    f"{OWN} --data.code_system.symbol_separator=,": (LEVELS, (4, 1)),
}


@pytest.mark.parametrize("options", CODE_SYSTEMS)
def test_a_code_system(folder, options):
    codes, blocks = CODE_SYSTEMS[options]
    rows = [("smith", "en", codes[0]), ("clerk", "en", codes[1])]
    for name in ("train.csv", "dev.csv"):
        table(folder / name, rows, ("job", "lang", "occ"))
    data = ready(folder, *FILES, *options.split()).data
    book = CodeBook.from_dict(data.recipe["code_book"])
    assert (book.table.shape[1], book.max_codes) == blocks
    assert book.codes == codes


@pytest.mark.parametrize(("weight", "head"), [("1", "flat"), ("0", "decoder")])
def test_a_head_without_weight_gets_no_gradient(folder, weight, head):
    run = build(folder, *FILES, f"--model.loss.seq2seq_weight={weight}", "--trainer.max_steps=1")
    moved = fit(run).gradients.moved[0]
    assert moved
    assert not any(name.startswith(f"network.{head}.") for name in moved)


def test_validation_comes_at_these_optimizer_steps_whatever_the_accumulation(folder):
    options = ["--data.micro_batch_size=4", "--trainer.val_check_interval=3"]
    options += ["--trainer.limit_train_batches=1.0", "--trainer.max_steps=7"]
    options += ["--trainer.max_epochs=9", "--trainer.check_val_every_n_epoch=null"]
    run = fit(build(folder, *FILES, "--data.global_batch_size=8", *options))
    assert run.trainer.accumulate_grad_batches == 2
    assert [step + 1 for step in steps_with(next((folder / "runs").iterdir()), "val/f1")] == [3, 6]


def test_no_step_of_training_prepares_the_data(folder, monkeypatch):
    monkeypatch.setenv("UNISONO_CACHE", str(folder / "cache"))
    run = fit(build(folder, *FILES, SCHEDULE, "--trainer.max_steps=0"))
    assert run.trainer.global_step == 0
    assert list((folder / "cache" / "occupations").rglob("facts.json"))
    assert not list(folder.rglob("*.ckpt"))


def test_weights_and_biases_logs_beside_the_other_loggers(folder):
    pytest.importorskip("wandb", reason="extra: wandb")
    run = build(folder, *FILES, "--trainer.logger+=WandbLogger", "--trainer.logger.offline=true")
    assert [type(logger).__name__ for logger in run.trainer.loggers][-1] == "WandbLogger"
    assert len(run.trainer.loggers) == 3


@pytest.mark.parametrize("part", ["null", "encoder"])
def test_an_initial_checkpoint_gives_all_weights_or_the_encoder(everything, part):
    start = ["--model.init_from=mine/checkpoints/last.ckpt", f"--model.init_from_part={part}"]
    options = [*FILES, *start, "--data.code_system=hisco", "--trainer.max_steps=0"]
    network = fit(build(everything.folder, *options, config="finetune")).model.network
    weights = everything.checkpoints["last"]["state_dict"]
    for name, value in network.state_dict().items():
        if part == "null" or name.startswith("encoder."):
            assert torch.equal(value, weights[f"network.{name}"]), name
    assert network.encoder.width == 16
    assert network.decoder.layers[0].expand.out_features == (48 if part == "null" else 512)

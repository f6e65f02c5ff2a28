"""Command line: errors on one screen, configs found, explicit values win, runs kept apart."""

import inspect
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import WandbLogger

import lit_models
from datamodules import CodeSystem
from lit_models.commands.chain import chain
from lit_models.commands.doctor import doctor
from lit_models.commands.submit import submit
from lit_models.config_files import ROOT, flat
from lit_models.engines.jobs import Resources
from lit_models.errors import UsageError, run_guarded, screen
from lit_models.training import LastCheckpoint
from lit_models.training.optim import WarmupDecay
from lit_models.training.run import Topology
from lit_models.training.strategies import FullyShardedStrategy, ReplicatedStrategy
from tests.distributed.launch import finished, started
from tests.toy import csv_rows, json_rows

ZERO = "is called fsdp here.*ZeRO 3 .*ZeRO 1 and 2 .*_forward=false.*cpu_offload"
LIST = "must be a mapping of options, .* got the list"
MISTAKES = [
    (["--trainer.max_epocs", "3"], "--trainer.max_epocs.*Did you mean.*--trainer.max_epochs"),
    (["--trainer.max_ep=1"], "no option `--trainer.max_ep`.*--trainer.max_epochs"),
    (["--model.init_form=x"], "no option `init_form`.*init_from"),
    (["--data.globalbatch_size=3"], "Did you mean global_batch_size"),
    (["--model.optimzer.lr=3"], "`--model.optimzer.lr`.*Did you mean.*--model.optimizer.lr"),
    (["--model=tests.toy.LitTooy"], "no class `tests.toy.LitTooy`.*tests.toy.LitToy"),
    (["--model=LitOccupationCodr"], "Did you mean.*lit_models.LitOccupationCoder"),
    (["--model=tests.toyy.LitToy"], "no class `tests.toyy.LitToy`.*import path"),
    (["--data=tests.toy.LitToy"], "tests.toy.LitToy is no LightningDataModule"),
    (["--trainer.callbacks+=EarlyStoping"], "Did you mean.*EarlyStopping"),
    (["--trainer.precision=bf17"], "precision must be one of.*got bf17.*Did you mean bf16"),
    (["--exactness=bitwise", "--trainer.devices=3"], "a power of two of processes, got 3; change"),
    (["--exactness=bitwize"], "must be one of gradient, bitwise.*mean bitwise"),
    (["--data.global_batch_size=abc"], "data.global_batch_size must be a whole number, got abc"),
    (["--data.global_batch_size=0"], "global_batch_size must be at least 1, got 0"),
    (["--config=causal_lm/debug.yaml", "--data.plan=null"], "data.plan must not be null: give a"),
    (["--trainer.max_epochs"], "--trainer.max_epochs: expected one argument"),
    (["other.yaml"], "`other.yaml` is no option.*--config other.yaml"),
    (["--config=toyy.yaml"], "toyy.yaml: this file does not exist.*Did you mean toy.yaml"),
    (["--config=occupation_coder/debg.yaml"], "Did you mean.*occupation_coder/debug.yaml"),
    (["--trainer.strategy=dp"], "no strategy `dp`. Did you mean .*ddp"),
    (["--trainer.strategy=data_parallel"], "no strategy `data_parallel`. Known: ddp.*fsdp"),
    (["--trainer.strategy=deepspeed", "--trainer.strategy.stage=2"], ZERO),
    (["--seed_everything=-1"], "-1 is not in bounds, numpy accep"),
    (["--model.optimizer.lr=abc"], "model.optimizer.lr must be a number, got abc"),
    (["--model.optimizer.class_path=torch.optim.SDG"], "class `torch.optim.SDG`. Did.*optim.SGD"),
    (["--trainer.accelerator=gpuu"], "invalid accelerator name:.*gpuu"),
    (["--trainer.limit_train_batches=0"], "no step would be made: trainer.limit_train_batches"),
    (
        ["--data.micro_batch_size=1", "--trainer.accumulate_grad_batches=2"],
        "1 devices x micro_batch_size 1 x accumulate_grad_batches 2 = 2.*global_batch_size 8",
    ),
    (["--trainer.devices=4", "--data.global_batch_size=3"], "nothing to do.*>= 4"),
    (["--ckpt_path=nope.ckpt"], "nope.ckpt: there is no such checkpoint.*--ckpt_path auto"),
    (["--batch-size", "3"], "no option `--batch-size`.*Flags of other programs.*migration.md"),
    (["--run_name=mine"], "no option `--run_name`. Did you mean --trainer.default_root_dir"),
    (["num_gpus_train=4"], "`num_gpus_train=4` is no option. Options are .*migration.md"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_one_screen_that_names_the_way_out(unisono, toy_config, options, message):
    status, output = unisono("fit", "--config", "toy.yaml", *options)
    lines = output.splitlines()
    assert status in (1, 2)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "Traceback" not in output
    assert _found(message, output), output
    assert not Path("runs").exists(), "a refused command must write nothing"


def _found(pattern: str, output: str) -> bool:
    return re.search(pattern, " ".join(output.split())) is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer:\n  max_epoch: 2\n", "bad.yaml:2: there is no option `trainer.max_epoch`"),
        ("trainer: [\n", "bad.yaml:2: this is not readable YAML"),
        ("- a\n", "bad.yaml: a config is a mapping"),
        ("a: \x00\n", "bad.yaml.*this is not readable YAML"),
        ("config: toy.yaml\n", "bad.yaml: the key `config` is refused"),
        ("data:\n  - {a: 1,\n    a: 2}", "bad.yaml:3: .*key `a` stands twice, first in line 2"),
        ("a: " + "[" * 100_000, "bad.yaml:1: this is not readable YAML: exceeded maximum nest"),
        ("a: " + "9" * 10_000, "bad.yaml: .*limit.*for integer"),
        ("trainer:\n  - max_steps: 2\n", f"bad.yaml: trainer {LIST}"),
        ("data: {init_args: [1]}\n", f"bad.yaml: data.init_args {LIST}"),
        ("model: own.X\n", "model: own.X cannot be imported.*own.py.*No module named 'torc'"),
        ("model: late.X\n", "model: late.X cannot be imported.*late.py.* line 2.*'y' is not def"),
        ("model: {class_path: cut.X}\n", "model: cut.X cannot .*cut.py.*, line 1 .* never closed"),
        ("model: sub.yaml\n", "file sub.yaml: .*the key `a` stands twice, first in line 1"),
        ("exactness: bitwize\n", "bad.yaml:1: exactness must be one of gradient, bitwise, got"),
    ],
)
def test_a_mistake_in_a_config_names_file_and_line(done, toy_config, monkeypatch, text, message):
    monkeypatch.syspath_prepend(Path.cwd())  # as `python -m` does
    Path("own.py").write_text("import torc")
    Path("late.py").write_text("x = 1\ny")
    Path("cut.py").write_text("(")
    Path("bad.yaml").write_text(text)
    Path("sub.yaml").write_text("{a: 1, a: 2}")
    output = done("fit", "--config", "toy.yaml", "--config", "bad.yaml", status=2)
    assert len(output.splitlines()) <= 24
    assert _found(message, output), output


def test_what_a_run_of_an_earlier_version_names_is_told_with_its_line(done, toy_config):
    path = Path("runs/old/config.yaml")
    path.parent.mkdir(parents=True)
    path.with_name("ledger.jsonl").touch()
    callback = "lit_models.training.LastCheckpoint\n    init_args:\n      prints_last: 3"
    path.write_text(f"{toy_config.read_text()}  callbacks:\n  - class_path: {callback}\n")
    long = f"--trainer.profiler={'a' * 300}"  # no folder can have this name
    output = done("fit", f"--config={path}", long, status=2)
    line = len(path.read_text().splitlines())
    message = f"{path}:{line}: there is no option `prints_last`.*version wrote that file, delete"
    assert _found(message, output), output


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("fitt", "Did you mean fit?"),
        (
            "predict --data.predict_files=m.csv",
            "`predict_files`.*give the config of a run with --c",
        ),
        ("test --config toy.yaml --ckpt_path=auto", "no sound checkpoint in runs/toy.*Train first"),
    ],
)
def test_a_command_that_cannot_be_meant_names_the_way_out(done, toy_config, command, message):
    assert _found(message, done(*command.split(), status=2))


@pytest.mark.parametrize("given", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}])
def test_memory_of_a_gpu_may_grow_in_place_unless_the_user_forbids_it(done, toy_config, given):
    others = {k: v for k, v in os.environ.items() if not k.endswith("_ALLOC_CONF")}
    with mock.patch.dict(os.environ, {**others, **given}, clear=True):
        done("fit", "--help")
        found = os.environ.get("PYTORCH_ALLOC_CONF")
    assert found == (None if given else "expandable_segments:True")


def test_a_command_s_help_is_one_screen(done, toy_config):
    for given in (["-h"], ["--config", "toy.yaml", "--trainer.max_epochs=77", "--help"]):
        output = done("fit", *given)
        lines = output.splitlines()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80
        assert "--print_config" in output
    assert re.search(r"--trainer.max_epochs=N +passes over the data", output)


def test_help_on_a_key_is_that_of_its_class(done, toy_config):
    for option, words in (
        ("--model.help=tests.toy.LitToy", "A small network applied"),
        ("--data.help=tests.toy.ToyData", "--data.num_samples"),
    ):
        assert words in done("fit", "--config", "toy.yaml", option)
    assert "--help=all" not in done("fit", "--config", "toy.yaml", "--help=all")


def test_the_version_is_said(done):
    assert re.fullmatch(r"unisono \d+\.\d+\.\d+\n", done("--version"))


def test_every_option_of_the_migration_page_is_there(done):
    text = Path(inspect.getfile(lit_models)).with_name("migration.md").read_text(encoding="utf-8")
    here = " ".join(line.partition(" | ")[2] for line in text.splitlines())
    known: set[str] = set()
    groups = ("data.columns.text=a", "data.augmentation.delete=0", "model.loss.flat_dropout=0")
    groups += ("data.split.test_share=0",)
    for config, more in (
        ("occupation_coder/finetune", groups),
        ("causal_lm/lora", ("model.computation.compile=false",)),
        ("consistency_lens/fit", ("model.temperature.end=1", "model.lens.num_words=3")),
    ):
        options = [f"--config={config}.yaml", *(f"--{option}" for option in more)]
        printed = done("fit", *options, "--print_config")
        keys = (key for key, _ in flat(yaml.safe_load(printed)))
        known |= {key.replace("init_args.", "") for key in keys}
    for prefix, classes in {
        "trainer.strategy": (ReplicatedStrategy, FullyShardedStrategy),
        "trainer.callbacks": (LastCheckpoint,),
        "model.lr_scheduler": (WarmupDecay,),
        "data.code_system": (CodeSystem,),
        "trainer.logger": (WandbLogger,),
    }.items():
        names = {name for cls in classes for name in inspect.signature(cls).parameters}
        known |= {f"{prefix}.{name}" for name in names} | {prefix}
    # From the parser itself, from **kwargs, or groups that one class or another has.
    known |= {"trainer.logger.resume", "data.code_book.path", "data.code_system", "config"}
    for command in (submit, Resources, chain, doctor):
        known |= {name.replace("_", "-") for name in inspect.signature(command).parameters}
    torchrun = {"nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port"}
    torchrun |= {"nodes", "ntasks-per-node"}  # and srun
    others = torchrun | {"change.dump.devices", "change.lens.devices", "print_config"}
    named = set(re.findall(r"--([a-z][\w-]*(?:\.\w+)*)", here))
    assert len(named) > 60
    assert named - known - others == set()


PLAIN = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule

class LitPlain(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class PlainData(LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 1), batch_size=4)
"""


def test_plain_classes_of_the_working_folder_train_with_a_warning(done, toy_config, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    Path("own_plain.py").write_text(PLAIN)
    quiet = ["--trainer.max_epochs=1", "--trainer.logger=false", "--trainer.accelerator=cpu"]
    classes = ["--model=own_plain.LitPlain", "--data=own_plain.PlainData"]
    output = done("fit", *classes, *quiet, "--trainer.devices=1")
    assert output.count("warning: LitPlain on PlainData is plain Lightning") == 1
    assert Path("runs/unnamed/checkpoints/last.ckpt").exists()
    assert not Path("runs/unnamed/ledger.jsonl").exists()
    before = Path("runs/unnamed/checkpoints/last.ckpt").read_bytes()
    done("fit", *classes, *quiet, "--trainer.devices=1")
    assert Path("runs/unnamed/checkpoints/last.ckpt").read_bytes() == before
    assert Path("runs/unnamed-2/checkpoints/last.ckpt").exists()
    output = done("fit", "--config=toy.yaml", "--data=own_plain.PlainData", status=2)
    words = "error: LitToy reads planned batches, and PlainData is no PlannedDataModule"
    assert _found(words, output)
    Path("mine.yaml").write_text("model: {class_path: own_plain.LitPlain}")
    done("fit", "--config=mine.yaml", classes[1], "--print_config")


def test_configs_merge_a_shipped_one_too_and_the_command_line_wins(done, toy_config):
    Path("more.yaml").write_text("data: {init_args: {num_samples: 9}}\ntrainer: {max_epochs: 7}\n")
    configs = ["--config=toy.yaml", "--config=more.yaml", "--config=hardware/ddp.yaml"]
    output = done("fit", *configs, "--trainer.max_epochs=4", "--print_config")
    for value in ("strategy: ddp", "num_samples: 9", "max_epochs: 4"):
        assert value in output


def test_a_second_fit_takes_a_folder_of_its_own_and_says_so(done, toy_config, monkeypatch):
    monkeypatch.setenv("HOME", str(Path.cwd()))
    Path("runs/toy").mkdir(parents=True)
    Path("runs/toy/notes.txt").write_text("mine")  # no ledger either, so the folder holds no run
    done("fit", "--config", "toy.yaml")
    timer = "--trainer.callbacks=lightning.pytorch.callbacks.Timer"  # has an enum among its options
    output = done("fit", "--config=toy.yaml", timer, f"--{ROOT}=~/runs/toy")
    assert re.search(r"^epoch 1/1 .* loss [\d.]+  val/loss [\d.]+ ", output, re.M)
    place = f"{Path.cwd()}/runs/toy"
    assert f"{place} holds a run already: this one writes to {place}-2" in output
    assert Path("runs/toy-2/ledger.jsonl").exists()
    files = {p.name for p in Path("runs/toy").iterdir()}
    expected = {"config.yaml", "ledger.jsonl", "metrics.csv", "topology.json", "tensorboard"}
    assert expected | {"checkpoints"} <= files


def test_a_start_that_fails_leaves_no_config(unisono, toy_config):
    options = ("--trainer.callbacks+=LearningRateMonitor", "--trainer.logger=false")
    assert "Cannot use `LearningRateMonitor`" in unisono("fit", "--config", "toy.yaml", *options)[1]
    assert not Path("runs/toy/config.yaml").exists()


def test_ckpt_path_auto_resumes_the_newest_run_and_keeps_its_records(done, toy_config):
    output = done("fit", "--config", "toy.yaml", "--ckpt_path", "auto")
    assert "a fresh start" in output
    before = Path("runs/toy/metrics.csv").read_text().splitlines()
    more = ["--trainer.max_epochs=2", "--model.optimizer.lr=0.02"]
    output = done("fit", "--config", "toy.yaml", "--ckpt_path", "auto", *more)
    assert "resumes from runs/toy/checkpoints/last.ckpt" in output
    assert "model.optimizer.lr: the checkpoint has 0.01, this run uses 0.02" in output
    assert Path("runs/toy/metrics.csv").read_text().splitlines()[: len(before)] == before
    assert Path("runs/toy/config.yaml").exists()
    assert Path("runs/toy/config-2.yaml").exists()
    assert not Path("runs/toy-2").exists()
    steps = [row.get("step") for row in json_rows("runs/toy/ledger.jsonl")]
    assert [s for s in steps if s] == list(range(1, 15))


def test_evaluation_takes_the_model_from_the_checkpoint(done, toy_config, monkeypatch):
    options = ["--trainer.max_epochs=2", "--model.optimizer.lr=0.03"]
    done("fit", "--config", "toy.yaml", *options)
    records = Path("runs/toy/metrics.csv")
    steps = [line.partition(",")[0] for line in records.read_text().splitlines()]
    monkeypatch.setenv("HOME", str(Path.cwd()))  # a shell leaves the ~ of an option
    checkpoint = "--ckpt_path=~/runs/toy/checkpoints/previous.ckpt"
    where = ["--trainer.devices=1", "--trainer.accelerator=cpu"]
    output = done("test", "--data=tests.toy.ToyData", checkpoint, *where)
    assert "test/loss" in output
    after = [line.partition(",")[0] for line in records.read_text().splitlines()]
    assert after[: len(steps)] == steps  # including the steps after its checkpoint
    assert "lr: 0.03" in Path("runs/toy/config-test.yaml").read_text()
    assert "no --ckpt_path: the model is used as it is built" in done("test", "--config=toy.yaml")


def test_test_after_fit_tests_the_best_checkpoint(done, toy_config):
    done("fit", "--config", "toy.yaml", "--trainer.max_steps=0")  # only prepares the data
    output = done("fit", "--config", "toy.yaml", "--test_after_fit=true")
    assert "test/loss" in output
    assert "Loaded model weights from the checkpoint at" in output
    assert re.search(r"^test/loss +[\d.]{5,6}$", output, re.M)  # four digits
    assert re.search(
        r"^best: val/loss [\d.]+, step \d+, runs/toy/checkpoints/best.ckpt, test/loss [\d.]+$",
        output,
        re.M,
    )
    assert "report: unisono report runs/toy\n" in output


@pytest.mark.slow
def test_what_spawned_processes_log_is_followed_by_the_test(toy_config):
    options = ("--trainer.devices=2", "--trainer.strategy=ddp_spawn", "--test_after_fit=true")
    where = (f"--config={toy_config}", f"--trainer.default_root_dir={Path('runs').absolute()}")
    statuses, outputs = finished(started("-m", "lit_models", "fit", *where, *options))
    assert statuses == [0], outputs
    rows = csv_rows("runs/metrics.csv")
    found = [name + row["step"] for row in rows for name in row if row[name] and "/loss" in name]
    assert found == [*(f"train/loss{step}" for step in range(1, 8)), "val/loss6", "test/loss7"]


def test_a_callback_of_the_config_replaces_the_default_of_its_kind(done, toy_config):
    done(
        "fit",
        "--config=toy.yaml",
        "--trainer.callbacks+=TQDMProgressBar",
        "--trainer.callbacks+=lit_models.training.LastCheckpoint",
        "--trainer.callbacks.every_n_steps=3",
        "--trainer.callbacks.every_epoch=false",
        "--trainer.callbacks.every_n_minutes=null",
        "--trainer.log_every_n_steps=0",
        "--trainer.logger=false",
    )
    assert not Path("runs/toy/metrics.csv").exists()
    assert torch.load("runs/toy/checkpoints/last.ckpt", weights_only=True)["global_step"] == 6


def test_a_logger_of_the_config_joins_the_default_ones(done, toy_config):
    done("fit", "--config=toy.yaml", "--trainer.logger+=CSVLogger", "--trainer.logger.save_dir=own")
    assert Path("runs/toy/metrics.csv").exists()
    assert list(Path("own").rglob("metrics.csv"))


def test_a_run_that_shall_keep_no_checkpoints_keeps_none(done, toy_config):
    done("fit", "--config=toy.yaml", "--trainer.enable_checkpointing=false")
    assert not Path("runs/toy/checkpoints").exists()


def test_an_error_of_a_library_is_one_screen_and_its_traceback_a_file(capsys, own_folder):
    from lit_models.training.rules import check_strategy

    def fail() -> None:
        error = ValueError("Invalid learning rate: -1.0\n" + "a long line\n" * 30)
        error.__dict__["run_folder"] = str(own_folder / "runs" / "mine")
        error.__context__ = RuntimeError("the error before it")
        error.__context__.add_note("rank 1, step 7")
        raise error

    assert run_guarded(lambda: check_strategy("dp", [])) == 1
    assert "Type" not in capsys.readouterr().err
    assert run_guarded(lambda: [][1]) == 1  # a bug, and no folder for its traceback
    assert capsys.readouterr().err == (
        "error: IndexError: list index out of range\n"
        "UNISONO_TRACEBACK=1 shows where it was raised.\n"
    )
    assert list(own_folder.iterdir()) == []
    (own_folder / "runs" / "mine").mkdir(parents=True)
    assert run_guarded(fail) == 1
    shown = capsys.readouterr().err
    assert "error: ValueError: Invalid learning rate: -1.0\n" in shown
    assert "rank 1, step 7" in shown
    assert "Its traceback is in" in shown
    assert "in fail\n" in (own_folder / "runs" / "mine" / "error.txt").read_text()


def test_the_traceback_is_there_on_request(capsys, monkeypatch):
    def fail() -> None:
        raise UsageError("no such thing")

    monkeypatch.setenv("UNISONO_TRACEBACK", "1")
    assert run_guarded(fail) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_long_message_is_cut_to_one_screen():
    lines = screen("word " * 1000).splitlines()
    assert len(lines) < 24
    assert lines[-1].startswith("… (more")


def test_a_step_that_is_not_finite_is_one_screen(done, toy_config):
    output = done("fit", f"--config={toy_config}", "--data.nan_sample=20", status=1)
    assert "Traceback" not in output
    assert re.search(r"error: step \d+: loss or gradient is not finite", output)
    assert "Samples: " in output


@pytest.mark.parametrize(
    ("given", "of_run", "has_half", "precision", "matmul"),
    [
        ([], None, True, "bf16-mixed", "high"),
        ([], None, False, "32-true", "high"),
        ([], "64-true", True, "64-true", "high"),
        (["--exactness=bitwise"], None, True, "32-true", "highest"),
        (["--trainer.precision=16-mixed"], "64-true", True, "as given", "high"),
        (["--trainer.accelerator=cpu"], None, True, None, "highest"),
    ],
)
def test_gpus_train_in_bf16_mixed_unless_something_else_is_asked_for_or_begun(
    unisono, toy_config, monkeypatch, given, of_run, has_half, precision, matmul
):
    asked: dict[str, Any] = {}

    def noted(self: LightningCLI, **kwargs: Any) -> None:
        asked.update(kwargs)
        raise RuntimeError("no trainer is needed")

    monkeypatch.setattr(LightningCLI, "instantiate_trainer", noted)
    monkeypatch.setattr("tests.toy.LitToy.takes_half_weights", True)  # so that fsdp accepts it
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_half)
    if of_run is not None:
        Path("runs/toy").mkdir(parents=True)
        Path("runs/toy/topology.json").write_text(json.dumps({"precision": of_run}))
    gpu = [f"--config={toy_config}", "--trainer.accelerator=gpu", *given]
    assert "no trainer is needed" in unisono("fit", *gpu)[1]
    assert asked.get("precision", "as given") == precision
    assert isinstance(asked["strategy"], FullyShardedStrategy) == (precision == "bf16-mixed")
    (topology,) = (c for c in asked["callbacks"] if isinstance(c, Topology))
    device = torch.device("cpu" if asked["accelerator"] == "cpu" else "cuda")
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda x: asked.update(matmul=x))
    topology.setup(SimpleNamespace(strategy=SimpleNamespace(root_device=device)), None, "fit")
    assert asked.get("matmul", "highest") == matmul

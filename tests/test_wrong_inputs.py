"""Wrong inputs of whole commands: one screen with file, line, value and way out, nothing lost."""

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.wrong_inputs import FIT, ONE_DEVICE, SOUND, contents, error_of, place

Unisono = Callable[..., tuple[int, str]]
TEST = ["test", *FIT[1:], "--ckpt_path=runs/mine/checkpoints/last.ckpt"]
PREDICT = ["predict", *ONE_DEVICE, "--ckpt_path=runs/mine/checkpoints/last.ckpt"]
CODE_MINE = [*PREDICT, "--data.predict_files=mine.csv"]
CHECK = ["check", *FIT[1:]]
GLUED = SOUND + '"smith,en,83110\nminer",en,71105\n'
REJECT = "--data.on_bad_rows=reject writes them to rejected.csv"
# What a refused run may leave behind: a folder of its own, or a new file beside the old ones.
BEGUN = re.compile(
    r"runs/error.txt|runs/mine-2(/.*)?|runs/mine/\..*\.parts|"
    r"runs/mine/(error.txt|config-\w+\.yaml|tensorboard/events.*)"
)

# name: (command, message)
WRONG_OPTIONS: dict[str, tuple[list[str], str]] = {
    "a missing file": (
        [*FIT, "--data.train_files=tran.csv"],
        'data.train_files: tran.csv does not exist. Did you mean "train.csv"',
    ),
    "nothing to validate on": (
        [*FIT, "--data.split.validation_share=0"],
        "name data.validation_files or raise data.split.validation_share .*"
        "trainer.limit_val_batches=0 validates nothing",
    ),
    "a temperature that the checkpoint does not have": (
        [*TEST, "--model.temperature.flat=5.0"],
        "other values have no effect: model.temperature .*Leave them out, or take its run's config",
    ),
    "a separator that the table does not have": (
        [*FIT, "--data.table.separator=;"],
        "train.csv has no column code_1; it has: text,language,code_1. Name its code columns",
    ),
    "a file on the way to the run folder": (
        [*FIT, "--trainer.default_root_dir=train.csv/x"],
        "trainer.default_root_dir train.csv/x: train.csv is a file; name a folder",
    ),
    "a folder that cannot be made": (
        [*FIT, "--trainer.default_root_dir=/proc/none/x"],
        "/proc/none: No such file or directory; choose another path",
    ),
    "missing weights to start from": (
        [*FIT, "--model.init_from=none.ckpt"],
        "model.init_from: there is no checkpoint none.ckpt. A run keeps its own in runs/NAME",
    ),
    "a part of no checkpoint": (
        ["fit", "--config=occupation_coder/finetune.yaml"],
        "names no checkpoint: the run would train from .*--model.init_from=BEST.ckpt",
    ),
    "a pattern without quotes": (
        ["fit", "--config=causal_lm/lora.yaml", "--model.lora.targets=[*_proj]"],
        r"error: model.lora.targets: \[\*_proj\]: in YAML a word that begins with \* is quoted",
    ),
    "the table itself as the coded one": (
        [*CODE_MINE, "--data.predict_output=mine.csv"],
        "mine.csv exists and is not overwritten; .*name another file with --data.predict_output",
    ),
    "a rate below 0": (
        [*FIT, "--model.optimizer.lr=-1"],
        "ValueError: Invalid learning rate: -1.0 Its traceback is in runs/error.txt",
    ),
    "a clipping below 0": (
        [*FIT, "--trainer.gradient_clip_val=-1"],
        "trainer.gradient_clip_val must be 0 or more, got -1.*: .* 1.0 is usual",
    ),
}
# name: (command, files, message); line 62 follows the 61 valid ones.
WRONG_FILES: dict[str, tuple[list[str], dict[str, bytes | str], str]] = {
    "an empty file": (FIT, {"train.csv": ""}, "train.csv is empty; it needs a header and rows"),
    "a config in another encoding": (
        [*FIT, "--config=bad.yaml"],
        {"bad.yaml": b"data:\n  train_files: sm\xf8r.csv\n"},
        "bad.yaml is not UTF-8 .*byte 0xf8 .*; save it as UTF-8",
    ),
    "a checkpoint with one wrong byte": (
        [*TEST, "--ckpt_path=byte.ckpt"],
        {"byte.ckpt": "BYTE"},
        "byte.ckpt is damaged: the checksum of its record .* is wrong. Use another one",
    ),
    "a checkpoint that holds code": (
        [*TEST, "--ckpt_path=code.ckpt"],
        {"code.ckpt": "CODE"},
        "code.ckpt cannot be read .*it names pathlib.*Only plain data is loaded, never code; use",
    ),
    "a checkpoint of another family": (
        [*TEST, "--ckpt_path=toy.ckpt"],
        {"toy.ckpt": "TOY"},
        "toy.ckpt is a checkpoint of lit_models.LitCausalLM, but --model is lit_models.LitOccup.*"
        ".*Take a checkpoint of that class",
    ),
    "a checkpoint that does not name its family": (
        [*CODE_MINE, "--ckpt_path=plain.ckpt"],
        {"plain.ckpt": "PLAIN"},
        "checkpoint is of another family: it holds no occupation_recipe; give one of LitOccupation",
    ),
    "another family's weights to start from": (
        [*FIT, "--model.init_from=toy.ckpt"],
        {"toy.ckpt": "TOY"},
        r"weights of toy.ckpt \(of lit_models.LitCausalLM\) do not fit LitOcc.*: .* missing "
        "there, .*Use the model options",
    ),
    "a table to code without its text column": (
        CODE_MINE,
        {"mine.csv": "job\nsmith\n"},
        'mine.csv has no column "text" .*it has: job. Name one of them with --data.columns.text',
    ),
    "a glued row to code": (
        CODE_MINE,
        {"mine.csv": 'text\nsmith\n"miner\ntailor"s\n'},
        f'mine.csv:3: ""miner": a quote opens a value.*close it.*{REJECT}',
    ),
    "bad rows to check": (
        CHECK,
        {"train.csv": GLUED + "smith,en,8311x\n,en,83110\n"},
        r"3 bad rows .*train.csv:62: .*glues rows.*train.csv:64: code \"8311x\".*train.csv:65: "
        ".*Correct them, or leave them out of a training: --data.on_bad_rows=reject",
    ),
    "weights that are not finite": (
        [*CODE_MINE, "--ckpt_path=nan.ckpt"],
        {"nan.ckpt": "NAN"},
        "the weights network.* hold values that are not finite .* use a checkpoint from before",
    ),
    "a damaged plan": (
        ["replay", "runs/mine", "--step=1"],
        {"runs/mine/plan.json": "{"},
        "runs/mine/plan.json is damaged .*; only the run writes it",
    ),
    "a damaged topology": (
        ["replay", "runs/mine", "--step=1"],
        {"runs/mine/topology.json": "{"},
        "runs/mine/topology.json is damaged .*; only the run writes it",
    ),
    "damaged lengths": (
        ["verify", "runs/mine"],
        {"runs/mine/plan_lengths.npy": "{"},
        "runs/mine/plan_lengths.npy is damaged .*; only the run writes it: copy it again",
    ),
    "a checkpoint whose weights are a text": (
        [*TEST, "--ckpt_path=text.ckpt"],
        {"text.ckpt": "TEXT"},
        "text.ckpt holds no state_dict",
    ),
    "a damaged ledger": (
        ["verify", "runs/mine"],
        {"runs/mine/ledger.jsonl": b"{}\n\xff\0\n{}\n"},
        r"runs/mine/ledger.jsonl, line \d is damaged .*copy it again from where it was whole",
    ),
}
WRONG = {name: (argv, {}, said) for name, (argv, said) in WRONG_OPTIONS.items()} | WRONG_FILES


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_input_is_one_screen_that_names_the_way_out_and_overwrites_nothing(
    unisono, copied_run, name
):
    argv, files, message = WRONG[name]
    for path, content in files.items():
        place(Path(path), content)
    before = contents(copied_run)
    status, output = unisono(*argv)
    assert status in (1, 2)
    assert re.search(message, error_of(output)), output
    after = contents(copied_run)
    assert {path: after.get(path) for path in before} == before
    new = sorted(after.keys() - before.keys())
    assert [path for path in new if not BEGUN.fullmatch(path) or "unfinished" in path] == []


def test_a_pipe_is_refused_instead_of_waited_for(done, copied_run):
    os.mkfifo("pipe.csv")
    output = done(*FIT, "--data.train_files=pipe.csv", status=1)
    assert "pipe.csv is a folder, pipe or device" in " ".join(output.split())


def test_one_file_for_training_and_test_and_one_label_are_told(done, copied_run, caplog):
    Path("same.csv").write_text(re.sub(r"\d{5}", "83110", SOUND))
    files = ["--data.train_files=same.csv", "--data.test_files=[s*e.csv]"]
    done(*FIT, *files, "--trainer.fast_dev_run=true")
    shown = caplog.text
    assert "same.csv is named for training and for validation or test: " in shown
    assert "All 54 rows of training have the same code" in shown
    assert "check the code column" in shown


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "0", "needs RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ("MASTER_ADDR", "node7.invalid", "MASTER_ADDR=node7.invalid is no machine that can be"),
    ],
)
def test_a_launchers_wrong_variable_is_named(done, copied_run, monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    assert message in " ".join(done(*FIT, status=2).split())


def test_a_trial_run_of_a_recipe_without_validation_needs_no_row_for_it(done, copied_run):
    recipe = ["--data.split.validation_share=0", "--trainer.limit_val_batches=0"]
    recipe += ["--test_after_fit=true"]
    output = done(*FIT, *recipe, "--trainer.fast_dev_run=true")
    assert "val/" not in output
    assert "next:" not in output  # the run keeps no checkpoint
    output = done(*FIT, *recipe)
    assert "next: unisono predict" in output
    assert "/checkpoints/last.ckpt" in output  # without validation there is no best checkpoint
    (line,) = re.findall(r"^next: unisono (.*)$", output, re.M)
    output = done(*shlex.split(line))
    assert " different inputs predicted, written to" in output

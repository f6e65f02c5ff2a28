"""A working folder for wrong inputs: valid tables, and a run of two training steps."""

import os
import shlex
import sys
from contextlib import chdir
from pathlib import Path
from unittest import mock

import torch

TRADES = ("smith", "miner", "tailor", "baker", "farmer", "weaver")
CODES = ("83110", "71105", "79100", "77610", "61110", "06510")
SOUND = "text,language,code_1\n" + "".join(
    f"{trade} {chr(97 + i)}{chr(97 + k)},en,{code}\n"
    for i in range(10)
    for k, (trade, code) in enumerate(zip(TRADES, CODES, strict=True))
)
ONE_DEVICE = shlex.split("""
--config=occupation_coder/debug.yaml --trainer.accelerator=cpu --trainer.devices=1
--trainer.enable_model_summary=false --trainer.default_root_dir=runs/mine
--data.loader.num_workers=0
""")
FIT = ["fit", *ONE_DEVICE, "--trainer.max_steps=2"]
FIT += ["--data.train_files=train.csv", "--data.columns.language=language"]


def run_in(folder: Path, *argv: str) -> None:
    """Runs a command in this process and in this folder; it must succeed."""
    from lit_models.__main__ import main

    with chdir(folder), mock.patch.dict(os.environ), mock.patch.object(sys, "argv", ["", *argv]):
        assert main() == 0


def make_run(folder: Path) -> Path:
    """Trains two steps in this folder and returns the run."""
    (folder / "train.csv").write_text(SOUND)
    (folder / "mine.csv").write_text("text\nsmith\nminer of coal\n")
    run_in(folder, *FIT)
    return folder


def place(path: Path, content: bytes | str) -> None:
    """Writes a wrong input; a word in capitals stands for a checkpoint with that fault."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sound = Path("runs/mine/checkpoints/last.ckpt")
    if content == "BYTE":
        whole = bytearray(sound.read_bytes())
        whole[len(whole) // 2] ^= 1
        path.write_bytes(whole)
    elif content == "TOY":
        made_by = {"_class_path": "lit_models.LitCausalLM"}
        torch.save({"state_dict": {}, "hyper_parameters": made_by}, path)
    elif content == "PLAIN":
        torch.save({"state_dict": {"weight": torch.zeros(2)}}, path)
    elif content == "NAN":
        checkpoint = torch.load(sound, weights_only=True)
        next(v for v in checkpoint["state_dict"].values() if v.is_floating_point()).fill_(torch.nan)
        torch.save(checkpoint, path)
    elif content == "TEXT":
        torch.save({**torch.load(sound, weights_only=True), "state_dict": "none"}, path)
    elif content == "CODE":
        torch.save({"state_dict": {}, "run_me": Path("/")}, path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def contents(folder: Path) -> dict[str, bytes | None]:
    """Path -> bytes of each file, `None` for a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def error_of(output: str) -> str:
    """The error in an output, on one line; it fits 24 lines of 80 columns, no traceback."""
    shown = output[max(output.find("error: "), 0) :]
    assert "Traceback" not in output
    assert len(shown.splitlines()) <= 24
    assert max(map(len, shown.splitlines())) <= 80
    return " ".join(shown.split())

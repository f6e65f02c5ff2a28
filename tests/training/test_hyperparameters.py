"""Checkpoints, exported folders and run folders from strangers: loading them runs no code."""

import json
import os
import shutil
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import datamodules
import lit_models
from lit_models import LitCausalLM, LitOccupationCoder
from lit_models.commands.export import export
from lit_models.config_files import read_config
from lit_models.training.hyperparameters import UNTRUSTED, StoredClasses, known_arguments
from tests.toy import LitToy
from tests.wrong_inputs import FIT, ONE_DEVICE

CKPT = "planted.ckpt"
# Importing it writes a file, and so does calling what it defines.
MINE = """
from pathlib import Path
import torch

Path("witness").touch()

def call(*given, **named):
    Path("called").touch()

class Schedule(torch.optim.lr_scheduler.StepLR):
    def __init__(self, optimizer, step_size: int = 5) -> None:
        super().__init__(optimizer, step_size)

class LitMine:
    pass
"""
LAUNCH = {
    "class_path": "torch.distributed.launcher.api.elastic_launch",
    "init_args": {"config": {}, "entrypoint": "touch"},
}


def of_schedule(lr_lambda: Any) -> dict[str, Any]:
    schedule = "torch.optim.lr_scheduler.LambdaLR"
    return {"lr_scheduler": {"class_path": schedule, "init_args": {"lr_lambda": lr_lambda}}}


@pytest.fixture
def planted(folder_with_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a valid run, and beside it a module that must never be imported."""
    shutil.copytree(folder_with_run, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(tmp_path / "here")
    Path("mine.py").write_text(MINE)
    Path("mine.yaml").write_text("class_path: mine.Schedule\n")
    export(Path("runs/mine/checkpoints/last.ckpt"), to=Path("exported"))
    return tmp_path / "here"


@pytest.fixture(autouse=True)
def _forgets_what_was_planted() -> Iterator[None]:
    yield
    sys.modules.pop("mine", None)


def plant(values: dict[str, Any]) -> None:
    """Write the same names into a checkpoint, an exported folder and the run's config."""
    content = torch.load("runs/mine/checkpoints/last.ckpt", weights_only=True)
    content["hyper_parameters"] |= values
    torch.save(content, CKPT)
    config = json.loads(Path("exported/config.json").read_text())
    run = read_config(Path("runs/mine/config.yaml"))
    model = {name: value for name, value in values.items() if name != "_class_path"}
    config["init_args"] |= model
    run["model"]["init_args"] |= model
    if "_class_path" in values:
        config["class_path"] = run["model"]["class_path"] = values["_class_path"]
    Path("exported/config.json").write_text(json.dumps(config))
    Path("runs/mine/config.yaml").write_text(json.dumps(run))  # JSON is valid YAML


EVALUATE = [*ONE_DEVICE, "--data.test_files=train.csv", "--data.predict_files=mine.csv"]
COMMANDS = {
    "fit": [*FIT, f"--ckpt_path={CKPT}", "--trainer.max_steps=3"],
    "fit from it": [*FIT, f"--model.init_from={CKPT}"],
    "fit from an export": [*FIT, "--model.init_from=exported"],
    "validate": ["validate", *FIT[1:], f"--ckpt_path={CKPT}"],
    "test": ["test", *EVALUATE, f"--ckpt_path={CKPT}"],
    "predict": ["predict", *EVALUATE, "--ckpt_path=exported"],
    "replay": ["replay", "runs/mine", "--step=1"],
}
DOORS: dict[str, Callable[[], Any]] = {
    "load_from_checkpoint": lambda: LitOccupationCoder.load_from_checkpoint(CKPT),
    "from_exported": lambda: LitOccupationCoder.from_exported("exported"),
}
NAMES = [
    ("lr_scheduler", {"lr_scheduler": {"class_path": "mine.Schedule"}}, "mine.Schedule"),
    ("lr_scheduler", {"lr_scheduler": "mine.call"}, "mine.call"),
    ("lr_scheduler", {"lr_scheduler": "mine.yaml"}, "mine.yaml"),
    ("lr_scheduler.init_args.lr_lambda", of_schedule("mine.call"), "mine.call"),
    ("lr_scheduler.init_args.lr_lambda", of_schedule(LAUNCH), LAUNCH["class_path"]),
    ("encoder", {"encoder": {"class_path": "mine.LitMine"}}, "mine.LitMine"),
    ("optimizer", {"optimizer": "os._exit"}, "os._exit"),
    ("class_path", {"_class_path": "mine.LitMine"}, "mine.LitMine"),
]


@pytest.mark.parametrize("door", [*COMMANDS, *DOORS])
def test_no_door_imports_or_calls_what_a_file_names(door, planted, unisono):
    changed = [Path("exported/config.json"), Path("runs/mine/config.yaml")]
    sound = {path: path.read_bytes() for path in changed}
    names = NAMES if door in DOORS else NAMES[3:4] + NAMES[-1:]  # a start takes half a second
    for key, values, name in names:
        plant(values)
        if door in DOORS:
            with pytest.raises(ValueError, match=f"{key}.* names '{name}'.*trust_checkpoint"):
                DOORS[door]()
        else:
            status, output = unisono(*COMMANDS[door])
            assert status != 0, output
            assert f"{key} names '{name}'" in " ".join(output.split()), output
            assert "--trust_checkpoint" in output
        assert not Path("witness").exists(), name
        assert "mine" not in sys.modules, name
        for path, content in sound.items():
            path.write_bytes(content)


def test_a_report_of_a_planted_run_names_its_class_and_imports_nothing(planted, done):
    plant({"_class_path": "mine.LitMine"})
    done("report", "runs/mine")
    assert "mine.LitMine" in Path("runs/mine/report.html").read_text()
    assert not Path("witness").exists()


def test_an_export_imports_no_foreign_class(planted, done):
    plant({"_class_path": "mine.LitMine"})
    output = done("export", CKPT, "--to=out", status=1)
    assert "class_path names 'mine.LitMine', which would be imported" in " ".join(output.split())
    assert not Path("witness").exists()
    assert not Path("out").exists()
    output = done("export", CKPT, "--to=out", "--trust_checkpoint", status=1)
    assert "mine.LitMine is no ExactModule" in " ".join(output.split())
    assert Path("witness").exists()


def test_a_trusted_checkpoint_may_name_anything(planted, done):
    plant({"lr_scheduler": {"class_path": "mine.Schedule"}})
    module = LitOccupationCoder.load_from_checkpoint(CKPT, trust_checkpoint=True)
    assert isinstance(module, LitOccupationCoder)
    assert Path("witness").exists()
    Path("witness").unlink()
    sys.modules.pop("mine")
    done(*["test", *EVALUATE, f"--ckpt_path={CKPT}", "--trust_checkpoint"])
    assert Path("witness").exists()


def test_a_name_of_the_users_own_config_is_the_users(planted, done):
    plant(of_schedule("mine.call"))
    Path("own.yaml").write_text(yaml.safe_dump({"model": {"init_args": of_schedule("mine.call")}}))
    done("test", *EVALUATE, "--config=own.yaml", f"--ckpt_path={CKPT}")


SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}


@pytest.mark.parametrize(
    "values",
    [
        {"optimizer": "torch.optim.SGD", "network": "1b", "pretrained": "a/folder.of/os._exit"},
        {"optimizer": SGD, "network": {"hidden_size": 8, "norm": "rms"}, "freeze": ["a.b"]},
        {
            "lr_scheduler": {
                "class_path": "lightning.pytorch.cli.ReduceLROnPlateau",
                "init_args": {"monitor": "val/loss"},
            }
        },
    ],
)
def test_what_our_own_checkpoints_name_is_allowed(values):
    UNTRUSTED.check("x.ckpt", "lit_models.LitCausalLM", values)


@pytest.mark.parametrize(
    "values",
    [
        {"optimizer": "lit_models.training.optim.configured"},
        {"optimizer": "lit_models.commands.submit.Path"},
        {"optimizer": {"class_path": ["os"]}},
        {"optimizer.class_path": "os.x"},
        {"optimizer": {"init_args": {"x": "os.x"}}},
        {"network": "{class_path: os.x}"},
        {"network": "mine"},
        {"stray": [{"a": {"class_path": "os.x"}}]},
        {"freeze": {"class_path": "os.x"}},
    ],
)
def test_ways_around_are_refused(values, own_folder):
    Path("mine").write_text("class_path: os.x")  # the parser would read a file of this name
    with pytest.raises(ValueError, match=r"x\.ckpt: .* names .*trust_checkpoint"):
        UNTRUSTED.check("x.ckpt", LitCausalLM, values)
    StoredClasses(trust=True).check("x.ckpt", LitCausalLM, values)


def test_all_our_constructors_say_the_types_of_their_arguments():
    """Unreadable annotations would make a checkpoint's valid paths be refused."""
    for name in lit_models.__all__:
        made = getattr(lit_models, name)
        for kind in getattr(made, "__mro__", ()):
            is_own = kind.__module__.startswith(("lit_models", "datamodules"))
            if is_own and "__init__" in vars(kind):
                assert typing.get_type_hints(kind.__init__), kind
    with pytest.raises(TypeError, match="keeps no arguments of a datamodule"):
        datamodules.OccupationDataModule.load_from_checkpoint("x.ckpt")


def test_a_model_folders_own_code_is_not_run(tmp_path):
    from datamodules.tokenizers.text import TokenizerOptions, make_tokenizer
    from lit_models.causal_lm.pretrained import network_from_config

    code = {"AutoTokenizer": ["mine.T", None], "AutoModelForCausalLM": "mine.M"}
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'witness')!r}, 'w')")
    config = {"model_type": "mine", "auto_map": code, "tokenizer_class": "T"}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps(config))
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="names no end-of-text token"):
        make_tokenizer(TokenizerOptions("folder", path=str(tmp_path)), iter(()))
    with pytest.raises(KeyError):
        network_from_config(
            {"kind": "transformers", "config": {**config, "_name_or_path": str(tmp_path)}}
        )
    assert not (tmp_path / "witness").exists()
    assert os.listdir(tmp_path)


def test_an_option_of_another_version_warns_and_has_no_effect(done, toy_config):
    done("fit", "--config=toy.yaml")
    path = Path("runs/toy/checkpoints/last.ckpt")
    content = torch.load(path, weights_only=True)
    content["hyper_parameters"]["lr_scaling"] = "none"
    torch.save(content, path)
    output = done("validate", "--config=toy.yaml", f"--ckpt_path={path}")
    assert "another version; lr_scaling=none has no effect any more" in " ".join(output.split())
    export(path, to=Path("exported"), trust_checkpoint=True)
    with pytest.warns(UserWarning, match="of another version, whose lr_scaling=none has no effect"):
        module = LitToy.from_exported("exported", trust_checkpoint=True)
    assert torch.equal(module.model[0].weight, content["state_dict"]["model.0.weight"])


def test_options_of_another_version_are_found_at_any_depth():
    encoder = "lit_models.occupation_coder.encoders.CharacterEncoder"
    options = {"class_path": encoder, "init_args": {"width": 8, "gone": 1}}
    loss = {"linear": {"cost": 1.0, "gone": 2}, "gone": {"x": 3}}
    values = {"encoder": options, "loss": loss, "temperature": {"flat": 1.0}, "gone": 4}
    known, gone, _ = known_arguments(LitOccupationCoder, values)
    assert gone == ["encoder.gone=1", "loss.linear.gone=2", "loss.gone={'x': 3}", "gone=4"]
    options = {"class_path": encoder, "init_args": {"width": 8}}
    loss = {"linear": {"cost": 1.0}}
    assert known == {"encoder": options, "loss": loss, "temperature": {"flat": 1.0}}
    fusion, heads = {"fusion": {"weight": 0.5}}, {"heads": {"a": {"weight": 2.0}}}  # user's names
    assert known_arguments(lit_models.LitRetriever, {"gone": None, **fusion}) == (fusion, [], [])
    assert known_arguments(lit_models.LitTextScorer, heads) == (heads, [], [])

"""`unisono export`: a plain folder whose module computes the same bits as the checkpoint's."""

import json
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lit_models import LitOccupationCoder
from lit_models.commands.export import export
from lit_models.run_files import Layout, paths_in, read_checkpoint, read_exported, write_exported
from lit_models.training.checkpoints import load_part
from lit_models.training.optim import AVERAGED
from tests.toy import LitToy, ToyData, toy_trainer
from tests.wrong_inputs import FIT, contents

TOY = "tests.toy.LitToy"
CONFIG = {"class_path": TOY, "init_args": {}, "source": {}, "extra": {}}
TEXTS = ["smith aa", "miner of coal", "Farmer & weaver", "x" * 300]


@pytest.fixture(scope="module")
def toy_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    toy_trainer(folder, max_steps=3, limit_val_batches=0).fit(LitToy(), ToyData())
    return folder / "checkpoints" / "last.ckpt"


@pytest.fixture
def toy(toy_checkpoint: Path, tmp_path: Path) -> Path:
    """A toy that was exported into an empty folder."""
    (tmp_path / "toy").mkdir()
    export(toy_checkpoint, to=tmp_path / "toy", class_path=TOY)
    return tmp_path / "toy"


@pytest.fixture
def coder_checkpoint(folder_with_run: Path) -> Path:
    return folder_with_run / "runs/mine/checkpoints/last.ckpt"


def test_an_exported_coder_codes_as_its_checkpoint_does_and_says_what_made_it(
    coder_checkpoint, tmp_path, done
):
    checkpoint = Path(shutil.copy(coder_checkpoint, tmp_path / "mine.ckpt"))
    output = done("export", str(checkpoint), f"--to={tmp_path / 'coder'}")
    assert "LitOccupationCoder, last weights of step 2" in output
    loaded = LitOccupationCoder.load_from_checkpoint(checkpoint).eval()
    checkpoint.unlink()  # the folder needs no checkpoint
    exported = LitOccupationCoder.from_exported(tmp_path / "coder")
    assert not exported.training
    assert exported.recipe == loaded.recipe
    assert exported.temperature == loaded.temperature
    for method in ("greedy", "beam", "flat"):
        assert exported.code(TEXTS, "en", method=method) == loaded.code(TEXTS, "en", method=method)
    config = json.loads((tmp_path / "coder" / "config.json").read_text())
    assert config["class_path"] == "lit_models.LitOccupationCoder"
    assert config["init_args"]["encoder"]["init_args"]["width"] == 16
    assert config["source"]["global_step"] == 2
    assert config["versions"]["torch"] == version("torch")
    assert config["extra"]["occupation_recipe"]["code_book"]["codes"]
    files = {path.name for path in (tmp_path / "coder").iterdir()}
    assert files == {"config.json", "model.safetensors"}


def test_a_run_starts_from_an_exported_folder(coder_checkpoint, folder_with_run, own_folder, done):
    export(coder_checkpoint, to=own_folder / "coder")
    shutil.copy(folder_with_run / "train.csv", own_folder)
    options = ["--model.init_from=coder", "--trainer.max_steps=1", "--model.optimizer.lr=0.0"]
    done(*FIT, *options)
    trained = read_checkpoint(own_folder / "runs/mine/checkpoints/last.ckpt")["state_dict"]
    stored = read_checkpoint(coder_checkpoint)["state_dict"]
    torch.testing.assert_close(trained, stored, rtol=0, atol=0)


def test_a_toy_of_a_script_gives_the_same_outputs_from_files_like_any(toy_checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"does not name its class; give it with --class_path"):
        export(toy_checkpoint, to=tmp_path / "toy")
    export(toy_checkpoint, to=tmp_path / "toy", class_path=TOY)
    (tmp_path / "any").touch()
    names = ("any", "toy/model.safetensors", "toy/config.json")  # readable as other files are
    assert len({(tmp_path / name).stat().st_mode for name in names}) == 1
    exported = LitToy.from_exported(tmp_path / "toy")
    loaded = LitToy.load_from_checkpoint(toy_checkpoint).eval()
    data = ToyData()
    data.setup("test")
    for batch in data.test_dataloader():
        assert torch.equal(exported(batch), loaded(batch))
    with pytest.raises(ValueError, match="toy holds weights only, .* with --model.init_from"):
        toy_trainer(tmp_path / "run").fit(LitToy(), data, ckpt_path=tmp_path / "toy")
    with pytest.raises(ValueError, match=r"holds a LitToy, not a LitOccupationCoder"):
        LitOccupationCoder.from_exported(tmp_path / "toy")


def test_averaged_weights_are_exported_where_there_are_any(toy_checkpoint, tmp_path):
    content = read_checkpoint(toy_checkpoint)
    name = "model.0.weight"
    content[AVERAGED] = {name: torch.full_like(content["state_dict"][name], 0.25)}
    path = tmp_path / "averaged.ckpt"
    torch.save(content, path)
    export(path, to=tmp_path / "a", class_path=TOY)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["weights"] == "averaged"
    assert load_file(tmp_path / "a" / "model.safetensors")[name].eq(0.25).all()


def test_tied_and_strided_tensors_come_back(tmp_path):
    table = torch.arange(6.0).reshape(2, 3)
    weights = {
        "input": table,
        "output": table,
        "turned": table.T,
        "flat": table.view(-1),
        "row": table[1],
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2, dtype=torch.int64),
        "half": torch.ones(2, dtype=torch.bfloat16),
    }
    write_exported(tmp_path / "x", CONFIG, Layout(weights))
    assert json.loads((tmp_path / "x" / "config.json").read_text())["tied"] == {"output": "input"}
    assert "output" not in load_file(tmp_path / "x" / "model.safetensors")
    again = read_exported(tmp_path / "x")["state_dict"]
    assert set(again) == set(weights)
    for name, value in weights.items():
        assert torch.equal(again[name], value)
        assert again[name].dtype == value.dtype
    assert again["output"].data_ptr() == again["input"].data_ptr()


def test_a_folder_that_holds_anything_is_never_replaced(toy_checkpoint, toy):
    before = contents(toy.parent)
    for taken in (toy, toy / "config.json"):
        with pytest.raises(ValueError, match=r"is never replaced; name a folder that is new or"):
            export(toy_checkpoint, to=taken, class_path=TOY)
    assert contents(toy.parent) == before


def test_a_failure_leaves_no_folder(toy_checkpoint, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("lit_models.run_files.save_file", full)
    with pytest.raises(OSError, match="could not be written: .*No space left.*--to"):
        export(toy_checkpoint, to=tmp_path / "toy", class_path=TOY)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "harm", "message"),
    [
        ("model.safetensors", lambda b: b[:-1] + bytes([b[-1] ^ 1]), "checksums differ"),
        ("model.safetensors", lambda b: b[: len(b) // 2], "checksums differ"),
        ("model.safetensors", None, "lacks model.safetensors"),
        ("config.json", lambda b: b[:50], r"config.json is damaged \("),
        ("config.json", lambda b: b'{"model_type": "bert"}', "not of `unisono export`"),
        ("config.json", None, r"folder without meta.pt or config.json"),
        ("config.json", lambda b: b.replace(b"toy.LitToy", b"toy.LitTi"), "names .tests.toy.LitTi"),
        ("config.json", lambda b: b.replace(b"toy.LitToy", b"toy.ToyData"), "names .*toy.ToyData"),
    ],
)
def test_a_damaged_folder_is_named(toy, name, harm, message):
    file = toy / name
    if harm is None:
        file.unlink()
    else:
        file.write_bytes(harm(file.read_bytes()))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        LitToy.from_exported(toy)


def test_weights_of_another_network_are_refused(toy_checkpoint, tmp_path):
    weights = {"model.0.weight": torch.ones(7, 1)}
    write_exported(tmp_path / "x", CONFIG, Layout(weights))
    with pytest.raises(ValueError, match=r"do not fit LitToy: model.0.bias missing there"):
        LitToy.from_exported(tmp_path / "x")
    module = LitToy()
    module.configure_model()
    with pytest.raises(ValueError, match=r"\(of tests.toy.LitToy\) do not fit LitToy"):
        load_part(module, str(tmp_path / "x"))


def test_wrong_checkpoints_are_one_screen(toy_checkpoint, own_folder, done):
    (own_folder / "cut.ckpt").write_bytes(toy_checkpoint.read_bytes()[:500])
    for arguments, message in (
        (["absent.ckpt", "--to=x"], "there is no checkpoint absent.ckpt"),
        (["cut.ckpt", "--to=x"], "is damaged: it is cut short"),
        (["cut.ckpt", "--to=x"], "or --ckpt_path auto, which takes the newest sound one."),
        ([str(toy_checkpoint), "--to=x", f"--class_path={TOY}s"], "cannot be imported"),
        (
            [str(toy_checkpoint), "--to=x", "--class_path=lit_models.LitOccupationCoder"],
            "holds no occupation_recipe",
        ),
    ):
        output = done("export", *arguments, status=1)
        assert message in " ".join(output.split())
        assert len(output.splitlines()) < 24
    done("export", "cut.ckpt", status=2)  # --to is missing
    assert sorted(p.name for p in own_folder.iterdir()) == ["cut.ckpt"]


def test_a_slash_alone_is_no_file_that_an_export_needs():
    assert paths_in({"ends": ["/", "of", __file__, "of/" * 999]}) == {__file__}

"""The store of activations: whole or absent; damage is detected."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datamodules import ActivationDataModule, ActivationDumpDataModule
from datamodules.activations.store import ActivationStore
from lit_models import LitSubject
from tests.activation_dumps import contents, documents, dumped, stories, subject, trainer

Damage = Callable[[Path], Any]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    return dumped(folder / "acts", stories(folder, 40)).folder


@pytest.fixture
def copied(sound: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    folder.mkdir()
    for name, content in contents(sound).items():
        (folder / name).write_bytes(content)
    return folder


def test_the_schema_says_what_the_store_is(sound: Path) -> None:
    schema = ActivationStore(sound).schema
    assert schema["subject"] | {"digest": ""} == {
        "digest": "",
        "layer": 1,
        "site": "block_output",
        "hidden_size": 16,
        "num_layers": 3,
    }
    assert (schema["dtype"], schema["context_length"]) == ("float32", 16)
    assert schema["positions"] == {"min_position": 2, "per_document": 3, "seed": 0}
    assert sum(schema["num_documents"].values()) == 40
    assert schema["attributes"]["test"] == ["pet", "place"]
    assert schema["norms"]["largest"] >= schema["norms"]["mean"] > 0
    assert set(schema["files"]) == {path.name for path in sound.iterdir()} - {"schema.json"}


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        store = dumped(tmp_path / "acts", stories(tmp_path, 20))
    finally:
        os.umask(before)
    assert store.folder.stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in store.folder.iterdir()} == {0o640}


def changed_schema(**values: Any) -> Damage:
    def change(folder: Path) -> None:
        path = folder / "schema.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def cut(name: str) -> Damage:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "schema.json").unlink(), "holds no schema.json, so it is no complete"),
        (lambda f: (f / "schema.json").write_text("{"), "schema.json is damaged .*copy the store"),
        (lambda f: (f / "schema.json").write_text("{}"), "schema.json is damaged"),
        (changed_schema(version=1), "has version 1, and this program reads .*dump the activations"),
        (cut("train.activations.npy"), r"1 files are gone or .* \(train.activations.npy\); copy"),
        (cut("statistics.npz"), r"\(statistics.npz\); copy the store again, or dump"),
        (lambda f: (f / "test.piece.npy").unlink(), r"1 files are gone or .* \(test.piece.npy\)"),
    ],
)
def test_an_incomplete_store_is_refused(copied: Path, damage: Damage, message: str) -> None:
    damage(copied)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        ActivationDataModule(str(copied)).prepare_data()


def test_a_wrong_byte_is_found_by_an_audit(copied: Path) -> None:
    path = copied / "validation.activations.npy"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    message = (
        r"1 files are gone or do not hold what was written \(validation.activations.npy\); copy"
    )
    with pytest.raises(ValueError, match=message):
        ActivationDataModule(str(copied)).audit()


@pytest.mark.parametrize("place", ["np.save", "statistics_of", "content_digest"])
def test_a_dump_that_ends_while_it_is_merged_leaves_no_store_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    files, target = stories(tmp_path, 40), tmp_path / "acts"
    expected = contents(dumped(tmp_path / "whole", files).folder)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"datamodules.activations.store.{place}", fail)
        with pytest.raises(OSError, match="No space left on device.*acts"):
            dumped(target, files)
    assert not target.exists()
    assert not list(tmp_path.glob(".acts.unfinished*"))
    seen: list[int] = []

    class Counting(LitSubject):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            seen.extend(batch["sample_id"][batch["weight"] > 0].tolist())
            return super().predict_step(batch, batch_idx)

    data = ActivationDumpDataModule(str(target), **documents(files))
    trainer(tmp_path).predict(Counting(subject()), data, return_predictions=False)
    assert seen == []  # all parts existed already
    assert contents(target) == expected
    assert not list(tmp_path.glob(".acts.*"))


def test_a_store_is_never_overwritten(sound: Path) -> None:
    before = contents(sound)
    with pytest.raises(ValueError, match="exists and is not overwritten; move it away"):
        dumped(sound, stories(sound.parent, 40))
    assert contents(sound) == before


def test_a_part_may_be_empty(tmp_path: Path) -> None:
    from datamodules import TextSplit

    store = dumped(tmp_path / "acts", stories(tmp_path, 30), split=TextSplit(0.2))
    assert store.array(2, "activations").shape == (0, 16)
    data = ActivationDataModule(str(store.folder))
    with pytest.raises(ValueError, match="the part test has no activations.*data.test_files or"):
        data.setup("test")


def test_each_layers_store_is_that_of_a_dump_of_its_own(tmp_path):
    files = stories(tmp_path, 40)
    data = ActivationDumpDataModule(str(tmp_path / "all"), **documents(files))
    trainer(tmp_path).predict(LitSubject(subject(), [2, 0]), data, return_predictions=False)
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["layer-0", "layer-2"]
    for layer in (0, 2):
        store = ActivationStore(tmp_path / "all" / f"layer-{layer}")
        alone = dumped(tmp_path / f"alone-{layer}", files, subject(layer))
        assert store.subject == alone.subject
        assert contents(store.folder) == contents(alone.folder)

"""What stages read and write: files of the user by content, evaluations in own folders."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_models.commands.chain import (
    read_stages,
    remove_predictions,
    run_stages,
    write_record,
)

Unisono = Callable[..., tuple[int, str]]
STAND_IN = (sys.executable, str(Path(__file__).with_name("stand_in.py")))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs a chain of one stage with a stand-in for `unisono`; returns the stages that ran."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("model: 1\n")

    def run(verb: str = "predict", expected: int = 0, **options: Any) -> list[str]:
        Path("calls.txt").write_text("")
        stages = read_stages({"one": {"verb": verb, "config": "mine.yaml", "options": options}})
        assert run_stages(stages, stages, Path("out"), 1, STAND_IN) == expected
        return [line.split()[0] for line in Path("calls.txt").read_text().splitlines()]

    return run


def test_a_prediction_whose_record_was_not_written_is_made_again(run: Callable) -> None:
    assert run() == ["one"]
    record = json.loads(Path("out/chain/one.json").read_text())
    write_record(Path("out"), "one", record["made_from"])
    assert run() == ["one"]
    assert run() == []


def test_only_what_a_prediction_wrote_in_its_own_folder_is_removed(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own / "store" / "train", own / ".store.1.parts", own / "a" / ".b", other):
        folder.mkdir(parents=True)
        (folder / "part").touch()
    (own / "store" / "facts.json").touch()
    (own / "folder").symlink_to(other)
    (own / "file").symlink_to(other / "part")
    remove_predictions(own)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert left == {
        "own", "own/.store.1.parts", "own/.store.1.parts/part", "own/a", "own/a/.b",
        "own/a/.b/part", "own/folder", "own/file", "other", "other/part",
    }  # fmt: skip


@pytest.mark.parametrize("option", ["in/b.txt", "in", "in/*.txt", ["in/a.txt", "in/b.txt"]])
def test_a_file_that_an_option_names_counts_with_its_content(run: Callable, option: object) -> None:
    Path("in").mkdir()
    for name in ("a", "b"):
        Path(f"in/{name}.txt").write_text(name)
    assert run(files=option) == ["one"]
    Path("in/b.txt").touch()
    assert run(files=option) == []
    Path("in/b.txt").write_text("c")
    with pytest.raises(ValueError, match="the files of the option files is another"):
        run(files=option)


def test_the_seed_is_filled_in_for_a_folder_of_files(run: Callable) -> None:
    Path("in-1").mkdir()
    for number in range(9):
        Path(f"in-1/{number}").touch()
    assert run(files="in-{seed}") == ["one"]
    assert run(files="in-{seed}") == []
    Path("in-1/7").write_text("more")
    with pytest.raises(ValueError, match="the files of the option files is another"):
        run(files="in-{seed}")


def test_what_a_stage_itself_writes_is_no_input(run: Callable) -> None:
    values = {"here": ".", "whole": "out", "data.predict_output": "out.csv", "late": "late.txt"}
    assert run(**values) == ["one"]
    for name in ("out.csv", "late.txt"):
        Path(name).write_text("made by the stage")
    assert run(**values) == []


def test_an_evaluation_that_wrote_nothing_is_not_complete(
    run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert run("test", expected=1, silent=1) == ["one"]
        assert "stage one ended well and wrote nothing to out/one, so" in capsys.readouterr().err


@pytest.mark.soak
def test_a_real_fit_is_exported_and_each_evaluation_has_its_folder(
    unisono: Unisono, toy_config: Path
) -> None:
    Path("prompts.jsonl").write_text('{"prompt": "a smith"}\n')
    config = "config: causal_lm/debug.yaml, devices: 1"
    Path("chain.yaml").write_text(
        f"stages:\n  subject: {{verb: fit, {config}}}\n"
        "  export: {verb: export, checkpoint: subject}\n"
        f"  tested: {{verb: test, checkpoint: subject, {config}}}\n"
        f"  written: {{verb: predict, checkpoint: subject, {config}, "
        "options: {data.predict_files: prompts.jsonl}}\n"
    )
    arguments = ("chain", "--config", "chain.yaml", "--to=runs/all")
    status, output = unisono(*arguments)
    assert status == 0, output
    folder = Path("runs/all")
    assert (folder / "export" / "model.safetensors").exists()
    assert "test/loss" in (folder / "tested" / "metrics.csv").read_text()
    assert list((folder / "written").glob("prompts.*"))
    assert not [*(folder / "subject").glob("prompts.*"), *(folder / "subject").glob("config-*")]
    status, output = unisono(*arguments)
    assert (status, output.count("is complete: skipped")) == (0, 4)
    (folder / "tested" / "metrics.csv").unlink()
    status, output = unisono(*arguments)
    assert status == 1
    assert "stage tested: the files in runs/all/tested were changed since" in output

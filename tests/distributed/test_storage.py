"""A folder that cannot be written: one screen, and what was there before is whole."""

from pathlib import Path

from tests.conftest import TOY
from tests.distributed.launch import run

START = (
    "import os, sys; os.execv(sys.executable, [sys.executable, '-m', 'lit_models', *sys.argv[1:]])"
)
# Root may write anywhere unless this capability is dropped before the program is replaced.
WITHOUT_OVERRIDE = "import ctypes; ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)\n" + START
SMALL_FILES = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))\n" + START


def fit(code: str, tmp_path: Path, folder: Path) -> tuple[int, str]:
    config = tmp_path / "toy.yaml"
    config.write_text(TOY)
    done = run(
        "-c", code, "fit", "--config", str(config), f"--trainer.default_root_dir={folder}",
        UNISONO_CACHE=str(tmp_path / "cache"),
    )  # fmt: skip
    return done.returncode, done.stdout


def test_a_read_only_folder_is_named_with_the_way_out(tmp_path: Path) -> None:
    parent = tmp_path / "kept"
    parent.mkdir(mode=0o555)
    status, output = fit(WITHOUT_OVERRIDE, tmp_path, parent / "run")
    flat = " ".join(output.split())
    assert status == 1, output
    assert "Permission denied: this user may not write there; choose another" in flat
    assert "Traceback" not in output
    assert list(parent.iterdir()) == []


def test_a_checkpoint_that_does_not_fit_leaves_no_broken_file(tmp_path: Path) -> None:
    status, output = fit(SMALL_FILES, tmp_path, tmp_path / "run")
    flat = " ".join(output.split())
    assert status == 1, output
    assert "could not be written" in flat
    assert "free space" in flat
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))

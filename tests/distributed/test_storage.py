"""A folder that cannot be written: one screen, and what was there before is whole."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lit_models.training.checkpoints import damage
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


@pytest.mark.slow
def test_a_read_only_folder_is_named_with_the_way_out(tmp_path: Path) -> None:
    parent = tmp_path / "kept"
    parent.mkdir(mode=0o555)
    status, output = fit(WITHOUT_OVERRIDE, tmp_path, parent / "run")
    flat = " ".join(output.split())
    assert status == 1, output
    assert "Permission denied: this user may not write there; choose another" in flat
    assert "Traceback" not in output
    assert list(parent.iterdir()) == []


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_leaves_no_broken_file(tmp_path: Path) -> None:
    status, output = fit(SMALL_FILES, tmp_path, tmp_path / "run")
    flat = " ".join(output.split())
    assert status == 1, output
    assert "could not be written" in flat
    assert "free space" in flat
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB, on which a run fills the disk for real."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_disk_that_fills_up_stops_the_run_and_keeps_a_sound_checkpoint(
    tmp_path: Path, small_disk: Path
) -> None:
    config = tmp_path / "toy.yaml"
    config.write_text(TOY)
    options = [f"--trainer.default_root_dir={small_disk / 'run'}", "--trainer.max_epochs=200"]
    done = run("-m", "lit_models", "fit", "--config", str(config), *options)
    flat = " ".join(done.stdout.split())
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stdout
    assert "No space left on device" in flat
    assert "free some space" in flat or "free space" in flat
    kept = list((small_disk / "run" / "checkpoints").glob("*.ckpt"))
    assert kept
    assert all(damage(path) is None for path in kept)

"""The folder that all ranks write: whole or absent, whoever fails."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from lit_models.training import checkpoints
from lit_models.training.checkpoints import (
    AtomicCheckpointIO,
    Part,
    damage,
    newest_checkpoint,
    prepare,
    put_in_place,
    read_checkpoint,
)
from lit_models.training.strategies import FullyShardedStrategy


def parts(step, num_ranks=2):
    """Return what `cut` gives on each rank for one weight of two rows a rank, and a tied one."""
    stands_for = {"_sharded_tensor": "state_dict.weight"}
    tensors = {"state_dict.weight": {"shape": [2 * num_ranks, 3], "dtype": torch.float64}}
    rest = {"state_dict": {"weight": stands_for, "tied": stands_for}, "global_step": step}
    found = []
    for rank in range(num_ranks):
        values = torch.full((2, 3), step + rank / 10, dtype=torch.float64)
        pieces = {"state_dict.weight": {"tensor": values, "offset": [2 * rank, 0]}}
        found.append({"pieces": pieces, "tensors": tensors, "rest": rest})
    return found


def save(path, step, ranks=(1, 0)):
    """Write parts in this order; rank 0, which waits for the others, comes last."""
    prepare(path)
    for rank in ranks:
        AtomicCheckpointIO().save_checkpoint(parts(step)[rank], path, Part(rank, 2))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(checkpoints, "LATE_S", 0.2)
    monkeypatch.setattr(checkpoints, "LATE_FACTOR", 0.0)


def test_parts_are_put_together_and_tied_tensors_stay_one(tmp_path):
    save(tmp_path / "last.ckpt", 4)
    weights = read_checkpoint(tmp_path / "last.ckpt")["state_dict"]
    assert weights["weight"][:, 0].tolist() == [4.0, 4.0, 4.1, 4.1]
    assert weights["tied"].data_ptr() == weights["weight"].data_ptr()
    assert sorted(p.name for p in tmp_path.rglob("*")) == [
        "last.ckpt",
        "meta.pt",
        *(f"shard-0000{number}-model-00001-of-00001.safetensors" for number in (1, 2)),
    ]


def test_ranks_write_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "LATE_S", 20.0)
    path = tmp_path / "last.ckpt"
    prepare(path)
    io = AtomicCheckpointIO()
    first = threading.Thread(target=io.save_checkpoint, args=(parts(4)[0], path, Part(0, 2)))
    first.start()
    assert not path.exists()
    io.save_checkpoint(parts(4)[1], path, Part(1, 2))
    first.join()
    assert damage(path) is None


def test_a_rank_that_does_not_write_leaves_the_old_folder(tmp_path):
    path = tmp_path / "last.ckpt"
    save(path, 4)
    with pytest.raises(OSError, match=r"rank 1 did not write its shard within .*one before it"):
        save(path, 8, ranks=(0,))
    assert read_checkpoint(path)["global_step"] == 4
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_what_another_rank_could_not_write_is_told_on_both(tmp_path):
    path = tmp_path / "last.ckpt"
    save(path, 4)
    prepare(path)
    (tmp_path / ".last.ckpt.unfinished" / "shard-00002-model-00001-of-00001.safetensors").mkdir()
    io = AtomicCheckpointIO()
    with pytest.raises(OSError, match="Is a directory"):
        io.save_checkpoint(parts(8)[1], path, Part(1, 2))
    with pytest.raises(OSError, match="on rank 1: .*Is a directory"):
        io.save_checkpoint(parts(8)[0], path, Part(0, 2))
    assert read_checkpoint(path)["global_step"] == 4


@pytest.mark.slow
def test_a_kill_in_the_middle_leaves_the_old_folder_and_the_next_save_is_sound(tmp_path):
    path = tmp_path / "checkpoints" / "last.ckpt"
    save(path, 4)
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from lit_models.training import checkpoints as sharded\n"
        "from tests.training.test_sharded_checkpoint import save\n"
        "sharded.sync = lambda folder: os.kill(os.getpid(), 9)\n"  # the marker is written already
        "save(Path(sys.argv[1]), 8)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (path.parent / ".last.ckpt.unfinished" / "meta.pt").exists()
    assert newest_checkpoint(tmp_path) == path
    assert read_checkpoint(path)["global_step"] == 4
    save(path, 12)
    assert read_checkpoint(path)["global_step"] == 12
    assert os.listdir(path.parent) == ["last.ckpt"]


def test_the_newest_is_that_whose_marker_is_newest(tmp_path):
    folder = tmp_path / "checkpoints"
    save(folder / "last.ckpt", 8)
    save(folder / "next.ckpt", 12)
    os.utime(folder / "last.ckpt")  # a copy or an index touches the folder, not the marker
    assert newest_checkpoint(tmp_path) == folder / "next.ckpt"


def test_a_folder_of_another_program_is_named(tmp_path):
    folder = tmp_path / "other.ckpt"
    folder.mkdir()
    with pytest.raises(ValueError, match=r"a folder without meta\.pt"):
        read_checkpoint(folder)
    torch.save({"state_dict": {}}, folder / "meta.pt")
    with pytest.raises(ValueError, match=r"its meta\.pt is not of this format"):
        read_checkpoint(folder)


@pytest.mark.parametrize("source", ["file", "folder"])
@pytest.mark.parametrize("target", ["file", "folder", "nothing"])
def test_files_and_folders_take_each_other_s_place(tmp_path, source, target):
    def make(path, kind):
        if kind == "folder":
            path.mkdir()
            (path / path.name).write_text("")
        elif kind == "file":
            path.write_text(path.name)

    make(tmp_path / "new", source)
    make(tmp_path / "old", target)
    put_in_place(tmp_path / "new", tmp_path / "old")
    assert os.listdir(tmp_path) == ["old"]
    kept = tmp_path / "old"
    assert [p.name for p in kept.iterdir()] == ["new"] if source == "folder" else kept.is_file()


def test_what_a_killed_save_of_the_other_kind_left_is_in_nobody_s_way(tmp_path):
    path = tmp_path / "last.ckpt"
    prepare(path)  # and killed; a single device goes on
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}, "global_step": 4}, path)
    assert read_checkpoint(path)["global_step"] == 4
    (tmp_path / ".last.ckpt.unfinished").write_text("")  # killed again; two devices go on
    save(path, 8)
    assert read_checkpoint(path)["global_step"] == 8
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_who_writes_must_know_shards():
    strategy = FullyShardedStrategy(sharded_checkpoint=True)
    with pytest.raises(ValueError, match="TorchCheckpointIO does the writing, which knows no"):
        strategy.setup_environment()


def test_a_file_replaces_a_folder_of_an_earlier_run(tmp_path):
    path = tmp_path / "last.ckpt"
    save(path, 4)
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}, "global_step": 8}, path)
    assert read_checkpoint(path)["global_step"] == 8

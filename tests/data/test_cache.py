"""Cache folders are complete or absent, and all processes use the same one."""

import os
import platform
import subprocess

import numpy as np
import pytest

from datamodules.core.store import (
    cache_root,
    digest_of,
    file_digest,
    made_once,
    replacing,
    write_whole,
)


@pytest.mark.parametrize("old", [None, "file", "folder"])
@pytest.mark.parametrize("new", ["file", "folder"])
def test_a_file_or_a_folder_is_replaced_by_what_is_whole(tmp_path, old, new):
    def make(path, kind):
        if kind == "folder":
            path.mkdir()
            (path / kind).write_text(path.name)
        elif kind is not None:
            path.write_text(kind)

    def fail(path):
        make(path, new)
        raise ZeroDivisionError

    make(tmp_path / "a", old)
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / f".a.unfinished-{platform.node()}-{dead.pid}").mkdir()
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "a") as unfinished:
        fail(unfinished)
    assert [path.name for path in tmp_path.iterdir()] == ["a"] * (old is not None)
    with replacing(tmp_path / "a") as unfinished:
        make(unfinished, new)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").is_dir() == (new == "folder")
    with pytest.raises(FileExistsError), replacing(tmp_path / "a", is_new=True) as unfinished:
        make(unfinished, new)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_each_process_writes_a_file_of_its_own_and_leaves_those_of_the_living(tmp_path):
    target = tmp_path / "a[1].csv"
    other = tmp_path / f".{target.name}.unfinished-{platform.node()}-{os.getppid()}"
    elsewhere = tmp_path / f".{target.name}.unfinished-another-host-1"
    for path in (other, elsewhere):
        path.write_text("half")
    with replacing(target) as unfinished:
        assert unfinished not in (other, elsewhere)
        unfinished.write_text("whole")
    assert target.read_text() == "whole"
    assert other.read_text() == elsewhere.read_text() == "half"


def test_a_temporary_name_holds_the_host_as_containers_share_process_ids(tmp_path, monkeypatch):
    names = []
    monkeypatch.setattr(os, "replace", lambda source, target: names.append(source.name))
    for host in ("one", "another"):
        monkeypatch.setattr(platform, "node", lambda host=host: host)
        write_whole(tmp_path / "a", "text")
    assert names[0] != names[1]


def test_the_quicker_process_wins(tmp_path):
    folder = tmp_path / "a"

    def make(target):
        (target / "x").write_text("slow")
        folder.mkdir()
        (folder / "x").write_text("quick")

    assert (made_once(folder, make) / "x").read_text() == "quick"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_digest_is_remembered_until_the_file_changes_even_under_its_old_time(
    tmp_path, monkeypatch
):
    path, other, times = tmp_path / "t.csv", tmp_path / "other.csv", (10**9, 10**9)
    for place in (path, other):
        place.write_text("text\n1\n")
        os.utime(place, times)
    first = file_digest(path)
    with monkeypatch.context() as patch:
        patch.delattr("datamodules.core.store.content_digest")  # reading the file would now fail
        assert file_digest(path) == first
    path.write_text("text\n2\n")
    os.utime(path, times)
    assert file_digest(path) != first
    os.replace(other, path)  # another inode, same time and size
    assert file_digest(path) == first


def flip(path):
    content, status = bytearray(path.read_bytes()), path.stat()
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (flip, "a.npy is not what was written"),
        (lambda path: path.write_bytes(path.read_bytes()[:-3]), "a.npy is not what was written"),
        (lambda path: path.unlink(), "No such file .*a.npy"),
        (lambda path: (path.parent / "checksums.json").write_text("{"), "Expecting"),
        (lambda path: (path.parent / "checksums.json").unlink(), "No such file .*checksums.json"),
    ],
)
def test_a_damaged_folder_is_made_again_and_says_so_once(tmp_path, harm, message):
    folder, numbers = tmp_path / "store", np.arange(10)
    made_once(folder, lambda target: np.save(target / "a.npy", numbers))
    assert made_once(folder, lambda target: 1 / 0) == folder
    assert folder.stat().st_mode & 0o666 == (folder / "a.npy").stat().st_mode & 0o666  # umask's
    harm(folder / "a.npy")
    with pytest.warns(UserWarning, match=f"store is made again: .*{message}"):
        made_once(folder, lambda target: np.save(target / "a.npy", numbers))
    assert (np.load(folder / "a.npy") == numbers).all()
    assert made_once(folder, lambda target: 1 / 0) == folder
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["store"]


def test_an_unwritable_cache_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "file"))
    table = tmp_path / "t.csv"
    table.write_text("text\n")
    with pytest.raises(RuntimeError, match=r"cannot be written \(Not a directory\).*UNISONO_CACHE"):
        file_digest(table)
    with pytest.raises(RuntimeError, match="the cache folder .*file cannot be written"):
        made_once(cache_root() / "a", lambda target: None)


def test_the_order_of_keys_does_not_change_a_digest():
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})

"""Cache folders are complete or not there, and every process takes the same one."""

import pytest

from datamodules.cache import cache_root, digest_of, file_digest, made_once


def test_a_folder_is_made_once_and_only_when_complete(tmp_path):
    folder, calls = tmp_path / "cache" / "a", []

    def make(target):
        calls.append(target)
        (target / "x").write_text("1")
        assert not folder.exists()

    assert made_once(folder, make) == made_once(folder, make) == folder
    assert len(calls) == 1
    assert [p.name for p in folder.parent.iterdir()] == ["a"]


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError):
        made_once(tmp_path / "a", lambda target: (target / "x").write_text("1") / 0)
    assert not list(tmp_path.iterdir())


def test_the_quicker_process_wins(tmp_path):
    folder = tmp_path / "a"

    def make(target):
        (target / "x").write_text("slow")
        folder.mkdir()
        (folder / "x").write_text("quick")

    assert (made_once(folder, make) / "x").read_text() == "quick"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_digest_is_remembered_until_the_file_changes(tmp_path, monkeypatch):
    path = tmp_path / "t.csv"
    path.write_text("text\n1\n")
    first = file_digest(path, tmp_path)
    monkeypatch.setattr("datamodules.cache.READ_BYTES", "")  # reading would now fail
    assert file_digest(path, tmp_path) == first
    monkeypatch.undo()
    path.write_text("text\n2\n3\n")
    assert file_digest(path, tmp_path) != first


def test_an_unwritable_cache_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "file"))
    table = tmp_path / "t.csv"
    table.write_text("text\n")
    with pytest.raises(RuntimeError, match=r"cannot be written \(Not a directory\).*UNISONO_CACHE"):
        file_digest(table, cache_root())
    with pytest.raises(RuntimeError, match="the cache folder .*file cannot be written"):
        made_once(cache_root() / "a", lambda target: None)


def test_the_order_of_keys_does_not_change_a_digest():
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})

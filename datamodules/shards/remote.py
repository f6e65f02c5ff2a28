"""Files of object storage: whole copies on this machine, complete under their name or not there."""

import json
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock
from fsspec import url_to_fs

from datamodules.core.store import cache_root, content_digest, digest_of, replacing, text_hash
from datamodules.files.rows import kind_of

WAITS_S = (1, 2, 4, 8, 16)  # before each further attempt
FETCHED_AHEAD = 2  # files at a time
NUM_LOCKS = 64
FINAL = (FileNotFoundError, PermissionError, ImportError, NotImplementedError)


def is_url(name: str) -> bool:
    """Return whether a name is of a file or folder that fsspec opens, such as s3://bucket/texts."""
    return "://" in name


def list_urls(url: str, suffixes: tuple[str, ...]) -> dict[str, int]:
    """Return the files that a URL names, one, a pattern or all of a folder, and their bytes.

    Raises:
        FileNotFoundError: there is none.
    """
    system, path = url_to_fs(url)
    if "*" in path:
        found = system.glob(path, detail=True)
    elif kind_of(Path(path)) in suffixes:
        found = {path: system.info(path)}
    else:
        found = system.find(path, detail=True)
    names = [name for name in found if kind_of(Path(name)) in suffixes]
    if not names:
        raise FileNotFoundError(f"{url} holds no file that ends in {', '.join(suffixes)}.")
    sizes = [found[name].get("size") or system.info(name).get("size") or 0 for name in names]
    return dict(zip(map(system.unstrip_protocol, names), sizes, strict=True))


def fetch(url: str, target: Path, size: int | None = None, digest: str | None = None) -> None:
    """Copy a file from a URL, whole; a connection that breaks is tried again, after a wait.

    Args:
        target: gets its name when it is complete.
        size: bytes that it must have.
        digest: hex digest of its content, as of `content_digest`.

    Raises:
        ValueError: it is another file than that.
        RuntimeError: the last attempt failed, too.
    """
    for wait_s in (*WAITS_S, None):
        try:
            system, path = url_to_fs(url)
            with replacing(target) as unfinished:
                system.get_file(path, str(unfinished))
                own = unfinished.stat().st_size
                if own != size and own < (system.info(path).get("size") or 0):
                    raise ConnectionError(f"it ended after {own:,} bytes")
                if size not in (None, own) or digest not in (None, content_digest(unfinished)):
                    raise ValueError(
                        f"{url} has {own:,} bytes and is not the file of {size:,} bytes in its "
                        "manifest: it was changed since. Put that one back, or prepare the shards "
                        "again, in a new folder."
                    )
            return
        except (ValueError, *FINAL):
            raise
        except Exception as error:  # each storage has its own
            if wait_s is None:
                raise RuntimeError(
                    f"{url} cannot be read ({type(error).__name__}: {error}), after "
                    f"{len(WAITS_S) + 1} attempts; see that the storage answers, and start again."
                ) from error
            time.sleep(wait_s)


@contextmanager
def local_copy(name: str) -> Iterator[Path]:
    """Give a file on this machine: the named one, or a copy of a URL's, which is removed again; a
    ValueError then names the URL."""
    if not is_url(name):
        yield Path(name)
        return
    with TemporaryDirectory() as folder:
        path = Path(folder) / PurePosixPath(name).name
        fetch(name, path)
        try:
            yield path
        except ValueError as error:
            raise ValueError(str(error).replace(str(path), name)) from error


class RemoteShards:
    """The shards of a folder with manifest.json in object storage, with a cache of their files on
    this machine, of at most so many GiB.

    All processes of the machine share it. Where it is full, the files go that were used longest
    ago; who still reads one keeps it until then.

    Raises:
        ValueError: a name leads out of the folder, or the limit holds no two shards.
    """

    def __init__(self, url: str, limit_gib: float = 100.0) -> None:
        self.url, self.limit = url.rstrip("/"), int(limit_gib * 2**30)
        with local_copy(f"{self.url}/manifest.json") as manifest:
            entries = json.loads(manifest.read_text("utf-8"))["shards"]
        # Another manifest has files of its own.
        self.folder = cache_root() / "remote" / digest_of(self.url) / digest_of(entries)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.entries: dict[str, dict[str, Any]] = {entry["name"]: entry for entry in entries}
        for name in self.entries:
            if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
                raise ValueError(f"{self.url}/manifest.json names {name}, outside of its folder.")
        least = 2 * max((entry["bytes"] for entry in entries), default=0)
        if self.limit < least:
            raise ValueError(
                f"limit_gib {limit_gib:g} must hold two shards of {self.url} at least, "
                f"{least / 2**30:.3g} GiB; raise it."
            )
        self._process, self._coming = 0, dict[str, Future[Path]]()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_process": 0, "_coming": {}, "_threads": None}

    def local_file(self, name: str) -> Path:
        """Return the path on this machine of a shard of the manifest, or of its index, NAME.index,
        fetched if it is not there; it is to be opened at once.

        Raises:
            ValueError: it is another file than the manifest says.
            RuntimeError: the storage does not answer.
        """
        if self._process == os.getpid() and name in self._coming:
            self._coming.pop(name).result()  # or its error
        return self._made(name)

    def prefetch(self, names: Iterable[str]) -> None:
        """Begin to fetch these files, in this order, beside what this process does; one that is
        there counts as used now."""
        if self._process != os.getpid():  # a fork has no threads
            self._process, self._coming = os.getpid(), {}
            self._threads = ThreadPoolExecutor(FETCHED_AHEAD)
        for name in names:
            if name not in self._coming or self._coming[name].done():
                self._coming[name] = self._threads.submit(self._made, name)

    def _made(self, name: str) -> Path:
        path, entry = self.folder / name, self.entries[name.removesuffix(".index")]
        is_index = name.endswith(".index")
        size = 8 * entry["documents"] if is_index else entry["bytes"]
        digest = entry.get("index_digest") if is_index else entry["digest"]
        with FileLock(self.folder / f".{text_hash(name) % NUM_LOCKS}.lock"):
            if not path.exists():
                self._make_room(size)
                fetch(f"{self.url}/{name}", path, size, digest)
                self._make_room(0)  # others may have come meanwhile
            os.utime(path, ns=(time.time_ns(), time.time_ns()))  # when it was used last
        return path

    def _make_room(self, size: int) -> None:
        """Remove the files that were used longest ago, until there is room for one more."""
        with FileLock(self.folder / ".room.lock"):
            files = []
            for path in self.folder.rglob("*.ds*"):
                with suppress(FileNotFoundError):  # another process gave it its name meanwhile
                    files.append((path.stat(), path))
            over = sum(status.st_size for status, _ in files) + size - self.limit
            for status, path in sorted(files, key=lambda pair: pair[0].st_mtime_ns):
                if over > 0 and not path.name.startswith("."):  # which another process writes
                    path.unlink()
                    over -= status.st_size

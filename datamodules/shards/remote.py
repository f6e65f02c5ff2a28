"""Local copies of files in object storage, written atomically, and a cache for shards."""

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

WAITS_S = (1, 2, 4, 8, 16)  # before each retry
FETCHED_AHEAD = 2  # files prefetched in parallel
NUM_LOCKS = 64
FINAL = (FileNotFoundError, PermissionError, ImportError, NotImplementedError)


def is_url(name: str) -> bool:
    """Return whether a name is a URL for fsspec, such as s3://bucket/texts."""
    return "://" in name


def list_urls(url: str, suffixes: tuple[str, ...]) -> dict[str, int]:
    """Return URL -> bytes of the files named by a URL: a file, a pattern, or a folder.

    Raises:
        FileNotFoundError: there are no files with these suffixes.
    """
    system, path = url_to_fs(url)
    if "*" in path:
        entries = system.glob(path, detail=True)
    elif kind_of(Path(path)) in suffixes:
        entries = {path: system.info(path)}
    else:
        entries = system.find(path, detail=True)
    names = [name for name in entries if kind_of(Path(name)) in suffixes]
    if not names:
        raise FileNotFoundError(f"{url} holds no file that ends in {', '.join(suffixes)}.")
    sizes = [entries[name].get("size") or system.info(name).get("size") or 0 for name in names]
    return dict(zip(map(system.unstrip_protocol, names), sizes, strict=True))


def fetch(url: str, target: Path, size: int | None = None, digest: str | None = None) -> None:
    """Copy a file from a URL; failed connections are retried after a wait.

    Args:
        target: path of the copy, which appears when it is complete.
        size: expected number of bytes.
        digest: expected `content_digest`.

    Raises:
        ValueError: size or digest differ.
        RuntimeError: the last attempt failed.
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
        except Exception as error:  # every storage raises errors of its own
            if wait_s is None:
                raise RuntimeError(
                    f"{url} cannot be read ({type(error).__name__}: {error}), after "
                    f"{len(WAITS_S) + 1} attempts; see that the storage answers, and start again."
                ) from error
            time.sleep(wait_s)


@contextmanager
def local_copy(name: str) -> Iterator[Path]:
    """Yield the path of a file: the file itself, or for a URL a temporary copy. A ValueError in the
    block then names the URL."""
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
    """Shards of a folder with manifest.json in object storage, with a cache of at most `limit_gib`
    on this machine.

    All processes of the machine share the cache. When it is full, the least recently used files are
    deleted; a process that still has one mapped can go on reading it.

    Raises:
        ValueError: a name leads out of the folder.
    """

    def __init__(self, url: str, limit_gib: float = 100.0) -> None:
        self.url, self.limit = url.rstrip("/"), int(limit_gib * 2**30)
        with local_copy(f"{self.url}/manifest.json") as manifest:
            entries = json.loads(manifest.read_text("utf-8"))["shards"]
        # A changed manifest gets a folder of its own.
        self.folder = cache_root() / "remote" / digest_of(self.url) / digest_of(entries)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.entries: dict[str, dict[str, Any]] = {entry["name"]: entry for entry in entries}
        for name in self.entries:
            if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
                raise ValueError(f"{self.url}/manifest.json names {name}, outside of its folder.")
        self._process, self._coming = 0, dict[str, Future[Path]]()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_process": 0, "_coming": {}, "_threads": None}

    def local_file(self, name: str) -> Path:
        """Return the local path of a shard, or of its index, NAME.index, fetched if needed. Open it
        at once, before it may be deleted.

        Raises:
            ValueError: the file differs from the manifest.
            RuntimeError: the storage does not answer.
        """
        if self._process == os.getpid() and name in self._coming:
            self._coming.pop(name).result()  # raises its error
        return self._made(name)

    def prefetch(self, names: Iterable[str]) -> None:
        """Start fetching these files in order, in the background; files already there are marked
        as used now."""
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
                self._make_room(0)  # other processes may have added files meanwhile
            os.utime(path, ns=(time.time_ns(), time.time_ns()))  # time of last use
        return path

    def _make_room(self, size: int) -> None:
        """Delete the least recently used files until `size` bytes are free."""
        with FileLock(self.folder / ".room.lock"):
            files = []
            for path in self.folder.rglob("*.ds*"):
                with suppress(FileNotFoundError):  # another process has renamed it
                    files.append((path.stat(), path))
            over = sum(status.st_size for status, _ in files) + size - self.limit
            for status, path in sorted(files, key=lambda pair: pair[0].st_mtime_ns):
                if over > 0 and not path.name.startswith("."):  # being written
                    path.unlink()
                    over -= status.st_size

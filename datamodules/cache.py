"""Folders that are made once and then only read: complete under their name, or not there."""

import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CACHE_VARIABLE = "UNISONO_CACHE"
READ_BYTES = 1 << 22


def cache_root() -> Path:
    """Return the folder of all caches: $UNISONO_CACHE, else ~/.cache/unisono."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "unisono"


def own_folder(name: str) -> Path:
    """Return a folder of the caches that this user alone can read and write, and made.

    Raises:
        RuntimeError: it cannot be made, or it is a link or another user's.
    """
    folder = cache_root() / f"{name}-{os.getuid()}"
    with _writing_to(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise RuntimeError(
                f"the cache folder {folder} is a link or another user's; remove it, or name "
                f"another place with the environment variable {CACHE_VARIABLE}."
            )
        folder.chmod(0o700)
    return folder


def digest_of(value: Any) -> str:
    """Return the hex digest of plain JSON values; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def file_digest(path: Path, root: Path) -> str:
    """Return the hex digest of a file's content.

    A file of the same place, size and time is not read again: the digest is remembered in the
    cache, so that every rank knows it at once.
    """
    status = path.stat()
    key = digest_of([str(path.resolve()), status.st_size, status.st_mtime_ns])
    memory = root / "digests" / key
    if memory.exists():
        return memory.read_text()
    digest = content_digest(path)
    with _writing_to(memory.parent):
        memory.parent.mkdir(parents=True, exist_ok=True)
        unfinished = memory.with_name(f"{memory.name}.{os.getpid()}")
        unfinished.write_text(digest)
        os.replace(unfinished, memory)
    return digest


def content_digest(path: Path) -> str:
    """Return the hex digest of a file's content, which is read."""
    content = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            content.update(chunk)
    return content.hexdigest()[:32]


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return the folder, which `make` fills where it does not exist yet.

    Args:
        folder: its final name; it exists only when complete.
        make: fills the temporary folder that it is given.
    """
    if folder.exists():
        return folder
    with _writing_to(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with _naming_full_disk(folder.parent):
            make(temporary)
        if not _renamed(temporary, folder) and not folder.exists():
            raise RuntimeError(f"{folder} could not be made from {temporary}; check the disk.")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _renamed(temporary: Path, folder: Path) -> bool:
    """Whether this process was the one that made it; another may have been quicker."""
    try:
        os.rename(temporary, folder)
    except OSError:
        return False
    return True


@contextmanager
def _naming_full_disk(folder: Path) -> Iterator[None]:
    """As `_writing_to`, where tables are read too and only a full disk is surely the cache's."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        with _writing_to(folder):
            raise


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    """Names the way out where the cache is no place to write to."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(
            f"the cache folder {folder} cannot be written ({error.strerror}); free space or name "
            f"another with the environment variable {CACHE_VARIABLE}."
        ) from error

"""Folders and files that are complete under their name, or not there; arrays in them."""

import errno
import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from platformdirs import user_cache_path

CACHE_VARIABLE = "UNISONO_CACHE"
CHECKSUMS = "checksums.json"


def cache_root() -> Path:
    """Return the folder of all caches: $UNISONO_CACHE, else the system's place for this user's,
    such as ~/.cache/unisono."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser() if named else user_cache_path("unisono", appauthor=False)


def digest_of(value: Any) -> str:
    """Return the hex digest of plain JSON values; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def text_hash(text: str) -> int:
    """Return 64 bits that are equal for equal texts alone."""
    content = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def cache_folder(kind: str, facts: Any) -> Path:
    """Return the place in the cache of what is made of these plain JSON values, for `made_once`."""
    return cache_root() / kind / digest_of(facts)


def file_digest(path: Path) -> str:
    """Return the hex digest of a file's content.

    The cache remembers it by place, size, inode and times of the file, of which that of the last
    change of any kind cannot be set back.
    """
    status = path.stat()
    facts = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    memory = cache_root() / "digests" / digest_of([str(path.resolve()), *facts])
    with _writing_to(memory.parent):
        if not memory.exists():
            write_whole(memory, content_digest(path))
        return memory.read_text()


def content_digest(path: Path) -> str:
    """Return half of the hex digest of a file's content, which is read."""
    return sha256_of(path)[:32]


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return the folder, which exists only when complete; where it does not yet, or is damaged,
    `make` fills a temporary folder that it is given."""
    with _writing_to(folder.parent):
        if folder.exists():
            fault = _damage(folder)
            if fault is None:
                return folder
            warnings.warn(f"the cache folder {folder} is made again: {fault}.", stacklevel=2)
            damaged = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            with suppress(FileNotFoundError):  # another process was quicker
                folder.replace(damaged / "damaged")
            shutil.rmtree(damaged)
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        (temporary := aside / folder.name).mkdir()  # with the umask's modes: a group may share it
        try:
            make(temporary)
            sums = {
                path.relative_to(temporary).as_posix(): (path.stat().st_size, content_digest(path))
                for path in sorted(temporary.rglob("*"))
                if path.is_file()
            }
            (temporary / CHECKSUMS).write_text(json.dumps(sums), "utf-8")
            try:
                os.rename(temporary, folder)
            except OSError:
                if not folder.exists():  # else another process was quicker
                    raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return folder


def _damage(folder: Path) -> str | None:
    """Return what is wrong with a folder that was made once, `None` where it is sound; contents
    are compared where a file has changed since it was last read."""
    try:
        sums = json.loads((folder / CHECKSUMS).read_text("utf-8"))
        for name, (size, digest) in sums.items():
            if (folder / name).stat().st_size != size or file_digest(folder / name) != digest:
                return f"{name} is not what was written"
    except (FileNotFoundError, ValueError, AttributeError, TypeError) as error:
        return str(error)
    return None


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    """Name the way out where the cache is no place to write to. What is read beside it has errors
    of its own, but for a full disk, which is surely the cache's."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if not is_full and not str(error.filename).startswith(str(folder)):
            raise
        raise RuntimeError(
            f"the cache folder {folder} cannot be written ({error.strerror}); free space or name "
            f"another with the environment variable {CACHE_VARIABLE}."
        ) from error


def sync(path: Path) -> None:
    """Let the content of a file, or the names in a folder, reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, text: str) -> None:
    """Write a text file that gets its name when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Processes of two containers often have one number.
    unfinished = path.with_name(f".{path.name}.{platform.node()}-{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def put_in_place(source: Path, target: Path) -> None:
    """Rename a file or folder to a name that may be taken by either.

    A folder that is in the way is renamed first: for a moment neither has the name.
    """
    if target.is_dir() or (source.is_dir() and target.exists()):
        replaced = target.with_name(f".{target.name}.replaced")
        remove(replaced)
        target.replace(replaced)
        source.replace(target)
        remove(replaced)
    else:
        source.replace(target)
    sync(target.parent)


@contextmanager
def replacing(target: Path, kept: str | None = None, is_new: bool = False) -> Iterator[Path]:
    """Give a name beside `target` for a file or a folder of files, which takes its place, synced,
    when the block ends well: `target` is the old one or the whole new one at every moment.

    Args:
        kept: name beside it that the old one takes, if any.
        is_new: raise FileExistsError where another process has taken that name meanwhile.
    """
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    # What processes of this host that are gone left of it, and what this one did.
    for path in target.parent.glob(f".{escape(target.name)}.unfinished-{platform.node()}-*"):
        process = int(path.name.rpartition("-")[2])
        if process == os.getpid() or not psutil.pid_exists(process):
            remove(path)
    # No other process, here or on another host, writes under this name.
    unfinished = target.with_name(f".{target.name}.unfinished-{platform.node()}-{os.getpid()}")
    try:
        yield unfinished
        for path in unfinished.iterdir() if unfinished.is_dir() else ():
            sync(path)
        sync(unfinished)
        if is_new and target.exists():
            raise FileExistsError(f"{target} was made meanwhile and is not overwritten.")
        if kept is not None and target.exists():
            put_in_place(target, target.with_name(kept))
        put_in_place(unfinished, target)
    finally:
        remove(unfinished)


@contextmanager
def new_file(
    path: Path, mode: str = "w", way_out: str | None = "choose another name"
) -> Iterator[Any]:
    """Give a file that gets its name when all went well; errors of the storage have that name.

    Args:
        path: what is written to a name in .gz is packed.
        mode: `w` for text in UTF-8, `wb` for bytes.
        way_out: what to do where the name is taken; `None` replaces the file.

    Raises:
        FileExistsError: the name is taken.
    """

    def check() -> None:
        if way_out is not None and path.exists():
            raise FileExistsError(f"{path} exists and is not overwritten; move it, {way_out}.")

    check()
    text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    with replacing(path) as unfinished:
        with naming(path), ExitStack() as stack:
            file: Any = stack.enter_context(open(unfinished, "wb"))
            if path.suffix.lower() == ".gz":  # without name and time: equal content, equal bytes
                file = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))
            yield stack.enter_context(io.TextIOWrapper(file, **text)) if text else file
        check()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an error of the storage the name of the file, which a write to an open one lacks."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def remove(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    """Return the hex digest of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def mapped_array(path: Path) -> np.ndarray:
    """Return an array of a npy file, memory-mapped."""
    # Slices of a memmap take 4 times as long.
    return np.load(path, mmap_mode="r").view(np.ndarray)


def write_arrays(
    folder: Path, arrays: Mapping[str, np.ndarray | Sequence[Any]], **facts: Any
) -> None:
    """Fill a folder with arrays and plain facts, as `ArrayFolder` reads them."""
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", np.asarray(values))
    (folder / "facts.json").write_text(json.dumps(facts), "utf-8")


class ArrayFolder:
    """Arrays of a folder, memory-mapped, and its facts; pickled as the name of the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Those of the npy files, by their names."""
        return {path.stem: mapped_array(path) for path in self.folder.glob("*.npy")}

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Plain values that were written beside the arrays."""
        return json.loads((self.folder / "facts.json").read_text("utf-8"))

    @property
    def fingerprint(self) -> str:
        """Hex digest of the content, one of the facts."""
        return self.facts["fingerprint"]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,)

    def parts(self, values: str, offsets: str, places: np.ndarray) -> list[np.ndarray]:
        """Return the values between the offsets of these places and of the next ones."""
        ends = self.arrays[offsets]
        pairs = zip(ends[places].tolist(), ends[places + 1].tolist(), strict=True)
        return [self.arrays[values][start:end] for start, end in pairs]


class ArrayFile:
    """A npy file that grows, in a `with` block, by rows of one shape, () of single values."""

    def __init__(self, path: Path, dtype: np.dtype | type, row: tuple[int, ...] = ()) -> None:
        self.dtype, self.row, self.length = np.dtype(dtype), row, 0
        self._file = path.open("wb")
        self._write_header()

    def __enter__(self) -> "ArrayFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.seek(0)
        self._write_header()  # as long as the first one: numpy leaves room for any length
        self._file.close()

    def add(self, values: np.ndarray) -> None:
        """Append values [n, *row]."""
        self._file.write(values.astype(self.dtype).tobytes())
        self.length += len(values)

    def _write_header(self) -> None:
        descr = np.lib.format.dtype_to_descr(self.dtype)
        facts = {"descr": descr, "fortran_order": False, "shape": (self.length, *self.row)}
        np.lib.format.write_array_header_1_0(self._file, facts)

"""Atomic files and folders (complete or absent), the cache, and arrays on disk."""

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
    """Return the folder of all caches: $UNISONO_CACHE, else the user's cache folder of this system,
    such as ~/.cache/unisono."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser() if named else user_cache_path("unisono", appauthor=False)


def digest_of(value: Any) -> str:
    """Return the hex digest of plain JSON values; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def array_digest(*parts: str | np.ndarray) -> str:
    """Return the hex digest of the bytes of arrays and texts."""
    content = hashlib.sha256()
    for part in parts:
        content.update(part.encode() if isinstance(part, str) else np.ascontiguousarray(part).data)
    return content.hexdigest()


def text_hash(text: str) -> int:
    """Return a 64-bit hash of a text."""
    content = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def cache_folder(kind: str, facts: Any) -> Path:
    """Return the cache folder, for `made_once`, of what is derived from these JSON values."""
    return cache_root() / kind / digest_of(facts)


def file_digest(path: Path) -> str:
    """Return the hex digest of a file's content.

    The cache keeps it by path, size, inode, mtime and ctime of the file; no program can set the
    ctime back, so that every change shows.
    """
    status = path.stat()
    facts = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    memory = cache_root() / "digests" / digest_of([str(path.resolve()), *facts])
    with _writing_to(memory.parent):
        if not memory.exists():
            write_whole(memory, content_digest(path))
        return memory.read_text()


def content_digest(path: Path) -> str:
    """Return half of the hex digest of a file's content; reads the whole file."""
    return sha256_of(path)[:32]


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return a folder that exists only when it is complete. Where it is absent or damaged, `make`
    fills a temporary folder, which is then renamed."""
    with _writing_to(folder.parent):
        if folder.exists():
            fault = _damage(folder)
            if fault is None:
                return folder
            warnings.warn(f"the cache folder {folder} is made again: {fault}.", stacklevel=2)
            damaged = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            with suppress(FileNotFoundError):  # another process has moved it already
                folder.replace(damaged / "damaged")
            shutil.rmtree(damaged)
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        (temporary := aside / folder.name).mkdir()  # with the umask, for shared caches
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
                if not folder.exists():  # else another process has made it already
                    raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return folder


def _damage(folder: Path) -> str | None:
    """Return what is wrong with a folder of `made_once`, `None` if nothing is; the content of a
    file is compared only if the file has changed since it was last read."""
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
    """Turn an OSError of writing to the cache into an error with a way out. Errors of files read
    meanwhile pass through, except a full disk, which only writing can meet."""
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
    """Flush the content of a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, text: str) -> None:
    """Write a text file under a temporary name, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Processes in two containers often have the same process id: the host name tells them apart.
    unfinished = path.with_name(f".{path.name}.{platform.node()}-{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def put_in_place(source: Path, target: Path) -> None:
    """Rename a file or folder to a name that an old file or folder may have.

    An old folder has to be renamed first: for a moment nothing has the name.
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
    """Yield a temporary path beside `target` for a file or a folder of files. When the block ends
    without an error, it is synced and renamed to `target`, which is thus never half written.

    Args:
        kept: name in the same folder under which the old `target` is kept, if any.
        is_new: raise FileExistsError where another process has created `target` meanwhile.
    """
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    # Remove what ended processes of this host, and this process, have left unfinished.
    for path in target.parent.glob(f".{escape(target.name)}.unfinished-{platform.node()}-*"):
        process = int(path.name.rpartition("-")[2])
        if process == os.getpid() or not psutil.pid_exists(process):
            remove(path)
    # No other process, on this or another host, uses this temporary name.
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
    """Yield an open file that gets its name at the end, if no error occurred.

    Args:
        path: final name, also in errors of the storage; a file in .gz is compressed.
        mode: `w` for text in UTF-8, `wb` for bytes.
        way_out: advice in the error where the name is taken; `None` replaces the file.

    Raises:
        FileExistsError: the name is taken.
    """
    if (is_new := way_out is not None) and path.exists():
        raise FileExistsError(f"{path} exists and is not overwritten; move it, {way_out}.")
    text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    with replacing(path, is_new=is_new) as unfinished, naming(path), ExitStack() as stack:
        file: Any = stack.enter_context(open(unfinished, "wb"))
        if path.suffix.lower() == ".gz":  # no name, no time: equal content, equal bytes
            file = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))
        yield stack.enter_context(io.TextIOWrapper(file, **text)) if text else file


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the name of the file to an OSError without one, as writes to an open file raise."""
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
    # Slicing a plain array is 4 times as fast as slicing a memmap.
    return np.load(path, mmap_mode="r").view(np.ndarray)


def write_arrays(
    folder: Path, arrays: Mapping[str, np.ndarray | Sequence[Any]], **facts: Any
) -> None:
    """Write arrays and plain facts into a folder, for `ArrayFolder`."""
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", np.asarray(values))
    (folder / "facts.json").write_text(json.dumps(facts), "utf-8")


class ArrayFolder:
    """Memory-mapped arrays of a folder and its facts; pickled as the path of the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays of the npy files, by file name without suffix."""
        return {path.stem: mapped_array(path) for path in self.folder.glob("*.npy")}

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Plain values stored beside the arrays."""
        return json.loads((self.folder / "facts.json").read_text("utf-8"))

    @property
    def fingerprint(self) -> str:
        """Hex digest of the content, stored among the facts."""
        return self.facts["fingerprint"]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,)

    def parts(self, values: str, offsets: str, places: np.ndarray) -> list[np.ndarray]:
        """Return for each place its values, from its offset to the offset of the next place."""
        ends = self.arrays[offsets]
        pairs = zip(ends[places].tolist(), ends[places + 1].tolist(), strict=True)
        return [self.arrays[values][start:end] for start, end in pairs]


class ArrayFile:
    """An npy file that grows row by row in a `with` block; `row` is the shape of one row."""

    def __init__(self, path: Path, dtype: np.dtype | type, row: tuple[int, ...] = ()) -> None:
        self.dtype, self.row, self.length = np.dtype(dtype), row, 0
        self._file = path.open("wb")
        self._write_header()

    def __enter__(self) -> "ArrayFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.seek(0)
        self._write_header()  # has the size of the first one: numpy leaves room
        self._file.close()

    def add(self, values: np.ndarray) -> None:
        """Append values [n, *row]."""
        self._file.write(values.astype(self.dtype).tobytes())
        self.length += len(values)

    def _write_header(self) -> None:
        descr = np.lib.format.dtype_to_descr(self.dtype)
        facts = {"descr": descr, "fortran_order": False, "shape": (self.length, *self.row)}
        np.lib.format.write_array_header_1_0(self._file, facts)

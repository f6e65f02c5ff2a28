"""A checkpoint as a folder: every rank writes its own shards, a marker that is written last makes
it one. Assembled, it is the dict of a whole file.

    last.ckpt/shard-00000.pt   this rank's pieces: key -> tensor and where it lies in the whole one
    last.ckpt/meta.pt          all else, the shapes, and size and sha256 of every shard file

Plain data throughout: torch.distributed.checkpoint keeps its index as a pickle, which is code.
Ranks tell each other by files that they are done, so that it works from threads, too.
"""

import copy
import hashlib
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from datamodules.core.store import sha256_of, sync

MARKER = "meta.pt"
FORMAT = "unisono shards 1"
_STANDS_FOR = "_sharded_tensor"
LATE_S, LATE_FACTOR = 20.0, 10.0  # a rank may be later than rank 0, and slower by a factor


@dataclass(frozen=True)
class Part:
    """Which rank's part of how many a CheckpointIO is to write; given as its storage_options."""

    rank: int
    num_ranks: int


def is_sharded(path: str | Path) -> bool:
    """Return whether a path is a folder with the marker of a checkpoint."""
    return (Path(path) / MARKER).is_file()


def cut(checkpoint: dict[str, Any], is_first: bool) -> dict[str, Any]:
    """Return this rank's part of a checkpoint whose tensors are sharded; no communication.

    Args:
        checkpoint: dicts and lists of plain values, whole tensors, and sharded ones.
        is_first: whether this is rank 0, which keeps all that is not sharded.
    """
    part: dict[str, Any] = {"pieces": {}, "tensors": {}}
    rest = _cut(checkpoint, "", part, {})
    return {**part, "rest": rest} if is_first else part


def _cut(content: Any, key: str, part: dict[str, Any], known: dict[int, str]) -> Any:
    if isinstance(content, DTensor):
        local = content.detach().to_local()
        # Tied weights are one tensor under two names: rank 0, whose piece is never empty, names it.
        name = known.setdefault(local.data_ptr(), key) if local.numel() else key
        if name not in part["tensors"]:
            part["tensors"][name] = {"shape": list(content.shape), "dtype": content.dtype}
        if local.numel() and _is_first_copy(content):
            part["pieces"][key] = {"tensor": local, "offset": _offset(content)}
        return {_STANDS_FOR: name}
    if isinstance(content, dict):
        twin = copy.copy(content)
        for name, value in content.items():
            twin[name] = _cut(value, f"{key}.{name}" if key else str(name), part, known)
        return twin
    if type(content) in (list, tuple):
        return type(content)(_cut(v, f"{key}.{i}", part, known) for i, v in enumerate(content))
    return content


def _offset(tensor: DTensor) -> list[int]:
    place = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return list(place[1])


def _is_first_copy(tensor: DTensor) -> bool:
    """Return whether no other group of hybrid sharding or of tensor parallelism writes this piece.

    The copies of a tensor lie on meshes side by side, one of which has rank 0.
    """
    mesh = tensor.device_mesh
    if int(mesh.mesh.min()) != 0:
        return False
    where = mesh.get_coordinate() or []
    return all(
        c == 0 or not p.is_replicate() for c, p in zip(where, tensor.placements, strict=True)
    )


def prepare(target: Path) -> None:
    """Make the empty folder that all ranks write to; rank 0 does so before any of them begins."""
    unfinished = _unfinished(target)
    remove(unfinished)  # of a save that was killed: a folder, or a file under another strategy
    unfinished.mkdir(parents=True)


def write_part(content: dict[str, Any], target: Path, part: Part) -> None:
    """Write one rank's part; on rank 0 return when the whole folder is in the target's place.

    Args:
        content: of `cut`.
        target: what is there stays until all ranks are done, and takes no harm from an error.
        part: whose it is.

    Raises:
        OSError: the storage refused, here or on another rank, or a rank did not write.
    """
    folder = _unfinished(target)
    began = time.monotonic()
    try:
        pieces = {k: {**p, "tensor": _compact(p["tensor"])} for k, p in content["pieces"].items()}
        receipt = _write(pieces, folder / _shard(part.rank))
    except (OSError, RuntimeError) as error:
        if part.rank:
            _tell(folder, part.rank, {"error": str(error)})
        raise
    if part.rank:
        _tell(folder, part.rank, receipt)
        return
    try:
        limit_s = LATE_S + LATE_FACTOR * (time.monotonic() - began)
        others = {_shard(r): _heard(folder, r, limit_s) for r in range(1, part.num_ranks)}
        meta = {"format": FORMAT, "rest": content["rest"], "tensors": content["tensors"]}
        _write({**meta, "files": {_shard(0): receipt, **others}}, folder / MARKER)
        sync(folder)
        put_in_place(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(content: Any, path: Path) -> dict[str, Any]:
    with open(path, "wb") as file:
        told = _Hashed(file)
        torch.save(content, told)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": told.num_bytes, "sha256": told.digest.hexdigest()}


class _Hashed:
    """A file that is hashed while it is written, and not read again for it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.digest, self.num_bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.num_bytes += len(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def _tell(folder: Path, rank: int, receipt: dict[str, Any]) -> None:
    path = folder / f"receipt-{rank:05d}.json"
    written = path.with_suffix(".written")
    written.write_text(json.dumps(receipt), encoding="utf-8")
    written.replace(path)


def _heard(folder: Path, rank: int, limit_s: float) -> dict[str, Any]:
    """Return what another rank says of its shard file, and take the note away."""
    path, end = folder / f"receipt-{rank:05d}.json", time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > end:
            raise OSError(
                f"rank {rank} did not write its shard within {limit_s:.0f} s. Do all nodes see "
                "the same folder?"
            )
        time.sleep(0.005)
    receipt = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    if "error" in receipt:
        raise OSError(f"on rank {rank}: {receipt['error']}")
    return receipt


def put_in_place(source: Path, target: Path) -> None:
    """Rename a file or folder to a name that may be taken by either.

    A folder cannot be renamed onto another: that one gives way first, for the moment between two
    renames. Whoever must have a checkpoint at every moment has one under another name.
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


def remove(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def shard_damage(folder: Path, meta: dict[str, Any], every_byte: bool) -> str | None:
    """Return what is wrong with the shard files of a folder, none if they are sound.

    Shards of another step than the marker's have another checksum, as those that were altered.

    Raises:
        ValueError: the marker is another program's.
    """
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ValueError(f"its {MARKER} is not of this format, {FORMAT!r}")
    for name, expected in meta["files"].items():
        path = folder / name
        if not path.is_file():
            return f"its shard {name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"its shard {name} is cut short or of another save"
        if every_byte and sha256_of(path) != expected["sha256"]:
            return f"the checksum of its shard {name} is wrong"
    return None


def assemble(folder: Path, meta: dict[str, Any], is_empty: bool = False) -> dict[str, Any]:
    """Return the checkpoint that a marker describes, whole, on the CPU.

    Args:
        folder: with sound shard files.
        meta: the marker's content.
        is_empty: leave the tensors without values on the meta device, and the shards unread.

    Raises:
        ValueError: pieces are missing.
    """
    device = "meta" if is_empty else "cpu"
    tensors = {
        key: torch.empty(facts["shape"], dtype=facts["dtype"], device=device)
        for key, facts in meta["tensors"].items()
    }
    if not is_empty:
        _fill(tensors, folder, meta)
    return _joined(meta["rest"], tensors)


def _fill(tensors: dict[str, Tensor], folder: Path, meta: dict[str, Any]) -> None:
    missing = {key: tensor.numel() for key, tensor in tensors.items()}
    for name in meta["files"]:
        pieces = torch.load(folder / name, map_location="cpu", weights_only=True, mmap=True)
        for key, piece in pieces.items():
            if key not in tensors:
                continue  # the other name of a tied tensor
            value, begin = piece["tensor"], piece["offset"]
            place = tuple(slice(b, b + n) for b, n in zip(begin, value.shape, strict=True))
            tensors[key][place] = value
            missing[key] -= value.numel()
    lacking = [key for key, number in missing.items() if number]
    if lacking:
        raise ValueError(f"the shards of {folder} do not make up {', '.join(lacking[:3])}.")


def _joined(content: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(content, dict):
        if content.keys() == {_STANDS_FOR}:
            return tensors[content[_STANDS_FOR]]
        for name, value in content.items():
            content[name] = _joined(value, tensors)
        return content
    if type(content) in (list, tuple):
        return type(content)(_joined(value, tensors) for value in content)
    return content


def _compact(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU without the padding of the memory that it is a view of."""
    value = tensor.cpu()
    is_padded = value.untyped_storage().nbytes() != value.numel() * value.element_size()
    return value.clone() if is_padded else value


def _unfinished(target: Path) -> Path:
    return target.with_name(f".{target.name}.unfinished")


def _shard(rank: int) -> str:
    return f"shard-{rank:05d}.pt"

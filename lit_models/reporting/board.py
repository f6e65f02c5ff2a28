"""Texts that callbacks wrote to TensorBoard: samples, explanations, tables of confusions."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TEXT_PLUGIN = b"\n\x04text"  # how an event names the plugin; others are passed over unparsed
SUFFIX = "/text_summary"


class BoardText(NamedTuple):
    """The newest text of one name: Markdown, and the step at which it was written."""

    name: str
    step: int
    text: str


def board_texts(run: Path, notes: list[str]) -> list[BoardText]:
    """Return the newest text of each name in a run folder's TensorBoard files.

    Args:
        run: the run folder.
        notes: gets a sentence for each damaged file, of which what comes before is kept.
    """
    newest: dict[str, BoardText] = {}
    for path in sorted((run / "tensorboard").glob("**/events.out.tfevents.*")):
        try:
            for data in records(path):
                if TEXT_PLUGIN in data:
                    for text in _texts(data):
                        newest[text.name] = text
        except ValueError as error:
            name = path.relative_to(run)
            notes.append(f"{name} is damaged ({error}); what comes after that is not shown.")
    return [newest[name] for name in sorted(newest)]


def records(path: Path) -> Iterator[bytes]:
    """Yield the records of an events file; a torn last one, as a kill leaves it, ends it.

    Each is its length (8 bytes, little-endian), a checksum (4), the data and its checksum (4).

    Raises:
        ValueError: a record is longer than the rest of the file and its length is not the one that
            was written.
    """
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        while len(head := file.read(12)) == 12:
            (size,) = struct.unpack("<Q", head[:8])
            at = file.tell()
            if size + 4 > end - at:
                if not _is_checked(head):
                    raise ValueError(f"{size} bytes at {at} of {end}")
                return
            yield file.read(size)
            file.seek(4, os.SEEK_CUR)


def _is_checked(head: bytes) -> bool:
    """Return whether a length has the checksum that was written with it."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    return struct.pack("<I", masked_crc32c(head[:8])) == head[8:]


def _texts(data: bytes) -> Iterator[BoardText]:
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    try:
        event = Event.FromString(data)
    except DecodeError as error:
        raise ValueError(f"a record of {len(data)} bytes is no event") from error
    for value in event.summary.value:
        if value.metadata.plugin_data.plugin_name == "text" and value.tensor.string_val:
            text = value.tensor.string_val[0].decode("utf-8", "replace")
            yield BoardText(value.tag.removesuffix(SUFFIX), event.step, text)

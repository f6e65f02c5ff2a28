"""Texts that callbacks wrote to TensorBoard: samples, explanations, tables of confusions."""

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


def board_texts(run: Path) -> list[BoardText]:
    """Return the newest text of each name in a run folder's TensorBoard files."""
    newest: dict[str, BoardText] = {}
    for path in sorted((run / "tensorboard").glob("**/events.out.tfevents.*")):
        for data in records(path):
            if TEXT_PLUGIN in data:
                for text in _texts(data):
                    newest[text.name] = text
    return [newest[name] for name in sorted(newest)]


def records(path: Path) -> Iterator[bytes]:
    """Yield the records of an events file; a torn last one, as a kill leaves it, ends it.

    Each is its length (8 bytes, little-endian), a checksum (4), the data and its checksum (4).
    """
    with path.open("rb") as file:
        while len(head := file.read(12)) == 12:
            (size,) = struct.unpack("<Q", head[:8])
            data = file.read(size)
            if len(data) < size or len(file.read(4)) < 4:
                return
            yield data


def _texts(data: bytes) -> Iterator[BoardText]:
    from tensorboard.compat.proto.event_pb2 import Event

    event = Event.FromString(data)
    for value in event.summary.value:
        if value.metadata.plugin_data.plugin_name == "text" and value.tensor.string_val:
            text = value.tensor.string_val[0].decode("utf-8", "replace")
            yield BoardText(value.tag.removesuffix(SUFFIX), event.step, text)

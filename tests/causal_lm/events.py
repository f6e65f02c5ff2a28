"""What stands in the events of a run."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def texts_of(folder: Path) -> dict[tuple[str, int], str]:
    """Return (tag, step) -> text of the events in FOLDER/board."""
    board = EventAccumulator(str(folder / "board"), size_guidance={"tensors": 0}).Reload()
    return {
        (tag, event.step): event.tensor_proto.string_val[0].decode()
        for tag in board.Tags()["tensors"]
        for event in board.Tensors(tag)
    }

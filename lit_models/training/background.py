"""Checkpoints written while the training goes on: a copy is taken, a thread writes it."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import Strategy
from torch import Tensor


class BackgroundWriter:
    """One thread at a time; what went wrong in it is raised where somebody asks.

    The thread is not a daemon: an interpreter that ends waits for it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Let a thread write; the one before it is waited for.

        Raises:
            OSError: the one before it could not write.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written any more; raises what went wrong, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise what went wrong, once, without waiting."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error


class WriteBehind(CheckpointIO):
    """Takes a copy of a checkpoint; another CheckpointIO writes it in a thread.

    Args:
        checkpoint_io: does the writing.
        writer: whose thread it is.
        then: called in the thread when the checkpoint is whole on disk.
    """

    def __init__(
        self, checkpoint_io: CheckpointIO, writer: BackgroundWriter, then: Callable[[], None]
    ) -> None:
        self.checkpoint_io, self.writer, self.then = checkpoint_io, writer, then

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Return when the copy is taken; Raises as `BackgroundWriter.start` does."""
        self.writer.wait()  # two copies at once would take twice the memory
        kept = copied(checkpoint)

        def write() -> None:
            self.checkpoint_io.save_checkpoint(kept, path, storage_options)
            self.then()

        self.writer.start(write)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(*args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        self.checkpoint_io.remove_checkpoint(path)


@contextmanager
def written_behind(
    strategy: Strategy, writer: BackgroundWriter, then: Callable[[], None]
) -> Iterator[None]:
    """Let what is saved inside be copied there and written afterwards; `then` as `WriteBehind`."""
    checkpoint_io = strategy.checkpoint_io
    strategy.checkpoint_io = WriteBehind(checkpoint_io, writer, then)
    try:
        yield
    finally:
        strategy.checkpoint_io = checkpoint_io


def copied(content: Any, memo: dict[Any, Tensor] | None = None) -> Any:
    """Return a copy that later training steps leave alone, its tensors on the CPU.

    Tensors that are one in memory stay one, as tied weights are in a file.

    Args:
        content: dicts, lists and tuples of tensors and plain values.
        memo: copies made so far.
    """
    memo = {} if memo is None else memo
    if isinstance(content, Tensor):
        return _copied_tensor(content, memo)
    if isinstance(content, dict):
        twin = copy.copy(content)  # a state dict carries its modules' versions as an attribute
        for key, value in content.items():
            twin[key] = copied(value, memo)
        return twin
    if type(content) in (list, tuple):
        return type(content)(copied(value, memo) for value in content)
    return copy.deepcopy(content)


def _copied_tensor(tensor: Tensor, memo: dict[Any, Tensor]) -> Tensor:
    value = tensor.detach()
    place = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
    if place not in memo or value.numel() == 0:
        memo[place] = value.clone() if value.device.type == "cpu" else value.cpu()
    return memo[place]

"""Memory that a step on a CPU has freed stays with the process, for the next step."""

import ctypes
import platform
from functools import cache

from lightning.pytorch import Callback, LightningModule, Trainer

# Parameters of glibc's mallopt, from malloc.h, and their values: blocks up to the first size come
# from the heap (glibc allows no more), whose free end goes back to the kernel from the second on.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_BLOCK, KEPT, KEPT_BY_DEFAULT = 32 << 20, 2**31 - 1, 64 << 20


class HostMemory(Callback):
    """Keeps freed memory for as long as a training on a CPU goes on.

    glibc would hand blocks as large as gradients and activations back to the kernel in each step,
    and get them anew in the next, page by page, each of them cleared: a tenth of a step of the
    occupation coder. On a GPU, and without glibc, it does nothing.
    """

    def __init__(self) -> None:
        self._keeps = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin before any callback rehearses a step: it measures the heap that the run has."""
        if stage == "fit" and trainer.strategy.root_device.type == "cpu":
            self._keeps = True
            keep_freed_memory()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._give_back()  # Lightning tears nothing down then

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._give_back()

    def _give_back(self) -> None:
        if self._keeps:
            self._keeps = False
            give_freed_memory_back()


def keep_freed_memory() -> None:
    """Let this process keep what it frees, up to 2 GiB at the end of its heap."""
    if (libc := _glibc()) is not None:
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT)


def give_freed_memory_back() -> None:
    """Return free memory to the kernel, from now on as glibc does where large blocks are usual."""
    if (libc := _glibc()) is not None:
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BY_DEFAULT)
        libc.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None

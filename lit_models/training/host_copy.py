"""Numbers of a device on their way to the host, which goes on meanwhile."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class HostCopy:
    """Numbers that are read later: a GPU is not waited for, but where they are asked for too soon.

    `.tolist()` would wait until the GPU has done all that was queued, the step under way too.

    Args:
        vector: [n] float64, which a collective may still be summing.
        work: that collective; none where there is none.
        last: [] one more number, such as the gradient's norm; none leaves it out.
    """

    def __init__(self, vector: Tensor, work: dist.Work | None, last: Tensor | None) -> None:
        self._work, self._event = work, None
        self._has_last = last is not None
        self._parts = [vector] if last is None else [vector, last.reshape(1)]
        if vector.device.type == "cuda":
            if work is not None:
                work.wait()  # of NCCL: the stream waits, not the host
            numbers = torch.cat([part.to(vector) for part in self._parts])
            copy = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._parts, self._work = [copy.copy_(numbers, non_blocking=True)], None
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> tuple[list[float], float | None]:
        """Return the numbers of the vector, and the last one."""
        if self._work is not None:
            self._work.wait()
        if self._event is not None:
            self._event.synchronize()
        numbers = [number for part in self._parts for number in part.tolist()]
        return (numbers[:-1], numbers[-1]) if self._has_last else (numbers, None)

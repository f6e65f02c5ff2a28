"""Where a rank's own part of a backward pass ends under ddp, and its wait for the others begins."""

from functools import partial

from torch import Tensor
from torch.autograd import Variable

from lit_models.training.throughput.clock import COMMUNICATION, PhaseClock


def note_own_end(loss: Tensor, clock: PhaseClock) -> None:
    """Let the clock count communication from the moment when this rank has all its gradients.

    Args:
        loss: [], of the micro-batch whose backward pass is about to begin.
        clock: of this rank.
    """

    def queue(gradient: Tensor) -> None:
        # Called at the beginning of the backward pass: what is queued now is called when all
        # gradients of this rank are there, and before ddp, which queues later, waits for others'.
        Variable._execution_engine.queue_callback(partial(clock.switch, COMMUNICATION))

    if loss.requires_grad:
        loss.register_hook(queue)

"""Data parallel with a whole copy of the module on every device (DDP), on CPU and GPU."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any, Literal

from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lit_models.training.strategies.processes import ManagedProcesses

UNUSED = "Expected to have finished reduction in the prior iteration"
NONE_YET = "find_unused_parameters=True was specified in DDP constructor"


class ReplicatedStrategy(ManagedProcesses, DDPStrategy):
    """`ddp`, `ddp_spawn` and their kin, with every option of DDP by name.

    Args:
        process_group_backend: gloo, nccl or mpi; none takes the one for the device.
        timeout: how long a rank waits for another.
        start_method: `popen` runs the command again, `spawn` and `fork` start functions of it.
        find_unused_parameters: look in every step for parameters that got no gradient; slower,
            and needed only where the network's path depends on the batch. A module that says so
            itself (`reaches_all_parameters` is false) gets it anyway.
        gradient_as_bucket_view: gradients lie in the buffers that are sent: one copy less.
        broadcast_buffers: every forward takes the buffers of rank 0.
        bucket_cap_mb: MiB of gradients that are sent together; none is DDP's own 25.
        static_graph: the same parameters get gradients in every step, even if not all do.
    """

    def __init__(
        self,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=10),
        start_method: Literal["popen", "spawn", "fork"] = "popen",
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | None = None,
        static_graph: bool = False,
    ) -> None:
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            bucket_cap_mb=bucket_cap_mb,
            static_graph=static_graph,
            # torch 2.13 warns of the name wherever it is given, even with its default.
            **({} if broadcast_buffers else {"broadcast_buffers": False}),
        )

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        """Wrap the module; what gets no gradient in a step then keeps none, as on one device."""
        if not getattr(model, "reaches_all_parameters", True):
            self._ddp_kwargs["find_unused_parameters"] = True
            warnings.filterwarnings("ignore", message=NONE_YET)  # of a step that reaches all
        return super()._setup_model(model)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().training_step(*args, **kwargs)
        except RuntimeError as error:
            if UNUSED not in str(error):
                raise
            raise RuntimeError(
                "some parameters got no gradient in the step before, and DDP waits for them. Use "
                "--trainer.strategy=ddp_find_unused_parameters_true, or freeze them."
            ) from error

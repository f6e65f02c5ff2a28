"""Strategies for several processes, on CPU and GPU: `ddp` and its variants, `fsdp`, tensor groups.

A script's `Trainer(strategy="ddp")` is Lightning's own strategy and exact as well. The command line
uses the classes here, which explain why a process group cannot form and end what they started.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import os
import re
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torchmetrics import Metric

from lit_models.run_files import put_together
from lit_models.training.checkpoints import SAVES, gathered, misfits, write_folder
from lit_models.training.dropout import ExactDropout
from lit_models.training.rules import START_METHODS, tensor_groups
from lit_models.training.sharding import check_tensor_plan, sharded_like, split_layers

# A rank that waits this long for another would wait forever: the run ends instead of hanging.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
Backend = Literal["gloo", "nccl", "mpi", "cpu:gloo,cuda:nccl"]
PORT_TAKEN = ("EADDRINUSE", "address already in use")
EVALUATION_STEPS = ("validation_step", "test_step", "predict_step")
CHILD_ENDS_S = 1.0
FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}  # of nccl
DEPRECATIONS = (  # warnings about Lightning's own calls
    "torch.distributed.nn.functional.all_gather is deprecated",
    "`isinstance(treespec, LeafSpec)` is deprecated",
)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
GRACE_S = 10.0  # for a failed rank to report, and for ranks that learn of it to end
INTERRUPTED_GRACE_S = 2.0
SMALL_NETWORK = 2**28  # parameters; one device gathers a smaller network at once
MOST_WRITERS = 64  # files of a sharded checkpoint; each rank that resumes opens all of them
NONE_UNUSED = "find_unused_parameters=True was specified in DDP constructor"


def replicated(name: str | None) -> ReplicatedStrategy | None:
    """Return the command line's strategy for `ddp` and its variants; `None` for other names."""
    short, _, finds = (name or "").partition("_find_unused_parameters_")
    start_method = START_METHODS.get(short)
    if start_method is None or finds not in ("", "true", "false"):
        return None
    return ReplicatedStrategy(start_method=start_method, find_unused_parameters=finds == "true")


def strategy_name(strategy: Any) -> str:
    """Return a strategy's name for `trainer.strategy`, `single_device` for one device, or the class
    name of a strategy without a name here."""
    if isinstance(strategy, ReplicatedStrategy | FullyShardedStrategy | SingleDeviceStrategy):
        return strategy.strategy_name
    return "ddp" if type(strategy) is DDPStrategy else type(strategy).__name__


class ManagedProcesses(ParallelStrategy):
    """Mixin before Lightning's class: says why a group cannot form, and ends what it started."""

    def setup_environment(self) -> None:
        """Form the process group.

        Raises:
            RuntimeError: another program uses the rendezvous port.
        """
        for text in DEPRECATIONS:  # a spawned rank does not inherit its parent's filters
            warnings.filterwarnings("ignore", message=re.escape(text))
        if self.root_device.type == "cuda":
            for name, value in FLIGHT_RECORDER.items():
                os.environ.setdefault(name, value)
        try:
            super().setup_environment()
        except dist.DistNetworkError as error:
            if not any(text in str(error) for text in PORT_TAKEN):
                raise
            raise RuntimeError(
                f"port {os.environ.get('MASTER_PORT', '?')} is taken by another program. Set "
                "MASTER_PORT to a free one on all nodes, or unset it on a single node: a free one "
                "is then chosen."
            ) from error
        atexit.register(leave_group)

    def setup(self, trainer: Trainer) -> None:
        """Warn about batch norms: their statistics make a run depend on the number of devices."""
        is_training = trainer.state.fn == TrainerFn.FITTING
        modules = trainer.lightning_module.modules()
        if is_training and any(isinstance(module, BATCH_NORMS) for module in modules):
            rank_zero_warn(
                "batch norm layers take their statistics from what each device computes at once, "
                "filler rows included: the run depends on the number of devices. On GPUs "
                "trainer.sync_batchnorm=true lessens it; LayerNorm or GroupNorm do not have it."
            )
        super().setup(trainer)

    def ended_children(self) -> str:
        """Return a description of the ranks started by this process that have ended or stopped."""
        endings: list[str] = []
        procs = getattr(self.launcher, "procs", [])
        children = [child for child in procs if isinstance(child, subprocess.Popen)]
        end = time.monotonic() + CHILD_ENDS_S  # a rank's connections close before its process ends
        while time.monotonic() < end and all(child.poll() is None for child in children):
            time.sleep(0.05)
        for rank, child in enumerate(children, self.global_rank + 1):
            status = child.poll()
            if status is not None and status < 0:
                endings.append(f"rank {rank} was ended by {signal.Signals(-status).name}")
            elif status:
                endings.append(f"rank {rank} ended with status {status}")
            elif status is None and psutil.Process(child.pid).status() == psutil.STATUS_STOPPED:
                endings.append(f"rank {rank} (process {child.pid}) is stopped, as by SIGSTOP")
        if procs:
            # Lightning's observer of this list would kill this process before it has reported.
            self.launcher.procs = list(procs)  # type: ignore[union-attr]
            procs.clear()
        return " and ".join(endings)

    def on_exception(self, exception: BaseException) -> None:
        """End the processes that this one started: they would wait for it."""
        super().on_exception(exception)
        children = getattr(self.launcher, "procs", [])
        # Before a group has formed, no other rank has a failure to report: all are still starting.
        is_launched = all(isinstance(c, subprocess.Popen) for c in children)
        has_group = dist.is_initialized() or not is_launched
        grace_s = GRACE_S if isinstance(exception, Exception) else INTERRUPTED_GRACE_S
        deadline = time.monotonic() + (grace_s if has_group else 0.0)
        for child in children:
            left_s = max(0.0, deadline - time.monotonic())
            wait = child.wait if isinstance(child, subprocess.Popen) else child.join
            with contextlib.suppress(subprocess.TimeoutExpired):
                wait(left_s)
            child.kill()  # does nothing if it has ended
            wait()


def leave_group() -> None:
    """Destroy this rank's process group, if any: gloo's would abort one process in three when the
    interpreter exits. Garbage is collected first, as fsdp's reference cycles keep a group alive."""
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


class ReplicatedStrategy(ManagedProcesses, DDPStrategy):
    """`ddp`, `ddp_spawn` and their variants: every device has a whole copy of the module.

    Options that are not listed below are those of torch's DistributedDataParallel.

    Args:
        process_group_backend: gloo, nccl or mpi; `None` chooses by device.
        timeout: how long a rank waits for another before the run ends.
        start_method: `popen` runs the command in each process; `spawn`, `fork`: multiprocessing.
        find_unused_parameters: for networks that may not use every parameter in each step; always
            on for modules whose `reaches_all_parameters` is false.
        broadcast_buffers: send rank 0's buffers with every forward, unless the module has
            `buffers_stand_still`.
    """

    def __init__(
        self,
        process_group_backend: Backend | None = None,
        timeout: timedelta = COLLECTIVE_TIMEOUT,
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
        )
        self.timeout, self.broadcast_buffers = timeout, broadcast_buffers
        self.strategy_name = "ddp" if start_method == "popen" else f"ddp_{start_method}"

    def configure_ddp(self) -> None:
        """Wrap the module in DDP by its attributes: parameters that a step does not reach keep no
        gradient, as on one device, and constant buffers are not sent with every forward."""
        module = self.lightning_module
        if not getattr(module, "reaches_all_parameters", True):
            self._ddp_kwargs["find_unused_parameters"] = True
            warnings.filterwarnings("ignore", message=NONE_UNUSED)  # when a step reaches all
        super().configure_ddp()
        stand_still = getattr(module, "buffers_stand_still", False)
        # torch 2.13 warns if this is passed as an argument.
        self.model.broadcast_buffers = self.broadcast_buffers and not stand_still


class FullyShardedStrategy(ManagedProcesses, ModelParallelStrategy):
    """`fsdp` (FSDP2): shards a module's `blocks()` one by one, and the rest as one more group.

    A block's parameters are gathered while it computes. In a module's `uneven_steps` all blocks are
    gathered for the whole step, since ranks may generate texts of different lengths. Checkpoints
    are the same as under other strategies: whole tensors by parameter name. Under `bf16-mixed` a
    module with `takes_half_weights` gathers its weights and computes in bfloat16, without autocast;
    gradients are summed, and parameters stored and updated, in float32.

    Args:
        reshard_after_forward: free a block's gathered parameters between forward and backward;
            ignored for modules whose ranks call blocks unevenly, where it would deadlock.
        replicate_size: number of whole copies (hybrid sharding), such as one per node.
        tensor_parallel_size: number of devices that process the same samples together, each with
            its part of the layers in the network's `tensor_plan`.
        cpu_offload: keep the GPUs' shards in host memory, where gloo sums their norms.
        sharded_checkpoint: every rank writes its part of a folder, which any strategy and number of
            devices can read; otherwise rank 0 gathers everything into one file.
        process_group_backend: gloo, nccl or mpi; `None` chooses by device.
        timeout: how long a rank waits for another before the run ends.

    Raises:
        ValueError: a size does not divide the number of devices, the devices of a tensor group
            would draw different dropout masks, or the network cannot be split.
    """

    strategy_name = "fsdp"
    fills_late = True  # see `ExactModule.late_weights`

    def __init__(
        self,
        reshard_after_forward: bool | Literal["auto"] = "auto",
        replicate_size: int = 1,
        tensor_parallel_size: int = 1,
        cpu_offload: bool = False,
        sharded_checkpoint: bool = False,
        process_group_backend: Backend | None = None,
        timeout: timedelta = COLLECTIVE_TIMEOUT,
    ) -> None:
        if cpu_offload and process_group_backend is None and torch.cuda.is_available():
            process_group_backend = "cpu:gloo,cuda:nccl"  # the host sums the shards' norms
        super().__init__(
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.timeout, self.reshard_after_forward = timeout, reshard_after_forward
        self.replicate_size, self.tensor_parallel_size = replicate_size, tensor_parallel_size
        self.cpu_offload, self.sharded_checkpoint = cpu_offload, sharded_checkpoint
        self._restored: tuple[Mapping[str, Any], bool] | None = None  # to load after sharding
        self._blocks: list[fsdp.FSDPModule] = []
        self._frees = self._gathers_half = False
        self.repeats_samples = False  # true if another rank of the tensor group reports them

    def setup_environment(self) -> None:
        """Form the process group; every tensor group is one data-parallel replica."""
        world_size, size = self.num_nodes * self.num_processes, self.tensor_parallel_size
        num_groups = tensor_groups(size, world_size)
        if self.replicate_size < 1 or num_groups % self.replicate_size:
            raise ValueError(
                f"replicate_size {self.replicate_size} does not divide the {world_size} devices"
                f"{f' / {size} of a tensor group' * (size > 1)}; use a divisor, such as the number "
                "of nodes."
            )
        # The constructor's argument would be due before the number of devices is known.
        self._data_parallel_size = num_groups
        super().setup_environment()
        if self.sharded_checkpoint:  # steps use the default group while a save is under way
            self._writers = dist.new_group(backend="gloo", timeout=self.timeout)
        if self.tensor_parallel_size > 1:
            self.repeats_samples = self.device_mesh["tensor_parallel"].get_local_rank() > 0

    def setup(self, trainer: Trainer) -> None:
        """Shard rank 0's copy of the module, then create the optimizer over the shards."""
        module = self.lightning_module
        assert module is not None
        if self.tensor_parallel_size > 1 and trainer.state.fn == TrainerFn.FITTING:
            rate = max((m.p for m in module.modules() if isinstance(m, nn.Dropout)), default=0.0)
            if rate and not any(isinstance(c, ExactDropout) for c in trainer.callbacks):
                raise ValueError(
                    f"tensor_parallel_size is {self.tensor_parallel_size}, and the network has "
                    f"dropout {rate}, whose masks each device of a tensor group would draw by "
                    "itself; set exact_dropout to true (the callback ExactDropout), or dropout "
                    "to 0."
                )
        if trainer.precision == "bf16-mixed" and getattr(module, "takes_half_weights", False):
            # Autocast would keep a copy of each gathered weight until its backward pass.
            self.precision_plugin, self._gathers_half = Precision(), True
            self.precision_plugin.precision = "bf16-mixed"
        self.precision_plugin.convert_module(module)
        if not isinstance(module, fsdp.FSDPModule):  # else sharded by an earlier fit
            with torch.no_grad():
                whole = (*module.parameters(), *module.buffers())
                for tensor in (t for t in whole if not t.is_meta):
                    tensor.copy_(self._of_first_rank(tensor))
            self._shard(module)
            self._fill(module)
            if self._restored is not None:
                self.load_model_state_dict(*self._restored)
                self._restored = None
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False  # in which sharded tensors cannot be detached
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Move what `_fill` has not; not under `cpu_offload`: torch refuses its shards on a GPU."""
        if not self.cpu_offload:
            super().model_to_device()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Sum gradients over whole copies only in a step's last micro-batch, if that gives every
        parameter a gradient."""
        reaches_all = getattr(self.lightning_module, "reaches_all_parameters", False)
        assert isinstance(self.model, fsdp.FSDPModule)
        self.model.set_requires_all_reduce(not reaches_all)
        try:
            yield
        finally:
            self.model.set_requires_all_reduce(True)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this rank's shards; `save_checkpoint` gathers whole tensors from them."""
        return get_model_state_dict(self.model)  # type: ignore[arg-type]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Copy this rank's shards from memory-mapped whole weights, once the module is sharded."""
        if not isinstance(self.model, fsdp.FSDPModule):
            self._restored = checkpoint, strict
            return
        own, stored = get_model_state_dict(self.model), checkpoint["state_dict"]
        if strict and (wrong := misfits(own, stored)):
            raise RuntimeError(f"the weights of the checkpoint do not fit the module: {wrong}.")
        with torch.no_grad():
            # Cut here: torch 2.13 cannot distribute tensors that are both split and sharded.
            for name in (name for name in own if name in stored):
                own[name].copy_(sharded_like(stored[name], own[name]))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's shards from whole moments, by parameter name."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.register_load_state_dict_pre_hook(_sharded_like_parameters)
            optimizer.load_state_dict(state)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write a file on rank 0, or a folder to which every rank adds its file; a collective."""
        path = Path(self.broadcast(filepath))
        may_wait = SAVES.may_wait(path)
        num_writers = min(self.world_size, MOST_WRITERS) if self.sharded_checkpoint else 1
        rest, tensors = gathered(checkpoint, self.root_device, num_writers)
        if self.sharded_checkpoint:
            save = partial(write_folder, rest, tensors, path, self._writers)
        elif self.is_global_zero:
            whole, write = put_together(rest, tensors), self.checkpoint_io.save_checkpoint
            save = partial(write, whole, path, storage_options)
        else:
            return
        SAVES.write(save, may_wait)

    # As in other strategies, `optimizer_state` is a rank's own, and every rank maps the whole
    # checkpoint before `setup`; the two methods `load_…` above take its shards from it.
    optimizer_state = ParallelStrategy.optimizer_state
    load_checkpoint = ParallelStrategy.load_checkpoint
    restore_checkpoint_after_setup = ParallelStrategy.restore_checkpoint_after_setup
    lightning_restore_optimizer = ParallelStrategy.lightning_restore_optimizer

    def _of_first_rank(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor, bit for bit, on the device of collectives."""
        here = tensor.to(self.root_device).reshape(-1).contiguous()
        dist.broadcast(here.view(torch.uint8), src=0)
        return here.view(tensor.shape)

    @torch.no_grad()
    def _fill(self, module: LightningModule) -> None:
        """Allocate this rank's shards of parameters on `meta`, and load rank 0's `late_weights`."""
        like = partial(torch.empty_like, device="cpu" if self.cpu_offload else self.root_device)
        real = {p: nn.Parameter(like(p), p.requires_grad) for p in module.parameters() if p.is_meta}
        module._device = self.root_device  # so that `module.device` is where it computes
        for part in module.modules():
            if isinstance(part, Metric):
                part.to(self.root_device)
            for name, own in list(part.named_parameters(recurse=False)):
                setattr(part, name, real.get(own, own))  # tied parameters stay tied
        weights: dict[str, Tensor] = dict(module.named_buffers())
        weights |= module.named_parameters(remove_duplicate=False)
        late = getattr(module, "late_weights", [])
        for name, value in itertools.chain(*late):
            here = value if self.is_global_zero else torch.empty_like(value)
            weights[name].copy_(sharded_like(self._of_first_rank(here), weights[name]))
            del value, here  # before the next one is drawn
        late.clear()

    def _shard(self, module: LightningModule) -> None:
        blocks = list(module.blocks()) if hasattr(module, "blocks") else []
        if self.world_size == 1 and sum(p.numel() for p in module.parameters()) < SMALL_NETWORK:
            blocks = []  # one device sends nothing; one group is less work for its host than many
        calls_evenly = getattr(module, "calls_blocks_evenly", True)
        self._frees = calls_evenly and bool(self.reshard_after_forward)
        is_offloaded = self.cpu_offload and self.root_device.type != "cpu"
        offload = fsdp.CPUOffloadPolicy() if is_offloaded else fsdp.OffloadPolicy()
        inner, outer = self._split_and_mesh(module)
        dtypes = (torch.bfloat16, torch.float32) if self._gathers_half else (None, None)
        policy = fsdp.MixedPrecisionPolicy(*dtypes, cast_forward_inputs=False)  # for exact counts
        options = {"mesh": inner, "offload_policy": offload, "mp_policy": policy}
        # Two fsdp groups cannot share parameters: a block gets its own copy of a frozen one that an
        # earlier block has, while fsdp refuses shared parameters that are trained.
        seen_ids: set[int] = set()
        for block in blocks:
            copies: dict[int, nn.Parameter] = {}
            for name, parameter in list(block.named_parameters(remove_duplicate=False)):
                if id(parameter) in seen_ids and not parameter.requires_grad:
                    owner, _, last = name.rpartition(".")
                    copied = nn.Parameter(parameter.detach().clone(), requires_grad=False)
                    copied = copies.setdefault(id(parameter), copied)
                    setattr(block.get_submodule(owner), last, copied)
            seen_ids |= {id(parameter) for parameter in block.parameters()}
        for block in blocks:
            sharded = fsdp.fully_shard(block, reshard_after_forward=self._frees, **options)
            self._blocks.append(sharded)
            for name in getattr(block, "forward_methods", ()):
                fsdp.register_fsdp_forward_method(block, name)
        for name in getattr(module, "uneven_steps", EVALUATION_STEPS):
            setattr(module, name, self._gathered()(getattr(module, name)))
        fsdp.fully_shard(module, reshard_after_forward=False, **{**options, "mesh": outer})
        if not calls_evenly:
            # The backward pass prefetches in the order of the forward calls, which then differs
            # between ranks: a deadlock. A part that prefetches only itself prefetches nothing.
            for part in (*self._blocks, module):
                part.set_modules_to_backward_prefetch([part])
        for name in ("training_step", *EVALUATION_STEPS):
            fsdp.register_fsdp_forward_method(module, name)
        for name in EVALUATION_STEPS:
            setattr(module, name, self._freed_after()(getattr(module, name)))

    def _split_and_mesh(self, module: LightningModule) -> tuple[DeviceMesh, DeviceMesh]:
        """Split layers; return the meshes that shard blocks and all other parameters.

        Parameters outside of blocks, such as an embedding, are never split but sharded over all
        devices of a copy, those of a tensor group included: their gradients are equal.
        """
        copies, size = self.replicate_size, self.tensor_parallel_size
        replicas = self.device_mesh["data_parallel"]
        if copies == size == 1:
            return replicas, replicas
        make = partial(init_device_mesh, self.root_device.type)
        shards = self.world_size // copies
        both = make((copies, shards), mesh_dim_names=("replicate", "shard"))
        outer = both if copies > 1 else both["shard"]
        if size == 1:
            return outer, outer
        plan = module.tensor_plan() if hasattr(module, "tensor_plan") else {}
        check_tensor_plan(module, plan, size)
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "tensor_parallel_size does not go with the loss scaler of trainer.precision "
                "16-mixed, which looks at each rank's part of a gradient; use bf16-mixed."
            )
        cube = make((copies, shards // size, size), mesh_dim_names=("replicate", "shard", "tensor"))
        split_layers(module, plan, cube["tensor"])
        for metric in (part for part in module.modules() if isinstance(part, Metric)):
            metric.process_group = replicas.get_group()  # one rank per tensor group
        return (cube["replicate", "shard"] if copies > 1 else cube["shard"]), outer

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """Gathers all blocks before a step, on every rank in the same order."""
        for block in self._blocks:
            block.set_reshard_after_forward(False, recurse=False)
            block.unshard()
        yield

    @contextmanager
    def _freed_after(self) -> Iterator[None]:
        """Frees what an evaluation step gathered."""
        try:
            yield
        finally:
            for block in self._blocks:
                block.set_reshard_after_forward(self._frees, recurse=False)
                block.reshard()
            self.model.reshard()  # type: ignore[union-attr, operator]


def _sharded_like_parameters(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        index: {name: sharded_like(value, parameters[index]) for name, value in values.items()}
        for index, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


# In scripts, too, the name `fsdp` is this class: Lightning's own refuses to run on a CPU.
if "fsdp" in (names := FSDPStrategy.get_registered_strategies()):
    names.remove("fsdp")
StrategyRegistry.register("fsdp", FullyShardedStrategy, override=True)

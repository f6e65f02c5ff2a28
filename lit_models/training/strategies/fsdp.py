"""Fully sharded data parallel (FSDP2) for every module, on CPU (gloo) and GPU (nccl).

Parameters, gradients and moments are sharded over the devices; a block's parameters are gathered
while it computes. Checkpoints are those of any other strategy, whole and by parameter name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.optim import Optimizer
from torchmetrics import Metric

from lit_models.training.checkpoint import AtomicCheckpointIO
from lit_models.training.sharded_checkpoint import Part, cut, prepare
from lit_models.training.sharding import on_cpu, sharded_like, whole
from lit_models.training.strategies.before_sharding import (
    check_dropout,
    equal_weights,
    recompute_in_backward,
    separate_frozen,
)
from lit_models.training.strategies.meshes import check_groups, mesh_of
from lit_models.training.strategies.processes import ManagedProcesses
from lit_models.training.tensor_plan import check_tensor_plan, split_layers

EVALUATION_STEPS = ("validation_step", "test_step", "predict_step")


class FullyShardedStrategy(ManagedProcesses, ModelParallelStrategy):
    """Shards a module's `blocks()` one by one, and the rest of it as one more group.

    Validation, test and prediction gather all parameters for the length of a step: ranks may then
    generate texts of different lengths without waiting for each other.

    Args:
        reshard_after_forward: free a block's gathered parameters between its forward and its
            backward. `auto` does so unless the module calls its blocks unevenly over ranks.
        replicate_size: groups that hold a whole copy each (hybrid sharding, such as one per node);
            1 shards over all devices.
        tensor_parallel_size: devices that compute the same samples together, each with its part of
            the layers that the network's `tensor_plan` names; 1 splits no layer.
        activation_checkpointing: keep only the inputs of blocks and compute the rest again in
            the backward pass: less memory, about a third more time.
        cpu_offload: keep the shards in the memory of the host; needs a GPU.
        sharded_checkpoint: every rank writes its own shards, and a checkpoint is a folder, which
            any strategy and number of devices reads; else rank 0 gathers all and writes a file.
        process_group_backend: gloo, nccl or mpi; none takes the one for the device.
        timeout: how long a rank waits for another.

    Raises:
        ValueError: `replicate_size` or `tensor_parallel_size` below 1 or no divisor of the world,
            `cpu_offload` on a CPU, freeing after forward where the calls are uneven, computing
            blocks again where the module keeps a cache in them, shards for another CheckpointIO,
            dropout that devices of a tensor group would draw apart, or a network that cannot be
            split so.
    """

    strategy_name = "fsdp"

    def __init__(
        self,
        reshard_after_forward: bool | Literal["auto"] = "auto",
        replicate_size: int = 1,
        tensor_parallel_size: int = 1,
        activation_checkpointing: bool = False,
        cpu_offload: bool = False,
        sharded_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        super().__init__(
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        sizes = {"replicate_size": replicate_size, "tensor_parallel_size": tensor_parallel_size}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}.")
        self.reshard_after_forward = reshard_after_forward
        self.replicate_size, self.tensor_parallel_size = replicate_size, tensor_parallel_size
        self.activation_checkpointing = activation_checkpointing
        self.cpu_offload = cpu_offload
        self.sharded_checkpoint = sharded_checkpoint
        self._blocks: list[FSDPModule] = []
        self._frees = False
        self.repeats_samples = False  # another rank of the tensor group tells of them

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning hands optimizer states to `load_optimizer_state_dict`, which shards them."""
        return True

    def setup_environment(self) -> None:
        """Start the process group; every tensor group is a data-parallel replica."""
        world_size = self.num_nodes * self.num_processes
        check_groups(world_size, self.replicate_size, self.tensor_parallel_size)
        if self.cpu_offload and self.root_device.type == "cpu":
            raise ValueError(
                "cpu_offload keeps shards in the host's memory, where a CPU run has them anyway; "
                "leave it out."
            )
        if self.sharded_checkpoint and not isinstance(self.checkpoint_io, AtomicCheckpointIO):
            raise ValueError(
                f"sharded_checkpoint is true, but {type(self.checkpoint_io).__name__} does the "
                "writing, which knows no shards; use AtomicCheckpointIO, or leave it out."
            )
        self._data_parallel_size = world_size // self.tensor_parallel_size
        super().setup_environment()
        if self.tensor_parallel_size > 1:
            self.repeats_samples = self.device_mesh["tensor_parallel"].get_local_rank() > 0

    def setup(self, trainer: Trainer) -> None:
        """Shard the module, as rank 0 has it, then make the optimizer over the shards."""
        module = self.lightning_module
        assert module is not None
        if self.tensor_parallel_size > 1 and trainer.state.fn == TrainerFn.FITTING:
            check_dropout(trainer, module)
        self.precision_plugin.convert_module(module)
        if not isinstance(module, FSDPModule):  # a test after fit finds it sharded
            equal_weights(module, self.root_device)
            self._shard(module)
        super().setup(trainer)
        for optimizer in self.optimizers:
            optimizer.register_load_state_dict_pre_hook(_sharded_like_parameters)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._whole_parameters():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._whole_parameters():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._whole_parameters():
            return super().predict_step(*args, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return what checkpoints hold: that of the shards, or the whole one."""
        if not self.sharded_checkpoint:
            return self.whole_state_dict()
        return get_model_state_dict(self.model)  # type: ignore[arg-type]

    def whole_state_dict(self) -> dict[str, Any]:
        """Return the whole state dict on rank 0, an empty one elsewhere; a collective."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.model, options=options)  # type: ignore[arg-type]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take each rank's shard of whole weights, which every rank has read."""
        own = get_model_state_dict(self.model)  # type: ignore[arg-type]
        # Cut here: torch 2.13 cannot send the parts of tensors that are split and sharded.
        weights = {
            name: sharded_like(value, own[name]) if name in own else value
            for name, value in checkpoint["state_dict"].items()
        }
        options = StateDictOptions(strict=strict)
        set_model_state_dict(self.model, weights, options=options)  # type: ignore[arg-type]

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state in the form of one device on rank 0, a collective; or that of
        the shards, if they are what is saved."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        state_dict = optimizer.state_dict()
        if self.sharded_checkpoint:
            return state_dict
        keeps = self.global_rank == 0
        gathered = {
            index: {name: on_cpu(whole(value), keeps) for name, value in state.items()}
            for index, state in state_dict["state"].items()
        }
        return {**state_dict, "state": gathered} if keeps else {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take each rank's shard of whole moments, by parameter name."""
        states = checkpoint["optimizer_states"]
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write a file on rank 0, or the shards on every rank; a collective.

        Raises:
            OSError: the storage refused; what was there before is kept.
        """
        if not self.sharded_checkpoint:
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(filepath))
        if self.is_global_zero:
            prepare(path)
        self.barrier("FullyShardedStrategy.save_checkpoint")
        part = Part(self.global_rank, self.world_size)
        self.checkpoint_io.save_checkpoint(cut(checkpoint, self.is_global_zero), path, part)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Return the whole checkpoint; the shards are cut when it is applied."""
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def _shard(self, module: LightningModule) -> None:
        blocks = list(module.blocks()) if hasattr(module, "blocks") else []
        offload = CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()
        inner, outer = self._split_and_mesh(module)
        options = {"mesh": inner, "offload_policy": offload}
        self._frees = self._frees_after_forward(module)
        self._check_recomputing(module)
        separate_frozen(blocks)
        for block in blocks:
            if self.activation_checkpointing:
                recompute_in_backward(block)
            self._blocks.append(fully_shard(block, reshard_after_forward=self._frees, **options))
            for name in getattr(block, "forward_methods", ()):
                register_fsdp_forward_method(block, name)
        for name in EVALUATION_STEPS:
            setattr(module, name, self._after_gathering(getattr(module, name)))
        fully_shard(module, mesh=outer, reshard_after_forward=False, offload_policy=offload)
        if not getattr(module, "calls_blocks_evenly", True):
            # The backward pass gathers ahead in the order of the forward calls, which then differs
            # between ranks: they would wait for each other. To gather oneself is to gather nothing.
            for part in (*self._blocks, module):
                part.set_modules_to_backward_prefetch([part])
        for name in ("training_step", *EVALUATION_STEPS):
            register_fsdp_forward_method(module, name)

    def _split_and_mesh(self, module: LightningModule) -> tuple[DeviceMesh, DeviceMesh]:
        """Split layers, and return the devices that shard blocks and those that shard the rest.

        What lies in no block, such as an embedding, is never split: all devices of a copy share
        it, those of a tensor group as well, whose gradients of it are equal.
        """
        copies, group = self.replicate_size, self.tensor_parallel_size
        if copies == group == 1:
            return self.device_mesh["data_parallel"], self.device_mesh["data_parallel"]
        shards = self.world_size // copies
        outer = mesh_of(self.root_device, replicate=copies, shard=shards)
        if group == 1:
            return outer, outer
        plan = module.tensor_plan() if hasattr(module, "tensor_plan") else {}
        check_tensor_plan(module, plan, group)
        self._check_scaler()
        sizes = {"replicate": copies, "shard": shards // group, "tensor": group}
        cube = mesh_of(self.root_device, **sizes)
        split_layers(module, plan, cube["tensor"])
        replicas = self.device_mesh["data_parallel"].get_group()
        for metric in (part for part in module.modules() if isinstance(part, Metric)):
            metric.process_group = replicas  # one rank of each tensor group, or it counts twice
        return (cube["replicate", "shard"] if copies > 1 else cube["shard"]), outer

    def _check_scaler(self) -> None:
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "tensor_parallel_size does not go with the loss scaler of trainer.precision "
                "16-mixed, which looks at each rank's part of a gradient; use bf16-mixed."
            )

    def _frees_after_forward(self, module: LightningModule) -> bool:
        calls_evenly = getattr(module, "calls_blocks_evenly", True)
        if self.reshard_after_forward == "auto":
            return calls_evenly
        if self.reshard_after_forward and not calls_evenly:
            raise ValueError(
                f"reshard_after_forward is true, but {type(module).__name__} calls its blocks more "
                "often on some ranks than on others: they would wait for each other for ever. "
                "Leave it at auto."
            )
        return self.reshard_after_forward

    def _check_recomputing(self, module: LightningModule) -> None:
        if self.activation_checkpointing and not getattr(module, "may_recompute_blocks", True):
            raise ValueError(
                f"activation_checkpointing is true, but {type(module).__name__} keeps a growing "
                "cache in its blocks, which would hold every position twice if they were computed "
                "again; leave it out, and raise trainer.accumulate_grad_batches if memory is short."
            )

    def _after_gathering(self, step: Any) -> Any:
        """Wrap a step so that every rank gathers all blocks first, in the same order."""

        @functools.wraps(step)
        def gathered(*args: Any, **kwargs: Any) -> Any:
            for block in self._blocks:
                block.set_reshard_after_forward(False, recurse=False)
                block.unshard()
            return step(*args, **kwargs)

        return gathered

    @contextmanager
    def _whole_parameters(self) -> Iterator[None]:
        """Frees what an evaluation step gathered; never in inference mode, whose tensors a later
        backward pass could not use."""
        with torch.inference_mode(False), torch.no_grad():
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

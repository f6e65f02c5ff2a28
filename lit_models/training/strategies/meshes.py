"""Groups of devices: which sizes of them make up a world, and the mesh that they are."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lit_models.training.rules import tensor_groups


def check_groups(world_size: int, replicate_size: int, tensor_parallel_size: int) -> None:
    """Refuse groups that do not make up the world.

    Raises:
        ValueError: their size does not divide it.
    """
    if tensor_groups(tensor_parallel_size, world_size) % replicate_size:
        raise ValueError(
            f"replicate_size {replicate_size} does not divide the {world_size} devices"
            f"{f' / {tensor_parallel_size} of a tensor group' * (tensor_parallel_size > 1)}; "
            "use a divisor, such as the number of nodes."
        )


def mesh_of(device: torch.device, **sizes: int) -> DeviceMesh:
    """Return a mesh of all devices without axes of size 1 in front.

    Args:
        device: of this rank; its type counts.
        sizes: axis -> devices along it, `replicate` first.
    """
    if sizes["replicate"] == 1 and "tensor" not in sizes:
        del sizes["replicate"]
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

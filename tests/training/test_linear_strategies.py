"""A step through the products of oneDNN, sharded or checkpointed, beside the layers of torch."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from lit_models.layers import linear
from lit_models.layers.linear import Linear

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="needs AVX-512: elsewhere the products are those of torch",
)
ROWS, WIDTH, HIDDEN, PRODUCTS = 70, 16, 24, 6  # two layers, three products each


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of what oneDNN makes, once no product is too small for it."""
    shapes: list[torch.Size] = []
    compute = linear._product

    def noted(*factors: Tensor | None) -> Tensor:
        result = compute(*factors)
        shapes.append(result.shape)
        return result

    monkeypatch.setattr(linear, "SMALL_PRODUCT", 0)
    monkeypatch.setattr(linear, "_product", noted)
    return shapes


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def both_networks() -> tuple[nn.Module, nn.Module]:
    """Return the same network with the layers of this repository, and with those of torch."""
    torch.manual_seed(0)
    ours = nn.Sequential(Linear(WIDTH, HIDDEN), nn.GELU(), Linear(HIDDEN, WIDTH))
    plain = copy.deepcopy(ours)
    for layer in (plain[0], plain[2]):
        layer.__class__ = nn.Linear
    return ours, plain


def weights_after_a_step(
    network: nn.Module, forward: Callable[[Tensor], Tensor] | None = None
) -> list[Tensor]:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    (forward or network)(x).square().mean().backward()
    optimizer.step()
    whole = (getattr(p, "full_tensor", p.detach)() for p in network.parameters())
    return [x.grad, *whole]


def test_a_sharded_step_is_that_of_torchs_layers(
    products: list[torch.Size], world_of_one: None
) -> None:
    ours, plain = both_networks()
    mesh = init_device_mesh("cpu", (1,))
    for layer in (ours[0], ours[2]):
        fully_shard(layer, mesh=mesh)
    found = weights_after_a_step(fully_shard(ours, mesh=mesh))
    assert len(products) == PRODUCTS
    torch.testing.assert_close(found, weights_after_a_step(plain), rtol=1e-5, atol=1e-6)


def test_a_checkpointed_step_is_that_of_torchs_layers(products: list[torch.Size]) -> None:
    ours, plain = both_networks()
    again = weights_after_a_step(ours, lambda x: checkpoint(ours, x, use_reentrant=False))
    assert len(products) == PRODUCTS + 2  # the forward pass comes twice
    torch.testing.assert_close(again, weights_after_a_step(plain), rtol=1e-5, atol=1e-6)

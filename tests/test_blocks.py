"""Rotary positions: rotated pairs, their gradients and dtypes."""

import pytest
import torch
from torch import Tensor

from lit_models.blocks import rotate


def plain(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return the same rotation, computed with complex numbers."""
    first, second = x.double().chunk(2, -1)
    turned = torch.complex(first, second) * torch.complex(cosine.double(), sine.double())
    return torch.cat([turned.real, turned.imag], -1)


def angles(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    angle = 6 * torch.rand(2, 1, 5, 3, generator=generator, dtype=torch.float64)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def test_a_quarter_turn_by_hand() -> None:
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]])
    turned = rotate(x, torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    assert turned.tolist() == [[[[-3.0, 2.0, 1.0, 4.0]]]]


@pytest.mark.parametrize("layout", ["heads first", "heads last", "a part of more"])
def test_values_and_gradients_in_any_order_of_memory(layout: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, 5, 6, generator=generator, dtype=torch.float64)
    if layout == "heads last":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "a part of more":
        x = torch.stack([x, x]).movedim(0, 3)[..., 1, :]
    x.requires_grad_()
    torch.testing.assert_close(rotate(x, *angles()), plain(x, *angles()))
    assert torch.autograd.gradcheck(lambda x: rotate(x, *angles()), x)


def test_narrow_numbers_are_turned_in_the_type_of_the_angles() -> None:
    x = torch.randn(2, 4, 5, 6).bfloat16()
    turned = rotate(x, *angles(torch.float32))
    assert turned.dtype == torch.float32
    torch.testing.assert_close(turned.double(), plain(x, *angles(torch.float32)), rtol=0, atol=1e-6)
    assert rotate(x, *angles(torch.bfloat16)).dtype == torch.bfloat16

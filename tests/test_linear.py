import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lit_models.layers.linear import (
    SMALL_PRODUCT,
    Linear,
    _filled_up,
    _has_onednn,
    input_gradient,
    linear,
    suits_onednn,
    take_over_linear_layers,
    weight_gradient,
)
from lit_models.training.throughput.flops import FlopCount

ROWS, INPUTS, OUTPUTS = 300, 128, 136  # more multiplications than SMALL_PRODUCT


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, exact: Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact.double(), rtol=1e-5, atol=1e-4)


def gradients(x: Tensor, layer: torch.nn.Linear, wanted: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    output = layer(x)
    return [output, *torch.autograd.grad(output, [x, *layer.parameters()], wanted)]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("outputs", [OUTPUTS, 120])  # a wider and a narrower factor
def test_output_and_gradients_are_those_of_torch_in_double_precision(
    has_bias: bool, outputs: int
) -> None:
    layer = Linear(INPUTS, outputs, bias=has_bias)
    x, wanted = drawn(3, ROWS // 3, INPUTS), drawn(3, ROWS // 3, outputs, seed=1)
    found = gradients(x, layer, wanted)
    plain = torch.nn.Linear(INPUTS, outputs, bias=has_bias).double()
    plain.load_state_dict(layer.state_dict())
    for ours, exact in zip(found, gradients(x.double(), plain, wanted.double()), strict=True):
        close(ours, exact)


def test_rows_in_any_order_of_memory_and_an_expanded_gradient() -> None:
    x, layer = drawn(INPUTS, ROWS).T, Linear(INPUTS, OUTPUTS)
    plain = torch.nn.Linear(INPUTS, OUTPUTS)
    plain.load_state_dict(layer.state_dict())
    wanted = torch.ones(()).expand(ROWS, OUTPUTS)
    for ours, exact in zip(gradients(x, layer, wanted), gradients(x, plain, wanted), strict=True):
        close(ours, exact)


def test_the_two_gradients_by_themselves() -> None:
    gradient, x, weight = drawn(ROWS, OUTPUTS), drawn(ROWS, INPUTS), drawn(OUTPUTS, INPUTS)
    close(input_gradient(gradient, weight), gradient.double() @ weight.double())
    close(weight_gradient(gradient, x), gradient.double().T @ x.double())


def test_only_what_learns_gets_a_gradient() -> None:
    layer, x = Linear(INPUTS, OUTPUTS), drawn(ROWS, INPUTS)
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    close(layer.bias.grad, torch.full((OUTPUTS,), float(ROWS)))
    with torch.no_grad():
        assert not layer(x).requires_grad


@pytest.mark.parametrize("is_frozen", [True, False])
def test_only_what_a_gradient_needs_is_kept(is_frozen: bool) -> None:
    layer, x = Linear(INPUTS, OUTPUTS), drawn(ROWS, INPUTS).requires_grad_(is_frozen)
    layer.weight.requires_grad_(not is_frozen)
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = layer(x)
    assert [t.shape[1] * t.shape[0] >= OUTPUTS * INPUTS for t in kept] == [True]
    assert (kept[0].data_ptr() == layer.weight.data_ptr()) == is_frozen
    (found,) = torch.autograd.grad(output.sum(), [x if is_frozen else layer.weight])
    exact = layer.weight.sum(0) if is_frozen else x.sum(0)
    close(found, exact.expand_as(found))


def test_a_single_row_without_its_dimension() -> None:
    size = int(SMALL_PRODUCT**0.5)
    x, layer, wanted = drawn(size), Linear(size, size), drawn(size, seed=1)
    output, of_x, of_weight, of_bias = gradients(x, layer, wanted)
    torch.testing.assert_close(output, layer(x[None])[0])
    torch.testing.assert_close(of_x, wanted @ layer.weight, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(of_weight, wanted[:, None] * x)
    assert torch.equal(of_bias, wanted)
    with torch.no_grad():
        assert layer(x).shape == (size,)


def test_equal_rows_give_equal_bits_again() -> None:
    x, layer, wanted = drawn(ROWS, INPUTS), Linear(INPUTS, OUTPUTS), drawn(ROWS, OUTPUTS)
    first, again = (gradients(x.clone(), layer, wanted) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_small_products_and_other_kinds_are_left_to_torch() -> None:
    x, weight = drawn(ROWS, INPUTS), drawn(OUTPUTS, INPUTS)
    few = SMALL_PRODUCT // (INPUTS * OUTPUTS)
    assert suits_onednn(x, weight) == _has_onednn()
    assert not suits_onednn(x[:few], weight)
    assert not suits_onednn(x.double(), weight.double())
    assert torch.equal(linear(x.double(), weight.double()), F.linear(x.double(), weight.double()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    torch.backends.mkldnn.set_flags(_enabled=False)
    try:
        assert torch.equal(linear(x, weight), F.linear(x, weight))
    finally:
        torch.backends.mkldnn.set_flags(_enabled=True)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="the call is not used elsewhere"
)
def test_torch_still_has_the_call_of_onednn() -> None:
    assert _has_onednn()


def test_the_products_are_counted_as_arithmetic() -> None:
    layer, x = Linear(INPUTS, OUTPUTS), drawn(ROWS, INPUTS).requires_grad_()
    with FlopCount() as count:
        layer(x).sum().backward()
    rows = 320 if _has_onednn() else ROWS
    assert count.total == 3 * 2 * rows * INPUTS * OUTPUTS


def test_few_numbers_of_rows_are_ever_multiplied() -> None:
    lengths = {len(_filled_up(torch.empty(rows, 1))) for rows in range(1, 4097)}
    assert lengths == {1, 2, 4, 8, 16, 32, *range(64, 2049, 64), *range(2176, 4097, 128)}
    filled_up = _filled_up(torch.ones(65, 2))
    assert filled_up.sum() == 130
    assert filled_up.shape == (128, 2)


def test_rows_of_a_larger_batch_are_what_they_are_by_themselves() -> None:
    x, layer = drawn(ROWS, INPUTS), Linear(INPUTS, OUTPUTS)
    more = torch.cat([x, drawn(77, INPUTS, seed=2)])
    torch.testing.assert_close(layer(more)[:ROWS], layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(300, INPUTS), (320, INPUTS), (3, 107, INPUTS)])
def test_an_output_may_be_changed_in_place(shape: tuple[int, ...]) -> None:
    layer, x = Linear(INPUTS, OUTPUTS), drawn(*shape)
    layer(x).add_(1.0).square_().sum().backward()
    plain = torch.nn.Linear(INPUTS, OUTPUTS)
    plain.load_state_dict(layer.state_dict())
    plain(x).add_(1.0).square_().sum().backward()
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(layer.bias.grad, plain.bias.grad, rtol=1e-4, atol=1e-2)


def test_a_single_vector_is_a_row() -> None:
    layer, x = Linear(2048, 2048), drawn(2048).requires_grad_()
    assert suits_onednn(x, layer.weight) == _has_onednn()
    layer(x).sum().backward()
    close(
        layer(x), torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    )
    close(x.grad, layer.weight.double().sum(0))


@pytest.mark.parametrize("is_frozen", [True, False])
def test_layers_keep_their_weight_and_share_their_input(is_frozen: bool) -> None:
    """Three layers of one input, which is not copied; what stands still needs no input."""
    x, kept = drawn(3, 107, INPUTS).requires_grad_(), set()
    layers = [Linear(INPUTS, OUTPUTS).requires_grad_(not is_frozen) for _ in range(3)]

    def note(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = [layer(x) for layer in layers]
    expected = {layer.weight.untyped_storage().data_ptr() for layer in layers}
    assert kept == expected | (set() if is_frozen else {x.untyped_storage().data_ptr()})
    assert len(outputs) == 3


def test_layers_of_other_code_are_taken_over_and_keep_what_they_are() -> None:
    class Own(nn.Linear):
        pass

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), Own(256, 256))
    first, x = module[0], torch.randn(128, 256)
    expected, state = module(x), {k: v.clone() for k, v in module.state_dict().items()}
    take_over_linear_layers(module)
    assert [type(layer) for layer in module] == [Linear, nn.ReLU, Own]
    assert module[0] is first
    assert list(module.state_dict()) == list(state)
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)

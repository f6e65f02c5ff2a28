"""DoRA: base and adapter give the direction of each output, and a length learns by itself."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_models.causal_lm.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    LoraLinear,
    LoraOptions,
    adapted_recipe,
    add_lora,
    load_adapter,
    lora_layers,
    lora_recipe,
    merged_weights,
    read_adapter,
    with_adapters,
)
from lit_models.causal_lm.network import Decoder
from tests.causal_lm.test_adapters import adapt, llama, write
from tests.causal_lm.test_lora import CONFIG, decoder, gpt2, outputs, with_lora

NETWORKS = [decoder, gpt2]


def trained(network: nn.Module) -> nn.Module:
    """Give adapters and lengths some values, as a training would."""
    torch.manual_seed(3)
    for layer in lora_layers(network).values():
        nn.init.normal_(layer.lora_A, std=0.2)
        nn.init.normal_(layer.lora_B, std=0.2)
        layer.lora_magnitude_vector.data.mul_(1 + 0.5 * torch.rand(layer.out_features))
    return network


def test_a_hand_worked_layer_and_its_gradients():
    base = nn.Linear(2, 2)
    base.weight.data, base.bias.data = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.ones(2)
    base.requires_grad_(False)
    layer = LoraLinear(base, rank=1, alpha=2.0, dropout=0.0, dora=True)
    assert layer.lora_magnitude_vector.tolist() == [5.0, 1.0]  # lengths of the rows
    layer.lora_A.data, layer.lora_B.data = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0], [1.0]])
    layer.lora_magnitude_vector.data = torch.tensor([10.0, 6.0])
    # directions [3, 4] and [1 + 2, 0], of lengths 5 and 3: rows [6, 8] and [6, 0]
    output = layer(torch.tensor([[1.0, 2.0]]))
    assert output.tolist() == [[6.0 + 16.0 + 1.0, 6.0 + 1.0]]
    output.sum().backward()
    assert layer.lora_magnitude_vector.grad.tolist() == pytest.approx([11 / 5, 3 / 3])
    # With the lengths as constants: factor 2 in both rows, scale 2, A x = 1.
    assert layer.lora_B.grad.tolist() == [[4.0], [4.0]]
    assert layer.lora_A.grad.tolist() == [[4.0, 8.0]]  # 2 (row 2 alone has B) x 2 x [1, 2]
    assert not base.weight.requires_grad


@pytest.mark.parametrize("make", NETWORKS)
def test_new_lengths_change_nothing_and_learn(make):
    plain, adapted = make(), with_lora(make(), dora=True)
    torch.testing.assert_close(outputs(adapted), outputs(plain), rtol=1e-6, atol=1e-6)
    learning = {n for n, p in adapted.named_parameters() if p.requires_grad}
    parts = {name.rpartition(".")[2] for name in learning}
    assert parts == {"lora_A", "lora_B", "lora_magnitude_vector"}
    outputs(adapted).square().sum().backward()
    assert all(p.grad is not None for n, p in adapted.named_parameters() if n in learning)


def slow(layer: LoraLinear, x: Tensor) -> Tensor:
    """The weight as the paper writes it, row by row."""
    base = layer.weight.T if layer.is_transposed else layer.weight
    rows = []
    for row, b, length in zip(base, layer.lora_B, layer.lora_magnitude_vector, strict=True):
        direction = row + layer.scale * sum(b[i] * layer.lora_A[i] for i in range(len(b)))
        rows.append(length * direction / direction.square().sum().sqrt().detach())
    return F.linear(x, torch.stack(rows), layer.bias)


@pytest.mark.parametrize("make", NETWORKS)
def test_outputs_and_gradients_are_those_of_a_slow_reference(make):
    network = trained(with_lora(make(), rank=3, alpha=5.0, dora=True)).double()
    for layer in list(lora_layers(network).values())[:4]:
        x = torch.randn(2, 3, layer.in_features, dtype=torch.float64)
        parts = [layer.lora_A, layer.lora_B, layer.lora_magnitude_vector]
        found, expected = layer(x), slow(layer, x)
        torch.testing.assert_close(found, expected)
        weights = torch.randn_like(found)
        gradients = torch.autograd.grad((expected * weights).sum(), parts)
        torch.testing.assert_close(torch.autograd.grad((found * weights).sum(), parts), gradients)


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("base_dtype", ["float32", "bfloat16"])
def test_the_merged_network_computes_the_same(make, base_dtype):
    options = {"rank": 3, "alpha": 5.0, "dropout": 0.5, "dora": True}
    adapted = trained(with_lora(make(), base_dtype=base_dtype, **options)).eval()
    plain = make()
    before = outputs(plain)
    with torch.device("meta"):
        shape = with_lora(make(), **options)
    plain.load_state_dict(merged_weights(shape, adapted.state_dict()))
    assert (outputs(plain) - before).abs().max() > 0.01
    torch.testing.assert_close(outputs(adapted.float()), outputs(plain), rtol=1e-4, atol=1e-5)


def test_dropout_hits_the_adapter_alone():
    layer = trained(with_lora(decoder(), dropout=0.5, dora=True)).layers[0].attention.q_proj
    nn.init.zeros_(layer.lora_B)
    layer.lora_magnitude_vector.data.mul_(2)
    x = torch.randn(4, 8)
    assert torch.equal(layer(x), layer(x))  # the base sees all of x


def test_a_row_of_zeros_stays_one_without_nan():
    base = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(base.weight)
    layer = LoraLinear(base.requires_grad_(False), 1, 1.0, 0.0, dora=True)
    output = layer(torch.ones(1, 2))
    output.sum().backward()
    assert output.tolist() == [[0.0]]
    assert torch.isfinite(layer.lora_magnitude_vector.grad).all()


@pytest.mark.parametrize(
    ("make", "targets"),
    [
        (gpt2, ["c_attn", "mlp.c_proj"]),
        (llama, ["q_proj", "down_proj"]),
    ],
)
def test_an_adapter_that_was_written_is_read_as_it_was(make, targets, tmp_path):
    first = make()
    recipe = adapt(first, targets, dora=True)
    folder = write(tmp_path / "a", trained(first), recipe)
    adapter = read_adapter(folder)
    assert adapter.dora
    second = make()
    options = LoraOptions(targets, rank=2, alpha=6.0, dora=True)
    recipe = adapted_recipe(second, lora_recipe(second, options), folder)
    add_lora(second, recipe)
    load_adapter(second, recipe, folder)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_an_adapter_with_lengths_is_no_adapter_without(tmp_path):
    network = llama()
    folder = write(tmp_path / "a", network, adapt(network, ["q_proj"], dora=True))
    options = LoraOptions(["q_proj"], rank=2, alpha=6.0)
    message = (
        r"has rank 2, alpha 6, dora on 2 layers \(q_proj\), but lora asks for rank 2, alpha 6 "
    )
    with pytest.raises(ValueError, match=message):
        adapted_recipe(llama(), lora_recipe(llama(), options), folder)
    config = folder / ADAPTER_CONFIG
    config.write_text(config.read_text().replace('"use_dora": true', '"use_dora": false'))
    with pytest.raises(ValueError, match=f"{ADAPTER_WEIGHTS} is no LoRA .* holds or lacks .*lora_"):
        read_adapter(folder)


def test_lengths_begin_as_those_of_the_weights_to_begin_with():
    torch.manual_seed(7)
    start = Decoder(CONFIG)
    expected = copy.deepcopy(start)
    adapted = with_lora(decoder(), dora=True)  # whose own weights are others
    adapted.load_state_dict(with_adapters(adapted, start.state_dict()))
    torch.testing.assert_close(outputs(adapted), outputs(expected), rtol=1e-6, atol=1e-6)
    learnt = trained(adapted).state_dict()
    again = with_adapters(with_lora(decoder(), dora=True), learnt)
    assert all(torch.equal(again[name], value) for name, value in learnt.items())

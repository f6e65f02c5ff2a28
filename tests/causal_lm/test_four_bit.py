"""A base in four bits: packed by bitsandbytes, trained on, saved, resumed, merged."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_models.causal_lm import four_bit
from lit_models.causal_lm.lora import (
    LoraOptions,
    base_of,
    lora_layers,
    merged_weights,
    start_weights,
)
from lit_models.causal_lm.module import LitCausalLM
from lit_models.training.export import export_checkpoint
from lit_models.training.throughput.flops import FlopCount
from tests.causal_lm.test_dora import trained
from tests.causal_lm.test_finetune import base, fit, last, losses  # noqa: F401 (a fixture)
from tests.causal_lm.test_lora import decoder, gpt2, outputs, with_lora

# Dettmers et al. 2023, appendix E, to four digits.
NF4 = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
NF4 += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]


@pytest.fixture
def bitsandbytes():
    return pytest.importorskip("bitsandbytes", reason="extra: quantised")


def slow(weight: Tensor) -> Tensor:
    """Each number of a block becomes the nearest multiple of the block's largest one."""
    rounded = []
    for block in weight.flatten().split(64):
        largest = block.abs().max()
        multiples = torch.tensor(NF4) * largest
        rounded += [multiples[(multiples - value).abs().argmin()] for value in block]
    return torch.stack(rounded).view_as(weight)


def test_without_the_library_the_line_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr(four_bit, "find_spec", lambda name: None)
    for act in (
        lambda: LoraOptions(["q_proj"], base_dtype="nf4"),
        four_bit._library.__wrapped__,  # before any weight is packed or unpacked
    ):
        with pytest.raises(RuntimeError, match=r"needs bitsandbytes.*pip install 'unisono\[quant"):
            act()


@pytest.mark.parametrize("shape", [(16, 24), (3, 30), (5, 7)])
def test_packing_rounds_to_the_sixteen_numbers(bitsandbytes, shape):
    torch.manual_seed(2)
    weight = torch.randn(shape)
    values, largest = four_bit.packed(weight)
    assert (values.dtype, largest.dtype) == (torch.uint8, torch.float32)
    assert [len(values), len(largest)] == [-(-weight.numel() // n) for n in (2, 64)]
    sketch = four_bit.packed(weight.to("meta"))
    assert [t.shape for t in sketch] == [values.shape, largest.shape]
    found = four_bit.unpacked(values, largest, shape)
    torch.testing.assert_close(found, slow(weight), rtol=1e-3, atol=1e-3)
    again = four_bit.packed(found)
    assert torch.equal(four_bit.unpacked(*again, shape), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_product_is_that_of_the_unpacked_weight(bitsandbytes, dtype):
    torch.manual_seed(2)
    packed = four_bit.packed(torch.randn(6, 16))
    weight = four_bit.unpacked(*packed, (6, 16)).to(dtype)
    x = torch.randn(2, 3, 16, dtype=dtype, requires_grad=True)
    found, expected = four_bit.product(x, *packed, (6, 16)), F.linear(x, weight)
    assert found.dtype == dtype
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5}
    torch.testing.assert_close(found, expected, **{"atol": 1e-6, **tolerance})
    with FlopCount() as count:
        four_bit.product(x, *packed, (6, 16))
    assert count.total == 2 * 6 * 6 * 16
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients, **{"atol": 1e-5, **tolerance})


def test_the_layers_with_adapters_alone_are_packed(bitsandbytes):
    network = with_lora(decoder(), base_dtype="nf4", targets=["q_proj", "up_proj"])
    kinds = {}
    for name, parameter in network.named_parameters():
        kinds.setdefault(parameter.dtype, set()).add(name.split(".", 2)[-1])
        assert parameter.requires_grad == ("lora_" in name)
    assert kinds[torch.uint8] == {"attention.q_proj.weight", "feed_forward.up_proj.weight"}
    assert kinds[torch.float32] == {
        f"{name}.{part}"
        for name in ("attention.q_proj", "feed_forward.up_proj")
        for part in ("weight_absmax", "lora_A", "lora_B")
    }
    assert kinds.keys() == {torch.uint8, torch.float32, torch.bfloat16}
    layer = network.layers[0].attention.q_proj
    bits = sum(8 * t.numel() * t.element_size() for t in (layer.weight, layer.weight_absmax))
    assert bits == 4.5 * layer.in_features * layer.out_features


@pytest.mark.parametrize("make", [decoder, gpt2])
@pytest.mark.parametrize("dora", [False, True])
def test_the_merged_network_has_the_rounded_base(bitsandbytes, make, dora):
    adapted = with_lora(make(), rank=3, alpha=5.0, base_dtype="nf4", dora=dora).eval()
    rounded = make()
    for name, layer in lora_layers(adapted).items():
        weight = layer.base_weight()
        rounded.get_submodule(name).weight.data = weight.T if layer.is_transposed else weight
    found, expected = outputs(adapted.float()), outputs(rounded)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)  # the rest is in bfloat16
    if dora:
        trained(adapted)
    else:
        for layer in lora_layers(adapted).values():
            nn.init.normal_(layer.lora_B, std=0.2)
    outputs(adapted).sum().backward()
    assert all(layer.lora_A.grad.any() for layer in lora_layers(adapted).values())
    plain = make()
    with torch.device("meta"):
        shape = with_lora(make(), rank=3, alpha=5.0, base_dtype="nf4", dora=dora)
    plain.load_state_dict(merged_weights(shape, adapted.state_dict()))
    torch.testing.assert_close(outputs(adapted), outputs(plain), rtol=1e-4, atol=1e-5)
    assert (outputs(plain) - expected).abs().max() > 0.01


def test_weights_to_begin_with_are_packed_and_unpacked(bitsandbytes):
    options = {"targets": ["q_proj"], "dora": True}
    four, plain = (with_lora(decoder(), base_dtype=kind, **options) for kind in ("nf4", "float32"))
    for layer in lora_layers(four).values():
        layer.weight.data.zero_()  # of another network
    into = start_weights(four, plain.state_dict())
    assert into.keys() == four.state_dict().keys()
    name = "layers.1.attention.q_proj"
    layer, weight = lora_layers(four)[name], plain.state_dict()[f"{name}.weight"]
    assert torch.equal(
        base_of(layer, name, into), four_bit.unpacked(*four_bit.packed(weight), (8, 8))
    )
    back = start_weights(plain, into)
    assert back.keys() == plain.state_dict().keys()
    assert torch.equal(back[f"{name}.weight"], base_of(layer, name, into))


@pytest.mark.parametrize("dora", [False, True])
def test_a_run_is_resumed_reloaded_and_exported(bitsandbytes, base, tmp_path, dora):  # noqa: F811
    lora = LoraOptions(["*"], rank=2, alpha=8.0, base_dtype="nf4", dora=dora)
    whole = fit(tmp_path / "whole", init_from=str(base), lora=lora)
    fit(tmp_path / "halves", 2, init_from=str(base), lora=lora)
    fit(tmp_path / "halves", ckpt_path=last(tmp_path / "halves"), lora=lora)
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")
    plain = LoraOptions(["*"], rank=2, alpha=8.0)
    fit(tmp_path / "plain", 1, init_from=str(base), lora=plain)
    first = losses(tmp_path / "whole")[0], losses(tmp_path / "plain")[0]
    assert first[0] != first[1]
    assert first[0] == pytest.approx(first[1], rel=0.1)  # a base of other bits
    reloaded = LitCausalLM.load_from_checkpoint(last(tmp_path / "halves"))
    before = reloaded.state_dict()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(before[name].to(value), value, msg=name)
    exported(last(tmp_path / "whole"), tmp_path / "model", whole)


def exported(checkpoint: Path, folder: Path, tuned: LitCausalLM) -> None:
    """Compare an export with the run that it is of."""
    export_checkpoint(checkpoint, folder, class_path="lit_models.LitCausalLM")
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    places = (torch.arange(5)[None], torch.zeros_like(ids))
    found = LitCausalLM.from_exported(folder).double().network(ids, *places)
    expected = tuned.eval().double().network(ids, *places)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

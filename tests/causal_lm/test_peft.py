"""PEFT itself reads the adapters that are written here, and the other way round."""

import pytest
import torch

from lit_models.causal_lm.adapters import (
    LoraOptions,
    adapted_recipe,
    add_lora,
    load_adapter,
    lora_recipe,
)
from tests.causal_lm.test_adapters import adapt, llama, write
from tests.causal_lm.test_lora import gpt2, outputs

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's own


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    ("make", "targets"),
    [(gpt2, ["c_attn", "mlp.c_proj"]), (llama, ["[qv]_proj", "down_proj"])],
)
def test_peft_computes_the_same(make, targets, dora, tmp_path):
    peft = pytest.importorskip("peft", reason="extra: peft")
    network = make()
    folder = write(tmp_path / "ours", network, adapt(network, targets, dora=dora), base=None)
    theirs = peft.PeftModel.from_pretrained(make(), str(folder)).eval()
    torch.testing.assert_close(outputs(theirs), outputs(network), rtol=1e-5, atol=1e-6)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    second = make()
    options = LoraOptions(targets, rank=2, alpha=6.0, dora=dora)
    recipe = adapted_recipe(second, lora_recipe(second, options), tmp_path / "theirs")
    add_lora(second, recipe)
    load_adapter(second, recipe, tmp_path / "theirs")
    assert torch.equal(outputs(second), outputs(network))


@pytest.mark.parametrize("make", [gpt2, llama])
def test_gradients_of_dora_are_those_of_peft(make, tmp_path):
    peft = pytest.importorskip("peft", reason="extra: peft")
    network, targets = make(), {gpt2: ["c_attn"], llama: ["q_proj"]}[make]
    folder = write(tmp_path / "ours", network, adapt(network, targets, dora=True), base=None)
    theirs = peft.PeftModel.from_pretrained(make(), str(folder), is_trainable=True)
    for model in (network, theirs):
        outputs(model).square().sum().backward()
    expected = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    layers = {n: m for n, m in network.named_modules() if hasattr(m, "lora_A")}
    assert len(expected) == 3 * len(layers)
    for name, layer in layers.items():
        for part in ("lora_A", "lora_B", "lora_magnitude_vector"):
            found = expected[f"base_model.model.{name}.{part}.default.weight"]
            own = getattr(layer, part).grad
            torch.testing.assert_close(own, found, rtol=1e-3, atol=1e-5)

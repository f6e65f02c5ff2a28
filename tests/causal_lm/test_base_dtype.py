"""What stands still in fewer bits is read with those of its files, and is the same."""

import pytest
import torch

from lit_models.causal_lm import module
from lit_models.causal_lm.adapters import LoraOptions, check_precision, lora_recipe
from lit_models.causal_lm.module import NetworkRequest, new_network
from lit_models.causal_lm.network import DecoderConfig
from lit_models.causal_lm.pretrained import load_network, network_from_config, read_recipe
from tests.causal_lm.folders import packed_logits, saved
from tests.causal_lm.test_finetune import fit


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Qwen2"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_a_base_in_bfloat16_is_that_of_the_way_by_float32(tmp_path, kind, stored, monkeypatch):
    saved(tmp_path, kind).to(stored).save_pretrained(tmp_path)
    lora = LoraOptions(["*"], 2, base_dtype="bfloat16", dora=True)
    request = NetworkRequest(DecoderConfig(), str(tmp_path), lora)
    network = read_recipe(tmp_path)
    found = []
    for load in (load_network, lambda folder, dtype: load_network(folder)):
        monkeypatch.setattr(module, "load_network", load)
        with torch.device("meta"):
            bare = network_from_config(network)
        torch.manual_seed(1)
        found.append(new_network(request, {"network": network, "lora": lora_recipe(bare, lora)}))
    for (name, one), other in zip(found[0].named_parameters(), found[1].parameters(), strict=True):
        assert one.dtype == other.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)
        assert torch.equal(one, other), name
    logits = [packed_logits(each) for each in found]
    assert all(torch.equal(*pair) for pair in zip(*logits, strict=True))


def test_a_precision_that_rounds_all_weights_is_refused_with_dora():
    given = {"base_dtype": "bfloat16", "dora": True}
    for precision in ("bf16-true", "16-true"):
        words = rf"trainer\.precision {precision} rounds all .* lora\.dora needs.*bf16-mixed"
        with pytest.raises(ValueError, match=words):
            check_precision(given, precision)
    for precision in ("bf16-mixed", "32-true", "64-true"):
        check_precision(given, precision)
    check_precision({"base_dtype": "bfloat16"}, "bf16-true")  # of a version without DoRA


def test_a_run_of_dora_is_refused_before_its_network_is_built(tmp_path):
    lora = LoraOptions(["q_proj"], rank=2, dora=True)
    with pytest.raises(ValueError, match=r"precision bf16-true rounds all weights .* lora\.dora"):
        fit(tmp_path / "run", lora=lora, precision="bf16-true")

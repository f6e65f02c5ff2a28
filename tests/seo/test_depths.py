"""How deep the parameters of a pretrained encoder lie."""

import pytest
import torch

from lit_models.blocks import layer_depths
from lit_models.seo.encoders import PretrainedEncoder

SIZES = {"num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 50, "hidden_size": 16}
IDS = {f"{name}_token_id": 1 for name in ("pad", "bos", "eos", "cls", "sep")}


@pytest.mark.parametrize(
    ("kind", "norm", "lowest"),
    [
        ("ModernBert", "final_norm.weight", "embeddings.tok_embeddings.weight"),
        ("MegatronBert", "encoder.ln.bias", "embeddings.word_embeddings.weight"),
        ("MPNet", None, "encoder.relative_attention_bias.weight"),
    ],
)
def test_a_last_norm_of_any_name_lies_highest(kind, norm, lowest) -> None:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**SIZES, **IDS, intermediate_size=24)
    encoder = PretrainedEncoder(getattr(transformers, f"{kind}Model")(config))
    depths = layer_depths(torch.nn.ModuleDict({"encoder": encoder}), encoder)
    prefix = "encoder.model."
    assert depths[prefix + lowest] == 4
    assert norm is None or depths[prefix + norm] == 1
    assert set(depths.values()) == {1, 2, 3, 4}

"""The CANINE encoder on a tiny random checkpoint, and which parameters learn."""

import pytest
import torch

from lit_models.blocks import layer_depths
from lit_models.occupation_coder.encoders import CanineEncoder, CharacterEncoder, freeze_encoder
from tests.causal_lm.folders import saved_canine


@pytest.fixture(scope="module")
def canine_folder(tmp_path_factory):
    return str(saved_canine(tmp_path_factory.mktemp("canine")))


def batch(texts: list[str], size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.tensor([[ord(c) for c in text] + [0] * (size - len(text)) for text in texts])
    return ids, ids > 0, torch.ones(len(texts), dtype=torch.long)


@torch.no_grad()
def test_padding_never_changes_what_canine_says(canine_folder):
    encoder = CanineEncoder(2, canine_folder).eval()
    for length in range(1, 14):
        text = "wine and spirit merchant"[:length]
        alone, mask = encoder(*batch([text], length))
        count = int(mask.sum())
        assert count == length + 2
        for size in (length + 1, length + 3, 30, 45, 150):
            other, other_mask = encoder(*batch([text, "x" * size], size))
            torch.testing.assert_close(other[0, :count], alone[0, :count], rtol=0, atol=2e-6)
            assert int(other_mask[0].sum()) == count


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        CanineEncoder(2, str(tmp_path / "nothing"))


def trainable(encoder: CharacterEncoder) -> set[str]:
    return {name.split(".")[0] for name, p in encoder.named_parameters() if p.requires_grad} | {
        ".".join(name.split(".")[:2])
        for name, p in encoder.named_parameters()
        if p.requires_grad and name.startswith("layers")
    }


def test_freezing_the_lowest_layers_takes_the_embeddings_along():
    encoder = CharacterEncoder(2, width=8, num_layers=3, num_heads=2, num_buckets=16)
    for nothing in ("none", 0):
        freeze_encoder(encoder, nothing)
        assert all(parameter.requires_grad for parameter in encoder.parameters())
    freeze_encoder(encoder, 2)
    assert trainable(encoder) == {"layers", "layers.2", "norm"}
    freeze_encoder(encoder, "encoder")
    assert trainable(encoder) == set()
    with pytest.raises(ValueError, match="freeze must be none, encoder, or 0 to 3 layers"):
        freeze_encoder(encoder, 4)


def test_depths_grow_towards_the_text():
    encoder = CharacterEncoder(2, width=8, num_layers=2, num_heads=2, num_buckets=16)
    root = torch.nn.ModuleDict({"encoder": encoder, "head": torch.nn.Linear(8, 2)})
    depths = layer_depths(root, encoder)
    assert depths["encoder.layers.1.expand.weight"] == 1
    assert depths["encoder.layers.0.expand.weight"] == 2
    assert depths["encoder.characters.weight"] == 3
    assert depths["encoder.norm.weight"] == 1
    assert not any(name.startswith("head") for name in depths)

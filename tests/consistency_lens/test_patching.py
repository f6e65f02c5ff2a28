"""What lies below the activation is computed once, in models of any maker."""

import pytest
import torch

from lit_models.causal_lm.pretrained import PretrainedDecoder
from lit_models.consistency_lens.subject import PatchedSubject, Subject
from tests.causal_lm.folders import VOCAB, made

SHAPES = {
    "GPT2": {"n_layer": 3},
    "Llama": {"num_hidden_layers": 3},
    "Qwen2": {"num_hidden_layers": 3},
    "Gemma": {"num_hidden_layers": 3},
}


@torch.no_grad()
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("layer", [0, 2])
def test_effects_are_those_of_the_whole_model(kind, layer):
    model = made(kind, **SHAPES[kind])
    subject = Subject(PretrainedDecoder(model, model.config.to_dict()), layer)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (3, 8), generator=random)
    position, lengths = torch.tensor([2, 5, 6]), torch.tensor([8, 8, 8])
    patched = PatchedSubject(subject, {"input_ids": ids, "position": position, "lengths": lengths})
    width = subject.network.embedding.weight.shape[1]
    replacement = torch.randn(3, width, generator=random)
    found = patched.effect(replacement)
    true = subject.logits(ids, position, None).double().log_softmax(-1)
    changed = subject.logits(ids, position, replacement).double().log_softmax(-1)
    nats = (true.exp() * (true - changed)).sum(-1)
    rows = torch.arange(3)
    torch.testing.assert_close(found.nats, nats[rows, position], rtol=1e-5, atol=1e-9)
    assert found.nats.min() > 0
    behind = torch.stack([nats[r, p + 1 : 7].sum() for r, p in enumerate(position)])
    torch.testing.assert_close(found.following_nats, behind, rtol=1e-5, atol=1e-9)
    assert all("forward" not in vars(block) for block in subject.network.blocks())

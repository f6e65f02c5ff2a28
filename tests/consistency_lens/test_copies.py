"""What copies of the subject share with it, and what of them learns."""

from dataclasses import asdict

import pytest
import torch
from torch import nn

from lit_models.causal_lm.adapters import LoraOptions
from lit_models.consistency_lens.lens import Lens, LensOptions
from lit_models.consistency_lens.module import LitConsistencyLens
from lit_models.consistency_lens.subject import BaseOptions
from lit_models.training.strategies import separate_frozen
from tests.consistency_lens.tiny import NETWORKS, activations, lens_of, moved

FROZEN = BaseOptions(is_frozen=True)
TARGETS = {"GPT-2": ["c_attn"]}


def lora(kind: str) -> BaseOptions:
    return BaseOptions(lora=LoraOptions(TARGETS.get(kind, ["q_proj"]), rank=2))


def shared(lens: Lens, part: str) -> dict[str, bool]:
    """Whether each parameter of a copy is the subject's own."""
    own = {id(p) for p in lens.subject.parameters()}
    network = getattr(lens, part).network
    return {n: id(p) in own for n, p in network.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("kind", list(NETWORKS))
def test_words_are_shared_and_blocks_are_not_unless_they_stand_still(kind: str) -> None:
    plain = lens_of(kind)
    frozen = lens_of(kind, verbalizer=FROZEN, reconstructor=FROZEN)
    for part in ("verbalizer", "reconstructor"):
        learns = {n for n, p in getattr(plain, part).network.named_parameters() if p.requires_grad}
        assert learns
        assert {name for name, is_shared in shared(plain, part).items() if not is_shared} == learns
        assert all(shared(frozen, part).values())
        assert not any(p.requires_grad for p in getattr(frozen, part).network.parameters())
    for lens in (plain, frozen):
        assert lens.verbalizer.network.embedding.weight is lens.subject.network.embedding.weight
        assert not any(p.requires_grad for p in lens.subject.parameters())


@torch.no_grad()
@pytest.mark.parametrize("kind", list(NETWORKS))
def test_adapters_begin_as_nothing_and_lie_on_the_subjects_own_layers(kind: str) -> None:
    adapted = lens_of(kind, verbalizer=lora(kind), reconstructor=lora(kind))
    plain, text = lens_of(kind), torch.tensor([[3, 7, 1, 9]] * 3)
    logits = [lens.verbalizer(activations(), text) for lens in (adapted, plain)]
    rebuilt = [lens.reconstructor(lens.words(text)) for lens in (adapted, plain)]
    torch.testing.assert_close(*logits)
    torch.testing.assert_close(*rebuilt)
    for part in ("verbalizer", "reconstructor"):
        own = {name for name, is_shared in shared(adapted, part).items() if not is_shared}
        assert own
        assert all("lora_" in name for name in own)


def test_what_a_checkpoint_leaves_out_is_all_that_is_shared() -> None:
    for options in ({}, {"verbalizer": FROZEN, "reconstructor": lora("own GPT-2")}):
        lens = lens_of(**options)
        kept = set(lens.state_dict()) - lens.unsaved_names()
        learns = {name for name, p in lens.named_parameters() if p.requires_grad}
        copies = {name for name in kept if name.startswith("reference.")}
        assert kept - copies == learns | {"mean", "variance", "reference_step"}
        assert {name.removeprefix("reference.") for name in copies} == learns


def test_the_reference_is_a_copy_of_what_learns_and_shares_the_rest() -> None:
    lens = moved(lens_of(verbalizer=lora("own GPT-2"), reconstructor=FROZEN))
    lens.keep_reference()
    for part in ("verbalizer", "reconstructor"):
        pairs = zip(
            getattr(lens, part).parameters(), lens.reference[part].parameters(), strict=True
        )
        for own, kept in pairs:
            assert torch.equal(own, kept)
            assert (own is kept) == (not own.requires_grad)


def test_parameters_of_a_late_network_are_named_until_its_step() -> None:
    lens = lens_of(verbalizer=BaseOptions(unfreeze_at=3))
    network = [p for p in lens.verbalizer.network.parameters() if p.requires_grad]
    for step in (0, 2):
        assert {id(p) for p in lens.unready(step)} == {id(p) for p in network}
    assert lens.unready(3) == []


def test_fsdp_gives_each_block_frozen_parameters_of_its_own() -> None:
    frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
    for block in blocks:  # held twice in each
        block[0].weight = block[1].weight = frozen
    separate_frozen(list(blocks))
    assert blocks[0][0].weight is blocks[0][1].weight is frozen
    assert blocks[1][0].weight is blocks[1][1].weight
    assert blocks[1][0].weight is not frozen
    assert torch.equal(blocks[1][0].weight, frozen)
    assert not blocks[1][0].weight.requires_grad


def test_options_survive_a_checkpoint() -> None:
    stored_recipe = LitConsistencyLens.stored_recipe
    options = LensOptions(num_prompt=2, verbalizer=lora("own GPT-2"))
    recipe = stored_recipe({"lens_recipe": {"lens": asdict(options), "tokenizer": {}}})
    assert LensOptions(**recipe["lens"]) == options


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BaseOptions(True, unfreeze_at=5), "each say what of a network learns; give one"),
        (
            lambda: BaseOptions(lora=LoraOptions(["q_proj"], base_dtype="bfloat16")),
            "on the weights that the subject has: leave lora.base_dtype out",
        ),
        (lambda: LensOptions(num_words=0), "lens.num_words must be at least 1, got 0"),
    ],
)
def test_impossible_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()

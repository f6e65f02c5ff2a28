"""Generation: with a cache as without one, whatever stands beside a prompt."""

from dataclasses import replace
from itertools import count

import pytest
import torch

from datamodules.core.plan import rng_for
from lit_models.causal_lm.generation import GenerationOptions, draw, most_positions
from lit_models.causal_lm.pretrained import recipe_of
from tests.causal_lm.tiny import (
    PROMPTS,
    TOKENIZER,
    completed,
    next_logits,
    own_gpt2,
    own_llama,
    transformers_gpt2,
    transformers_llama,
)

KINDS = [own_gpt2, own_llama, transformers_llama, transformers_gpt2]


def slowly(network, prompt, options, key=0, limit=None) -> tuple[list[int], str]:
    """One token after the other, each from the whole text so far."""
    uniforms = rng_for(options.seed, 0, key).random(options.max_new_tokens)
    context, found = list(prompt), []
    for step in count():
        left = options.max_new_tokens - len(found)
        if not left:
            return found, "length"
        if limit and len(context) > limit:
            if options.context == "whole":
                return found, "positions"
            context = context[-max(limit // 2, limit - left) :]
        uniform = torch.tensor([uniforms[step]])
        numbers = (options.temperature, options.top_k, options.top_p)
        token = int(draw(next_logits(network, context)[None], uniform, *numbers))
        if token == TOKENIZER.end_id:
            return found, "end"
        found, context = [*found, token], [*context, token]
    raise AssertionError


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_cache_gives_what_a_whole_forward_per_token_gives(make, temperature):
    network = make()
    options = GenerationOptions(14, temperature, seed=4)
    for key, (got, prompt) in enumerate(
        zip(completed(network, PROMPTS, options), PROMPTS, strict=True)
    ):
        assert got[:2] == slowly(network, prompt, options, key)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("context", ["whole", "recent"])
def test_positions_end_a_text_or_it_goes_on_from_its_recent_half(make, context):
    network = make(max_positions=12)
    is_table = make in (own_gpt2, transformers_gpt2)
    limit = 12 if is_table or context == "recent" else None
    assert most_positions(recipe_of(network), context) == limit
    options = GenerationOptions(30, 1.0, context=context)
    expected = [slowly(network, p, options, key, limit) for key, p in enumerate(PROMPTS)]
    assert [got[:2] for got in completed(network, PROMPTS, options)] == expected
    reasons = {reason for _, reason in expected}
    assert ("positions" in reasons) == (is_table and context == "whole")
    assert ("length" in reasons) == (not is_table or context == "recent")


@pytest.mark.parametrize("make", [own_gpt2, own_llama, transformers_llama])
def test_half_precision_has_a_cache_too(make):
    network, text = make().float(), list(range(60, 76))
    exact = next_logits(network, text)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache, ids = network.new_cache(), torch.tensor([text])
        for part in (slice(0, 12), *(slice(n, n + 1) for n in range(12, 16))):
            places = torch.arange(16)[None, part]
            logits = network.head(network(ids[:, part], places, None, True, cache))[:, -1]
    assert torch.nn.functional.cosine_similarity(logits[0].float(), exact, dim=0) > 0.999


def test_a_batch_neighbour_changes_nothing():
    network, options = own_llama(), GenerationOptions(10, 0.8, top_k=40, top_p=0.9, seed=1)
    together = completed(network, PROMPTS, options)
    alone = [completed(network, [p], options, [key])[0] for key, p in enumerate(PROMPTS)]
    order = [3, 1, 4, 0, 2]
    shuffled = completed(network, [PROMPTS[i] for i in order], options, order)
    assert together == alone
    assert shuffled == [together[i] for i in order]


def test_a_prompt_and_a_seed_decide_the_text():
    network, options = own_llama(), GenerationOptions(10, 1.0, seed=1)
    assert completed(network, [[7]], options, [5]) == completed(network, [[7]], options, [5])
    assert completed(network, [[7]], options, [5]) != completed(network, [[7]], options, [6])
    assert completed(network, [[7]], options, [5]) != completed(
        network, [[7]], replace(options, seed=2), [5]
    )


def test_a_compiled_network_is_not_compiled_for_each_length():
    network, options = own_llama(), GenerationOptions(5)
    expected = completed(network, PROMPTS, options)

    def backend(*_):
        raise AssertionError("it was compiled")

    network.compile_blocks(backend)
    assert completed(network, PROMPTS, options) == expected


def test_the_global_generators_are_not_touched():
    network, before = own_llama(), torch.random.get_rng_state()
    completed(network, PROMPTS, GenerationOptions(4, 1.0))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_prompt_must_fit():
    with pytest.raises(ValueError, match="a prompt has 11 tokens and the network 8 positions"):
        completed(own_gpt2(8), PROMPTS, GenerationOptions(2))
    with pytest.raises(ValueError, match="a prompt has no token; begin it with"):
        completed(own_llama(), [[]], GenerationOptions(2))
    network = own_llama()
    network.norm.weight.data[0] = torch.nan
    with pytest.raises(RuntimeError, match="logits that are not finite"):
        completed(network, PROMPTS, GenerationOptions(2))

"""The verbalizer with its cache beside one that reads everything again for each word.

The two take turns, and each figure is the median of its rounds: a machine that slows down slows
both. "Training" is the choice of words and the gradient of all that learns.
"""

import time
from collections.abc import Callable

import pytest
import torch

from lit_models.causal_lm.network import Decoder, DecoderConfig
from lit_models.consistency_lens.lens import Explanation, Verbalizer
from lit_models.consistency_lens.subject import BaseOptions, copy_of
from tests.benchmarks.figures import Aim, Figures
from tests.consistency_lens.tiny import OWN_GPT2, explained_without_cache

ROUNDS, WANTED = 7, 2.0
# Blocks x width, vocabulary, words, learned positions of the prompt, activations.
SIZES = {
    "demo": ((4, 96, 4), 128, 6, 1, 128),
    "GPT-2, scaled down": ((6, 256, 8), 8000, 10, 8, 16),
}


def verbalizer_of(name: str) -> Verbalizer:
    (num_layers, width, heads), vocab_size, num_words, num_prompt, _ = SIZES[name]
    shape = {"num_layers": num_layers, "hidden_size": width, "num_heads": heads}
    torch.manual_seed(0)
    network = Decoder(DecoderConfig(vocab_size, 64, **shape, **OWN_GPT2))
    is_word = torch.ones(vocab_size, dtype=torch.bool)
    return Verbalizer(copy_of(network, BaseOptions()), is_word, 0, num_words, num_prompt)


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@pytest.mark.benchmark
def test_a_verbalizer_is_twice_as_fast_with_its_cache(figures: Figures) -> None:
    for name, (*_, number) in SIZES.items():
        verbalizer = verbalizer_of(name)
        activation, keys = torch.randn(number, len(verbalizer.prompt[0])), torch.arange(number)

        def chosen(makes: Callable[..., Explanation], learns: bool) -> None:
            with torch.set_grad_enabled(learns):
                found = makes(activation, keys, 1.0)  # noqa: B023 - called in this round
            if learns:
                found.embeddings.square().sum().backward()

        def slow(*given: torch.Tensor) -> Explanation:
            return explained_without_cache(verbalizer, *given)  # type: ignore[arg-type]  # noqa: B023

        for learns in (False, True):
            taken: dict[str, list[float]] = {"with": [], "without": []}
            for turn in range(ROUNDS + 1):
                for kind, makes in (("with", verbalizer.explain), ("without", slow)):
                    spent = seconds(lambda: chosen(makes, learns))  # noqa: B023
                    taken[kind] += [spent] * (turn > 0)  # the first round warms up
            rates = {kind: [number / s for s in spent] for kind, spent in taken.items()}
            figures.add(
                *("consistency_lens", f"verbalizer, {name}, {'training' if learns else 'reading'}"),
                *("explanations/s", rates["with"], "without its cache", rates["without"]),
                Aim(WANTED, is_least=True),
            )

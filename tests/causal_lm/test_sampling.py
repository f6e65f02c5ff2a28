"""Drawing a token: what is left to draw from, which number finds which, where a text ends."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import nn

from datamodules.core.plan import rng_for
from datamodules.tokenizers.text import TextTokenizer
from lit_models.causal_lm.generation import GenerationOptions, draw, filtered
from lit_models.causal_lm.network import Decoder, DecoderConfig
from tests.causal_lm.tiny import TOKENIZER, completed


def test_top_k_and_top_p_keep_what_they_name():
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    rest, tokens = filtered(logits, 1.0, top_k=2, top_p=1.0)
    assert tokens.tolist() == [[1, 3, 2, 0]]
    assert torch.allclose(rest, torch.tensor([[0.4, 0.3, 0, 0]], dtype=torch.float64))
    # 0.4 + 0.3 reach 0.65, 0.4 alone does not; of the two that top_k = 2 leaves, 4/7 reach 0.5.
    rest, _ = filtered(logits, 1.0, top_k=None, top_p=0.65)
    assert (rest > 0).tolist() == [[True, True, False, False]]
    rest, _ = filtered(logits, 1.0, top_k=2, top_p=0.5)
    assert (rest > 0).tolist() == [[True, False, False, False]]
    # At temperature 1/2 probabilities are squared: 16 / 30 is the first.
    rest, _ = filtered(logits, 0.5, top_k=4, top_p=1.0)
    assert torch.allclose(rest[0, 0], torch.tensor(16 / 30, dtype=torch.float64))


def test_a_number_finds_its_token():
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().repeat(6, 1)
    numbers = torch.tensor([0.0, 0.099, 0.101, 0.699, 0.701, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, numbers, 1.0, None, 1.0).tolist() == [0, 0, 1, 2, 3, 3]
    assert draw(logits, numbers, 1.0, 2, 1.0).tolist() == [1, 1, 1, 3, 3, 3]
    assert draw(logits, numbers, 0.0, None, 1.0).tolist() == [1] * 6
    impossible = torch.tensor([[0.0, -1e4, -1e4]])
    assert draw(impossible, numbers[-1:], 1.0, None, 1.0).tolist() == [0]


def test_frequencies_are_those_of_the_softmax():
    logits = torch.randn(8, generator=torch.Generator().manual_seed(1))
    numbers = np.array([rng_for(0, 0, key).random(3)[2] for key in range(20_000)])
    drawn = draw(logits.expand(len(numbers), -1), torch.from_numpy(numbers), 1.0, None, 1.0)
    expected = logits.double().softmax(0) * len(numbers)
    chi_square = ((torch.bincount(drawn, minlength=8) - expected) ** 2 / expected).sum()
    assert chi_square < 24.3  # the 99.9 % quantile with 7 degrees of freedom


class Recites(Decoder):
    """Says one text, whatever it is asked."""

    def __init__(self, tokens: list[int], vocabulary: int = 300) -> None:
        super().__init__(DecoderConfig(vocab_size=vocabulary, hidden_size=8, num_layers=1))
        self.tokens, self.vocabulary = tokens, vocabulary
        self.layers, self.head = nn.ModuleList(), nn.Identity()

    def forward(self, input_ids, position_ids, *_, **__):
        nexts = torch.tensor(self.tokens)[position_ids]
        return nn.functional.one_hot(nexts, self.vocabulary).double()


@pytest.mark.parametrize(
    ("stop", "text", "reason", "num_tokens"),
    [
        ([], "one.\n\ntwo", "end", 9),
        (["\n\n"], "one.", "stop", 6),  # spans two tokens, of one byte each
        (["two", ".\n"], "one", "stop", 5),
        (["o"], "", "stop", 1),
        (["<|endoftext|>"], "one.\n\ntwo", "end", 9),
        (["three"], "one.\n\ntwo", "end", 9),
    ],
)
def test_a_stop_text_ends_a_completion_and_is_cut_off(stop, text, reason, num_tokens):
    network = Recites([*TOKENIZER.encode("one.\n\ntwo").tolist(), TOKENIZER.end_id])
    got = completed(network, [[65]], GenerationOptions(40, stop=stop))
    assert [(len(ids), reason, text) for ids, reason, text in got] == [(num_tokens, reason, text)]


def test_a_stop_text_may_begin_in_a_token_or_be_one():
    vocabulary = {"x": 0, "y": 1, ".": 2, "!": 3, "y.": 4, ".!": 5}
    backend = Tokenizer(models.BPE(vocabulary, [("y", "."), (".", "!")]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<end>", "<user>"])
    tokenizer = TextTokenizer(backend, 6)
    for ids, stop, expected in (
        ([0, 4, 3, 0, 6], ".!", ([0, 4, 3], "stop", "xy")),  # x | y. | ! | x
        ([0, 4, 3, 7, 6], "<user>", ([0, 4, 3], "stop", "xy.!")),
        ([0, 4, 3, 7, 6], "x.", ([0, 4, 3, 7], "end", "xy.!")),
    ):
        assert completed(
            Recites(ids, 8), [[0]], GenerationOptions(9, stop=[stop]), [0], tokenizer
        ) == [expected]


def test_tokens_that_the_tokenizer_does_not_know_are_never_drawn():
    [(ids, _, _)] = completed(Recites([280]), [[65]], GenerationOptions(1))
    assert ids == [0]  # 280 is left out, and all others are equal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be 0 or more, got -1.0"),
        ({"top_k": 0}, "top_k must be at least 1, got 0; leave it out"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"stop": [""]}, "stop must be a list of texts that are not empty"),
        ({"stop": "end"}, "stop must be a list of texts"),
        ({"mode": "rate"}, 'mode must be one of generate, score, got "rate"'),
        ({"context": "all"}, 'context must be one of whole, recent, got "all"'),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GenerationOptions(**options)

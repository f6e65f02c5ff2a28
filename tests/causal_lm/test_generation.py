"""Generation with and without a cache, sampling of a token, scores of continuations."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import nn

from datamodules.core.plan import MicroBatch, rng_for
from datamodules.text.prompts import ChoiceDataset, read_prompts, read_rows
from datamodules.tokenizers.text import TextTokenizer
from lit_models.causal_lm import generation
from lit_models.causal_lm.generation import GenerationOptions, draw, filtered, score
from lit_models.causal_lm.network import Decoder, DecoderConfig, compile_blocks
from lit_models.causal_lm.pretrained import most_positions
from tests.causal_lm import tiny
from tests.text_corpora import rows_file

KINDS = [tiny.own_gpt2, tiny.own_llama, tiny.transformers_llama, tiny.transformers_gpt2]


def slowly(network, prompt, options, key=0, limit=None) -> tuple[list[int], str]:
    """Generate token by token, each from the whole text so far."""
    uniforms = rng_for(options.seed, 0, key).random(options.max_new_tokens)
    context, found = list(prompt), []
    for step in count():
        if len(found) == options.max_new_tokens:
            return found, "length"
        if limit and len(context) > limit:
            return found, "positions"
        uniform = torch.tensor([uniforms[step]])
        numbers = (options.temperature, options.top_k, options.top_p)
        token = int(draw(tiny.next_logits(network, context)[None], uniform, *numbers))
        if token == tiny.TOKENIZER.end_id:
            return found, "end"
        found, context = [*found, token], [*context, token]
    raise AssertionError


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(
    "options",
    [GenerationOptions(14), GenerationOptions(14, 0.8, top_k=40, top_p=0.9, seed=4)],
    ids=["greedy", "drawn"],
)
def test_a_batch_with_a_cache_gives_what_each_prompt_alone_gives_without(make, options):
    network, order = make(), [3, 1, 4, 0, 2]  # keys, which do not depend on the place in a batch
    found = tiny.completed(network, [tiny.PROMPTS[key] for key in order], options, order)
    for got, key in zip(found, order, strict=True):
        assert got[:2] == slowly(network, tiny.PROMPTS[key], options, key)


@pytest.mark.parametrize("make", KINDS)
def test_learned_positions_end_a_text_and_rotary_ones_go_on(make):
    network = make(max_positions=12)
    is_table = make in (tiny.own_gpt2, tiny.transformers_gpt2)
    limit = 12 if is_table else None
    assert most_positions(network.recipe) == limit
    options = GenerationOptions(30, 1.0)
    expected = [slowly(network, p, options, key, limit) for key, p in enumerate(tiny.PROMPTS)]
    assert [got[:2] for got in tiny.completed(network, tiny.PROMPTS, options)] == expected
    reasons = {reason for _, reason in expected}
    assert ("positions" in reasons) == is_table
    assert ("length" in reasons) == (not is_table)


@pytest.mark.parametrize("make", KINDS)
def test_half_precision_has_a_cache_too_and_a_token_copies_nothing_of_it(make):
    network, text = make().float(), list(range(60, 120))
    exact = tiny.next_logits(network, text)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache, ids = network.new_cache(room=6), torch.tensor([text]).expand(16, -1)
        for part in (slice(0, 54), *(slice(n, n + 1) for n in range(54, 60))):
            with tiny.Made() as made:
                places = torch.arange(60)[None, part].expand(16, -1)
                mask = torch.ones(16, part.stop, dtype=torch.bool)
                logits = network.head(network(ids[:, part], places, None, True, cache, mask=mask))
    assert torch.nn.functional.cosine_similarity(logits[0, -1].float(), exact, dim=0) > 0.999
    assert made.largest() < 16 * 2 * 60 * 8  # keys of one layer at the last token's step


@pytest.mark.parametrize("make", [tiny.own_gpt2, tiny.own_llama])
def test_the_host_may_look_at_several_tokens_at_once(make, monkeypatch):
    found, looks = [], ("aten::stack", "aten::_local_scalar_dense")  # these wait for a GPU
    for at_once in (1, 4):
        monkeypatch.setattr(generation, "AT_ONCE_ON_CPU", at_once)
        with tiny.Made() as seen:
            options = GenerationOptions(40, 1.0, seed=4, stop=["z"])
            found.append(tiny.completed(make(max_positions=30), tiny.PROMPTS, options))
    assert found[0] == found[1]
    assert sum(name in looks for name, *_ in seen.seen) < 28


def test_a_compiled_network_is_not_compiled_for_each_length():
    network, options = tiny.own_llama(), GenerationOptions(5)
    expected = tiny.completed(network, tiny.PROMPTS, options)

    def backend(*_):
        raise AssertionError("it was compiled")

    compile_blocks(network, backend)
    assert tiny.completed(network, tiny.PROMPTS, options) == expected


def test_logits_that_are_not_finite_are_an_error():
    network = tiny.own_llama()
    network.norm.weight.data[0] = torch.nan
    with pytest.raises(RuntimeError, match="logits that are not finite"):
        tiny.completed(network, tiny.PROMPTS, GenerationOptions(2))


def test_top_k_and_top_p_keep_what_they_name():
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    rest, tokens = filtered(logits, 1.0, top_k=2, top_p=1.0)
    assert tokens.tolist() == [[1, 3, 2, 0]]
    assert torch.allclose(rest, torch.tensor([[0.4, 0.3, 0, 0]], dtype=torch.float64))
    # 0.4 + 0.3 reach 0.65, 0.4 alone does not; of the two that top_k = 2 keeps, 4/7 reach 0.5.
    rest, _ = filtered(logits, 1.0, top_k=None, top_p=0.65)
    assert (rest > 0).tolist() == [[True, True, False, False]]
    rest, _ = filtered(logits, 1.0, top_k=2, top_p=0.5)
    assert (rest > 0).tolist() == [[True, False, False, False]]
    # At temperature 1/2 probabilities are squared: the first gets 16 / 30.
    rest, _ = filtered(logits, 0.5, top_k=4, top_p=1.0)
    assert torch.allclose(rest[0, 0], torch.tensor(16 / 30, dtype=torch.float64))


def test_a_number_finds_its_token():
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().repeat(6, 1)
    numbers = torch.tensor([0.0, 0.099, 0.101, 0.699, 0.701, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, numbers, 1.0, None, 1.0).tolist() == [0, 0, 1, 2, 3, 3]
    assert draw(logits, numbers, 1.0, 2, 1.0).tolist() == [1, 1, 1, 3, 3, 3]
    assert draw(logits, numbers, 0.0, None, 1.0).tolist() == [1] * 6
    assert draw(torch.tensor([[0.0, -1e4, -1e4]]), numbers[-1:], 1.0, None, 1.0).tolist() == [0]


class Recites(Decoder):
    """Generates the same text after any prompt."""

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
        (["\n\n"], "one.", "stop", 6),  # spans two tokens of one byte each
        (["two", ".\n"], "one", "stop", 5),
        (["o"], "", "stop", 1),
        (["<|endoftext|>"], "one.\n\ntwo", "end", 9),
        (["three"], "one.\n\ntwo", "end", 9),
    ],
)
def test_a_stop_text_ends_a_completion_and_is_cut_off(stop, text, reason, num_tokens):
    network = Recites([*tiny.TOKENIZER.encode("one.\n\ntwo").tolist(), tiny.TOKENIZER.end_id])
    got = tiny.completed(network, [[65]], GenerationOptions(40, stop=stop))
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
        assert tiny.completed(
            Recites(ids, 8), [[0]], GenerationOptions(9, stop=[stop]), [0], tokenizer
        ) == [expected]
    chats = replace(tokenizer, chat_template="{{ messages[1].content }}<user>")  # another end
    got = tiny.completed(Recites([0, 4, 3, 7, 6], 8), [[0]], GenerationOptions(9), [0], chats)
    assert got == [([0, 4, 3], "end", "xy.!")]


def test_tokens_that_the_tokenizer_does_not_know_are_never_drawn():
    [(ids, _, _)] = tiny.completed(Recites([280]), [[65]], GenerationOptions(1))
    assert ids == [0]  # 280 is left out, all others are equally likely


ROWS = [
    {"prompt": "The sky is", "choices": [" blue", " a fish that flies", " b"]},
    {"prompt": "", "choices": ["Once upon a time"]},
    {"prompt": "2 + 2 =", "choices": [" 4", " 22"]},
    {"prompt": "A long prompt, longer than all others, ends", "choices": ["."]},
]


def dataset(tmp_path, rows, **options) -> ChoiceDataset:
    path = Path(rows_file(tmp_path / "rows.jsonl", rows))
    options = {"tokenizer": tiny.TOKENIZER, **options}
    return ChoiceDataset(read_prompts(read_rows([path]), **options, mode="score"))


def batch_of(data: ChoiceDataset, ids: list[int]):
    return data.collated(MicroBatch(0, 0, np.array(ids), np.ones(len(ids), np.float32), {}))


def slow_score(network, prompt: str, choice: str) -> tuple[float, int]:
    """Score token by token, each in its own forward pass."""
    ids = [tiny.TOKENIZER.begin_id, *tiny.TOKENIZER.encode(prompt).tolist()]
    total, rest = 0.0, tiny.TOKENIZER.encode(choice).tolist()
    for token in rest:
        total += float(tiny.next_logits(network, ids).log_softmax(0)[token])
        ids.append(token)
    return total, len(rest)


@pytest.mark.parametrize("make", KINDS)
def test_scores_are_those_of_one_forward_per_token(tmp_path, make):
    network = make()
    data = dataset(tmp_path, ROWS)
    order = [2, 0, 3, 1]
    batch = batch_of(data, order)
    assert len(batch["input_ids"]) < 7  # rows hold several
    rows = (batch["input_ids"], batch["position_ids"], batch["document_ids"])
    found = score(network(*rows), network.head.weight, batch)
    assert found["scores"].shape == (4, 3)
    for place, number in enumerate(order):
        row = ROWS[number]
        choices = row["choices"]
        for k, choice in enumerate(choices):
            total, count = slow_score(network, row["prompt"], choice)
            assert float(found["scores"][place, k]) == pytest.approx(total, abs=1e-9)
            assert int(found["num_tokens"][place, k]) == count
        assert found["scores"][place, len(choices) :].isnan().all()
        assert not found["num_tokens"][place, len(choices) :].any()


def test_a_token_across_the_border_is_the_continuations(tmp_path):
    backend = Tokenizer(models.BPE({"x": 0, "y": 1, "z": 2, "yz": 3}, [("y", "z")]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<end>"])
    tokenizer = TextTokenizer(backend, 4)  # without a begin-of-text token
    rows = [{"prompt": "xy", "choices": ["z", "x"]}, {"prompt": "", "choices": ["yx"]}]
    data = dataset(tmp_path, rows, tokenizer=tokenizer)
    texts = [[(list(t.ids), t.num_rated) for t in data.example(i, 0)] for i in (0, 1)]
    assert texts == [[([0, 3], 1), ([0, 1, 0], 1)], [([4, 1, 0], 2)]]


def test_a_text_longer_than_the_positions_is_refused(tmp_path):
    rows = [{"prompt": "abcdefgh", "choices": ["ijk", "i"]}]
    with pytest.raises(ValueError, match=r"rows.jsonl:1: prompt and choice has 11 tokens"):
        dataset(tmp_path, rows, max_positions=10)

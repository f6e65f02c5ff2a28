"""Learning rates and clipping by part, temperatures, first blocks only, and a prompt in words."""

import math

import numpy as np
import pytest
import torch

from lit_models.consistency_lens.loss import TemperatureSchedule
from lit_models.consistency_lens.module import clip_parts
from lit_models.run_files import read_checkpoint
from tests.consistency_lens.small_lens import BOTH, fitted, lens_module, story_data
from tests.consistency_lens.tiny import NETWORKS, Tokenizer, activations, lens_of, moved
from tests.toy import ledger_lines


def weights(path):
    return read_checkpoint(path)["state_dict"]


def test_each_part_is_clipped_by_its_own_norm_and_the_rest_together():
    names = ("lens.verbalizer.network.a", "lens.verbalizer.network.b", "lens.verbalizer.prompt")
    named = [(n, torch.nn.Parameter(torch.zeros(2))) for n in (*names, "lens.reconstructor.map.w")]
    given = ([3.0, 0.0], [0.0, 4.0], [0.6, 0.8], [6.0, 8.0])
    for (_, parameter), values in zip(named, given, strict=True):
        parameter.grad = torch.tensor(values)
    clip_parts(named, {"verbalizer": 0.5, "verbalizer.network": 2.5}, 5.0)
    expected = ([1.5, 0.0], [0.0, 2.0], [0.3, 0.4], [3.0, 4.0])
    for (_, parameter), values in zip(named, expected, strict=True):
        torch.testing.assert_close(parameter.grad, torch.tensor(values), rtol=1e-5, atol=0)
    clip_parts(named, {"verbalizer": 100.0}, None)
    torch.testing.assert_close(named[3][1].grad, torch.tensor(expected[3]), rtol=1e-5, atol=0)


def test_rates_and_clips_move_their_parts_and_no_others(tmp_path):
    def run(name, **options):
        data = story_data(tmp_path)
        return fitted(tmp_path / name, lens_module(losses=BOTH, **options), data, max_steps=1)

    plain, given = run("plain"), {"verbalizer.network": 0.0, "verbalizer.map": 0.5}
    found, before = weights(run("rates", rates=given)), weights(plain)
    tight = run("clips", clips={"reconstructor": 1e-12})
    for name, value in weights(tight).items():
        assert torch.equal(value, before[name]) or name.startswith("lens.reconstructor"), name
    norms = [ledger_lines(path.parents[1])[0]["grad_norm"] for path in (plain, tight)]
    assert norms[0] == norms[1]  # of the whole gradient before clipping
    start = torch.eye(found["lens.mean"].shape[0])
    moves = [(w["lens.verbalizer.map_weight"] - start).abs().max() for w in (before, found)]
    assert moves[1] == pytest.approx(float(moves[0]) / 2, rel=0.02)
    still = [n for n in found if n.startswith("lens.verbalizer.network.") and "norm" not in n]
    assert still
    for name in still:  # the reference keeps their initial values
        first = found[name.replace("lens.verbalizer", "lens.reference.verbalizer")]
        assert torch.equal(found[name], first), name
    same = [n for n in found if n.startswith("lens.reconstructor")]
    assert all(torch.equal(found[n], before[n]) for n in same)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rates": {"verbaliser": 1.0}},
            r"model.rates.verbaliser 1.0 must be .* name verbalizer, ",
        ),
        ({"clips": {"reconstructor": -1.0}}, r"model.clips.reconstructor -1.0 must be 0 or more"),
    ],
)
def test_a_part_that_does_not_exist_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        fitted(tmp_path / "run", lens_module(**options), story_data(tmp_path), max_steps=1)


def test_temperatures_fall_by_their_shapes():
    places = (0, 10, 15, 20, 99)
    for shape, middle in (("linear", 0.625), ("cosine", 0.625), ("exponential", 0.5)):
        of = TemperatureSchedule(1.0, 0.25, begin=10, until=20, shape=shape)
        assert [of.at(step) for step in places] == pytest.approx([1, 1, middle, 0.25, 0.25])
    wave = TemperatureSchedule(1.0, 0.5, 10, 20, "cosine")  # flat at both ends
    assert wave.at(11) == pytest.approx(0.75 + 0.25 * math.cos(math.pi / 10))
    factors = [TemperatureSchedule(1.0, 0.1, 0, 5, "exponential").at(step) for step in range(6)]
    assert np.diff(np.log(factors)) == pytest.approx(math.log(0.1) / 5)
    floored = TemperatureSchedule(1.0, 0.1, 0, 10, floor=0.4)
    assert [floored.at(step) for step in (0, 5, 7, 10)] == pytest.approx([1, 0.55, 0.4, 0.4])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["own GPT-2", "GPT-2"])
def test_later_blocks_do_not_see_the_activation_itself(kind):
    words, given = torch.tensor([[3, 1, 4, 1]]), activations(1)
    one, whole, every = (lens_of(kind, num_patched=n).verbalizer for n in (1, 3, None))
    assert [len(part.map_bias) for part in (one, whole, every)] == [1, 3, 3]
    assert torch.equal(whole(given, words), every(given, words))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # marker of each block, entering and leaving

    def keep(block, args, kwargs, output):
        entering = args[0] if args else kwargs["hidden_states"]
        leaving = output[0] if isinstance(output, tuple) else output
        seen.append((entering[:, len(one.prompt)], leaving[:, len(one.prompt)]))

    for block in one.network.blocks():
        block.register_forward_hook(keep, with_kwargs=True)
    assert not torch.allclose(one(given, words), every(given, words))
    assert torch.equal(seen[0][0], given)
    assert torch.equal(seen[1][0], seen[0][1])
    assert torch.equal(seen[2][0], seen[1][1])


class Words(Tokenizer):
    """Tokens 0, 1, … are the letters from a on."""

    def encode(self, text):
        return np.array([ord(letter) - ord("a") for letter in text if letter.isalpha()])


@torch.no_grad()
def test_a_prompt_in_words_stands_around_the_activation(monkeypatch):
    monkeypatch.setattr("tests.consistency_lens.tiny.Tokenizer", Words)
    assert set(NETWORKS) > {"own GPT-2"}
    lens = lens_of(prompt="ab {activation} cde")
    said = lens.verbalizer
    words = lens.subject.network.embedding
    begin = words(torch.tensor([lens.begin_id] * 2))
    assert torch.equal(said.prompt, torch.cat([begin, words(torch.tensor([0, 1]))]))
    assert torch.equal(said.behind, words(torch.tensor([2, 3, 4])))
    given = activations()
    found = said.explain(given)
    torch.testing.assert_close(said(given, found.token_ids), found.logits)
    assert not torch.allclose(lens_of().verbalizer.explain(given).logits, found.logits)
    last = moved(lens_of(prompt="{activation}")).verbalizer
    assert last.behind is None
    assert len(last.prompt) == 2

"""Samples while training: seen, repeatable, and without a trace in the run."""

from functools import partial

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lit_models.causal_lm.generation import GenerationOptions
from lit_models.causal_lm.module import LitCausalLM
from lit_models.causal_lm.network import DecoderConfig
from lit_models.causal_lm.samples import Samples
from lit_models.training import default_callbacks
from lit_models.training.metrics import evaluating
from tests.causal_lm.events import texts_of
from tests.causal_lm.tiny import trained_on_blocks
from tests.toy import ledger_lines


def fit(folder, callbacks=(), positions="rotary", **options):
    shape = {"max_positions": 16, "hidden_size": 16, "num_layers": 1, "num_heads": 2}
    network = DecoderConfig(dropout=0.1, positions=positions, **shape)
    module = LitCausalLM(partial(torch.optim.AdamW, lr=0.01), network=network)
    options = {"logger": TensorBoardLogger(folder, name="board", version=""), **options}
    callbacks = [*default_callbacks(), *callbacks]
    return trained_on_blocks(folder, module, max_epochs=1, callbacks=callbacks, **options)


def test_a_run_with_samples_is_the_run_without_them(tmp_path, capsys):
    plain = fit(tmp_path / "plain")
    drawn = Samples(["the cat", ""], 3, GenerationOptions(20, 1.0, context="recent"), True)
    sampled = fit(tmp_path / "sampled", [drawn])
    for one, other in zip(plain.state_dict().values(), sampled.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    lines = [ledger_lines(tmp_path / name) for name in ("plain", "sampled")]
    assert [[line["loss"] for line in run] for run in lines] == [
        [line["loss"] for line in lines[0]]
    ] * 2
    texts = texts_of(tmp_path / "sampled")
    texts = {key: text for key, text in texts.items() if "/errors/" not in key[0]}
    steps = range(3, len(lines[0]) + 1, 3)
    assert sorted(texts) == [(f"samples/{n}/text_summary", s) for n in (0, 1) for s in steps]
    assert all(text.startswith("```\nthe cat") for (tag, _), text in texts.items() if "/0/" in tag)
    assert len(set(texts.values())) > 2  # the model learns
    printed = capsys.readouterr().out
    assert printed.count("a sample: the cat") == 1
    assert "the cat" not in printed.split("a sample: the cat")[0]


def test_each_part_of_a_module_gets_its_own_mode_back():
    module = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(1, 1).eval())
    with evaluating(module):
        assert not any(part.training for part in module.modules())
    assert [part.training for part in module.modules()] == [True, True, False]


def test_samples_need_a_place_and_prompts(tmp_path):
    with pytest.raises(ValueError, match="Samples has nowhere to write: the trainer has no Tensor"):
        fit(tmp_path / "run", [Samples(["a"])], logger=False)
    long = Samples(["a" * 17], generation=GenerationOptions())
    with pytest.raises(ValueError, match="a prompt has 18 tokens and the network 16 positions"):
        fit(tmp_path / "run", [long], positions="learned")
    with pytest.raises(ValueError, match=r'prompts must be a list such as \["Once upon"\], got'):
        Samples([])
    with pytest.raises(ValueError, match="every_n_steps must be at least 1, got 0"):
        Samples(["a"], 0)
    with pytest.raises(ValueError, match='leave generation.mode at "generate"'):
        Samples(["a"], generation=GenerationOptions(mode="score"))

"""Fine-tuning in a run: adapters, saved, resumed, exported."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.tokenizers.text import TEMPLATES, byte_tokenizer
from lit_models.causal_lm.adapters import LoraOptions
from lit_models.causal_lm.module import LitCausalLM
from lit_models.causal_lm.network import DecoderConfig
from lit_models.commands.export import export_checkpoint
from lit_models.training import ExactDropout, default_callbacks
from tests.causal_lm.folders import saved
from tests.causal_lm.tiny import trained_on_blocks
from tests.text_corpora import saved_tokenizer
from tests.toy import ledger_lines

SHAPE = {"max_positions": 16, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
LORA = LoraOptions(["[qv]_proj"], rank=2, alpha=8.0)


def fit(folder: Path, steps: int = 4, micro: int = 8, **options: Any) -> LitCausalLM:
    """Train; `ckpt_path`, `dropped` and `precision` are the trainer's."""
    extra = [ExactDropout()] if options.pop("dropped", False) else []
    limits = {"max_steps": steps, "limit_val_batches": 0, "precision": options.pop("precision", 64)}
    path, sizes = options.pop("ckpt_path", None), {"micro_batch_size": micro}
    adamw = partial(torch.optim.AdamW, lr=0.05)
    module = LitCausalLM(adamw, network=DecoderConfig(**SHAPE), **options)
    callbacks = [*default_callbacks(), *extra]
    return trained_on_blocks(folder, module, sizes, path, callbacks=callbacks, **limits)


def last(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in ledger_lines(folder)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "base"
    fit(folder)
    return last(folder)


def test_adapters_learn_on_a_base_that_stands_still(base, tmp_path):
    tuned = fit(tmp_path / "tuned", 8, init_from=str(base), lora=LORA)
    before = torch.load(base, weights_only=True)["state_dict"]
    after = tuned.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    added = {name for name in after if name not in before}
    assert len(added) == 2 * 2 * 2  # A, B of q and v of two layers
    assert all(after[name].any() for name in added)
    assert {n for n, p in tuned.named_parameters() if p.requires_grad} == added
    found = losses(tmp_path / "tuned")
    assert min(found[1:]) < found[0] < 0.7 * losses(base.parents[1])[0]


def test_a_run_with_adapters_is_resumed_and_reloaded(base, tmp_path):
    whole = fit(tmp_path / "whole", init_from=str(base), lora=LORA)
    fit(tmp_path / "halves", 2, init_from=str(base), lora=LORA)
    fit(tmp_path / "halves", ckpt_path=last(tmp_path / "halves"), lora=LORA)
    reloaded = LitCausalLM.load_from_checkpoint(last(tmp_path / "halves"))
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(reloaded.state_dict()[name].to(value), value, msg=name)
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")


def test_an_export_is_a_base_without_adapters(base, tmp_path):
    tuned = fit(tmp_path / "tuned", init_from=str(base), lora=LORA).eval()
    export_checkpoint(
        last(tmp_path / "tuned"), tmp_path / "model", class_path="lit_models.LitCausalLM"
    )
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    places = (torch.arange(5)[None], torch.zeros_like(ids))
    exported = LitCausalLM.from_exported(tmp_path / "model").to(torch.float64)
    with torch.no_grad():
        found = exported.network(ids, *places)
        torch.testing.assert_close(
            found, tuned.network.double()(ids, *places), rtol=1e-5, atol=1e-6
        )
    fit(tmp_path / "more", 1, init_from=str(tmp_path / "model"))
    assert losses(tmp_path / "more")[0] < 0.7 * losses(base.parents[1])[0]


def test_chats_of_share_gpt_are_learnt_with_adapters_in_one_command(tmp_path, unisono, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "base", "Llama", vocab_size=257)
    saved_tokenizer(replace(byte_tokenizer(), chat_template=TEMPLATES["plain"]), tmp_path / "base")
    turns = [{"from": "human", "value": "Legs of {}?"}, {"from": "gpt", "value": "It has {}."}]
    rows = [
        {"conversations": [{**t, "value": t["value"].format(i)} for t in turns]} for i in range(200)
    ]
    (tmp_path / "chats.json").write_text(json.dumps(rows))
    files = ["--model.pretrained=base", "--data.train_files=chats.json"]
    limits = ["--data.context_length=64", "--trainer.max_epochs=1", "--model.optimizer.lr=0.02"]
    status, output = unisono("fit", "--config", "causal_lm/lora_chat.yaml", *files, *limits)
    assert status == 0, output
    found = losses(tmp_path / "runs" / "causal_lm-lora_chat")
    assert len(found) == 23
    assert sum(found[-5:]) < 0.9 * sum(found[:5])


def test_dropout_of_adapters_does_not_depend_on_micro_batches(tmp_path):
    lora = LoraOptions(["*"], rank=2, dropout=0.3)
    for micro in (8, 2):
        fit(tmp_path / str(micro), micro=micro, dropped=True, lora=lora)
    fit(tmp_path / "none", lora=LoraOptions(["*"], rank=2))
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "8"), rel=1e-9)
    assert losses(tmp_path / "none") != pytest.approx(losses(tmp_path / "8"), rel=1e-3)


def test_what_does_not_fit_the_network_is_refused(tmp_path):
    with pytest.raises(ValueError, match='lora.targets names "x_proj", which fits no linear'):
        fit(tmp_path / "run", lora=LoraOptions(["x_proj"]))


def test_adapters_are_not_dropped_silently(base, tmp_path):
    fit(tmp_path / "tuned", 1, init_from=str(base), lora=LORA)
    with pytest.raises(ValueError, match="was trained with LoRA, and this run has none"):
        fit(tmp_path / "plain", 1, init_from=str(last(tmp_path / "tuned")))

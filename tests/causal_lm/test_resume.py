"""A training that goes on computes what the weights of its checkpoint were trained for."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from datamodules.instructions import InstructionDataModule
from datamodules.text import TextDataModule
from datamodules.text_split import TextSplit
from datamodules.tokenizers.text_tokenizer import TokenizerOptions
from datamodules.tokenizers.trained import byte_tokenizer
from lit_models.causal_lm.building import ComputationOptions
from lit_models.causal_lm.decoder_config import DecoderConfig
from lit_models.causal_lm.lora import LoraOptions
from lit_models.causal_lm.module import LitCausalLM
from lit_models.training.callbacks.ledger import Ledger
from tests.causal_lm.folders import saved
from tests.text_corpora import saved_tokenizer
from tests.toy import toy_trainer

TEXT = "the cat sat on the mat and the dog sat on the log, so they sat and sat. " * 20
SHAPE = {"max_positions": 16, "hidden_size": 16, "num_layers": 1, "num_heads": 2}
LORA = LoraOptions(["q_proj"], 2, 16.0)
SGD = partial(torch.optim.SGD, lr=0.05)


def model(lora: LoraOptions | None = None, **options: Any) -> LitCausalLM:
    own = {
        name: options.pop(name) for name in list(options) if name in DecoderConfig.__match_args__
    }
    return LitCausalLM(SGD, network=DecoderConfig(**{**SHAPE, **own}), lora=lora, **options)


def run(
    folder: Path,
    module: LitCausalLM,
    verb: str = "fit",
    steps: int = 1,
    ckpt_path: Any = None,
    is_known: bool = True,
    **data: Any,
) -> Path:
    """Train or evaluate, and return a checkpoint.

    Args:
        is_known: the trainer knows ckpt_path beforehand, as on the command line; else it is an
            argument of the call, as in a script.
    """
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    seed_everything(1, verbose=False)
    options = {"context_length": 16, "global_batch_size": 8, "micro_batch_size": 8, **data}
    read = TextDataModule(
        str(folder / "text.txt"), split=TextSplit(by="tail", test_share=0.1), **options
    )
    limit = {"limit_val_batches": 0} if verb == "fit" else {}
    callbacks = [Ledger()] if verb == "fit" else []
    trainer = toy_trainer(
        folder, max_steps=steps, callbacks=callbacks, enable_checkpointing=False, **limit
    )
    path = None if ckpt_path is None else str(ckpt_path)
    if is_known:
        trainer.ckpt_path = path
    given = {} if is_known else {"ckpt_path": path}
    getattr(trainer, verb)(module, datamodule=read, weights_only=True, **given)
    trainer.save_checkpoint(folder / "a.ckpt")
    return folder / "a.ckpt"


CHANGES = [
    ({"num_heads": 4}, "network.num_heads 2 there and 4 here"),
    ({"norm_eps": 0.1}, "network.norm_eps 1e-05 there and 0.1 here"),
    ({"rope_theta": 500.0}, "network.rope_theta 10000.0 there and 500.0 here"),
    ({"lora": LoraOptions(["q_proj"], 2, 64.0)}, "lora.alpha 16.0 there and 64.0 here"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("runs") / "run", model(lora=LORA))


@pytest.mark.parametrize(("options", "message"), CHANGES)
@pytest.mark.parametrize("is_known", [True, False])
def test_a_resume_with_another_function_is_refused(trained, tmp_path, options, message, is_known):
    module = model(**{"lora": LORA, **options})
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", module, steps=2, ckpt_path=trained, is_known=is_known)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_resume_takes_another_dropout(trained, tmp_path, is_known):
    module = model(lora=LoraOptions(["q_proj"], 2, 16.0, dropout=0.5), dropout=0.25)
    written = run(tmp_path / "run", module, steps=2, ckpt_path=trained, is_known=is_known)
    assert module.network.config.dropout == 0.25
    stored = torch.load(written, weights_only=True)
    assert stored["global_step"] == 2
    assert stored["text_recipe"]["network"]["config"]["dropout"] == 0.25
    assert stored["text_recipe"]["lora"]["dropout"] == 0.5


@pytest.mark.parametrize(("backend", "is_known"), [("own", False), ("transformers", True)])
def test_a_checkpoint_outlives_the_folder_that_it_began_with(tmp_path, backend, is_known):
    base = tmp_path / "base"
    saved(base, "Llama", vocab_size=257)
    saved_tokenizer(byte_tokenizer(), base)
    lora = LoraOptions(["q_proj"], 2, 16.0)

    def tuned() -> LitCausalLM:
        computation = ComputationOptions(backend=backend)
        return LitCausalLM(SGD, pretrained=str(base), lora=lora, computation=computation)

    whole = torch.load(run(tmp_path / "whole", tuned(), steps=2), weights_only=True)
    half = run(tmp_path / "half", tuned())
    shutil.rmtree(base)
    for verb in ("validate", "test"):
        run(tmp_path / verb, tuned(), verb, ckpt_path=half, is_known=is_known)
    resumed = run(tmp_path / "resumed", tuned(), steps=2, ckpt_path=half, is_known=is_known)
    found = torch.load(resumed, weights_only=True)
    assert found["text_recipe"] == whole["text_recipe"]
    for name, value in whole["state_dict"].items():
        torch.testing.assert_close(found["state_dict"][name], value, rtol=1e-5, atol=1e-6)
    lora = LoraOptions(["q_proj"], 2, 64.0)
    with pytest.raises(ValueError, match=r"lora.alpha 16.0 there and 64.0 here"):
        run(tmp_path / "other", tuned(), steps=2, ckpt_path=half, is_known=is_known)
    with pytest.raises(FileNotFoundError, match="base"):
        run(tmp_path / "new", tuned())


def test_a_resume_without_its_folder_trains_where_validation_has_its_own_file(tmp_path):
    base, held = tmp_path / "base", tmp_path / "held.txt"
    saved(base, "Llama", vocab_size=257)
    saved_tokenizer(byte_tokenizer(), base)
    held.write_text("a hen sat. " * 30, encoding="utf-8")
    half = run(
        tmp_path / "half", LitCausalLM(SGD, pretrained=str(base)), validation_files=str(held)
    )
    shutil.rmtree(base)
    module, again = LitCausalLM(SGD, pretrained=str(base)), {"ckpt_path": half, "steps": 2}
    resumed = run(tmp_path / "half", module, validation_files=str(held), **again)
    assert torch.load(resumed, weights_only=True)["global_step"] == 2


def test_instructions_outlive_the_folder_of_their_tokenizer(tmp_path):
    saved_tokenizer(byte_tokenizer(), tmp_path / "base")
    rows = [{"prompt": f"{n} + {n} =", "completion": str(2 * n)} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = TokenizerOptions(kind="folder", path=str(tmp_path / "base"))

    def fit(steps: int, ckpt_path: str | None = None) -> None:
        data = InstructionDataModule(
            str(tmp_path / "a.jsonl"), tokenizer=options, context_length=16, global_batch_size=4
        )
        trainer = toy_trainer(
            tmp_path, max_steps=steps, callbacks=[Ledger()], enable_checkpointing=False
        )
        trainer.ckpt_path = ckpt_path
        trainer.fit(model(), data, weights_only=True)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        trainer.ckpt_path = str(tmp_path / "a.ckpt")
        trainer.validate(model(), data, weights_only=True)

    fit(1)
    shutil.rmtree(tmp_path / "base")
    fit(2, str(tmp_path / "a.ckpt"))
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["global_step"] == 2
    # Nor are training files needed where validation has its own.
    held = {"train_files": str(tmp_path / "b.jsonl"), "validation_files": str(tmp_path / "a.jsonl")}
    data = InstructionDataModule(**held, context_length=16)
    toy_trainer(tmp_path).validate(model(), data, str(tmp_path / "a.ckpt"), weights_only=True)
    assert len(data.datasets["validation"].lengths) > 0
    with pytest.raises(FileNotFoundError, match=r"data.train_files: .*b.jsonl"):
        toy_trainer(tmp_path).validate(model(), InstructionDataModule(**held, context_length=16))


@pytest.mark.parametrize("is_known", [True, False])
def test_weights_to_begin_with_are_not_read_again(tmp_path, is_known):
    start = run(tmp_path / "start", model())
    half = run(tmp_path / "half", model(init_from=str(start)))
    start.unlink()
    again = {"ckpt_path": half, "is_known": is_known}
    run(tmp_path / "half", model(init_from=str(start)), steps=2, **again)
    run(tmp_path / "half", model(init_from=str(start)), "validate", **again)


def test_an_evaluation_without_a_checkpoint_takes_the_weights_to_begin_with(tmp_path):
    start = run(tmp_path / "start", model(), steps=2)
    module = model(init_from=str(start))
    run(tmp_path / "run", module, "validate")
    expected = torch.load(start, weights_only=True)["state_dict"]
    for name, value in module.state_dict().items():
        assert torch.equal(value.float(), expected[name].float()), name


def test_the_checkpoint_of_an_earlier_call_is_not_that_of_the_next(trained, tmp_path):
    module, next_one = model(lora=LORA), model()
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    trainer = toy_trainer(tmp_path, max_steps=2, callbacks=[Ledger()], limit_val_batches=0)
    sizes = {"context_length": 16, "global_batch_size": 8}
    data = TextDataModule(str(text), split=TextSplit(by="tail"), **sizes)
    trainer.validate(module, data, ckpt_path=trained)
    assert trainer.ckpt_path == trained
    trainer.fit(next_one, TextDataModule(str(text), split=TextSplit(by="tail"), **sizes))
    assert next_one.recipe["lora"] is None
    # Nor is its tokenizer: the one of the data is taken.
    own = TokenizerOptions("characters")
    characters = TextDataModule(str(text), tokenizer=own, split=TextSplit(by="tail"), **sizes)
    trainer.validate(module, data, ckpt_path=trained)
    trainer.validate(model(), characters)
    assert characters.tokenizer.vocab_size < 257

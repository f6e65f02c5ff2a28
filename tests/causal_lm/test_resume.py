"""A training that goes on computes what the weights of its checkpoint were trained for."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from datamodules.files.splitting import TextSplit
from datamodules.text.texts import TextDataModule
from datamodules.tokenizers.text import TokenizerOptions
from lit_models.causal_lm.adapters import LoraOptions
from lit_models.causal_lm.module import LitCausalLM
from lit_models.causal_lm.network import DecoderConfig
from lit_models.training.ledger import Ledger
from tests.causal_lm.tiny import TEXT
from tests.toy import toy_trainer

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


def test_weights_to_begin_with_are_not_read_again(tmp_path):
    start = run(tmp_path / "start", model())
    half = run(tmp_path / "half", model(init_from=str(start)))
    start.unlink()
    run(tmp_path / "half", model(init_from=str(start)), steps=2, ckpt_path=half)
    run(tmp_path / "half", model(init_from=str(start)), "validate", ckpt_path=half)


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
    trainer.fit(next_one, TextDataModule(str(text), split=TextSplit(by="tail"), **sizes))
    assert next_one.recipe["lora"] is None
    # Nor is its tokenizer: the one of the data is taken.
    own = TokenizerOptions("characters")
    characters = TextDataModule(str(text), tokenizer=own, split=TextSplit(by="tail"), **sizes)
    trainer.validate(module, data, ckpt_path=trained)
    trainer.validate(model(), characters)
    assert characters.tokenizer.vocab_size < 257

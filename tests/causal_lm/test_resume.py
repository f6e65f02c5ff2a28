"""Reuse of weights: resume, evaluation, start of another run, without the original folders."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from datamodules.files.splitting import TextSplit
from datamodules.text.texts import TextDataModule
from datamodules.tokenizers.text import TokenizerOptions
from lit_models.causal_lm import module as module_file
from lit_models.causal_lm.adapters import LoraOptions
from lit_models.causal_lm.module import ComputationOptions, LitCausalLM
from lit_models.causal_lm.network import check_isolation
from lit_models.commands.export import export
from lit_models.run_files import read_checkpoint
from lit_models.training.ledger import Ledger
from lit_models.training.predictions import PredictionWriter
from tests.causal_lm import tiny
from tests.causal_lm.folders import saved_with_bytes
from tests.causal_lm.tiny import DATA_OPTIONS, LORA, MODEL_OPTIONS, SGD, SHAPE_OPTIONS, model, run
from tests.toy import toy_trainer

CHANGES = [
    ({"num_heads": 4}, "network.num_heads 2 there and 4 here"),
    ({"norm_eps": 0.1}, "network.norm_eps 1e-05 there and 0.1 here"),
    ({"rope_theta": 500.0}, "network.rope_theta 10000.0 there and 500.0 here"),
    ({"lora": LoraOptions(["q_proj"], 2, 64.0)}, "lora.alpha 16.0 there and 64.0 here"),
]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("runs") / "run", model(lora=LORA))


@pytest.mark.parametrize(("options", "message"), CHANGES)
@pytest.mark.parametrize("is_known", [True, False])
def test_a_resume_with_another_function_is_refused(adapted, tmp_path, options, message, is_known):
    module = model(**{"lora": LORA, **options})
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", module, steps=2, ckpt_path=adapted, is_known=is_known)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_resume_takes_another_dropout(adapted, tmp_path, is_known):
    module = model(lora=LoraOptions(["q_proj"], 2, 16.0, dropout=0.5), dropout=0.25)
    written = run(tmp_path / "run", module, steps=2, ckpt_path=adapted, is_known=is_known)
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


def test_the_checkpoint_of_an_earlier_call_is_not_that_of_the_next(adapted, tmp_path):
    module, next_one = model(lora=LORA), model()
    text = tmp_path / "text.txt"
    text.write_text(tiny.TEXT, encoding="utf-8")
    trainer = toy_trainer(tmp_path, max_steps=2, callbacks=[Ledger()], limit_val_batches=0)
    sizes = {"context_length": 16, "global_batch_size": 8}
    data = TextDataModule(str(text), split=TextSplit(by="tail"), **sizes)
    trainer.validate(module, data, ckpt_path=adapted)
    trainer.fit(next_one, TextDataModule(str(text), split=TextSplit(by="tail"), **sizes))
    assert next_one.recipe["lora"] is None
    # Nor is the checkpoint's tokenizer restored: the data's is used.
    own = TokenizerOptions("characters")
    characters = TextDataModule(str(text), tokenizer=own, split=TextSplit(by="tail"), **sizes)
    trainer.validate(module, data, ckpt_path=adapted)
    trainer.validate(model(), characters)
    assert characters.tokenizer.vocab_size < 257


@pytest.fixture(scope="module")
def second_run(tmp_path_factory):
    """A checkpoint of a run that started from another checkpoint, which has been deleted."""
    folder = tmp_path_factory.mktemp("runs")
    first = run(folder / "first", model())
    second = run(folder / "second", model(init_from=str(first)), steps=2)
    first.unlink()  # training that continues the second does not need it
    return second


@pytest.fixture
def isolation_tests(monkeypatch):
    """Notes the networks that the isolation test has tested."""
    tested = []
    monkeypatch.setattr(
        module_file, "check_isolation", lambda n: (tested.append(n), check_isolation(n))
    )
    return tested


def test_a_loaded_model_is_made_ready_for_training(second_run, tmp_path, isolation_tests):
    computation = ComputationOptions(activation_checkpointing=True)
    module = LitCausalLM.load_from_checkpoint(
        second_run, optimizer=SGD, freeze=["embedding.*"], computation=computation
    )
    before = torch.load(second_run, weights_only=True)["state_dict"]
    run(tmp_path / "run", module)
    assert all(block.recomputes for block in module.blocks())
    assert isolation_tests == [module.network]
    after = {name: value.float() for name, value in module.state_dict().items()}
    changed = {n for n, value in before.items() if not torch.equal(after[n], value.float())}
    assert changed
    assert not {"network.embedding.weight", "network.head.weight"} & changed


def test_a_training_after_a_validation_is_made_ready(tmp_path, isolation_tests):
    module = model(freeze=["layers.*"])
    run(tmp_path / "run", module, "validate")
    run(tmp_path / "run", module)
    assert isolation_tests == [module.network] * 2
    assert not any(p.requires_grad for p in module.network.layers.parameters())


def test_a_loaded_model_is_not_trained_on_other_tokens(second_run, tmp_path):
    module = LitCausalLM.load_from_checkpoint(second_run, optimizer=SGD)
    with pytest.raises(ValueError, match="trained with another tokenizer than that of the data"):
        run(tmp_path / "run", module, tokenizer=TokenizerOptions(kind="characters"))


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_context_beyond_learned_positions_is_refused(tmp_path, is_loaded):
    learned = {"positions": "learned"}
    written = run(tmp_path / "trained", model(**learned))
    for verb in ("fit", "validate", "test"):
        module, path = model(**learned), written
        if is_loaded:
            module, path = LitCausalLM.load_from_checkpoint(written, optimizer=SGD), None
        with pytest.raises(ValueError, match="context_length 17 is longer than the network's 16"):
            run(tmp_path / verb, module, verb, 2, path, context_length=17)


@pytest.mark.parametrize(
    ("there", "here", "message"),
    [
        ({}, {"num_heads": 4}, "network.num_heads 2 there and 4 here"),
        ({"lora": LORA}, {"lora": LoraOptions(["v_proj"], 2, 16.0)}, "lora.layers"),
        ({"tied": False}, {}, "network.tied False there and True here"),
    ],
)
def test_weights_of_another_function_are_no_start(tmp_path, there, here, message):
    written = run(tmp_path / "trained", model(**there))
    with pytest.raises(ValueError, match=f"init_from .* with other options.*{message}"):
        run(tmp_path / "run", model(**here, init_from=str(written)))


def test_a_start_may_add_adapters_and_part_the_head(tmp_path):
    written = run(tmp_path / "trained", model(lora=LORA))
    more = LoraOptions(["q_proj", "v_proj"], 2, 16.0, base_dtype="bfloat16")
    run(tmp_path / "run", model(lora=more, init_from=str(written)))
    plain = run(tmp_path / "plain", model())
    run(tmp_path / "parted", model(tied=False, init_from=str(plain)))


def test_a_base_in_bfloat16_is_rounded_under_fsdp_too(tmp_path, own_environment):
    found = []
    for strategy in ("auto", "fsdp"):
        module = model(lora=LoraOptions(["v_proj"], base_dtype="bfloat16"))
        limits = {"max_steps": 1, "strategy": strategy, "callbacks": []}
        path = run(tmp_path / strategy, module, limits=limits)
        found.append(read_checkpoint(path)["state_dict"])
    torch.testing.assert_close(*found)


def test_an_exported_folder_evaluates_and_predicts_as_the_file_does(tmp_path):
    trained, exported = run(tmp_path / "run", model()), tmp_path / "exported"
    export(trained, to=exported, class_path="lit_models.LitCausalLM")
    expected = torch.load(trained, weights_only=True)["state_dict"]
    for verb in ("validate", "test"):
        module = model()
        run(tmp_path / verb, module, verb, ckpt_path=exported)
        for name, value in expected.items():
            assert torch.equal(module.state_dict()[name].float(), value.float()), name
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "the cat"}\n', encoding="utf-8")
    written = []
    for path in (trained, exported):
        limits = {"callbacks": [PredictionWriter()], "enable_checkpointing": False}
        trainer = toy_trainer(tmp_path / f"from {path.name}", **limits)
        trainer.ckpt_path = str(path)
        data = TextDataModule(predict_files=str(prompts), global_batch_size=1)
        module = LitCausalLM(SGD)  # a shape other than the checkpoint's
        trainer.predict(module, data, return_predictions=False, weights_only=True)
        output = tmp_path / f"from {path.name}" / "mine.completed.jsonl"
        written.append(output.read_text("utf-8"))
    assert written[0] == written[1]
    assert "completion" in json.loads(written[0])


@pytest.mark.slow
def test_an_evaluation_refuses_another_function_than_its_checkpoint(own_folder, done):
    Path("text.txt").write_text(tiny.TEXT, encoding="utf-8")
    lora = ["--model.lora.targets=[q_proj]", "--model.lora.rank=2", "--model.lora.alpha=16"]
    fit = [*MODEL_OPTIONS, *SHAPE_OPTIONS, *lora, *DATA_OPTIONS, "--trainer.default_root_dir=run"]
    done("fit", *fit, "--trainer.max_steps=1")
    evaluate = ["validate", *DATA_OPTIONS, "--ckpt_path=run/checkpoints/last.ckpt"]
    for option, message in (
        ("--model.lora.alpha=64", "model.lora.alpha 16.0 there and 64.0 here"),
        ("--model.lora=null", "model.lora .*alpha.* there and None here"),
        ("--model.network.num_heads=1", "model.network.num_heads 2 there and 1 here"),
        ("--model.network=gpt2-124m", "model.network .* there and gpt2-124m here"),
        ("--model.pretrained=base", "model.pretrained None there and base here"),
    ):
        output = done(*evaluate, option, status=2)
        shown = " ".join(output.split())
        assert "weights of run/checkpoints/last.ckpt were trained for" in shown
        assert re.search(message, shown), shown
        assert len(output.splitlines()) <= 24
    done(*evaluate, *lora)


@pytest.mark.slow
@pytest.mark.parametrize("has_own_validation", [False, True])
def test_a_checkpoint_outlives_the_folder_that_it_began_with(tmp_path, has_own_validation):
    base, held = saved_with_bytes(tmp_path / "base", "Llama"), tmp_path / "held.txt"
    held.write_text("a hen sat. " * 30, encoding="utf-8")
    lora = None if has_own_validation else LORA
    data = {"validation_files": str(held)} if has_own_validation else {}

    def tuned() -> LitCausalLM:
        return LitCausalLM(SGD, pretrained=str(base), lora=lora)

    whole = torch.load(run(tmp_path / "whole", tuned(), steps=2, **data), weights_only=True)
    half = run(tmp_path / "half", tuned(), **data)
    shutil.rmtree(base)
    for verb in () if has_own_validation else ("validate", "test"):
        run(tmp_path / verb, tuned(), verb, ckpt_path=half)
    resumed = run(tmp_path / "resumed", tuned(), steps=2, ckpt_path=half, **data)
    found = torch.load(resumed, weights_only=True)
    assert found["text_recipe"] == whole["text_recipe"]
    torch.testing.assert_close(found["state_dict"], whole["state_dict"], rtol=1e-5, atol=1e-6)
    lora = LoraOptions(["q_proj"], 2, 64.0)
    with pytest.raises(ValueError, match=r"lora.alpha (16.0|None) there and 64.0 here"):
        run(tmp_path / "other", tuned(), steps=2, ckpt_path=half)
    with pytest.raises(FileNotFoundError, match="base"):
        run(tmp_path / "new", tuned())

"""Prediction from a checkpoint and prompts: completions or scores; samples during training."""

from functools import partial

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from datamodules.text.instructions import InstructionDataModule
from datamodules.text.texts import TextDataModule
from datamodules.tokenizers.text import TokenizerOptions, byte_tokenizer
from lit_models.causal_lm.generation import GenerationOptions
from lit_models.causal_lm.module import LitCausalLM, Samples
from lit_models.causal_lm.network import DecoderConfig
from lit_models.training import default_callbacks
from lit_models.training.ledger import Ledger
from lit_models.training.predictions import PredictionWriter
from tests.causal_lm.folders import saved, saved_with_bytes
from tests.causal_lm.tiny import BLOCKS, SMALL, completed, run, texts_of
from tests.text_corpora import rows_file, saved_tokenizer
from tests.toy import json_rows, ledger_lines, toy_trainer

PROMPTS = ["a", "", "longer than the others", "a", "b c", "d e f", "ghi"]
NETWORK = DecoderConfig(
    max_positions=40, hidden_size=16, num_layers=1, num_heads=2, positions="learned"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint after two steps."""
    module = LitCausalLM(partial(torch.optim.AdamW, lr=0.1), network=NETWORK)
    sizes = {"context_length": 40, "global_batch_size": 4, "micro_batch_size": 4}
    return run(tmp_path_factory.mktemp("trained"), module, steps=2, **sizes)


def predict(folder, trained, rows, size=3, **options):
    """Predict from the checkpoint, as the command line does; return the rows of the output."""
    folder.mkdir(exist_ok=True)
    prompts = rows_file(folder / "mine.jsonl", rows)
    generation = GenerationOptions(**options)
    module = LitCausalLM(torch.optim.AdamW, network=NETWORK, generation=generation)
    trainer = toy_trainer(folder, callbacks=[PredictionWriter()], enable_checkpointing=False)
    trainer.ckpt_path = str(trained)
    data = TextDataModule(predict_files=prompts, global_batch_size=size)
    trainer.predict(module, data, return_predictions=False, weights_only=True)
    kind = "scored" if generation.mode == "score" else "completed"
    return json_rows(folder / f"mine.{kind}.jsonl"), module


def test_completions_stand_beside_their_prompts_whatever_the_batch(tmp_path, trained):
    rows = [{"prompt": text, "id": i} for i, text in enumerate(PROMPTS)]
    options = {"max_new_tokens": 9, "temperature": 1.0, "seed": 2}
    got, module = predict(tmp_path / "three", trained, rows, **options)
    assert [{"prompt": row["prompt"], "id": row["id"]} for row in got] == rows
    assert predict(tmp_path / "all", trained, rows, size=64, **options)[0] == got
    assert got[0]["completion"] != got[3]["completion"]  # equal prompts are samples of their own
    tokenizer = module.tokenizer
    ids = [[tokenizer.begin_id, *tokenizer.encode(text).tolist()] for text in PROMPTS]
    expected = completed(module.network.eval(), ids, GenerationOptions(**options))
    assert [(row["finish_reason"], row["completion"], row["num_tokens"]) for row in got] == [
        (reason, text, len(ids)) for ids, reason, text in expected
    ]
    module = LitCausalLM.load_from_checkpoint(trained).double().train()  # as in a Python session
    assert module.generate(PROMPTS, **options) == [row["completion"] for row in got]
    assert module.training
    with pytest.raises(ValueError, match="row:1: .* has no chat template"):
        module.generate([[{"role": "user", "content": "Hello"}]])


def test_choices_are_scored(tmp_path, trained):
    rows = [{"prompt": "abc", "choices": ["def", "zzz", "d"]}, {"prompt": "", "choices": ["abc"]}]
    (first, second), _ = predict(tmp_path, trained, rows, mode="score")
    assert first["num_tokens"] == [3, 3, 1]
    assert first["best"] == first["scores"].index(max(first["scores"]))
    assert first["scores"][0] < first["scores"][2] < 0  # longer continuations are less probable
    assert second["num_tokens"] == [3]


def test_a_long_prompt_stops_everything_before_any_work(tmp_path, trained):
    rows = [{"prompt": "a"}, {"prompt": "b" * 50}]
    with pytest.raises(ValueError, match=r"mine.jsonl:2: the prompt has 51 tokens and the network"):
        predict(tmp_path / "whole", trained, rows)


def test_prediction_needs_prompts_and_a_model(tmp_path, trained):
    trainer = toy_trainer(tmp_path, callbacks=[PredictionWriter()], enable_checkpointing=False)
    module = LitCausalLM(torch.optim.AdamW, network=NETWORK)
    with pytest.raises(ValueError, match="predict needs files: name them with --data.predict_f"):
        trainer.predict(module, TextDataModule())
    data = TextDataModule(predict_files=rows_file(tmp_path / "mine.jsonl", [{"prompt": "a"}]))
    with pytest.raises(ValueError, match="predict needs a trained model: give --ckpt_path"):
        trainer.predict(module, data)
    with pytest.raises(ValueError, match="name a file in .jsonl or .ndjson"):
        _ = TextDataModule(predict_output="out.csv").predict_output_path


def test_instructions_are_asked_as_they_were_trained(tmp_path):
    rows = [{"prompt": f"{i} + 1 =", "completion": f" {i + 1}"} for i in range(40)]
    questions = [{"prompt": "1 + 1 ="}, {"messages": [{"role": "user", "content": "1 + 1 ="}]}]
    data = InstructionDataModule(
        rows_file(tmp_path / "train.jsonl", rows),
        tokenizer=TokenizerOptions(chat_template="plain"),
        context_length=40,
        separator="\n",
        predict_files=rows_file(tmp_path / "questions.jsonl", questions),
        global_batch_size=4,
    )
    generation = GenerationOptions(max_new_tokens=3)
    module = LitCausalLM(partial(torch.optim.AdamW, lr=0.1), network=NETWORK, generation=generation)
    quiet = {"enable_checkpointing": False, "callbacks": [Ledger(), PredictionWriter()]}
    trainer = toy_trainer(tmp_path, max_epochs=1, **quiet)
    trainer.fit(module, data)
    trainer.predict(module, data, return_predictions=False)
    dataset, tokenizer = data.datasets["predict"], module.tokenizer
    texts = [tokenizer.decode(dataset.example(i, 0)[0].ids, False) for i in (0, 1)]
    assert texts == ["<|endoftext|>1 + 1 =\n", "user:\n1 + 1 =\n\nassistant:\n"]
    assert len((tmp_path / "questions.completed.jsonl").read_text("utf-8").splitlines()) == 2


@pytest.mark.parametrize("verb", ["validate", "predict"])
def test_a_folder_whose_documents_see_each_other_is_not_measured(tmp_path, verb):
    folder = saved_with_bytes(tmp_path / "model", "OPT", pad_token_id=0)
    score = GenerationOptions(mode="score")
    module = LitCausalLM(torch.optim.AdamW, pretrained=str(folder), generation=score)
    rows = rows_file(tmp_path / "mine.jsonl", [{"prompt": "a", "choices": ["b", "c"], "text": "d"}])
    files = {f"{name}_files": rows for name in ("train", "validation", "predict")}
    with pytest.raises(RuntimeError, match="OPTForCausalLM lets a token see what it must not"):
        getattr(toy_trainer(tmp_path), verb)(module, TextDataModule(**files, context_length=12))


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Qwen2"])
def test_a_pretrained_folder_completes_as_transformers_does(tmp_path, kind):
    folder, tokenizer = tmp_path / "model", byte_tokenizer()
    options = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256}
    theirs = saved(folder, kind, **options).double()
    saved_tokenizer(tokenizer, folder)
    texts = ["ab", "longer", ""]
    prompts = rows_file(tmp_path / "mine.jsonl", [{"prompt": text} for text in texts])
    generation = GenerationOptions(max_new_tokens=5)
    module = LitCausalLM(torch.optim.AdamW, pretrained=str(folder), generation=generation)
    data = TextDataModule(predict_files=prompts, context_length=12)
    trainer = toy_trainer(tmp_path, callbacks=[PredictionWriter()], enable_checkpointing=False)
    trainer.predict(module, data, return_predictions=False)
    for text, line in zip(texts, json_rows(tmp_path / "mine.completed.jsonl"), strict=True):
        ids = torch.tensor([[256, *tokenizer.encode(text)]])
        mask = torch.ones_like(ids)
        whole = theirs.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
        assert line["completion"] == tokenizer.decode(whole[0, ids.shape[1] :])


def fit(folder, callbacks=(), positions="rotary", **options):
    network = DecoderConfig(dropout=0.1, positions=positions, **SMALL)
    module = LitCausalLM(partial(torch.optim.AdamW, lr=0.01), network=network)
    options = {"logger": TensorBoardLogger(folder, name="board", version=""), **options}
    limits = {"max_epochs": 1, "callbacks": [*default_callbacks(), *callbacks], **options}
    run(folder, module, limits=limits, **BLOCKS)
    return module


def test_a_run_with_samples_is_the_run_without_them(tmp_path, capsys):
    plain = fit(tmp_path / "plain")
    drawn = Samples(["the cat", ""], 3, GenerationOptions(20, 1.0))
    sampled = fit(tmp_path / "sampled", [drawn])
    torch.testing.assert_close(sampled.state_dict(), plain.state_dict(), rtol=0, atol=0)
    lines = [ledger_lines(tmp_path / name) for name in ("plain", "sampled")]
    assert [[line["loss"] for line in run] for run in lines] == [
        [line["loss"] for line in lines[0]]
    ] * 2
    texts = texts_of(tmp_path / "sampled")
    texts = {key: text for key, text in texts.items() if "/errors/" not in key[0]}
    steps = range(3, len(lines[0]) + 1, 3)
    assert sorted(texts) == [(f"samples/{n}/text_summary", s) for n in (0, 1) for s in steps]
    assert all(text.startswith("```\nthe cat") for (tag, _), text in texts.items() if "/0/" in tag)
    assert len(set(texts.values())) > 2  # the samples change while the model learns
    printed = capsys.readouterr().out
    assert printed.count("a sample: the cat") == 1
    assert "the cat" not in printed.split("a sample: the cat")[0]


def test_samples_need_prompts_that_fit(tmp_path):
    with pytest.raises(ValueError, match="the prompt has 18 tokens and the network 16 positions"):
        fit(tmp_path / "run", [Samples(["a" * 17])], positions="learned")

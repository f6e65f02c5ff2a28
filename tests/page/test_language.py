"""Views of models that write and of a lens: they show the module's results unchanged."""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement
from torch import nn

from datamodules.text.prompts import ChoiceDataset, read_prompts, rows_in_memory
from lit_models import LitCausalLM, LitConsistencyLens, LitSeq2Seq
from lit_models.causal_lm.generation import GenerationOptions
from lit_models.page.views import CONTROLS, LEGEND
from tests.activation_dumps import stories
from tests.page.conftest import fit

TEXT = "user: the cat sat on the mat, and who else? assistant: the <b>dog</b> sat.\n" * 99
OPTIONS = {"temperature": 0.8, "top_p": 1.0, "max_new_tokens": 12, "seed": 5}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, LitCausalLM]:
    """Two runs with the same weights, whose tokenizer has a chat template; and the module."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "text.txt").write_text(TEXT)
    options = ("data.train_files=text.txt", "data.split.by=tail", "data.tokenizer.kind=characters")
    options += ("data.tokenizer.chat_template=plain", "model.lora={targets: ['*'], rank: 2}")
    fit(folder, "causal_lm/debug.yaml", "runs/a", *(f"--{option}" for option in options))
    shutil.copytree(folder / "runs/a", folder / "runs/b")
    path = folder / "runs/a/checkpoints/best.ckpt"
    return folder / "runs", LitCausalLM.load_from_checkpoint(path).eval()


@pytest.mark.slow
def test_models_write_chat_and_rate_side_by_side_and_fail_in_a_sentence(made, visited):
    runs, module = made

    async def visit(user):
        async def asked(text: str, expected: str, button: str = "write") -> None:
            user.find(ui.textarea).elements.pop().set_value(text)
            user.find(kind=ui.button, content=button).click()
            for _ in range(600):
                await asyncio.sleep(0.1)  # the button is enabled after the last poll
                tokens = [e for e in user.find(TextElement).elements if e.tag == "mark"]
                texts = "".join(token.text for token in sorted(tokens, key=lambda token: token.id))
                shown = texts.split("".join(name for name, _ in LEGEND))[-2:]  # of both models
                if shown == [expected, expected]:
                    return
            raise AssertionError(shown)

        await user.open("/language")
        await user.should_see("chat", retries=600)
        user.find(ui.select).elements.pop().set_value(["a", "b"])
        for name, value in OPTIONS.items():
            user.find(kind=ui.number, content=name.replace("_", " ")).elements.pop().value = value
        await asked("the cat", "the cat", "rate each token")
        await asked("the <b>", "the <b>" + module.generate(["the <b>"], **OPTIONS)[0])
        user.find(ui.switch).click()
        turns: list[dict[str, str]] = []
        for text in ("who sat", "and who else"):
            turns.append({"role": "user", "content": text})
            (answer,) = module.generate([turns], **OPTIONS)
            await asked(text, module.tokenizer.render(turns, True) + answer)
            turns.append({"role": "assistant", "content": answer})
        user.find(kind=ui.number, content="top p").elements.pop().value = 0
        user.find(kind=ui.button, content="write").click()
        await user.should_see("generation.top_p must be 1e-06 to 1", retries=600)

    visited(runs, visit)


def test_nats_of_tokens_are_the_score_of_the_text_and_who_hears_tokens_ends_them(made):
    (_, module), heard = made, []
    rows = rows_in_memory([{"prompt": "", "choices": ["the cat sat"]}])
    batch = ChoiceDataset(read_prompts(rows, module.tokenizer, mode="score")).batch(np.arange(1), 0)
    score = module.predict_step(batch, 0, GenerationOptions(mode="score"))["scores"].item()
    for dropout in (part for part in module.modules() if isinstance(part, nn.Dropout)):
        dropout.p = 0.5
    nats = module.train().token_nats("the cat sat")
    module.eval()
    assert sum(n for _, n in nats) == pytest.approx(-score, rel=1e-5)

    def hear(ids):
        heard.append(len(ids[0]))
        return len(heard) == 3

    (text,), (whole,) = (module.generate(["the "], f, **OPTIONS) for f in (hear, None))
    assert heard == [1, 2, 3]
    assert text == whole[:3] != whole


@pytest.mark.slow
def test_a_token_says_what_the_lens_says_and_no_other_file_is_read(tmp_path, visited):
    documents = stories(tmp_path, 90)
    options = [f"--data.train_files={documents}", "--data.global_batch_size=4"]
    fit(tmp_path, "consistency_lens/debug.yaml", "runs/lens", *options)
    path = tmp_path / "runs/lens/checkpoints/best.ckpt"
    module = LitConsistencyLens.load_from_checkpoint(path)

    async def visit(user):
        await user.open("/lens")
        user.find(ui.textarea).elements.pop().set_value("and the at a")
        user.find(kind=ui.button, content="tokens").click()
        await user.should_see(ui.toggle, retries=600)
        user.find(ui.number).elements.pop().set_value(0)  # samples without random draws
        user.find(ui.toggle).elements.pop().set_value(2)
        await user.should_see("shuffled words", retries=600)
        found = sorted(user.find(TextElement).elements, key=lambda element: element.id)
        terms, values = ([e.text for e in found if e.tag == tag] for tag in ("dt", "dd"))
        assert terms[:4] == ["explanation", *(f"sample {number}" for number in (1, 2, 3))]
        assert terms[4:] == [name.replace("_", " ") for name in CONTROLS]
        assert len(set(values[:4])) == 1
        assert values[0].startswith(f"{module.explain(['and the at'])[0]} (FVE ")
        assert values[-1] == "0.000"  # the mean's

    async def visit_alone(user):
        await user.open("/lens")
        user.find(kind=ui.button, content="tokens").click()
        await user.should_see("start it again with --also", retries=600)

    visited(tmp_path / "runs", visit, *tmp_path.glob("*.jsonl"))
    visited(tmp_path / "runs", visit_alone)


@pytest.mark.slow
def test_the_view_shows_each_text_with_what_it_becomes(tmp_path, visited):
    fit(tmp_path, "seq2seq/debug.yaml", "runs/a", "--trainer.max_steps=2")
    module = LitSeq2Seq.load_from_checkpoint(tmp_path / "runs/a/checkpoints/last.ckpt")
    expected = module.translations(["smyth", "bkr"], num_beams=2)

    async def visit(user):
        await user.open("/")
        await user.should_see("Translate", retries=50)
        await user.open("/translate")
        await user.should_see("texts, one on each line", retries=50)
        user.find(ui.textarea).elements.pop().set_value("smyth\n\nbkr")
        user.find(ui.number).elements.pop().set_value(2)
        user.find(kind=ui.button, content="translate").click()
        await user.should_see(ui.table, retries=50)
        rows = user.find(ui.table).elements.pop().rows
        assert [row["text"] for row in rows] == ["smyth", "bkr"]
        found = [(row["becomes"], row["probability"]) for row in rows]
        assert found == [(text, f"{share:.1%}") for text, share in expected]
        user.find(ui.textarea).elements.pop().set_value(" ")
        user.find(kind=ui.button, content="translate").click()
        await user.should_see("0 texts: write 1 to", retries=50)

    visited(tmp_path / "runs", visit)

"""The view of language models: what is shown is what the module says, and it can be stopped."""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from datamodules.text.prompts import ChoiceDataset, read_prompts, rows_in_memory
from lit_models import LitCausalLM
from lit_models.causal_lm.generation import GenerationOptions
from lit_models.page.language import LEGEND
from tests.page.conftest import fit

TEXT = "user: the cat sat on the mat, and who else? assistant: the <b>dog</b> sat.\n" * 99
OPTIONS = {"temperature": 0.8, "top_p": 1.0, "max_new_tokens": 12, "seed": 5}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two runs of the same weights, whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "text.txt").write_text(TEXT)
    options = ["--data.train_files=text.txt", "--data.split.by=tail"]
    options += ["--data.tokenizer.kind=characters", "--data.tokenizer.chat_template=plain"]
    fit(folder, "causal_lm/debug.yaml", "runs/a", *options)
    shutil.copytree(folder / "runs/a", folder / "runs/b")
    return folder / "runs"


@pytest.fixture(scope="module")
def module(runs) -> LitCausalLM:
    return LitCausalLM.load_from_checkpoint(runs / "a/checkpoints/best.ckpt").eval()


async def written(user, text: str, expected: list[str], button: str = "write") -> None:
    """Asks, and waits for the texts of each model, as they are shown in colours."""
    for name, value in OPTIONS.items():
        user.find(kind=ui.number, content=name.replace("_", " ")).elements.pop().set_value(value)
    user.find(ui.textarea).elements.pop().set_value(text)
    user.find(kind=ui.button, content=button).click()
    for _ in range(50):
        await asyncio.sleep(0.1)
        spans = [e for e in user.find(TextElement).elements if e.tag == "span"]
        shown = "".join(str(span.text or "") for span in sorted(spans, key=lambda span: span.id))
        if shown.split("".join(name for name, _ in LEGEND))[1:] == expected:
            return
    raise AssertionError(shown)


def test_models_write_beside_each_other_what_generate_returns(runs, module, visited):
    async def visit(user):
        await user.open("/language")
        user.find(ui.select).elements.pop().set_value(["a", "b"])
        (text,) = module.generate(["the <b>"], **OPTIONS)
        await written(user, "the <b>", ["the <b>" + text] * 2)

    visited(runs, visit)


def test_a_chat_goes_on_and_its_tokens_are_those_of_the_template(runs, module, visited):
    async def visit(user):
        await user.open("/language")
        await user.should_see("chat", retries=50)
        user.find(ui.switch).click()
        turns = []
        for asked in ("who sat", "and who else"):
            turns.append({"role": "user", "content": asked})
            (answer,) = module.generate([turns], **OPTIONS)
            await written(user, asked, [module.tokenizer.render(turns, True) + answer])
            turns.append({"role": "assistant", "content": answer})

    visited(runs, visit)


def test_a_text_is_rated_and_what_fails_is_a_sentence(runs, visited):
    async def visit(user):
        await user.open("/language")
        await written(user, "the cat", ["the cat"], "rate each token")
        user.find(kind=ui.number, content="top p").elements.pop().set_value(0)
        user.find(kind=ui.button, content="write").click()
        await user.should_see("top_p must be above 0 and at most 1", retries=50)

    visited(runs, visit)


def test_the_nats_of_tokens_add_up_to_the_score_of_the_text(module):
    prompts = read_prompts(
        rows_in_memory([{"prompt": "", "choices": ["the cat sat"]}]), module.tokenizer, "", "score"
    )
    batch = ChoiceDataset(prompts).batch(np.arange(1), 0)
    score = module.predict_step(batch, 0, GenerationOptions(mode="score"))["scores"].item()
    found = module.token_nats("the cat sat")
    assert "".join(piece for piece, _ in found) == "the cat sat"
    assert sum(nats for _, nats in found) == pytest.approx(-score, rel=1e-5)


def test_who_hears_the_tokens_ends_them(module):
    heard = []

    def hear(rows):
        heard.append(list(rows[0]))
        return len(heard) == 3

    (text,) = module.generate(["the "], hear=hear, **OPTIONS)
    assert [len(ids) for ids in heard] == [1, 2, 3]
    (whole,) = module.generate(["the "], **OPTIONS)
    assert text == module.tokenizer.decode_continuation(heard[-1])
    assert whole.startswith(text)
    assert len(whole) > len(text)

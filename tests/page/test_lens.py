"""The view of a lens: tokens are buttons, and one says what the lens says of the text up to it."""

import json
from pathlib import Path

import pytest
import torch
from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from lit_models import LitConsistencyLens
from lit_models.page.lens import CONTROLS, SAID
from tests.page.conftest import fit

WORDS = ("the", "owl", "cat", "sat", "ran", "on", "a", "log", "hill", "mat", "and", "slept")
TEXT = "the owl sat on a log"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Stories, and a run of a lens on a subject with random weights."""
    folder = tmp_path_factory.mktemp("lens")
    chosen = torch.randint(len(WORDS), (400, 12), generator=torch.Generator().manual_seed(0))
    rows = [{"text": " ".join(WORDS[i] for i in row)} for row in chosen.tolist()]
    (folder / "stories.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = f"--data.train_files={folder / 'stories.jsonl'}"
    fit(folder, "consistency_lens/debug.yaml", "runs/lens", files)
    return folder


async def ask_for_tokens(user) -> None:
    await user.open("/lens")
    user.find(ui.textarea).elements.pop().set_value(TEXT)
    user.find(kind=ui.button, content="tokens").click()


def test_a_token_says_what_the_lens_says_of_the_text_up_to_it(folder, visited):
    async def visit(user):
        await ask_for_tokens(user)
        await user.should_see(ui.toggle, retries=50)
        tokens = user.find(ui.toggle).elements.pop()
        assert [piece.strip() for piece in tokens.options.values()] == TEXT.split()
        tokens.set_value(2)
        await user.should_see("shuffled words", retries=50)
        found = sorted(user.find(TextElement).elements, key=lambda element: element.id)
        terms, values = ([e.text for e in found if e.tag == tag] for tag in ("dt", "dd"))
        assert terms == [*SAID, *(name.replace("_", " ") for name in CONTROLS)]
        path = folder / "runs/lens/checkpoints/best.ckpt"
        assert [values[0]] == LitConsistencyLens.load_from_checkpoint(path).explain(["the owl sat"])
        assert values[-1] == "0.000"

    visited(folder / "runs", visit, folder / "stories.jsonl")


def test_documents_outside_of_what_was_given_are_a_sentence(folder, visited):
    async def visit(user):
        await ask_for_tokens(user)
        await user.should_see("start it again with --also", retries=50)

    visited(folder / "runs", visit)


def test_words_are_drawn_at_the_temperature_of_the_samples(folder):
    path = folder / "runs/lens/checkpoints/best.ckpt"
    module = LitConsistencyLens.load_from_checkpoint(path)
    activation, keys = torch.ones(64, 16), torch.arange(64)
    greedy = module.explain(activation)
    assert module.explain(activation, noise_key=keys, spread=0.0) == greedy
    counts = [
        len(set(module.explain(activation, noise_key=keys, spread=spread)))
        for spread in (0.0, 1e-3, 1.0)
    ]
    assert counts[0] == 1
    assert counts[0] <= counts[1] < counts[2]

"""The page's view shows what the module says of each text."""

import pytest
from nicegui import ui

from lit_models import LitSeq2Seq
from tests.page.conftest import fit, visited  # noqa: F401 - a fixture


@pytest.mark.slow
def test_the_view_shows_each_text_with_what_it_becomes(tmp_path, visited):  # noqa: F811
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

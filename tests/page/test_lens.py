"""The view of a lens: a token's button says what the lens says of the text up to it."""

import pytest
from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from lit_models import LitConsistencyLens
from lit_models.page.views import CONTROLS
from tests.activation_dumps import stories
from tests.page.conftest import fit


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
        user.find(ui.number).elements.pop().set_value(0)  # samples that are no draws
        user.find(ui.toggle).elements.pop().set_value(2)
        await user.should_see("shuffled words", retries=600)
        found = sorted(user.find(TextElement).elements, key=lambda element: element.id)
        terms, values = ([e.text for e in found if e.tag == tag] for tag in ("dt", "dd"))
        assert terms[:4] == ["explanation", *(f"sample {number}" for number in (1, 2, 3))]
        assert terms[4:] == [name.replace("_", " ") for name in CONTROLS]
        assert len(set(values[:4])) == 1
        assert values[0].startswith(f"{module.explain(['and the at'])[0]} (FVE ")
        assert values[-1] == "0.000"  # of the mean

    async def visit_alone(user):
        await user.open("/lens")
        user.find(kind=ui.button, content="tokens").click()
        await user.should_see("start it again with --also", retries=600)

    visited(tmp_path / "runs", visit, *tmp_path.glob("*.jsonl"))
    visited(tmp_path / "runs", visit_alone)

"""Lens: the tokens of a text, and what the activation at one of them says."""

from typing import Any

from nicegui import PageArguments, ui

from lit_models.page.parts import action, chosen_model, facts, view, words
from lit_models.page.shelf import Shelf

SAID = ("explanation", "sample 1", "sample 2", "sample 3")
CONTROLS = ("greedy", "shuffled_words", "shuffled_examples", "true_text", "token_mean", "mean")


@view
async def lens_view(shelf: Shelf, args: PageArguments) -> None:
    """Show the tokens of a text as buttons, and what the activation at one of them says."""
    words("h1", "Lens")
    model = chosen_model(shelf, args, "LitConsistencyLens")
    text = ui.textarea("text").props("autogrow").classes("wide")
    heat = ui.number("temperature of the samples", value=1.0, min=0, step=0.1)

    async def show_tokens() -> None:
        module, data = await shelf.module(model), await shelf.data(model)
        given, decode = text.value, module.tokenizer.decode_continuation
        pieces = [decode([i], skip_special_tokens=False) for i in module.tokenizer.encode(given)]

        async def explain(event: Any) -> None:
            shown.clear()
            with shown:
                where = (data, given, event.value - len(pieces), heat.value or 0)
                said, fve = await shelf.compute(module.reading, *where)
                facts(zip(SAID, said, strict=True))
                words("p", "FVE of the activation rebuilt from it, and of controls", "note")
                facts((name.replace("_", " "), f"{fve[name]:.3f}") for name in CONTROLS)

        ui.toggle(dict(enumerate(pieces)), on_change=view(explain)).props("unelevated")
        shown = ui.element("div").classes("result").props("aria-live=polite")

    action("show its tokens", show_tokens)

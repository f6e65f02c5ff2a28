"""Lens: the tokens of a text, what the activation at one says, and what is rebuilt from that."""

from typing import Any

import torch
from nicegui import PageArguments, ui

from datamodules.text.prompts import prompt_tokens
from lit_models.page.parts import action, chosen_model, facts, view, words
from lit_models.page.shelf import Shelf

TEXTS = ("explanation", "sample 1", "sample 2", "sample 3")
CONTROLS = ("greedy", "shuffled_words", "shuffled_examples", "true_text", "token_mean", "mean")


@view
async def lens_view(shelf: Shelf, args: PageArguments) -> None:
    """Show the tokens of a text as buttons, and what the activation at one of them says."""
    words("h1", "Lens")
    named = args.query_parameters.get("model", "")
    model = chosen_model(shelf, ("LitConsistencyLens",), named, args.path)
    text = ui.textarea("text").props("outlined autogrow").classes("wide")
    heat = ui.number("temperature of the samples", value=1.0, min=0, step=0.1)

    async def show_tokens() -> None:
        module, data = await shelf.module(model), await shelf.data(model)
        ids = prompt_tokens(module.tokenizer, [text.value])[0]

        async def explain(event: Any) -> None:
            shown.clear()
            with shown:
                facts(await shelf.compute(reading, module, data, ids, event.value, heat.value or 0))

        pieces = [module.tokenizer.decode([i], skip_special_tokens=False) or "·" for i in ids]
        ui.toggle(dict(enumerate(pieces)), on_change=view(explain)).props("no-caps unelevated")
        shown = ui.element("div").classes("result").props("aria-live=polite")

    action("show its tokens", show_tokens)


@torch.no_grad()
def reading(module: Any, data: Any, ids: list[int], place: int, heat: float) -> list[Any]:
    """Return what the activation at a place of a text says, and how well it is rebuilt of what."""
    case, keys = module.case_of(data, ids, place), torch.arange(len(TEXTS) - 1)
    many = case.activation.expand(len(keys), -1)
    said = module.explain(case.activation) + module.explain(many, noise_key=keys, spread=heat)
    rows, whole = case.rows(), case.error(module.lens.mean)
    fve = {name: float(1 - case.error(rows[name]()) / whole) for name in CONTROLS}
    found = [(f"FVE, {name.replace('_', ' ')}", f"{value:.3f}") for name, value in fve.items()]
    return [*zip(TEXTS, said, strict=True), *found]

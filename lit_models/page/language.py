"""Language models: texts and chats that stream in, and the probability of each of their tokens."""

import asyncio
import math
from typing import Any

from nicegui import ui

from lit_models.page.parts import action, view, words
from lit_models.page.shelf import Model, Shelf

FIELDS, LARGEST = {"temperature": 0.8, "top_p": 1.0, "max_new_tokens": 200, "seed": 0}, 4096
LEGEND = [(f" {p:.1%} ", -math.log(p)) for p in (1, 0.5, 0.1, 0.01, 0.001)]


@view
async def language_view(shelf: Shelf) -> None:
    """Show fields for a prompt, and what one model or several write after it."""
    words("h1", "Language model")
    models, talks = shelf.models("LitCausalLM"), dict[str, list[Any]]()
    if not models:
        raise ValueError("there is no language model here; show the folder of a run of one.")
    chosen = ui.select(list(models), value=list(models)[:1], multiple=True, label="models")
    text = ui.textarea("text").props("autogrow").classes("wide")
    with ui.element("div").classes("line"):
        fields = {n: ui.number(n.replace("_", " "), value=v, min=0) for n, v in FIELDS.items()}
        chat = ui.switch("chat", on_change=lambda: talks.clear())

    async def show(writes: bool) -> None:
        options = {n: type(v)(min(fields[n].value or 0, LARGEST)) for n, v in FIELDS.items()}
        with ui.element("div").classes("figures"):
            for name in chosen.value:
                with ui.element("section"):
                    words("h2", name)
                    talk = talks.setdefault(name, []) if chat.value else None
                    await answer(shelf, models[name], text.value, talk, writes and options)

    with ui.element("div").classes("line"):
        action("write", lambda: show(True))
        action("rate each token", lambda: show(False))
    module = await shelf.module(models[chosen.value[0]])
    chat.set_visibility(module.tokenizer.chat_template is not None)


@view
async def answer(shelf: Shelf, model: Model, text: str, talk: Any, options: Any) -> None:
    """Show what a model writes while it does, if it shall, and the probability of each token."""
    module, heard = await shelf.module(model), list[list[int]]()
    if options:
        stop = ui.button("stop", on_click=lambda: stop.set_visibility(False))
        shown = words("p", "", "tokens").props("aria-busy=true")

        def hear(rows: list[list[int]]) -> bool:
            heard[:] = rows
            return stop.is_deleted or not stop.visible

        asked = text if talk is None else [*talk, {"role": "user", "content": text}]
        task = asyncio.create_task(shelf.compute(lambda: module.generate([asked], hear, **options)))
        while not task.done():
            await asyncio.wait([task], timeout=0.1)
            shown.set_text(module.tokenizer.decode_continuation(heard[0] if heard else []))
        stop.delete()
        shown.delete()
        [written] = task.result()
        if talk is not None:
            text = module.tokenizer.render(asked, True)
            talk[:] = [*asked, {"role": "assistant", "content": written}]
        text += written
    for tokens in (LEGEND, await shelf.compute(module.token_nats, text)):
        with ui.element("p").classes("tokens"):
            for piece, nats in tokens:
                token = words("mark", piece).style(f"--share: {min(6 * nats, 40):.0f}%")
                token.props(f'title="{math.exp(-nats):.2%}"')

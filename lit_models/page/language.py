"""Language models: texts that stream in, the probability of each token, and what a lens reads."""

import asyncio
import math
from typing import Any

from nicegui import PageArguments, ui

from lit_models.page.parts import action, chosen_model, facts, view, words
from lit_models.page.shelf import Model, Shelf

FIELDS, LARGEST = {"temperature": 0.8, "top_p": 1.0, "max_new_tokens": 200, "seed": 0}, 4096
LEGEND = [(f" {p:.1%} ", -math.log(p)) for p in (1, 0.5, 0.1, 0.01, 0.001)]
SAID = ("explanation", "sample 1", "sample 2", "sample 3")
CONTROLS = ("shuffled_words", "shuffled_examples", "true_text", "token_mean", "mean")


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
        options = {n: type(v)(fields[n].value or 0) for n, v in FIELDS.items()}
        if (most := options["max_new_tokens"]) > LARGEST:
            raise ValueError(f"max new tokens is {most:,}; write at most {LARGEST:,} at a time.")
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
    asked = text if talk is None else [*talk, {"role": "user", "content": text}]
    if options:
        stop = ui.button("stop", on_click=lambda: stop.set_visibility(False))
        shown = words("p", "", "tokens").props("aria-busy=true")

        def hear(rows: list[list[int]]) -> bool:
            heard[:] = rows
            return stop.is_deleted or not stop.visible

        task = asyncio.create_task(shelf.compute(lambda: module.generate([asked], hear, **options)))
        while not task.done():
            await asyncio.wait([task], timeout=0.1)
            shown.set_text(module.tokenizer.decode_continuation(heard[0] if heard else []))
        stop.delete()
        shown.delete()
        [written] = task.result()
        if talk is not None:
            talk[:] = [*asked, {"role": "assistant", "content": written}]
    for tokens in (LEGEND, await shelf.compute(module.token_nats, asked, *heard[:1])):
        with ui.element("p").classes("tokens"):
            for piece, nats in tokens:
                token = words("mark", piece).style(f"--share: {min(6 * nats, 40):.0f}%")
                known = "first" if math.isnan(nats) else f"{math.exp(-nats):.2%}"
                token.props(f'title="{known}"')


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
                said = [f"{text} (FVE {share:.3f})" for text, share in said]
                facts(zip(SAID, said, strict=True))
                words("p", "FVE, of the activation as it is rebuilt, of controls", "note")
                facts((name.replace("_", " "), f"{fve[name]:.3f}") for name in CONTROLS)

        ui.toggle(dict(enumerate(pieces)), on_change=view(explain)).props("unelevated")
        shown = ui.element("div").classes("result").props("aria-live=polite")

    action("show its tokens", show_tokens)

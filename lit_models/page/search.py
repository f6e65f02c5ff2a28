"""Search: what BM25, a retriever, both fused and a ranker find for a query, side by side."""

import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from nicegui import PageArguments, ui

from lit_models.page.parts import EXPECTED, action, chosen_model, facts, view, words
from lit_models.page.shelf import Shelf


class Finder:
    """A module's collection with BM25 and judged queries, and encoded where it is a retriever."""

    def __init__(self, module: Any, data: Any) -> None:
        from datamodules.search.candidates import Bm25Options, open_bm25

        self.module, self.data, self.documents = module, data, data.collection.documents
        self.bm25 = open_bm25(data.collection, data.bm25 or Bm25Options())
        self.grades: dict[str, dict[int, float]] = {}
        for judged in (data.judged("validation", True), data.judged("test", True)):
            for place, query in enumerate(data.queries(judged.queries)):
                self.grades[query.text] = dict(zip(*judged.judged(place), strict=True))
        if hasattr(module, "encode"):
            self.vectors = module.encode([document.whole for document in self.documents], False)

    def find(self, query: str) -> dict[str, Any]:
        """Return way -> what the datamodule shows of its ten best documents."""
        found: dict[str, Any] = {"BM25": (first := self.bm25.search([query], 1000))}
        if hasattr(self.module, "encode"):
            found["Retriever"] = own = self.module.search([query], self.vectors, 1000)
            if (weight := self.module.fusion_weight()) is not None:
                found[f"Fused, BM25 weighs {weight:g}"] = self.module.fuse(own, first)
        elif size := min(self.data.candidates.top, (first.documents >= 0).sum()):
            numbers, prior = (values[0, :size] for values in first)
            texts = [self.documents[number].whole for number in numbers]
            scores = self.module.rank(query, texts, prior if self.module.adds_prior else None)
            order = scores.argsort(descending=True).tolist()
            found["Re-ranked"] = numbers[None, order], scores[None, order]
        for way, hits in found.items():
            best = zip(*(values[0, :10].tolist() for values in hits), strict=True)
            found[way] = [self.data.shown(query, *hit) for hit in best if hit[0] >= 0]
        return found


@view
async def search_view(shelf: Shelf, args: PageArguments) -> None:
    """Show a field for a query, and what each way finds; a title opens its document."""
    words("h1", "Search")
    model = chosen_model(shelf, args, "LitRetriever", "LitRanker")
    state = words("p", "The collection is read and encoded, once …", "note").props("role=status")
    data, finders = await shelf.data(model), dict[str, Finder]()
    folder = data.collection_request.folder
    for one in (*shelf.models("LitRanker").values(), model):
        with suppress(*EXPECTED if one != model else ()):  # said where that one is chosen
            theirs = await shelf.data(one)
            if theirs.collection_request.folder == folder:
                key, parts = (Finder, one.weights), (await shelf.module(one), theirs)
                finders[one.kind] = await shelf.compute(shelf.once, key, Finder, *parts)
    own, rest = finders[model.kind], ", no ranker" * ("LitRanker" not in finders)
    state.text = f"{len(own.documents):,} documents{rest}"

    @view
    async def opened(number: int) -> None:
        from lit_models.seo.onpage import SUFFIXES, check_page

        document = own.documents[number]
        with ui.dialog(value=True).props("aria-label=document") as dialog, ui.card():
            ui.button("close", on_click=dialog.close)
            words("h2", document.title or document.id)
            words("pre", document.text)
            page = Path(folder or "") / document.id.replace("%20", " ")
            if data.collection.facts["format"] == "pages" and page.suffix.lower() in SUFFIXES:
                report = await shelf.compute(check_page, page.read_bytes(), document.id)
                facts((one.check, " · ".join(filter(None, one[1:]))) for one in report.findings)

    async def show() -> None:
        found, asked = dict[str, Any](), query.value[:1000]
        for finder in reversed(finders.values()):
            found |= await shelf.compute(finder.find, asked)
        marked = "|".join(re.findall(r"\w+", asked)) or "$^"  # which is nowhere
        marks = re.compile(rf"\b({marked})\b", re.IGNORECASE)
        grades = own.grades.get(asked, {})
        with ui.element("div").classes("columns"):
            for way, hits in found.items():
                with ui.element("section").classes("result"):
                    words("h2", way if hits else f"{way}: nothing")
                    for number, score, address, title, says in hits:
                        opens = words("button", title or address, "nicegui-link")
                        opens.on("click", partial(opened, number))
                        with ui.element("p"):
                            for place, part in enumerate(marks.split(says)):
                                words("mark" if place % 2 else "span", part)
                        grade = f", grade {grades[number]:g}" if number in grades else ""
                        words("p", f"score {score:.3f}{grade}", "note")

    query = ui.input("query", autocomplete=list(own.grades)[:200]).classes("wide")
    button = action("search", show)
    query.on("keydown.enter", js_handler=f"() => getHtmlElement({button.id}).click()")

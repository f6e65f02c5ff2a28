"""Search: what BM25, a retriever, both fused and a ranker find for a query, side by side."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from nicegui import PageArguments, ui

from lit_models.page.parts import EXPECTED, action, chosen_model, facts, view, words
from lit_models.page.shelf import Shelf


class Finder:
    """A module's collection with BM25 and judged queries; a retriever has its vectors too."""

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
        """Return way -> numbers and scores of documents, [1, n] each, best first."""
        first = self.bm25.search([query], 1000)
        if hasattr(self, "vectors"):
            own = self.module.search([query], self.vectors, 1000)
            both = {"Fused": self.module.fuse(own, first)} if self.module.fusion else {}
            return {"BM25": first, "Retriever": own, **both}
        size = min(self.data.candidates.top, (first.documents >= 0).sum())
        if not size:
            return {"BM25": first}
        numbers, prior = (values[0, :size] for values in first)
        texts = [self.documents[number].whole for number in numbers]
        scores = self.module.rank(query, texts, prior if self.module.adds_prior else None)
        order = scores.argsort(descending=True).tolist()
        return {"BM25": first, "Re-ranked": (numbers[None, order], scores[None, order])}


@view
async def search_view(shelf: Shelf, args: PageArguments) -> None:
    """Show a field for a query, and what each way finds; a title opens its document."""
    words("h1", "Search")
    wanted = args.query_parameters.get("model") or next(iter(shelf.models("LitRetriever")), "")
    model = chosen_model(shelf, ("LitRetriever", "LitRanker"), wanted, args.path)
    state = words("p", "The collection is read and encoded, once …", "note").props("role=status")
    data, finders = await shelf.data(model), dict[str, Finder]()
    for one in (model, *shelf.models("LitRanker").values()):
        with suppress(*EXPECTED if finders else ()):  # what fails is said where it is chosen
            theirs = await shelf.data(one)
            if theirs.collection_request.folder == data.collection_request.folder:
                key, parts = (Finder, one.weights), (await shelf.module(one), theirs)
                finders[one.kind] = await shelf.compute(shelf.once, key, Finder, *parts)
    grades = finders[model.kind].grades
    rest = "" if "LitRanker" in finders else " No run of a ranker over them is here."
    state.text = f"{len(data.collection.documents):,} documents.{rest}"

    @view
    async def opened(number: int) -> None:
        from lit_models.seo.onpage import SUFFIXES, check_page

        document, folder = data.collection.documents[number], data.collection_request.folder
        with ui.dialog(value=True) as dialog, ui.card():
            ui.button("close", on_click=dialog.close).props("no-caps unelevated")
            words("h2", document.title or document.id)
            words("pre", document.text)
            page = Path(folder or "") / document.id.replace("%20", " ")
            if data.collection.facts["format"] != "pages" or page.suffix.lower() not in SUFFIXES:
                words("p", "On-page checks read html, which this document is not.", "note")
                return
            report = await shelf.compute(check_page, page.read_bytes(), document.id)
            words("h2", f"{len(report.findings)} findings on the page")
            facts((found.check, " · ".join(found[1:])) for found in report.findings)

    async def show_hit(asked: str, number: int, score: float) -> None:
        *_, address, title, says = await shelf.compute(data.shown, asked, number, score)
        words("button", title or address, "nicegui-link").on("click", lambda: opened(number))
        marks = "|".join(re.findall(r"\w+", asked))
        with ui.element("p"):
            for place, part in enumerate(re.split(rf"\b({marks})\b", says, flags=re.IGNORECASE)):
                words("mark" if place % 2 else "span", part)
        grade = grades.get(asked, {}).get(number)
        words("p", f"score {score:.3f}" + ("" if grade is None else f", judged {grade:g}"), "note")

    async def show() -> None:
        asked, found = query.value[:1000], dict[str, Any]()
        for finder in finders.values():
            found |= await shelf.compute(finder.find, asked)
        with ui.grid(columns="repeat(auto-fit, minmax(min(15rem, 100%), 1fr))").classes("wide"):
            for way, hits in found.items():
                with ui.element("section").classes("result"):
                    words("h2", way)
                    for hit in zip(*(each[0, :10].tolist() for each in hits), strict=True):
                        if hit[0] >= 0:
                            await show_hit(asked, *hit)

    query = ui.input("query", autocomplete=list(grades)[:200]).props("outlined").classes("wide")
    button = action("search", show)
    query.on("keydown.enter", js_handler=f"() => getHtmlElement({button.id}).click()")

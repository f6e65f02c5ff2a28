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
        self.vectors: list[Any] = []

    def encode_more(self) -> int:
        """Encode some documents, so that others may compute in between; return how many are."""
        start = sum(map(len, self.vectors))
        part = range(start, min(start + 256, len(self.documents)))
        if part:
            texts = [self.documents[number].whole for number in part]
            self.vectors.append(self.module.encode(texts, False))
        return part.stop

    def find(self, query: str) -> dict[str, Any]:
        """Return way -> what the datamodule shows of its ten best documents."""
        from torch import cat

        first = self.bm25.search([query], 1000)
        found: dict[str, Any] = {"BM25": first}
        if self.vectors:
            found["Retriever"] = own = self.module.search([query], cat(self.vectors), 1000)
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
    wanted = args.query_parameters.get("model") or next(iter(shelf.models("LitRetriever")), "")
    model = chosen_model(shelf, ("LitRetriever", "LitRanker"), wanted, args.path)
    state = words("p", "The collection is read …", "note").props("role=status")
    data, finders = await shelf.data(model), dict[str, Finder]()
    for one in (*shelf.models("LitRanker").values(), model):
        with suppress(*EXPECTED if one != model else ()):  # said where that one is chosen
            theirs = await shelf.data(one)
            if theirs.collection_request.folder == data.collection_request.folder:
                key, parts = (Finder, one.weights), (await shelf.module(one), theirs)
                finders[one.kind] = await shelf.compute(shelf.once, key, Finder, *parts)
    own, total = finders[model.kind], len(data.collection.documents)
    while model.kind == "LitRetriever" and (done := await shelf.compute(own.encode_more)) < total:
        state.text = f"The retriever has encoded {done:,} of {total:,} documents …"
    state.text = f"{total:,} documents" + ", no ranker" * ("LitRanker" not in finders)

    @view
    async def opened(number: int) -> None:
        from lit_models.seo.onpage import SUFFIXES, check_page

        document, folder = data.collection.documents[number], data.collection_request.folder
        with ui.dialog(value=True).props("aria-label=document") as dialog, ui.card():
            ui.button("close", on_click=dialog.close).props("no-caps unelevated")
            words("h2", document.title or document.id)
            words("pre", document.text)
            page = Path(folder or "") / document.id.replace("%20", " ")
            if data.collection.facts["format"] != "pages" or page.suffix.lower() not in SUFFIXES:
                words("p", "On-page checks read html, which this document is not.", "note")
                return
            report = await shelf.compute(check_page, page.read_bytes(), document.id)
            words("h2", f"{len(report.findings)} findings on the page")
            facts((found.check, " · ".join(filter(None, found[1:]))) for found in report.findings)

    def show_hit(asked: str, number: int, score: float, place: str, title: str, says: str) -> None:
        words("button", title or place, "nicegui-link").on("click", lambda: opened(number))
        marks = "|".join(re.findall(r"\w+", asked)) or "$^"  # which is nowhere
        grade = own.grades.get(asked, {}).get(number)
        with ui.element("p"):
            for count, part in enumerate(re.split(rf"\b({marks})\b", says, flags=re.IGNORECASE)):
                words("mark" if count % 2 else "span", part)
        words("p", f"score {score:.3f}" + ("" if grade is None else f", grade {grade:g}"), "note")

    async def show() -> None:
        asked, found = query.value[:1000], dict[str, Any]()
        for finder in reversed(finders.values()):
            found |= await shelf.compute(finder.find, asked)
        with ui.grid(columns="repeat(auto-fit, minmax(min(15rem, 100%), 1fr))").classes("wide"):
            for way, hits in found.items():
                with ui.element("section").classes("result"):
                    words("h2", way if hits else f"{way}: nothing")
                    for hit in hits:
                        show_hit(asked, *hit)

    query = ui.input("query", autocomplete=list(own.grades)[:200]).props("outlined").classes("wide")
    button = action("search", show)
    query.on("keydown.enter", js_handler=f"() => getHtmlElement({button.id}).click()")

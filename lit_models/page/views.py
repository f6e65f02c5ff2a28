"""The frame of the page: its head, its views and which of them fit."""

from pathlib import Path

from nicegui import ui

from lit_models.page.codes import code_view
from lit_models.page.language import language_view
from lit_models.page.lens import lens_view
from lit_models.page.mistakes import ERRORS, errors_view
from lit_models.page.parts import words
from lit_models.page.runs import run_view, runs_view
from lit_models.page.search import search_view
from lit_models.page.shelf import Shelf

# Path of a view -> its name, the classes of the models that it shows.
MODEL_VIEWS = {
    "/code": ("Code", ("LitOccupationCoder",)),
    "/search": ("Search", ("LitRetriever", "LitRanker")),
    "/language": ("Language model", ("LitCausalLM",)),
    "/lens": ("Lens", ("LitConsistencyLens",)),
}
VIEWS = {"/": runs_view, "/run": run_view, "/code": code_view, "/errors": errors_view}
VIEWS |= {"/search": search_view, "/language": language_view, "/lens": lens_view}


def page(shelf: Shelf) -> None:
    """Builds the page of one visitor."""
    ui.add_css(Path(__file__).parent / "page.css")
    fitting = {"/": "Runs"} if shelf.runs() else {}
    fitting |= {path: name for path, (name, kinds) in MODEL_VIEWS.items() if shelf.models(*kinds)}
    if any((run / ERRORS).exists() for run in shelf.runs().values()):
        fitting["/errors"] = "Errors"
    with ui.header(fixed=False):
        words("strong", "Unisono")
        with ui.element("nav").props('aria-label="views"'):
            for path, name in fitting.items():
                ui.link(name, path)
        words("small", str(shelf.place))
    ui.sub_pages(dict(VIEWS), data={"shelf": shelf})

"""The frame of the page: its head, its views and which of them fit."""

from pathlib import Path

from nicegui import ui

from lit_models.page.codes import ERRORS, code_view, errors_view
from lit_models.page.language import language_view
from lit_models.page.lens import lens_view
from lit_models.page.parts import words
from lit_models.page.runs import run_view, runs_view
from lit_models.page.search import search_view
from lit_models.page.shelf import Shelf

# Path of a view -> its name, the classes of the models that it shows.
MODEL_VIEWS = {
    "/code": ("Code", ("LitOccupationCoder",)),
    "/search": ("Search", ("LitRetriever", "LitRanker")),
    "/language": ("Language", ("LitCausalLM",)),
    "/lens": ("Lens", ("LitConsistencyLens",)),
}
VIEWS = {"/": runs_view, "/run": run_view, "/code": code_view, "/errors": errors_view}
VIEWS |= {"/search": search_view, "/language": language_view, "/lens": lens_view}


def page(shelf: Shelf) -> None:
    """Builds the page of one visitor."""
    ui.add_css(Path(__file__).parent / "page.css")
    runs = shelf.runs().values()
    fitting = {"/": "Runs"} if runs else {}
    fitting |= {path: name for path, (name, kinds) in MODEL_VIEWS.items() if shelf.models(*kinds)}
    fitting |= {"/errors": "Errors"} if any((run / ERRORS).exists() for run in runs) else {}
    with ui.header(fixed=False):
        words("strong", "Unisono")
        words("small", str(shelf.place))
        with ui.element("nav").props("aria-label=views"):
            for path, name in fitting.items():
                ui.link(name, path)
    ui.sub_pages(dict(VIEWS), data={"shelf": shelf})

"""The frame of the page: who may ask it, its head, its views and which of them fit."""

from pathlib import Path
from secrets import compare_digest
from typing import Any

from nicegui import ui
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from lit_models.page.codes import ERRORS, code_view, errors_view
from lit_models.page.language import language_view, lens_view
from lit_models.page.parts import View, words
from lit_models.page.runs import run_view, runs_view
from lit_models.page.search import search_view
from lit_models.page.shelf import Shelf

MOST_BYTES, COOKIE = 200_000_000, "unisono_token"  # of one upload; who has the token
# The page's script is compiled in the browser, and its elements have styles of their own.
POLICY = (
    b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    b"frame-ancestors 'none'; base-uri 'self'; form-action 'self'"
)
# Path of a view -> how it is made, its name, the classes of the models that it shows.
VIEWS: dict[str, tuple[View, str, set[str]]] = {
    "/": (runs_view, "Runs", set()),
    "/run": (run_view, "", set()),
    "/code": (code_view, "Code", {"LitOccupationCoder"}),
    "/search": (search_view, "Search", {"LitRetriever", "LitRanker"}),
    "/language": (language_view, "Language", {"LitCausalLM"}),
    "/lens": (lens_view, "Lens", {"LitConsistencyLens"}),
    "/errors": (errors_view, "Errors", set()),
}


def page(shelf: Shelf) -> None:
    """Builds the page of one visitor."""
    ui.add_css(Path(__file__).parent / "page.css")
    runs, kinds = shelf.runs().values(), {model.kind for model in shelf.models().values()}
    fits = {"/": bool(runs), "/errors": any((run / ERRORS).exists() for run in runs)}
    with ui.header(fixed=False):
        words("strong", "Unisono")
        words("small", str(shelf.place))
        with ui.element("nav").props("aria-label=views"):
            for path, (_, name, shown) in VIEWS.items():
                if shown & kinds or fits.get(path):
                    ui.link(name, path)
    ui.sub_pages({path: make for path, (make, *_) in VIEWS.items()}, data={"shelf": shelf})


class Guard:
    """Answers the page's own requests alone, of whoever brings the token ("": of everybody) in the
    address at first, then in a cookie; the browser fetches nothing from elsewhere."""

    def __init__(self, app: Any, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers one request."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        asked = HTTPConnection(scope)
        origin, given = asked.headers.get("origin"), asked.query_params.get("token", "")
        kept, token = asked.cookies.get(COOKIE, "").encode(), self.token.encode()
        brings_nothing = scope.get("method", "GET") in ("GET", "HEAD")
        size = asked.headers.get("content-length", "0" if brings_nothing else "")
        answer: Response | None = None
        if origin is not None and origin.partition("://")[2] != asked.headers.get("host"):
            answer = PlainTextResponse(f"A page of {origin} may not ask this one.", 403)
        elif not (size.isdecimal() and int(size) <= MOST_BYTES):
            answer = PlainTextResponse(f"An upload says its length: at most {MOST_BYTES:,}.", 413)
        elif token and compare_digest(given.encode(), token):
            answer = RedirectResponse("/" + scope["path"].lstrip("/"))  # "//name" is elsewhere
            answer.set_cookie(COOKIE, given, httponly=True, samesite="strict")
        elif token and not compare_digest(kept, token):
            answer = PlainTextResponse("Open the address with the token that was printed.", 401)

        async def send_with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", POLICY)
                message["headers"] = [*message.get("headers", ()), policy]
            await send(message)

        await (answer or self.app)(scope, receive, send_with_policy)

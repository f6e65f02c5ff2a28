"""The command `unisono show`: a page on runs and models for this machine's browser."""

import getpass
import secrets
import socket
import sys
import tempfile
from http.cookies import SimpleCookie
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lit_models.errors import UsageError
from lit_models.page.shelf import Shelf

LOOPBACK = ("127.0.0.1", "localhost")
MOST_BYTES = 200_000_000  # of one upload
COOKIE = "unisono_token"
# Its script is compiled in the browser, and styles stand in elements; nothing comes from elsewhere.
POLICY = (
    b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    b"frame-ancestors 'none'; base-uri 'self'; form-action 'self'"
)


def show(
    place: Path = Path("runs"),
    *,
    also: list[Path] | None = None,
    port: int = 8080,
    host: str = LOOPBACK[0],
    open: bool = False,
) -> int:
    """Serve a page on runs and models: curves, proofs, codes of titles, search, texts, readings.

    Args:
        place: a run folder, a folder of runs, an exported folder or a checkpoint.
        also: a file or folder that may be read besides, such as a run's data; may be repeated.
        port: where the page is served.
        host: the machine's own address lets others in, with a token.
        open: open a browser.

    Raises:
        UsageError: the page's extra is missing, a place holds nothing, or the port is taken.
    """
    if find_spec("nicegui") is None:
        raise UsageError("`unisono show` needs NiceGUI; install it: pip install 'unisono[page]'")

    def build(*arguments: Any) -> Any:
        from lit_models.cli import built_part  # with torch, which the page starts without

        return built_part(*arguments)

    shelf = Shelf(Path(place), [Path(path) for path in also or ()], build)
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise UsageError(
                f"{host}:{port} cannot be served ({error.strerror}); choose another --port."
            ) from error
    is_local = host in LOOPBACK
    token = "" if is_local else secrets.token_urlsafe(16)
    with tempfile.TemporaryDirectory(prefix="unisono-page-") as folder:
        shelf.uploads = Path(folder)
        tempfile.tempdir = folder  # where parts of an upload that is under way are kept
        from nicegui import app, ui

        from lit_models.page.views import page

        address = f"http://{host}:{port}/" + (f"?token={token}" if token else "")
        print(f"page: {address}   (Ctrl+C ends it)")
        if is_local:
            name = f"{getpass.getuser()}@{socket.gethostname()}"
            print(f"from another machine: ssh -L {port}:{host}:{port} {name}")
        sys.stdout.flush()
        app.add_middleware(Guard, hosts=LOOPBACK if is_local else (), token=token)
        options: dict[str, Any] = {"dark": None, "language": "en-US", "title": "Unisono"}
        options |= {"reload": False, "show_welcome_message": False, "tailwind": False}
        ui.run(lambda: page(shelf), host=host, port=port, show=open, **options)
    return 0


class Guard:
    """Answers this page's own requests alone: the browser's other pages are refused, uploads that
    are too large too, and nothing may be fetched from elsewhere.

    Args:
        app: an ASGI application.
        hosts: names by which it may be asked; none allows all.
        token: of whoever may see the page; "" lets everybody in.
    """

    def __init__(self, app: Any, hosts: tuple[str, ...], token: str) -> None:
        self.app, self.hosts, self.token = app, hosts, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers one request."""
        from starlette.responses import PlainTextResponse, RedirectResponse, Response

        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        headers = {
            name.decode().lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        query = parse_qs(scope["query_string"].decode("latin-1"))
        refusal = self._refusal(scope, headers)
        given = (query.get("token") or [""])[0]
        if refusal is None and given and secrets.compare_digest(given, self.token):
            answer: Response = RedirectResponse(scope["path"])
            answer.set_cookie(COOKIE, given, httponly=True, samesite="strict")
            return await answer(scope, receive, send)
        if refusal is None and self.token:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
            if cookie is None or not secrets.compare_digest(cookie.value, self.token):
                refusal = 401, "Open the address that `unisono show` printed, with its token."
        if refusal is not None:
            answer = PlainTextResponse(refusal[1], refusal[0])
            return await answer(scope, receive, send)

        async def send_with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", POLICY)
                message["headers"] = [*message.get("headers", ()), policy]
            await send(message)

        await self.app(scope, receive, send_with_policy)

    def _refusal(self, scope: Any, headers: dict[str, str]) -> tuple[int, str] | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.hosts and urlsplit(f"//{host}").hostname not in self.hosts:
            return 400, f"This page is not served as {host}."
        if origin is not None and urlsplit(origin).netloc != host:
            return 403, f"A page of {origin} may not ask this one."
        if scope.get("method") == "POST" and "content-length" not in headers:
            return 411, "An upload must say its length."
        if int(headers.get("content-length", 0)) > MOST_BYTES:
            return 413, f"A file may have at most {MOST_BYTES / 1e6:,.0f} MB."
        return None

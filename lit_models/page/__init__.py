"""The command `unisono show`: a page on runs and models for a browser."""

import secrets
import socket
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lit_models.errors import UsageError
from lit_models.page.shelf import Shelf

LOOPBACK = ("127.0.0.1", "localhost")


def show(
    place: Path = Path("runs"),
    *,
    also: list[Path] | None = None,
    port: int = 8080,
    host: str = LOOPBACK[0],
    open: bool = False,
) -> None:
    """Serve a page on runs and models: curves, proofs, codes of titles, search, texts, lens.

    Args:
        place: a run folder, a folder of runs, an exported folder or a checkpoint.
        also: another file or folder that the page may read, such as a run's data; repeatable.
        port: port of the page.
        host: another address of this machine lets other machines in, with a token.
        open: open a browser.
    """
    if find_spec("nicegui") is None:
        raise UsageError("`unisono show` needs NiceGUI; install it: pip install 'unisono[page]'")
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise UsageError(f"{host}:{port}: {error.strerror}; choose another --port.") from error
    shelf = Shelf(place, also or ())
    token = "" if host in LOOPBACK else secrets.token_urlsafe(16)
    with tempfile.TemporaryDirectory(prefix="unisono-page-") as folder:
        shelf.uploads = Path(folder)
        tempfile.tempdir = folder  # for unfinished uploads
        from nicegui import app, ui
        from starlette.middleware.trustedhost import TrustedHostMiddleware

        from lit_models.page.views import Guard, page

        print(f"page: http://{host}:{port}/{f'?token={token}' * bool(token)}  (Ctrl+C ends it)")
        app.add_middleware(Guard, token=token)
        if not token:
            # Refuse foreign host names that lead here: their pages could read this one.
            app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK)
            there = socket.gethostname()
            print(f"from elsewhere: ssh -L {port}:{host}:{port} {there}", flush=True)
        # Load torch after the start: the page is served at once, and models answer later.
        app.on_startup(lambda: shelf.compute(import_module, "lit_models.cli"))
        options: dict[str, Any] = {"dark": None, "language": "en-US", "title": "Unisono"}
        options |= {"reconnect_timeout": 30.0}  # loading torch blocks the page for seconds
        options |= {"reload": False, "show_welcome_message": False, "tailwind": False}
        ui.run(lambda: page(shelf), host=host, port=port, show=open, **options)

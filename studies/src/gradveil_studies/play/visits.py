"""Who may speak to the playground: its own page alone, and no more bytes of uploads than it has room for."""

from collections.abc import Awaitable, Callable
from typing import Any

HOSTS = ("127.0.0.1", "localhost")
MOST = 100 * 2**20  # bytes that all uploads of a run may have together
App = Callable[[Any, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


class Visits:
    """Turns away what comes under another host (a name that was bound to this machine) or from another page."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.left = MOST

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        heads = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope.get("headers", ())}
        if not _is_own(heads):
            await _refuse(scope, receive, send, 403, "This page is for its own machine and for itself alone.")
            return

        async def counted() -> Any:
            message = await receive()
            self.left -= len(message.get("body", b""))
            return message if self.left >= 0 else {"type": "http.disconnect"}

        uploads = "upload" in scope["path"]
        if uploads and _size(heads) > self.left:
            await _refuse(scope, receive, send, 413, "There is no more room for uploads: start the playground again.")
            return
        await self.app(scope, counted if uploads else receive, send)


def _is_own(heads: dict[str, str]) -> bool:
    """Whether a request was sent to this machine's own name, by the page itself or by no page."""
    host = heads.get("host", "")
    origin = heads.get("origin")
    return (
        host.partition(":")[0] in HOSTS
        and origin in (None, f"http://{host}")
        and heads.get("sec-fetch-site", "none") in ("none", "same-origin")
    )


def _size(heads: dict[str, str]) -> int:
    text = heads.get("content-length", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else MOST + 1


async def _refuse(scope: Any, receive: Any, send: Any, code: int, why: str) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
        return
    heads = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": code, "headers": heads})
    await send({"type": "http.response.body", "body": why.encode()})

"""Which requests reach a route: ASGI middleware in front of all routes.

A request passes if its Host names this machine, if it carries the token in its cookie and, for a POST, if its origin is
the page itself. The guard refuses every other request. The only path that it treats apart is the front page, which
takes the token from the link.
"""

from __future__ import annotations

import asyncio
import hmac
import sys
import traceback
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from levelhead.page import bodies
from levelhead.page.responses import check_headers, error, home

TARGET = 2_048  # bytes of path and query
HEAD = 16_384  # bytes of names and values of headers

_FRAMES = 6  # of a traceback: the last ones are ours, those before are the web server's

_ENTER = "Paste the link that levelhead page printed into the address bar: it carries the token"
_PAGE_ONLY = "Only the page itself may ask for this."


class Guard:
    def __init__(self, app: ASGIApp, *, port: int, token: str) -> None:
        self._app = app
        self._hosts = frozenset(f"{name}:{port}".encode() for name in ("127.0.0.1", "localhost", "[::1]"))
        # Browsers send a cookie to every port of a host. With the port in its name, two pages keep theirs apart.
        self._cookie = f"levelhead-{port}"
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def checked_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                check_headers(message["headers"])
                started = True
            await send(message)

        try:
            await self._serve(scope, receive, checked_send)
            return
        except HTTPException as refusal:
            response = error(refusal.status_code, refusal.detail)
        except asyncio.CancelledError:
            response = error(503, "The server is ending.")
        except Exception as failure:  # the server goes on; the developer reads the terminal
            traceback.print_exc(limit=-_FRAMES, file=sys.stderr)
            response = error(500, f"The server failed with {type(failure).__name__}.")
        if not started:
            response.headers["connection"] = "close"  # the server does not wait for the rest of the request
            await response(scope, receive, checked_send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._check_head(scope)
        if self._takes_token(scope):
            await home(f"{self._cookie}={self._token}")(scope, receive, send)
            return
        self._check_cookie(scope)
        length = int(_single(scope, b"content-length") or 0)  # h11 has checked that it is a number
        if scope["method"] == "POST":
            _check_origin(scope)
            waits = _single(scope, b"expect") is not None
            receive = bodies.replay(await bodies.read(receive, length, waits=waits))
        elif length or _all(scope, b"transfer-encoding"):
            raise HTTPException(400, f"Expected no body with {scope['method']}.")
        await self._app(scope, receive, send)

    def _check_head(self, scope: Scope) -> None:
        """Refuses foreign host names (DNS rebinding), unused methods and long heads."""
        method, size = scope["method"], sum(len(name) + len(value) for name, value in scope["headers"])
        _require(_single(scope, b"host") in self._hosts, 403, "This page answers 127.0.0.1 and localhost alone.")
        _require(method in ("GET", "HEAD", "POST"), 405, f"{method} is not served here.")
        target = len(scope["raw_path"]) + len(scope["query_string"])
        _require(target <= TARGET, 414, f"Expected an address of at most {TARGET} bytes.")
        _require(size <= HEAD, 431, f"Expected headers of at most {HEAD} bytes.")

    def _takes_token(self, scope: Scope) -> bool:
        """Whether the request opens the link. Refuses a wrong token."""
        if scope["path"] != "/" or scope["method"] == "POST":
            return False
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        tokens = [value for name, value in pairs if name == "token"]
        valid = all(self._is_token(token.encode()) for token in tokens)
        _require(valid, 403, f"The token in the link is another server's. {_ENTER}.")
        return bool(tokens)

    def _check_cookie(self, scope: Scope) -> None:
        """Refuses a request without the token, or from another site's page."""
        pairs = [pair.strip().partition(b"=") for line in _all(scope, b"cookie") for pair in line.split(b";")]
        valid = any(name == self._cookie.encode() and self._is_token(value) for name, _, value in pairs)
        _require(valid, 403, f"{_ENTER}.")
        if scope["path"] != "/":  # any site may link to the front page; "none" is the address bar
            _require(_single(scope, b"sec-fetch-site") in (None, b"same-origin", b"none"), 403, _PAGE_ONLY)

    def _is_token(self, token: bytes) -> bool:
        return hmac.compare_digest(token, self._token.encode())


def _check_origin(scope: Scope) -> None:
    """Refuses a POST of another site, a form, a file or a sandboxed frame."""
    own = _single(scope, b"origin") == b"http://" + (_single(scope, b"host") or b"")
    _require(own and _single(scope, b"sec-fetch-site") in (None, b"same-origin"), 403, _PAGE_ONLY)
    kind, _, options = (_single(scope, b"content-type") or b"").partition(b";")
    _require(kind.strip().lower() == b"application/json", 415, "Expected Content-Type: application/json.")
    _require(options.strip().lower() in (b"", b"charset=utf-8"), 415, "Expected JSON in UTF-8.")


def _require(accepted: bool, status: int, message: str) -> None:
    if not accepted:
        raise HTTPException(status, message)


def _all(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _single(scope: Scope, name: bytes) -> bytes | None:
    """The header's value, or None. Refuses several headers of that name."""
    values = _all(scope, name)
    _require(len(values) < 2, 400, f"Expected one {name.decode()} header, got {len(values)}.")
    return values[0] if values else None

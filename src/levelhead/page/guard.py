"""Who may ask what: the door of the page, in front of every route.

A request gets through if it is addressed to this machine by name, carries the token's cookie, and,
where it asks for work, comes from the page itself. Everything else is refused here, before a route
sees it. Pure ASGI; it knows no route but the front page, where the token is handed in.
"""

from __future__ import annotations

import asyncio
import hmac
import sys
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

from levelhead.page.headers import HOME, Headers, encoded, sealed

__all__ = ["Guard"]

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

BODY = 1_000_000  # bytes
BODY_SECONDS = 10.0  # for all of a body
TARGET = 2_048  # bytes of path and query
HEAD = 16_384  # bytes of names and values of headers
INSIDE = 256  # requests at once: a browser asks six, and leaves behind what sliders moved past
# A body that is too large is thrown away up to here, so that its sender lives to read the answer.
_DRAINED, _DRAIN_SECONDS = 16 * BODY, 1.0

_FRAMES = 6  # of a traceback: the last ones are ours, those before are the web server's

_ENTER = "Paste the link that levelhead page printed into the address bar: it carries the token"


class RefusedError(Exception):
    """A request that no route will see."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Request:
    """The head of a request, read once."""

    def __init__(self, scope: Message) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.target = len(scope["raw_path"]) + len(self.query)
        self._headers: Headers = scope["headers"]
        self.head = sum(len(name) + len(value) for name, value in self._headers)

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self._headers if key == name]

    def one(self, name: bytes) -> bytes | None:
        """The header's value; None if there is none, and refused if there are several."""
        values = self.all(name)
        if len(values) > 1:
            raise RefusedError(400, f"Expected one {name.decode()} header, got {len(values)}.")
        return values[0] if values else None

    @property
    def has_body(self) -> bool:
        length = self.one(b"content-length")
        return bool(self.all(b"transfer-encoding")) or length not in (None, b"0")


class Guard:
    def __init__(self, app: Application, *, port: int, token: str) -> None:
        self._app = app
        names = ("127.0.0.1", "localhost", "[::1]")
        self._hosts = frozenset(f"{name}:{port}".encode() for name in names)
        # Cookies know no ports: with the port in its name, two pages do not take each other's.
        self._cookie = f"levelhead-{port}".encode()
        self._token = token.encode()
        self._inside = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"expected http, got {scope['type']}")
        answer = _Answer(send)
        if self._inside >= INSIDE:
            await answer.refuse(503, "Too many requests at once. Try again in a moment.")
            return
        self._inside += 1
        try:
            await self._serve(_Request(scope), scope, receive, answer)
        except RefusedError as refusal:
            await answer.refuse(refusal.status, str(refusal))
        except asyncio.CancelledError:
            await answer.refuse(503, "The server is ending.")
        except Exception as error:  # the page goes on; the terminal tells the developer
            traceback.print_exc(limit=-_FRAMES, file=sys.stderr)
            await answer.refuse(500, f"The server failed with {type(error).__name__}.")
        finally:
            self._inside -= 1

    async def _serve(self, request: _Request, scope: Message, receive: Receive, answer: _Answer) -> None:
        host = self._addressed(request)
        if self._hands_in_token(request):
            await answer.redirect_home(self._cookie + b"=" + self._token)
            return
        self._recognised(request)
        if request.method == "POST":
            _from_the_page(request, host)
            receive = _replayed(await _body(request, receive))
        elif request.has_body:
            raise RefusedError(400, f"Expected no body with {request.method}.")
        await self._app(scope, receive, answer.send)

    def _addressed(self, request: _Request) -> bytes:
        """Refuses other hosts' names (DNS rebinding), other methods and endless heads."""
        host = request.one(b"host")
        if host is None or host not in self._hosts:
            raise RefusedError(403, "This page answers 127.0.0.1 and localhost alone.")
        if request.method not in ("GET", "HEAD", "POST"):
            raise RefusedError(405, f"{request.method} is not served here.")
        if request.target > TARGET:
            raise RefusedError(414, f"Expected an address of at most {TARGET} bytes.")
        if request.head > HEAD:
            raise RefusedError(431, f"Expected headers of at most {HEAD} bytes.")
        return host

    def _hands_in_token(self, request: _Request) -> bool:
        if request.path != "/" or request.method == "POST":
            return False
        pairs = parse_qsl(request.query.decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in pairs if name == "token"]
        if not given:
            return False
        if not all(hmac.compare_digest(value.encode(), self._token) for value in given):
            raise RefusedError(403, f"The token in the link is another server's. {_ENTER}.")
        return True

    def _recognised(self, request: _Request) -> None:
        """The cookie is ours, and no other site's page is asking with it."""
        pairs = [pair.strip().partition(b"=") for line in request.all(b"cookie") for pair in line.split(b";")]
        given = [value for name, _, value in pairs if name == self._cookie]
        if not any(hmac.compare_digest(value, self._token) for value in given):
            raise RefusedError(403, f"{_ENTER}.")
        site = request.one(b"sec-fetch-site")
        # "none" is a person at the address bar. The front page may be linked to from anywhere.
        if request.path != "/" and site not in (None, b"same-origin", b"none"):
            raise RefusedError(403, "Only the page itself may ask for this.")


def _from_the_page(request: _Request, host: bytes) -> None:
    """Refuses work for anybody but the page: another site, a form, a file, a sandbox."""
    if request.one(b"origin") != b"http://" + host:
        raise RefusedError(403, "Only the page itself may ask for this.")
    if request.one(b"sec-fetch-site") not in (None, b"same-origin"):
        raise RefusedError(403, "Only the page itself may ask for this.")
    kind, _, options = (request.one(b"content-type") or b"").partition(b";")
    if kind.strip().lower() != b"application/json":
        raise RefusedError(415, "Expected Content-Type: application/json.")
    if options.strip().lower() not in (b"", b"charset=utf-8"):
        raise RefusedError(415, "Expected JSON in UTF-8.")


# ---- bodies -----------------------------------------------------------------


async def _body(request: _Request, receive: Receive) -> bytes:
    """All of it, if it is short and arrives in time. Lengths are counted, never believed."""
    length = request.one(b"content-length") or b"0"
    if not length.isdigit():
        raise RefusedError(400, "Expected a whole number as Content-Length.")
    too_large = RefusedError(413, f"Expected a body of at most {BODY} bytes.")
    if int(length) > BODY:
        if request.one(b"expect") is None:  # else its sender has not begun
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_read(receive), _DRAIN_SECONDS)
        raise too_large
    try:
        body = await asyncio.wait_for(_read(receive), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise RefusedError(408, f"Expected the body within {BODY_SECONDS:g} seconds.") from None
    if body is None:
        raise too_large
    return body


async def _read(receive: Receive) -> bytes | None:
    """The body, or None if it is too large; nothing is kept of such a one."""
    body, size = bytearray(), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RefusedError(400, "The body was cut off.")
        piece = message.get("body", b"")
        size += len(piece)
        if size <= BODY:
            body += piece
        else:
            body.clear()
        if size > _DRAINED or not message.get("more_body", False):
            return bytes(body) if size <= BODY else None


def _replayed(body: bytes) -> Receive:
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else {"type": "http.disconnect"}

    return receive


# ---- answers ----------------------------------------------------------------


class _Answer:
    """Sends one response, with the headers that all of them carry."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": sealed(message["headers"])}
            self._started = True
        await self._send(message)

    async def refuse(self, status: int, message: str) -> None:
        """Says why, and hangs up: what else comes on this connection is not waited for."""
        if not self._started:
            await self._whole(status, encoded({"error": message}), [(b"connection", b"close")])

    async def redirect_home(self, cookie: bytes) -> None:
        options = b"; Path=/; HttpOnly; SameSite=Strict"
        headers = [(b"location", HOME), (b"set-cookie", cookie + options)]
        await self._whole(303, b"{}", headers)

    async def _whole(self, status: int, body: bytes, headers: Headers) -> None:
        kind = (b"content-type", b"application/json")
        length = (b"content-length", str(len(body)).encode())
        start = {"type": "http.response.start", "status": status}
        await self.send({**start, "headers": [kind, length, *headers]})
        await self.send({"type": "http.response.body", "body": body})

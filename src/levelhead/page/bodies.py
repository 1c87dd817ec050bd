"""The body of a request: bounded in size and in time, and complete before a route starts."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

BODY = 1_000_000  # bytes
BODY_SECONDS = 10.0  # for the whole body
# The server reads and discards up to this much of a body that is too large, so that the client can read the answer.
_DISCARDED, _DISCARD_SECONDS = 16 * BODY, 1.0


async def read(receive: Receive, length: int, *, waits: bool) -> bytes:
    """The whole body. `length` is the announced one; `waits`: the client sends nothing before it gets a 100."""
    announced_too_large = length > BODY
    body = None
    if not (announced_too_large and waits):
        try:
            body = await asyncio.wait_for(_counted(receive), _DISCARD_SECONDS if announced_too_large else BODY_SECONDS)
        except asyncio.TimeoutError:
            if not announced_too_large:
                raise HTTPException(408, f"Expected the body within {BODY_SECONDS:g} seconds.") from None
    if body is None:
        raise HTTPException(413, f"Expected a body of at most {BODY} bytes.")
    return body


async def _counted(receive: Receive) -> bytes | None:
    """The body, or None if it is too large, whatever length was announced."""
    body, size = bytearray(), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HTTPException(400, "The body was cut off.")
        piece = message.get("body", b"")
        size += len(piece)
        if size <= BODY:
            body += piece
        else:
            body.clear()
        if size > _DISCARDED or not message.get("more_body", False):
            return bytes(body) if size <= BODY else None


def replay(body: bytes) -> Receive:
    """The `receive` of a request whose body has been read."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else {"type": "http.disconnect"}

    return receive

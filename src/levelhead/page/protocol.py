"""The connection: uvicorn's HTTP/1.1 with deadlines, a bound on connections, and our headers.

uvicorn waits for the rest of a request's head for ever and answers what it cannot read by itself.
Here a head has seconds, a reader that stops reading is hung up on, and every such answer carries
the headers of all others. What a request may ask is the guard's business.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from http import HTTPStatus

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from levelhead.errors import LevelheadValueError, expected
from levelhead.page.guard import HEAD, Application
from levelhead.page.headers import encoded, sealed

__all__ = ["ADDRESS", "Server", "bound"]

ADDRESS = "127.0.0.1"
HEAD_SECONDS = 10.0  # from the connection, or from a request's first byte, to its last header
READ_SECONDS = 30.0  # a client may leave an answer unread for that long
CONNECTIONS = 128
_IDLE_SECONDS = 5
_ENDING_SECONDS = 3  # for answers on their way when the server is told to end


def bound(port: int) -> socket.socket:
    """A socket that listens on this machine's own address; port 0 is any that is free."""
    # TCP by name: only then does asyncio switch Nagle's algorithm off, which costs 40 ms an answer.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((ADDRESS, port))
        listener.listen(CONNECTIONS)
    except OSError as error:
        listener.close()
        wanted, given = "a port that is free", f"{port} ({error.strerror})"
        advice = "Leave --port out to take any that is"
        raise LevelheadValueError(expected("--port", wanted, given, advice)) from None
    return listener


class Server(uvicorn.Server):
    """Serves one application on one socket until it is told to end."""

    def __init__(self, app: Application, listener: socket.socket, ended: threading.Event) -> None:
        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,  # requests are never written down: the first one carries the token
            access_log=False,
            log_level="critical",  # what goes wrong with a request, the guard says
            proxy_headers=False,  # nobody stands in between who could speak for a client
            server_header=False,
            h11_max_incomplete_event_size=HEAD,  # while it comes; the guard counts what has come
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=_ENDING_SECONDS,
        )
        super().__init__(config)
        self._listener, self._ended = listener, ended

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Tells streams, which would never end of themselves, before it waits for answers."""
        self._ended.set()
        await super().shutdown(sockets)

    def serve_until_told(self) -> None:
        """Returns after Ctrl-C, or once `should_exit` is set."""
        try:
            self.run(sockets=[self._listener])
        except KeyboardInterrupt:  # uvicorn has ended in good order, and passes the signal on
            pass
        finally:
            self._listener.close()


class Protocol(H11Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = _Deadline(self.loop, HEAD_SECONDS, partial(self._refuse, 408))
        self._reader = _Deadline(self.loop, READ_SECONDS, transport.abort)
        self._head.start()
        if len(self.connections) > CONNECTIONS:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._head.start()
        else:  # the head is complete, or hopeless
            self._head.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head.stop()
        self._reader.stop()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reader.stop()

    def send_400_response(self, msg: str) -> None:
        """What h11 could not read. Without a Host the guard has no say, so it is refused here."""
        error = sys.exc_info()[1]
        hint = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(403 if "Host" in str(error) else hint)

    def _refuse(self, status: int) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            body = encoded({"error": f"{HTTPStatus(status).phrase}."})
            headers = sealed(
                [
                    (b"content-type", b"application/json"),
                    (b"content-length", str(len(body)).encode()),
                    (b"connection", b"close"),
                ]
            )
            start = h11.Response(status_code=status, headers=headers)
            for event in (start, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class _Deadline:
    """A timer that is started once, however often one asks, until it is stopped."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, then: Callable[[], None]) -> None:
        self._loop, self._seconds, self._then = loop, seconds, then
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._then)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

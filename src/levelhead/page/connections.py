"""Bounds on connections: how many are open, and how long a client may keep the server waiting.

uvicorn closes a connection that is idle between two requests. It waits without limit for the rest of a request's head
and for a client that does not read its answer. The listening socket therefore counts the connections that it accepts
and gives each a deadline. The deadline runs while the server waits for the client, not while it computes.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import TypeAlias

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from levelhead.errors import bad_value

ADDRESS = "127.0.0.1"
CONNECTIONS = 128
HEAD_SECONDS = 10.0  # from the connection to the end of the first request's head
READ_SECONDS = 30.0  # for reading a response and sending the next request's head

_Client: TypeAlias = tuple[str, int]  # address and port


class Connection:
    """An accepted connection with a deadline."""

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self._timer: asyncio.TimerHandle | None = None
        self.expire_in(HEAD_SECONDS)

    @property
    def is_open(self) -> bool:
        return self.socket.fileno() != -1

    def expire_in(self, seconds: float) -> None:
        self.keep()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._shut_down)

    def keep(self) -> None:
        """Removes the deadline."""
        if self._timer is not None:
            self._timer.cancel()

    def _shut_down(self) -> None:
        with suppress(OSError):  # the client has closed it in the meantime
            self.socket.shutdown(socket.SHUT_RDWR)


class Listener(socket.socket):
    """Listens on this machine's own address. asyncio calls `accept` for every connection."""

    def __init__(self, port: int) -> None:
        """Port 0 is any free port."""
        # asyncio disables Nagle's algorithm, which delays an answer by 40 ms, only if TCP is given explicitly.
        super().__init__(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.connections: dict[_Client, Connection] = {}  # closed ones until the next one is accepted
        try:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind((ADDRESS, port))
            self.listen(CONNECTIONS)
        except OSError as error:
            self.close()
            advice = "Leave --port out to take any that is"
            raise bad_value("--port", "a port that is free", f"{port} ({error.strerror})", advice) from None

    def accept(self) -> tuple[socket.socket, _Client]:
        """The next connection; closes those that are too many."""
        while True:
            accepted, client = super().accept()
            self.connections = {key: each for key, each in self.connections.items() if each.is_open}
            if len(self.connections) < CONNECTIONS:
                self.connections[client] = Connection(accepted)
                return accepted, client
            accepted.close()


class Deadlines:
    """ASGI middleware: sets the deadline of a request's connection."""

    def __init__(self, app: ASGIApp, listener: Listener) -> None:
        self._app, self._listener = app, listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = self._listener.connections[scope["client"]]
        complete = False

        async def send_in_time(message: Message) -> None:
            nonlocal complete
            connection.expire_in(READ_SECONDS)
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            if not complete:
                connection.keep()

        connection.keep()
        try:
            await self._app(scope, receive, send_in_time)
        finally:
            if not complete:  # else the next request may have started, and the deadline belongs to it
                connection.expire_in(READ_SECONDS)

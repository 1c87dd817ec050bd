"""The server of the page: uvicorn on this machine's own address, with a new token at every start."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from levelhead.page.assets import assets
from levelhead.page.computing import Computing
from levelhead.page.connections import ADDRESS, CONNECTIONS, Deadlines, Listener
from levelhead.page.follow import Follower
from levelhead.page.guard import HEAD, Guard
from levelhead.page.responses import HEADERS
from levelhead.page.routes import Routes

# Requests at once; more than connections, since a figure that no client waits for any more still counts.
REQUESTS = 2 * CONNECTIONS


@dataclass(frozen=True)
class Page:
    """A page that is ready to be served."""

    server: uvicorn.Server
    listener: Listener
    url: str  # with the token
    computing: Computing

    def serve(self) -> None:
        """Returns after Ctrl-C, or when `server.should_exit` is set."""
        try:
            self.server.run(sockets=[self.listener])
        except KeyboardInterrupt:  # uvicorn has shut down in good order and raises the signal again
            pass
        finally:
            self.listener.close()
            self.computing.end()


def open_page(port: int = 0, *, run: Path | None = None) -> Page:
    """Binds the port and creates the token. Clients that connect before `serve` wait. `run` is the file to follow."""
    computing = Computing()
    follower = None if run is None else Follower(run)
    # Streams end only by themselves, so they check whether the server is ending.
    routes = Routes(assets(), computing, follower, ending=lambda: server.should_exit)
    listener = Listener(port)
    port = listener.getsockname()[1]
    token = secrets.token_urlsafe(32)  # 256 bits
    guard = Guard(routes.application(), port=port, token=token)
    config = uvicorn.Config(
        Deadlines(guard, listener),
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,  # the first request carries the token
        log_level="critical",  # the guard reports what fails in a request
        proxy_headers=False,
        server_header=False,
        headers=HEADERS,
        backlog=CONNECTIONS,
        limit_concurrency=REQUESTS,
        h11_max_incomplete_event_size=4 * HEAD,  # of a head that is incomplete; the guard measures complete ones
        timeout_keep_alive=5,
        timeout_graceful_shutdown=3,
    )
    server = uvicorn.Server(config)
    place = "" if run is None else "#heads"
    return Page(server, listener, f"http://{ADDRESS}:{port}/?token={token}{place}", computing)

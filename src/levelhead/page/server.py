"""The routes of the page: files, figures, a sentence, a measurement, a run.

A route reads its parameters, has the figure computed and sends JSON; it decides nothing else. Who
gets as far as a route is the guard's business, and no route ever touches the file system.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from levelhead.errors import LevelheadError
from levelhead.lab import figures
from levelhead.page import parameters
from levelhead.page.about import about
from levelhead.page.assets import INDEX, Asset, assets
from levelhead.page.computing import AbandonedError, Computing
from levelhead.page.follow import Follower, events
from levelhead.page.guard import Guard
from levelhead.page.headers import encoded
from levelhead.page.protocol import ADDRESS, Server, bound
from levelhead.runs.record import Run

__all__ = ["Page", "follower", "open_page"]

FOLLOWERS = 8  # streams at once


@dataclass(frozen=True)
class Page:
    """A page that is ready to be served."""

    server: Server
    url: str  # with the token
    computing: Computing

    def serve(self) -> None:
        """Until Ctrl-C."""
        try:
            self.server.serve_until_told()
        finally:
            self.computing.end()


def open_page(port: int = 0, *, run: Follower | None = None) -> Page:
    """Takes the port and a new token; whoever connects from now on waits until `serve`."""
    listener = bound(port)
    port = listener.getsockname()[1]
    token = secrets.token_urlsafe(32)  # 256 bits
    computing, ended = Computing(), threading.Event()
    routes = _Routes(assets(), computing, run, ended)
    guard = Guard(routes.application(), port=port, token=token)
    url = f"http://{ADDRESS}:{port}/?token={token}"
    return Page(Server(guard, listener, ended), url, computing)


def follower(path: Path) -> Follower:
    """Reads the run given by `--run`; a clear error if it is none."""

    def render(run: Run) -> dict[str, object]:
        found: dict[str, object] = figures.figure("heads", run=run).json()
        return found

    return Follower(path, render)


class _Routes:
    def __init__(
        self, files: Mapping[str, Asset], computing: Computing, run: Follower | None, ended: threading.Event
    ) -> None:
        self._files, self._computing, self._run, self._ended = files, computing, run, ended
        self._about = encoded(about(export=False, run=run is not None))
        self._followers = 0

    def application(self) -> Starlette:
        app = Starlette(
            routes=[
                Route("/", self.index),
                Route("/assets/{name}", self.asset),
                Route("/api/about", self.about),
                Route("/api/figure/{id}", self.figure),
                Route("/api/run/events", self.events),
                Route("/api/sentence", self.sentence, methods=["POST"]),
                Route("/api/speed", self.speed, methods=["POST"]),
            ],
            exception_handlers={HTTPException: _http_error, LevelheadError: _bad_request, Exception: _failure},
        )
        app.router.redirect_slashes = False  # it would build its target from the request
        return app

    async def index(self, request: Request) -> Response:
        return _file(self._files[INDEX])

    async def asset(self, request: Request) -> Response:
        found = self._files.get(request.path_params["name"])
        return _error(404, "There is no such file.") if found is None else _file(found)

    async def about(self, request: Request) -> Response:
        return _json(self._about)

    async def figure(self, request: Request) -> Response:
        id = request.path_params["id"]
        if id not in figures.IDS:
            return _error(404, f"There is no such figure. There are {', '.join(figures.IDS)}.")
        given = parameters.of_query(request.url.query)
        if id == "heads" and self._run is not None:
            return _json(self._run.now()[1])
        try:
            return _json(await self._computing.figure(id, given, request.is_disconnected))
        except AbandonedError:
            return _error(503, "Nobody waits for this figure any more.")

    async def sentence(self, request: Request) -> Response:
        asked = parameters.of_sentence(await request.body())
        return _json(await self._computing.live("sentence", **asked))

    async def speed(self, request: Request) -> Response:
        parameters.of_nothing(await request.body())
        if self._computing.live_is_busy:
            return _error(409, "A measurement or a sentence is being computed. Wait for its end.")
        return _json(await self._computing.live("speed", live=True))

    async def events(self, request: Request) -> Response:
        if self._run is None:
            return _error(404, "No run is followed. Start with: levelhead page --run FILE")
        if self._followers >= FOLLOWERS:
            return _error(503, f"{FOLLOWERS} pages follow this run already. Close one of them.")
        return StreamingResponse(self._followed(self._run), media_type="text/event-stream")

    async def _followed(self, run: Follower) -> AsyncIterator[bytes]:
        self._followers += 1
        try:
            async for event in events(run, self._ended):
                yield event
        finally:
            self._followers -= 1


def _file(asset: Asset) -> Response:
    return Response(asset.content, headers={"content-type": asset.kind})


def _json(content: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(content, status, headers, media_type="application/json")


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return _json(encoded({"error": message}), status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # of the router: no such path, or not with that method
    return _error(error.status_code, f"{error.detail}.", error.headers)


async def _bad_request(request: Request, error: Exception) -> Response:
    return _error(400, str(error))


async def _failure(request: Request, error: Exception) -> Response:
    # The guard, which sees the error next, writes the rest of it to stderr.
    return _error(500, f"The server failed with {type(error).__name__}: see its terminal.")

"""The routes of the page: files, figures, a sentence, a measurement, a run.

A route reads its parameters, has the figure computed and sends JSON. The guard decides which requests reach a route.
No route accesses the file system with a name from a request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from levelhead.errors import LevelheadError
from levelhead.lab import figures
from levelhead.page import parameters
from levelhead.page.about import about
from levelhead.page.assets import INDEX, Asset
from levelhead.page.computing import AbandonedError, Computing
from levelhead.page.encoding import encoded
from levelhead.page.follow import Follower, events
from levelhead.page.responses import error, json_response

FOLLOWERS = 8  # streams at once


class Routes:
    def __init__(
        self, files: Mapping[str, Asset], computing: Computing, run: Follower | None, ending: Callable[[], bool]
    ) -> None:
        self._files, self._computing, self._run, self._ending = files, computing, run, ending
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
        asset = self._files.get(request.path_params["name"])
        return error(404, "There is no such file.") if asset is None else _file(asset)

    async def about(self, request: Request) -> Response:
        return json_response(self._about)

    async def figure(self, request: Request) -> Response:
        id = request.path_params["id"]
        if id not in figures.IDS:
            return error(404, f"There is no such figure. There are {', '.join(figures.IDS)}.")
        options = parameters.of_query(request.url.query)
        if id == "heads" and self._run is not None:
            return json_response(self._run.now()[1])
        try:
            return json_response(await self._computing.figure(id, options, request.is_disconnected))
        except AbandonedError:
            return error(503, "The client has cancelled this request.")

    async def sentence(self, request: Request) -> Response:
        options = parameters.of_sentence(await request.body())
        return json_response(await self._computing.live("sentence", **options))

    async def speed(self, request: Request) -> Response:
        parameters.of_nothing(await request.body())
        if self._computing.live_is_busy:
            return error(409, "A measurement or a sentence is being computed. Wait for its end.")
        return json_response(await self._computing.live("speed", live=True))

    async def events(self, request: Request) -> Response:
        if self._run is None:
            return error(404, "No run is followed. Start with: levelhead page --run FILE")
        if self._followers >= FOLLOWERS:
            return error(503, f"{FOLLOWERS} pages follow this run already. Close one of them.")
        return StreamingResponse(self._stream(self._run), media_type="text/event-stream")

    async def _stream(self, run: Follower) -> AsyncIterator[bytes]:
        self._followers += 1
        try:
            async for event in events(run, self._ending):
                yield event
        finally:
            self._followers -= 1


def _file(asset: Asset) -> Response:
    return Response(asset.content, headers={"content-type": asset.kind})


async def _http_error(request: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, HTTPException)  # of the router: no such path, or not with that method
    return error(refusal.status_code, f"{refusal.detail}.", refusal.headers)


async def _bad_request(request: Request, failure: Exception) -> Response:
    return error(400, str(failure))


async def _failure(request: Request, failure: Exception) -> Response:
    # Starlette raises the exception again afterwards, and the guard prints its traceback.
    return error(500, f"The server failed with {type(failure).__name__}: see its terminal.")

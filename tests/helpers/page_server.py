"""A page on a real socket, for tests: the server in a thread, stub figures, raw requests.

Requests are raw bytes, because a hostile client may send any bytes. The figures are stubs, because these tests check
the server and not the lab.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from levelhead.errors import LevelheadValueError
from levelhead.lab import figures
from levelhead.lab.figure import Figure
from levelhead.page import assets, connections, server

IDS = ("logits", "attack", "online", "training", "sentence", "heads", "speed")
NEEDS: Mapping[str, tuple[str, ...]] = {
    "logits": ("d_k", "scale", "power", "keys", "seed"),
    "attack": ("d_k", "seed", "sigma", "rho", "growth", "cure", "cap"),
    "online": ("keys", "seed", "tile", "order"),
    "training": ("task", "width", "depth"),
    "sentence": (),
    "heads": (),
    "speed": (),
}
SECONDS = 20.0  # for anything a test waits for


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def parsed(raw: bytes) -> Reply:
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = [line.split(": ", 1) for line in lines]
    names = [name.lower() for name, _ in pairs]
    assert len(names) == len(set(names)), f"a header twice: {names}"
    return Reply(int(first.split()[1]), {name.lower(): value for name, value in pairs}, body)


@dataclass(frozen=True)
class Running:
    """A page that is being served, and a client of it."""

    page: server.Page

    @property
    def port(self) -> int:
        return int(urlsplit(self.page.url).port or 0)

    def open_connections(self) -> list[connections.Connection]:
        return [connection for connection in self.page.listener.connections.values() if connection.is_open]

    @property
    def token(self) -> str:
        return parse_qs(urlsplit(self.page.url).query)["token"][0]

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def cookie(self) -> str:
        return f"levelhead-{self.port}={self.token}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)

    def raw(self, request: bytes) -> Reply:
        """Sends these bytes; returns the reply once the server has closed the connection."""
        with self.connect() as connection:
            connection.sendall(request)
            return parsed(everything(connection))

    def ask(
        self, method: str, target: str, headers: Mapping[str, str | None] | None = None, body: bytes = b""
    ) -> Reply:
        """A valid request, changed by `headers`; None removes one."""
        sent: dict[str, str | None] = {"Host": self.host, "Cookie": self.cookie}
        if method == "POST":
            sent |= {"Origin": f"http://{self.host}", "Content-Type": "application/json"}
            sent |= {"Content-Length": str(len(body))}
        sent |= {**(headers or {}), "Connection": "close"}
        lines = [f"{name}: {value}\r\n" for name, value in sent.items() if value is not None]
        head = f"{method} {target} HTTP/1.1\r\n{''.join(lines)}\r\n"
        return self.raw(head.encode("latin-1") + body)

    def get(self, target: str, **headers: str | None) -> Reply:
        return self.ask("GET", target, {k.replace("_", "-"): v for k, v in headers.items()})

    def post(self, target: str, value: Any = None, **headers: str | None) -> Reply:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        named = {k.replace("_", "-"): v for k, v in headers.items()}
        return self.ask("POST", target, named, body)

    def is_alive(self) -> bool:
        return self.get("/api/about").status == 200


def one_reply(connection: socket.socket) -> Reply:
    """The next reply on a connection that stays open."""
    raw = b""
    while True:
        if b"\r\n\r\n" in raw:
            reply = parsed(raw)
            if len(reply.body) >= int(reply.headers["content-length"]):
                return reply
        piece = connection.recv(65536)
        assert piece, "closed in the middle of a reply"
        raw += piece


def everything(connection: socket.socket) -> bytes:
    pieces = []
    while piece := connection.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


@contextmanager
def serving(port: int = 0, *, run: Path | None = None) -> Iterator[Running]:
    page = server.open_page(port, run=run)
    thread = threading.Thread(target=page.serve)
    thread.start()
    try:
        yield Running(page)
    finally:
        page.server.should_exit = True
        thread.join(SECONDS)
        assert not thread.is_alive()


calls: list[tuple[str, dict[str, Any]]] = []  # of the stub, in order


def stub(id: str, **parameters: Any) -> Figure:
    """A figure that returns its parameters; `seed=13` fails, and `d_k=0` is refused."""
    calls.append((id, dict(parameters)))
    if parameters.get("seed") == 13:
        raise RuntimeError("a secret of the server")
    if parameters.get("d_k") == 0:
        raise LevelheadValueError("d_k: expected 1 to 4096, got 0. Choose another.")
    if "run" in parameters:
        run = parameters.pop("run")
        parameters |= {"model": run.model, "steps": len(run.snapshots)}
    return Figure(id, f"The figure {id}", (), f"lh.lab.figure({id!r})", extra=parameters)


# Fixtures have other names than their functions: tests import the functions and request the names.


@pytest.fixture(scope="module", name="stubbed")
def stubbed_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Stub figures and a small page; returns the directory of its files."""
    static = tmp_path_factory.mktemp("static")
    (static / "index.html").write_text(
        "<!doctype html>\n<html><head><title>√d</title>\n"
        '<link rel="stylesheet" href="/assets/page.css">\n'
        '<script type="module" src="/assets/main.js"></script>\n'
        '</head><body><p id="said"></p></body></html>\n'
    )
    (static / "page.css").write_text("p { color: teal }\n")
    (static / "main.js").write_text('import { data } from "./source.js";\nexport { data };\n')
    (static / "source.js").write_text("export const data = 1;\n")
    (static / "notes.txt").write_text("not an asset")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assets, "STATIC", static)
        stubs: dict[str, Any] = {"IDS": IDS, "PANELS": IDS, "NEEDS": NEEDS, "figure": stub}
        for name, value in stubs.items():
            patch.setattr(figures, name, value, raising=False)
        patch.setattr(assets, "CHAPTERS", ())  # their scenes are files of the real page
        yield static


@pytest.fixture(scope="module", name="page")
def served_page(stubbed: Path) -> Iterator[Running]:
    with serving() as running:
        yield running

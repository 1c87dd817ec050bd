"""The server of the page: the answers of each route to valid and invalid requests."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import levelhead as lh
import page_server
import runs
from levelhead.lab import figures
from levelhead.lab.figure import Figure
from levelhead.page import assets, routes
from levelhead.page.follow import Follower
from levelhead.runs.jsonl import JSONL
from levelhead.runs.record import Run, Snapshot
from page_server import SECONDS, Running, served_page, serving, stubbed_page  # noqa: F401

# ---- files


def test_the_link_leads_to_the_page_and_leaves_the_address_clean(page: Running) -> None:
    reply = page.get(f"/?token={page.token}", Cookie=None)
    assert (reply.status, reply.headers["location"]) == (303, "/")
    front = page.get("/", Cookie=reply.headers["set-cookie"].split(";")[0])
    assert front.status == 200
    assert front.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>√d</title>" in front.body.decode()


def test_assets_are_the_files_of_the_page_and_plotly(page: Running, stubbed: Path) -> None:
    kinds = {"main.js": "text/javascript; charset=utf-8", "page.css": "text/css; charset=utf-8"}
    for name, kind in kinds.items():
        reply = page.get(f"/assets/{name}")
        assert (reply.status, reply.headers["content-type"]) == (200, kind)
        assert reply.body == (stubbed / name).read_bytes()
    plotly = page.get("/assets/plotly.js")
    assert plotly.status == 200 and plotly.body.startswith(b"/**\n* plotly.js v")
    own = {"index.html", "main.js", "source.js", "page.css"}
    made = {
        "bench-data.js",
        "bench-words-en.js",
        "bench-words-hi-Latn.js",
        "cards-data.js",
        "declared.js",
        "plotly.js",
        "scenes.css",
        "story-data.js",
        "words-en.js",
        "words-hi-Latn.js",
    }
    assert set(assets.assets()) == own | made


def test_assets_are_read_once(page: Running, stubbed: Path) -> None:
    before = page.get("/assets/page.css").body
    (stubbed / "page.css").write_bytes(before + b"/* later */")
    try:
        assert page.get("/assets/page.css").body == before
    finally:
        (stubbed / "page.css").write_bytes(before)


def test_head_is_get_without_the_body(page: Running) -> None:
    reply = page.ask("HEAD", "/")
    assert (reply.status, reply.body) == (200, b"")


def test_about_describes_the_machine(page: Running) -> None:
    about = page.get("/api/about").json
    assert set(about) == {"version", "isa", "cpu", "threads", "export", "run", "models"}
    assert (about["version"], about["isa"]) == (lh.__version__, lh.info().isa)
    assert (about["export"], about["run"]) == (False, False)
    assert set(about["models"]) == {"minilm", "smollm2"}
    assert all(isinstance(installed, bool) for installed in about["models"].values())


# ---- figures


def test_a_figure_gets_its_parameters_with_their_types(page: Running) -> None:
    query = "d_k=128&scale=1/d_k^p&power=0.25&keys=16&seed=4294967295"
    figure = page.get(f"/api/figure/logits?{query}").json
    options = {"d_k": 128, "scale": "1/d_k^p", "power": 0.25, "keys": 16, "seed": 2**32 - 1}
    assert (figure["id"], figure["extra"]) == ("logits", options)
    own = "sigma=0.5&rho=1e-2&growth=8&cure=qk-norm&cap=30"
    figure = page.get(f"/api/figure/attack?{own}").json["extra"]
    assert figure == {"sigma": 0.5, "rho": 0.01, "growth": 8.0, "cure": "qk-norm", "cap": 30.0}
    figure = page.get("/api/figure/training?task=retrieval&width=256&depth=2").json["extra"]
    assert figure == {"task": "retrieval", "width": 256, "depth": 2}
    assert page.get("/api/figure/attack?cure=1/d_k").json["extra"] == {"cure": "1/d_k"}


def test_unused_parameters_are_dropped_before_the_cache(page: Running) -> None:
    everything = "d_k=128&scale=1/sqrt(d_k)&power=0.5&keys=16&seed=5&tile=4&order=1&sigma=1"
    figure = {id: page.get(f"/api/figure/{id}?{everything}").json["extra"] for id in page_server.IDS}
    assert figure["training"] == figure["sentence"] == figure["heads"] == figure["speed"] == {}
    assert figure["online"] == {"keys": 16, "seed": 5, "tile": 4, "order": 1}
    page_server.calls.clear()
    for keys in (16, 32, 64):  # attack does not depend on them
        page.get(f"/api/figure/attack?d_k=77&keys={keys}")
    assert page_server.calls == [("attack", {"d_k": 77})]


@pytest.mark.parametrize(
    "query",
    [
        "d_k=0",
        "d_k=",
        "d_k=x",
        "d_k=1.5",
        "d_k=1e3",
        "d_k=1_000",
        "d_k=+1",
        "d_k=%20" + "1",
        "d_k=٣",
        "d_k=NaN",
        "d_k=" + "9" * 1000,
        "d_k=64&d_k=64",
        "power=nan",
        "power=inf",
        "power=1e999",
        "power=0x1",
        "scale=%3Cimg%3E",
        "scale=" + "a" * 100,
        "x=1",
        "=1",
        "d_k",
        "token=1",
        "run=/etc/passwd",
        "text=x",
        "live=True",
        "__class__=1",
        "d_k[]=1",
    ],
)
def test_bad_parameters_get_a_clear_error(page: Running, query: str) -> None:
    quoted = "".join(letter if ord(letter) < 128 else "%D9%A3" for letter in query)
    reply = page.get(f"/api/figure/logits?{quoted}")
    assert reply.status == 400
    assert "expected" in reply.json["error"]
    assert len(reply.body) < 400


def test_an_unknown_figure_is_not_found(page: Running) -> None:
    reply = page.get("/api/figure/unknown")
    assert reply.status == 404
    assert "logits" in reply.json["error"]


def test_a_failure_is_answered_in_one_line_and_the_server_goes_on(
    page: Running, capfd: pytest.CaptureFixture[str]
) -> None:
    reply = page.get("/api/figure/logits?seed=13")
    assert reply.status == 500
    assert reply.json == {"error": "The server failed with RuntimeError: see its terminal."}
    assert "RuntimeError: a secret of the server" in capfd.readouterr().err
    assert page.is_alive()


def test_two_figures_are_computed_at_once_and_abandoned_ones_never(
    stubbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most, seeds = 0, 0, []
    lock, go = threading.Lock(), threading.Event()

    def slow(id: str, **parameters: Any) -> Figure:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            seeds.append(parameters["seed"])
        assert go.wait(SECONDS)
        with lock:
            running -= 1
        return page_server.stub(id, **parameters)

    monkeypatch.setattr(figures, "figure", slow)
    with serving() as page:
        clients = [page.connect() for _ in range(6)]
        for seed, connection in enumerate(clients):
            head = f"Host: {page.host}\r\nCookie: {page.cookie}\r\nConnection: close\r\n\r\n"
            connection.sendall(f"GET /api/figure/logits?seed={seed} HTTP/1.1\r\n{head}".encode())
        while len(seeds) < 2:
            time.sleep(0.01)
        waiting = [n for n in range(6) if n not in seeds]
        for n in waiting[:2]:
            clients[n].close()
        assert page.is_alive()  # one turn of the event loop: the server has noticed that they are gone
        go.set()
        replies = [page_server.everything(clients[n]) for n in range(6) if n not in waiting[:2]]
        for connection in clients:
            connection.close()
    assert all(reply.startswith(b"HTTP/1.1 200") for reply in replies)
    assert most == 2
    assert sorted(seeds) == sorted(set(range(6)) - set(waiting[:2]))


def test_answers_are_sent_at_once(page: Running) -> None:
    # With Nagle's algorithm, each answer waits 40 ms for the client's acknowledgement.
    with page.connect():
        while not (connections := page.open_connections()):
            time.sleep(0.01)
        assert connections[0].socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# ---- work on demand


def test_a_sentence_is_passed_on(page: Running) -> None:
    options = {"text": "The cat sat because it was tired.", "model": "minilm", "layer": 1, "head": 2, "token": "it"}
    assert page.post("/api/sentence", options).json["extra"] == options
    reply = page.post("/api/sentence", {"text": "it √ 猫", "layer": None, "token": 3})
    assert reply.json["extra"] == {"text": "it √ 猫", "model": "random", "token": 3}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"{}",
        b'{"text": ""}',
        b'{"text": "  "}',
        b'{"text": 1}',
        b'{"text": ["a"]}',
        b'{"text": "a", "layer": -1}',
        b'{"text": "a", "layer": 1.5}',
        b'{"text": "a", "layer": "1"}',
        b'{"text": "a", "head": []}',
        b'{"text": "a", "layer": true}',
        b'{"text": "a", "head": NaN}',
        b'{"text": "a", "head": 1e400}',
        b'{"text": "a", "head": 99999999999999999999}',
        b'{"text": "a", "token": {}}',
        b'{"text": "a", "token": ""}',
        b'{"text": "a", "path": "/etc/passwd"}',
        b'{"text": "a", "text": "b"}',
        b'{"text": "\\ud800"}',
        b'{"text": "\xff"}',
        b'{"text": "a", "layer": ' + b"1" * 10_000 + b"}",
        b"[" * 100_000,
        b'{"text": ' * 50_000,
        b'{"text": "a", "token": "' + b"b" * 500 + b'"}',
        json.dumps({"text": "a" * 100_000}).encode(),
    ],
    ids=lambda body: body[:30].decode("latin-1"),
)
def test_a_bad_sentence_gets_a_clear_error(page: Running, body: bytes) -> None:
    reply = page.post("/api/sentence", body)
    assert reply.status == 400
    assert "expected" in reply.json["error"]
    assert len(reply.body) < 400


@pytest.mark.parametrize("body", [b"", b"[]", b'{"seconds": 1e9}', b"1", b"[" * 100_000])
def test_speed_takes_no_parameters(page: Running, body: bytes) -> None:
    assert page.post("/api/speed", body).status == 400


def test_speed_is_measured_once_at_a_time(stubbed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, go = threading.Event(), threading.Event()

    def slow(id: str, **parameters: Any) -> Figure:
        if id == "speed":
            started.set()
            assert go.wait(SECONDS)
        return page_server.stub(id, **parameters)

    monkeypatch.setattr(figures, "figure", slow)
    with serving() as page:
        first: list[page_server.Reply] = []
        client = threading.Thread(target=lambda: first.append(page.post("/api/speed", {})))
        client.start()
        assert started.wait(SECONDS)
        second = page.post("/api/speed", {})
        assert (second.status, list(second.json)) == (409, ["error"])
        assert page.get("/api/figure/logits?seed=99").status == 200  # sliders still work
        go.set()
        client.join(SECONDS)
        assert first[0].json["extra"] == {"live": True}
        assert page.post("/api/speed", {}).status == 200


# ---- a run


def run_of(*steps: int, model: str = "Made up") -> Run:
    record = runs.record("layer.0")
    return dataclasses.replace(
        runs.run(record, model=model), snapshots=tuple(Snapshot(step, (record,)) for step in steps)
    )


class Stream:
    """The events of `/api/run/events`, in order."""

    def __init__(self, page: Running) -> None:
        self.connection = page.connect()
        head = f"HTTP/1.1\r\nHost: {page.host}\r\nCookie: {page.cookie}\r\n\r\n"
        self.connection.sendall(f"GET /api/run/events {head}".encode())
        self._lines = self._read()
        self.status = int(next(self._lines).split()[1])
        self.head = [line.lower() for line in iter(lambda: next(self._lines), "")]

    def _read(self) -> Iterator[str]:
        with self.connection.makefile("rb") as file:
            for line in file:
                yield line.decode().rstrip("\r\n")

    def next(self) -> dict[str, Any]:
        line = next(line for line in self._lines if line.startswith("data: "))
        extra: dict[str, Any] = json.loads(line.removeprefix("data: "))["extra"]
        return extra

    def rest(self) -> list[str]:
        """Every line until the server closes the connection."""
        return list(self._lines)

    def close(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


@pytest.fixture(name="file")
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    run_of(0).save(path)
    return path


@pytest.mark.usefixtures("stubbed")
def test_a_run_is_shown_and_followed(file: Path) -> None:
    with serving(run=file) as page:
        assert page.get("/api/about").json["run"] is True
        assert page.get("/api/figure/heads").json["extra"] == {"model": "Made up", "steps": 1}
        stream = Stream(page)
        assert "content-type: text/event-stream; charset=utf-8" in stream.head
        assert "cache-control: no-store" in stream.head
        assert stream.next() == {"model": "Made up", "steps": 1}
        run_of(0, 1).save(file)
        assert stream.next() == {"model": "Made up", "steps": 2}
        assert page.get("/api/figure/heads").json["extra"]["steps"] == 2
        stream.close()


@pytest.mark.usefixtures("stubbed")
def test_an_incomplete_file_changes_nothing(file: Path) -> None:
    with serving(run=file) as page:
        stream = Stream(page)
        assert stream.next()["steps"] == 1
        whole = file.read_bytes()
        for text in (whole[: len(whole) // 2], b"", b"[" * 100_000, b'{"format": "other"}'):
            file.write_bytes(text)
            assert page.get("/api/figure/heads").json["extra"]["steps"] == 1
        file.unlink()
        assert page.get("/api/figure/heads").json["extra"]["steps"] == 1
        run_of(0, 1, 2).save(file)
        assert stream.next()["steps"] == 3  # and nothing in between
        stream.close()


@pytest.mark.usefixtures("stubbed")
def test_a_run_being_recorded_is_followed_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    sink = JSONL(path, model="Recorded")
    (first,) = run_of(0).snapshots
    sink(first)
    with serving(run=path) as page:
        stream = Stream(page)
        assert stream.next() == {"model": "Recorded", "steps": 1}
        sink(dataclasses.replace(first, step=1))
        assert stream.next() == {"model": "Recorded", "steps": 2}
        stream.close()
    sink.close()


@pytest.mark.usefixtures("stubbed")
def test_streams_are_bounded_and_end_with_the_server(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "FOLLOWERS", 2)
    with serving(run=file) as page:
        first, second = Stream(page), Stream(page)
        assert (first.next()["steps"], second.next()["steps"]) == (1, 1)
        assert page.get("/api/run/events").status == 503
        first.close()
        deadline = time.monotonic() + SECONDS
        while (third := Stream(page)).status == 503:  # until the server has noticed
            assert time.monotonic() < deadline
        assert third.next()["steps"] == 1
        page.page.server.should_exit = True
        assert second.rest()[-2:] == third.rest()[-2:] == ["0", ""]  # complete answers


def test_without_a_run_there_are_no_events(page: Running) -> None:
    reply = page.get("/api/run/events")
    assert reply.status == 404
    assert "--run" in reply.json["error"]


@pytest.mark.usefixtures("stubbed")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": "other"}',
        "[" * 100_000,
        "half",
        '{"format": "levelhead-run"}',
        '{"format": "levelhead-snapshots"',
        "\0\0\0",
    ],
)
def test_a_foreign_file_is_refused_at_the_start(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(lh.LevelheadError, match="expected"):
        Follower(path)


@pytest.mark.usefixtures("stubbed")
def test_a_damaged_run_is_refused_at_the_start(file: Path) -> None:
    whole = json.loads(file.read_text())
    for damage in (
        {"snapshots": [[]]},
        {"snapshots": [{"step": 0, "records": [{}]}]},
        {"snapshots": None},
        {"coverage": [1]},
        {"cost": 1},
    ):
        file.write_text(json.dumps(whole | damage))
        with pytest.raises(lh.LevelheadError, match="expected"):
            Follower(file)
    with pytest.raises(lh.LevelheadError, match="No such file"):
        Follower(file.with_name("none.json"))
    with pytest.raises(lh.LevelheadError, match="directory"):
        Follower(file.parent)


# ---- the command


def command(*arguments: str, **rest: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "levelhead", "page", *arguments],
        encoding="utf-8",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"COLUMNS": "20"},
        **rest,
    )


@pytest.mark.parametrize("choice", ["any port", "a port"])
def test_the_command_prints_the_link_and_ends_well(choice: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = () if choice == "any port" else ("--port", str(port))
    process = command("--no-open", *options)
    assert process.stdout is not None and process.stderr is not None
    link = process.stdout.readline()
    start, _, token = link.rstrip("\n").partition("/?token=")
    assert start.startswith("http://127.0.0.1:") and len(token) == 43
    assert choice == "any port" or start == f"http://127.0.0.1:{port}"
    with socket.create_connection(("127.0.0.1", int(start.rpartition(":")[2])), 10) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert connection.recv(20).startswith(b"HTTP/1.1 403")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (0, "")
    assert token not in err and "Traceback" not in err


def test_ctrl_c_does_not_wait_for_a_measurement(stubbed: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from levelhead.cli import main; from levelhead.lab import figures\n"
        "from levelhead.page import assets\n"
        f"assets.STATIC = Path({str(stubbed)!r})\n"
        "def measure(*args, **options):\n"
        "    print('started', file=sys.stderr, flush=True); time.sleep(90)\n"
        "figures.figure = measure\n"
        "sys.exit(main(['page', '--no-open']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    link = urlsplit(process.stdout.readline().strip())
    port, token = link.port, link.query.removeprefix("token=")
    with socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
        host = f"127.0.0.1:{port}"
        connection.sendall(
            f"POST /api/speed HTTP/1.1\r\nHost: {host}\r\nCookie: levelhead-{port}={token}\r\n"
            f"Origin: http://{host}\r\nContent-Type: application/json\r\n"
            "Content-Length: 2\r\n\r\n{}".encode()
        )
        assert any(line == "started\n" for line in process.stderr)
        process.send_signal(signal.SIGINT)
        assert b"503" in connection.recv(100)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err


def refused(*arguments: str) -> str:
    process = command(*arguments)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (2, "")
    assert "Traceback" not in err
    return err


def test_a_taken_port_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"a port that is free, got {port}" in refused("--no-open", "--port", str(port))


@pytest.mark.parametrize("port", ["80", "-1", "65536", "x"])
def test_an_invalid_port_is_reported(port: str) -> None:
    assert "--port" in refused("--no-open", "--port", port)


def test_a_bad_run_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run_of(0).save(path)
    path.write_bytes(path.read_bytes()[:-20])
    assert "cut off" in refused("--no-open", "--run", str(path))


def test_a_missing_package_is_reported_with_its_remedy(tmp_path: Path) -> None:
    for name in ("starlette", "uvicorn", "plotly"):
        code = (
            "import importlib.util as u, sys; find = u.find_spec\n"
            f"u.find_spec = lambda name, *rest: None if name == {name!r} else find(name, *rest)\n"
            "from levelhead.cli import main; sys.exit(main(['page', '--no-open']))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 2
        assert 'pip install "levelhead[page]"' in done.stderr
        assert name in done.stderr and "Traceback" not in done.stderr

"""The eight security rules of the page, over real sockets. Known attacks on other programs have their names."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from levelhead.lab import figures
from levelhead.lab.figure import Figure
from levelhead.page import bodies, connections, guard, server
from levelhead.page.responses import check_headers
from page_server import SECONDS, Reply, Running, everything, one_reply, served_page, serving, stub, stubbed_page  # noqa: F401

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'"
)
EVERYWHERE = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def with_headers(reply: Reply) -> Reply:
    """The reply, if it has the headers that all replies have, and none that admits other origins."""
    assert {name: reply.headers.get(name) for name in EVERYWHERE} == EVERYWHERE
    assert "content-type" in reply.headers
    assert not [name for name in reply.headers if name.startswith("access-control-")]
    assert "server" not in reply.headers
    return reply


def refused(reply: Reply, status: int = 403) -> None:
    assert reply.status == status
    assert list(with_headers(reply).json) == ["error"]
    assert "Traceback" not in reply.body.decode()


def unreadable(reply: Reply) -> None:
    """uvicorn's own answer to bytes that are not HTTP: constant text, which repeats nothing of the request."""
    assert (reply.status, reply.body) == (400, b"Invalid HTTP request received.")
    assert reply.headers == {"content-type": "text/plain; charset=utf-8", "connection": "close"}


# ---- 1. this machine only


def other_addresses() -> list[str]:
    """Addresses of this machine that are not 127.0.0.1; 127.0.0.2 always leads here on Linux."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing, but chooses the address to send from
        outward = probe.getsockname()[0]
    return ["127.0.0.2", *({outward} - {"127.0.0.1"})]


def test_no_other_address_of_this_machine_answers(page: Running) -> None:
    for address in other_addresses():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, page.port), timeout=5)
    with socket.socket(socket.AF_INET6) as six, pytest.raises(OSError):
        six.connect(("::1", page.port))
    assert page.is_alive()


# ---- 2. names of this machine only


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::1]"])
def test_names_of_this_machine_are_served(page: Running, name: str) -> None:
    assert page.get("/", Host=f"{name}:{page.port}").status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",  # CVE-2025-62593 (Ray): a name that was rebound to 127.0.0.1
        "127.0.0.1:{port}.evil.example",  # CVE-2026-40110 (Jupyter): matched from the left only
        "127.0.0.1.evil.example:{port}",
        "localhost.evil.example:{port}",
        "evil.example#127.0.0.1:{port}",
        "user@127.0.0.1:{port}",
        "127.0.0.1",
        "localhost",
        "127.0.0.1:{other}",
        "127.0.0.1:0{port}",
        "127.1:{port}",
        "2130706433:{port}",
        "0.0.0.0:{port}",
        "LOCALHOST:{port}",
        "localhost.:{port}",
        "",
    ],
)
def test_other_names_are_refused(page: Running, host: str) -> None:
    named = host.format(port=page.port, other=page.port + 1)
    refused(page.get("/", Host=named))
    refused(page.post("/api/speed", {}, Host=named, Origin=f"http://{named}"))


def test_cve_2025_62593_the_user_agent_makes_no_difference(page: Running) -> None:
    # Ray trusted clients whose agent did not begin with "Mozilla"; a script may send any agent.
    for agent in ("Mozilla/5.0", "curl/8", ""):
        rebound = {"Host": f"rebound.example:{page.port}", "User-Agent": agent}
        refused(page.ask("GET", "/api/about", rebound))


def test_a_host_is_required(page: Running) -> None:
    for head in ("GET / HTTP/1.0\r\n", "GET / HTTP/1.1\r\nHost:\r\n"):
        refused(page.raw(f"{head}Cookie: {page.cookie}\r\nConnection: close\r\n\r\n".encode()))
    unreadable(page.raw(f"GET / HTTP/1.1\r\nCookie: {page.cookie}\r\n\r\n".encode()))


def test_two_hosts_are_refused(page: Running) -> None:
    hosts = f"Host: {page.host}\r\nHost: evil.example\r\n"
    unreadable(page.raw(f"GET / HTTP/1.1\r\n{hosts}Cookie: {page.cookie}\r\n\r\n".encode()))


def test_a_full_address_does_not_replace_the_host(page: Running) -> None:
    target = f"http://{page.host}/"
    refused(page.ask("GET", target, {"Host": "evil.example"}))


def test_forwarding_headers_make_no_difference(page: Running) -> None:
    forwarded = {"Host": "evil.example", "X-Forwarded-Host": page.host, "Forwarded": page.host}
    refused(page.ask("GET", "/", forwarded))


# ---- 3. the token

PATHS = ("/", "/assets/plotly.js", "/api/about", "/api/figure/logits", "/api/run/events", "/no")


@pytest.mark.parametrize("path", PATHS)
def test_every_path_requires_the_cookie(page: Running, path: str) -> None:
    name = f"levelhead-{page.port}"
    wrong = page.token[:-1] + ("A" if page.token[-1] != "A" else "B")
    for cookie in (
        None,
        "",
        f"{name}=",
        f"{name}={wrong}",
        f"{name}={page.token[:-1]}",
        f"other={page.token}",
        f"x{name}={page.token}",
        f"{name}=é",
    ):
        refused(page.get(path, Cookie=cookie))


def test_only_the_front_page_takes_the_token(page: Running) -> None:
    for path in PATHS[1:]:
        refused(page.get(f"{path}?token={page.token}", Cookie=None))
    refused(page.ask("POST", f"/?token={page.token}", {"Cookie": None}, b"{}"))


@pytest.mark.parametrize("token", ["", "wrong", "%00", "%ff", "é%F0%9F", "a" * 1000])
def test_a_wrong_token_is_refused(page: Running, token: str) -> None:
    reply = page.ask("GET", f"/?token={token.encode('ascii', 'ignore').decode()}", {"Cookie": None})
    refused(reply)
    assert "set-cookie" not in reply.headers


def test_a_right_token_beside_a_wrong_one_is_refused(page: Running) -> None:
    refused(page.get(f"/?token={page.token}&token=wrong", Cookie=None))


def test_tokens_are_long_random_and_never_the_same(page: Running) -> None:
    with serving() as second:
        assert second.token != page.token
        assert len(second.token) >= 43  # 256 bits in base64
        # Browsers send cookies to every port of a host, so the name of a cookie holds the port.
        refused(second.get("/", Cookie=page.cookie))


def test_the_cookie_is_kept_from_scripts_and_other_sites(page: Running) -> None:
    cookie = page.get(f"/?token={page.token}", Cookie=None).headers["set-cookie"]
    options = {option.strip() for option in cookie.split(";")[1:]}
    assert options == {"Path=/", "HttpOnly", "SameSite=Strict"}


def test_cve_2024_22421_the_token_is_in_no_answer_and_no_log(page: Running, capfd: pytest.CaptureFixture[str]) -> None:
    # Jupyter leaked the token to the target of a redirect. Here it is in one header, and in no address.
    entered = page.get(f"/?token={page.token}", Cookie=None)
    assert page.token not in entered.headers["location"] + entered.body.decode()
    for target in (*PATHS, f"/no?token={page.token}", "/api/figure/logits?seed=13"):
        reply = page.get(target)
        assert page.token not in reply.body.decode("latin-1") + str(reply.headers)
    page.raw(f"GET /?token={page.token} nonsense\r\n\r\n".encode())
    assert page.token not in "".join(capfd.readouterr())


# ---- 4. work for the page only


@pytest.mark.parametrize(
    "origin",
    [
        None,
        "null",  # CVE-2024-47165 (Gradio): the origin of a sandboxed frame was treated as local
        "http://evil.example",
        "http://127.0.0.1:{port}.evil.example",  # CVE-2026-40110 (Jupyter): unanchored match
        "http://127.0.0.1",
        "http://127.0.0.1:{other}",
        "https://127.0.0.1:{port}",
        "http://localhost:{port}",  # a name of the page, but not the one in Host
        "http://127.0.0.1:{port}/",
        "file://",
        "",
    ],
)
def test_a_post_from_another_origin_is_refused(page: Running, origin: str | None) -> None:
    # CVE-2024-47084 (Gradio): with a cookie, the origin was not checked. All of these requests have the cookie.
    # CVE-2024-1727 (Gradio): any site could post to localhost.
    named = origin and origin.format(port=page.port, other=page.port + 1)
    refused(page.post("/api/speed", {}, Origin=named))


@pytest.mark.parametrize("site", ["cross-site", "same-site", "none", "same-origin, none", ""])
def test_a_post_from_another_site_is_refused(page: Running, site: str) -> None:
    refused(page.post("/api/speed", {}, Sec_Fetch_Site=site))


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_site_reads_nothing_but_may_link_to_the_front_page(page: Running, site: str) -> None:
    refused(page.get("/api/about", Sec_Fetch_Site=site))
    refused(page.get("/assets/page.css", Sec_Fetch_Site=site))
    assert page.get("/", Sec_Fetch_Site=site).status == 200


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain; application/json",
        "application/json; charset=utf-16",
        "application/jsonp",
    ],
)
def test_content_types_of_forms_are_refused(page: Running, kind: str | None) -> None:
    refused(page.post("/api/speed", {}, Content_Type=kind), 415)


def test_a_post_from_the_page_is_served(page: Running) -> None:
    headers = {"Sec_Fetch_Site": "same-origin", "Content_Type": "application/json; charset=UTF-8"}
    assert page.post("/api/speed", {}, **headers).status == 200
    local = {"Host": f"localhost:{page.port}", "Origin": f"http://localhost:{page.port}"}
    assert page.post("/api/speed", {}, **local).status == 200


@pytest.mark.parametrize("method", ["OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "FOO"])
def test_other_methods_are_refused(page: Running, method: str) -> None:
    preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    for cookie in (page.cookie, None):
        refused(page.ask(method, "/api/speed", {**preflight, "Cookie": cookie}), 405)


@pytest.mark.parametrize("path", ["/api/speed", "/api/sentence"])
def test_a_get_starts_no_work(page: Running, path: str) -> None:
    reply = page.get(path)
    refused(reply, 405)
    assert reply.headers["allow"] == "POST"


def test_other_routes_take_no_post(page: Running) -> None:
    for path in ("/", "/api/about", "/api/figure/logits", "/assets/page.css"):
        refused(page.post(path, {}), 405)


# ---- 5. headers on everything


def test_every_answer_carries_the_headers(page: Running) -> None:
    statuses = [
        with_headers(reply).status
        for reply in (
            page.get(f"/?token={page.token}"),
            page.get("/"),
            page.get("/assets/main.js"),
            page.get("/api/figure/logits"),
            page.get("/api/figure/logits?d_k=0"),
            page.get("/", Cookie=None),
            page.get("/no"),
            page.get("/api/figure/no"),
            page.ask("OPTIONS", "/"),
            page.ask("HEAD", "/"),
            page.get("/" + "a" * 5000),
            page.get("/api/figure/logits?seed=13"),
            page.get("/", X="a" * 20_000),
        )
    ]
    assert statuses == [303, 200, 200, 200, 400, 403, 404, 404, 405, 200, 414, 500, 431]


@pytest.mark.parametrize(
    "request_bytes", [b"nonsense\r\n\r\n", b"GET /\x01 HTTP/1.1\r\n\r\n", b"GET /<script> HTTP/1.1\r\n<b>\r\n\r\n"]
)
def test_what_is_not_http_gets_a_constant_answer(page: Running, request_bytes: bytes) -> None:
    unreadable(page.raw(request_bytes))


@pytest.mark.parametrize(
    "own",
    [
        [],
        [(b"Content-Type", b"text/html"), (b"Access-Control-Allow-Origin", b"*")],
        [(b"content-type", b"text/html"), (b"Location", b"//evil.example")],
        [(b"content-type", b"text/html"), (b"Content-Security-Policy", b"default-src *")],
    ],
)
def test_an_answer_that_breaks_a_rule_is_not_sent(own: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(RuntimeError):
        check_headers(own)


# ---- 6. no path reaches the file system, and everything is bounded


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../../etc/passwd",
        "/assets/..%2f..%2fetc%2fpasswd",
        "/assets/%2e%2e/%2e%2e/etc/passwd",
        "/assets/%252e%252e%252fetc%252fpasswd",
        "/assets/..%5c..%5cetc%5cpasswd",
        "/assets//etc/passwd",
        "/assets/%2fetc%2fpasswd",
        "/assets/page.css%00.png",
        "/assets/%00",
        "/assets/",
        "/assets/.",
        "/assets/./page.css",
        "/assets/notes.txt",
        "/assets/../server.py",
        "/assets/PAGE.CSS",
        "/assets/page.css/",
        "//assets/page.css",
        "/etc/passwd",
        # CVE-2024-1728, CVE-2023-51449, CVE-2024-47164 (Gradio): a file's path in the address.
        "/file=/etc/passwd",
        "/file/../../etc/passwd",
        "/component_server/../../etc/passwd",
        # CVE-2026-28414, CVE-2026-49119 (Gradio): joining paths drops what precedes an absolute segment.
        "/assets/%2Fetc/passwd",
        "/assets/C:%5CWindows%5Cwin.ini",
        # CVE-2022-35918, GHSA-8qw9-gf7w-42x5, CVE-2024-42474 (Streamlit): component paths.
        "/component/x/..%2f..%2fetc%2fpasswd",
        "/component/x/%5c..%5c..%5cetc%5cpasswd",
        # CVE-2026-33682 (Streamlit): resolving a UNC path opens it.
        "/assets/%5c%5cevil.example%5cshare",
        "/assets/%2f%2fevil.example%2fshare",
        # GHSA-v5gw-mw7f-84px (Starlette): the name of a folder is a prefix of another folder's.
        "/assets/..%2fstatic-secret%2fpage.css",
        "/assets-secret/page.css",
        # CVE-2022-29241 (Jupyter): the file with the token could be read.
        "/assets/.token",
        "/runtime/token.json",
    ],
)
def test_a_path_names_an_asset_or_nothing(page: Running, stubbed: Path, path: str) -> None:
    neighbour = stubbed.with_name("static-secret")
    neighbour.mkdir(exist_ok=True)
    (neighbour / "page.css").write_text("root: secret")
    reply = page.get(path)
    refused(reply, 404)
    assert "root:" not in reply.body.decode()


def test_figures_and_models_are_names_on_a_list(page: Running) -> None:
    # CVE-2021-42343, CVE-2026-23528 (Dask), CVE-2026-24747 (torch.load): a file loaded by path can contain code.
    # Here a browser names one of three models.
    for id in ("..%2flogits", "logits%00", "%2fetc%2fpasswd", "__init__", "LOGITS"):
        refused(page.get(f"/api/figure/{id}"), 404)
    for model in ("../model.pt", "/etc/passwd", "file:///etc/passwd", "gpt2", "", [], 1, None):
        refused(page.post("/api/sentence", {"text": "it", "model": model}), 400)


def test_a_body_announced_as_too_large(page: Running) -> None:
    announced = {"Content-Length": str(bodies.BODY + 1), "Expect": "100-continue"}
    refused(page.ask("POST", "/api/sentence", announced), 413)
    refused(page.ask("POST", "/api/sentence", {"Content-Length": str(10**18)}), 413)
    refused(page.post("/api/sentence", b" " * (bodies.BODY + 1)), 413)
    assert page.post("/api/speed", b"{}" + b" " * (bodies.BODY - 2)).status == 200


def test_a_large_body_of_unknown_length(page: Running) -> None:
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    count = bodies.BODY // 0x10000 + 1
    head = {"Content-Length": None, "Transfer-Encoding": "chunked"}
    refused(page.ask("POST", "/api/speed", head, piece * count + b"0\r\n\r\n"), 413)
    assert page.ask("POST", "/api/speed", head, b"2\r\n{}\r\n0\r\n\r\n").status == 200


def test_an_endless_body_ends_the_connection(page: Running) -> None:
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    head = (
        f"POST /api/speed HTTP/1.1\r\nHost: {page.host}\r\nCookie: {page.cookie}\r\n"
        f"Origin: http://{page.host}\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    )
    with page.connect() as connection:
        connection.sendall(head.encode())
        with pytest.raises(ConnectionError):  # noqa: PT012 - one of these calls fails
            for _ in range(4 * bodies._DISCARDED // 0x10000):
                connection.sendall(piece)
    assert page.is_alive()


@pytest.mark.parametrize("length", ["-1", "x", "1, 2", "99999999999999999999999999", "+1", "0x1"])
def test_invalid_lengths(page: Running, length: str) -> None:
    unreadable(page.post("/api/speed", b"{}", Content_Length=length, Expect="100-continue"))


def test_lengths_of_two_kinds_do_not_smuggle_a_request(page: Running) -> None:
    smuggled = f"0\r\n\r\nGET /api/about HTTP/1.1\r\nHost: {page.host}\r\n\r\n".encode()
    reply = page.ask("POST", "/api/speed", {"Transfer-Encoding": "chunked"}, smuggled)
    assert reply.status in (200, 400)
    assert reply.body.count(b"HTTP/1.1") == 0


def test_a_get_has_no_body(page: Running) -> None:
    refused(page.ask("GET", "/api/about", {"Content-Length": "2"}, b"{}"), 400)
    refused(page.ask("GET", "/api/about", {"Transfer-Encoding": "chunked"}, b"0\r\n\r\n"), 400)


def test_addresses_and_headers_are_bounded(page: Running) -> None:
    refused(page.get("/api/figure/logits?seed=" + "1" * guard.TARGET), 414)
    refused(page.get("/", X="a" * guard.HEAD), 431)
    unreadable(page.raw(b"GET /" + b"a" * 5 * guard.HEAD))
    many = "".join(f"X{n}: 1\r\n" for n in range(3000))
    refused(page.raw(f"GET / HTTP/1.1\r\nHost: {page.host}\r\n{many}\r\n".encode()), 431)


@pytest.fixture(name="short_deadlines")
def shorten_deadlines(stubbed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that a test can wait for."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 1.0)
    monkeypatch.setattr(connections, "READ_SECONDS", 1.0)
    monkeypatch.setattr(bodies, "BODY_SECONDS", 1.0)


@pytest.mark.usefixtures("short_deadlines")
@pytest.mark.parametrize("beginning", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "])
def test_slow_loris_is_disconnected(beginning: bytes) -> None:
    with serving() as page, page.connect() as connection:
        connection.sendall(beginning)
        assert everything(connection) == b""
        assert page.is_alive()


@pytest.mark.usefixtures("short_deadlines")
def test_slow_loris_gains_no_time_with_more_headers() -> None:
    with serving() as page, page.connect() as connection:
        began = time.monotonic()
        with pytest.raises(ConnectionError):  # noqa: PT012 - one of these calls fails
            connection.sendall(b"GET / HTTP/1.1\r\n")
            while time.monotonic() - began < SECONDS:
                connection.sendall(b"X: y\r\n")
                time.sleep(0.05)
        assert page.is_alive()


@pytest.mark.usefixtures("short_deadlines")
def test_slow_loris_does_not_hide_behind_a_first_request() -> None:
    with serving() as page, page.connect() as connection:
        head = f"HTTP/1.1\r\nHost: {page.host}\r\nCookie: {page.cookie}\r\n\r\n"
        connection.sendall(f"GET /api/about {head}".encode())
        assert one_reply(connection).status == 200
        connection.sendall(b"GET /api")
        assert everything(connection) == b""
        assert page.is_alive()


@pytest.mark.usefixtures("short_deadlines")
def test_a_body_that_does_not_arrive_is_refused() -> None:
    with serving() as page:
        refused(page.ask("POST", "/api/speed", {"Content-Length": "100"}, b"{"), 408)
        assert page.is_alive()


@pytest.mark.usefixtures("short_deadlines")
def test_a_client_that_does_not_read_is_disconnected() -> None:
    with serving() as page, page.connect() as connection:
        head = f"HTTP/1.1\r\nHost: {page.host}\r\nCookie: {page.cookie}\r\n\r\n"
        connection.sendall(f"GET /assets/plotly.js {head}".encode() * 8)
        assert wait_until(lambda: bool(page.open_connections()))
        assert wait_until(lambda: not page.open_connections())
        assert page.is_alive()


@pytest.mark.usefixtures("short_deadlines")
def test_a_slow_computation_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(id: str, **parameters: object) -> Figure:
        time.sleep(1.5)  # longer than the deadlines of a client
        return stub(id, **parameters)

    monkeypatch.setattr(figures, "figure", slow)
    with serving() as page, page.connect() as connection:
        head = f"HTTP/1.1\r\nHost: {page.host}\r\nCookie: {page.cookie}\r\n\r\n"
        for target in ("/api/about", "/api/figure/logits?seed=21", "/api/figure/logits?seed=22", "/api/about"):
            connection.sendall(f"GET {target} {head}".encode())
            assert one_reply(connection).status == 200


def test_connections_are_bounded(stubbed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS", 5)
    with serving() as page:
        clients = [page.connect() for _ in range(12)]
        assert wait_until(lambda: sum(disconnected(client) for client in clients) == 7)
        for client in clients:
            client.close()
        assert wait_until(lambda: not page.open_connections())
        assert page.is_alive()


def disconnected(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_requests_at_once_are_bounded(stubbed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUESTS", 2)
    with serving() as page:
        with page.connect():
            assert wait_until(lambda: bool(page.open_connections()))
            reply = with_headers(page.get("/api/about"))
            assert (reply.status, reply.body) == (503, b"Service Unavailable")
        assert wait_until(page.is_alive) and page.is_alive()


def test_no_upgrade_bypasses_the_guard(page: Running) -> None:
    upgrade = {"Upgrade": "websocket", "Sec-WebSocket-Key": "x" * 24, "Sec-WebSocket-Version": "13"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in upgrade.items())
    head = f"GET /api/about HTTP/1.1\r\nHost: {page.host}\r\nConnection: Upgrade, close\r\n{lines}"
    refused(page.raw(f"{head}\r\n".encode()))


# ---- 7. answers are data


MARKUP = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"


def test_dask_2026_markup_comes_back_as_data(page: Running) -> None:
    reply = page.post("/api/sentence", {"text": MARKUP, "model": "random"})
    assert with_headers(reply).status == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.json["extra"]["text"] == MARKUP
    assert b"<" not in reply.body


@pytest.mark.parametrize(
    "target", ["/{m}", "/api/figure/{m}", "/api/figure/logits?{m}=1", "/api/figure/logits?seed={m}"]
)
def test_errors_repeat_markup_as_data(page: Running, target: str) -> None:
    quoted = "%3Cimg%20onerror=alert(1)%3E"
    reply = page.get(target.format(m=quoted))
    refused(reply, reply.status)
    assert reply.headers["content-type"] == "application/json"
    assert b"<" not in reply.body
    json.loads(reply.body)


# ---- 8. one redirect only


@pytest.mark.parametrize(
    "target",
    [
        "/?token={token}&next=http://evil.example",  # CVE-2020-26232 (Jupyter): an open redirect
        "/?next=//evil.example&token={token}&url=//evil.example&redirect=//evil.example",
    ],
)
def test_the_redirect_always_leads_to_the_front_page(page: Running, target: str) -> None:
    reply = page.get(target.format(token=page.token), Cookie=None)
    assert (reply.status, reply.headers["location"]) == (303, "/")


@pytest.mark.parametrize(
    "target",
    [
        "//evil.example/%2f..",  # GHSA-r726-vmfq-j9j3 (Jupyter): a path that browsers read as a host
        "//evil.example/",
        "/%5cevil.example/",
        "/assets/page.css/",
        "/api/about/",
        "/api/figure/logits/",
        "/login?next=//evil.example",
        "//evil.example/?token={token}",
    ],
)
def test_no_other_address_redirects(page: Running, target: str) -> None:
    reply = page.get(target.format(token=page.token))
    refused(reply, 404)
    assert "location" not in reply.headers

"""Responses: the headers that all of them carry, and the responses that must not be sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from starlette.responses import Response

from levelhead.page.encoding import encoded

_HOME = "/"  # the only target of a redirect

# Scripts are loaded from the page's own files only. Styles may be inline, because plotly inserts them as it draws.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
# uvicorn adds these to every response, also to those that it sends by itself (500, 503).
HEADERS = [
    ("content-security-policy", _POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cache-control", "no-store"),
]


def check_headers(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """RuntimeError if a response with these headers would break a rule."""
    own = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers]
    names = {name for name, _ in own}
    if "content-type" not in names:
        raise RuntimeError("a response without a content type")
    if any(name.startswith("access-control-") for name in names):
        raise RuntimeError("a response that admits other origins")
    if any(name == "location" and value != _HOME for name, value in own):
        raise RuntimeError("a redirect to another target")
    if repeated := names & {name for name, _ in HEADERS}:
        raise RuntimeError(f"a response with its own {sorted(repeated)}")


def json_response(content: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(content, status, headers, media_type="application/json")


def error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return json_response(encoded({"error": message}), status, headers)


def home(cookie: str) -> Response:
    """Sets the cookie and redirects to the front page."""
    return json_response(b"{}", 303, {"location": _HOME, "set-cookie": f"{cookie}; Path=/; HttpOnly; SameSite=Strict"})

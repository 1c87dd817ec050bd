"""The headers that every response carries, and the responses that may not leave at all.

One list for everybody who answers: routes, the guard's refusals, and the protocol where it cannot
even read a request. A response that would break a rule is an error here, not an oversight.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypeAlias

__all__ = ["EVERYWHERE", "HOME", "Headers", "encoded", "sealed"]

Headers: TypeAlias = list[tuple[bytes, bytes]]

HOME = b"/"  # the one place a redirect leads to

# Scripts come from files of ours alone. Styles may be inline: plotly writes them as it draws.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'"
)
EVERYWHERE: Headers = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]


def sealed(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """A response's headers with ours; RuntimeError if a rule would be broken by sending it."""
    own = [(name.lower(), value) for name, value in headers]
    names = {name for name, _ in own}
    if b"content-type" not in names:
        raise RuntimeError("a response without a content type")
    if any(name.startswith(b"access-control-") for name in names):
        raise RuntimeError("a response that invites other origins")
    if any(name == b"location" and value != HOME for name, value in own):
        raise RuntimeError("a redirect that leads elsewhere")
    if twice := names & {name for name, _ in EVERYWHERE}:
        raise RuntimeError(f"a response with its own {sorted(twice)}")
    return own + EVERYWHERE


def encoded(value: Any) -> bytes:
    """JSON that is data wherever it ends up: not even inside HTML does a tag begin in it."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026").encode()

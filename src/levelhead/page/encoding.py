"""JSON that is safe wherever it is placed."""

from __future__ import annotations

import json
from typing import Any


def encoded(value: Any) -> bytes:
    """JSON in ASCII without <, > and &: inside HTML, no tag can begin in it."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026").encode()

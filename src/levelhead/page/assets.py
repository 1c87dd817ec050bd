"""The files of the page: those of `static/`, plotly.js and the lab's declarations, read once, at the start.

A request names a key of this dictionary, never a path. The lab declares parameters, what each panel needs, and the
claims with their verdicts; the page imports them as a JavaScript module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from levelhead.errors import LevelheadError, expected
from levelhead.lab import figures
from levelhead.lab.parameters import PARAMETERS, POWER

STATIC = Path(__file__).with_name("static")
INDEX, PLOTLY, DECLARED = "index.html", "plotly.js", "declared.js"

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}


@dataclass(frozen=True)
class Asset:
    name: str
    kind: str  # as a Content-Type
    content: bytes


def assets() -> Mapping[str, Asset]:
    """All files, by name."""
    files = {path.name: path for path in STATIC.iterdir() if path.suffix in _KINDS}
    files[PLOTLY] = _plotly()
    contents = {name: path.read_bytes() for name, path in files.items()} | {DECLARED: _declared()}
    return {name: Asset(name, _KINDS[Path(name).suffix], content) for name, content in sorted(contents.items())}


def _declared() -> bytes:
    """The text of the module."""
    constants: dict[str, Any] = {
        "PARAMETERS": {name: {"kind": type(x).__name__.lower(), **asdict(x)} for name, x in PARAMETERS.items()},
        "NEEDS": {id: figures.NEEDS[id] for id in figures.PANELS},
        "CLAIMS": figures.claims(),
        "POWER": POWER,
        "OLD_SCALES": figures.OLD_SCALES,
    }
    lines = (f"export const {name} = {json.dumps(value, ensure_ascii=False)};" for name, value in constants.items())
    return "\n".join(("// Made by levelhead.page.assets: what the lab declares.", *lines, "")).encode()


def missing() -> LevelheadError | None:
    """The error to raise if a package of `levelhead[page]` is not installed."""
    needed = ("starlette", "uvicorn", "plotly")
    absent = [name for name in needed if find_spec(name) is None]
    if not absent:
        return None
    return _not_installed(f"the packages {', '.join(needed)}", f"no {', '.join(absent)}")


def _plotly() -> Path:
    """The script in the installed package, located without importing the package."""
    spec = find_spec("plotly")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "package_data" / "plotly.min.js"
        if path.is_file():
            return path
    raise _not_installed("plotly", "none")


def _not_installed(wanted: str, got: str) -> LevelheadError:
    return LevelheadError(expected("levelhead page", wanted, got, 'Run: pip install "levelhead[page]"'))

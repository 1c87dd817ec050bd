"""The files of the page: those of `static/`, plotly.js, and modules made of the lab's and the course's declarations.
All are made once, at the start.

A request names a key of this dictionary, never a path. The lab declares parameters, what each panel needs, and the
claims with their verdicts. The course has a module per chapter and, per language, one for each view, which are imported
when they are shown; `story-data.js` and `bench-data.js` say which there are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from levelhead import documentation, stats
from levelhead.course.catalogue import FIGURES, catalogues, terms
from levelhead.course.chapters import CHAPTERS
from levelhead.course.deck import deck_json
from levelhead.course.languages import PATTERN
from levelhead.course.story import chapter_json
from levelhead.errors import bad_value
from levelhead.extras import command, require
from levelhead.lab import figures, measure
from levelhead.lab.parameters import PARAMETERS, POWER

STATIC = Path(__file__).with_name("static")
INDEX, PLOTLY, DECLARED = "index.html", "plotly.js", "declared.js"
STORY, LOOKS = "story-data.js", "scenes.css"  # which chapters and languages there are; the style sheets of the scenes
_WHAT = "levelhead page"  # needs the packages of its extra
_BENCH = ("bench", FIGURES)  # the sections of a catalogue that the story does without

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
    contents = {name: path.read_bytes() for name, path in files.items()} | {DECLARED: _declared()} | _story() | _bench()
    return {name: Asset(name, _KINDS[Path(name).suffix], content) for name, content in sorted(contents.items())}


def _story() -> dict[str, bytes]:
    """The modules of the course. Importing one by a name that is written out is what the export understands."""
    modules = {f"chapter-{one.id}.js": _module({"CHAPTER": chapter_json(one)}) for one in CHAPTERS}
    modules["cards-data.js"] = _module({"CARDS": deck_json()})
    rested = {id for one in CHAPTERS for id in one.claims}
    for language, words in catalogues().items():
        told = {name: section for name, section in words.items() if name not in _BENCH}
        own = words.get("figures", {})  # the lab's sentences are English
        told["claims"] = {
            id: own.get(one["claim"], one["claim"]) for id, one in figures.claims().items() if id in rested
        }
        modules[f"words-{language}.js"] = _module({"WORDS": told})
    constants = {
        "CHAPTERS": [{"id": one.id, "options": one.options, "steps": one.steps} for one in CHAPTERS],
        "LANGUAGES": {language: words["language"] for language, words in catalogues().items()},
        "LEVELS": {
            "flat": stats.FLAT,
            "sharp": stats.SHARP,
            "saturated": stats.SATURATED,
            "saturated_row": stats.SATURATED_ROW,
            "cells": stats.CELLS,
            "entropies": stats.ENTROPIES,
            "places": stats.PLACES,
        },
    }
    loaders = [
        f"export const DATA = {{ {_loaders('chapter', [one.id for one in CHAPTERS])} }};",
        f"export const SCENES = {{ {_loaders('scene', [one.id for one in CHAPTERS])} }};",
        f"export const WORDS = {{ {_loaders('words', catalogues())} }};",
    ]
    looks = b"".join(path.read_bytes() for path in sorted(STATIC.glob("scene-*.css")))
    return modules | {STORY: _module(constants, *loaders), LOOKS: looks}


def _bench() -> dict[str, bytes]:
    """The words of the lab bench. Other languages than the lab's own translate its texts, all but technical terms."""
    modules = {"bench-data.js": _module({}, f"export const WORDS = {{ {_loaders('bench-words', catalogues())} }};")}
    for language, words in catalogues().items():
        said = {name: words[name] for name in ("shell", *_BENCH) if name in words}
        if language != PATTERN:
            said["terms"] = sorted(terms())
        modules[f"bench-words-{language}.js"] = _module({"WORDS": said})
    return modules


def _loaders(kind: str, names: Iterable[str]) -> str:
    return ", ".join(f'"{name}": () => import("./{kind}-{name}.js")' for name in names)


def _declared() -> bytes:
    constants: dict[str, Any] = {
        "PARAMETERS": {name: {"kind": type(x).__name__.lower(), **asdict(x)} for name, x in PARAMETERS.items()},
        "NEEDS": {id: figures.NEEDS[id] for id in figures.PANELS},
        "CLAIMS": figures.claims(),
        "POWER": POWER,
        "HEADS": measure.HEADS,
        "OLD_SCALES": figures.OLD_SCALES,
        "SITE": documentation.site(),  # where links that are copied point; null: none is set
    }
    return _module(constants)


def _module(constants: Mapping[str, Any], *statements: str) -> bytes:
    """The text of a JavaScript module."""
    lines = (f"export const {name} = {json.dumps(value, ensure_ascii=False)};" for name, value in constants.items())
    return "\n".join(("// Made by levelhead.page.assets.", *lines, *statements, "")).encode()


def check_installed() -> None:
    """Refuses unless the packages of `levelhead[page]` are installed."""
    require(_WHAT, "starlette", "uvicorn", "plotly", install=command("page"))


def _plotly() -> Path:
    """The script in the installed package, located without importing the package."""
    spec = find_spec("plotly")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "package_data" / "plotly.min.js"
        if path.is_file():
            return path
    wanted, given = "the script plotly.min.js in the package plotly", "none"
    raise bad_value(_WHAT, wanted, given, f"Run: {command('page')}")

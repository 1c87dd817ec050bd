"""ARCHITECTURE.md is true: each walk's files exist and import the next, in one direction; every named file exists."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from test_architecture import PACKAGE, ROOT, imports, layer

from levelhead.lab import registry

REGISTRY = PACKAGE / "front_ends.py"
TEXT = (ROOT / "ARCHITECTURE.md").read_text()


def walks() -> dict[str, list[Path]]:
    """The numbered lists of files, by the name of the walk."""
    found: dict[str, list[Path]] = {}
    name = ""
    for line in TEXT.split("## Four walks")[1].split("## Recipes")[0].splitlines():
        if title := re.match(r"\*\*(.+?)\.\*\*", line):
            name = title[1]
        if step := re.match(r"(\d+)\. `([^`]+)`: ", line):
            key = name if step[1] != "1" or name not in found else f"{name}, back up"
            name = key
            found.setdefault(key, []).append(ROOT / step[2])
    return found


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(("levelhead", *(part for part in parts if part != "__init__")))


def follows(one: Path, other: Path) -> bool:
    """Whether a file imports or includes the next; a stub stands for its source, a header for what implements it."""
    if other.suffix in (".cpp", ".h"):
        if one.suffix == ".pyi":
            return other.stem == one.stem
        included = rf'#\s*include "([\w/.]*/)?{re.escape(other.name)}"'
        implemented = rf'#\s*include "([\w/.]*/)?{re.escape(one.name)}"'
        return bool(re.search(included, one.read_text()) or re.search(implemented, other.read_text()))
    if one == REGISTRY:  # `__init__.py` registers what it leads to
        registered = rf'front_ends\.register\(.*import_module\("{re.escape(module_of(other))}"\)'
        return bool(re.search(registered, (PACKAGE / "__init__.py").read_text()))
    module = module_of(other)
    if other.parent.name == "claims":  # the registry finds the files of claims by name
        return module in registry.MODULES.values()
    return any(name == module or name.startswith(f"{module}.") for name in imports(one))


def test_there_are_four_walks() -> None:
    assert len({name.removesuffix(", back up") for name in walks()}) == 4
    assert all(len(files) > 3 for files in walks().values())


@pytest.mark.parametrize("name", walks())
def test_each_file_of_a_walk_leads_to_the_next(name: str) -> None:
    files = walks()[name]
    assert [str(path) for path in files if not path.exists()] == []
    assert [f"{a.name} to {b.name}" for a, b in pairwise(files) if not follows(a, b)] == []


@pytest.mark.parametrize("name", walks())
def test_a_walk_goes_down(name: str) -> None:
    python = [path for path in walks()[name] if path.suffix == ".py"]
    heights = [layer(".".join(path.relative_to(PACKAGE).with_suffix("").parts)) for path in python]
    up = python.index(REGISTRY) + 1 if REGISTRY in python else 0  # its purpose: a layer above answers
    for part in (heights[:up], heights[up:]):
        assert part == sorted(part, reverse=True)


def test_every_file_that_the_map_names_exists() -> None:
    places = [ROOT, ROOT / "core", PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir()), ROOT / "docs"]
    named = set(re.findall(r"`([\w/.*]+\.(?:py|pyi|h|cpp|md|css|html|txt))`", TEXT))
    missing = [name for name in named if not any(list(place.glob(name)) for place in places)]
    assert missing == []

"""The page as one file: its figures computed over a grid, everything inline, no server, no network.

The same index, modules and drawing library as the served page. Modules become data: addresses under an import map, so
that a browser opens the file from a disk; a policy inside forbids it the network. No number in the file is marked live.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from levelhead.errors import LevelheadError, expected
from levelhead.lab import figures
from levelhead.lab.parameters import default
from levelhead.page.about import about
from levelhead.page.assets import INDEX, PLOTLY, Asset, assets
from levelhead.page.encoding import encoded
from levelhead.runs import files

GRID: Mapping[str, tuple[int | str, ...]] = {
    "d_k": tuple(2**n for n in range(13)),
    "scale": ("none", "1/sqrt(d_k)", "1/d_k", "1/sqrt(d)"),
    "keys": (8, 32, 256),
}
SEED = default("seed")
LARGEST = 10_000_000  # bytes
_DIGITS = 4

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)
_STYLE = re.compile(r'<link rel="stylesheet" href="/assets/([\w.-]+)">')
_MODULE = re.compile(r'<script type="module" src="/assets/([\w.-]+)"></script>')
_SCRIPT = re.compile(r'<script src="/assets/([\w.-]+)"[^>]*></script>')
_IMPORT = re.compile(r"""(\bfrom\s*|\bimport\s*\(?\s*)(["'])\./([\w.-]+\.js)\2""")

Tell = Callable[[str], None]


def exported(*, run: Path | None = None, tell: Tell) -> str:
    """The file's text. `run` is shown in place of the recorded sample of heads."""
    shown = {} if run is None else {"heads": {"run": files.read(run)}}
    machine = about(export=True, run=False)
    origin = f"computed when this page was saved, by levelhead {machine['version']} on {machine['cpu']}"
    computed = {id: dict(_over_grid(id, shown.get(id, {}), origin, tell)) for id in figures.IDS}
    data = {"about": machine, "grid": {name: list(values) for name, values in GRID.items()}, "figures": computed}
    text = inlined(assets(), encoded(data).decode())
    if len(text.encode()) > LARGEST:
        given = ", ".join(f"{id} {len(encoded(each)) / 1e6:.1f}" for id, each in computed.items())
        raise LevelheadError(expected("--export", "10 MB at most", f"MB of {given}", "Report this"))
    return text


def _over_grid(id: str, rest: Mapping[str, Any], origin: str, tell: Tell) -> Iterator[tuple[str, dict[str, Any]]]:
    """A figure for every setting of the grid's parameters that it needs; the key joins their values."""
    names = [name for name in GRID if name in figures.NEEDS[id]]
    settings = list(product(*(GRID[name] for name in names)))
    tell(f"{id}: {len(settings)} settings")
    seed = {"seed": SEED} if "seed" in figures.NEEDS[id] else {}
    for values in settings:
        figure = figures.figure(id, **dict(zip(names, values, strict=True)), **seed, **rest).json()
        yield " ".join(map(str, values)), _kept(figure, origin)


def _kept(figure: dict[str, Any], origin: str) -> dict[str, Any]:
    """The figure as a record: what was live when it was made no longer is. Charts get as many digits as a screen can
    show, which saves a tenth."""
    kept = _mapped(figure, lambda name, x: "recorded" if (name, x) == ("source", "live") else x)
    if kept != figure and not kept["recorded"]:
        kept["recorded"] = origin
    charts = _mapped(kept["charts"], lambda _, x: float(f"{x:.{_DIGITS}g}") if isinstance(x, float) else x)
    return {**kept, "charts": charts}


def _mapped(value: Any, change: Callable[[str, Any], Any], name: str = "") -> Any:
    """JSON with `change(name, value)` for every value in it that is neither object nor list."""
    if isinstance(value, dict):
        return {name: _mapped(x, change, name) for name, x in value.items()}
    return [_mapped(x, change) for x in value] if isinstance(value, list) else change(name, value)


# ---- one file out of many


def inlined(files: Mapping[str, Asset], data: str) -> str:
    """The index with everything it refers to inside, and the data for its modules."""
    index = files[INDEX].content.decode()
    outside = _SCRIPT.sub("", _MODULE.sub("", _STYLE.sub("", index)))
    if "/assets/" in outside or index.count("<head>") != 1 or len(_MODULE.findall(index)) != 1:
        raise RuntimeError("the index refers to an asset in a way that the export does not know")
    index = index.replace("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{_POLICY}">')
    index = _STYLE.sub(lambda tag: _style(files[tag[1]]), index)
    index = _MODULE.sub(lambda tag: _modules(files, tag[1], data), index)
    return _SCRIPT.sub(lambda tag: _script(files[tag[1]]), index)


def _text(asset: Asset, *unsafe: str) -> str:
    text = asset.content.decode()
    if any(part in text for part in unsafe):
        raise RuntimeError(f"{asset.name} would not survive being inlined")
    return text


def _style(asset: Asset) -> str:
    return f"<style>\n{_text(asset, '</', '/assets/')}</style>"


def _script(asset: Asset) -> str:
    text = _text(asset, "<!--")  # would change how the rest of the file is read
    text = re.sub("</(?=script)", r"<\\/", text, flags=re.IGNORECASE)
    return f"<script>\n{text}\n</script>"


def _modules(files: Mapping[str, Asset], first: str, data: str) -> str:
    """An import map with every module in it, the data, and the import that begins it all."""
    scripts = [asset for name, asset in files.items() if name.endswith(".js") and name != PLOTLY]
    encodings = {asset.name: b64encode(_renamed(files, asset).encode()).decode() for asset in scripts}
    modules = {f"levelhead/{name}": f"data:text/javascript;base64,{text}" for name, text in encodings.items()}
    return (
        f'<script type="application/json" id="levelhead-data">{data}</script>\n'
        f'<script type="importmap">{encoded({"imports": modules}).decode()}</script>\n'
        f'<script type="module">import "levelhead/{first}";</script>'
    )


def _renamed(files: Mapping[str, Asset], asset: Asset) -> str:
    """The module with names of the import map for addresses: a data: address has no neighbours."""

    def rename(found: re.Match[str]) -> str:
        before, quote, name = found.groups()
        if name not in files:
            raise RuntimeError(f"{asset.name} imports {name}, which is no asset")
        return f"{before}{quote}levelhead/{name}{quote}"

    return _IMPORT.sub(rename, asset.content.decode())

"""The page as one file: its figures computed over a grid, everything inline, no server, no network.

The same index, modules and drawing library as the served page. Modules become data: addresses under an import map, so
that a browser opens the file from a disk; a policy inside forbids it the network. No number in the file is marked live.

The order matters to readers with a slow line: first what the first chapter needs, which runs while the rest arrives;
then the other chapters, the drawing library, the figures, and at last the module that needs all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, product
from pathlib import Path
from typing import Any
from urllib.parse import quote

from levelhead.course.catalogue import catalogues
from levelhead.course.chapters import CHAPTERS
from levelhead.course.languages import PATTERN
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
LARGEST, PER_LANGUAGE = 9_600_000, 200_000  # bytes: of all but words, and of the words of each language
_DIGITS = 4

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)
_STYLE = re.compile(r'<link rel="stylesheet" href="/assets/([\w.-]+)">')
_MODULE = re.compile(r'<script type="module" src="/assets/([\w.-]+)"></script>')
_IMPORT = re.compile(r"""(\bfrom\s*|\bimport\s*)(["'])\./([\w.-]+\.js)\2""")
_LATER = re.compile(r"""\bimport\s*\(\s*(["'])\./([\w.-]+\.js)\1\s*\)""")
# The address of a module further down. One that has a neighbour has arrived whole.
_SAVED = """<script>
function levelheadModule(name) {
  const found = () => document.getElementById(name);
  if (found()?.nextElementSibling || document.readyState !== "loading") return Promise.resolve(found().textContent);
  return new Promise((resolve) => addEventListener("DOMContentLoaded", () => resolve(found().textContent)));
}
</script>
"""

Tell = Callable[[str], None]


def exported(*, run: Path | None = None, tell: Tell) -> str:
    """The file's text. `run` is shown in place of the recorded sample of heads."""
    shown = {} if run is None else {"heads": {"run": files.read(run)}}
    machine = about(export=True, run=False)
    origin = f"computed when this page was saved, by levelhead {machine['version']} on {machine['cpu']}"
    computed = {id: dict(_over_grid(id, shown.get(id, {}), origin, tell)) for id in figures.IDS}
    data = {"about": machine, "grid": {name: list(values) for name, values in GRID.items()}, "figures": computed}
    text = inlined(assets(), encoded(data).decode())
    if len(text.encode()) > largest():
        given = ", ".join(f"{id} {len(encoded(each)) / 1e6:.1f}" for id, each in computed.items())
        raise LevelheadError(expected("--export", f"{largest() / 1e6:.1f} MB at most", f"MB of {given}", "Report this"))
    return text


def largest() -> int:
    """Bytes of the file at most; a new language brings its own room."""
    return LARGEST + PER_LANGUAGE * len(catalogues())


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
    return {**kept, "charts": _filled(charts)}


def _filled(value: Any) -> Any:
    """JSON without the fields of charts that say nothing: the page reads an absent one as null, false or empty."""
    if isinstance(value, dict):
        return {name: _filled(x) for name, x in value.items() if not (x is None or x is False or x == {})}
    return [_filled(x) for x in value] if isinstance(value, list) else value


def _mapped(value: Any, change: Callable[[str, Any], Any], name: str = "") -> Any:
    """JSON with `change(name, value)` for every value in it that is neither object nor list."""
    if isinstance(value, dict):
        return {name: _mapped(x, change, name) for name, x in value.items()}
    return [_mapped(x, change) for x in value] if isinstance(value, list) else change(name, value)


# ---- one file out of many


def inlined(files: Mapping[str, Asset], data: str) -> str:
    """The index with everything it refers to inside, and the data for its modules."""
    index = files[INDEX].content.decode()
    outside = _MODULE.sub("", _STYLE.sub("", index))
    if (
        "/assets/" in outside
        or index.count("<head>") != 1
        or index.count("</body>") != 1
        or len(_MODULE.findall(index)) != 1
    ):
        raise RuntimeError("the index refers to an asset in a way that the export does not know")
    index = index.replace("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{_POLICY}">')
    index = _STYLE.sub(lambda tag: _style(files[tag[1]]), index)
    (entry,) = _MODULE.findall(index)
    return _MODULE.sub("", index).replace("</body>", f"{_modules(files, entry, data)}</body>")


def _text(asset: Asset, *unsafe: str) -> str:
    text = asset.content.decode()
    if any(part in text for part in unsafe):
        raise RuntimeError(f"{asset.name} would not survive being inlined")
    return text


def _style(asset: Asset) -> str:
    return f"<style>\n{_text(asset, '</', '/assets/')}</style>"


def _script(asset: Asset) -> str:
    """A script that a module starts when it needs it: a browser does not run this type."""
    text = _text(asset, "<!--")  # would change how the rest of the file is read
    text = re.sub("</(?=script)", r"<\\/", text, flags=re.IGNORECASE)
    return f'<script type="text/plain" id="levelhead-{Path(asset.name).stem}">\n{text}\n</script>\n'


def _modules(files: Mapping[str, Asset], entry: str, data: str) -> str:
    """The modules: those that others import as they begin are in an import map, the rest is read when it is needed."""
    texts = {name: asset.content.decode() for name, asset in files.items() if name.endswith(".js") and name != PLOTLY}
    needed = {entry, *(found[3] for text in texts.values() for found in _IMPORT.finditer(text))}
    addresses = {name: _address(_renamed(files, files[name])) for name in texts}
    now = {f"levelhead/{name}": addresses[name] for name in texts if name in needed}
    told = [(f"chapter-{one.id}.js", f"scene-{one.id}.js") for one in CHAPTERS]  # in the order of the story
    later = {name: _later(name, addresses[name]) for name in texts if name not in needed}
    return "".join(
        (
            _SAVED,
            f'<script type="importmap">{encoded({"imports": now}).decode()}</script>\n',
            *(later.pop(name, "") for name in ("story.js", f"words-{PATTERN}.js", *chain(*told[:1]))),
            f'<script type="module" async>import "levelhead/{entry}";</script>\n',
            *(later.pop(name, "") for name in chain(*told[1:])),
            _script(files[PLOTLY]),
            f'<script type="application/json" id="levelhead-data">{data}</script>\n',
            *later.values(),
        )
    )


def _address(text: str) -> str:
    """Escaped are only what an address cannot hold and what would end a script: base64 takes a third more."""
    return "data:text/javascript;charset=utf-8," + re.sub(r"[%#<\t\r\n]", lambda found: quote(found[0]), text)


def _later(name: str, address: str) -> str:
    return f'<script type="text/plain" id="levelhead/{name}">{address}</script>\n'


def _renamed(files: Mapping[str, Asset], asset: Asset) -> str:
    """The module with names for addresses: a data: address has no neighbours."""

    def known(name: str) -> str:
        if name not in files:
            raise RuntimeError(f"{asset.name} imports {name}, which is no asset")
        return f"levelhead/{name}"

    text = _IMPORT.sub(lambda found: f"{found[1]}{found[2]}{known(found[3])}{found[2]}", asset.content.decode())
    read = 'levelheadModule("{}").then((address) => import(address))'
    return _LATER.sub(lambda found: read.format(known(found[2])), text)

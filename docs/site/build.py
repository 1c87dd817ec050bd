"""Builds the site: `make site`, or `python docs/site/build.py FOLDER [STORY]` with a page that was exported before.

The story is the first page, the documentation lies beside it. Everything is in the folder: it can be opened from a disk
and copied to any web server. Needs levelhead installed, and the group "site" of pyproject.toml.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from pathlib import Path

from sphinx.cmd.build import build_main

import links
from levelhead import documentation
from levelhead.cli.main import main as levelhead
from levelhead.errors import LevelheadError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_COMMAND = re.compile(r"<dd>levelhead docs ([\w-]+)</dd>")
WITHOUT = (  # JavaScript: what the page then names is a command, and here a page
    "<code>levelhead docs</code></p></noscript>",
    '<a href="docs/index.html">docs</a></p></noscript>',
)
HELP = '<link rel="help" href="docs/index.html">\n'  # the story leads there


def pages(folder: Path) -> None:
    """The documentation, below `folder` as in the repository; a warning is an error."""
    work = folder.with_name(f"{folder.name}-work")  # Sphinx's extensions leave things there beside the pages
    options = ["--fail-on-warning", "--keep-going", "--fresh-env", "--conf-dir", str(HERE)]
    places = ["--doctree-dir", str(work / "trees"), str(ROOT), str(work / "pages")]
    failed = build_main([*options, "--quiet", "--builder", "html", *places])
    if not failed:
        shutil.copytree(work / "pages", folder, dirs_exist_ok=True)
    shutil.rmtree(work, ignore_errors=True)
    if failed:
        sys.exit("levelhead: Sphinx found faults; see above")
    shutil.copytree(
        ROOT / "docs" / "plots", folder / "docs" / "plots"
    )  # of the pages' own HTML, which Sphinx leaves alone
    for notebook in folder.glob("examples/notebooks/*.html"):
        notebook.write_text(_COMMAND.sub(_linked, notebook.read_text(encoding="utf-8")), encoding="utf-8")
    for leftover in (".buildinfo", "objects.inv"):
        (folder / leftover).unlink()
    (folder / ".nojekyll").touch()  # GitHub Pages then serves folders whose name begins with _


def _linked(found: re.Match[str]) -> str:
    """What a finding in a notebook names is a page of this site."""
    texts = documentation.pages().items()
    (page,) = {one.page for page, text in texts for one in documentation.sections(page, text) if one.anchor == found[1]}
    return f'<dd><a href="../../docs/{page}.html#{found[1]}">{found[1]}</a></dd>'


def story(folder: Path, exported: str | None) -> None:
    """The story and the lab bench."""
    if exported is not None:
        shutil.copyfile(exported, folder / "index.html")
    elif levelhead(["page", "--export", str(folder / "index.html")]):
        sys.exit("levelhead: the page was not written")
    page = folder / "index.html"
    text = page.read_text(encoding="utf-8").replace("</head>", f"{HELP}</head>", 1)
    page.write_text(text.replace(*WITHOUT, 1), encoding="utf-8")


def main(folder: Path, exported: str | None = None) -> None:
    begun = time.monotonic()
    try:
        documentation.site()
    except LevelheadError as error:
        sys.exit(f"levelhead: {error}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pages(folder)
    story(folder, exported)
    if broken := links.broken(folder):
        sys.exit("\n".join(["levelhead: links that lead nowhere:", *broken]))
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    took = time.monotonic() - begun
    print(f"levelhead: {folder}/index.html; {len(files)} files, {size:.1f} MB, {took:.0f} s; all links resolve")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

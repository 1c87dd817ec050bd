"""The site: built once, by Sphinx with warnings as errors; its links, its reference, and how it opens in a browser."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import levelhead as lh
import links
import page_server
from browsing import DESKTOP, MISSING, PHONE
from browsing import started_browser as started_browser
from levelhead import documentation
from levelhead.lab import figures
from levelhead.page import export

SPHINX = [name for name in ("sphinx", "myst_nb", "furo", "sphinx_copybutton") if find_spec(name) is None]
ADDRESS = "https://levelhead.example/base"  # where the site will be
CLIPBOARD = ["clipboard-read", "clipboard-write"]

pytestmark = pytest.mark.needs("the site", " and ".join([*SPHINX, *MISSING]))


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole folder; the figures of the lab bench are stubs."""
    place = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "figure", page_server.stub)
        patch.setenv(documentation.VARIABLE, ADDRESS)
        (place / "story.html").write_text(export.exported(tell=lambda words: None))
    command = [sys.executable, str(root / "docs" / "site" / "build.py"), str(place / "site"), str(place / "story.html")]
    env = {**os.environ, documentation.VARIABLE: ADDRESS}
    built = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env)
    assert built.returncode == 0, built.stdout + built.stderr
    assert built.stdout.rstrip().endswith("all links resolve")
    return place / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, links.Page]:
    """Every HTML file by its place."""
    return {str(path.relative_to(site)): links.Page(path.read_text()) for path in site.rglob("*.html")}


# ---- what is there


def test_everything_of_the_repository_that_people_read_is_there(
    root: Path, site: Path, pages: dict[str, links.Page]
) -> None:
    written = [*root.glob("docs/*.md"), *root.glob("docs/api/*.md"), *root.glob("examples/notebooks/*.ipynb")]
    assert {str(path.relative_to(root).with_suffix(".html")) for path in written} <= pages.keys()
    without = re.search(r"<noscript>.*</noscript>", (site / "index.html").read_text())
    assert without and '<a href="docs/index.html">' in without[0], "without JavaScript the story leads to them"
    assert "../index.html" in pages["docs/index.html"].links, "the start page leads to the story"
    start = (site / "docs" / "index.html").read_text()
    assert all(
        word in start
        for word in ("<strong>learn</strong>", "<strong>see your model</strong>", "<strong>compute</strong>")
    )
    assert not list(site.rglob("*.doctree"))
    assert {path.name for path in site.parent.iterdir()} == {"site", "story.html"}, "nothing is left beside it"
    own_model = next(page for place, page in pages.items() if place.endswith("your_own_model.html"))
    assert "../../docs/health.html#wrong-scale" in own_model.links, "findings in a notebook lead to their heading"


def test_every_heading_has_the_name_that_findings_link_to(pages: dict[str, links.Page]) -> None:
    for page in ("health", "preflight"):
        for one in documentation.sections(page, documentation.pages()[page]):
            assert one.anchor in pages[f"docs/{page}.html"].names, one.title


def test_the_reference_has_every_public_name(site: Path, pages: dict[str, links.Page]) -> None:
    names = set().union(*(page.names for place, page in pages.items() if place.startswith("docs/api/")))
    public = set(lh.__all__) - {"__version__", "health", *lh._ON_DEMAND, "scaling", "scoring", "stats"}  # modules
    for module in ("distributed", "lab", "remedies", "sinks", "torch"):  # read, as importing them takes seconds
        text = Path(lh.__file__).with_name(module).joinpath("__init__.py").read_text()
        listed = re.search(r"^__all__ = (\[.*?\])", text, re.S | re.M)
        assert listed is not None
        public |= {f"{module}.{name}" for name in ast.literal_eval(listed[1])}
    public -= {"torch.huggingface", "torch.KeyValueCache"}  # a module; the same class as KeyValueCache
    assert {name for name in public if f"levelhead.{name}" not in names} == set()
    assert "levelhead.torch.huggingface.use" in names


def test_the_reference_shows_nothing_private(site: Path) -> None:
    for path in (site / "docs" / "api").glob("*.html"):
        article = path.read_text().split("<article", 1)[1].split("</article>", 1)[0]
        words = re.sub(r"<[^>]*>", "", article)
        assert not re.search(r" at 0x[0-9a-f]+|levelhead(\.\w+)*\._[a-z]", words), path.name
        assert not re.search(r"(?<![\w.])/(home|root|Users|work|tmp)/\w", article), path.name
        assert not re.search(r"system-message|Unpack\[|&lt;(function|factory)|\\\\\|", article), path.name


def test_a_wrong_address_is_refused_before_any_work(root: Path, tmp_path: Path) -> None:
    env = {**os.environ, documentation.VARIABLE: "nowhere"}
    command = [sys.executable, str(root / "docs" / "site" / "build.py"), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 1 and done.stderr.startswith("levelhead: LEVELHEAD_SITE: expected a web address")
    assert not list(tmp_path.iterdir())


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.html").write_text('<h1 id="here">b</h1>')
    outside = tmp_path.parent / "outside.html"
    outside.touch()
    good = [
        "a/b.html",
        "a/b.html#here",
        "#top",
        "https://a.org/x",
        "data:,x",
        "index.html#/root?lang=en",
        "index.html#d_k=4",
    ]
    bad = ["a/c.html", "a/b.html#gone", "#gone", "../outside.html", "a/"]
    text = "".join(f'<a href="{link}">x</a>' for link in (*good, *bad))
    loads = '<script src="https://cdn.org/x.js"></script><img srcset="a/p.png 2x"><link href="//cdn.org/x.css">'
    (tmp_path / "index.html").write_text(f'<p id="top"></p>{text}{loads}')
    said = links.broken(tmp_path)
    assert {line for line in said if "outside" in line and "loads" in line} == {
        "index.html: loads https://cdn.org/x.js from outside",
        "index.html: loads //cdn.org/x.css from outside",
    }
    assert [line for line in said if "loads" not in line] == [f"index.html: {x}" for x in (*bad, "a/p.png")]


# ---- in a browser


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    """A plain static server, below a folder, as many hosts have it."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site.parent)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/site"
        server.shutdown()


@pytest.mark.parametrize(
    ("where", "size", "scheme"), [("a disk", DESKTOP, "light"), ("a server", PHONE, "dark")], ids=["a disk", "a server"]
)
def test_it_opens(
    where: str, size: dict[str, int], scheme: str, browser: Any, site: Path, request: pytest.FixtureRequest
) -> None:
    base = site.as_uri() if where == "a disk" else request.getfixturevalue("served")
    with browser.new_context(viewport=size, color_scheme=scheme) as context:
        tab, faults = context.new_page(), []
        tab.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("request", lambda asked: faults.append(asked.url) if not asked.url.startswith((base, "data:")) else None)
        for place in ("docs/index", "docs/api/models", "docs/from-pytorch", "docs/kernel", "README", "index"):
            tab.goto(f"{base}/{place}.html")
            tab.locator("h1").first.wait_for()
            if place == "index":
                if size == PHONE:
                    tab.locator(".contents summary").click()
                tab.locator(".to-docs:visible").click()
                tab.get_by_role("heading", name="Start here").wait_for()
            wide = tab.evaluate("document.documentElement.scrollWidth")
            assert wide <= size["width"], f"{place} is {wide} pixels wide"
        tab.goto(f"{base}/docs/health.html#softcap-saturated")
        heading = "document.querySelector('#softcap-saturated > h3')"
        tab.wait_for_function(f"{heading}.getBoundingClientRect().top < innerHeight")
        tab.goto(f"{base}/search.html?q=saturated")
        tab.locator("#search-results li a").first.wait_for()
        assert faults == []


BEGINS = b'<script type="module" async>'
FIRST_CHAPTER = 400_000  # bytes


def test_the_first_chapter_is_there_before_the_charts(browser: Any, site: Path) -> None:
    """A line that stops after the first part: the chapter asks its question, and the rest follows."""
    text, rest = (site / "index.html").read_bytes(), threading.Event()
    first = text.index(BEGINS) + 200
    assert first <= FIRST_CHAPTER

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text[:first])
            self.wfile.flush()
            rest.wait(60)
            self.wfile.write(text[first:])

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server, browser.new_context(permissions=CLIPBOARD) as context:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tab, faults = context.new_page(), []
        tab.on("pageerror", lambda error: faults.append(str(error)))
        try:
            tab.goto(f"http://127.0.0.1:{server.server_port}/", wait_until="commit")
            tab.locator("[data-chapter=hook] .option").first.wait_for()
            assert tab.evaluate("document.readyState") == "loading"
        finally:
            rest.set()
        tab.goto(f"http://127.0.0.1:{server.server_port}/#d_k=8&scale=none&keys=32&seed=0")
        tab.get_by_text("copy link").click()
        tab.get_by_text("copied", exact=True).wait_for()
        link = tab.evaluate("navigator.clipboard.readText()")
        assert link == f"{ADDRESS}/index.html#d_k=8&scale=none&keys=32&seed=0"
        assert faults == []
        server.shutdown()

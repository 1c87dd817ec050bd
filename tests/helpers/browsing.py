"""The page in Chromium, for tests: a server, a browser, tabs that watch the console and every request."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from levelhead.lab import figures

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MISSING = [name for name, there in (("chromium", CHROMIUM), ("playwright", find_spec("playwright"))) if there is None]
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
PANELS = len(figures.PANELS)
SCALES = {"none": "none", "sqrt": "1/sqrt(d_k)", "power": "1/d_k^p"}  # by short names
PATIENCE = 30_000  # ms for anything to appear; far more than it takes

in_a_browser = pytest.mark.needs("the page in a browser", " and ".join(MISSING))


# ---- one server, one browser


@contextmanager
def serving(*options: str) -> Iterator[str]:
    """Where the page is served, with its token."""
    command = [sys.executable, "-m", "levelhead", "page", "--no-open", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


@pytest.fixture(scope="session", name="address")
def served_address() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture(scope="module", name="browser")
def started_browser() -> Iterator[Any]:
    assert not MISSING, f"the page's tests need {' and '.join(MISSING)}"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        started = player.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@dataclass
class Tab:
    """A page that is open, and what went on in it."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)

    def all_drawn(self) -> Tab:
        panels = "figure[data-drawn]:not(.claim figure)"  # a claim that is open has a figure of its own
        self.until(lambda: self.count(panels) == PANELS, "every panel to draw")
        return self

    def until(self, happened: Callable[[], bool], what: str) -> None:
        for _ in range(PATIENCE // 50):
            if happened():
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"waited in vain for {what}; {self.text('.trouble:not([hidden])')}")

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())

    def text(self, selector: str) -> str:
        return " ".join(self.page.locator(selector).all_inner_texts())

    def ask(self, script: str) -> Any:
        return self.page.evaluate(script)

    def goes_to(self, hash: str) -> None:
        """Changes the address, and returns when the page has noticed."""
        self.page.evaluate(
            """hash => new Promise((noticed) => {
                if (location.hash === hash) return noticed();
                addEventListener("hashchange", () => noticed(), { once: true });
                location.hash = hash;
            })""",
            hash,
        )

    def rests(self) -> None:
        """Until no figure is on its way. Panels follow in the next frame, those out of sight after a pause of the
        page: its own clock is waited for, which may be late on a busy machine."""
        self.ask("new Promise((passed) => requestAnimationFrame(() => setTimeout(passed, 200)))")
        self.until(lambda: self.count("figure[aria-busy]") == 0, "figures to arrive")

    def divide(self, by: str) -> None:
        self.page.locator(f"#strip input[value='{SCALES[by]}']").check(force=True)  # under its own words

    def slide(self, name: str, key: str) -> None:
        self.page.get_by_role("slider", name=name, exact=True).press(key)

    def bubble(self) -> float:
        place = self.ask("document.querySelector('.spirit .bubble').style.transform")
        return float(re.findall(r"[\d.]+", place)[0])

    def fact(self, figure: str, label: str) -> str:
        facts = self.page.locator(f"[data-figure={figure}] .facts > div")
        return str(facts.filter(has=self.page.get_by_text(label, exact=True)).first.inner_text())

    def figures_asked(self) -> dict[str, dict[str, list[str]]]:
        parts = [urlsplit(one.url) for one in self.requests]
        return {
            part.path.rsplit("/", 1)[1]: parse_qs(part.query) for part in parts if part.path.startswith("/api/figure/")
        }


@contextmanager
def tabs(browser: Any) -> Iterator[Callable[..., Tab]]:
    contexts, open_ones = [], []

    def open_tab(url: str, expected_errors: int = 0, **options: Any) -> Tab:
        context = browser.new_context(**{"viewport": DESKTOP} | options)
        tab = Tab(context.new_page())
        tab.page.set_default_timeout(PATIENCE)
        tab.page.on("console", lambda m: tab.errors.append(m.text) if m.type == "error" else None)
        tab.page.on("pageerror", lambda error: tab.errors.append(str(error)))
        tab.page.on("request", lambda request: tab.requests.append(request))
        tab.page.goto(url)
        contexts.append(context)
        open_ones.append((tab, url, expected_errors))
        return tab

    yield open_tab
    for tab, url, expected_errors in open_ones:
        assert len(tab.errors) == expected_errors, tab.errors
        for request in tab.requests:
            assert_local(request.url, url)
    for context in contexts:
        context.close()


def assert_local(requested: str, page: str) -> None:
    there, here = urlsplit(requested), urlsplit(page)
    inside = there.scheme in ("data", "blob")
    assert inside or (there.scheme, there.netloc) == (here.scheme, here.netloc), requested

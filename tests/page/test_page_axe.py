"""What axe, the checker of accessibility, finds on every chapter, the cards and the bench, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from browsing import MISSING, Tab, started_browser, tabs  # noqa: F401
from levelhead.course.chapters import ORDER

AXE = [] if find_spec("axe_playwright_python") else ["axe-playwright-python"]
pytestmark = pytest.mark.needs("axe in a browser", " and ".join(MISSING + AXE))

GRAVE = ("serious", "critical")
# Dark is other colours and nothing else, so there only they are looked at.
SCHEMES: dict[str, dict[str, Any]] = {
    "light": {"resultTypes": ["violations"]},
    "dark": {"resultTypes": ["violations"], "runOnly": ["color-contrast"]},
}


@pytest.fixture(scope="module", name="tab")
def one_tab(address: str, browser: Any) -> Iterator[Tab]:
    """One tab for all: the story and axe are loaded once."""
    from axe_playwright_python.base import AXE_SCRIPT

    with tabs(browser) as open_tab:
        tab = open_tab(address, reduced_motion="reduce")
        tab.page.evaluate(AXE_SCRIPT)
        yield tab


def grave(tab: Tab, place: str, scheme: str) -> list[str]:
    tab.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    found = tab.page.evaluate("([place, options]) => axe.run(place, options)", [place, SCHEMES[scheme]])["violations"]
    return [
        f"{scheme}: {one['impact']} {one['id']}, {node['target']}: {node['failureSummary']}"
        for one in found
        if one["impact"] in GRAVE
        for node in one["nodes"]
    ]


@pytest.mark.parametrize("chapter", ORDER)
def test_a_chapter_has_no_serious_violation(tab: Tab, chapter: str) -> None:
    tab.page.evaluate("hash => { location.hash = hash }", f"#/{chapter}?answers={chapter}:skip")
    tab.page.locator(f"[data-chapter={chapter}] .takeaway").wait_for()
    tab.ask("document.querySelectorAll('.fold').forEach((x) => { x.open = true })")
    tab.page.locator(".fold-cards .card-face").wait_for()
    assert [grave(tab, "#story", scheme) for scheme in SCHEMES] == [[], []]


def test_cards_have_no_serious_violation(tab: Tab) -> None:
    tab.page.evaluate("location.hash = '#/cards'")
    tab.page.locator(".cards-view .card-face").wait_for()
    tab.page.keyboard.press(" ")
    tab.page.locator(".card-back").wait_for()
    assert [grave(tab, "#story", scheme) for scheme in SCHEMES] == [[], []]


def test_axe_finds_what_is_wrong(tab: Tab) -> None:
    """It looks, and both lists of rules have the colours."""
    tab.page.evaluate("location.hash = '#/hook'")
    tab.page.locator("[data-chapter=hook] .option").first.wait_for()
    tab.ask(
        "document.querySelector('[data-chapter]').append(Object.assign(document.createElement('p'),"
        " { textContent: 'pale', style: 'color: #777; background: #888' }))"
    )
    assert all("color-contrast" in grave(tab, "#story", scheme)[0] for scheme in SCHEMES)


def test_the_bench_has_no_serious_violation(tab: Tab) -> None:
    tab.page.evaluate("location.hash = '#bench'")
    tab.all_drawn()
    assert [grave(tab, "#bench", scheme) for scheme in SCHEMES] == [[], []]

"""Beside the text the whole scene of each step is in sight, in a real browser: the words speak of nothing that is
scrolled away. On a phone a scene is as tall as it must be, and nothing of it is cut off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from browsing import PHONE, Tab, in_a_browser, started_browser, tabs  # noqa: F401
from levelhead.course.catalogue import catalogues
from levelhead.course.chapter import Chapter
from levelhead.course.chapters import CHAPTERS

pytestmark = in_a_browser

LAPTOP, LARGE = {"width": 1280, "height": 800}, {"width": 1440, "height": 900}
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=[chapter.id for chapter in CHAPTERS])
each_language = pytest.mark.parametrize("language", list(catalogues()))
LONG = ["hand-terms"]  # the list of 64 terms scrolls to the term that is added: its box is in sight, its rows cannot be

# While the text begins beside it: what of the scene is out of sight, and which parts of it scroll up and down.
HIDDEN = """() => {
  const box = (name) => document.querySelector(name).getBoundingClientRect();
  scrollTo({ top: scrollY + box('.chapter-text').top - 80, behavior: 'instant' });
  const scene = document.querySelector('.scene');
  const [{ top, bottom }, bar] = [box('.scene'), Math.max(box('.top-bar').bottom, 0)];
  const all = [...scene.querySelectorAll('*')];
  const parts = all.filter((x) => !x.closest('.hand-terms *') && x.getClientRects().length);
  const last = Math.max(...parts.map((x) => x.getBoundingClientRect().bottom));
  const scrolls = (x) =>
    x.scrollHeight > x.clientHeight + 1 && ['auto', 'scroll'].includes(getComputedStyle(x).overflowY);
  return {
    above: bar - top, below: Math.max(bottom, last) - innerHeight, beyond: last - bottom,
    scrolled: [scene, ...parts].filter(scrolls).map((x) => x.className), faded: scene.hasAttribute('data-below'),
  };
}"""
# At the top of the page the scene stands lower.
FIRST = """() => {
  scrollTo(0, 0);
  return document.querySelector('.scene').getBoundingClientRect().bottom - innerHeight;
}"""
# Parts of the scene that end outside of it, but for those in a region that says that it scrolls sideways.
CUT = """() => {
  const scene = document.querySelector('.scene');
  const { left, right } = scene.getBoundingClientRect();
  const out = (x) => x.getBoundingClientRect().right > right + 1 || x.getBoundingClientRect().left < left - 1;
  const parts = [...scene.querySelectorAll('*')].filter((x) => x.getClientRects().length);
  const inside = parts.filter((x) => !x.closest('svg *, .sideways[tabindex] *, .step-room'));
  return [
    ...(scene.scrollHeight > scene.clientHeight + 1 ? ['height'] : []),
    ...(document.documentElement.scrollWidth > innerWidth ? ['width'] : []),
    ...inside.filter(out).map((x) => x.className || x.tagName),
  ];
}"""


@pytest.fixture(scope="module", name="tab")
def one_tab(address: str, browser: Any) -> Iterator[Tab]:
    with tabs(browser) as open_tab:
        yield open_tab(address, viewport=LAPTOP)


def shows(tab: Tab, chapter: Chapter, language: str, step: int) -> None:
    place = f"#/{chapter.id}?lang={language}&answers={chapter.id}:skip"
    tab.page.evaluate("hash => { location.hash = hash }", f"{place}&step={step}" if step else place)
    tab.page.locator(f"html[lang={language}] [data-chapter={chapter.id}] .because").wait_for()
    tab.page.wait_for_timeout(150)  # charts take their width a frame later


@each_language
@each_chapter
@pytest.mark.parametrize("size", [LAPTOP, LARGE], ids=["laptop", "large"])
def test_the_whole_scene_of_each_step_is_in_sight(
    tab: Tab, chapter: Chapter, language: str, size: dict[str, int]
) -> None:
    tab.page.set_viewport_size(size)
    for step in range(max(chapter.steps, 1)):
        shows(tab, chapter, language, step)
        found = tab.page.evaluate(HIDDEN)
        assert max(found["above"], found["below"], found["beyond"]) <= 0 and not found["faded"], (step, found)
        assert [name for name in found["scrolled"] if name not in LONG] == [], step
        assert tab.page.evaluate(FIRST) <= 0, step


@each_language
@each_chapter
def test_nothing_of_a_scene_is_cut_off_on_a_phone(tab: Tab, chapter: Chapter, language: str) -> None:
    tab.page.set_viewport_size(PHONE)
    for step in range(max(chapter.steps, 1)):
        shows(tab, chapter, language, step)
        assert tab.page.evaluate(CUT) == [], step


@each_language
def test_what_a_reader_changes_stays_in_sight(tab: Tab, language: str) -> None:
    """Where a control makes its scene taller: the most logits, each cure with its verdict, the other model."""
    tab.page.set_viewport_size(LAPTOP)
    by_id = {chapter.id: chapter for chapter in CHAPTERS}
    shows(tab, by_id["softmax"], language, 0)
    more = tab.page.locator(".own-tools button").first
    while more.is_enabled():
        more.click()
    in_sight = [tab.page.evaluate(HIDDEN)]
    for step in range(1, by_id["attack"].steps):
        shows(tab, by_id["attack"], language, step)
        for cure in ("root", "width", "norm", "cap"):
            tab.page.locator(f"input[value={cure}]").check(force=True)
            in_sight.append(tab.page.evaluate(HIDDEN))
    shows(tab, by_id["root"], language, 1)
    tab.page.locator("input[value=large]").check(force=True)
    in_sight.append(tab.page.evaluate(HIDDEN))
    assert [one for one in in_sight if one["below"] > 0 or one["scrolled"]] == []

"""What is in sight while one reads, in a real browser: the bar in one line, the scene's top beside the text, whole
tables, words that belong to a number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from browsing import DESKTOP, PHONE, Tab, in_a_browser, started_browser, tabs  # noqa: F401
from levelhead.course.catalogue import catalogues
from levelhead.course.chapter import Chapter
from levelhead.course.chapters import CHAPTERS
from levelhead.course.results import claim

pytestmark = in_a_browser

LAPTOP = {"width": 1280, "height": 800}
LOW = {"width": 1280, "height": 500}
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=[chapter.id for chapter in CHAPTERS])


@pytest.fixture(scope="module", name="tab")
def one_tab(address: str, browser: Any) -> Iterator[Tab]:
    with tabs(browser) as open_tab:
        yield open_tab(address, viewport=PHONE)


def shows(tab: Tab, chapter: str, language: str = "en", step: int = 0) -> None:
    place = f"#/{chapter}?lang={language}&answers={chapter}:skip&step={step}"
    tab.page.evaluate("hash => { location.hash = hash }", place)
    tab.page.locator(f"html[lang={language}] [data-chapter={chapter}] .because").wait_for()
    tab.page.wait_for_timeout(150)  # charts take their width a frame later


# Lines of text of each item of the bar: its height over that of a line.
LINES = """() => [...document.querySelectorAll('.top-bar .contents-title, .top-bar .contents-at, .top-bar .to-bench')]
  .filter((x) => x.getClientRects().length).map((x) => {
    const range = document.createRange();
    range.selectNodeContents(x);
    return new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size;
  })"""


@pytest.mark.parametrize("width", [320, 360, 375, 390])
def test_the_bar_is_one_line_on_every_phone(tab: Tab, width: int) -> None:
    tab.page.set_viewport_size({"width": width, "height": 740})
    for language in catalogues():
        shows(tab, CHAPTERS[-1].id, language)
        lines = tab.page.evaluate(LINES)
        assert len(lines) >= 2 and set(lines) == {1}, language
        assert tab.ask("document.documentElement.scrollWidth <= innerWidth")


# Where the scene is while its text begins, and whether its end can be reached.
BESIDE = """() => {
  const box = (name) => document.querySelector(name).getBoundingClientRect();
  scrollTo({ top: scrollY + box('.chapter-text').top - 80, behavior: 'instant' });
  const scene = document.querySelector('.scene');
  const { top, bottom } = scene.getBoundingClientRect();
  const bar = Math.max(box('.top-bar').bottom, 0);
  const first = scene.firstElementChild.getBoundingClientRect().top;
  scene.scrollTop = scene.scrollHeight;
  const last = [...scene.children].filter((x) => x.offsetHeight).at(-1).getBoundingClientRect().bottom;
  const reached = last <= Math.min(scene.getBoundingClientRect().bottom, innerHeight) + 1;
  scene.scrollTop = 0;
  return { top: top - bar, bottom: innerHeight - bottom, first: first - bar, reached };
}"""


@each_chapter
@pytest.mark.parametrize("size", [LAPTOP, LOW], ids=["laptop", "low"])
def test_beside_the_text_a_scene_shows_its_top_and_scrolls_to_its_end(
    tab: Tab, chapter: Chapter, size: dict[str, int]
) -> None:
    tab.page.set_viewport_size(size)
    shows(tab, chapter.id)
    found = tab.page.evaluate(BESIDE)
    assert found["reached"] and min(found["top"], found["bottom"], found["first"]) >= 0, found
    scrolls = tab.ask(
        "(() => { const x = document.querySelector('.scene'); return x.scrollHeight > x.clientHeight + 1 })()"
    )
    assert tab.ask("document.querySelector('.scene').tabIndex") == (0 if scrolls else -1)
    tab.until(
        lambda: tab.ask("document.querySelector('.scene').hasAttribute('data-below')") == scrolls, "a sign of more"
    )


def test_the_level_of_own_logits_is_in_sight_beside_their_sliders(tab: Tab) -> None:
    tab.page.set_viewport_size(LAPTOP)
    for language in catalogues():
        shows(tab, "softmax", language)
        edges = "[...document.querySelectorAll('.scene, .scene .spirit')].map((x) => x.getBoundingClientRect().bottom)"
        scene, level = tab.ask(edges)
        assert level <= scene, language


@pytest.mark.parametrize("chapter", [one for one in CHAPTERS if one.steps], ids=lambda one: one.id)
@pytest.mark.parametrize("size", [LAPTOP, LOW, DESKTOP], ids=["laptop", "low", "desktop"])
def test_the_controls_hide_no_words_of_their_step(tab: Tab, chapter: Chapter, size: dict[str, int]) -> None:
    tab.page.set_viewport_size(size)
    shows(tab, chapter.id)
    tab.page.evaluate(BESIDE)
    edge = "document.querySelector('{}').getBoundingClientRect().{}"
    assert tab.ask(edge.format(".step-words", "top")) >= tab.ask(edge.format(".player", "bottom")) - 1


@pytest.mark.parametrize("size", [PHONE, {"width": 360, "height": 740}], ids=["390", "360"])
def test_the_jacobian_of_a_large_gap_is_whole_on_a_phone(tab: Tab, size: dict[str, int]) -> None:
    tab.page.set_viewport_size(size)
    for language in catalogues():
        shows(tab, "saturation", language)
        tab.ask(
            "(() => { const x = document.querySelector('.scene input'); x.value = 6;"
            " x.dispatchEvent(new Event('input')); })()"
        )
        assert tab.ask("(x => x.scrollWidth - x.clientWidth)(document.querySelector('.saturation-j').parentNode)") <= 0
        signs = [text.startswith("−") for text in tab.page.locator(".saturation-j td").all_inner_texts()]
        below = tab.ask("[...document.querySelectorAll('.saturation-j td')].map((x) => x.classList.contains('below'))")
        assert signs == below and sum(below) == 6
        assert tab.count(".saturation-three .number") == 3


def test_dots_after_the_first_numbers_never_stand_alone(tab: Tab) -> None:
    tab.page.set_viewport_size({"width": 320, "height": 640})
    shows(tab, "by_hand")
    ends = tab.page.locator(".heat-first span:last-child").all_inner_texts()
    assert len(ends) == 3 and all(text.endswith(" …") and text[-3].isdigit() for text in ends)


@pytest.mark.parametrize("language", list(catalogues()))
def test_a_claim_says_which_part_holds_and_a_line_says_its_kind(tab: Tab, language: str) -> None:
    told = catalogues()[language]
    shows(tab, "training", language)
    tab.page.locator(".fold-claims summary").click()
    clauses = tab.page.locator(".claim-list li > .soft").all_inner_texts()
    assert len(clauses) == len(told["training"]["claims"]) == 2
    assert f"{claim('C7')['measured']['gradient of W_Q']:.2g}" in clauses[0]
    kinds = tab.page.locator(".ends .number").all_inner_texts()
    assert kinds == list(told["shell"]["kinds"].values()) and list(told["shell"]["kinds"]) == list(
        told["shell"]["sources"]
    )


# Words at the axes that do not fit: cut off at an edge of their chart.
OFF = """() => [...document.querySelectorAll('#story .axis-word')].filter((x) => {
  const [own, chart] = [x.getBoundingClientRect(), x.closest('svg').getBoundingClientRect()];
  const across = own.left < chart.left - 1 || own.right > chart.right + 1;
  return across || own.top < chart.top - 4 || own.bottom > chart.bottom + 4; // the box of a low index is taller than it
}).map((x) => x.textContent)"""


@each_chapter
def test_the_words_at_an_axis_fit_on_the_narrowest_phone(tab: Tab, chapter: Chapter) -> None:
    tab.page.set_viewport_size({"width": 320, "height": 640})
    for language in catalogues():
        for step in range(max(chapter.steps, 1)):
            shows(tab, chapter.id, language, step)
            assert tab.page.evaluate(OFF) == [], (language, step)

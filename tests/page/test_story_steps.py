"""The controls of a scene's steps stay where they are, end at the ends, and what is too wide for a phone says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from browsing import DESKTOP, PHONE, Tab, in_a_browser, started_browser, tabs  # noqa: F401
from levelhead.course import story
from levelhead.course.catalogue import catalogues
from levelhead.course.chapter import Chapter
from levelhead.course.chapters import CHAPTERS

pytestmark = in_a_browser

STEPPED = [chapter for chapter in CHAPTERS if chapter.steps]
LANGUAGES = list(catalogues())
each_stepped = pytest.mark.parametrize("chapter", STEPPED, ids=[chapter.id for chapter in STEPPED])
NARROW = {"width": 320, "height": 640}

# Presses forward to the last step and back to the first one. After each press, where the controls are, and whether the
# sentence of the step is in sight below them.
PRESSED = """async (steps) => {
  const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const box = (name) => document.querySelector(name).getBoundingClientRect();
  const controls = () => [...document.querySelectorAll('.player > :not([hidden])')].flatMap((x) => {
    const { x: left, y, width, height } = x.getBoundingClientRect();
    return [left, y, width, height];
  });
  const found = { controls: [controls()], hidden: [] };
  for (const name of ['forward', 'back']) {
    for (let i = 1; i < steps; i += 1) {
      document.querySelector(`.player-${name}`).click();
      await frame();
      found.controls.push(controls());
      const said = box('.step-words');
      if (said.top < box('.player').bottom - 1 || said.top > innerHeight) found.hidden.push(location.hash);
    }
  }
  return found;
}"""
SCROLLED = """by => { scrollTo({ top: 0, behavior: 'instant' });
  scrollBy({ top: document.querySelector('.scene').getBoundingClientRect().top + by, behavior: 'instant' }); }"""


@pytest.fixture(scope="module", name="tab")
def one_tab(address: str, browser: Any) -> Iterator[Tab]:
    with tabs(browser) as open_tab:
        yield open_tab(address, viewport=PHONE)


def shows(tab: Tab, chapter: Chapter, language: str, step: int = 0) -> None:
    place = f"#/{chapter.id}?lang={language}&answers={chapter.id}:skip"
    tab.page.evaluate("hash => { location.hash = hash }", f"{place}&step={step}" if step else place)
    tab.page.locator(f"html[lang={language}] [data-chapter={chapter.id}] .because").wait_for()
    tab.page.wait_for_timeout(150)  # charts take their width a frame later


@each_stepped
@pytest.mark.parametrize("size", [PHONE, NARROW, DESKTOP], ids=["phone", "narrow", "desktop"])
def test_the_controls_stay_where_they_are(tab: Tab, chapter: Chapter, size: dict[str, int]) -> None:
    """From both places from which a reader presses them: the scene begins in the middle of the window, or it is
    scrolled so far that the controls stick to the window's edge."""
    tab.page.set_viewport_size(size)
    for language in LANGUAGES:
        for scrolled in (-200, 150):
            shows(tab, chapter, language)
            tab.page.evaluate(SCROLLED, scrolled)
            found = tab.page.evaluate(PRESSED, chapter.steps)
            first, *others = found["controls"]
            assert 0 <= first[1] < size["height"] / 2 and len(others) == 2 * (chapter.steps - 1)
            for places in others:
                assert places == pytest.approx(first, abs=1.5), (language, scrolled)
            if size != DESKTOP:  # there the scene stands beside the text, which stays where it is
                assert found["hidden"] == []


@each_stepped
def test_the_steps_end_at_the_ends_and_keep_the_focus(tab: Tab, chapter: Chapter) -> None:
    tab.page.set_viewport_size(PHONE)
    shows(tab, chapter, "en")
    back, forward = tab.page.locator(".player-back"), tab.page.locator(".player-forward")
    for step in range(chapter.steps):
        ends = [back.get_attribute("aria-disabled"), forward.get_attribute("aria-disabled")]
        assert ends == [str(step == 0).lower(), str(step == chapter.steps - 1).lower()]
        forward.focus()
        tab.page.keyboard.press("Enter")
        assert "player-forward" in tab.ask("document.activeElement.className")
    last = f"{chapter.steps} of {chapter.steps}"
    assert last in tab.text(".player-at")  # one press too many does nothing, in this chapter
    assert tab.count(f"[data-chapter={chapter.id}]") == 1
    back.focus()
    for _ in range(chapter.steps):
        tab.page.keyboard.press("Enter")
    assert "1 of" in tab.text(".player-at") and "player-back" in tab.ask("document.activeElement.className")


# What scrolls sideways: whether it shows that there is more, and whether the keyboard reaches it.
HIDDEN = """() => [...document.querySelectorAll('#story main *')].filter((x) => {
  const style = getComputedStyle(x);
  return x.scrollWidth > x.clientWidth + 1 && ['auto', 'scroll'].includes(style.overflowX) && x.clientWidth;
}).filter((x) => !(x.dataset.more && x.tabIndex === 0 && x.ariaLabel && getComputedStyle(x).maskImage !== 'none'))
  .map((x) => x.className + ': ' + x.textContent.slice(0, 60))"""
CUT = """() => [...document.querySelectorAll('.code')].filter((x) => x.scrollWidth > x.clientWidth)
  .map((x) => x.textContent.slice(0, 60))"""
UNFOLDED = "document.querySelectorAll('.fold:not(.fold-cards)').forEach((x) => { x.open = true })"


@pytest.mark.parametrize("chapter", CHAPTERS, ids=[chapter.id for chapter in CHAPTERS])
def test_nothing_is_cut_off_without_a_sign(tab: Tab, chapter: Chapter) -> None:
    for size in (PHONE, NARROW):
        tab.page.set_viewport_size(size)
        for step in range(max(chapter.steps, 1)):
            shows(tab, chapter, "en", step)
            tab.ask(UNFOLDED)
            tab.page.wait_for_timeout(150)
            assert tab.ask(HIDDEN) == [] and tab.ask(CUT) == [], size
    assert tab.ask("document.querySelector('.code').textContent") == story.sample(chapter.id, "numpy")


def test_a_formula_goes_on_in_the_next_line(tab: Tab) -> None:
    """In one line where there is room, in several on a phone, and in all cases with one text alternative."""
    chapter = next(chapter for chapter in CHAPTERS if chapter.id == "by_hand")
    height = "document.querySelector('.equation[aria-label^=\"Var(Q_il)\"]').offsetHeight"
    found = []
    for size in (DESKTOP, NARROW):
        tab.page.set_viewport_size(size)
        shows(tab, chapter, "en")
        tab.ask(UNFOLDED)
        tab.page.wait_for_timeout(150)
        found.append(tab.ask(height))
    assert found[1] > 1.5 * found[0]
    labelled = (
        "[...document.querySelectorAll('.equation')].every((x) => x.getAttribute('role') === 'math' && x.ariaLabel)"
    )
    assert tab.ask(labelled)


def test_without_a_font_for_mathematics_an_index_is_still_low(address: str, browser: Any) -> None:
    plain = "math { font-family: serif !important; }"
    with tabs(browser) as open_tab:
        tab = open_tab("about:blank")
        tab.page.add_init_script(
            "addEventListener('DOMContentLoaded', () => { const sheet = new CSSStyleSheet();"
            f" sheet.replaceSync({plain!r}); document.adoptedStyleSheets = [sheet]; }})"
        )
        tab.requests.clear()
        tab.page.goto(f"{address}#/rivals?answers=rivals:skip")
        tab.page.locator(".because").wait_for()
        assert tab.ask("document.documentElement.classList.contains('flat-indices')")
        shift = "getComputedStyle(document.querySelector('msub > :nth-child(2)')).transform"
        assert tab.ask(shift) != "none"
        tab.requests.clear()


def test_arrows_scroll_what_is_focused(tab: Tab) -> None:
    """A region that scrolls sideways: its arrow keys are its own."""
    tab.page.set_viewport_size(NARROW)
    chapter = next(chapter for chapter in CHAPTERS if chapter.id == "attack")
    shows(tab, chapter, "en")
    tab.ask(UNFOLDED)
    tab.ask("document.querySelectorAll('.sideways').forEach((x) => { x.style.width = '3rem' })")
    region = tab.page.locator(".sideways[tabindex]").first
    region.focus()
    for key, moved in (("ArrowRight", "x => x.scrollLeft > 0"), ("ArrowLeft", "x => x.scrollLeft === 0")):
        tab.page.keyboard.press(key)
        tab.until(lambda moved=moved: region.evaluate(moved), key)
    assert "#/attack" in tab.page.url


def test_a_held_key_ends_with_the_steps(tab: Tab) -> None:
    tab.page.set_viewport_size(DESKTOP)
    chapter = STEPPED[0]
    after = CHAPTERS[CHAPTERS.index(chapter) + 1]
    shows(tab, chapter, "en")
    for _ in range(chapter.steps + 5):
        tab.page.keyboard.down("ArrowRight")  # again and again: it is held
    assert f"#/{chapter.id}" in tab.page.url and f"{chapter.steps} of {chapter.steps}" in tab.text(".player-at")
    tab.page.keyboard.up("ArrowRight")
    tab.page.keyboard.down("ArrowRight")
    tab.page.locator(f"[data-chapter={after.id}]").wait_for()
    tab.page.keyboard.down("ArrowRight")
    assert f"#/{after.id}" in tab.page.url and "step" not in tab.page.url
    tab.page.keyboard.up("ArrowRight")

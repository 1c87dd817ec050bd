"""The story's charts in a real browser: axes that stay, what is outside the frame, marks of the gauge, motion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from browsing import DESKTOP, Tab, in_a_browser, started_browser, tabs  # noqa: F401
from levelhead import stats

pytestmark = in_a_browser

# A chart on the page that is open, as `chart`; its catalogue is made up.
CHART = """async () => {
  const { Chart } = await import('/assets/plot.js');
  const { Words } = await import('/assets/words.js');
  const library = new Words({ shell: { outside: '{share} outside' } });
  const words = { title: 'Spread', x: 'width d_k', y: 'σ', about: 'rises', series: { law: 'law', data: 'measured' } };
  const series = (y) => [
    { name: 'law', kind: 'line', x: [1, 16, 256], y, colour: 'root', source: 'theory' },
    { name: 'data', kind: 'points', x: [1, 16, 256], y, low: y, high: y, colour: 'root', source: 'recorded' },
    { name: 'bars', kind: 'bars', x: [1, 16, 256], y, colour: 'nothing', quiet: true },
  ];
  const x = { range: [1, 256], log: true, ticks: [1, 16, 256] };
  window.series = series;
  window.chart = new Chart({ words, library, x, y: { range: [0, 10] }, series: series([1, 4, 9]) });
  document.querySelector('.scene').replaceChildren(window.chart.element);
  await new Promise((done) => setTimeout(done, 100));
}"""
TICKS = "[...document.querySelectorAll('.tick-word')].map(x => x.textContent + '@' + x.getAttribute('x')).join(' ')"
LINE = "document.querySelector('.chart-svg .mark-line').getAttribute('d')"


@pytest.fixture
def tab(address: str, browser: Any) -> Iterator[Tab]:
    with tabs(browser) as open_tab:
        one = open_tab(address, viewport=DESKTOP)
        one.page.locator("[data-chapter=hook]").wait_for()
        yield one


def test_axes_stay_while_marks_move(tab: Tab) -> None:
    tab.ask(CHART)
    axes, line = tab.ask(TICKS), tab.ask(LINE)
    assert "256@" in axes and tab.ask("document.querySelector('.chart-svg .axis-word').textContent").startswith(
        "width d"
    )
    tab.ask("window.chart.set(window.series([9, 4, 1]))")
    two_frames = "requestAnimationFrame(() => requestAnimationFrame(() => done({})))"  # by a clock it may be over
    middle = tab.ask(f"new Promise((done) => {two_frames.format(LINE)})")
    tab.until(lambda: tab.ask(LINE) != middle, "the end of the motion")
    tab.page.wait_for_timeout(400)
    assert tab.ask(TICKS) == axes and tab.ask(LINE) not in (line, middle)
    assert "theory" in tab.ask("document.querySelector('.chart-svg .mark-line').getAttribute('class')")


def test_what_is_outside_the_frame_is_shown_in_it(tab: Tab) -> None:
    tab.ask(CHART)
    assert tab.count(".chart-svg .arrow") == 0 and tab.text(".outside") == ""
    tab.ask("window.chart.set(window.series([1, 4, 900]), { outside: { right: 0.123 } })")
    tab.until(lambda: tab.count(".chart-svg .arrow") == 2, "an arrow to the right, one above the bar")
    assert tab.text(".outside") == "12 % outside"
    heights = tab.ask("[...document.querySelectorAll('.chart-svg rect.mark-bars')].map(x => x.height.baseVal.value)")
    assert max(heights) <= 240


def test_nothing_moves_for_a_reader_who_wants_no_motion(address: str, browser: Any) -> None:
    with tabs(browser) as open_tab:
        tab = open_tab(address, viewport=DESKTOP, reduced_motion="reduce")
        tab.page.locator("[data-chapter=hook]").wait_for()
        tab.ask(CHART)
        moved = tab.ask(f"(() => {{ window.chart.set(window.series([9, 4, 1])); return {LINE}; }})()")
        tab.page.wait_for_timeout(300)
        assert tab.ask(LINE) == moved  # at its end at once


def test_marks_of_the_gauge_are_where_the_level_begins_and_ends(tab: Tab) -> None:
    marks = """async (places) => {
      const { Spirit } = await import('/assets/gauge.js');
      const spirit = new Spirit();
      const at = places.map((bubble) => {
        spirit.set({ bubble, level: 'level' }, '');
        return Number(/[\\d.]+/.exec(spirit.bubble.style.transform)[0]);
      });
      const path = spirit.svg.querySelector('.mark').getAttribute('d');
      return [path.match(/M[\\d.]+/g).map((x) => Number(x.slice(1))), at];
    }"""
    cells = [stats.CELLS[level] for level in ("flat", "level", "sharp")]
    (begin, end), places = tab.page.evaluate(marks, [cell / 8 for pair in cells for cell in pair])
    flat, level, sharp = places[:2], places[2:4], places[4:]
    assert max(flat) < begin < min(level) and max(level) < end < min(sharp)

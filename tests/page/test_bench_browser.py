"""Faults that the lab bench had: each would come back unseen without its test here. One server and one browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browsing import DESKTOP, Tab, in_a_browser, started_browser, tabs  # noqa: F401
from levelhead.runs.record import Run, Snapshot
from runs import record as record_of

pytestmark = in_a_browser


@pytest.fixture(scope="module", name="shared")
def shared_tab(address: str, browser: Any) -> Iterator[Tab]:
    """One bench for all tests: opening it takes longer than a test."""
    with tabs(browser) as open_tab:
        yield open_tab(f"{address}#bench").all_drawn()


@pytest.fixture(name="bench")
def bench_at_rest(shared: Tab) -> Iterator[Callable[[str], Tab]]:
    """Goes to a state of the bench; afterwards everything is as it was."""

    def at(state: str) -> Tab:
        shared.goes_to(state)
        shared.rests()
        return shared

    yield at
    shared.page.emulate_media(color_scheme="light", reduced_motion="no-preference")
    shared.page.set_viewport_size(DESKTOP)
    shared.ask("scrollTo(0, 0)")
    at("#d_k=64")


# ---- prediction


def test_the_link_for_teachers_shows_no_answer_before_a_prediction(address: str, browser: Any, root: Path) -> None:
    link = re.search(r"`(#d_k=[^`]*predict=1)`", (root / "docs" / "page.md").read_text(encoding="utf-8"))
    assert link is not None
    with tabs(browser) as open_tab:
        answered(open_tab(f"{address}{link[1]}"))


def answered(tab: Tab) -> None:
    tab.page.locator("#question").wait_for()
    tab.until(lambda: tab.count(".hero figure[data-drawn]") == 1, "the figure behind its cover")
    assert not tab.page.locator(".level-big").is_visible()
    assert not re.search("flat|level|sharp|saturated", tab.text("#strip-gauge") + tab.text("#said"))
    tab.page.locator("#question").get_by_text("level", exact=True).click()
    tab.until(lambda: "it is saturated" in tab.text("#answer"), "the answer")
    assert tab.count(".covered") == 0 and "saturated" in tab.text("#strip-gauge")


# ---- charts


def shown_range(tab: Tab, chart: str, axis: str) -> list[float]:
    return list(tab.ask(f"document.querySelector('{chart} .plot')._fullLayout.{axis}.range"))


def test_axes_stay_while_the_data_change_and_what_is_outside_is_counted(bench: Callable[[str], Tab]) -> None:
    tab = bench("#d_k=64")
    logits, row = "[data-figure=logits] .chart:nth-child(1)", "[data-figure=logits] .chart:nth-child(2)"
    axes = [(logits, "xaxis"), (logits, "yaxis"), (row, "yaxis")]
    before = [shown_range(tab, *one) for one in axes]
    assert before == [[-16, 16], [0, 0.5], [0, 1.02]] and tab.count(f"{logits} .annotation-text") == 0
    tab.divide("none")
    tab.page.locator("#d_k").press("End")
    tab.rests()
    assert [shown_range(tab, *one) for one in axes] == before
    left, right = tab.page.locator(f"{logits} .annotation-text").all_text_contents()
    shares = [float(re.findall(r"[\d.]+", words)[0]) for words in (left, right)]
    assert left.startswith("←") and right.endswith("→") and 70 < sum(shares) < 90


def test_the_bubble_is_between_the_marks_when_the_head_is_level(bench: Callable[[str], Tab]) -> None:
    tab = bench("#d_k=64")
    tab.page.emulate_media(reduced_motion="reduce")
    places = "getComputedStyle(document.querySelector('.spirit .bubble')).transform.split(',')[4]"
    marks = [
        float(x) for x in re.findall(r"M([\d.]+)", tab.ask("document.querySelector('.spirit .mark').getAttribute('d')"))
    ]
    assert tab.text(".level-word strong") == "level" and marks[0] < float(tab.ask(places)) < marks[1]
    tab.divide("none")
    tab.until(lambda: tab.text(".level-word strong") != "level", "another level")
    assert float(tab.ask(places)) > marks[1]
    moving = """[...document.querySelectorAll('#bench *')].filter((x) => {
      const style = getComputedStyle(x);
      return style.animationName !== 'none' || style.transitionDuration.split(', ').some((s) => parseFloat(s) > 0);
    }).map((x) => x.outerHTML.slice(0, 80))"""
    assert tab.ask(moving) == []  # as the reader wants it
    tab.rests()


# What protanopes, deuteranopes and tritanopes see of linear RGB (Machado et al. 2009, severity 1).
BLINDNESS = {
    "none": np.eye(3),
    "protan": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deutan": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "tritan": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}


def linear(colour: str) -> Any:
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: Any) -> Any:
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ np.clip(rgb, 0, 1)
    f = np.cbrt(np.maximum(xyz / [0.9505, 1, 1.089], 0.008856))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_divisor_has_its_colour_for_all_eyes(bench: Callable[[str], Tab], scheme: str) -> None:
    tab = bench("#scale=1/d_k^p&power=0.25")
    tab.page.emulate_media(color_scheme=scheme)
    tab.rests()
    legend = "[data-figure=root] .chart:first-child .legend li:not(:last-child)"
    stroke = "(x) => [x.textContent, x.querySelector('path').getAttribute('stroke')]"

    def drawn() -> dict[str, str]:
        return dict(tab.ask(f"Object.fromEntries([...document.querySelectorAll('{legend}')].map({stroke}))"))

    variables = tab.ask(
        """Object.fromEntries(['nothing', 'root', 'width', 'model', 'power'].map((name) =>
          [name, getComputedStyle(document.documentElement).getPropertyValue(`--by-${name}`).trim()]))"""
    )
    wanted = list(variables.values())
    tab.until(lambda: list(drawn().values()) == wanted, f"the story's colours, {wanted}, in the bench")
    strokes = drawn()
    card = linear(tab.ask("getComputedStyle(document.documentElement).getPropertyValue('--card').trim()"))
    weigh = np.array([0.2126, 0.7152, 0.0722])
    for colour in strokes.values():
        dark, light = sorted((weigh @ card, weigh @ linear(colour)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, colour
    for eyes, matrix in BLINDNESS.items():
        seen = {name: lab(np.array(matrix) @ linear(colour)) for name, colour in strokes.items()}
        for one, other in combinations(seen, 2):
            assert np.linalg.norm(seen[one] - seen[other]) > 20, (eyes, one, other)


# ---- the strip


def test_the_strip_leaves_figures_that_it_does_not_drive(bench: Callable[[str], Tab]) -> None:
    tab = bench("#d_k=64")
    top = "document.querySelector('#strip').getBoundingClientRect()"
    for place, stays in (("attack", True), ("sentence", False), ("walk", True), ("training", False), ("claims", False)):
        tab.ask(f"document.querySelector('#{place}').scrollIntoView()")
        tab.until(lambda stays=stays: (tab.ask(f"{top}.bottom") > 0) == stays, f"the strip at {place}")
    tab.page.set_viewport_size({"width": DESKTOP["width"] // 2, "height": DESKTOP["height"] // 2})  # as at 200 %
    tab.ask("document.querySelector('#walk').scrollIntoView()")
    tab.until(lambda: tab.ask(f"{top}.bottom") <= 0, "the strip to leave a small screen alone")
    tab.until(lambda: tab.ask("document.documentElement.scrollWidth <= innerWidth"), "room for all")


# ---- panels


def test_the_first_shuffle_shuffles(bench: Callable[[str], Tab]) -> None:
    tab = bench("#tile=16")  # two tiles
    place = "[data-figure=online]"
    first = f"document.querySelector('{place} .tiles').ariaLabel"
    before = tab.ask(first)
    tab.page.get_by_role("button", name="shuffle").click()
    tab.until(lambda: tab.ask(first) != before, "the other order")
    tab.until(lambda: "Shuffled" in tab.text(f"{place} .own > p"), "its words")
    tab.page.get_by_role("button", name="shuffle").click()
    tab.until(lambda: tab.ask(first) == before, "the order before: two tiles have two")
    tab.until(lambda: "in order" in tab.text(f"{place} .own > p"), "its words")
    tab.slide("keys per tile", "End")
    tab.until(lambda: tab.page.get_by_role("button", name="shuffle").is_disabled(), "one tile")
    tab.until(lambda: "nothing to shuffle" in tab.text(f"{place} .own > p"), "its words")
    tab.rests()


def test_a_softcap_that_pins_logits_is_not_called_a_cure(bench: Callable[[str], Tab]) -> None:
    tab = bench("#d_k=1024&growth=8&cure=softcap")
    said = tab.text("[data-figure=attack] figcaption")
    assert "The softcap is no cure here" in said and "softcap saturated" in said
    assert "softcap at 30, pinned" in tab.text("[data-figure=attack] .gauges")


def test_a_sentence_of_ones_own(bench: Callable[[str], Tab]) -> None:
    tab = bench("#d_k=64")
    place = tab.page.locator("[data-figure=sentence]")
    text, run = place.get_by_role("textbox"), place.get_by_text("run it here")
    text.fill("   ")
    run.click()
    trouble = place.locator(".trouble")
    trouble.wait_for()
    assert "Write a sentence" in trouble.inner_text()
    below = trouble.bounding_box()["y"] - text.bounding_box()["y"]
    assert 0 < below < 120 and tab.ask("document.activeElement.type") == "text"
    assert not [one for one in tab.requests if one.method == "POST"]
    held: list[Any] = []
    tab.page.route("**/api/sentence", lambda route: held.append(route))  # playwright marks the function
    place.get_by_role("combobox", name="model").select_option("random")
    text.fill("The ball was fast, said a man.")
    run.click()
    tab.until(lambda: len(held) == 1, "the request")
    assert not trouble.is_visible()
    tab.until(lambda: "random weights: loading the model" in tab.text(".progress"), "what is waited for")
    tab.until(lambda: "1 s" in tab.text(".progress"), "the seconds")
    held[0].continue_()
    tab.until(lambda: tab.count("[data-figure=sentence] .badge.live") > 0, "the answer")
    tab.until(lambda: not place.locator(".progress").is_visible(), "the end of waiting")
    assert set(tab.text(".token.chosen").split()) == {"man"}


def test_the_two_charts_of_a_head_stand_beside_each_other(bench: Callable[[str], Tab], tmp_path: Path) -> None:
    snapshots = tuple(Snapshot(step, (record_of("layers.0.attention", seed=step),)) for step in (0, 10, 20))
    Run("mine", snapshots).save(tmp_path / "run.json")
    tab = bench("#d_k=64")
    tab.page.locator("#run-file").set_input_files(tmp_path / "run.json")
    tab.until(lambda: "mine" in tab.text(".levels caption"), "the run")
    tab.page.locator(".levels .cell").first.click()
    tab.until(lambda: tab.count(".plots .js-line") == 2, "its history")
    boxes = tab.ask(
        "[...document.querySelectorAll('.plots .main-svg:first-child')].map((x) => x.getBoundingClientRect().toJSON())"
    )
    left, right = sorted(boxes, key=lambda box: (box["y"], box["x"]))
    assert left["right"] <= right["left"] or left["bottom"] <= right["top"]

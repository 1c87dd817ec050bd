"""What is special in the story's scenes, in a real browser: what their controls change, and what stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browsing import DESKTOP, Tab, in_a_browser, started_browser, tabs  # noqa: F401
from levelhead.course.catalogue import catalogues
from levelhead.course.chapters import attack, by_hand, real, training, walk
from levelhead.page.assets import assets
from levelhead.page.export import inlined

pytestmark = in_a_browser

TILES = "[...document.querySelectorAll('.online-name')].map(x => x.textContent).join('')"
RESULTS = "[...document.querySelectorAll('.online-result td')].map(x => x.textContent).join(' ')"

SHARES = "all => all.map((x) => x.style.getPropertyValue('--share'))"
REAL = "#/real?answers=real:skip"
OPEN = "#/by_hand?answers=by_hand:skip"
TICKS = "[...document.querySelectorAll('.story-chart .tick-word')].map((x) => x.textContent).join(' ')"
PLACED = "[...document.querySelectorAll('.scene .tick-word')].map(x => x.textContent + x.getAttribute('y')).join(' ')"


def test_every_number_can_be_read_and_the_terms_add_up(address: str, browser: Any) -> None:
    found = by_hand.data()
    with tabs(browser) as open_tab:
        tab = open_tab(f"{address}{OPEN}")
        strip = tab.page.get_by_role("slider", name="the row of Apple in X", exact=True)
        strip.press("End")
        last = f"{found['X'][by_hand.APPLE, -1]:.2f}".replace("-", "−")
        tab.until(lambda: tab.text(".heat-read") == f"X, Apple, number 512: {last}", "the last number")
        assert strip.get_attribute("aria-valuetext") == tab.text(".heat-read")
        tab.page.goto(f"{address}{OPEN}&step=3")
        terms = tab.page.get_by_role("slider", name="terms added", exact=True)
        terms.press("ArrowRight")
        assert tab.text(".hand-terms tr.here th") == "2"
        terms.press("End")
        assert by_hand.CHAPTER.numbers()["apple_love"].text in tab.text(".hand-sum")
        assert tab.text(".hand-terms tr.here th") == "64" and tab.count(".hand-terms tbody tr") == 64
        tab.page.get_by_role("button", name="play the terms", exact=True).click()
        tab.until(lambda: tab.text(".hand-terms tr.here th") == "3", "the third term by itself")
        tab.page.get_by_role("button", name="pause", exact=True).click()


def test_walks_and_their_ends(address: str, browser: Any) -> None:
    found, numbers = walk.data(), walk.CHAPTER.numbers()
    with tabs(browser) as open_tab:
        tab = open_tab(f"{address}#/walk")  # the first walk is there before the answer
        terms = tab.page.get_by_role("slider", name="terms added", exact=True)
        terms.press("End")
        last = f"{found['walks'][0, -1]:.2f}".replace("-", "−")
        tab.until(lambda: "term 64 adds" in tab.text(".hand-sum") and last in tab.text(".hand-sum"), "the last term")
        tab.page.locator(".walk-another").click()  # another one, with as many terms
        other = f"{found['walks'][1, -1]:.2f}".replace("-", "−")
        tab.until(lambda: "term 64 adds" in tab.text(".hand-sum") and other in tab.text(".hand-sum"), "another walk")
        tab.page.goto(f"{address}#/walk?answers=walk:skip&step=3")
        tab.page.locator("input[value='64']").wait_for(state="attached")
        assert numbers["spread_64"].text in tab.text(".hand-sum") and tab.text(".outside") == ""
        ticks = tab.ask(TICKS)
        tab.page.locator("input[value='1024']").check(force=True)
        wide = found["ends"][-1]
        outside = f"{100 * (wide['left'] + wide['right']):.2g} %"
        tab.until(lambda: outside in tab.text(".outside"), "the share outside")
        tab.until(lambda: tab.count(".story-chart .arrow") == 2, "the arrows")
        assert tab.ask(TICKS) == ticks


def test_only_the_root_is_level_in_both_models(address: str, browser: Any) -> None:
    with tabs(browser) as open_tab:
        tab = open_tab(f"{address}#/root?answers=root:skip&step=1")
        power = tab.page.locator(".root-own input")
        power.press("End")
        assert tab.text(".root-said .number").split() == ["64", "0.0156", "0.125"]  # divisor, variance, spread
        assert tab.text(".root-own .gauge-words strong") == "flat"
        ticks = tab.ask(TICKS)
        power.press("Home")
        assert tab.text(".root-said .number").split() == ["1", "64", "8"]
        assert tab.text(".root-own .gauge-words strong") in ("sharp", "saturated") and tab.ask(TICKS) == ticks
        tab.page.locator(".player-back").click()
        levels = [tab.text(".root-four .gauge-words strong").split()]
        tab.page.locator("input[value=large]").check(force=True)
        levels.append(tab.text(".root-four .gauge-words strong").split())
        assert levels == [["sharp", "level", "flat", "flat"], ["saturated", "level", "flat", "flat"]]
        tab.page.locator(".player-forward").click()  # the model stays that of the step before
        assert tab.text(".root-said .number").split()[1] == "128"  # d_k to the power of 1


@pytest.fixture
def opened(address: str, browser: Any) -> Iterator[Any]:
    with tabs(browser) as open_tab:
        yield lambda chapter, step: open_tab(f"{address}#/{chapter}?answers={chapter}:skip&step={step}")


def test_a_pinned_softcap_is_not_a_cure(opened: Any) -> None:
    tab: Tab = opened("attack", 4)
    said = tab.page.locator(".attack-now")
    said.wait_for()
    axes = tab.ask(PLACED)
    assert said.get_attribute("data-verdict") == "pinned" and "level" in tab.text(".scene .gauge-words strong")
    tab.page.locator("input[value=norm]").check(force=True)
    assert said.get_attribute("data-verdict") == "leads"
    tab.page.locator("input[value=root]").check(force=True)
    tab.slide("correlation ρ of the match", "Home")
    assert said.get_attribute("data-verdict") == "chance" and "saturated" in tab.text(".scene .gauge-words strong")
    assert tab.text(".scene .bar-name >> nth=0") == "largest weight"  # there is no match that could have one
    assert tab.ask(PLACED) == axes


def test_additive_scores_grow_with_v_alone_and_cosine_with_the_angle_alone(opened: Any) -> None:
    tab: Tab = opened("rivals", 1)
    tab.page.locator(".rivals-now").wait_for()
    tab.slide("q and k grow", "End")
    dot, additive, bound = map(float, tab.page.locator(".rivals-now .number").all_inner_texts())
    assert dot > 80 and abs(additive) < bound < 3
    tab.slide("v grows", "End")
    assert tab.page.locator(".rivals-now .number").nth(2).inner_text() == "17"
    for _ in range(2):
        tab.page.locator(".player input").press("ArrowRight")  # to the picture of the angle
    tab.page.locator(".rivals-angle").wait_for()
    values = tab.page.locator(".rivals-scores .bar-value")
    assert values.all_inner_texts() == ["4", "4"]
    tab.page.locator(".rivals-picture:not([hidden]) input[type=range]").nth(1).press("End")
    assert values.all_inner_texts() == ["8", "4"]


def test_the_first_press_shuffles_and_the_result_stays(address: str, browser: Any) -> None:
    with tabs(browser) as open_tab:
        tab = open_tab(f"{address}#/online?answers=online:skip&step=1", viewport=DESKTOP)
        tab.page.locator(".online-shuffle").wait_for()
        assert tab.ask(TILES) == "ABCD"
        first = tab.ask(RESULTS)
        tab.page.locator(".online-shuffle").click()
        assert tab.ask(TILES) == "CADB" and tab.ask(RESULTS) != first
        assert "C, A, D, B" in tab.text("[data-chapter=online] .scene-tools")
        for _ in range(3):
            tab.page.locator(".player-forward").click()
        shuffled = tab.ask(RESULTS)
        for _ in range(5):
            tab.page.locator(".online-shuffle").click()
            assert tab.ask(RESULTS) == shuffled
        assert tab.ask(TILES) == "ABCD"


def test_the_bars_follow_the_head_that_is_chosen(address: str, browser: Any) -> None:
    layers = real.data()["layers"]
    with tabs(browser) as open_tab:
        tab = open_tab(f"{address}{REAL}", viewport=DESKTOP)
        tab.page.locator(".real-chosen b").wait_for()
        assert tab.count(".real-cell") == 72 and tab.text(".real-chosen b") == "dog"
        assert_drawn(tab, layers[5][11], "layer 5, head 11")
        tab.page.locator(".real-layer >> nth=0").locator(".real-cell >> nth=2").click()
        assert tab.text(".real-chosen b") == "because" and "saturated" in tab.text(".real-chosen")
        assert_drawn(tab, layers[0][2], "layer 0, head 2")
        for key, layer, head in (("ArrowDown", 1, 2), ("ArrowRight", 1, 3), ("ArrowLeft", 1, 2), ("ArrowUp", 0, 2)):
            tab.page.keyboard.press(key)
            assert_drawn(tab, layers[layer][head], f"layer {layer}, head {head}")
        tab.page.keyboard.press("ArrowUp")  # there is none above: it stays, in this chapter
        assert_drawn(tab, layers[0][2], "layer 0, head 2")
        assert tab.count('.real-cell[aria-checked="true"]') == tab.count('.real-cell[tabindex="0"]') == 1
        assert tab.count(".scene code, .fold-more") == 0  # a server is there: nothing is missing


def assert_drawn(tab: Tab, head: Any, name: str) -> None:
    """Title, levels and bars of both divisors are those of this head; so is the text for who cannot see them."""
    assert name in tab.text(".scene > h3 >> nth=1")
    assert tab.text(".scene .gauge-words strong").split() == [head[side]["gauge"]["level"] for side in head]
    for i, side in enumerate(head):
        drawn = tab.page.locator(".scene .head").nth(i)
        assert "0.000" not in drawn.locator(".bar-value").all_inner_texts()  # a weight is small, never nothing
        shares = [float(x) for x in drawn.locator(".bar-fill").evaluate_all(SHARES)]
        assert shares == pytest.approx(head[side]["row"], rel=1e-3)
        most = head[side]["row"].index(max(head[side]["row"]))
        assert drawn.locator(".chosen .bar-name").all_inner_texts() == [real.data()["tokens"][most]]
        assert drawn.locator(".chosen .bar-value").inner_text() in drawn.locator("[role=img].story-bars").get_attribute(
            "aria-label"
        )


def test_a_saved_page_says_that_it_runs_no_model(tmp_path: Path, browser: Any) -> None:
    path = tmp_path / "page.html"
    path.write_text(inlined(assets(), "{}"), encoding="utf-8")
    with tabs(browser) as open_tab:
        tab = open_tab(f"{path.as_uri()}{REAL}", viewport=DESKTOP)
        tab.page.locator(".real-chosen b").wait_for()
        tab.page.locator(".fold-more summary").click()
        assert "levelhead page" in tab.text(".fold-more code >> nth=1")
        scene = "document.querySelector('.scene')"
        assert tab.ask(f"{scene}.scrollHeight <= {scene}.clientHeight + 1")  # as much as with a server


def test_every_ratio_of_a_training_names_its_optimiser(opened: Any) -> None:
    tab: Tab = opened("training", 0)
    tab.page.locator(".fold-more summary").click()
    shown, ratios = training.CHAPTER.numbers(), training.RATIOS
    words = catalogues()["en"]["training"]["words"]["optimisers"]
    lines = {
        line.get_attribute("data-ratio"): line.locator("td").all_inner_texts()
        for line in tab.page.locator(".training-ratios tbody tr").all()
    }
    assert lines == {name: [words[optimiser], shown[name].text] for name, optimiser in ratios.items()}
    assert set(ratios.values()) == set(words)


SHADES = """() => [...document.querySelectorAll('.training-push')].map((x) =>
  [...x.querySelectorAll('path')].reduce((all, one) => all + one.getAttribute('d').split('z').length - 1, 0))"""


def test_the_picture_of_the_push_has_a_point_for_each_score_that_is_not_white(opened: Any) -> None:
    tab: Tab = opened("training", 2)
    tab.page.locator(".training-push").last.wait_for()
    undivided, divided = (sum(row.count("0") for row in rows) for rows in training.data()["push"].values())
    assert tab.ask(SHADES) == [training.TOKENS**2 - undivided, training.TOKENS**2 - divided]
    assert undivided > 0.9 * training.TOKENS**2 and divided < 0.5 * training.TOKENS**2  # what the words say


def test_a_frame_says_which_marks_are_outside_it(opened: Any) -> None:
    tab: Tab = opened("attack", 2)  # entries with the standard deviation 4
    above = [rho for rho in attack.RHOS if attack.cell("root", 4, rho)["mean"] > 40]
    share = 100 * len(above) / len(attack.RHOS)
    tab.until(lambda: f"{share:.0f} % of the dots" in tab.text(".scene .outside"), "what is outside")
    assert "band" not in tab.text(".scene .outside")
    tab.slide("standard deviation σ of entries", "End")
    spread = f"{attack.cell('root', attack.SIGMAS[-1], 0.0)['others']:.0f}"
    tab.until(lambda: f"from −{spread} to {spread}" in tab.text(".scene .outside"), "where the band ends")

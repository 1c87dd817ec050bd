"""The page in a real browser: Chromium opens what `levelhead page` serves, and what it exports.

One server and one browser for all tests; every test watches the console and every request. Not
everybody has Chromium. Without it these tests are left out, with a line in the report; where CI=true
it is required, and missing it is a failure.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs
from xml.etree import ElementTree

import pytest

import levelhead as lh
from browsing import DESKTOP, PHONE, Tab, in_a_browser, serving, started_browser, tabs  # noqa: F401
from levelhead.course.catalogue import catalogues
from levelhead.lab import figures
from levelhead.runs.jsonl import JSONL
from levelhead.runs.record import Run, Snapshot
from runs import record as record_of

pytestmark = in_a_browser


@pytest.fixture
def opened(address: str, browser: Any) -> Iterator[Callable[..., Tab]]:
    """Opens the lab bench with this state; at the end nothing may have gone wrong."""
    with tabs(browser) as open_tab:
        yield lambda state="#bench", **options: open_tab(f"{address}{state}", **options)


def rest_of_the_figures(tab: Tab) -> None:
    """Every figure holds marks, words and tools, and says where its numbers come from."""
    for id in figures.PANELS:
        place = f"[data-figure={id}]"
        assert tab.count(f"{place} .trouble:not([hidden])") == 0, tab.text(f"{place} .trouble")
        marks = f"{place} .plot :is(.trace path, .bars .point path, .heatmaplayer image, .js-line)"
        assert tab.count(marks) > 0, id
        assert tab.count(f"{place} .badge") > 0, id
        assert tab.text(f"{place} figcaption"), id
        assert tab.count(f"{place} .tools button") == 2, id
        labels = tab.ask(f"[...document.querySelectorAll('{place} .plot')].map(x => x.ariaLabel)")
        assert all(len(label) > 10 for label in labels), id


# ---- the experiment


def test_every_panel_draws_and_says_where_its_numbers_come_from(opened: Callable[..., Tab]) -> None:
    tab = opened().all_drawn()
    rest_of_the_figures(tab)
    assert tab.count("math") >= 8
    assert "level" in tab.text("#said")
    assert not tab.ask("document.body.innerText.match(/NaN|undefined|\\[object/)")


def test_an_undivided_wide_head_sends_the_bubble_right_and_the_root_brings_it_back(opened: Callable[..., Tab]) -> None:
    tab = opened().all_drawn()
    scaled, sigma = tab.bubble(), tab.fact("logits", "σ")
    tab.divide("none")
    tab.page.locator("#d_k").press("End")
    tab.until(lambda: "\n64" in tab.fact("logits", "σ"), "σ = √4096, by theory")
    assert "d_k=4096" in tab.page.url and tab.bubble() > scaled + 100
    assert tab.text(".level-word strong") == "saturated"
    assert tab.fact("logits", "σ") != sigma
    tab.divide("sqrt")
    tab.until(lambda: tab.bubble() < scaled + 100, "the bubble to come back")
    tab.until(lambda: tab.text(".level-word strong") in tab.text("#said"), "it to be said")
    tab.rests()


def test_a_control_asks_for_the_figures_that_depend_on_it_and_for_no_other(opened: Callable[..., Tab]) -> None:
    tab = opened().all_drawn()
    for name, change in (
        ("d_k", lambda: tab.page.locator("#d_k").press("ArrowRight")),
        ("scale", lambda: tab.divide("none")),
        ("keys", lambda: tab.page.locator("#keys").press("ArrowRight")),
    ):
        tab.requests.clear()
        change()
        tab.rests()
        depend = {id for id, names in figures.NEEDS.items() if name in names}
        assert set(tab.figures_asked()) == depend, name


def test_the_address_holds_the_state_and_brings_it_back(opened: Callable[..., Tab]) -> None:
    tab = opened().all_drawn()
    tab.page.locator("#d_k").press("ArrowRight")
    tab.divide("power")
    tab.page.locator("#power").press("Home")
    tab.page.locator("#keys").press("ArrowLeft")
    tab.page.get_by_label("resample").click()
    tab.slide("correlation ρ", "End")
    tab.until(lambda: "rho=1" in tab.page.url, "the address")
    state = tab.page.url.split("#")[1]
    wanted = {"d_k": "128", "scale": "1/d_k^p", "power": "0", "keys": "16", "seed": "1", "rho": "1"}
    assert {name: values[0] for name, values in parse_qs(state).items()} == wanted
    tab.rests()
    said = tab.text(".level-big")
    tab.requests.clear()
    tab.page.reload()
    tab.all_drawn()
    assert tab.text(".level-big") == said
    assert tab.figures_asked()["attack"] == {name: [value] for name, value in wanted.items()} | {
        "sigma": ["1"],
        "growth": ["1"],
        "cure": ["none"],
        "cap": ["30"],
    }
    tab.page.get_by_text("reset").click()
    tab.until(lambda: tab.text("#d_k-now") == "64" and "rho" not in tab.page.url, "the reset")
    tab.rests()


def test_links_with_the_old_names_of_scales_still_work(opened: Callable[..., Tab]) -> None:
    tab = opened("#d_k=64&divide=d_k&hide=divide").all_drawn()
    assert tab.ask("document.querySelector('#strip input[name=scale]:checked').value") == "1/d_k"
    assert not tab.page.locator("#strip .divide").is_visible() and not tab.page.locator("#notes").is_visible()


# ---- claims


def test_panels_name_their_claims_and_lead_to_their_text(opened: Callable[..., Tab]) -> None:
    tab = opened("#d_k=128").all_drawn()
    for id in figures.PANELS:
        wanted = [f"{one['id']} {one['verdict']}" for one in figures.figure(id).claims]
        chips = tab.page.locator(f"[data-figure={id}] .chip").all_inner_texts()
        assert [" ".join(chip.split()) for chip in chips] == wanted, id
    before = tab.page.url
    tab.page.locator("[data-figure=root] .chip").first.click()
    tab.until(lambda: tab.count("#claim-C5 figure[data-drawn]") == 1, "the claim")
    assert tab.page.url == before and tab.text("#d_k-now") == "128"
    claim = lh.lab.claims()[5]
    said = tab.text("#claim-C5")
    assert claim.id == "C5" and "Verdict: confirmed, as expected." in said and "4 standard errors" in said
    assert "few largest logits" in said  # of the derivation
    assert tab.count("#claim-C5 .plot .trace") > 0 and tab.count("#claim-C5 .badge.recorded") > 0
    assert "Recorded: " in tab.text("#claim-C5 .recorded-by")
    assert tab.ask("document.activeElement.parentElement.id") == "claim-C5"


def test_every_claim_opens(opened: Callable[..., Tab]) -> None:
    tab = opened().all_drawn()
    assert tab.count(".claim") == len(lh.lab.claims())
    for claim in lh.lab.claims():
        tab.page.locator(f"#claim-{claim.id} > summary").click()
        tab.until(lambda id=claim.id: tab.count(f"#claim-{id} figure[data-drawn]") == 1, claim.id)
        place = f"#claim-{claim.id}"
        assert tab.count(f"{place} .facts dd") > 0 and tab.count(f"{place} .trouble:not([hidden])") == 0
    assert not re.search(r"NaN|undefined|\[object", tab.text(".claim :is(summary, .facts, .legend)"))


HOSTILE = {
    "#d_k=<script>alert(1)</script>": "d_k",
    "#d_k=1000000000": "d_k",
    "#keys=NaN&d_k=-1": "keys",
    "#scale=__proto__&power=1e9": "scale",
    "#divide=__proto__": "divide",  # as the link has it
    "#seed=99999999999&sigma=0": "seed",
    "#cure=%00&order=0x10&tile=2.5": "cure",
    "#hide=everything&predict=yes": "hide",
    "#constructor=1&text=" + "x" * 5000: "constructor",
    "#%E0%A4%A=%&&==&d_k=": "d_k",
}


def assert_refused(tab: Tab, named: str) -> None:
    tab.until(lambda: named in tab.text("#notes"), f"a note about {named}")
    assert tab.page.locator("#notes").is_visible()
    assert tab.text("#d_k-now") == "64" and tab.text("#keys-now") == "32"
    assert tab.count("#notes *") == 0  # text, and nothing that was parsed
    assert tab.count(".control:visible") >= 5


def test_a_hostile_state_is_told_and_stands_at_its_default(opened: Callable[..., Tab]) -> None:
    first, *others = HOSTILE.items()
    tab = opened(first[0]).all_drawn()
    assert_refused(tab, first[1])
    for state, named in others:
        tab.page.evaluate("state => { location.hash = state }", state)
        assert_refused(tab, named)
    tab.page.evaluate("location.hash = '#d_k=128'")
    tab.until(lambda: not tab.page.locator("#notes").is_visible(), "the note to go")
    assert tab.text("#d_k-now") == "128"
    tab.rests()


def test_teachers_hide_controls_and_ask_before_they_show(opened: Callable[..., Tab]) -> None:
    tab = opened("#d_k=64&hide=keys,seed&predict=1").all_drawn()
    assert not tab.page.locator("#keys").is_visible() and not tab.page.locator("#seed").is_visible()
    assert tab.page.locator("#d_k").is_visible() and tab.page.locator("#question").is_visible()
    tab.page.locator("#question").get_by_text("level", exact=True).click()
    tab.until(lambda: "Yes: level" in tab.text("#answer"), "the first answer")
    said = tab.text("#said")
    tab.divide("none")
    tab.page.locator("#d_k").press("End")
    tab.rests()
    assert tab.page.locator("#question").is_visible()
    covered = tab.ask("[...document.querySelectorAll('.covered')].map(x => x.dataset.figure)")
    assert set(covered) == {id for id, names in figures.NEEDS.items() if "seed" in names}
    assert not tab.page.locator(".level-big").is_visible()
    assert tab.text("#said") == said and "saturated" not in tab.text("#strip-gauge")
    tab.page.locator("#question").get_by_text("sharp").click()
    tab.until(lambda: "saturated" in tab.text("#answer"), "the answer")
    assert tab.count(".covered") == 0
    assert "saturated" in tab.text("#said")


# ---- keyboard, screens


def test_the_keyboard_reaches_everything(opened: Callable[..., Tab]) -> None:
    tab = opened().all_drawn()
    wanted = tab.ask(
        """() => {
          const all = 'a[href], button, input, select, summary, [tabindex="0"]';
          const seen = [...document.querySelectorAll(all)].filter((x) => x.tabIndex >= 0 &&
            !x.disabled && (x.checkVisibility({ visibilityProperty: true }) || x.matches('.skip')));
          window.wanted = seen.filter((x) => x.type !== 'radio' || x.checked);
          return window.wanted.length;
        }"""
    )
    reached = set()
    for _ in range(wanted + 5):
        tab.page.keyboard.press("Tab")
        reached.add(tab.ask("window.wanted.indexOf(document.activeElement)"))
    names = tab.ask("window.wanted.map((x) => x.outerHTML.slice(0, 120))")
    assert reached >= set(range(wanted)), [names[i] for i in set(range(wanted)) - reached]


def test_keys_move_sliders_levels_and_tiles(opened: Callable[..., Tab]) -> None:
    tab = opened().all_drawn()
    for key, d_k in (("ArrowRight", "128"), ("ArrowUp", "256"), ("ArrowLeft", "128"), ("Home", "1")):
        tab.page.locator("#d_k").press(key)
        tab.until(lambda d_k=d_k: tab.text("#d_k-now") == d_k, d_k)
    tab.page.keyboard.press("Tab")
    tab.page.keyboard.press("ArrowRight")  # √d_k → d_k
    tab.until(lambda: "scale=1/d_k" in tab.page.url, "the radio")
    tab.rests()
    seen = tab.text("[data-figure=online] .own .facts")
    tab.slide("tiles seen", "ArrowLeft")
    tab.until(lambda: tab.text("[data-figure=online] .own .facts") != seen, "a tile less")
    tab.page.locator(".levels .cell[tabindex='0']").press("ArrowDown")
    tab.page.keyboard.press("Enter")
    tab.until(lambda: "head 0" in tab.text(".one h3"), "the head")
    focus = tab.ask("getComputedStyle(document.activeElement).outlineStyle")
    assert focus == "solid"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_screen_has_room(
    opened: Callable[..., Tab], scheme: str, viewport: Mapping[str, int], tmp_path: Path
) -> None:
    tab = opened(viewport=viewport, color_scheme=scheme, reduced_motion="reduce").all_drawn()
    assert tab.ask("document.documentElement.scrollWidth <= innerWidth")
    paper = tab.ask("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) > 384) == (scheme == "light")
    axis = tab.ask("getComputedStyle(document.querySelector('.xtitle')).fill")
    assert axis == tab.ask("getComputedStyle(document.querySelector('.soft')).color")
    if viewport is DESKTOP:  # the experiment is above the fold
        bottom = "x => x.getBoundingClientRect().bottom"
        plots = tab.ask(f"[...document.querySelectorAll('.hero .plot')].map({bottom})")
        assert max(plots) < DESKTOP["height"]
    picture = tab.page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert picture.startswith(b"\x89PNG")


def test_colours_follow_the_reader_while_the_page_is_open(opened: Callable[..., Tab]) -> None:
    tab = opened(color_scheme="light").all_drawn()
    fill = "getComputedStyle(document.querySelector('.hero .bars .point path')).fill"
    light = tab.ask(fill)
    tab.page.emulate_media(color_scheme="dark")
    tab.until(lambda: tab.ask(fill) != light, "other colours")


# ---- what one can take away


def test_tools_give_python_a_drawing_and_a_table(opened: Callable[..., Tab]) -> None:
    tab = opened(permissions=["clipboard-read", "clipboard-write"]).all_drawn()
    for id in figures.PANELS:
        place = tab.page.locator(f"[data-figure={id}]")
        place.get_by_text("copy as Python").click()
        tab.until(lambda place=place: "copied" in place.locator(".tools").inner_text(), "the copy")
        assert f'lh.lab.figure("{id}"' in tab.ask("navigator.clipboard.readText()")
        with tab.page.expect_download() as download:
            place.get_by_text("download SVG").click()
        svg = ElementTree.parse(download.value.path()).getroot()
        assert svg.tag == "{http://www.w3.org/2000/svg}svg", id
        assert download.value.suggested_filename == f"levelhead-{id}.svg"
        assert len(list(svg.iter("{http://www.w3.org/2000/svg}path"))) > 10, id
        place.get_by_text("table", exact=True).click()
        tab.until(lambda place=place: place.locator(".table tbody tr").count() > 0, "the table")
        assert place.locator(".table tbody td").first.inner_text(), id
    tab.page.get_by_text("copy link").click()
    tab.until(lambda: tab.text("#copy-link") == "copied what follows the #", "the link")
    assert tab.ask("navigator.clipboard.readText()") == "#d_k=64&scale=1/sqrt(d_k)&keys=32&seed=0"  # no address of ours


# ---- panels with something of their own


def test_tiles_are_shuffled_and_the_result_stays(opened: Callable[..., Tab]) -> None:
    tab = opened("#keys=256").all_drawn()
    place = "[data-figure=online]"
    state = f"{place} .own .facts > div:nth-child(-n + 3) b:first-child"  # m, l, H
    last = tab.text(state)
    tab.page.get_by_role("button", name="shuffle").click()
    tab.until(lambda: "differs" in tab.text(f"{place} .own > p"), "the difference")
    tab.rests()
    numbers = [[float(x) for x in text.split()] for text in (last, tab.text(state))]
    assert len(numbers[0]) == 3 and numbers[1] == pytest.approx(numbers[0], rel=2e-3)
    tab.slide("tiles seen", "Home")
    tab.until(lambda: tab.text(state) != last, "the first tile alone")
    assert tab.count(f"{place} .plot .shapelayer path") == 3  # where the reader is, in each chart


def test_attacks_are_asked_for_and_cures_are_named(opened: Callable[..., Tab]) -> None:
    tab = opened("#d_k=1024").all_drawn()
    gauges = tab.text("[data-figure=attack] .gauges")
    tab.slide("weights grown by", "End")
    tab.until(lambda: tab.text("[data-figure=attack] .gauges") != gauges, "the attack")
    tab.page.locator("[data-figure=attack] input[value=softcap]").check(force=True)
    tab.slide("cap", "Home")
    tab.until(lambda: "cap=1&" in f"{tab.page.url}&", "the cap")
    tab.rests()
    assert tab.figures_asked()["attack"]["growth"] == ["8"]
    assert "softcap" in tab.text("[data-figure=attack] .gauges")


def test_a_sentence_is_recorded_until_it_is_run_here(opened: Callable[..., Tab]) -> None:
    tab = opened().all_drawn()
    place = tab.page.locator("[data-figure=sentence]")
    assert tab.count("[data-figure=sentence] .badge.live") == 0
    place.get_by_role("combobox", name="model").select_option("random")
    assert not [one for one in tab.requests if one.method == "POST"]
    place.get_by_role("textbox").fill("Love Apple <b>phones</b>")
    place.get_by_text("run it here").click()
    tab.until(lambda: tab.count("[data-figure=sentence] .badge.recorded") == 0, "the live run")
    assert "phones" in tab.text(".tokens") and tab.count(".tokens b:not(.badge)") == 0
    (sent,) = [one for one in tab.requests if one.method == "POST"]
    assert sent.post_data_json["text"] == "Love Apple <b>phones</b>"
    chosen = place.locator(".token").first
    chosen.click()
    tab.until(lambda: tab.count(".token.chosen[aria-pressed=true]") == 2, "the token")
    tab.rests()


def test_speed_is_recorded_until_it_is_measured_here(opened: Callable[..., Tab]) -> None:
    tab = opened().all_drawn()
    place = tab.page.locator("[data-figure=speed]")
    assert tab.count("[data-figure=speed] .badge.recorded") > 0
    assert not [one for one in tab.requests if one.method == "POST"]
    place.get_by_role("button", name="run here").click()
    assert place.get_by_role("button", name="running").is_disabled()
    tab.until(lambda: tab.count("[data-figure=speed] .badge.recorded") == 0, "the live run")
    assert len([one for one in tab.requests if one.method == "POST"]) == 1
    assert place.get_by_role("button", name="run again").is_enabled()
    tab.rests()


def test_a_sentence_that_is_too_long_gets_an_answer(opened: Callable[..., Tab]) -> None:
    tab = opened(expected_errors=1).all_drawn()  # the browser itself notes a status of 400
    place = tab.page.locator("[data-figure=sentence]")
    place.get_by_role("textbox").fill("long " * 20_000)
    place.get_by_text("run it here").click()
    tab.until(lambda: place.locator(".trouble").is_visible(), "the refusal")
    assert "characters" in place.locator(".trouble").inner_text()
    tab.page.locator("#d_k").press("ArrowRight")
    tab.until(lambda: "d_k=128" in tab.page.url, "the page to go on")
    tab.rests()


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    names = [f"layers.{i}.attention" for i in range(3)]
    snapshots = tuple(Snapshot(step, tuple(record_of(name, seed=step) for name in names)) for step in (0, 10, 20))
    path = tmp_path / "mine.json"
    Run("a model of mine", snapshots).save(path)
    return path


def test_a_run_file_is_read_in_the_browser_and_sent_nowhere(opened: Callable[..., Tab], run_file: Path) -> None:
    tab = opened().all_drawn()
    wanted = figures.figure("heads", run=run_file).json()["extra"]["rows"]
    tab.requests.clear()
    tab.page.locator("#run-file").set_input_files(run_file)
    tab.until(lambda: "a model of mine" in tab.text(".levels caption"), "the run")
    labels = tab.ask("[...document.querySelectorAll('.levels .cell')].map(x => x.ariaLabel)")
    levels = [head["level"] for row in wanted for head in row["heads"]]
    assert [label.split(": ")[1].split(",")[0] for label in labels] == levels
    places = tab.ask("[...document.querySelectorAll('.levels .air')].map(x => x.cx.baseVal.value)")
    bubbles = [8 + 32 * head["bubble"] for row in wanted for head in row["heads"]]
    assert places == pytest.approx(bubbles, abs=1e-3)
    tab.page.locator(".levels .cell").nth(1).click()
    tab.until(lambda: tab.count(".plots .js-line") == 2, "the head's history")
    assert tab.requests == []


DROP = """([name, text]) => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([text], name));
  const place = document.querySelector('[data-figure=heads]');
  place.dispatchEvent(new DragEvent('drop', { dataTransfer, bubbles: true, cancelable: true }));
}"""


def test_another_file_dropped_on_the_heads_is_told(opened: Callable[..., Tab], run_file: Path) -> None:
    whole = run_file.read_text()
    tab = opened().all_drawn()
    tab.requests.clear()
    for name, content in (
        ("cut.json", whole[: len(whole) // 2]),
        ("other.json", '{"a": 1}'),
        ("list.json", "[1, 2]"),
        ("changed.json", whole.replace('"tally"', '"tale"')),
        ("words.txt", "hello"),
    ):
        tab.page.evaluate(DROP, [name, content])
        tab.until(lambda name=name: name in tab.text("[data-figure=heads] .trouble"), name)
        assert "Expected a file of levelhead doctor" in tab.text("[data-figure=heads] .trouble")
    tab.page.evaluate(DROP, ["whole.json", whole])
    tab.until(lambda: "a model of mine" in tab.text(".levels caption"), "the run")
    assert tab.count("[data-figure=heads] .trouble:not([hidden])") == 0
    assert tab.requests == []


def test_a_run_is_followed_while_it_is_recorded(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    sink = JSONL(path, model="a model in training")
    sink(Snapshot(0, (record_of("layers.0.attention", (1.0, 1.0)),)))
    with serving("--run", str(path)) as url, tabs(browser) as open_tab:
        tab = open_tab(url).all_drawn()
        assert "following" in tab.text("[data-figure=heads] .choose")
        above = "document.querySelector('[data-figure=heads]').getBoundingClientRect().top < innerHeight"
        tab.until(lambda: tab.ask(above), "the page to go to the heads")
        before = tab.text("[data-figure=heads] .levels caption"), tab.count(".levels .cell")
        assert "a model in training" in before[0] and before[1] == 2
        sink(Snapshot(1, (record_of("layers.0.attention", (1.0, 40.0, 1.0)),)))
        tab.until(lambda: tab.count(".levels .cell") == 3, "the next step")
        assert tab.count(".levels .liquid.saturated") == 1
    sink.close()


# ---- the saved page


def test_a_claim_that_is_not_there_and_a_language_that_does_not_load(opened: Callable[..., Tab]) -> None:
    """The note names what was asked for; the control of the language shows what is spoken."""
    tab = opened("#claim-C99", expected_errors=2)  # the browser's and the page's, of one file
    tab.until(lambda: tab.text("#notes") == 'There is no claim "C99".', "the note")
    tab.goes_to("#divide=nine")
    tab.until(lambda: "divide: expected" in tab.text("#notes"), "the name that the link has")
    tab.page.route("**/bench-words-hi-Latn.js", lambda route: route.abort())
    tab.page.locator("#languages select").select_option("hi-Latn")
    tab.until(lambda: "Hinglish" in tab.text("#notes") and "did not load" in tab.text("#notes"), "the language")
    assert tab.page.locator("#languages select").input_value() == "en" == tab.ask("document.documentElement.lang")
    assert "hi-Latn" not in tab.page.url


def test_the_export_opens_from_a_disk_and_its_controls_work(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    command = [sys.executable, "-m", "levelhead", "page", "--export", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert path.stat().st_size <= 10_000_000
    with tabs(browser) as open_tab:
        tab = open_tab(f"{path.as_uri()}#bench").all_drawn()
        rest_of_the_figures(tab)
        assert tab.count(".badge.live:not(.key *)") == 0  # nothing in a file is computed now
        level = tab.bubble()
        tab.divide("none")
        tab.page.locator("#d_k").press("End")
        tab.until(lambda: tab.bubble() > level + 100, "the bubble")
        tab.until(lambda: tab.text("#d_k-now") == "4096" and "d_k=4096" in tab.page.url, "the widest head")
        tab.page.locator("#keys").press("End")
        tab.until(lambda: tab.text("#keys-now") == "256", "the grid's last number of keys")
        assert tab.page.locator("#seed").is_disabled()
        assert tab.page.locator(".segments input[value='1/d_k^p']").first.is_disabled()
        assert "one seed" in tab.text("#bench > .saved")
        for id in ("attack", "online", "sentence"):  # what stands still says why
            assert tab.count(f"[data-figure={id}] .own :is(input, button, select):disabled") > 0
            assert "levelhead page" in tab.text(f"[data-figure={id}] .saved")
        tab.rests()
        tab.page.locator("[data-figure=jacobian] .chip").first.click()
        tab.until(lambda: tab.count("#claim-C6 figure[data-drawn] .plot .trace") > 0, "the claim")
        assert tab.count(".trouble:not([hidden])") == 0
        tab.page.locator("#languages select").select_option("hi-Latn")
        words = catalogues()["hi-Latn"]["bench"]
        tab.until(lambda: tab.text("#root") == words["root"]["title"].replace("$d_k$", "dk"), "the language")
        tab.until(lambda: "bina divide" in tab.text("[data-figure=root] .legend"), "its figures")
        assert "saved page" in tab.text("#bench > .saved") and "lang=hi-Latn" in tab.page.url
        assert tab.text("#d_k-now") == "4096" and tab.ask("document.documentElement.lang") == "hi-Latn"
        assert [one.url for one in tab.requests if not one.url.startswith("data:")] == [path.as_uri()]
        story = open_tab(path.as_uri())
        story.page.locator(".option[value=both]").click()
        story.page.locator(".because").wait_for()
        story.page.locator(".top-bar select").select_option("hi-Latn")
        story.page.locator(".end.next").click()
        story.until(lambda: story.count("[data-chapter=hook]") == 0, "the next chapter")
        assert "lang=hi-Latn&answers=hook:both" in story.page.url and story.count(".option") > 1
        assert [one.url for one in story.requests if not one.url.startswith("data:")] == [path.as_uri()]


def test_one_module_asks_and_none_parses_markup(root: Path) -> None:
    files = sorted((root / "src" / "levelhead" / "page" / "static").glob("*.js"))
    texts = {file.name: file.read_text(encoding="utf-8") for file in files}
    asking = r"\bfetch\(|EventSource|XMLHttpRequest|WebSocket|sendBeacon|import\((?!\"\./[\w-]+\.js\"\))"
    assert [name for name, text in texts.items() if re.search(asking, text)] == ["source.js"]
    parsing = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function"
    assert [name for name, text in texts.items() if re.search(parsing, text)] == []
    elsewhere = r"https?://(?!www\.w3\.org/(2000/svg|1998/Math/MathML))"
    assert [name for name, text in texts.items() if re.search(elsewhere, text)] == []

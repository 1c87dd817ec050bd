"""The lab bench in every language: its words, the lab's texts in translation, its address, its room on a screen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from browsing import DESKTOP, Tab, in_a_browser, started_browser, tabs  # noqa: F401
from levelhead.course import catalogue
from levelhead.course.catalogue import FIGURES, catalogues, terms
from levelhead.lab import figures
from levelhead.lab.parameters import CURES

pytestmark = in_a_browser

HINGLISH = "hi-Latn"
OTHERS = [language for language in catalogues() if language != "en"]


@pytest.fixture(scope="module", name="shared")
def one_bench(address: str, browser: Any) -> Iterator[Tab]:
    """One bench for all tests: opening it takes longer than a test."""
    with tabs(browser) as open_tab:
        yield open_tab(f"{address}#bench", reduced_motion="reduce").all_drawn()


@pytest.fixture(name="tab")
def bench_at_rest(shared: Tab) -> Iterator[Tab]:
    """Afterwards everything is as it was."""
    yield shared
    shared.page.set_viewport_size(DESKTOP)
    shared.goes_to("#d_k=64&lang=en")
    shared.rests()


def speaks(tab: Tab, language: str) -> None:
    tab.page.locator("#languages select").select_option(language)
    tab.until(lambda: tab.ask("document.documentElement.lang") == language, language)
    tab.rests()


# ---- the lab's texts

STRIP: list[dict[str, Any]] = [
    {},
    {"scale": "none", "d_k": 4096, "keys": 512},
    {"scale": "1/d_k", "d_k": 1},
    {"scale": "1/sqrt(d)", "d_k": 4, "keys": 2},
    {"scale": "1/d_k^p", "power": 0.3, "d_k": 2},
]
ATTACKS = [
    {"d_k": d_k, "growth": growth, "cure": cure, "rho": rho, "cap": cap}
    for d_k, growth, cure, (rho, cap) in product((1, 64, 1024), (0.5, 1.0, 8.0), CURES, ((0.0, 30.0), (0.5, 1.0)))
]
OWN: dict[str, list[dict[str, Any]]] = {
    "attack": ATTACKS,
    "online": [{"tile": tile, "order": 1} for tile in (1, 8, 32)],
    "training": [{"task": task, "width": width} for task in ("retrieval", "text") for width in (16, 256)],
}


def texts(figure: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The place and the text of all that a reader is shown in words; names of things are not among them."""
    yield "title", figure["title"]
    yield "note", figure["note"]
    for gauge in figure["gauges"]:
        yield "gauge", gauge["label"]
    for fact in figure["facts"]:
        yield "fact", fact["label"]
        yield "formula", fact["formula"]
        if isinstance(fact["value"], str):
            yield "value", fact["value"]
    for chart in figure["charts"]:
        yield "chart", chart["title"]
        yield "about", chart["about"]
        yield from (("axis", chart[axis]["title"]) for axis in ("x", "y"))
        yield from (("series", series["name"]) for series in chart["series"])
    for step in figure["extra"].get("steps", ()) if figure["id"] == "sentence" else ():
        yield from (("step", step[name]) for name in ("name", "about"))


def shown(id: str, setting: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for place, text in texts(figures.figure(id, **setting).json()):
        if text and not (place == "title" and text.startswith("“")):  # a sentence of the reader's
            yield f"{id}, {place}", text


UNTRANSLATED = """async ([entries, terms, texts]) => {
  const [{ Translation }, { bare }] = await Promise.all([import("/assets/translation.js"), import("/assets/chart.js")]);
  const translation = new Translation(entries, terms);
  const named = (place, text) => /fact|series/.test(place) ? [text, bare(text) || text] : [text]; // as in a legend
  return texts.filter(([place, text]) => named(place, text).some((one) => translation.of(one) === null));
}"""


@pytest.mark.parametrize("language", OTHERS)
@pytest.mark.parametrize("id", figures.IDS)
def test_every_text_of_the_lab_has_a_translation(tab: Tab, language: str, id: str) -> None:
    panel = id in figures.PANELS
    settings = [*STRIP, *OWN.get(id, ())] if panel and figures.NEEDS[id] else [{}]
    found = {text: place for setting in settings for place, text in shown(id, setting)}
    if not panel:  # a claim's criterion is in English, as the page says
        found = {re.sub(r" Criterion: .*", "", text, flags=re.DOTALL): place for text, place in found.items()}
    wanted = [(place, text) for text, place in found.items()]
    entries = catalogues()[language][FIGURES]
    assert wanted and tab.page.evaluate(UNTRANSLATED, [entries, sorted(terms()), wanted]) == []


# ---- the bench


def said(tab: Tab) -> dict[str, str]:
    """Words from everywhere: the index, the modules, the lab."""
    places = {
        "title": "h1",
        "heading": "#online",
        "prose": "#online + div p:first-child",
        "control": "#strip legend",
        "button": "#copy-link",
        "panel": "[data-figure=attack] .own .control:first-child label",
        "tool": "[data-figure=root] .tools .copy",
        "figure": "[data-figure=root] figcaption",
        "chart": "[data-figure=training] h3",
        "legend": "[data-figure=root] .legend",
        "fact": "[data-figure=walk] .facts dt",
        "gauge": "[data-figure=attack] .gauge-line:first-child",
        "meaning": ".level-word span",
        "claim": "#claim-C5 > summary > :last-child",
        "footer": "#about",
    }
    found = {name: tab.text(selector) for name, selector in places.items()}
    axis = "document.querySelector('[data-figure=online] .xtitle').textContent"
    label = "document.querySelector('[data-figure=root] .plot').ariaLabel"
    return found | {"axis": tab.ask(axis), "label": tab.ask(label), "document": tab.ask("document.title")}


def test_another_language_changes_every_word_and_no_setting(tab: Tab) -> None:
    tab.goes_to("#d_k=128&scale=none&keys=16&seed=3&rho=0.75&cure=softcap")
    tab.rests()
    before, bubble = said(tab), tab.bubble()
    tab.requests.clear()
    speaks(tab, HINGLISH)
    tab.until(lambda: "jaata hai" in tab.text("[data-figure=jacobian] figcaption"), "the last figure")
    tab.until(
        lambda: not [name for name, words in said(tab).items() if words == before[name]], "other words everywhere"
    )
    assert tab.text("h1") == catalogues()[HINGLISH]["bench"]["title"]
    settings = "d_k=128&scale=none&keys=16&seed=3&rho=0.75&cure=softcap"
    assert tab.page.url.endswith(f"#{settings}&lang={HINGLISH}") and tab.bubble() == bubble
    assert tab.text("#d_k-now") == "128" and tab.ask("document.querySelector('#strip :checked').value") == "none"
    assert not tab.figures_asked()  # the numbers are the same, and are here
    tab.page.reload()
    tab.all_drawn()
    assert tab.ask("document.documentElement.lang") == HINGLISH and tab.text("#d_k-now") == "128"
    assert tab.ask("document.querySelector('#languages select').value") == HINGLISH
    speaks(tab, "en")
    tab.until(lambda: said(tab) == before, "the words from before")
    assert "lang=en" in tab.page.url


def test_what_a_reader_has_done_stays(tab: Tab) -> None:
    tab.slide("tiles seen", "Home")
    tab.page.locator("[data-figure=heads] .cell").nth(3).click()
    tab.page.locator("[data-figure=root] .table summary").click()
    tab.page.locator("#claim-C1 > summary").click()
    tab.until(lambda: tab.count("#claim-C1 figure[data-drawn]") == 1, "the claim")
    speaks(tab, HINGLISH)
    tab.until(lambda: "sabse bada" in tab.text(".one .facts"), "the head in the other language")
    assert tab.ask("document.querySelector('[data-figure=online] input').value") == "1"
    assert tab.count(".cell.chosen") == 1 and "head 3" in tab.text(".one h3")
    tab.until(lambda: "bina divide" in tab.text("[data-figure=root] .table th"), "the table")
    tab.until(lambda: "jaisa socha tha" in tab.text("#claim-C1 figcaption"), "the claim")
    assert tab.count("#claim-C1 figcaption [lang=en]") == 1  # its criterion
    tab.page.locator("#claim-C1 > summary").click()
    tab.page.locator("[data-figure=root] .table summary").click()


@pytest.mark.parametrize("given", ["xx", "<img src=x onerror=alert(1)>", "__proto__", ""])
def test_a_hostile_language_is_told_and_english_is_spoken(tab: Tab, given: str) -> None:
    speaks(tab, HINGLISH)
    tab.goes_to(f"#d_k=32&lang={given}")
    tab.until(lambda: tab.ask("document.documentElement.lang") == "en", "English")
    tab.until(lambda: "There is no language" in tab.text("#notes"), "a note")
    assert tab.text("#d_k-now") == "32" and tab.count("#notes *") == 0
    tab.until(lambda: tab.text("h1") == catalogues()["en"]["bench"]["title"], "English words")


def test_links_between_the_views_carry_the_language(tab: Tab) -> None:
    speaks(tab, HINGLISH)
    tab.page.locator(".brand a").last.click()
    tab.page.locator(f"html[lang={HINGLISH}] .option").first.wait_for()
    assert f"lang={HINGLISH}" in tab.page.url and tab.page.locator("#story").is_visible()
    tab.page.locator(".top-bar select").select_option("en")
    tab.page.locator("html[lang=en] .option").first.wait_for()
    tab.page.locator(".to-bench").click()
    tab.until(lambda: tab.text("h1:visible") == catalogues()["en"]["bench"]["title"], "the bench in English")
    assert "lang=en" in tab.page.url and f"lang={HINGLISH}" not in tab.page.url


def test_a_link_to_a_claim_keeps_the_language_of_the_story(address: str, browser: Any) -> None:
    with tabs(browser) as open_tab:
        tab = open_tab(f"{address}#/hook?lang={HINGLISH}&answers=hook:skip")
        tab.page.locator(".fold-claims summary").click()
        sentence = catalogues()[HINGLISH]["figures"][figures.claims()["C5"]["claim"]]
        sentence = sentence.replace("d_k", "dk")  # it is drawn with a subscript
        tab.until(lambda: sentence[:12] in tab.text(".claim-list"), "the claim in Hinglish")
        tab.page.locator(".claim-list a").first.click()
        tab.until(lambda: tab.count("#claim-C5[open]") == 1, "the claim")
        assert tab.ask("document.documentElement.lang") == HINGLISH
        tab.all_drawn()


# Texts and labels that a reader meets. What is a name of something, typed by a reader, or code is left out.
WALK = """() => {
  const skipped = "code, pre, option, .languages, .token, .levels, .pair td, [lang=en], .xtick, .ytick, .cbaxis";
  const found = new Set();
  const kinds = NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT;
  const walker = document.createTreeWalker(document.getElementById("bench"), kinds);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.nodeType === Node.TEXT_NODE ? node.parentElement : node;
    if (!element.checkVisibility({ visibilityProperty: true }) || element.closest(skipped)) continue;
    const own = node.nodeType === Node.TEXT_NODE ? [node.data] : [node.ariaLabel, node.title];
    own.filter((text) => typeof text === "string" && text.trim()).forEach((text) => found.add(text.trim()));
  }
  return [...found];
}"""


def test_no_word_of_the_bench_stays_english(tab: Tab) -> None:
    tab.goes_to("#d_k=1024&growth=8&cure=softcap&predict=0")
    tab.rests()
    tab.ask("document.querySelectorAll('#bench .rest').forEach((one) => { one.open = true })")
    english = set(tab.ask(WALK))
    speaks(tab, HINGLISH)
    tab.until(lambda: "bina divide" in tab.text("[data-figure=additive] .legend"), "the figures")
    tab.ask("document.querySelectorAll('#bench .rest').forEach((one) => { one.open = true })")
    left = [text for text in tab.ask(WALK) if text in english and not catalogue._same_everywhere(text)]
    assert left == []
    said = tab.ask("[...document.querySelectorAll('#bench [lang=en]')].map((one) => one.className || one.tagName)")
    assert len(said) < 60, said  # findings, where a record comes from
    assert tab.page.locator("#english").is_visible()


FITS = "document.documentElement.scrollWidth <= innerWidth"
WIDE = """[...document.querySelectorAll('#bench *')].filter((one) => one.checkVisibility() &&
  one.getBoundingClientRect().right > innerWidth + 1 && !one.closest('.scroll, .display, svg, .python, .unseen'))
  .map((one) => one.outerHTML.slice(0, 100))"""


@pytest.mark.parametrize("language", list(catalogues()))
def test_every_language_has_room(tab: Tab, language: str) -> None:
    speaks(tab, language)
    for width in (320, 390, 768, 1280):
        tab.page.set_viewport_size({"width": width, "height": 800})
        tab.until(lambda: tab.ask(FITS), f"room on {width} pixels, {tab.ask(WIDE)}")


def test_the_link_for_teachers_asks_in_the_readers_language(tab: Tab) -> None:
    tab.goes_to(f"#d_k=1024&scale=none&predict=1&lang={HINGLISH}")
    tab.until(lambda: tab.ask("document.documentElement.lang") == HINGLISH, HINGLISH)
    tab.rests()
    words = catalogues()[HINGLISH]["bench"]["predict"]
    assert tab.text("#question strong") == words["question"]
    cover = "getComputedStyle(document.querySelector('.covered'), '::after').content"
    assert tab.ask(cover) == f'"{words["covered"]}"'
    tab.page.locator("#question").get_by_text("level", exact=True).click()
    tab.until(lambda: tab.text("#answer") == words["wrong"].format(guess="level", level="saturated"), "the answer")


def test_what_the_server_says_is_marked_as_english(address: str, browser: Any) -> None:
    with tabs(browser) as open_tab:
        tab = open_tab(f"{address}#lang={HINGLISH}", expected_errors=1).all_drawn()  # the browser notes a status of 400
        place = tab.page.locator("[data-figure=sentence]")
        place.get_by_role("textbox").fill(" ")
        place.locator(".run").click()
        trouble = place.locator(".trouble")
        assert trouble.inner_text() == catalogues()[HINGLISH]["bench"]["sentence"]["empty"]
        assert trouble.get_attribute("lang") is None
        place.get_by_role("textbox").fill("long " * 20_000)
        place.locator(".run").click()
        tab.until(lambda: trouble.get_attribute("lang") == "en" and "characters" in trouble.inner_text(), "the refusal")

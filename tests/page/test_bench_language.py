"""The lab bench in every language: its words, the lab's texts in translation, its address, its room on a screen."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from browsing import DESKTOP, Tab, in_a_browser, started_browser, tabs  # noqa: F401
from levelhead.course.catalogue import FIGURES, catalogues, terms
from levelhead.lab import figures
from levelhead.lab.parameters import CURES

pytestmark = in_a_browser

HINGLISH = "hi-Latn"
OTHERS = [language for language in catalogues() if language != "en"]


@pytest.fixture(scope="module", name="tab")
def one_bench(address: str, browser: Any) -> Iterator[Tab]:
    """One bench for all tests: opening it takes longer than a test."""
    with tabs(browser) as open_tab:
        yield open_tab(f"{address}#bench", reduced_motion="reduce").all_drawn()


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
  const named = (place, text) => /fact|series/.test(place) ? [text, bare(text) || text] : [text]; // one colour, one name
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

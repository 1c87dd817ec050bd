"""The cards in a real browser: turned, known or missed, kept, forgotten, in a chapter's fold, in every language."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from browsing import DESKTOP, PHONE, Tab, in_a_browser, started_browser, tabs  # noqa: F401
from levelhead.course.cards import CARDS
from levelhead.course.catalogue import catalogues
from levelhead.course.deck import deck

pytestmark = in_a_browser

HINGLISH = "hi-Latn"
SOON = 3
CARD = """() => {
  const face = document.querySelector('.card-face');
  const fits = document.documentElement.scrollWidth <= innerWidth;
  return [face.dataset.card, face.innerText, face.querySelectorAll('.number').length, fits];
}"""
BROKEN = "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no', 'SecurityError') } })"


@pytest.fixture
def opened(address: str, browser: Any) -> Iterator[Callable[..., Tab]]:
    with tabs(browser) as open_tab:

        def open_cards(state: str = "#/cards", **options: Any) -> Tab:
            tab = open_tab(f"{address}{state}", **options)
            tab.page.locator("[data-chapter]").wait_for()
            return tab

        yield open_cards


def shown(tab: Tab) -> str:
    return str(tab.page.locator(".card-face").get_attribute("data-card"))


def stored(tab: Tab) -> dict[str, list[float]]:
    found = tab.ask("localStorage.getItem('levelhead-cards')")
    return dict(json.loads(found or "{}"))


def test_cards_are_turned_known_and_missed_by_keyboard(opened: Callable[..., Tab]) -> None:
    tab = opened()
    ids, press = [card.id for card in CARDS], tab.page.keyboard.press
    assert shown(tab) == ids[0] and tab.count(".card-back, .card-again") == 0
    assert f"{len(ids)} to go" in tab.text(".card-said") and "kept in this browser" in tab.text(".card-notes")
    press(" ")
    assert tab.count(".card-back .number") >= 2 and "C5" in tab.text(".card-sources")
    assert "card-face" in tab.ask("document.activeElement.className")
    press("Enter")
    assert tab.count(".card-back") == 0  # turned back
    press("2")
    assert shown(tab) == ids[0] and stored(tab) == {}  # nothing is known before the answer was seen
    press(" ")
    assert "again soon" in tab.text(".card-again") and "again tomorrow" in tab.text(".card-knew")  # with its own card
    press("1")
    assert shown(tab) == ids[1] and "again" not in tab.text(".deck")  # and not under the next one
    for id in ids[1 : 1 + SOON]:
        assert shown(tab) == id
        press(" ")
        press("2")
    assert shown(tab) == ids[0]  # what was missed, after three others
    press("ArrowRight")
    assert shown(tab) == ids[1 + SOON]
    press("ArrowLeft")
    assert shown(tab) == ids[0] and "#/cards" in tab.page.url
    assert {id: value[0] for id, value in stored(tab).items()} == {ids[0]: 0} | dict.fromkeys(ids[1 : 1 + SOON], 1)
    tab.page.reload()
    tab.page.locator(".card-face").wait_for()
    assert shown(tab) == ids[0] and f"{len(ids) - SOON} to go" in tab.text(".card-said")
    press("ArrowRight")
    assert shown(tab) == ids[1 + SOON]  # what was known is not due


def test_days_pass_and_all_is_forgotten_at_the_second_press(opened: Callable[..., Tab]) -> None:
    tab = opened()
    now = int(tab.ask("Date.now()"))
    days = {card.id: [2, now + 86_400_000] for card in CARDS}
    missed, over, *_ = (card.id for card in reversed(CARDS))
    odd = {CARDS[0].id: "x", CARDS[1].id: [1], CARDS[2].id: None, "constructor": [1, 1]}
    tab.page.evaluate(
        "text => localStorage.setItem('levelhead-cards', text)",
        json.dumps(days | {over: [4, now - 1], missed: [0, now - 1]} | odd),
    )
    tab.page.reload()
    tab.page.locator(".card-face").wait_for()
    assert shown(tab) == missed
    tab.page.locator(".card-next").click()
    assert shown(tab) == over
    tab.page.locator(".card-turn").click()
    assert "in 21 days" in tab.text(".card-knew") and "again soon" in tab.text(".card-again")
    tab.page.locator(".card-knew").click()
    assert stored(tab)[over][0] == 4
    assert shown(tab) == CARDS[0].id  # what cannot be read counts as new
    for _ in range(3):
        tab.page.keyboard.press("ArrowRight")
    assert "No card is due" in tab.text(".card-face") and tab.text(".card-said") == ""
    tab.page.get_by_role("button", name=f"go through all {len(CARDS)}").click()
    assert shown(tab) == CARDS[0].id and f"{len(CARDS)} to go" in tab.text(".card-said")
    reset = tab.page.locator(".card-reset")
    reset.click()
    assert stored(tab) != {}
    reset.click()
    assert stored(tab) == {} and "Forgotten" in tab.text(".card-notes")


def test_tomorrow_is_the_next_day_and_a_day_no_answer_leads_to_is_damage(opened: Callable[..., Tab]) -> None:
    """A card that is known late in the evening is due when the next day begins. A due date behind the longest interval
    comes from a wrong clock or from storage that was edited."""
    tab = opened()
    evening = int(tab.ask("new Date(2030, 4, 5, 23, 30).getTime()"))
    minutes = 60_000
    tab.page.clock.set_fixed_time(evening / 1000)  # seconds
    tab.page.keyboard.press(" ")
    tab.page.keyboard.press("2")
    assert stored(tab)[CARDS[0].id] == [1, evening + 30 * minutes]
    waits = {card.id: [4, evening + 21 * 1440 * minutes] for card in CARDS}
    damaged = {CARDS[7].id: [4, 4_070_908_800_000], CARDS[9].id: [2, 1e308]}
    tab.page.evaluate("text => localStorage.setItem('levelhead-cards', text)", json.dumps(waits | damaged))
    tab.page.reload()
    tab.page.locator(".card-face").wait_for()
    assert shown(tab) == CARDS[7].id and "2 to go" in tab.text(".card-said")
    tab.page.keyboard.press("ArrowRight")
    assert shown(tab) == CARDS[9].id


def test_a_chapter_ends_with_its_cards(opened: Callable[..., Tab]) -> None:
    tab = opened("#/softmax?answers=softmax:skip")
    own = [card.id for card in CARDS if card.chapter == "softmax"]
    assert not any("cards-data.js" in one.url for one in tab.requests)  # loaded when the fold is opened
    tab.page.locator(".fold-cards summary").click()
    tab.page.locator(".fold-cards .card-face").wait_for()
    tab.page.locator(".card-front").click()
    assert tab.count(".card-back") == 1
    for id in own:
        assert shown(tab) == id
        tab.page.keyboard.press("ArrowRight")  # the deck's, as long as the focus is in it
    assert "#/softmax" in tab.page.url and "once more" in tab.text(".card-face")
    tab.page.locator(".fold-cards .to-cards").click()
    tab.page.locator(".cards-view h1").wait_for()
    assert "#/cards?answers=softmax:skip" in tab.page.url
    tab.page.keyboard.press(" ")
    tab.page.locator(".card-sources a[data-to=hook]").click()
    tab.page.locator("[data-chapter=hook]").wait_for()
    tab.page.locator(".contents summary").click()
    tab.page.locator(".contents .to-cards").click()
    tab.page.locator(".cards-view h1").wait_for()


def test_cards_have_words_and_room_in_every_language(opened: Callable[..., Tab]) -> None:
    tab = opened(f"#/cards?lang={HINGLISH}", viewport=PHONE, reduced_motion="reduce")
    zoomed = {"width": DESKTOP["width"] // 2, "height": DESKTOP["height"] // 2}
    for language in (HINGLISH, "en"):
        tab.page.locator(".top-bar select").select_option(language)
        tab.until(lambda language=language: tab.ask("document.documentElement.lang") == language, language)
        assert tab.text(".cards-view h1") == catalogues()[language]["cards"]["title"]
        for size, scheme in ((PHONE, "light"), (zoomed, "dark"), ({"width": 320, "height": 480}, "light")):
            tab.page.set_viewport_size(size)
            tab.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            assert tab.ask("document.documentElement.scrollWidth <= innerWidth"), (language, size)
        assert tab.ask("getComputedStyle(document.querySelector('.card-face')).animationName") == "none"
        for one in deck(language):  # every card draws, on the narrowest screen
            tab.page.keyboard.press(" ")
            id, said, numbers, fits = tab.ask(CARD)
            assert id == one.card.id and fits, id
            assert not re.search(r"NaN|undefined|\[object|\{\w+\}|null|\$", said), said
            assert numbers >= len(one.numbers), id
            tab.page.keyboard.press("ArrowRight")


def test_cards_work_where_nothing_can_be_stored(address: str, browser: Any) -> None:
    with tabs(browser) as open_tab:
        tab = open_tab("about:blank")
        tab.page.add_init_script(BROKEN)
        tab.page.goto(f"{address}#/cards")
        tab.page.locator(".card-notes").wait_for()
        assert "lasts until the page is closed" in tab.text(".card-notes")
        assert "kept in this browser" not in tab.text(".card-notes")
        tab.page.locator(".card-turn").click()
        tab.page.locator(".card-knew").click()
        assert shown(tab) == CARDS[1].id
        tab.page.evaluate("location.hash = '#/hook'")
        tab.page.locator("[data-chapter=hook]").wait_for()
        tab.page.evaluate("location.hash = '#/cards?step=2&answers=cards:skip'")
        tab.page.locator(".cards-view .card-face").wait_for()
        assert shown(tab) == CARDS[1].id  # memory has it
        assert "cards:skip" in tab.text(".notes:visible")  # an address that nobody wrote
        tab.requests.clear()

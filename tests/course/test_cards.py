"""The cards: their words, their numbers, and the file that Anki imports."""

from __future__ import annotations

import copy
import csv
import html
import io
import re
from typing import Any

import pytest

from levelhead.course import catalogue, deck
from levelhead.course.card_numbers import MORE
from levelhead.course.cards import CARDS, Card
from levelhead.course.catalogue import catalogues
from levelhead.course.chapter import Chapter
from levelhead.course.chapters import CHAPTERS, ORDER
from levelhead.course.numbers import CHOSEN, shown
from levelhead.course.results import claim
from levelhead.errors import LevelheadError

LANGUAGES = list(catalogues())
each_language = pytest.mark.parametrize("language", LANGUAGES)
HEADERS = {
    "separator": "tab",
    "html": "true",
    "notetype": "Basic",
    "columns": "guid\tdeck\tFront\tBack\ttags",
    "guid column": "1",
    "deck column": "2",
    "tags column": "5",
}


def test_every_chapter_has_cards_and_every_card_a_name_of_its_own() -> None:
    assert len(CARDS) >= 40
    assert len({card.id for card in CARDS}) == len(CARDS)
    assert list(dict.fromkeys(card.chapter for card in CARDS)) == list(ORDER)
    for card in CARDS:
        assert all(claim(id)["verdict"] for id in card.claims)


@each_language
def test_every_card_shows_a_number_that_says_where_it_comes_from(language: str) -> None:
    for one in deck.deck(language):
        name = one.card.id
        assert one.front.count("?") or one.front.endswith("."), name
        assert one.numbers and all(number.where for number in one.numbers.values()), name
        assert one.where or name == "shapes", name  # all numbers of that one are chosen
        sentences = re.split(r"(?<=[.?!])\s", one.back)
        assert len(sentences) <= 4, name


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.id)
def test_a_recorded_number_is_of_a_claim_that_the_card_names(card: Card) -> None:
    one = next(one for one in deck.deck() if one.card == card)
    named = {number.where.split(",")[0] for number in one.numbers.values() if number.source == "recorded"}
    assert named <= set(card.claims)


def test_no_number_is_stale() -> None:
    """Numbers that can be read off the records in one line are those that are shown."""
    numbers = {one.card.id: {name: x.text for name, x in one.numbers.items()} for one in deck.deck()}
    c7a, c12, c9a = (claim(id)["measured"] for id in ("C7a", "C12", "C9a"))
    assert numbers["step-zero"]["first"] == shown(c7a["gradient of W_Q at step 0, d_k 256"])
    assert numbers["how-much-slower"]["steps_deep"] == shown(c12["steps, depth 8"])
    assert numbers["correlated"]["exponent"] == shown(c9a["exponent"]["1/sqrt(d_k)"], 3)
    assert numbers["additive-bound"]["norm"] == shown(claim("C13a")["measured"]["‖v‖₁"])
    assert numbers["sharp"]["one_hot"] == shown(claim("C11a")["measured"]["rows near one-hot"], 3)
    assert numbers["variance"]["variance_measured"] == shown(claim("C1")["details"]["variance"]["normal"][6], 3)
    assert numbers["gpt-three"]["spread_heads"] == shown(claim("C10")["measured"]["logit std"][-1], 3)
    assert numbers["gpt-three"]["d_k_large"] == "128" and numbers["first-transformer"]["root_small"] == "8"


@pytest.mark.parametrize("chapter", CHAPTERS, ids=ORDER)
def test_a_number_of_a_chapter_is_not_made_again_for_its_cards(chapter: Chapter) -> None:
    """The cards add what the chapter does not have, under names of their own, and show all that they add."""
    more = MORE[chapter.id]() if chapter.id in MORE else {}
    assert not more.keys() & chapter.numbers().keys()
    used = {name for one in deck.deck(chapter=chapter.id) for name in one.numbers}
    assert more.keys() <= used
    found = {(number.where, number.value) for number in chapter.numbers().values() if number.where != CHOSEN}
    assert not [name for name, number in more.items() if (number.where, number.value) in found]


def changed(path: str, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(dict(catalogues()))
    *above, last = path.split(".")
    part = found["en"]
    for name in above:
        part = part[name]
    part[last] = value
    return found


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("cards.deck.shift.back", None, "cards.deck.shift.back: expected a text"),
        ("cards.deck.shift", {}, "cards.deck.shift.front: expected a text"),
        ("cards.deck.shift.back", "It is {nothing}.", "a number of the card, got nothing"),
        ("cards.deck.shift.back", "It is 4.", "no typed number, got 4"),
        ("cards.deck.another", {"front": "What?", "back": "That."}, "ids of cards.py, got another"),
        ("cards", None, "cards.deck.two-heads.front: expected a text"),
    ],
)
def test_words_with_a_fault_are_refused(path: str, value: Any, said: str) -> None:
    with pytest.raises(LevelheadError, match=re.escape(said)):
        catalogue.check(changed(path, value), ())


@each_language
def test_anki_reads_back_what_the_cards_say(language: str) -> None:
    cards = deck.deck(language)
    text = deck.anki(language, cards)
    lines = text.split("\n")
    headers = [line[1:].split(":", 1) for line in lines if line.startswith("#")]
    assert dict(headers) == HEADERS and all(line.startswith("#") for line in lines[: len(HEADERS)])
    notes = list(csv.reader(io.StringIO("\n".join(lines[len(HEADERS) :])), delimiter="\t"))
    assert len(notes) == len(CARDS) >= 40
    for one, (guid, name, front, back, tags) in zip(cards, notes, strict=True):
        assert guid == deck.guid(language, one.card) and "√" in name
        assert tags.split() == ["levelhead", one.card.chapter, *one.card.claims]
        assert "\n" not in front + back, one.card.id
        assert not re.search(r"[{}$`*^]|\b\w_\w", front + back.split("<br>")[0]), one.card.id
        assert_text(front, deck.plain(one.front, one.numbers))
        assert_text(back.split("<br>")[0], deck.plain(one.back, one.numbers))


def assert_text(field: str, plain: str) -> None:
    """The field without tags has the words of the plain text; only indices and powers are written differently."""
    bare = html.unescape(re.sub(r"</?(?:i|sub|sup|code|small)>", "", field))
    assert not re.search(r"[<>]", re.sub(r"</?(?:i|sub|sup|code|small)>", "", field))
    strip = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹ᵀ", "0123456789T", "_^() ")
    assert bare.translate(strip) == plain.translate(strip)


def test_guids_are_stable_and_unique() -> None:
    found = [deck.guid(language, card) for language in LANGUAGES for card in CARDS]
    assert len(set(found)) == len(found)
    # Anki knows readers' notes by these: a change would double their decks.
    assert deck.guid("en", CARDS[0]) == "lhda2c63380eadfd97"
    assert CARDS[0].id == "two-heads" and deck.guid("hi-Latn", CARDS[0]) == "lhb51811b2392b23ed"


def test_fields_are_escaped() -> None:
    one = deck.deck(chapter="hook")[0]
    odd = deck.Written(one.card, one.title, 'Is "a" < b & c\td?', "<script>alert()</script>", {})
    (note,) = list(csv.reader(io.StringIO(deck.anki("en", [odd]).split("column:5\n")[1]), delimiter="\t"))
    assert note[2] == 'Is "a" &lt; b &amp; c\td?' and "<script" not in note[3]

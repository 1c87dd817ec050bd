"""The cards with their words and numbers: as text for a terminal, as JSON for the page, as a file that Anki imports.

Anki's own text format (docs.ankiweb.net, "Text Files"): header lines, then a note per line with fields between tabs. A
note is known by its GUID, so importing a newer file updates it and keeps what the reader has learned.
"""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from levelhead.course.cards import CARDS, Card
from levelhead.course.catalogue import catalogues, placeholders
from levelhead.course.chapters import ORDER
from levelhead.course.languages import PATTERN
from levelhead.course.numbers import CHOSEN, Number
from levelhead.course.results import claim
from levelhead.errors import bad_value
from levelhead.json_numbers import json_value

_MARKUP = re.compile(r"`(?P<code>[^`]+)`|\$(?P<formula>[^$]+)\$|\*(?P<emphasis>[^*]+)\*|\{(?P<number>\w+)\}")
_FORMULA = re.compile(r"[_^](?:\((?P<group>[^)]*)\)|(?P<one>[^\W_]+))|(?P<letters>[^\W\d_]+)")
_LOWERED = re.compile(r"(?<![^\W\d_])([^\W\d_])_([^\W\d_]+)")  # d_k, W_Q, p_ij
_POWERS = str.maketrans("0123456789T", "⁰¹²³⁴⁵⁶⁷⁸⁹ᵀ")
_HEADERS = ("separator:tab", "html:true", "notetype:Basic", "columns:guid\tdeck\tFront\tBack\ttags")
_COLUMNS = ("guid column:1", "deck column:2", "tags column:5")


@dataclass(frozen=True)
class Written:
    """A card in one language: `front` and `back` have markup, `numbers` those that the two show."""

    card: Card
    title: str  # of its chapter
    front: str
    back: str
    numbers: Mapping[str, Number]

    @property
    def where(self) -> tuple[str, ...]:
        """Where its numbers come from, each place once."""
        places = (number.where for number in self.numbers.values() if number.where != CHOSEN)
        return tuple(dict.fromkeys(places))


def deck(language: str = PATTERN, chapter: str | None = None) -> list[Written]:
    """The cards, or those of one chapter, in the order of the story."""
    known = list(catalogues())
    if language not in known:
        raise bad_value("--language", f"one of {', '.join(known)}", repr(language), "Choose one of them")
    if chapter is not None and chapter not in ORDER:
        raise bad_value("--chapter", f"one of {', '.join(ORDER)}", repr(chapter), "Choose one of them")
    words = catalogues()[language]
    return [_written(card, words) for card in CARDS if chapter in (None, card.chapter)]


def _written(card: Card, words: Mapping[str, Any]) -> Written:
    own = words["cards"]["deck"][card.id]
    used, known = placeholders(own["front"] + own["back"]), card.numbers()
    title = (words[card.chapter] or {"title": card.chapter})["title"]  # a chapter that is not written yet has no title
    return Written(card, title, own["front"], own["back"], {name: known[name] for name in used})


def deck_json() -> list[dict[str, Any]]:
    """The cards for the page, without words."""
    return [
        {
            "id": one.card.id,
            "chapter": one.card.chapter,
            "claims": [{"id": id, "verdict": claim(id)["verdict"]} for id in one.card.claims],
            "numbers": {name: json_value(asdict(number)) for name, number in one.numbers.items()},
        }
        for one in deck()
    ]


def plain(text: str, numbers: Mapping[str, Number]) -> str:
    """For a terminal: no markup, powers as raised digits.

    >>> plain("$1 − Σp^2$ at *every* `d_k`", {})
    '1 − Σp² at every d_k'
    """

    def raised(found: re.Match[str]) -> str:
        digits = found[0].startswith("^") and re.fullmatch(r"[\dT]+", found["one"] or "")
        return digits[0].translate(_POWERS) if digits else found[0]

    return _filled(text, numbers, {"formula": lambda inner: _FORMULA.sub(raised, inner)})


def as_html(text: str, numbers: Mapping[str, Number]) -> str:
    """For Anki: indices and powers are set low and high, everything else is escaped.

    >>> as_html("$p^2$ < √d_k", {})
    '<i>p</i><sup>2</sup> &lt; √<i>d</i><sub>k</sub>'
    """

    def formula(found: re.Match[str]) -> str:
        if found["letters"]:
            return f"<i>{found[0]}</i>" if len(found[0]) == 1 else found[0]
        tag = "sup" if found[0][0] == "^" else "sub"
        return f"<{tag}>{found['group'] or found['one']}</{tag}>"

    kinds: dict[str, Callable[[str], str]] = {
        "formula": lambda inner: _FORMULA.sub(formula, inner),
        "code": lambda inner: f"<code>{inner}</code>",
        "emphasis": lambda inner: f"<i>{inner}</i>",
        "": lambda inner: _LOWERED.sub(r"<i>\1</i><sub>\2</sub>", inner),
    }
    return _filled(html.escape(text, quote=False), numbers, kinds)


def _filled(text: str, numbers: Mapping[str, Number], kinds: Mapping[str, Callable[[str], str]]) -> str:
    """The text with every kind of markup replaced; "" is what has none."""
    found, at = [], 0
    between = kinds.get("", str)
    for match in _MARKUP.finditer(text):
        kind = str(match.lastgroup)
        inner = match[kind]
        found += [
            between(text[at : match.start()]),
            numbers[inner].text if kind == "number" else kinds.get(kind, str)(inner),
        ]
        at = match.end()
    return "".join((*found, between(text[at:])))


def anki(language: str, written: Sequence[Written]) -> str:
    """The file for Anki. The deck has the title of the course; tags are the chapter and the claims."""
    words = catalogues()[language]
    name = f"levelhead: {words['shell']['title']}"
    file = io.StringIO()
    file.writelines(f"#{header}\n" for header in _HEADERS + _COLUMNS)
    rows = csv.writer(file, delimiter="\t", lineterminator="\n")
    for one in written:
        front, back = (as_html(text, one.numbers) for text in (one.front, one.back))
        source = "".join(f"<br><small>{html.escape(part)}</small>" for part in sources(one, words))
        tags = " ".join(("levelhead", one.card.chapter, *one.card.claims))
        rows.writerow((guid(language, one.card), name, front, back + source, tags))
    return file.getvalue()


def guid(language: str, card: Card) -> str:
    """Stable: the same in every version of the deck, and of this card in this language alone."""
    return "lh" + sha256(f"levelhead card {language} {card.id}".encode()).hexdigest()[:16]


def sources(one: Written, words: Mapping[str, Any]) -> list[str]:
    """What a card rests on, and where its numbers come from, a line each."""
    say = words["cards"]["words"]
    claims = [f"{id} ({words['shell']['verdicts'][claim(id)['verdict']]})" for id in one.card.claims]
    lines = (("claims", ", ".join(claims)), ("measured", "; ".join(one.where)))
    return [f"{say[name]}: {text}" for name, text in lines if text]

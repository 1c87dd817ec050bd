"""The words of the page, one JSON file per language, and the checks that every language passes.

English is the pattern: every other catalogue has its keys, its placeholders and its formulas. A value holds words and
this markup: `{number}`, `*emphasis*`, `` `code` ``, `$formula in a line$`, and a line of its own `[[formula]]`.

The lab's figures bring English words of their own. Other catalogues translate them in the section `figures`, by the
English text with placeholders; `page/static/translation.js` says how they are found.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from levelhead.course.cards import CARDS, Card
from levelhead.course.chapter import Chapter
from levelhead.course.chapters import CHAPTERS
from levelhead.course.languages import FOLDER, PATTERN, languages
from levelhead.errors import LevelheadError, expected

FIGURES = "figures"  # the section that English does not have

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_FORMULA = re.compile(r"\[\[([\w-]+)\]\]")
_CODE = re.compile(r"`[^`]*`")
_INLINE = re.compile(r"\$[^$]*\$")
_MARKUP = re.compile(r"`[^`]+`|\$[^$]+\$|\*(?P<emphasis>[^*]+)\*|\{\w+\}")  # as words.js reads it
_BROKEN = re.compile(r"[`$*{}]|\[\[|\]\]")
_LONE_DIGITS = re.compile(r"(?<![\d.,])\d(?![\d.,])")  # of a formula: 1 − p, 2p
# Names with a digit in them. A digit anywhere else is a number that was typed.
_NAMES = re.compile(r"\b(?:C\d+[a-z]?|b?float(?:16|32|64)|GPT-[23]|SmolLM2|Llama 3|T5|H100|A100)\b")
_CHAPTER = {"title": str, "question": str, "options": dict, "because": str, "text": list, "takeaway": str}
_OPTIONAL = {
    "intro": list,
    "steps": list,
    "charts": dict,
    "words": dict,
    "derivation": list,
    "more": list,
    "pause": list,
    "claims": dict,
}
_FILLED = ("words", "charts")  # a scene fills in what it computes; the page's tests look for what is left open


@cache
def catalogues() -> Mapping[str, Mapping[str, Any]]:
    """All catalogues by language, English first, checked; a LevelheadError names the first value that is wrong."""
    found = {language: _read(FOLDER / f"{language}.json") for language in languages()}
    check(found, CHAPTERS)
    return found


def check(found: Mapping[str, Mapping[str, Any]], written: tuple[Chapter, ...]) -> None:
    """Every rule, over all languages."""
    pattern = found[PATTERN]
    for chapter in written:
        _check_chapter(chapter, pattern.get(chapter.id))
    _check_cards(CARDS, pattern.get("cards"))
    if FIGURES in pattern:
        raise _wrong(PATTERN, FIGURES, "nothing", "a section", "The lab writes these texts; remove the key")
    leaves = dict(_leaves(pattern))
    for path, words in leaves.items():
        _check_words(PATTERN, path, words)
    for language, catalogue in found.items():
        if language != PATTERN:
            shared = {name: section for name, section in catalogue.items() if name != FIGURES}
            _check_language(language, dict(_leaves(shared)), leaves)
            _check_figures(language, catalogue.get(FIGURES))


def _check_chapter(chapter: Chapter, words: Any) -> None:
    id = chapter.id
    if not isinstance(words, dict):
        raise _wrong(PATTERN, id, "the words of the chapter", "nothing", "Add the key")
    for name, kind in (_CHAPTER | {name: kind for name, kind in _OPTIONAL.items() if name in words}).items():
        if not isinstance(words.get(name), kind):
            raise _wrong(PATTERN, f"{id}.{name}", f"a {kind.__name__}", words.get(name), "Add the key")
    if unknown := words.keys() - _CHAPTER.keys() - _OPTIONAL.keys():
        raise _wrong(PATTERN, id, "keys of a chapter", sorted(unknown)[0], "Remove the key")
    if set(words["options"]) != set(chapter.options):
        wanted = ", ".join(chapter.options)
        raise _wrong(PATTERN, f"{id}.options", f"exactly {wanted}", ", ".join(words["options"]), "Compare the keys")
    if chapter.steps and len(words.get("steps", ())) != chapter.steps:
        raise _wrong(PATTERN, f"{id}.steps", chapter.steps, len(words.get("steps", ())), "Write a value per step")
    if set(words.get("claims", ())) - set(chapter.claims):
        wanted = ", ".join(chapter.claims)
        raise _wrong(PATTERN, f"{id}.claims", f"ids of {wanted}", ", ".join(words["claims"]), "Compare the ids")
    known = chapter.numbers().keys()
    for path, text in _leaves({name: value for name, value in words.items() if name not in _FILLED}):
        for name in placeholders(text):
            if name not in known:
                raise _wrong(PATTERN, f"{id}.{path}", "a number of the chapter", f"{{{name}}}", "See its numbers()")


def _check_cards(cards: tuple[Card, ...], words: Any) -> None:
    found = words["deck"] if isinstance(words, dict) and isinstance(words.get("deck"), dict) else {}
    if unknown := found.keys() - {card.id for card in cards}:
        raise _wrong(PATTERN, "cards.deck", "ids of cards.py", sorted(unknown)[0], "Remove the key")
    for card in cards:
        for side in ("front", "back"):
            path, text = f"cards.deck.{card.id}.{side}", found.get(card.id, {}).get(side)
            if not isinstance(text, str):
                raise _wrong(PATTERN, path, "a text", text, "Add the key")
            if unknown := set(placeholders(text)) - card.numbers().keys():
                raise _wrong(PATTERN, path, "a number of the card", sorted(unknown)[0], "See card_numbers.py")


def _check_language(language: str, own: Mapping[str, str], pattern: Mapping[str, str]) -> None:
    for path in pattern.keys() | own.keys():
        if path not in own:
            raise _wrong(language, path, "words", "nothing", "Add the key")
        if path not in pattern:
            raise _wrong(language, path, "a key of the English catalogue", "one more", "Remove the key")
    for path, words in own.items():
        _check_words(language, path, words)
        for name, markup in (("placeholders", _PLACEHOLDER), ("formulas", _FORMULA)):
            wanted, given = set(markup.findall(pattern[path])), set(markup.findall(words))
            if wanted != given:
                raise _wrong(language, path, f"{name} {sorted(wanted)}", sorted(given), "Use the same")
        if path != "language" and words == pattern[path] and not _same_everywhere(words):
            raise _wrong(language, path, "a translation", repr(words), "Translate it, or add its terms to terms.txt")


def _check_figures(language: str, texts: Any) -> None:
    """Translations of the lab's texts. Numbers that the English text has typed may be in the translation, too."""
    if not isinstance(texts, dict):
        raise _wrong(language, FIGURES, "translations of the lab's texts", texts, "Add the section")
    for english, words in texts.items():
        path = f"{FIGURES}.{english}"
        if not isinstance(words, str) or not words.strip():
            raise _wrong(language, path, "words", words, "Write them")
        wanted, given = (sorted(_PLACEHOLDER.findall(text)) for text in (english, words))
        if wanted != given:
            raise _wrong(language, path, f"placeholders {wanted}", given, "Use the same")
        typed = Counter(re.findall(r"\d+", _PLACEHOLDER.sub("", words)))
        if more := typed - Counter(re.findall(r"\d+", _PLACEHOLDER.sub("", english))):
            raise _wrong(language, path, "no typed number", sorted(more)[0], "Write the numbers of the English text")
        if words == english and not _same_everywhere(words):
            raise _wrong(language, path, "a translation", repr(words), "Translate it, or add its terms to terms.txt")


def _check_words(language: str, path: str, words: str) -> None:
    if not words.strip():
        raise _wrong(language, path, "words", "nothing", "Write them")
    if broken := _BROKEN.search(_unmarked(words)):
        raise _wrong(language, path, "markup that is closed", f"a lone {broken[0]}", "Close it or remove it")
    rest = _bare(words)
    formulas = " ".join(_LONE_DIGITS.sub("", text) for text in _INLINE.findall(words))
    if typed := re.search(r"\d+", _NAMES.sub("", rest) + formulas):
        raise _wrong(language, path, "no typed number", typed[0], "Put it into numbers() and write {name}")


def placeholders(words: str) -> list[str]:
    """The numbers that a text shows, each once, in the order of the text."""
    return list(dict.fromkeys(_PLACEHOLDER.findall(_CODE.sub("", words))))


def _unmarked(words: str) -> str:
    """What is left beside the markup; emphasis may hold other markup."""
    if _FORMULA.fullmatch(words):
        return ""
    return _MARKUP.sub(lambda found: _unmarked(found["emphasis"] or ""), words)


def _same_everywhere(words: str) -> bool:
    """Nothing to translate: no word at all, or technical terms only."""
    found = re.findall(r"[^\W\d_][\w-]*", _bare(words))
    return all(word.lower() in terms() or len(word) == 1 for word in found)


@cache
def terms() -> frozenset[str]:
    """Technical terms that another language may use unchanged, a line each."""
    return frozenset((FOLDER / "terms.txt").read_text(encoding="utf-8").split())


def _bare(words: str) -> str:
    """The words without markup that has no language."""
    for markup in (_CODE, _INLINE, _FORMULA, _PLACEHOLDER):
        words = markup.sub(" ", words)
    return words


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every text with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for name, one in pairs:
            yield from _leaves(one, f"{path}.{name}" if path else str(name))
    else:
        raise _wrong(PATTERN, path, "a text", value, "Write it as a text")


def _read(path: Path) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"the key {sorted(twice)[0]!r} is there twice")
        return dict(pairs)

    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    except ValueError as error:
        raise _wrong(path.stem, "the file", "JSON with every key once", error, "Mend the file") from error
    if not isinstance(found, dict):
        raise _wrong(path.stem, "the file", "an object", type(found).__name__, "Mend the file")
    return found


def _wrong(language: str, path: str, wanted: object, given: object, advice: str) -> LevelheadError:
    return LevelheadError(expected(f"catalogues/{language}.json, {path}", str(wanted), given, advice))

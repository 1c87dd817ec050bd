"""The parameters of a request: typed, bounded, and none that is unknown.

Only the form is checked here (a whole number, a word of a few letters, no name twice); the figure checks the values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn
from urllib.parse import parse_qsl

from levelhead.errors import bad_value
from levelhead.lab.parameters import PARAMETERS, Choice, Real, Whole

MODELS = ("minilm", "smollm2", "random")  # by name alone: no path comes from a browser
TEXT = 2_000  # characters of a sentence; explain_text takes no more
_WORD = 40  # characters of any other value
_LARGEST = 2**32  # of a whole number: seeds end there


# How a parameter of each type is written, what an error calls it, and how it is read.
_FORMS: Mapping[type, tuple[str, str, Callable[[str], Any]]] = {
    Whole: (r"-?[0-9]{1,12}", "a whole number", int),
    Real: (r"-?[0-9]{1,12}(\.[0-9]{1,12})?(e-?[0-9]{1,2})?", "a number", float),
    Choice: (r"[A-Za-z0-9_/()^-]{1,20}", "a word", str),
}


def of_query(query: str) -> dict[str, Any]:
    """The parameters of a query string; a name that is unknown or comes twice is refused."""
    values: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in PARAMETERS:
            _refuse("the address", f"parameters among {', '.join(PARAMETERS)}", _short(name))
        if name in values:
            _refuse(name, "one value", "several", "Give it once")
        form, wanted, read = _FORMS[type(PARAMETERS[name])]
        if not re.fullmatch(form, text):
            _refuse(name, wanted, _short(text))
        values[name] = read(text)
    return values


def of_sentence(body: bytes) -> dict[str, Any]:
    """The arguments of `figure("sentence", …)` from a body of JSON."""
    given = _object(body, {"text", "model", "layer", "head", "token"})
    text, model = given.get("text"), given.get("model", "random")
    if not isinstance(text, str) or not text.strip():
        _refuse("text", "a sentence", "nothing" if not text else _short(text))
    if len(text) > TEXT:
        _refuse("text", f"at most {TEXT} characters", len(text), "Give a shorter sentence")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        _refuse("text", "whole characters", "half of a surrogate pair")
    if model not in MODELS:
        _refuse("model", f"one of {', '.join(MODELS)}", _short(model))
    options: dict[str, Any] = {"text": text, "model": model}
    for name in ("layer", "head", "token"):
        if (value := given.get(name)) is not None:
            is_word = name == "token" and isinstance(value, str) and 0 < len(value) <= _WORD
            options[name] = value if is_word else _index(name, value)
    return options


def of_nothing(body: bytes) -> None:
    """A body that says nothing: `{}`."""
    _object(body, set())


def _object(body: bytes, names: set[str]) -> dict[str, Any]:
    try:
        content = json.loads(body, object_pairs_hook=_once)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, a name twice, too deep
        content = None
    if not isinstance(content, dict):
        _refuse("the body", "a JSON object", "something else")
    if unknown := sorted(content.keys() - names):
        _refuse("the body", f"names among {', '.join(sorted(names))}" if names else "{}", _short(unknown[0]))
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a name twice")
    return content


def _index(name: str, value: Any) -> int:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 0 <= value < _LARGEST:
        _refuse(name, "a whole number from 0", _short(value))
    return int(value)


def _short(value: object) -> str:
    """What was given, no longer than a line; of a list or an object, that it is one."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value[: 2 * _WORD] if isinstance(value, str) else value)
    return text if len(text) <= _WORD else f"{text[:_WORD]}…"


def _refuse(name: str, wanted: str, given: object, advice: str = "Choose another value") -> NoReturn:
    raise bad_value(name, wanted, given, advice)

"""What a request asks of a figure: typed, bounded, and nothing that was not on the list.

Only the form is judged here (a whole number, a word of a few letters, no name twice); which values
make sense is the figure's own business, and its error is passed on.
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


def _whole(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,12}", text):
        raise ValueError("a whole number")
    return int(text)


def _number(text: str) -> float:
    if not re.fullmatch(r"-?[0-9]{1,12}(\.[0-9]{1,12})?(e-?[0-9]{1,2})?", text):
        raise ValueError("a number")
    return float(text)


def _word(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_/()^-]{1,20}", text):
        raise ValueError("a word")
    return text


_FORMS: Mapping[type, Callable[[str], Any]] = {Whole: _whole, Real: _number, Choice: _word}
_READ = {name: _FORMS[type(parameter)] for name, parameter in PARAMETERS.items()}


def of_query(query: str) -> dict[str, Any]:
    """The parameters of a query string; a name that is unknown or comes twice is refused."""
    found: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in _READ:
            _refuse("the address", f"parameters among {', '.join(_READ)}", _short(name))
        if name in found:
            _refuse(name, "one value", "several", "Give it once")
        try:
            found[name] = _READ[name](text)
        except ValueError as error:
            _refuse(name, str(error), _short(text))
    return found


def of_sentence(body: bytes) -> dict[str, Any]:
    """The arguments of `figure("sentence", …)` from a body of JSON."""
    found = _object(body, {"text", "model", "layer", "head", "token"})
    text, model = found.get("text"), found.get("model", "random")
    if not isinstance(text, str) or not text.strip():
        _refuse("text", "a sentence", "nothing" if not text else _short(text))
    if len(text) > TEXT:
        _refuse("text", f"at most {TEXT} characters", len(text), "Give a shorter sentence")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        _refuse("text", "whole characters", "half of a surrogate pair")
    if model not in MODELS:
        _refuse("model", f"one of {', '.join(MODELS)}", _short(model))
    asked: dict[str, Any] = {"text": text, "model": model}
    for name in ("layer", "head"):
        if (value := found.get(name)) is not None:
            asked[name] = _index(name, value)
    if (token := found.get("token")) is not None:
        is_word = isinstance(token, str) and 0 < len(token) <= _WORD
        asked["token"] = token if is_word else _index("token", token)
    return asked


def of_nothing(body: bytes) -> None:
    """A body that says nothing: `{}`."""
    _object(body, set())


def _object(body: bytes, names: set[str]) -> dict[str, Any]:
    try:
        found = json.loads(body, object_pairs_hook=_once)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, a name twice, too deep
        found = None
    if not isinstance(found, dict):
        _refuse("the body", "a JSON object", "something else")
    if unknown := sorted(found.keys() - names):
        wanted = f"names among {', '.join(sorted(names))}" if names else "{}"
        _refuse("the body", wanted, _short(unknown[0]))
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name twice")
    return found


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

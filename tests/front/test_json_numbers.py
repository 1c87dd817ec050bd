"""Numbers in JSON: what is written for those that JSON does not have, and what is read back."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from levelhead.json_numbers import json_number, json_value, number_from_json

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("rule", "written"),
    [("null", [None, None, None]), ("infinities as text", [None, "inf", "-inf"]), ("text", ["nan", "inf", "-inf"])],
)
def test_what_is_not_finite(rule: Any, written: list[Any]) -> None:
    assert json_value([NAN, INF, -INF], not_finite=rule) == written
    if rule != "null":
        np.testing.assert_array_equal([number_from_json(x) for x in written], [NAN, INF, -INF])


@pytest.mark.parametrize(
    ("short", "written"),
    [(False, "[3, 3.0, 0.5, -0.0, 9007199254740992.0]"), (True, "[3, 3, 0.5, -0.0, 9007199254740992.0]")],
)
def test_whole_numbers(short: bool, written: str) -> None:
    assert json.dumps([json_number(x, short=short) for x in (3, 3.0, 0.5, -0.0, 2.0**53)]) == written


def test_digits_are_significant() -> None:
    assert json_value([1 / 3, 2e10 / 3, 1234567], digits=3) == [0.333, 6.67e9, 1234567]


@dataclass
class Pair:
    a: Any
    b: Any


def test_arrays_mappings_and_dataclasses() -> None:
    value = Pair({1: np.float32([0.1, NAN])}, (True, None, "x", np.int64(3), np.zeros((2, 1))))
    written = {"a": {"1": [0.1, None]}, "b": [True, None, "x", 3, [[0.0], [0.0]]]}
    assert json_value(value, digits=6) == written
    assert json.dumps(json_value(np.bool_(True))) == "true"


@pytest.mark.parametrize("value", [{1, 2}, b"x", object(), Pair, 1j])
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="JSON cannot hold a"):
        json_value([value])

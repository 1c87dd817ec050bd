"""The scale rules: their formulas, their parameters, and their errors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from levelhead.call import scaling
from levelhead.errors import LevelheadError, LevelheadTypeError, LevelheadValueError


@pytest.mark.parametrize(
    ("scale", "factor"),
    [
        (None, 1 / 8),
        ("none", 1.0),
        ("1/sqrt(d_k)", 1 / 8),
        ("1/d_k", 1 / 64),
        ("1/sqrt(d)", 1 / math.sqrt(3 * 64)),
        (scaling.rule("1/sqrt(d)", width=512), 1 / math.sqrt(512)),
        ("cosine", 8.0),
        (scaling.rule("cosine", factor=20), 20.0),
        ("log-n", 1 / 8),
        (0, 0.0),
        (-2.5, -2.5),
        (np.float32(0.5), 0.5),
        (np.array(0.25), 0.25),
    ],
)
def test_formula(scale, factor):
    result = scaling.resolve(scale, heads=3, d_k=64)
    assert result.factor.dtype == np.float64
    np.testing.assert_array_equal(result.factor, [factor] * 3)


def test_flags_belong_to_their_rules():
    flags = {
        name: (scaling.resolve(name, heads=1, d_k=4).cosine, scaling.resolve(name, heads=1, d_k=4).log_n)
        for name in scaling.RULES
    }
    assert {name for name, (cosine, _) in flags.items() if cosine} == {"cosine"}
    assert {name for name, (_, log_n) in flags.items() if log_n} == {"log-n"}


@pytest.mark.parametrize("scale", [[1.0, -2.0, 0.0], (1, -2, 0), np.array([1, -2, 0], np.float16)])
def test_one_number_per_head(scale):
    np.testing.assert_array_equal(scaling.resolve(scale, heads=3, d_k=4).factor, [1, -2, 0])


def test_cosine_takes_a_factor_per_head():
    rule = scaling.rule("cosine", factor=[10.0, 100.0])
    result = scaling.resolve(rule, heads=2, d_k=4)
    assert result.cosine
    np.testing.assert_array_equal(result.factor, [10, 100])


@pytest.mark.parametrize("name", scaling.RULES)
def test_key_width_zero_scales_by_a_finite_number(name):
    assert scaling.resolve(name, heads=2, d_k=0).factor.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", scaling.RULES)
def test_no_heads(name):
    assert scaling.resolve(name, heads=0, d_k=8).factor.shape == (0,)


@pytest.mark.parametrize(
    ("scale", "kind", "given"),
    [
        (math.nan, LevelheadValueError, "got nan"),
        (math.inf, LevelheadValueError, "got inf"),
        ([1.0, -math.inf, 1.0], LevelheadValueError, "got -inf"),
        ([1.0, 2.0], LevelheadValueError, "got shape (2,)"),
        ([[1.0, 2.0, 3.0]], LevelheadValueError, "got shape (1, 3)"),
        ([[1.0], [2.0, 3.0]], LevelheadTypeError, "of type list"),
        ("sqrt", LevelheadValueError, "got 'sqrt'"),
        (True, LevelheadTypeError, "got True"),
        (1j, LevelheadTypeError, "of type complex"),
        (b"none", LevelheadTypeError, "of type bytes"),
    ],
)
def test_bad_scale(scale, kind, given):
    with pytest.raises(kind, match=r"^scale: expected ") as caught:
        scaling.resolve(scale, heads=3, d_k=64)
    assert given in str(caught.value)
    assert isinstance(caught.value, LevelheadError)


@pytest.mark.parametrize(
    ("name", "parameters", "argument"),
    [
        ("none", {"width": 4}, "width"),
        ("cosine", {"width": 4}, "width"),
        ("1/sqrt(d)", {"factor": 4.0}, "factor"),
        ("1/sqrt(d)", {"width": 0}, "width"),
        ("1/sqrt(d)", {"width": 1.5}, "width"),
        ("cosine", {"factor": math.nan}, "factor"),
        ("cosine", {"factor": "big"}, "factor"),
        ("cosines", {}, "scale"),
        (3, {}, "scale"),
    ],
)
def test_bad_rule(name, parameters, argument):
    with pytest.raises(LevelheadError, match=f"^{argument}: expected "):
        scaling.rule(name, **parameters)

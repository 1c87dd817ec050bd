"""What tests share: running on every instruction set, random problems, the bounds a result is held
to, and the scripts of bench/. It holds no test, and it never looks at how the kernel works.

The bounds are the design's. An output is a weighted mean of values, so its error is measured in
units of max|v|; a logit's error grows with the largest logit M, and the weights' with it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import pytest

from levelhead import _core, reference
from levelhead.stats import Heads, Rows

Array = np.ndarray[Any, Any]
Result = TypeVar("Result")

ISAS = tuple(_core.info()["available"])
DTYPES = ("float32", "float64", "float16", "bfloat16")
# Key lengths, query lengths and widths around what kernels like to tile by.
LENGTHS = (1, 5, 6, 7, 11, 12, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 511, 512, 513)
WIDTHS = (1, 2, 3, 7, 8, 16, 17, 64, 80, 96, 128, 192, 256, 576)


# ---- every instruction set


@contextmanager
def running_on(isa: str) -> Iterator[None]:
    """The core runs on `isa` inside, and on what it ran on before afterwards."""
    previous = _core.set_isa(isa)
    try:
        assert _core.info()["isa"] == isa
        yield
        assert _core.info()["isa"] == isa
    finally:
        _core.set_isa(previous)
    assert _core.info()["isa"] == previous


def on_every_isa(call: Callable[[], Result]) -> list[tuple[str, Result]]:
    """(instruction set, result of the call there) for all this CPU has, however one was pinned."""
    results = []
    for name in ISAS:
        with running_on(name):
            results.append((name, call()))
    return results


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once on every instruction set."""
    with running_on(request.param):
        yield request.param


# ---- problems


def kind(dtype: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def qkv(
    lead: tuple[int, ...] = (),
    T: int = 5,
    S: int = 7,
    D: int = 8,
    E: int | None = None,
    *,
    groups: int | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> tuple[Array, Array, Array]:
    """Normal q (*lead, T, D), k and v; lead ends in the query heads, `groups` are the kv heads."""
    rng = np.random.default_rng(seed)
    kv = lead if groups is None else (*lead[:-1], groups)
    shapes = ((*lead, T, D), (*kv, S, D), (*kv, S, D if E is None else E))
    q, k, v = (rng.standard_normal(shape).astype(kind(dtype)) for shape in shapes)
    return q, k, v


def from_logits(s: Any, dtype: str = "float32", E: int = 3) -> tuple[Array, Array, Array, Array]:
    """q, k, v and a float mask whose logits are exactly s (T, S): the product is zero."""
    s = np.asarray(s, "float64" if dtype == "float64" else "float32")
    T, S = s.shape[-2:]
    v = np.random.default_rng(1).standard_normal((S, E)).astype(kind(dtype))
    return np.zeros((T, 2), kind(dtype)), np.zeros((S, 2), kind(dtype)), v, s


def existing(q: Array, options: dict[str, Any]) -> Array | None:
    """Which rows the options leave, broadcastable to (..., H, T); None: all."""
    lengths = options.get("query_lengths")
    if lengths is None:
        return None
    exists = np.arange(q.shape[-2]) < np.broadcast_to(lengths, q.shape[:-3])[..., None]
    return exists if q.ndim == 2 else exists[..., None, :]


def storage(x: Array) -> Array:
    """The array as the core takes it: bfloat16 as its bits."""
    return x.view(np.uint16) if x.dtype == kind("bfloat16") else x


# ---- bounds

# Error of an output in units of max|v| while logits stay ordinary (M up to about 8). Half types
# compute in float32, and round once more at the end.
OUTPUT = {"float32": 3e-6, "float64": 1e-13, "float16": 3e-6, "bfloat16": 3e-6}
# Where bfloat16 is multiplied as it is, each weight is rounded to it before it meets its value.
IN_PAIRS, ROUNDED_WEIGHTS = "avx512bf16", 2.0**-9
_ORDINARY = 8.0
# The state of a float64 problem is float64: the design's bounds, tightened by that much.
_FLOAT64 = 1e-8
_SIGNIFICAND = {"float16": (11, -14), "bfloat16": (8, -126)}  # bits, smallest normal exponent


def half_ulp(x: Array, dtype: str) -> Array | float:
    """Half the distance of neighbours around x: what the last rounding may add."""
    if dtype not in _SIGNIFICAND:
        return 0.0
    bits, smallest = _SIGNIFICAND[dtype]
    exponent = np.frexp(np.where(np.isfinite(x), x, 0.0))[1] - 1
    return np.ldexp(0.5, np.maximum(exponent, smallest) - (bits - 1))


def check_output(out: Array, truth: Array, largest: float, *, M: float = 0.0, isa: str | None = None) -> None:
    """`out` is `truth`, NaN and inf included, for values up to `largest` and logits up to M.

    `isa` is what computed it: what is running, unless told.
    """
    dtype = out.dtype.name
    assert out.shape == truth.shape
    given = out.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(given), np.isnan(truth))
    np.testing.assert_array_equal(given[np.isinf(truth)], truth[np.isinf(truth)])
    finite = np.isfinite(truth)
    given, truth = given[finite], truth[finite]
    bound = OUTPUT[dtype] * max(1.0, M / _ORDINARY) * largest
    if dtype == "bfloat16" and (isa or _core.info()["isa"]) == IN_PAIRS:
        bound += ROUNDED_WEIGHTS * largest
    bound = bound + half_ulp(np.maximum(np.abs(given), np.abs(truth)), dtype)
    excess = np.abs(given - truth) - bound
    assert not (excess > 0).any(), f"{excess.max()} above the bound, largest value {largest}"


def magnitude(x: Array) -> float:
    """The largest finite |x|, 0 of nothing."""
    x = np.abs(x.astype(np.float64))
    return float(x[np.isfinite(x)].max(initial=0.0))


def agree(q: Array, k: Array, v: Array, call: Callable[[], Array], **options: Any) -> None:
    """The call gives the reference's output on every instruction set."""
    truth = reference.observe(q, k, v, **options)
    assert truth.output is not None
    M = max(magnitude(truth.rows.max), magnitude(truth.rows.min))
    largest = magnitude(v) / (1.0 - options.get("dropout", 0.0))
    for name, out in on_every_isa(call):
        try:
            check_output(out, truth.output, largest, M=M, isa=name)
        except AssertionError as error:
            raise AssertionError(f"on {name}: {error}") from error


_LOGITS = ("mean", "min", "max", "logsumexp", "entropy")
_WEIGHTS = ("top1", "sum_p2", "first", "sink")
ROW_KINDS = dict.fromkeys(_LOGITS, "logit") | dict.fromkeys(_WEIGHTS, "weight") | {"var": "var"}


def check_rows(rows: Rows, truth: Rows, *, M: Any = 0.0, sinks: Any = None, tightened: bool = False) -> None:
    """Every field of every row, within the design's bounds; M is |logit| beyond what rows tell.

    `argmax` may differ only where two keys share the maximum within the bound: the caller makes
    sure that none do, or passes logits that are exact.
    """
    unit = _FLOAT64 if tightened else 1.0
    with np.errstate(invalid="ignore"):
        low, high = (np.where(np.isfinite(x), np.abs(x), 0.0) for x in (truth.min, truth.max))
        M = np.maximum(M, np.maximum(low, high))
        if sinks is not None:
            z = np.asarray(sinks, float)
            z = np.where(np.isfinite(z), np.abs(z), 0.0)
            M = np.maximum(M, z if M.ndim == 1 else z[:, None])
    bounds = {
        "logit": 1e-5 * (1 + M) * unit,
        "weight": 2e-6 * (1 + M) * unit,
        "var": 1e-5 * (np.nan_to_num(truth.var) + M) * unit,
    }
    for field in dataclasses.fields(Rows):
        given, wanted = getattr(rows, field.name), getattr(truth, field.name)
        assert given.shape == wanted.shape, field.name
        if field.name in ROW_KINDS:
            within(given, wanted, bounds[ROW_KINDS[field.name]], field.name)
        else:
            np.testing.assert_array_equal(given, wanted, field.name)


_EXACT_HEADS = ("rows", "lone_rows", "empty_rows", "max_query", "max_key")


def check_heads(heads: Heads, truth: Heads, *, M: float, tightened: bool = False) -> None:
    """Every field of every head; a mean of rows errs no more than its worst row."""
    unit = _FLOAT64 if tightened else 1.0
    logit, weight = 1e-5 * (1 + M) * unit, 2e-6 * (1 + M) * unit
    with np.errstate(invalid="ignore"):
        effective = logit * np.nan_to_num(truth.effective_keys)  # d exp(H) = exp(H) dH
    special = {
        "var_logit": 1e-5 * (np.nan_to_num(truth.var_logit) + M) * unit,
        "effective_keys": effective,
        "normalised_entropy": logit / np.log(2),
        "saturated": 0.0,
    }
    for field in dataclasses.fields(Heads):
        given, wanted = getattr(heads, field.name), getattr(truth, field.name)
        if field.name in _EXACT_HEADS:
            np.testing.assert_array_equal(given, wanted, field.name)
        elif field.name in special:
            within(given, wanted, special[field.name], field.name)
        else:
            plain = "logit" in field.name or "entropy" in field.name or "logsumexp" in field.name
            within(given, wanted, logit if plain else weight, field.name)


def within(given: Array, wanted: Array, bound: Any, what: str) -> None:
    """|given - wanted| <= bound, with infinities and NaNs in the same places."""
    np.testing.assert_array_equal(np.isnan(given), np.isnan(wanted), what)
    wild = np.isinf(wanted)
    np.testing.assert_array_equal(given[wild], wanted[wild], what)
    finite = np.isfinite(wanted)
    bound = np.broadcast_to(bound, wanted.shape)[finite]
    excess = np.abs(given[finite] - wanted[finite]) - bound
    assert not (excess > 0).any(), f"{what}: {excess.max()} above the bound"


def same_bits(a: Array, b: Array) -> None:
    """Not close: the same. Values are compared first, for a readable message."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    if a.tobytes() != b.tobytes():
        np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))
        raise AssertionError("equal values of different bits (a NaN's payload, or a zero's sign)")


def script(root: Path, name: str) -> ModuleType:
    """bench/`name`.py as a module; it is no package, and not installed."""
    found = importlib.util.spec_from_file_location(f"bench_{name}", root / "bench" / f"{name}.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses look their module up
    found.loader.exec_module(module)
    return module

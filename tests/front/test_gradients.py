"""Gradients: the reference against finite differences, the core against the reference, and the documented
guarantees."""

from __future__ import annotations

import tracemalloc
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest

import levelhead as lh
from levelhead import _core, reference
from support import ISAS, Array, isa, kind, on_every_isa, qkv  # noqa: F401

H, T, S = 4, 13, 21
FEATURES = [
    "causal",
    "window",
    "bool-mask",
    "bias",
    "row-bias",
    "head-bias",
    "softcap",
    "alibi",
    "sinks",
    "key_lengths",
    "query_lengths",
    "segments",
    "dropout",
    "cosine",
    "log-n",
    "per-head-scale",
    "query_start",
]
SIZES = {  # B, H, G, T, S, D, E
    "small": (1, 1, 1, 5, 7, 4, 3),
    "group": (2, 4, 2, 70, 150, 16, 24),
    "slices": (1, 2, 1, 130, 300, 64, 64),
    "one query": (2, 2, 2, 1, 130, 8, 8),
    "odd": (1, 3, 3, 97, 33, 57, 40),
    "many blocks": (1, 1, 1, 30, 2100, 8, 8),  # more than slices, so that one slice has two
}


def options_of(*features: str, B: int, H: int, T: int, S: int) -> dict[str, Any]:
    """One option (or two) that switches each feature on, for a problem of these sizes."""
    rng = np.random.default_rng(7)
    found: dict[str, Any] = {}
    for feature in features:
        found |= {
            "causal": lambda: {"causal": True},
            "window": lambda: {"window": (S // 3, 2)},
            "bool-mask": lambda: {"mask": rng.random((T, S)) < 0.7},
            "bias": lambda: {"mask": rng.standard_normal((B, H, T, S))},
            "row-bias": lambda: {"mask": rng.standard_normal((T, 1))},
            "head-bias": lambda: {"mask": rng.standard_normal((H, 1, S))},
            "softcap": lambda: {"softcap": 1.5},
            "alibi": lambda: {"alibi": True},
            "sinks": lambda: {"sinks": rng.standard_normal(H)},
            "key_lengths": lambda: {"key_lengths": np.maximum(S - 1 - np.arange(B), 0)},
            "query_lengths": lambda: {"query_lengths": np.maximum(T - 1 - np.arange(B), 0)},
            "segments": lambda: {"segments": (np.arange(T) * 3 // T, np.sort(rng.integers(0, 3, S)))},
            "dropout": lambda: {"dropout": 0.3, "seed": 5},
            "cosine": lambda: {"scale": "cosine"},
            "log-n": lambda: {"scale": "log-n", "causal": True},
            "per-head-scale": lambda: {"scale": rng.random(H)},
            "query_start": lambda: {"query_start": 2, "causal": True},
        }[feature]()
    return found


def wanted(options: dict[str, Any]) -> list[str]:
    """Everything that has a gradient under these options."""
    names = ["q", "k", "v", "scale"] + ["sinks"] * ("sinks" in options)
    mask = options.get("mask")
    return names + ["mask"] * (mask is not None and mask.dtype != np.bool_)


def problem(size: str, dtype: str = "float64") -> tuple[Array, Array, Array, Array]:
    B, H, G, T, S, D, E = SIZES[size]
    q, k, v = qkv((B, H), T, S, D, E, groups=G, dtype=dtype)
    dout = np.random.default_rng(3).standard_normal((B, H, T, E)).astype(q.dtype)
    return dout, q, k, v


def backward(dout: Array, q: Array, k: Array, v: Array, dlse: Array | None = None, **options: Any) -> dict[str, Array]:
    threads, wrt = options.pop("threads", 2), options.pop("wrt", None)
    seen = lh.observe(q, k, v, **options)
    wrt = wanted(options) if wrt is None else wrt
    found = lh.attention_backward(
        dout, q, k, v, seen.output, seen.logsumexp, dlogsumexp=dlse, wrt=wrt, threads=threads, **options
    )
    return dict(zip(wrt, found, strict=True))


def true(*arrays: Any, **options: Any) -> dict[str, Array]:
    found = reference.attention_backward(*arrays, **options)
    if np.ndim(options.get("scale")) == 0:
        found["scale"] = found["scale"].sum()
    return found


# ---- the reference against the function itself


@pytest.mark.parametrize("feature", FEATURES)
def test_reference_is_the_derivative(feature: str) -> None:
    sizes = {"B": 2, "H": 2, "T": 3, "S": 5}
    options = options_of(feature, **sizes)
    q, k, v = qkv((2, 2), 3, 5, 4, 3, groups=1, dtype="float64")
    rng = np.random.default_rng(1)
    dout, dlse = rng.standard_normal((2, 2, 3, 3)), rng.standard_normal((2, 2, 3))

    def loss(**changed: Array) -> float:
        given = {"q": q, "k": k, "v": v} | options | changed
        seen = reference.observe(**given)
        assert seen.output is not None
        lse = np.where(np.isfinite(seen.logsumexp), seen.logsumexp, 0.0)
        return float((dout * seen.output).sum() + (dlse * lse).sum())

    found = reference.attention_backward(dout, q, k, v, dlogsumexp=dlse, **options)
    for name in wanted(options):
        x = {"q": q, "k": k, "v": v}.get(name, options.get(name))
        if name == "scale" and not isinstance(x, np.ndarray):
            continue  # a rule is not a number that can be varied
        step = rng.standard_normal(np.shape(x))
        across = (loss(**{name: x + 1e-6 * step}) - loss(**{name: x - 1e-6 * step})) / 2e-6
        assert (found[name] * step).sum() == pytest.approx(across, rel=1e-6, abs=1e-7), name


# ---- the core against the reference


def close(found: dict[str, Array], truth: dict[str, Array], bound: float) -> None:
    for name, x in found.items():
        want = truth[name]
        assert x.shape == np.shape(want), name
        error = np.abs(x.astype(np.float64) - want).max(initial=0.0)
        assert error <= bound * (1 + np.abs(want).max(initial=0.0)), (name, error)


# What every instruction set is compared with is computed once: the reference takes far longer than the core.


@cache
def featured(size: str, feature: str) -> tuple[list[Array], dict[str, Any], dict[str, Array]]:
    """A problem, its options and the true gradients."""
    B, H, _, T, S, _, _ = SIZES[size]
    options = options_of(feature, B=B, H=H, T=T, S=S)
    arrays = [*problem(size), np.random.default_rng(4).standard_normal((B, H, T))]
    return arrays, options, true(*arrays[:4], dlogsumexp=arrays[4], **options)


@cache
def typed(dtype: str, causal: bool) -> tuple[tuple[Array, ...], dict[str, Array]]:
    arrays = problem("slices", dtype)
    return arrays, true(*arrays, causal=causal)


@cache
def long(causal: bool) -> tuple[list[Array], dict[str, Any], dict[str, Array]]:
    arrays = [np.random.default_rng(3).standard_normal((1, 1, 2100, 4))]
    arrays += qkv((1, 1), 2100, 2100, 4, 4, dtype="float64")
    options: dict[str, Any] = {"causal": True} if causal else {"window": (0, 40)}
    return arrays, options, true(*arrays, **options)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("size", SIZES)
def test_features(isa: str, size: str, feature: str) -> None:  # noqa: F811
    arrays, options, truth = featured(size, feature)
    close(backward(*arrays, **options), truth, 1e-11)
    assert _core.info()["isa"] == isa


@pytest.mark.parametrize("pair", list(combinations(FEATURES, 2)), ids="+".join)
def test_pairs_of_features(pair: tuple[str, str]) -> None:
    options = options_of(*pair, B=2, H=4, T=70, S=150)
    arrays = problem("group")
    close(backward(*arrays, **options), true(*arrays, **options), 1e-11)


# Relative to the largest gradient: 16-bit types round the output, and so delta, to their precision.
BOUNDS = {"float32": 4e-6, "float16": 2e-3, "bfloat16": 2e-2}


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS.items())
@pytest.mark.parametrize("causal", [False, True])
def test_dtypes(isa: str, dtype: str, bound: float, causal: bool) -> None:  # noqa: F811
    arrays, truth = typed(dtype, causal)
    found = backward(*arrays, causal=causal, wrt=["q", "k", "v"])
    assert all(x.dtype == kind(dtype) for x in found.values())
    close(found, truth, bound)


def test_slices_of_several_blocks_under_a_causal_mask(isa: str) -> None:  # noqa: F811
    """The first block of a slice is seen by more rows than the next, or by fewer."""
    for causal in (True, False):
        arrays, options, truth = long(causal)
        close(backward(*arrays, wrt=["q", "k", "v"], **options), truth, 1e-11)


@pytest.mark.parametrize("heads", [1, 3, 5, 8])
def test_bits_do_not_depend_on_how_heads_are_dealt_out(heads: int) -> None:
    """Few heads are shared by all workers; of many heads, most belong to one worker."""
    q, k, v = qkv((1, heads), 200, 300, 16, 16, dtype="float32")
    dout = np.random.default_rng(3).standard_normal(q.shape).astype(np.float32)
    many = backward(dout, q, k, v, wrt=["q", "k", "v"], causal=True, threads=2)
    for h in range(heads):
        one = [x[:, h : h + 1] for x in (dout, q, k, v)]
        alone = backward(*one, wrt=["q", "k", "v"], causal=True, threads=1)
        for name, x in alone.items():
            assert x.tobytes() == np.ascontiguousarray(many[name][:, h : h + 1]).tobytes(), name


def test_a_bias_with_a_head_s_axis_for_one_head_without_it() -> None:
    q, k, v = qkv((), 5, 7, 4, 4, dtype="float64")
    bias = np.random.default_rng(5).standard_normal((1, 5, 7))
    dout = np.ones((5, 4))
    close(backward(dout, q, k, v, mask=bias), true(dout, q, k, v, mask=bias), 1e-11)


# ---- promises


@pytest.mark.parametrize("feature", ["causal", "bias", "head-bias", "row-bias", "dropout", "sinks"])
def test_bits_do_not_depend_on_threads(feature: str) -> None:
    options = options_of(feature, B=2, H=4, T=70, S=150)
    arrays = problem("group", "float32")
    if "mask" in options:
        options["mask"] = options["mask"].astype(np.float32)
    alone = backward(*arrays, threads=1, **options)
    for threads in (2, 3, 7):
        for name, x in backward(*arrays, threads=threads, **options).items():
            assert x.tobytes() == alone[name].tobytes(), name


def test_bits_do_not_depend_on_neighbours_or_layout(isa: str) -> None:  # noqa: F811
    dout, q, k, v = problem("group", "float32")
    whole = backward(dout, q, k, v, causal=True, wrt=["q", "k", "v"])
    row = backward(dout[1:], q[1:], k[1:], v[1:], causal=True, wrt=["q", "k", "v"])
    group = backward(dout[:, 2:], q[:, 2:], k[:, 1:], v[:, 1:], causal=True, wrt=["q", "k", "v"])
    turned = [np.asfortranarray(x) for x in (dout, q, k, v)]
    other = backward(*turned, causal=True, wrt=["q", "k", "v"])
    for name, x in whole.items():
        assert x[1:].tobytes() == row[name].tobytes()
        heads = 2 if name == "q" else 1
        assert np.ascontiguousarray(x[:, heads:]).tobytes() == group[name].tobytes()
        assert x.tobytes() == np.ascontiguousarray(other[name]).tobytes()


def test_a_row_without_a_key_and_with_a_sink_of_minus_infinity_has_no_gradient() -> None:
    dout, q, k = np.ones((1, 2, 2), "f4"), np.ones((1, 2, 2), "f4"), np.ones((1, 1, 2), "f4")
    options = dict(causal=True, sinks=np.array([-np.inf]))
    found = backward(dout, q, k, k, wrt=["q", "sinks"], **options)
    assert found["sinks"] == 0 and not found["q"].any()
    assert true(dout, q, k, k, **options)["sinks"] == 0


@pytest.mark.parametrize("wrt", [c for n in (1, 2) for c in combinations(("q", "k", "v", "scale"), n)])
def test_any_subset(wrt: tuple[str, ...]) -> None:
    arrays = problem("group", "float32")
    whole = backward(*arrays, wrt=["q", "k", "v", "scale"])
    for name, x in backward(*arrays, wrt=list(wrt)[::-1]).items():
        assert x.tobytes() == whole[name].tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
def test_what_is_hidden_touches_nothing(isa: str, where: str, bad: float) -> None:  # noqa: F811
    """Query 3 and key 5 see only each other; their values affect no other gradient."""
    dout, q, k, v = problem("odd", "float32")
    mask = np.ones((97, 33), bool)
    mask[3], mask[:, 5], mask[3, 5] = False, False, True
    clean = backward(dout, q, k, v, mask=mask)
    arrays = {"dout": dout.copy(), "q": q.copy(), "k": k.copy(), "v": v.copy()}
    arrays[where][0, 1, 3 if where in ("q", "dout") else 5, 2] = bad
    found = backward(**arrays, mask=mask, wrt=["q", "k", "v"])
    for name, x in found.items():
        own = 3 if name == "q" else 5
        others = np.delete(x, own, axis=2)
        assert others.tobytes() == np.delete(clean[name], own, axis=2).tobytes(), name
        assert x[0, [0, 2], own].tobytes() == clean[name][0, [0, 2], own].tobytes()
    seen = {"q": "k", "k": "q", "v": "q", "dout": "v"}[where]
    if np.isnan(bad):  # an infinity may also make a logit -inf, which hides the key
        assert np.isnan(found[seen][0, 1, 3 if seen == "q" else 5]).any()


def test_rows_that_see_nothing_have_no_gradient(isa: str) -> None:  # noqa: F811
    dout, q, k, v = problem("group", "float32")
    mask = np.ones((70, 150), bool)
    mask[5] = False
    found = backward(dout, q, k, v, mask=mask)
    assert not found["q"][:, :, 5].any()
    assert all(np.isfinite(x).all() for x in found.values())


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_empty_dimensions(shape: tuple[int, ...]) -> None:
    x = np.ones(shape, np.float32)
    found = backward(x, x, x, x, wrt=["q", "k", "v", "scale"])
    assert all(found[name].shape == shape and not found[name].any() for name in ("q", "k"))
    assert found["scale"].shape == ()


def test_no_keys_and_no_queries() -> None:
    q, k = np.ones((2, 3, 4), np.float32), np.ones((2, 0, 4), np.float32)
    assert not backward(q, q, k, k)["q"].any()
    found = backward(k, k, q, q)
    assert found["k"].shape == q.shape
    assert not found["k"].any()
    assert not found["v"].any()


def test_same_on_every_isa() -> None:
    arrays = problem("slices", "float64")
    results = on_every_isa(lambda: backward(*arrays, causal=True))
    assert [name for name, _ in results] == list(ISAS)
    for _, found in results:
        close(found, results[0][1], 1e-12)


# ---- mistakes

ONES = np.ones((2, 3, 4), np.float32)
LSE = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"wrt": ("q", "w")}, "wrt: expected different names"),
        ({"wrt": ("q", "q")}, "wrt: expected different names"),
        ({"wrt": "q"}, "wrt: expected a sequence"),
        ({"wrt": ("mask",)}, "'mask' without mask"),
        ({"wrt": ("sinks",)}, "'sinks' without sinks"),
        ({"wrt": ("mask",), "mask": np.ones((3, 3), bool)}, "a boolean one"),
        ({"dout": ONES[:1]}, "dout: expected shape"),
        ({"out": ONES.astype(np.float64)}, "out: expected the dtype of q"),
        ({"logsumexp": LSE[:1]}, "logsumexp: expected shape"),
        ({"logsumexp": None}, "logsumexp: expected an array"),
        ({"dlogsumexp": LSE.astype(np.int64)}, "dlogsumexp: expected an array of floats"),
        ({"dropout": 0.5}, "seed: expected the seed of the forward pass"),
        ({"threads": 0}, "threads: expected an integer of at least 1"),
    ],
)
def test_mistakes_are_explained(changes: dict[str, Any], says: str) -> None:
    given = dict(dout=ONES, q=ONES, k=ONES, v=ONES, out=ONES, logsumexp=LSE) | changes
    with pytest.raises(lh.LevelheadError) as caught:
        lh.attention_backward(**given)
    assert says in str(caught.value)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_a_bias_that_is_constant_along_keys_has_no_gradient(isa: str, dtype: str) -> None:  # noqa: F811
    """It cannot change a softmax. What the output was rounded by must not appear instead."""
    q, k, v = qkv((4,), 33, 130, 16, dtype=dtype)
    options: dict[str, Any] = {"mask": np.zeros((4, 33, 1), np.float32), "causal": True}
    seen = lh.observe(q, k, v, **options)
    (dmask,) = lh.attention_backward(q, q, k, v, seen.output, seen.logsumexp, wrt=("mask",), **options)
    assert np.abs(dmask).max() < 2e-5
    full = {"mask": np.random.default_rng(1).normal(size=(4, 33, 130)).astype(np.float32)}
    seen = lh.observe(q, k, v, **full)
    (found,) = lh.attention_backward(q, q, k, v, seen.output, seen.logsumexp, wrt=("mask",), **full)
    truth = reference.attention_backward(q, q, k, v, **full)["mask"]
    assert np.abs(found.sum(-1)).max() < 2e-5
    np.testing.assert_allclose(found, truth, atol=2e-5)


# ---- rows far from zero


LOWEST = {"float32": -3.4028234663852886e38, "float64": -1.7976931348623157e308, "float16": -65504.0}


@pytest.mark.parametrize("low", [None, -1e38, -1e4, 3e4])
@pytest.mark.parametrize("dtype", LOWEST)
def test_rows_whose_bias_is_far_from_zero(isa: str, dtype: str, low: float | None) -> None:  # noqa: F811
    """Their logsumexp is too coarse: of the lowest numbers it has lost the number of keys. These weigh the same."""
    low = LOWEST[dtype] if low is None or (dtype == "float16" and low == -1e38) else low
    q, k, v = qkv((1, 4), 7, 150, 16, 8, groups=2, dtype=dtype)
    dout = np.random.default_rng(3).standard_normal((1, 4, 7, 8)).astype(dtype)
    bias = np.zeros((7, 150), dtype)
    bias[1::3] = low
    options: dict[str, Any] = {"mask": bias, "sinks": np.array([-np.inf, 0.0, 1.0, low if abs(low) < 1e5 else 2.0])}
    with np.errstate(over="ignore"):
        truth, seen = reference.observe(q, k, v, **options), lh.observe(q, k, v, weights=[0, 1, 4], **options)
    names = ("q", "k", "v", "mask", "sinks")
    bound = {"float32": 2e-6, "float64": 1e-13, "float16": 2e-3}[dtype]
    # Between the two, logits keep some digits after the point: those of a number of that size.
    bound = (
        max(bound, abs(low) * float(np.finfo("f8" if dtype == "float64" else "f4").eps)) if abs(low) < 1e5 else bound
    )
    found = backward(dout, q, k, v, wrt=names, **options)
    close(found, true(dout, q, k, v, **options), bound)
    np.testing.assert_allclose(seen.output.astype("f8"), truth.output, atol=bound)
    np.testing.assert_allclose(seen.rows.entropy, truth.rows.entropy, atol=5 * bound)
    weights = seen.weights.astype("f8").sum(-1) + seen.rows.sink[..., [0, 1, 4]]
    np.testing.assert_allclose(weights, 1.0, atol=150 * bound)
    if abs(low) > 1e5:
        np.testing.assert_allclose(np.sqrt(seen.rows.var[..., 1::3]) / low, 0.0, atol=1e-15)
        np.testing.assert_allclose(seen.rows.mean[..., 1::3], low, rtol=0.31)  # a state is in units of ln 2


def test_a_mask_for_all_heads_stays_one_array_in_half_precision() -> None:
    """Its gradient is computed from an output in float32: the mask becomes float32, but not once for every head."""
    q, mask = np.ones((16, 64, 4), np.float16), np.zeros((64, 64), np.float16)
    seen = lh.observe(q, q, q, mask=mask)
    tracemalloc.start()
    try:
        lh.attention_backward(q, q, q, q, seen.output, seen.logsumexp, wrt=("mask",), mask=mask)
        assert tracemalloc.get_traced_memory()[1] < 16 * mask.size * 4
    finally:
        tracemalloc.stop()


def test_without_query_start_the_core_puts_the_first_query_of_every_batch_row_at_0() -> None:
    q, k, v = qkv((2, 2), 5, 7, D=4, dtype="float64")
    dout, out, lse = np.ones_like(v[..., :5, :]), np.empty_like(q), np.empty(q.shape[:-1])
    found = []
    for start in ({}, {"query_start": np.zeros(2, np.int64)}):
        options = dict(scale=np.ones(2), log_n=True, causal=True, threads=1, **start)
        dq = np.empty_like(q)
        _core.forward(q, k, v, out=out, logsumexp=lse, **options)
        _core.backward(dout, q, k, v, out, lse, dq=dq, **options)
        found.append(dq)
    np.testing.assert_array_equal(*found)
    assert np.abs(found[0]).max() > 0

"""The reference against plain loops, the laws of its merge, and its contracts."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest

from levelhead import reference, state, stats
from levelhead.call import options as scoring

pytestmark = pytest.mark.filterwarnings("error")

INF = math.inf


def problem(q=(2, 4, 5, 6), k=(2, 2, 7, 6), E=3, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=q), rng.normal(size=k), rng.normal(size=(*k[:-1], E)))


def same(a, b, rtol=1e-11):
    """Every field of two states or rows agrees, NaN with NaN and inf with inf."""
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if x is None or y is None:
            assert x is y, field.name
        else:
            np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-12, err_msg=field.name)


# Plain loops: one logit, one row at a time, on Python numbers


def loop_logit(q, k, o, b, h, i, j, S):
    """The logit of query i and key j as the design defines it, or -inf."""
    p = o.get("query_start", S - q.shape[2]) + i
    left, right = o.get("window", (None, None))

    def in_reach(j):
        return not (
            (o.get("causal") and j > p)
            or (left is not None and j < p - left)
            or (right is not None and j > p + right)
            or ("key_lengths" in o and j >= o["key_lengths"][b])
            or ("query_lengths" in o and i >= o["query_lengths"][b])
            or ("segments" in o and o["segments"][0][i] != o["segments"][1][j])
        )

    if not in_reach(j):
        return -INF
    x, y = q[b, h, i], k[b, h // (q.shape[1] // k.shape[1]), j]
    s = sum(float(xi) * float(yi) for xi, yi in zip(x, y, strict=True))
    rule = o.get("scale")
    if rule == "cosine":
        norm = math.sqrt(sum(x * x)) * math.sqrt(sum(y * y))
        s = math.sqrt(len(x)) * s / norm if norm else 0.0
    elif rule == "log-n":
        s *= math.log(sum(in_reach(key) for key in range(S))) / math.sqrt(len(x))
    else:
        s *= 1 / math.sqrt(len(x)) if rule is None else rule
    if "softcap" in o:
        s = o["softcap"] * math.tanh(s / o["softcap"])
    if "alibi" in o:
        s -= o["alibi"][h] * abs(p - j)
    if "mask" in o:
        mask = np.broadcast_to(o["mask"], (*q.shape[:3], S))[b, h, i, j]
        s = (s if mask else -INF) if mask.dtype == bool else s + float(mask)
    return s


def loop_row(logits, values, z, first=0):
    """Output and statistics of one row from the weights themselves."""
    seen = [(j, s) for j, s in enumerate(logits) if s != -INF]
    outcomes = [s for _, s in seen] + ([] if z == -INF else [z])
    top = max(outcomes, default=0.0)
    total = sum(math.exp(s - top) for s in outcomes)
    p = [math.exp(s - top) / total for s in outcomes]
    only = [s for _, s in seen]
    n = len(only)
    mean = sum(only) / n if n else math.nan
    row = {
        "count": n,
        "mean": mean,
        "var": sum((s - mean) ** 2 for s in only) / n if n else math.nan,
        "min": min(only, default=INF),
        "max": max(only, default=-INF),
        "argmax": max(seen, key=lambda pair: pair[1])[0] if n else -1,
        "logsumexp": top + math.log(total) if outcomes else -INF,
        "entropy": -sum(x * math.log(x) for x in p),
        "top1": max(p[:n], default=0.0),
        "sum_p2": sum(x * x for x in p),
        "first": next((x for (j, _), x in zip(seen, p, strict=False) if j == first), 0.0),
        "sink": p[n] if len(p) > n else 0.0,
    }
    return row, sum((x * values[j] for (j, _), x in zip(seen, p, strict=False)), 0 * values[0])


MASK = np.random.default_rng(5).random((4, 5, 7)) < 0.7
BIAS = np.where(MASK, np.random.default_rng(6).normal(size=(4, 5, 7)), -INF)
SEGMENTS = (np.array([0, 0, 1, 1, 3]), np.array([0, 0, 0, 1, 1, 1, 2]))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": -0.7},
        {"scale": "cosine"},
        {"causal": True},
        {"causal": True, "query_start": -2, "sinks": [0.0, 1.0, -INF, 5.0]},
        {"window": (1, 0)},
        {"window": (None, 1), "causal": True, "query_start": 1},
        {"mask": MASK},
        {"mask": BIAS},
        {"mask": BIAS[0, :1], "softcap": 0.8},
        {"softcap": 0.5, "alibi": [0.5, 0.25, 0.0, -1.0]},
        {"key_lengths": [0, 4], "sinks": [0.5] * 4},
        {"query_lengths": [0, 3], "sinks": [0.5] * 4, "scale": "log-n"},
        {"segments": SEGMENTS, "scale": "log-n"},
        {"causal": True, "query_start": 1, "scale": "log-n", "mask": MASK},
        {
            "causal": True,
            "window": (4, 2),
            "mask": BIAS,
            "softcap": 2.0,
            "sinks": [0.1, -INF, 3.0, -4.0],
            "alibi": [0.5, 0.25, 0.125, 0.0625],
            "key_lengths": [7, 5],
            "segments": (np.zeros(5, int), np.array([0, 0, 0, 0, 1, 0, 0])),
            "query_start": 3,
            "scale": "log-n",
        },
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_against_plain_loops(options):
    q, k, v = problem()
    q[0, 0, 0] = 0.0  # a zero vector has no direction
    (B, H, T, _), S = q.shape, k.shape[2]
    seen = reference.observe(q, k, v, **options)
    logits = reference.logits(q, k, **options)
    for b, h, i in np.ndindex(B, H, T):
        s = [loop_logit(q, k, options, b, h, i, j, S) for j in range(S)]
        np.testing.assert_allclose(logits[b, h, i], s, rtol=1e-12, atol=1e-13)
        absent = i >= options.get("query_lengths", [T] * B)[b]
        ids, key_ids = options.get("segments", (np.zeros(T), np.zeros(S)))
        first = next((j for j in range(S) if key_ids[j] == ids[i]), None)  # of the query's document
        row, output = loop_row(s, v[b, h // 2], -INF if absent else options.get("sinks", [-INF] * H)[h], first)
        np.testing.assert_allclose(seen.output[b, h, i], output, rtol=1e-11, atol=1e-13)
        for name, value in row.items():
            told = getattr(seen.rows, name)[b, h, i]
            np.testing.assert_allclose(told, value, rtol=1e-11, atol=1e-12, err_msg=name)
    np.testing.assert_array_equal(seen.logsumexp, seen.rows.logsumexp)
    np.testing.assert_array_equal(reference.attention(q, k, v, **options), seen.output)


def test_without_values_only_the_output_is_missing():
    q, k, v = problem()
    with_v, without = reference.observe(q, k, v), reference.observe(q, k)
    assert without.output is None and without.state.acc is None
    same(with_v.rows, without.rows, rtol=0)


def test_ties_go_to_the_first_maximum():
    q, k, _ = problem()
    rows = reference.observe(0 * q, k, mask=np.arange(7) > 2).rows
    assert (rows.argmax == 3).all()


def test_two_dimensions_are_one_head():
    q, k, v = problem((5, 6), (7, 6))
    flat = reference.observe(q, k, v, causal=True, sinks=[1.0])
    full = reference.observe(q[None], k[None], v[None], causal=True, sinks=[1.0])
    assert flat.output.shape == (5, 3) and flat.logsumexp.shape == (5,)
    assert reference.logits(q, k).shape == (5, 7)
    np.testing.assert_array_equal(flat.output, full.output[0])
    np.testing.assert_array_equal(flat.rows.entropy, full.rows.entropy[0])


@pytest.mark.parametrize("B", [0, 2])
@pytest.mark.parametrize("H", [0, 4])
@pytest.mark.parametrize("T", [0, 3])
@pytest.mark.parametrize("S", [0, 5])
@pytest.mark.parametrize(("D", "E"), [(0, 2), (4, 0), (4, 2)])
def test_empty_dimensions(B, H, T, S, D, E):
    q, k, v = problem((B, H, T, D), (B, H // 2, S, D), E)
    every = {
        "causal": True,
        "window": (2, 2),
        "mask": np.ones((T, S)),
        "sinks": np.zeros(H),
        "alibi": True,
        "softcap": 3.0,
        "key_lengths": S,
        "segments": (np.zeros(T, int), np.zeros(S, int)),
        "dropout": 0.5,
    }
    for options in ({}, {"scale": "cosine"}, {"scale": "log-n"}, every):
        seen = reference.observe(q, k, v, **options)
        assert seen.output.shape == (B, H, T, E)
        assert stats.heads(seen.rows).rows.shape == (B, H)
        if S == 0:
            assert (seen.output == 0).all() and (seen.rows.count == 0).all()
            assert (seen.logsumexp == (0.0 if "sinks" in options else -INF)).all()


def test_bfloat16_and_its_bits_are_the_same_numbers():
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in problem())
    mask = BIAS.astype(ml_dtypes.bfloat16)
    typed = reference.attention(q, k, v, mask=mask)
    bits = reference.attention(*(x.view(np.uint16) for x in (q, k, v)), mask=mask.view(np.uint16))
    wide = reference.attention(*(x.astype(float) for x in (q, k, v)), mask=mask.astype(float))
    np.testing.assert_array_equal(typed, bits)
    np.testing.assert_array_equal(typed, wide)


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_cosine_of_extreme_vectors(size):
    q, k, v = problem()
    plain = reference.attention(q, k, v, scale="cosine")
    np.testing.assert_allclose(reference.attention(q * size, k, v, scale="cosine"), plain, rtol=1e-12)


# Hidden keys, NaN and inf


@pytest.mark.parametrize("poison", [math.nan, INF, -INF])
@pytest.mark.parametrize("scale", [None, "cosine", "log-n"])
@pytest.mark.parametrize(
    "options",
    [
        {"mask": np.arange(7) < 5},
        {"mask": np.where(np.arange(7) < 5, 0.0, -INF)},
        {"key_lengths": 5},
        {"causal": True, "query_start": 0},
        {"window": (None, 0), "query_start": 0, "softcap": 1.0, "alibi": True, "dropout": 0.3, "seed": 1},
        {"segments": (np.zeros(5, int), np.array([0, 0, 0, 0, 0, 1, 1]))},
    ],
    ids=lambda options: next(iter(options)),
)
def test_hidden_keys_change_nothing(poison, scale, options):
    q, k, v = problem()
    clean = reference.observe(q, k, v, scale=scale, **options)
    k[:, :, 5:], v[:, :, 5:] = poison, poison
    poisoned = reference.observe(q, k, v, scale=scale, **options)
    np.testing.assert_array_equal(poisoned.output, clean.output)
    np.testing.assert_array_equal(poisoned.state.sums, clean.state.sums)
    np.testing.assert_array_equal(poisoned.state.counts, clean.state.counts)
    assert np.isfinite(clean.output).all()


@pytest.mark.parametrize("poison", [math.nan, INF])
def test_a_visible_nan_or_overflow_stays_in_its_rows(poison):
    q, k, v = problem()
    bias = np.zeros((5, 7))
    bias[3, 2] = poison
    clean, seen = reference.observe(q, k, v), reference.observe(q, k, v, mask=bias)
    rest = [0, 1, 2, 4]
    np.testing.assert_array_equal(seen.output[:, :, rest], clean.output[:, :, rest])
    assert np.isnan(seen.output[:, :, 3]).all()
    assert np.isnan(seen.state.sums[:, :, 3, : state.FIRST]).all()
    assert (seen.rows.argmax[:, :, 3] == -1).all() and (seen.rows.count == 7).all()


def test_a_visible_nan_gives_no_gradient_to_hidden_keys():
    q, k, v = problem()
    dout = np.ones((2, 4, 5, 3))
    q[:, :, 4] = math.nan
    mask = np.ones((5, 7), bool)
    mask[4, 5:] = False
    found = reference.attention_backward(dout, q, k, v, mask=mask)
    rest = reference.attention_backward(dout[:, :, :4], q[:, :, :4], k, v, mask=mask[:4])
    for name in ("k", "v"):
        assert np.isnan(found[name][:, :, :5]).all(), name
        np.testing.assert_allclose(found[name][:, :, 5:], rest[name][:, :, 5:], rtol=1e-12, err_msg=name)


def test_a_visible_value_touches_its_column_and_the_rows_that_see_it():
    q, k, v = problem()
    v[0, 0, 6, 1] = INF
    output = reference.attention(q, k, v, causal=True)
    wild = np.zeros(output.shape, bool)
    wild[0, :2, 4, 1] = True  # the last query alone sees the last key; heads 0 and 1 share it
    np.testing.assert_array_equal(np.isinf(output), wild)
    assert np.isfinite(output[~wild]).all()


# The monoid


def states(sizes, magnitude, seed):
    """One state per entry of `sizes`: (H, T) = (2, 6) rows with some keys hidden."""
    rng = np.random.default_rng(seed)
    result = []
    for S in sizes:
        bias = magnitude * rng.choice([-1.0, 1.0, 0.5, 0.5], size=(2, 6, S)) + rng.normal(size=(2, 6, S))
        bias[rng.random(bias.shape) < 0.3] = -INF
        bias[:, 0] = -INF  # this row has no visible key in any part
        q, k, v = np.zeros((2, 6, 1)), np.zeros((2, S, 1)), rng.normal(size=(2, S, 3))
        result.append(reference.observe(q, k, v, mask=bias).state)
    return result


MAGNITUDES = [0.0, 3.0, 1e4, 1e30]


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_the_identity_is_neutral_on_both_sides(magnitude):
    (a,) = states([5], magnitude, 0)
    nothing = state.identity((2, 6), 3)
    same(reference.merge(nothing, a), a, rtol=0)
    same(reference.merge(a, nothing), a, rtol=0)
    same(reference.merge(nothing, nothing), nothing, rtol=0)


def test_the_identity_is_neutral_for_a_nan_row():
    bias = np.zeros((1, 1, 2))
    bias[..., 1] = math.nan
    a = reference.observe(np.zeros((1, 1, 1)), np.zeros((1, 2, 1)), np.ones((1, 2, 3)), mask=bias).state
    nothing = state.identity((1, 1), 3)
    same(reference.merge(nothing, a), a)
    same(reference.merge(a, nothing), a)


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("sizes", [(4, 5, 3), (0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 1), (0, 0, 0)])
def test_merge_is_associative(magnitude, sizes):
    for seed in range(5):
        a, b, c = states(sizes, magnitude, seed)
        left = reference.merge(reference.merge(a, b), c)
        right = reference.merge(a, reference.merge(b, c))
        # the error of m2 by cancellation is relative to the squares that were summed
        scale = max(magnitude, 1.0)
        np.testing.assert_allclose(left.acc, right.acc, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(left.counts, right.counts)
        np.testing.assert_allclose(
            np.delete(left.sums, state.M2, -1), np.delete(right.sums, state.M2, -1), atol=1e-12 * scale
        )
        np.testing.assert_allclose(
            left.sums[..., state.M2], right.sums[..., state.M2], rtol=1e-11, atol=1e-11 * scale**2
        )
        assert left.keys == right.keys == sum(sizes)


@pytest.mark.parametrize("magnitude", [1.0, 1e4, 1e30])
@pytest.mark.parametrize("cut", [0, 1, 3, 7])
@pytest.mark.parametrize("causal", [False, True])
def test_two_halves_make_the_whole(magnitude, cut, causal):
    q, k, v = problem()
    q = q * magnitude
    sinks = np.array([0.0, -1.0, -INF, 4.0])
    options = {"causal": causal, "window": (3, None), "mask": BIAS}
    whole = reference.observe(q, k, v, sinks=sinks, query_start=0, **options)
    parts = []
    for keys in (slice(0, cut), slice(cut, 7)):
        own = options | {"mask": BIAS[..., keys], "query_start": -keys.start, "sinks": sinks}
        parts.append(reference.observe(q, k[:, :, keys], v[:, :, keys], **own).state)
    joined = reference.finish(reference.merge(*parts), sinks)
    same(joined.state, whole.state)
    same(joined.rows, whole.rows)
    np.testing.assert_allclose(joined.output, whole.output, rtol=1e-11, atol=1e-12)
    assert joined.state.keys == 7


def test_a_tie_between_halves_goes_to_the_earlier():
    q, k = np.zeros((1, 1, 1)), np.zeros((1, 3, 1))
    a = reference.observe(q, k, mask=np.array([0.0, 2.0, 1.0])).state
    b = reference.observe(q, k, mask=np.array([2.0, 0.0, 2.0])).state
    later = reference.observe(q, k, mask=np.array([0.0, 0.0, 9.0])).state
    assert reference.merge(a, b).counts[0, 0].tolist() == [6, 1]
    assert reference.merge(reference.merge(a, b), later).counts[0, 0].tolist() == [9, 8]


def test_a_nan_in_either_half_reaches_the_whole():
    q, k, v = np.zeros((1, 1, 1)), np.zeros((1, 2, 1)), np.ones((1, 2, 2))
    good = reference.observe(q, k, v).state
    bad = reference.observe(q, k, v, mask=np.array([math.nan, 0.0])).state
    for joined in (reference.merge(good, bad), reference.merge(bad, good)):
        assert np.isnan(joined.sums[..., : state.FIRST]).all() and np.isnan(joined.acc).all()
        assert joined.counts[0, 0].tolist() == [4, -1]


# Positions


@pytest.mark.parametrize("scale", [None, "cosine"])
def test_runs_of_keys_and_queries_are_places_in_the_whole(scale):
    q, k, v = problem((2, 4, 9, 6), (2, 2, 12, 6))
    options = {"causal": True, "window": (8, None), "alibi": True, "dropout": 0.4, "seed": 7}
    options |= {"scale": scale, "sinks": [0.5] * 4, "query_start": 2}
    keys, queries = np.r_[0:6:2, 7:12], np.r_[1:3, 3:9:3]
    striped = reference.observe(
        q[:, :, queries],
        k[:, :, keys],
        v[:, :, keys],
        key_runs=[(0, 3, 2), (7, 5, 1)],
        query_runs=[(1, 2, 1), (3, 2, 3)],
        **options,
    )
    whole = reference.observe(q, k, v, mask=np.isin(np.arange(12), keys), **options)
    np.testing.assert_allclose(striped.output, whole.output[:, :, queries], rtol=1e-12, atol=1e-14)
    for name in stats.Rows.__slots__:
        expected = getattr(whole.rows, name)[:, :, queries]
        np.testing.assert_allclose(getattr(striped.rows, name), expected, rtol=1e-12, err_msg=name)


def test_key_lengths_are_positions_under_runs():
    q, k, v = problem()
    striped = reference.observe(q, k, v, key_runs=[(0, 7, 2)], key_lengths=5, query_start=0)
    assert (striped.rows.count == 3).all()  # positions 0, 2, 4


def test_one_start_per_batch_row():
    q, k, v = problem()
    both = reference.attention(q, k, v, causal=True, query_start=[0, 3])
    for b, start in enumerate((0, 3)):
        alone = reference.attention(q[b], k[b], v[b], causal=True, query_start=start)
        np.testing.assert_allclose(both[b], alone, rtol=1e-13)


# Dropout


def keep_by_hand(seed, rate, b, h, p, j):
    """The hash on Python integers."""
    wide, half = 2**64 - 1, 2**32 - 1

    def splitmix(z):
        z = (z + 0x9E3779B97F4A7C15) & wide
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & wide
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & wide
        return z ^ (z >> 31)

    def mix(x):
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & half
        x = ((x ^ (x >> 15)) * 0x846CA68B) & half
        return x ^ (x >> 16)

    key = splitmix(splitmix(splitmix(splitmix(seed) ^ b) ^ h) ^ (p & wide))
    x = mix((j & half) ^ (key & half))
    x = mix(x ^ (((key >> 32) + ((j & wide) >> 32) * 0x9E3779B9) & half))
    return x >= math.floor(rate * 2**32)


def test_the_dropout_hash():
    p, j = np.array([[-3, 0, 5], [2**40, 1, 2]]), np.array([0, 1, 2**33 + 1, 9])
    for seed in (0, 1, 2**64 - 1):
        keep = reference.dropout_keep(seed, 0.5, 3, p, j)
        for b, h, i, n in np.ndindex(2, 3, 3, 4):
            by_hand = keep_by_hand(seed, 0.5, b, h, int(p[b, i]), int(j[n]))
            assert keep[b, h, i, n] == by_hand


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_that_is_kept(rate):
    keep = reference.dropout_keep(3, rate, 4, np.arange(64)[None], np.arange(256))
    n, spread = keep.size, math.sqrt(rate * (1 - rate))
    assert abs(keep.mean() - (1 - rate)) < 4 * spread / math.sqrt(n)
    for axis in (1, 2, 3):  # neighbours are dropped independently
        pairs = np.take(keep, range(1, keep.shape[axis]), axis) & np.take(keep, range(keep.shape[axis] - 1), axis)
        assert abs(pairs.mean() - (1 - rate) ** 2) < 6 * spread / math.sqrt(n)


def test_dropout_weighs_values_and_leaves_statistics():
    q, k, v = problem()
    clean, dropped = reference.observe(q, k, v), reference.observe(q, k, v, dropout=0.25, seed=9)
    same(clean.rows, dropped.rows, rtol=0)
    weights = np.exp(reference.logits(q, k) - clean.logsumexp[..., None])
    p = np.broadcast_to(np.arange(2, 7), (2, 5))
    keep = reference.dropout_keep(9, 0.25, 4, p, np.arange(7))
    expected = (weights * keep / 0.75) @ np.repeat(v, 2, axis=1)
    np.testing.assert_allclose(dropped.output, expected, rtol=1e-12, atol=1e-14)


def test_packed_sequences_equal_their_parts():
    q, k, v = problem((1, 2, 9, 6), (1, 2, 9, 6))
    ids = scoring.segment_ids([0, 4, 9])
    packed = reference.attention(q, k, v, causal=True, segments=ids)
    for part in (slice(0, 4), slice(4, 9)):
        alone = reference.attention(q[:, :, part], k[:, :, part], v[:, :, part], causal=True)
        np.testing.assert_allclose(packed[:, :, part], alone, rtol=1e-12)

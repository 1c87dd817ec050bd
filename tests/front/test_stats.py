"""The formulas from sums to rows, from rows to heads, and the level gauge."""

from __future__ import annotations

import math

import numpy as np
import pytest

from levelhead import reference, state, stats

pytestmark = pytest.mark.filterwarnings("error")


def observed(logits, sinks=None):
    """Rows of given logits (H, T, S), through the reference: a float mask over zero scores."""
    logits = np.asarray(logits, np.float64)
    H, T, S = logits.shape
    return reference.observe(np.zeros((H, T, 1)), np.zeros((H, S, 1)), mask=logits, sinks=sinks).rows


def test_rows_against_the_weights_themselves():
    s = np.random.default_rng(0).normal(0, 3, (2, 5, 7))
    s[0, 1, 2:] = -np.inf
    rows = observed(s)
    p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    seen = np.isfinite(s)
    surprise = np.where(seen, -p * np.log(np.where(seen, p, 1)), 0)
    np.testing.assert_array_equal(rows.count, seen.sum(-1))
    np.testing.assert_array_equal(rows.argmax, s.argmax(-1))
    np.testing.assert_allclose(rows.entropy, surprise.sum(-1), rtol=1e-12)
    np.testing.assert_allclose(rows.top1, p.max(-1), rtol=1e-12)
    np.testing.assert_allclose(rows.sum_p2, (p**2).sum(-1), rtol=1e-12)
    np.testing.assert_allclose(rows.first, p[..., 0], rtol=1e-12)
    np.testing.assert_allclose(rows.logsumexp, np.log(np.exp(s).sum(-1)), rtol=1e-12)
    np.testing.assert_allclose(rows.mean[0, 1], s[0, 1, :2].mean())
    np.testing.assert_allclose(rows.var[0, 1], s[0, 1, :2].var())
    np.testing.assert_array_equal(rows.sink, 0)


@pytest.mark.parametrize("z", [-2.0, 0.0, 9.0, -np.inf])
def test_a_sink_is_one_more_outcome(z):
    s = np.random.default_rng(1).normal(0, 2, (1, 4, 6))
    with_sink = observed(s, sinks=[z])
    # the same as one more key, but for the fields that cover keys only
    extra = observed(np.concatenate([s, np.full((1, 4, 1), z)], axis=-1))
    for name in ("logsumexp", "entropy", "sum_p2", "first"):
        np.testing.assert_allclose(getattr(with_sink, name), getattr(extra, name), rtol=1e-12)
    plain = observed(s)
    for name in ("count", "mean", "var", "min", "max", "argmax"):
        np.testing.assert_array_equal(getattr(with_sink, name), getattr(plain, name))
    np.testing.assert_allclose(with_sink.top1, np.exp(plain.max - with_sink.logsumexp), rtol=1e-12)
    np.testing.assert_allclose(with_sink.sink, np.exp(z - with_sink.logsumexp), rtol=1e-12)


@pytest.mark.parametrize(("sinks", "logsumexp", "share"), [(None, -np.inf, 0), ([1.5], 1.5, 1)])
def test_an_empty_row(sinks, logsumexp, share):
    nothing = state.identity((1, 1), None)
    rows = stats.rows(nothing.sums, nothing.counts, None if sinks is None else np.array(sinks))
    told = {name: getattr(rows, name).item() for name in stats.Rows.__slots__}
    assert math.isnan(told.pop("mean")) and math.isnan(told.pop("var"))
    assert told == {
        "count": 0,
        "min": np.inf,
        "max": -np.inf,
        "argmax": -1,
        "logsumexp": logsumexp,
        "entropy": 0,
        "top1": 0,
        "sum_p2": share,
        "first": 0,
        "sink": share,
    }


@pytest.mark.parametrize("big", [1e4, 1e30, 1e300])
def test_huge_logits_keep_their_weights(big):
    rows = observed([[[big, big, -big], [-big, -big, -big]]])
    np.testing.assert_allclose(rows.top1, [[0.5, 1 / 3]], rtol=1e-12)
    np.testing.assert_allclose(rows.entropy, [[math.log(2), math.log(3)]], rtol=1e-12)
    np.testing.assert_allclose(rows.first, [[0.5, 1 / 3]], rtol=1e-12)
    np.testing.assert_allclose(rows.logsumexp, [[big + math.log(2), -big + math.log(3)]], rtol=1e-15)


def test_a_sink_weighs_as_much_as_a_key_with_its_logit():
    rows = observed([[[1e4, 1e4, -1e4], [-1e4, -1e4, -1e4]]], sinks=[-1e4])
    np.testing.assert_allclose(rows.top1, [[0.5, 0.25]], rtol=1e-11)
    np.testing.assert_allclose(rows.entropy, [[math.log(2), math.log(4)]], rtol=1e-11)
    np.testing.assert_allclose(rows.sink, [[0, 0.25]], rtol=1e-11)


def test_a_nan_row_is_nan_and_its_neighbour_is_not():
    rows = observed([[[np.nan, 0.0], [0.0, 0.0]]], sinks=[0.0])
    for name in ("mean", "var", "min", "max", "logsumexp", "entropy", "top1", "sum_p2", "first", "sink"):
        assert np.isnan(getattr(rows, name)[0, 0]) and np.isfinite(getattr(rows, name)[0, 1]), name
    assert rows.argmax.tolist() == [[-1, 0]]
    assert rows.count.tolist() == [[2, 2]]


def test_one_head_without_its_axis():
    lone = state.identity((3,), None)
    rows = stats.rows(lone.sums, lone.counts, np.array([2.0]))
    assert rows.logsumexp.tolist() == [2.0] * 3
    assert stats.heads(rows).rows.shape == ()


def test_float32_sums_give_float64_rows():
    half = state.identity((1, 1), None, np.float32)
    rows = stats.rows(half.sums, half.counts, None)
    assert rows.entropy.dtype == np.float64


def test_heads():
    hidden = -np.inf
    s = np.array([[[1, 2, 3, 0], [9, 1, hidden, hidden], [5, hidden, hidden, hidden], [hidden] * 4]])
    rows = observed(s)
    heads = stats.heads(rows)
    assert (heads.rows.item(), heads.lone_rows.item(), heads.empty_rows.item()) == (3, 2, 1)
    assert (heads.max_logit.item(), heads.max_query.item(), heads.max_key.item()) == (9, 1, 0)
    assert heads.min_logit.item() == 0
    some, several = slice(0, 3), slice(0, 2)
    means = {
        "mean_logit": rows.mean[0, some],
        "var_logit": rows.var[0, some],
        "mean_logsumexp": rows.logsumexp[0, some],
        "mean_entropy": rows.entropy[0, some],
        "mean_top1": rows.top1[0, some],
        "mean_sum_p2": rows.sum_p2[0, some],
        "gradient": 1 - rows.sum_p2[0, some],
        "mean_first": rows.first[0, some],
        "mean_sink": rows.sink[0, some],
        "saturated": rows.top1[0, several] >= 0.99,
        "normalised_entropy": rows.entropy[0, several] / np.log([4, 2]),
        "effective_keys": np.exp(rows.entropy[0, several]),
    }
    for name, values in means.items():
        np.testing.assert_allclose(getattr(heads, name), [np.mean(values)], rtol=1e-12, err_msg=name)
    assert heads.saturated.item() == 0.5
    for name in ("logsumexp", "entropy"):
        values = getattr(rows, name)[0, some]
        assert getattr(heads, f"min_{name}").item() == values.min()
        assert getattr(heads, f"max_{name}").item() == values.max()
    assert heads.max_top1.item() == 1.0


@pytest.mark.parametrize("T", [0, 3])
def test_heads_of_nothing(T):
    nothing = state.identity((2, T), None)
    heads = stats.heads(stats.rows(nothing.sums, nothing.counts, None))
    assert heads.rows.tolist() == [0, 0]
    assert heads.lone_rows.tolist() == heads.empty_rows.tolist() == [T, T]
    assert heads.max_query.tolist() == heads.max_key.tolist() == [-1, -1]
    assert heads.max_logit.tolist() == [-np.inf] * 2 and heads.min_logit.tolist() == [np.inf] * 2
    whole = {"rows", "lone_rows", "empty_rows", "max_query", "max_key", "max_logit", "min_logit"}
    for name in set(stats.Heads.__slots__) - whole:
        assert np.isnan(getattr(heads, name)).all(), name


def test_a_nan_head_says_where():
    heads = stats.heads(observed([[[7.0, 0.0], [np.nan, 0.0]], [[7.0, 0.0], [1.0, 0.0]]]))
    assert np.isnan(heads.max_logit[0]) and heads.max_logit[1] == pytest.approx(7)
    assert heads.max_query.tolist() == [1, 0]
    assert heads.max_key.tolist() == [-1, 0]


@pytest.mark.parametrize(
    ("normalised_entropy", "saturated", "level"),
    [
        (1.02, 0.0, "flat"),  # a sink is one more outcome than the keys
        (1.0, 0.0, "flat"),
        (0.98, 0.0, "flat"),
        (0.979, 0.0, "level"),
        (0.5, 0.49, "level"),
        (0.499, 0.0, "sharp"),
        (0.1, 0.49, "sharp"),
        (0.099, 0.0, "saturated"),
        (0.9, 0.5, "saturated"),
        (0.0, 1.0, "saturated"),
        (math.nan, math.nan, "none"),
        (math.nan, 1.0, "none"),
    ],
)
def test_level(normalised_entropy, saturated, level):
    assert stats.level(normalised_entropy, saturated) == level


@pytest.mark.parametrize(("std", "level"), [(0.1, "flat"), (1.0, "level"), (4.0, "sharp"), (64, "saturated")])
def test_levels_of_gaussian_logits(std, level):
    heads = stats.heads(observed(np.random.default_rng(0).normal(0, std, (1, 64, 512))))
    assert stats.level(heads.normalised_entropy.item(), heads.saturated.item()) == level


def test_the_bubble_moves_right_as_entropy_falls():
    entropies = np.linspace(1.1, -0.1, 500)
    gauges = [stats.gauge(x, stats.level(x, 0.0)) for x in entropies]
    assert {len(text) for text in gauges} == {11}
    places = [text.index("●") for text in gauges]
    assert places == sorted(places)
    assert (places[0], places[-1]) == (1, 9)
    assert stats.gauge(0.9, "level") == "▕    ●    ▏"
    assert stats.gauge(0.9, "saturated") == "▕        ●▏"
    assert stats.gauge(math.nan, "none") == "▕         ▏"

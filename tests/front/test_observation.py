"""`Observation` and `merge`: what is computed from a state, in which array type, how two are merged, and how they
print. The formulas are tested with `stats`, the numbers with the reference.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pickle
from typing import Any
from xml.etree import ElementTree

import ml_dtypes
import numpy as np
import pytest
import torch

import levelhead as lh
from levelhead import reference, stats

DTYPES = ["float32", "float64", "float16", "bfloat16"]


def qkv(dtype: str = "float32", lead: tuple[int, ...] = (2, 3), T: int = 5, S: int = 7) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    sizes = ((T, 8), (S, 8), (S, 4))
    return [rng.standard_normal((*lead, *size)).astype(kind) for size in sizes]


def close(a: Any, b: Any, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), tolerance, tolerance)


# ---- what is read off


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
def test_output_has_the_bits_of_attention(dtype: str, lead: tuple[int, ...]) -> None:
    q, k, v = qkv(dtype, lead)
    heads = lead[-1] if lead else 1
    for options in ({}, {"causal": True, "sinks": np.linspace(-1, 1, heads)}):
        seen, out = lh.observe(q, k, v, **options), lh.attention(q, k, v, **options)
        assert (type(seen.output), seen.output.dtype) == (np.ndarray, q.dtype)
        assert seen.output.tobytes() == out.tobytes()
        assert seen.output is seen.output


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_results_are_tensors_and_statistics_are_numpy(dtype: str) -> None:
    given = qkv("float32")
    kind = getattr(torch, dtype)
    tensors = [torch.from_numpy(a).to(kind) for a in given]
    seen = lh.observe(*tensors)
    assert torch.equal(seen.output, lh.attention(*tensors))
    assert seen.output.dtype == kind
    wide = torch.float64 if dtype == "float64" else torch.float32
    assert (type(seen.logsumexp), seen.logsumexp.dtype) == (torch.Tensor, wide)
    assert type(seen.rows.entropy) is type(seen.heads.rows) is np.ndarray


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
def test_rows_heads_and_logsumexp_against_the_reference(lead: tuple[int, ...]) -> None:
    q, k, v = qkv("float32", lead)
    options = {"causal": True, "sinks": np.full(lead[-1] if lead else 1, 0.5)}
    seen, truth = lh.observe(q, k, v, **options), reference.observe(q, k, v, **options)
    close(seen.logsumexp, truth.logsumexp)
    assert seen.logsumexp.dtype == np.float32
    for field in dataclasses.fields(truth.rows):
        ours, theirs = getattr(seen.rows, field.name), getattr(truth.rows, field.name)
        assert ours.shape == (*lead, 5)
        close(ours, theirs)
    for field in dataclasses.fields(seen.heads):
        assert np.shape(getattr(seen.heads, field.name)) == lead


def test_statistics_need_no_values() -> None:
    q, k, v = qkv()
    alone, whole = lh.observe(q, k), lh.observe(q, k, v)
    assert alone.state.acc is None
    for field in dataclasses.fields(whole.rows):
        np.testing.assert_array_equal(getattr(alone.rows, field.name), getattr(whole.rows, field.name))
    with pytest.raises(lh.LevelheadError, match=r"^output: expected .* got .*statistics only"):
        _ = alone.output


def test_dropout_changes_the_output_and_not_the_statistics() -> None:
    q, k, v = qkv()
    plain, dropped = lh.observe(q, k, v), lh.observe(q, k, v, dropout=0.5, seed=5)
    assert dropped.output.tobytes() == lh.attention(q, k, v, dropout=0.5, seed=5).tobytes()
    assert dropped.output.tobytes() != plain.output.tobytes()
    close(dropped.logsumexp, plain.logsumexp)
    close(dropped.heads.mean_entropy, plain.heads.mean_entropy)


def test_an_observation_is_frozen_and_travels() -> None:
    seen = lh.observe(*qkv(), sinks=[0.0, 1.0, 2.0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        seen.state = None
    back = pickle.loads(pickle.dumps(seen))
    assert back.output.tobytes() == seen.output.tobytes()
    assert repr(back) == repr(seen)


# ---- merge


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [0, 1, 4, 7])
def test_two_halves_make_the_whole(dtype: str, cut: int) -> None:
    q, k, v = qkv(dtype)
    options: dict[str, Any] = {"causal": True, "sinks": [0.5, -1.0, 2.0]}
    whole = lh.observe(q, k, v, **options)
    a = lh.observe(q, k[..., :cut, :], v[..., :cut, :], query_start=2, **options)
    b = lh.observe(q, k[..., cut:, :], v[..., cut:, :], query_start=2 - cut, **options)
    both = lh.merge(a, b)
    assert both.keys == whole.keys == 7
    # the spacing of a 16-bit type at values of about 1
    step = {"float16": 2e-3, "bfloat16": 1.6e-2}.get(dtype, 2e-5)
    close(both.output, whole.output, step)
    close(both.logsumexp, whole.logsumexp)
    for field in dataclasses.fields(whole.rows):
        close(getattr(both.rows, field.name), getattr(whole.rows, field.name))


@pytest.mark.parametrize("values", [True, False])
def test_the_identity_changes_nothing(values: bool) -> None:
    q, k, v = qkv()
    seen = lh.observe(q, k, v if values else None, causal=True, query_start=-2)
    nothing = seen.identity()
    assert nothing.keys == 0
    assert (nothing.rows.count == 0).all()
    assert (nothing.logsumexp == -np.inf).all()
    for both in (lh.merge(nothing, seen), lh.merge(seen, nothing)):
        assert both.keys == seen.keys
        np.testing.assert_array_equal(both.state.sums, seen.state.sums)
        np.testing.assert_array_equal(both.state.counts, seen.state.counts)
        if values:
            np.testing.assert_array_equal(both.output, seen.output)
    empty = lh.merge(nothing, nothing)
    np.testing.assert_array_equal(empty.state.sums, nothing.state.sums)


def test_merge_leaves_its_parts_alone() -> None:
    q, k, v = qkv()
    a, b = lh.observe(q, k, v), lh.observe(q, k, v)
    before = a.state.sums.copy(), b.state.sums.copy()
    lh.merge(a, b)
    np.testing.assert_array_equal(a.state.sums, before[0])
    np.testing.assert_array_equal(b.state.sums, before[1])


def test_merge_refuses_what_does_not_belong_together() -> None:
    q, k, v = qkv()
    a = lh.observe(q, k, v, sinks=[0.0, 0.0, 0.0])
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    others = {
        "family": lh.observe(*tensors, sinks=[0.0, 0.0, 0.0]),
        "dtype": lh.observe(*qkv("float64"), sinks=[0.0, 0.0, 0.0]),
        "shape": lh.observe(q[:, :, 1:], k, v, sinks=[0.0, 0.0, 0.0]),
        "width": lh.observe(q, k, v[..., 1:], sinks=[0.0, 0.0, 0.0]),
        "width of values": lh.observe(q, k, sinks=[0.0, 0.0, 0.0]),
        "sinks": lh.observe(q, k, v, sinks=[0.0, 1.0, 0.0]),
        "sinks of a": lh.observe(q, k, v),
    }
    for what, b in others.items():
        with pytest.raises(lh.LevelheadError, match=rf"^b: expected the {what}.*, got .*Observe"):
            lh.merge(a, b)
    with pytest.raises(lh.LevelheadError, match=r"^b: expected an Observation, got ndarray"):
        lh.merge(a, q)


# ---- printing


def test_the_table_says_what_it_shows() -> None:
    q, k, v = qkv()
    q[:, 0] = 0  # flat
    q[:, 2] *= 300  # saturated
    seen = lh.observe(q, k, v)
    title, columns, *lines = str(seen).splitlines()
    for word in ("3 heads", "5 queries", "7 keys", "width 4", "float32", "numpy", "batch (2,)"):
        assert word in title
    names = ("head", "gauge", "level", "H/ln n", "top-1", "max logit", "logit std")
    for name in (*names, "saturated", "gradient left", "first key"):
        assert name in columns
    assert "sink" not in columns
    assert len(lines) == 3
    assert [line.split("▏")[1].split()[0] for line in lines] == ["flat", "level", "saturated"]
    assert lines[0].split("▏")[1].split()[1:] == (["1.000", "0.143", "0.00", "0.00", "0%", "0.857", "0.143"])
    # every cell ends (numbers) or begins (gauge, level) where its title does
    for name in ("H/ln n", "max logit", "first key"):
        end = columns.index(name) + len(name)
        assert all(line[end - 1] != " " and line[end : end + 1] in ("", " ") for line in lines)
    assert f"{seen.heads.max_logit[:, 2].max():.2f}" in lines[2]
    with_sinks = str(lh.observe(q, k, v, sinks=[0.0, 0.0, 0.0])).splitlines()
    assert with_sinks[1].endswith("sink")
    assert with_sinks[2].endswith("0.125")


def test_the_table_stops_after_32_heads() -> None:
    q, k, _ = qkv(lead=(33,))
    lines = str(lh.observe(q, k)).splitlines()
    assert len(lines) == 2 + 32 + 1
    assert lines[-1] == "… 1 more"
    assert len(str(lh.observe(q[:32], k[:32])).splitlines()) == 2 + 32
    assert "… 1 more" in lh.observe(q, k)._repr_html_()


@pytest.mark.parametrize(
    ("lead", "T", "S"), [((), 3, 4), ((2,), 0, 4), ((2,), 3, 0), ((2,), 3, 1), ((0,), 3, 4), ((0, 2), 3, 4)], ids=str
)
def test_small_and_empty_observations_print(lead: tuple[int, ...], T: int, S: int) -> None:
    seen = lh.observe(*qkv("float32", lead, T, S))
    text = str(seen)
    assert f"{T} queries x {S} keys" in text
    assert "nan" not in text
    assert len(text.splitlines()) == 2 + (lead[-1] if lead else 1)
    assert "<table" in seen._repr_html_()


def test_a_nan_is_shown_and_not_averaged_away() -> None:
    q, k, v = qkv()
    q[1, 1, 2, 0] = np.nan
    lines = str(lh.observe(q, k, v)).splitlines()
    assert "none" in lines[3]
    assert "none" not in lines[2] + lines[4]


def test_the_notebook_table_is_well_formed_and_self_contained() -> None:
    seen = lh.observe(*qkv())
    page = ElementTree.fromstring(seen._repr_html_())
    assert all(name not in ("src", "href") for part in page.iter() for name in part.attrib)
    rows = [[cell.text for cell in row] for row in page.iter("tr")]
    printed = [line.split() for line in str(seen).splitlines()[2:]]
    assert [row[0] for row in rows] == ["head", "0", "1", "2"] and {len(row) for row in rows} == {10}
    assert [row[2:] for row in rows[1:]] == [line[-8:] for line in printed]


def test_a_notebook_draws_gauges_where_text_has_characters() -> None:
    """Runs of spaces collapse in HTML: a gauge of characters would say nothing."""
    q, k, _ = qkv(lead=(3,), T=24, S=24)
    q *= np.array([0.01, 1.0, 60.0], np.float32)[:, None, None]
    seen = lh.observe(q, k)
    page = ElementTree.fromstring(seen._repr_html_())
    levels = [stats.level(*pair) for pair in zip(seen.heads.normalised_entropy, seen.heads.saturated, strict=True)]
    assert [svg.get("aria-label") for svg in page.iter("svg")] == levels
    flat, level, saturated = (float(bubble.get("cx", "nan")) for bubble in page.iter("ellipse"))
    assert flat < level < saturated and "●" not in seen._repr_html_()


def test_a_strange_family_name_is_escaped() -> None:
    seen = lh.observe(*qkv())
    strange = dataclasses.replace(seen, origin=dataclasses.replace(seen.origin, family="<b>&"))
    html = strange._repr_html_()
    assert "&lt;b&gt;&amp;" in html
    assert "<b>" not in html


@pytest.mark.parametrize("window", [None, (3, None)])
def test_the_first_key_of_a_document_survives_a_merge(window: Any) -> None:
    """A document may begin in a later part; what its rows do not see in an earlier one must not look like that."""
    q, k, v = qkv(T=12, S=12)
    ids = np.arange(12) // 5
    options: dict[str, Any] = {"causal": True, "window": window}
    truth = reference.observe(q, k, v, segments=ids, **options).rows.first
    assert (truth[..., 5] == 1).all() and (window is None or (truth[..., 9] == 0).all())
    for cuts in ((0, 7, 12), (0, 2, 5, 12), (0, 0, 11, 12)):
        for module in (lh, reference):
            parts = [
                module.observe(q, k[..., a:b, :], v[..., a:b, :], segments=(ids, ids[a:b]), query_start=-a, **options)
                for a, b in itertools.pairwise(cuts)
            ]
            if module is lh:
                first = functools.reduce(lh.merge, parts).rows.first
            else:
                first = reference.finish(functools.reduce(reference.merge, [x.state for x in parts])).rows.first
            np.testing.assert_allclose(first, truth, rtol=1e-5, atol=1e-7, err_msg=f"{module.__name__} {cuts}")


@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3)], ids=str)
def test_the_first_key_is_that_of_the_query_s_document(lead: tuple[int, ...]) -> None:
    """For NumPy, and for tensors with gradients, which come another way."""
    q, k, v = qkv(lead=lead, T=11, S=11)
    ids = np.random.default_rng(1).integers(-1, 3, (*lead[:-1], 11)) if lead[:-1] else np.arange(11) // 4
    truth = reference.observe(q, k, v, segments=ids, causal=True).rows.first
    assert (truth > 0).all()
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    for seen in (lh.observe(q, k, v, segments=ids, causal=True), lh.observe(*tensors, segments=ids, causal=True)):
        close(seen.rows.first, truth)
        close(lh.merge(seen.identity(), seen).rows.first, truth)


def test_what_an_observation_shows_of_a_remembered_call_changes_no_later_one() -> None:
    x = np.ones((2, 3, 4), np.float32)
    with pytest.raises(ValueError, match="read-only"):
        lh.observe(x, x, sinks=(0.5, 1.0)).sinks[...] = 0
    lh.observe(x, x, query_lengths=2).exists[...] = True
    for name, value in (("sinks", (0.5, 1.0)), ("query_lengths", 2)):
        one, anew = (lh.observe(x, x, **{name: given}) for given in (value, np.asarray(value)))
        np.testing.assert_array_equal(one.heads.empty_rows, anew.heads.empty_rows)
        np.testing.assert_array_equal(one.rows.logsumexp, anew.rows.logsumexp)

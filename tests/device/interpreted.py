"""The observing kernel under Triton's interpreter, against `lh.reference`. `test_interpreter.py` runs this file in a
process of its own, with TRITON_INTERPRET=1 set before Triton is imported. With LEVELHEAD_SWEEP=1 it takes every pair
of options alone, in every type; without, sets of four in which every pair occurs.
"""

from __future__ import annotations

import itertools
import math
import os
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import levelhead as lh
from levelhead import reference, stats
from levelhead.call.options import Scoring, describe, shape_of
from levelhead.device.operator import observe
from levelhead.state import ARGMAX, COUNT, FIRST, State
from support import check_rows, same_bits

B, H, G, T, S, D = 2, 2, 1, 9, 45, 16
RNG = np.random.default_rng(0)
BIAS = RNG.normal(size=(B, 1, T, S)).astype(np.float32)
BIAS[0, 0, 3] = -np.inf
BIAS[:, :, :, 40:] = -np.inf
IDS = np.sort(RNG.integers(0, 4, size=(B, S)), -1)

OPTIONS: dict[str, dict[str, Any]] = {
    "scale per head": {"scale": [0.3, -0.2]},
    "cosine": {"scale": "cosine"},
    "log-n": {"scale": "log-n"},
    "causal": {"causal": True},
    "window": {"window": (12, 3)},
    "bool mask": {"mask": RNG.random((1, H, T, S)) < 0.4},
    "bias": {"mask": BIAS},
    "soft cap": {"softcap": 3.0},  # at which no two logits round to the same number
    "sinks": {"sinks": [0.5, -np.inf]},
    "ALiBi": {"alibi": True},
    "key lengths": {"key_lengths": [33, 0]},
    "query lengths": {"query_lengths": [4, 9]},
    "segments": {"segments": (IDS[:, -T:], IDS)},
    "query start": {"query_start": [-3, 60]},
}
SWEEP = os.environ.get("LEVELHEAD_SWEEP") == "1"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def pairs() -> list[tuple[str, ...]]:
    """Pairs of options that are different ones."""
    found = itertools.combinations(OPTIONS, 2)
    return [(a, b) for a, b in found if not OPTIONS[a].keys() & OPTIONS[b].keys()]


def sets_of_four() -> list[tuple[str, ...]]:
    """Few sets in which every pair occurs."""
    left, together = set(pairs()), set(pairs())
    sets = []
    while left:
        chosen: list[str] = list(min(left))
        while len(chosen) < 4:
            fit = [x for x in OPTIONS if all((x, y) in together or (y, x) in together for y in chosen)]
            new = {x: sum((x, y) in left or (y, x) in left for y in chosen) for x in fit}
            chosen.append(max(new, key=lambda x: new[x]))
        left -= set(itertools.permutations(chosen, 2))
        sets.append(tuple(chosen))
    return sets


def merged(names: tuple[str, ...]) -> dict[str, Any]:
    return {key: x for name in names for key, x in OPTIONS[name].items()}


def tensors(lead: tuple[int, int, int] = (B, H, G), T: int = T, S: int = S, D: int = D, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(lead[0], heads, n, D) for heads, n in ((lead[1], T), (lead[2], S))]


def array(x: Tensor) -> Any:
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype is torch.bfloat16 else x.numpy()


def described(q: Tensor, k: Tensor, options: dict[str, Any]) -> Scoring:
    """The options as the operator takes them."""
    scoring = describe(shape_of(q.shape, k.shape, None), dtype_name=str(q.dtype).removeprefix("torch."), **options)
    fields = {name: x for name, x in scoring._asdict().items() if isinstance(x, np.ndarray)}
    return scoring._replace(**{name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in fields.items()})


def states(q: Tensor, k: Tensor, options: dict[str, Any], **further: Any) -> State:
    scoring = described(q, k, options)
    first = further.pop("first_keys", None)
    if first is None and scoring.query_segments is not None:
        first = torch.from_numpy(reference._first_keys(described_in_numpy(q, k, options), np.arange(k.shape[2])))
    sums, counts = observe(q, k, scoring, first_keys=first, **further)
    kept = None if first is None else first[:, None].numpy()
    return State(sums.contiguous().numpy(), counts.contiguous().numpy(), None, k.shape[2], kept)


def described_in_numpy(q: Tensor, k: Tensor, options: dict[str, Any]) -> Scoring:
    return describe(shape_of(q.shape, k.shape, None), **options)


def rows_of(state: State, options: dict[str, Any]) -> stats.Rows:
    sinks, lengths = options.get("sinks"), options.get("query_lengths")
    exists = None if lengths is None else (np.arange(state.sums.shape[2]) < np.asarray(lengths)[:, None])[:, None]
    return stats.rows(state.sums, state.counts, None if sinks is None else np.asarray(sinks, float), exists)


def agrees(q: Tensor, k: Tensor, options: dict[str, Any], **further: Any) -> None:
    truth = reference.observe(array(q), array(k), **options).rows
    check_rows(rows_of(states(q, k, options, **further), options), truth, M=8.0, sinks=options.get("sinks"))


# ---- options, types, widths


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES if SWEEP else ["bfloat16"])
def test_every_option(name: str, dtype: str) -> None:
    q, k = (x.to(DTYPES[dtype]) for x in tensors())
    agrees(q, k, OPTIONS[name])


@pytest.mark.parametrize("names", pairs() if SWEEP else sets_of_four(), ids=", ".join)
@pytest.mark.parametrize("dtype", DTYPES if SWEEP else ["float32"])
def test_options_together(names: tuple[str, ...], dtype: str) -> None:
    q, k = (x.to(DTYPES[dtype]) for x in tensors())
    agrees(q, k, merged(names))


def test_nearly_all_at_once() -> None:
    names = ("scale per head", "causal", "window", "bias", "soft cap", "sinks", "ALiBi", "query lengths", "segments")
    agrees(*tensors(), merged(names) | {"query_start": 30})


WIDTHS = {"float32": (1, 24, 64, 80, 192), "float16": (16, 128, 576), "bfloat16": (64, 192, 256, 576)}
ALL_WIDTHS = (1, 16, 24, 32, 64, 80, 96, 128, 192, 256, 576)


@pytest.mark.parametrize(
    ("dtype", "D"), [(dtype, D) for dtype, some in WIDTHS.items() for D in (ALL_WIDTHS if SWEEP else some)]
)
def test_widths(D: int, dtype: str) -> None:
    q, k = (x.to(DTYPES[dtype]) for x in tensors((1, 1, 1), T=5, S=40, D=D))
    agrees(q, k, {"causal": True})


@pytest.mark.parametrize("T", [1, 16, 65])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (20, 0)}], ids=["dense", "causal", "window"])
def test_blocks_of_rows(T: int, options: dict[str, Any]) -> None:
    q, k = tensors((1, 2 if T == 65 and options else 1, 1), T=T, S=70)
    agrees(q.half(), k.half(), options)


@pytest.mark.parametrize("S", [1, 31, 33, 97])
def test_tiles_of_keys(S: int) -> None:
    agrees(*tensors((1, 1, 1), T=3, S=S), {"softcap": 2.0})
    agrees(*tensors((1, 1, 1), T=9, S=S), {"window": (3, 0), "query_start": 0})


def test_strides_of_every_kind() -> None:
    plain = tensors()
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain]  # (B, T, H, D) in memory
    wide = [torch.randn(*x.shape[:3], 2 * D) for x in plain]
    for x, there in zip(plain, wide, strict=True):
        there[..., ::2] = x
    still = [plain[0][:1].expand(2, -1, -1, -1), plain[1][:1].expand(2, -1, -1, -1)]
    want = states(*plain, {"causal": True})
    for q, k in (turned, [x[..., ::2] for x in wide]):
        got = states(q, k, {"causal": True})
        same_bits(got.sums, want.sums)
        same_bits(got.counts, want.counts)
    same_bits(states(*still, {}).sums, states(*(x.contiguous() for x in still), {}).sums)


@pytest.mark.parametrize("shape", [(S,), (T, 1), (B, 1, 1, S), (H, T, S), (B, H, 1, 1)])
@pytest.mark.parametrize("adds", [False, True])
def test_masks_by_stride(shape: tuple[int, ...], adds: bool) -> None:
    values = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    agrees(*tensors(), {"mask": np.where(values < -1, -np.inf, values).astype(np.float32) if adds else values > -0.5})


def test_a_stretched_mask_of_float64_is_read_where_its_copy_is() -> None:
    q, k = tensors()
    mask = torch.randn(B, H, 1, 1, dtype=torch.float64).expand(B, H, T, S)
    scoring = described(q, k, {})
    got = observe(q, k, scoring._replace(mask=mask))[0]
    torch.testing.assert_close(got, observe(q, k, scoring._replace(mask=mask.float().contiguous()))[0])


# ---- what hides, and what must not matter


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "query_start": 20},
        {"window": (12, 0)},
        {"key_lengths": [33, 0]},
        {"mask": BIAS},
        {"mask": BIAS > -1},
        {"segments": (IDS[:, -T:], IDS)},
    ],
    ids=["causal", "window", "lengths", "bias", "bool mask", "segments"],
)
def test_hidden_keys_change_no_bit(options: dict[str, Any]) -> None:
    q, k = tensors()
    wild = torch.where(torch.arange(D) % 2 == 0, np.nan, np.inf)
    seen = reference.logits(q.numpy(), k.numpy(), **options) != -np.inf
    hidden = torch.from_numpy(~seen.any((1, 2)))[:, None]
    assert hidden.any()
    want = states(q, k, options)
    got = states(q, torch.where(hidden[..., None], wild, k), options)
    same_bits(got.sums, want.sums)
    same_bits(got.counts, want.counts)


def test_a_visible_nan_stays_in_the_rows_that_see_it() -> None:
    q, k = tensors()
    k[0, 0, 40], k[1, 0, 44] = np.nan, np.inf
    agrees(q, k, {"causal": True})
    got = states(q, k, {"causal": True})
    assert np.isnan(got.sums[0, 0, 4:, 0]).all() and (got.counts[0, 0, 4:, ARGMAX] == -1).all()
    assert not np.isnan(got.sums[:, :, :2]).any()


def test_rows_that_see_nothing() -> None:
    got = states(*tensors(), {"key_lengths": [0, 5], "query_start": -20, "causal": True})
    assert (got.counts[..., COUNT] == 0).all() and (got.counts[..., ARGMAX] == -1).all()
    want = lh.state.identity((B, H, T), None, np.float32)
    same_bits(got.sums, want.sums)
    for T_, S_ in ((0, 5), (5, 0)):
        q, k = tensors(T=T_, S=S_)
        agrees(q, k, {})


def test_the_first_of_equal_maxima_is_named() -> None:
    q, k = (torch.ones_like(x) for x in tensors())
    got = states(q, k, {"window": (20, 2)})
    assert (got.counts[0, 0, :, ARGMAX] == np.maximum(np.arange(T) + S - T - 20, 0)).all()


def test_huge_logits_and_biases_near_the_lowest_number() -> None:
    q, k = tensors()
    agrees(q * 300, k * 300, {"causal": True})
    low = np.where(BIAS < 0, np.float32(-2e38), 0.0).astype(np.float32)
    sums = states(q, k, {"mask": low}).sums
    want = reference.observe(q.numpy(), k.numpy(), mask=low).state.sums
    np.testing.assert_allclose(sums[..., :5], want[..., :5], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", [*OPTIONS] if SWEEP else ["causal", "bias", "log-n"])
@pytest.mark.parametrize("where", ["a query", "a key", "a tile", "everywhere"])
def test_a_product_of_minus_infinity_is_no_key(where: str, name: str) -> None:
    """As in the core: it weighs nothing, and no NaN comes of it."""
    q, k = tensors()
    if where == "a query":
        q[0, 0, 3, 0] = math.inf
    elif where == "a key":
        k[0, 0, 20, 0] = -math.inf
    else:
        q, k[:, :, : 32 if where == "a tile" else S, 0] = q.abs(), -math.inf
    agrees(q, k, OPTIONS[name])


def test_numbers_at_the_end_of_float32() -> None:
    q, k = tensors()
    assert np.isinf(rows_of(states(q * 1e10, k * 1e10, {}), {}).var).all()  # as the core's, of logits near 1e20
    agrees(q, k, {"softcap": 3e38})


def test_numbers_that_stand_in_for_minus_infinity() -> None:
    q, k = tensors()
    hard = np.where(np.isinf(BIAS), -np.inf, 0.0).astype(np.float32)
    numbers = np.where(np.arange(S) % 2 == 0, -1e4, np.finfo(np.float32).min)
    soft = np.where(np.isinf(BIAS), numbers, 0.0).astype(np.float32)
    got = states(q, k, {"mask": soft}, hiding=torch.tensor(-1e4, dtype=torch.float64))
    same_bits(got.sums, states(q, k, {"mask": hard}).sums)


# ---- parts of the work


@pytest.mark.parametrize("names", [("causal", "ALiBi"), ("window", "sinks"), ("key lengths", "log-n"), ("soft cap",)])
def test_key_ranges_join(names: tuple[str, ...]) -> None:
    agrees(*tensors(S=140), merged(names), parts=5)


def test_key_ranges_of_masks_and_segments_join() -> None:
    mask = np.concatenate([BIAS] * 3, -1)
    agrees(*tensors(S=135), {"mask": mask, "segments": (IDS[:, :T], np.concatenate([IDS] * 3, -1))}, parts=3)


def test_states_of_shards_merge_in_any_grouping() -> None:
    q, k = tensors(S=140)
    cuts = (0, 33, 64, 70, 140)
    parts = []
    for low, high in itertools.pairwise(cuts):
        first = torch.full((B, T), 0 if low == 0 else -1)
        part = states(q, k[:, :, low:high], {"causal": True, "query_start": 131 - low}, first_keys=first)
        parts.append(part)
    a, b, c, d = parts
    truth = reference.observe(q.numpy(), k.numpy(), causal=True).rows
    merge = reference.merge
    for whole in (merge(merge(merge(a, b), c), d), merge(a, merge(b, merge(c, d))), merge(merge(a, b), merge(c, d))):
        check_rows(rows_of(whole, {}), truth, M=8.0)


def test_some_rows_by_their_places() -> None:
    q, k = tensors(T=40)
    places = torch.tensor([0, 7, 8, 39])
    mask = torch.rand(B, 1, 40, S) < 0.7
    for options in ({"causal": True, "mask": mask.numpy()}, {"scale": "log-n", "causal": True}, {"alibi": True}):
        want = states(q, k, options)
        got = states(q, k, options, rows=places)
        np.testing.assert_allclose(got.sums, want.sums[:, :, places], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(got.counts, want.counts[:, :, places])
    own = torch.stack([places + b for b in range(B)]).clamp(max=39)
    got = states(q, k, {"scale": "log-n", "causal": True}, rows=own)
    for b in range(B):
        truth = states(q, k, {"scale": "log-n", "causal": True})
        np.testing.assert_array_equal(got.counts[b], truth.counts[b][:, own[b]])
        np.testing.assert_allclose(got.sums[b], truth.sums[b][:, own[b]], rtol=1e-5, atol=1e-5)


def test_first_keys_are_read_where_they_are() -> None:
    q, k = tensors(S=70)
    first = torch.tensor([[0, 3, 31, 32, 33, 64, 69, -1, 5]] * B)
    got = states(q, k, {"scale": 0.3}, first_keys=first).sums[..., FIRST] * np.log(2)
    logits = reference.logits(q.numpy(), k.numpy(), scale=0.3)
    want = np.take_along_axis(logits, np.maximum(first.numpy(), 0)[:, None, :, None], -1)[..., 0]
    np.testing.assert_allclose(got, np.where(first[:, None].numpy() < 0, -np.inf, want), atol=1e-5)

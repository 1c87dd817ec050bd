"""Same bits: for any number of threads, for a batch row or a kv group alone, for any memory layout of the same numbers,
for a second call. Equality here is of bits, never within tolerances.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import levelhead as lh
from levelhead import _core
from support import DTYPES, Array, isa, kind, qkv, same_bits, storage

__all__ = ["isa"]  # a fixture: pytest finds it by name

THREADS = (1, 2, 3, 7)

# (lead, T, S, D, kv heads): sizes that a scheduler may treat differently.
PROBLEMS = {
    "tiny": ((1, 1), 3, 5, 4, 1),
    "many short heads": ((6, 8), 12, 12, 16, 8),
    "many batch rows of one query": ((40, 2), 1, 9, 8, 1),
    "few long heads": ((1, 2), 300, 310, 16, 2),
    "one head": ((1, 1), 500, 260, 8, 1),
    "one row, many keys": ((1, 8), 1, 3000, 16, 2),
    "few rows, many keys": ((1, 4), 5, 1200, 8, 1),
    "uneven groups": ((2, 15), 14, 70, 8, 5),
    "wide values": ((2, 2), 20, 40, 144, 1),
}


def options_for(lead: tuple[int, ...], T: int, S: int) -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(0)
    B, H = lead
    return {
        "dense": {},
        "causal": dict(causal=True),
        "window": dict(window=(30, 5), sinks=np.linspace(-2, 2, H)),
        "bool mask": dict(mask=rng.random((1, T, S)) < 0.6),
        "float mask": dict(mask=rng.standard_normal((B, 1, T, S)).astype("f4"), softcap=4.0),
        "lengths": dict(key_lengths=rng.integers(0, S + 1, B), alibi=True),
        "query lengths": dict(query_lengths=rng.integers(0, T + 1, B), alibi=True),
        "segments": dict(segments=(rng.integers(0, 3, (B, T)), rng.integers(0, 3, (B, S)))),
        "starts": dict(query_start=rng.integers(-T, S, B), causal=True, scale="log-n"),
    }


def problem(name: str, dtype: str = "float32") -> tuple[Array, Array, Array]:
    lead, T, S, D, G = PROBLEMS[name]
    return qkv(lead, T, S, D, groups=G, dtype=dtype, seed=len(name))


def everything(q: Array, k: Array, v: Array, **options: Any) -> list[Array]:
    """The output, and the whole state behind the statistics."""
    state = lh.observe(q, k, v, **options).state
    assert state.acc is not None
    return [lh.attention(q, k, v, **options), state.sums, state.counts, state.acc]


# ---- threads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_any_number_of_threads(isa: str, name: str, dtype: str) -> None:
    q, k, v = problem(name, dtype)
    lead, T, S, *_ = PROBLEMS[name]
    turn = DTYPES.index(dtype)
    chosen = list(options_for(lead, T, S).values())
    for options in (*chosen[turn::4], dict(dropout=0.25, seed=5, causal=True)):
        alone, *others = (everything(q, k, v, threads=n, **options) for n in THREADS)
        for result in others:
            for a, b in zip(alone, result, strict=True):
                same_bits(a, b)


BIG = {
    "one long head": ((1, 1), 1300, 1300, 32, 1),
    "many heads": ((2, 16), 96, 96, 64, 4),
    "one row, very many keys": ((1, 8), 1, 20_000, 32, 2),
    "one head, one row, very many keys": ((1, 1), 1, 60_000, 32, 1),
}


@pytest.mark.parametrize("name", BIG)
def test_any_number_of_threads_where_threads_are_worth_it(isa: str, name: str) -> None:
    lead, T, S, D, G = BIG[name]
    q, k, v = qkv(lead, T, S, D, groups=G)
    alone, *others = (lh.attention(q, k, v, causal=True, threads=n) for n in THREADS)
    for result in others:
        same_bits(result, alone)


def test_statistics_without_values_for_any_number_of_threads(isa: str) -> None:
    for name in PROBLEMS:
        q, k, _ = problem(name)
        states = [lh.observe(q, k, causal=True, threads=n).state for n in THREADS]
        for state in states[1:]:
            same_bits(state.sums, states[0].sums)
            same_bits(state.counts, states[0].counts)


# ---- company


def own(options: dict[str, Any], b: int, B: int) -> dict[str, Any]:
    """The options of batch row b alone."""
    mine = dict(options)
    for name in ("key_lengths", "query_lengths", "query_start"):
        if name in mine:
            mine[name] = mine[name][b : b + 1]
    if "segments" in mine:
        mine["segments"] = tuple(ids[b : b + 1] for ids in mine["segments"])
    if "mask" in mine and mine["mask"].ndim == 4 and len(mine["mask"]) == B:
        mine["mask"] = mine["mask"][b : b + 1]
    return mine


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_batch_row_alone(isa: str, name: str) -> None:
    lead, T, S, D, G = PROBLEMS[name]
    lead = (max(lead[0], 3), lead[1])
    for turn, options in enumerate(options_for(lead, T, S).values()):
        q, k, v = qkv(lead, T, S, D, groups=G, dtype=DTYPES[turn % 4], seed=turn)
        whole = everything(q, k, v, **options)
        for b in {0, 1, lead[0] - 1}:
            row = slice(b, b + 1)
            alone = everything(q[row], k[row], v[row], threads=1, **own(options, b, lead[0]))
            for a, together in zip(alone, whole, strict=True):
                same_bits(a, together[row])


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_kv_group_alone(isa: str, name: str) -> None:
    lead, T, S, D, G = PROBLEMS[name]
    ratio, G = lead[1] // G, max(G, 3)
    lead = (lead[0], ratio * G)
    sinks, slopes = np.linspace(-3, 3, lead[1]), np.linspace(0, 0.5, lead[1])
    scale = np.linspace(0.1, 1, lead[1])
    for turn, options in enumerate(({}, dict(causal=True), dict(window=(40, None)), dict(softcap=3.0))):
        q, k, v = qkv(lead, T, S, D, groups=G, dtype=DTYPES[turn], seed=turn)
        whole = everything(q, k, v, sinks=sinks, alibi=slopes, scale=scale, **options)
        for g in {0, 1, G - 1}:
            heads, group = slice(g * ratio, (g + 1) * ratio), slice(g, g + 1)
            alone = everything(
                q[:, heads],
                k[:, group],
                v[:, group],
                sinks=sinks[heads],
                alibi=slopes[heads],
                scale=scale[heads],
                threads=2,
                **options,
            )
            for a, together in zip(alone, whole, strict=True):
                same_bits(a, together[:, heads])


def test_the_batch_may_have_any_rank(isa: str) -> None:
    q, k, v = qkv((12, 4), 9, 30, D=8, groups=2)
    whole = lh.attention(q, k, v, causal=True)
    for batch in ((3, 4), (2, 3, 2), (1, 12, 1), (12,)):
        q2, k2, v2 = (x.reshape(*batch, *x.shape[1:]) for x in (q, k, v))
        same_bits(lh.attention(q2, k2, v2, causal=True).reshape(whole.shape), whole)
    head = lh.attention(q[0, 1], k[0, 0], v[0, 0], causal=True)
    same_bits(head, lh.attention(q[0, 1:2], k[0, :1], v[0, :1], causal=True)[0])


# ---- memory


def layouts(x: Array) -> dict[str, Array]:
    """The same numbers at another address, in another layout."""
    n = x.ndim
    steps = np.zeros([2 * size for size in x.shape], x.dtype)
    steps[(slice(None, None, 2),) * n] = x
    padded = np.zeros((*x.shape[:-1], x.shape[-1] + 3), x.dtype)
    padded[..., 1:-2] = x
    shifted = np.zeros(x.nbytes + 1, np.uint8)[1:]
    misaligned = shifted.view(x.dtype).reshape(x.shape)
    misaligned[:] = x
    odd = np.zeros(x.size + 1, x.dtype)[1:].reshape(x.shape)
    odd[:] = x
    frozen = x.copy()
    frozen.flags.writeable = False
    return {
        "every other": steps[(slice(None, None, 2),) * n],
        "padded rows": padded[..., 1:-2],
        "backwards": np.ascontiguousarray(x[..., ::-1, ::-1])[..., ::-1, ::-1],
        "backwards heads": np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
        "tokens before heads": np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
        "columns first": np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
        "Fortran": np.asfortranarray(x),
        "misaligned": misaligned,
        "off by one element": odd,
        "read-only": frozen,
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", layouts(np.zeros((1, 1, 1, 1))))
def test_any_layout(isa: str, layout: str, dtype: str) -> None:
    for T, S, D in ((7, 33, 8), (50, 70, 19), (1, 40, 64)):
        q, k, v = qkv((2, 4), T, S, D, groups=2, dtype=dtype)
        whole = lh.attention(q, k, v, causal=True)
        given = [layouts(x)[layout] for x in (q, k, v)]
        for x, y in zip(given, (q, k, v), strict=True):
            same_bits(np.ascontiguousarray(x), y)
        same_bits(lh.attention(*given, causal=True), whole)
        for turn in range(3):
            mixed = [x if turn == i else y for i, (x, y) in enumerate(zip(given, (q, k, v)))]  # noqa: B905
            same_bits(lh.attention(*mixed, causal=True), whole)


@pytest.mark.parametrize("layout", layouts(np.zeros((1, 1, 1, 1))))
def test_any_layout_of_the_mask(isa: str, layout: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = qkv((2, 2), 21, 50, D=8)
    for mask in (rng.random((2, 2, 21, 50)) < 0.5, rng.standard_normal((2, 2, 21, 50))):
        mask = mask if mask.dtype == bool else mask.astype("f4")
        whole = lh.attention(q, k, v, mask=mask)
        same_bits(lh.attention(q, k, v, mask=layouts(mask)[layout]), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stride_zero(isa: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    shape = (2, 3, 20, 12)
    for small in ((1, 1, 20, 12), (2, 1, 20, 12), (1, 3, 1, 12), (2, 3, 20, 1), (1, 1, 1, 1)):
        x = np.broadcast_to(rng.standard_normal(small).astype(kind(dtype)), shape)
        solid = x.copy()
        same_bits(lh.attention(x, x, x), lh.attention(solid, solid, solid))


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_has_the_bits_of_a_fresh_result(isa: str, dtype: str) -> None:
    for T, S, E in ((6, 17, 5), (40, 33, 16), (1, 600, 24)):
        q, k, v = qkv((2, 3), T, S, 8, E, dtype=dtype)
        whole = lh.attention(q, k, v, causal=True)
        for out in layouts(np.full(whole.shape, 3, whole.dtype)).values():
            if not (out.flags.writeable and out.flags.aligned):
                continue
            assert lh.attention(q, k, v, causal=True, out=out) is out
            same_bits(out.copy(order="C"), whole)


def test_the_core_itself_reads_what_is_misaligned_or_read_only(isa: str) -> None:
    # The front door copies misaligned arrays; the core must not depend on the vector alignment
    # of aligned ones, so elements are shifted one by one through a cache line.
    q, k, v = qkv((3,), 13, 37, D=16)
    whole = np.empty_like(q)
    options = dict(scale=np.full(3, 0.25), query_start=np.array([24]), threads=1)
    _core.forward(q, k, v, out=whole, **options)
    for shift in range(1, 17):
        moved = []
        for x in (q, k, v):
            room = np.zeros(x.size + shift, x.dtype)
            room[shift:] = x.ravel()
            room.flags.writeable = False
            moved.append(room[shift:].reshape(x.shape))
        out = np.zeros(whole.size + shift, whole.dtype)[shift:].reshape(whole.shape)
        _core.forward(*map(storage, moved), out=out, **options)
        same_bits(out, whole)


# ---- time


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_second_call(isa: str, name: str) -> None:
    q, k, v = problem(name)
    before = [x.copy() for x in (q, k, v)]
    first = everything(q, k, v, causal=True, dropout=0.1, seed=1)
    lh.attention(*qkv((3, 5), 41, 99, D=32, dtype="float64"))  # leaves other numbers in the memory
    for a, b in zip(first, everything(q, k, v, causal=True, dropout=0.1, seed=1), strict=True):
        same_bits(a, b)
    for a, b in zip(before, (q, k, v), strict=True):
        same_bits(a, b)


def shifted(x: Array, numbers: int, width: int) -> Array:
    """The same numbers, so many after the beginning of a cache line, rows `width` apart, among NaN."""
    rows = x.reshape(-1, x.shape[-1])
    line = 64 // x.itemsize
    room = np.full((len(rows) + 2) * width + 2 * line, np.nan, x.dtype)
    begin = -room.ctypes.data // x.itemsize % line + line + numbers
    strides = (*(s // x.itemsize * width // x.shape[-1] * x.itemsize for s in x.strides[:-1]), x.itemsize)
    view = np.lib.stride_tricks.as_strided(room[begin:], x.shape, strides)
    view[...] = x
    return view


@pytest.mark.parametrize("T", [1, 2, 3, 8])
@pytest.mark.parametrize("D", [16, 48, 128, 144])
def test_a_few_rows_have_the_same_bits_wherever_keys_and_values_begin(isa: str, T: int, D: int) -> None:
    """Read in place: aligned or not, side by side or with numbers between them that are none of theirs."""
    q, k, v = qkv((2, 2), T, 600, D)
    truth = lh.attention(q, shifted(k, 0, D), shifted(v, 0, D))
    for numbers in range(16):
        for width in (D, D + 16, D + 3):
            same_bits(lh.attention(q, shifted(k, numbers, width), shifted(v, (3 * numbers) % 16, width)), truth)

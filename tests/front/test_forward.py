"""The output of the forward pass against the float64 reference, on every instruction set: sizes
around tiles, dtypes, grouped heads, every option alone and in pairs, positions given as runs; and
the accuracy number against PyTorch's own kernel."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import levelhead as lh
from levelhead import _core, reference
from levelhead.call import options as scoring
from levelhead.call import scaling
from levelhead.call.prepare import for_core
from support import DTYPES, ISAS, LENGTHS, WIDTHS, Array, agree, kind, on_every_isa, qkv, same_bits, storage


def run(q: Array, k: Array, v: Array, **options: Any) -> None:
    agree(q, k, v, lambda: lh.attention(q, k, v, **options), **options)


# ---- sizes


def test_every_built_path_that_the_cpu_has_is_tested() -> None:
    info = _core.info()
    assert set(ISAS) <= set(info["built"])
    assert "baseline" in ISAS
    assert info["isa"] in ISAS


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T", LENGTHS)
def test_lengths_around_tiles(T: int, causal: bool) -> None:
    for S in LENGTHS:
        # Long by long takes the most time and tests the least; the next test has it.
        if T * S < 2**15:
            run(*qkv((1,), T, S, D=5, E=9, seed=T + 1000 * S), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("T", "S"), [(1030, 17), (17, 1030), (512, 513), (97, 1030), (1030, 64)])
def test_long_lengths(T: int, S: int, causal: bool) -> None:
    run(*qkv((2,), T, S, D=16, groups=1, seed=T + S), causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 513), (5, 7), (33, 31), (97, 65), (13, 512)])
def test_lengths_in_every_dtype(T: int, S: int, dtype: str) -> None:
    for causal in (False, True):
        run(*qkv((2, 3), T, S, D=17, groups=1, dtype=dtype, seed=T), causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", WIDTHS)
def test_widths_of_keys_and_values(D: int, dtype: str) -> None:
    for E in WIDTHS:
        run(*qkv((1,), 7, 19, D, E, dtype=dtype, seed=D + E))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("D", "E"), [(192, 128), (576, 512), (128, 128), (80, 80), (1, 576)])
def test_widths_of_models_at_some_length(D: int, E: int, dtype: str) -> None:
    run(*qkv((2,), 34, 130, D, E, groups=1, dtype=dtype), causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "G"), [(1, 1), (4, 4), (8, 2), (8, 1), (6, 3), (65, 5), (27, 1), (12, 4), (3, 3)])
def test_grouped_heads(H: int, G: int, dtype: str) -> None:
    for T, S in ((1, 70), (3, 17), (20, 33)):
        run(*qkv((2, H), T, S, D=16, E=12, groups=G, dtype=dtype, seed=H), causal=T > 1)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (2, 3, 2, 2), (1, 2, 1, 2, 3)], ids=str)
def test_ranks(lead: tuple[int, ...]) -> None:
    q, k, v = qkv(lead, 9, 21)
    run(q, k, v, causal=True)
    H = lead[-1] if lead else 1
    sinks, rng = np.linspace(-1, 1, H), np.random.default_rng(1)
    lengths = rng.integers(0, 22, lead[:-1])
    run(q, k, v, sinks=sinks, key_lengths=lengths, mask=rng.random((9, 21)) < 0.5)


def test_leading_dimensions_that_do_not_collapse() -> None:
    # Sliced and swapped so that no two leading strides form one axis, nor agree among q, k, v.
    rng = np.random.default_rng(0)
    q = rng.standard_normal((4, 5, 3, 4, 11, 8)).astype("f4")[::2, ::2, :, ::2].swapaxes(0, 1)
    k = rng.standard_normal((3, 2, 3, 23, 9, 8)).astype("f4")[:, :, :, :, ::8].transpose(0, 1, 2, 4, 3, 5)
    v = np.broadcast_to(rng.standard_normal((3, 1, 3, 1, 23, 6)).astype("f4"), (3, 2, 3, 2, 23, 6))
    assert q.shape == (3, 2, 3, 2, 11, 8)
    assert k.shape == (3, 2, 3, 2, 23, 8)
    mask = rng.random((2, 3, 1, 11, 23)).astype("f4")
    for options in ({}, {"causal": True, "mask": mask}):
        run(q, k, v, **options)
    lengths = rng.integers(0, 24, (2, 1))
    run(q, k, v, key_lengths=lengths, query_start=lengths - 11, causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_of_any_layout(dtype: str) -> None:
    q, k, v = qkv((2, 3), 13, 18, D=8, E=5, dtype=dtype)
    room = np.full((2, 13, 2, 3, 12), 7, kind(dtype))
    layouts = {
        "plain": np.full((2, 3, 13, 5), 7, kind(dtype)),
        "tokens before heads": room[:, :, 0, :, :5].swapaxes(1, 2),
        "every other column, backwards": room[:, :, 1, :, 9::-2].swapaxes(1, 2)[:, ::-1],
        "Fortran": np.full((5, 13, 3, 2), 7, kind(dtype)).T,
    }
    for out in layouts.values():

        def call(out: Array = out) -> Array:
            assert lh.attention(q, k, v, causal=True, out=out) is out
            return out.copy()

        agree(q, k, v, call, causal=True)
    untouched = np.ones(room.shape, bool)
    untouched[:, :, 0, :, :5] = untouched[:, :, 1, :, 9::-2] = False
    assert (room[untouched].astype(float) == 7).all()


# ---- options, alone and in pairs

B, H, G, T, S, D, E = 2, 4, 2, 37, 70, 16, 20


def options_by_name() -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(5)
    full = (B, H, T, S)
    hole = rng.random(full) < 0.7
    bias = rng.standard_normal(full).astype("f4")
    some = np.where(rng.random((T, S)) < 0.8, bias[0, 0], -np.inf).astype("f4")
    ids = np.sort(rng.integers(0, 4, (B, S)), axis=-1)
    return {
        "number": dict(scale=0.7),
        "negative": dict(scale=-0.4),
        "zero": dict(scale=0.0),
        "per head": dict(scale=np.linspace(-0.5, 1.0, H)),
        "unscaled": dict(scale="none"),
        "by width": dict(scale="1/d_k"),
        "by model width": dict(scale="1/sqrt(d)"),
        "cosine": dict(scale="cosine"),
        "cosine with a factor": dict(scale=scaling.rule("cosine", factor=7.0)),
        "log-n": dict(scale="log-n"),
        "softcap": dict(softcap=1.5),
        "bool mask": dict(mask=hole),
        "bool mask for all": dict(mask=hole[0, 0]),
        "float mask": dict(mask=bias),
        "float mask that hides": dict(mask=some),
        "causal": dict(causal=True),
        "start": dict(query_start=11),
        "start before the keys": dict(query_start=-9),
        "start after the keys": dict(query_start=S + 5),
        "start per row": dict(query_start=np.array([-20, 40])),
        "window": dict(window=(9, 4)),
        "left window": dict(window=(17, None)),
        "right window": dict(window=(None, 0)),
        "diagonal": dict(window=(0, 0)),
        "lengths": dict(key_lengths=np.array([S, 33])),
        "no keys in one row": dict(key_lengths=np.array([0, 64])),
        "query lengths": dict(query_lengths=np.array([T, 11])),
        "no queries in one row": dict(query_lengths=np.array([0, 30])),
        "segments": dict(segments=(ids[:, -T:], ids)),
        "scattered segments": dict(segments=(rng.integers(0, 3, T), rng.integers(0, 3, S))),
        "keys of one segment": dict(segments=(rng.integers(0, 2, T), np.zeros(S, int))),
        "alibi": dict(alibi=True),
        "slopes": dict(alibi=np.array([0.5, -0.1, 0.0, 2.0])),
        "sinks": dict(sinks=np.array([0.0, 3.0, -np.inf, -2.0])),
        "dropout": dict(dropout=0.3, seed=2**63 + 5),
    }


OPTIONS = options_by_name()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_alone(name: str, dtype: str) -> None:
    run(*qkv((B, H), T, S, D, E, groups=G, dtype=dtype, seed=3), **OPTIONS[name])
    if "causal" not in OPTIONS[name]:
        q, k, v = qkv((B, H), T, S, D, E, groups=G, dtype=dtype, seed=4)
        run(q, k, v, causal=True, **OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_options_in_pairs(name: str) -> None:
    later = list(OPTIONS)[list(OPTIONS).index(name) + 1 :]
    for turn, other in enumerate(later):
        if OPTIONS[name].keys().isdisjoint(OPTIONS[other]):
            q, k, v = qkv((B, H), T, S, D, E, groups=G, dtype=DTYPES[turn % 4], seed=turn)
            run(q, k, v, **OPTIONS[name], **OPTIONS[other])


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_options_at_once(dtype: str) -> None:
    names = ("per head", "softcap", "causal", "start per row", "window", "lengths")
    names += ("scattered segments", "alibi", "sinks", "dropout")
    together = {key: value for name in names for key, value in OPTIONS[name].items()}
    for mask in ("bool mask", "float mask", "float mask that hides"):
        q, k, v = qkv((B, H), T, S, D, E, groups=G, dtype=dtype)
        run(q, k, v, **together, **OPTIONS[mask])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_float_mask_in_the_dtype_of_q(dtype: str) -> None:
    mask = np.array(OPTIONS["float mask that hides"]["mask"], kind(dtype))
    run(*qkv((B, H), T, S, D, E, groups=G, dtype=dtype), mask=mask)


FULL = (B, 3, T, S)
MASK_SHAPES = [
    shape[drop:]
    for shape in itertools.product(*((1, n) for n in FULL))
    for drop in range(5)
    if all(n == 1 for n in shape[:drop])
]


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_masks_of_every_broadcastable_shape(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(shape))
    q, k, v = qkv((B, 3), T, S, D=8)
    for mask in (rng.random(shape) < 0.6, rng.standard_normal(shape).astype("f4")):
        run(q, k, v, mask=mask)
        run(q, k, v, mask=mask, causal=True, softcap=2.0)


def strided_masks(rng: np.random.Generator) -> dict[str, Array]:
    room = rng.standard_normal((2 * S, 3, 2 * T)).astype("f4")
    return {
        "transposed": room[:S, :, :T].transpose(1, 2, 0),
        "backwards": room[:S, :, :T].transpose(1, 2, 0)[::-1, ::-1, ::-1],
        "every other": room[::2, :, 1::2].transpose(1, 2, 0),
        "broadcast": np.broadcast_to(room[0, :, None, :S], (3, T, S)),
    }


@pytest.mark.parametrize("layout", strided_masks(np.random.default_rng(0)))
def test_masks_of_any_strides(layout: str) -> None:
    mask = strided_masks(np.random.default_rng(2))[layout]
    q, k, v = qkv((B, 3), T, S, D=8)
    for given in (mask, mask > 0, np.where(mask > 0, mask, -np.inf)):
        run(q, k, v, mask=given)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_visible_key_at_every_place(dtype: str) -> None:
    # The output must be its value exactly, wherever it is among hidden keys that are skipped.
    q, k, v = qkv((70,), 3, 70, D=4, groups=1, dtype=dtype)
    one = np.eye(70, dtype=bool)
    ways = (
        dict(mask=one[:, None, :]),
        dict(mask=np.where(one, 0.0, -np.inf).astype("f4")[:, None, :]),
        dict(mask=np.where(one, 0.0, -np.inf).astype(kind(dtype))[:, None, :]),
    )
    for options in ways:
        for _, out in on_every_isa(lambda o=options: lh.attention(q, k, v, **o)):
            same_bits(out, np.repeat(v[0][:, None], 3, axis=1))
    q, k, v = qkv((1,), 70, 70, D=4, dtype=dtype)
    order = np.random.default_rng(0).permutation(70)
    ways = (
        dict(mask=one[order]),
        dict(segments=(order, np.arange(70))),
        dict(window=(0, 0), mask=one),
        dict(segments=(np.arange(70), np.argsort(order))),
    )
    for options, picked in zip(ways, (order, order, np.arange(70), order), strict=True):
        for _, out in on_every_isa(lambda o=options: lh.attention(q, k, v, **o)):
            same_bits(out, v[:, picked])


@pytest.mark.parametrize("masked", ["bool", "float"])
def test_visible_intervals_of_every_kind(masked: str) -> None:
    rng = np.random.default_rng(9)
    H = 60
    q, k, v = qkv((H,), 14, 100, D=4, groups=1)
    ends = np.sort(rng.integers(0, 101, (2, H, 1, 1)), axis=0)
    ends[:, H // 2 :, :, :] = ends[:, H // 2 :, :, :] // 16 * 16  # half of them on whole panels
    j = np.arange(100)
    seen = (j >= ends[0]) & (j < ends[1])
    ragged = seen & (rng.random((H, 14, 1)) < 0.5)  # rows without visible keys among others
    for mask in (seen, ragged, seen & (j % 7 > 0), ~seen):
        given = mask if masked == "bool" else np.where(mask, 0.5, -np.inf).astype("f4")
        run(q, k, v, mask=given)


LONG = 1300


def long_options() -> dict[str, dict[str, Any]]:
    """Options that hide most of many keys, so that whole tiles are skipped."""
    rng = np.random.default_rng(2)
    blocks = rng.random((30, LONG // 50)) < 0.15
    islands = np.repeat(blocks, 50, axis=-1)
    late = np.arange(LONG) >= 1180
    ids = np.sort(rng.integers(0, 25, LONG))
    return {
        "all": {},
        "causal from the middle": dict(causal=True, query_start=600),
        "window at the front": dict(window=(40, 10), query_start=20),
        "window across the middle": dict(window=(9, 200), query_start=480),
        "window at the end": dict(window=(300, 0)),
        "short": dict(key_lengths=np.array(13)),
        "just past the middle": dict(key_lengths=np.array(513)),
        "islands": dict(mask=islands),
        "islands of bias": dict(mask=np.where(islands, 1.0, -np.inf).astype("f4")),
        "late": dict(mask=late),
        "early": dict(mask=~late & (np.arange(LONG) < 7)),
        "packed": dict(segments=(np.sort(rng.integers(0, 25, 30)), ids)),
        "packed in disorder": dict(segments=(rng.integers(0, 25, 30), rng.permutation(ids))),
        "packed long": dict(segments=(rng.integers(0, 3, 30), np.arange(LONG) // 600)),
        "rare id": dict(segments=(np.full(30, 3), np.where(np.arange(LONG) % 400 == 399, 3, 8))),
    }


@pytest.mark.parametrize("name", long_options())
def test_long_keys_of_which_few_are_seen(name: str) -> None:
    for turn, dtype in enumerate(DTYPES):
        q, k, v = qkv((2, 2), 30, LONG, D=8, groups=1, dtype=dtype, seed=turn)
        extra = {} if turn % 2 else dict(sinks=np.array([-1.0, 1.0]), alibi=np.full(2, 1e-3))
        run(q, k, v, **long_options()[name], **extra)


@pytest.mark.parametrize("window", [None, (5, 3), (None, 2), (16, None), (0, 0)])
def test_query_start_from_before_to_after_all_keys(window: Any) -> None:
    q, k, v = qkv((1, 2), 7, 33, D=4)
    for start in range(-12, 42):
        run(q, k, v, query_start=start, window=window, causal=start % 2 == 0)


def test_key_lengths_of_every_size() -> None:
    q, k, v = qkv((34, 1), 3, 33, D=4)
    run(q, k, v, key_lengths=np.arange(34))
    run(q, k, v, key_lengths=np.arange(34), query_start=np.arange(34) - 3, causal=True)


def test_query_lengths_of_every_size() -> None:
    q, k, v = qkv((34, 2), 33, 20, 8, 4)
    run(q, k, v, query_lengths=np.arange(34))
    run(q, k, v, query_lengths=np.arange(34), query_start=np.arange(34) - 3, causal=True)


def test_packed_sequences_from_cumulative_lengths() -> None:
    ids = scoring.segment_ids([0, 1, 1, 18, 50, 64], total=70)
    q, k, v = qkv((2, 2), 70, 70, D=8)
    run(q, k, v, segments=ids, causal=True)
    apart = [
        lh.attention(q[..., a:b, :], k[..., a:b, :], v[..., a:b, :], causal=True)
        for a, b in ((0, 1), (1, 18), (18, 50), (50, 64))
    ]
    whole = lh.attention(q, k, v, segments=ids, causal=True)[..., :64, :]
    np.testing.assert_allclose(whole, np.concatenate(apart, axis=-2), atol=3e-6)


def test_dropout_is_the_hash_of_seed_and_positions() -> None:
    q, k, v = qkv((2, 3), 20, 50, D=8)
    one, again, other = (lh.attention(q, k, v, dropout=0.5, seed=s) for s in (7, 7, 8))
    assert (one == again).all()
    assert (one != other).any()
    for rate in (1e-9, 0.1, 0.9, 1 - 2**-20):
        run(q, k, v, dropout=rate, seed=0)
    run(q, k, v, dropout=0.5, seed=2**64 - 1, query_start=-(2**40))


# ---- positions as runs, a private door

RUNS: dict[str, Callable[[int], list[tuple[int, int, int]]]] = {
    "plain": lambda n: [(0, n, 1)],
    "shard": lambda n: [(3 * n, n, 1)],
    "before zero": lambda n: [(-n // 2, n, 1)],
    "striped": lambda n: [(1, n, 4)],
    "stripes through zero": lambda n: [(-8, n, 4)],
    "stripes past zero": lambda n: [(-7, n, 3)],
    "two stripes": lambda n: [(0, n // 2, 2), (1, n - n // 2, 2)],
    "zigzag": lambda n: [(0, n // 2, 1), (3 * n, n - n // 2, 1)],
    "late piece first": lambda n: [(n - n // 3, n // 3, 1), (0, n - n // 3, 1)],
    "backwards": lambda n: [(n - 1, n, -1)],
    "backwards in pieces": lambda n: [(n - 1, n // 2, -1), (2 * n, n - n // 2, -2)],
    "many": lambda n: [(5 * i, 1, 1) for i in range(n)],
    "empty pieces": lambda n: [(99, 0, 1), (0, n, 1), (5, 0, 3)],
    "far": lambda n: [(2**40, n // 2, 1), (2**41, n - n // 2, 3)],
    "far stripes": lambda n: [(-(2**59), n, 2**54)],
}


def forward_at(q: Array, k: Array, v: Array, queries: Any, keys: Any, **options: Any) -> tuple[Array, Array, Array]:
    """output, sums and counts of the core for given positions."""
    shape = scoring.shape_of(q.shape, k.shape, v.shape)
    scored = scoring.describe(shape, dtype_name=q.dtype.name, **options)
    out = np.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    wide = np.float64 if q.dtype == np.float64 else np.float32
    sums, counts = np.empty((*q.shape[:-1], 8), wide), np.empty((*q.shape[:-1], 2), np.int64)
    memory = map(storage, (q, k, v))
    given = for_core(scored, shape) | dict(query_runs=queries, key_runs=keys, threads=2)
    if scored.query_segments is not None:  # the core takes places of keys here, not positions
        positions = np.concatenate([start + step * np.arange(n) for start, n, step in keys])
        mine = scored.query_segments[:, :, None] == scored.key_segments[:, None, :]
        first = np.where(mine, positions, np.iinfo(np.int64).max).argmin(-1)
        given["first_keys"] = np.where(mine.any(-1), first, -1)
    _core.forward(*memory, out=storage(out), sums=sums, counts=counts, **given)
    return out, sums, counts


@pytest.mark.parametrize("keys", RUNS)
@pytest.mark.parametrize("queries", RUNS)
def test_positions_given_as_runs(queries: str, keys: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = qkv((2, 2), 29, 41, D=8, groups=1, dtype=DTYPES[len(queries + keys) % 4])
    at = dict(query_runs=RUNS[queries](29), key_runs=RUNS[keys](41))
    for options in (
        dict(causal=True, query_start=0),
        dict(window=(20, 9), query_start=np.array([3, -7]), sinks=np.array([0.5, -1.0])),
        dict(causal=True, window=(64, None), mask=rng.random((29, 41)) < 0.8, softcap=3.0),
        dict(key_lengths=np.array([41, 17]), query_start=0, dropout=0.4, seed=9),
        dict(query_lengths=np.array([23, 9]), causal=True),
        dict(segments=(rng.integers(0, 2, 29), rng.integers(0, 2, 41)), causal=True),
        {} if "far" in queries + keys else dict(alibi=np.array([2e-3, -1e-3]), query_start=1),
    ):
        truth = reference.observe(q, k, v, **options, **at)
        agree(q, k, v, lambda o=options: forward_at(q, k, v, *at.values(), **o)[0], **options, **at)
        for _, (_, sums, counts) in on_every_isa(lambda o=options: forward_at(q, k, v, *at.values(), **o)):
            np.testing.assert_array_equal(counts, truth.state.counts)
            np.testing.assert_allclose(sums, truth.state.sums, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("runs", [[(-(2**61), 3, 2**61)], [(0, 1, 2**62)], []], ids=str)
def test_the_farthest_positions_are_seen(runs: list[tuple[int, int, int]]) -> None:
    S = sum(length for _, length, _ in runs)
    q, k, v = qkv((1, 2), 5, S, D=8)
    for _, (_, _, counts) in on_every_isa(lambda: forward_at(q, k, v, [(0, 5, 1)], runs)):
        np.testing.assert_array_equal(counts[..., 0], S)


# ---- the accuracy number


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_as_exact_as_pytorch(dtype: str, D: int, causal: bool) -> None:
    ours: dict[str, list[Array]] = {isa: [] for isa in ISAS}
    theirs = []
    for seed in range(3):
        # Eight heads: with fewer, the largest error is that of one unlucky element.
        q, k, v = qkv((1, 8), 512, 512, D, dtype=dtype, seed=seed)
        truth = reference.attention(q, k, v, causal=causal)
        tensors = [torch.from_numpy(x.astype("f4")).to(getattr(torch, dtype)) for x in (q, k, v)]
        peer = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)
        theirs.append(peer.double().numpy() - truth)
        for isa, out in on_every_isa(lambda a=(q, k, v): lh.attention(*a, causal=causal)):
            ours[isa].append(out - truth)
    rms, largest = _size(theirs)
    for isa, errors in ours.items():
        assert _size(errors)[0] <= 1.05 * rms, isa
        assert _size(errors)[1] <= 1.25 * largest, isa


def _size(errors: list[Array]) -> tuple[float, float]:
    """Root mean square and maximum."""
    error = np.stack(errors)
    return float(np.sqrt((error**2).mean())), float(np.abs(error).max())

"""`levelhead.jax.attention` and `observe` beside those for NumPy on the same arrays: the same bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import levelhead as lh
from jax_calls import OPTIONS, E, H, S, T, arrays, learned, loss_of, numpy_gradients
from support import DTYPES, Array, qkv

lj = lh.jax


def upstream(shape: tuple[int, ...]) -> tuple[Array, Array]:
    rng = np.random.default_rng(3)
    return rng.standard_normal(shape).astype(np.float32), rng.standard_normal(shape[:-1]).astype(np.float32)


def assert_same_rows(ours: Any, theirs: Any) -> None:
    for name in lh.stats.Rows.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(ours.rows, name), getattr(theirs.rows, name), err_msg=name)


@pytest.mark.parametrize("name", OPTIONS)
def test_output_statistics_and_gradients_have_the_bits_of_the_numpy_front(name: str) -> None:
    q, k, v = arrays()
    options, dout, dlse = OPTIONS[name], *upstream((*q.shape[:-1], E))
    moved = {"q": q, "k": k, "v": v} | learned(options)

    @jax.jit
    def step(moved: Any) -> Any:
        def loss(moved: Any) -> Any:
            named = {name: moved[name] for name in moved if name not in "qkv"}
            seen = lj.observe(moved["q"], moved["k"], moved["v"], **options | named)
            return loss_of(seen, dout, dlse), seen

        (_, seen), gradients = jax.value_and_grad(loss, has_aux=True)(moved)
        return seen, gradients

    seen, gradients = step(moved)
    theirs = lh.observe(q, k, v, **options)
    assert np.array_equal(seen.output, theirs.output)
    np.testing.assert_allclose(seen.logsumexp, theirs.logsumexp, rtol=3e-7)
    assert_same_rows(seen, theirs)
    expected = numpy_gradients(q, k, v, dout, dlse, options, tuple(moved), seen.logsumexp)
    for moved_name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, expected[moved_name].astype(np.float32), err_msg=moved_name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_every_dtype(dtype: str, bias: bool) -> None:
    with jax.enable_x64(dtype == "float64"):
        q, k, v = arrays(dtype)
        dout, dlse = upstream((*q.shape[:-1], E))
        options: dict[str, Any] = {"causal": True} | ({"mask": OPTIONS["bias"]["mask"].astype(q.dtype)} if bias else {})
        moved = {"q": q, "k": k, "v": v} | ({"mask": options["mask"]} if bias else {})

        def loss(moved: Any) -> Any:
            seen = lj.observe(moved["q"], moved["k"], moved["v"], causal=True, mask=moved.get("mask"))
            return loss_of(seen, dout, dlse), seen

        (_, seen), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(jax.tree.map(jnp.asarray, moved))
        theirs = lh.observe(q, k, v, **options)
        assert seen.output.dtype == q.dtype and np.array_equal(seen.output, theirs.output)
        assert_same_rows(seen, theirs)
        for name, expected in numpy_gradients(q, k, v, dout, dlse, options, tuple(moved), seen.logsumexp).items():
            assert gradients[name].dtype == q.dtype
            np.testing.assert_array_equal(gradients[name], expected.astype(q.dtype), err_msg=name)


@pytest.mark.parametrize("rank", [2, 3, 5])
@pytest.mark.parametrize("layout", ["BNTH", "BTNH"])
def test_every_rank_in_both_layouts(rank: int, layout: Any) -> None:
    lead: tuple[int, ...] = {2: (), 3: (H,), 5: (2, 3, H)}[rank]
    q, k, v = qkv(lead, T, S, 8, E, groups=None if rank == 2 else 2)
    turn = (lambda x: np.swapaxes(x, -2, -3)) if layout == "BTNH" and rank > 2 else (lambda x: x)
    dout, _ = upstream((*q.shape[:-1], E))

    def loss(q: Any, k: Any, v: Any) -> Any:
        return (lj.attention(q, k, v, causal=True, layout=layout) * turn(dout)).sum()

    out = lj.attention(*map(turn, (q, k, v)), causal=True, layout=layout)
    assert np.array_equal(out, turn(lh.attention(q, k, v, causal=True)))
    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(*map(turn, (q, k, v)))
    expected = numpy_gradients(q, k, v, dout, np.zeros(q.shape[:-1]), {"causal": True}, ("q", "k", "v"))
    for ours, theirs in zip(gradients, expected.values(), strict=True):
        assert np.array_equal(ours, turn(theirs))


def test_statistics_without_values() -> None:
    q, k, _ = arrays()
    seen, theirs = lj.observe(q, k, causal=True), lh.observe(q, k, causal=True)
    assert_same_rows(seen, theirs)
    assert repr(seen).replace("(jax)", "(numpy)") == repr(theirs)
    with pytest.raises(lh.LevelheadError, match="statistics only"):
        assert seen.output is None
    gradients = jax.jit(jax.grad(lambda q, k: lj.observe(q, k).logsumexp.sum(), (0, 1)))(q, k)
    expected = jax.jit(jax.grad(_plain_logsumexp, (0, 1)))(q, k)
    for ours, plain in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, plain, atol=1e-5)


def _plain_logsumexp(q: Any, k: Any) -> Any:
    s = jnp.einsum("bhtd,bhsd->bhts", q, jnp.repeat(k, H // k.shape[1], 1)) / np.sqrt(q.shape[-1])
    return jax.nn.logsumexp(s, -1).sum()


@pytest.mark.filterwarnings("error")
def test_statistics_can_be_read_inside_jit() -> None:
    q, k, v = arrays()

    @jax.jit
    def step(q: Any, k: Any, v: Any) -> Any:
        seen = lj.observe(q, k, v, causal=True, sinks=np.ones(H))
        return seen.rows, seen.heads

    theirs = lh.observe(q, k, v, causal=True, sinks=np.ones(H))
    for ours, expected in zip(step(q, k, v), (theirs.rows, theirs.heads), strict=True):
        for name in expected.__dataclass_fields__:
            pair = getattr(ours, name), getattr(expected, name)
            np.testing.assert_allclose(*pair, rtol=2e-5, atol=2e-5, err_msg=name)


def test_observations_merge_on_the_host() -> None:
    q, k, v = arrays()
    parts = [
        lj.observe(q, k[..., a:b, :], v[..., a:b, :], query_start=S - T - a, causal=True).observation
        for a, b in ((0, 8), (8, S))
    ]
    joined, whole = lh.merge(*parts), lh.observe(q, k, v, causal=True)
    assert isinstance(joined.output, jax.Array)
    np.testing.assert_allclose(joined.output, whole.output, atol=1e-6)
    np.testing.assert_allclose(joined.rows.entropy, whole.rows.entropy, atol=1e-5)
    assert np.array_equal(joined.rows.argmax, whole.rows.argmax)


def test_hidden_numbers_never_touch_the_result() -> None:
    q, k, v = arrays()
    hidden = {"key_lengths": np.array([S - 4, S - 4])}
    wild_k, wild_v = k.copy(), v.copy()
    wild_k[..., S - 4 :, :], wild_v[..., S - 4 :, :] = np.nan, np.inf
    assert np.array_equal(lj.attention(q, wild_k, wild_v, **hidden), lj.attention(q, k, v, **hidden))


def test_empty_arrays() -> None:
    q, k, v = arrays()
    assert np.array_equal(lj.attention(q, k[..., :0, :], v[..., :0, :]), np.zeros((*q.shape[:-1], E)))
    assert lj.attention(q[:0], k[:0], v[:0]).shape == (0, H, T, E)
    assert lj.attention(q[..., :0, :], k, v).shape == (2, H, 0, E)


def test_threads_change_no_bit() -> None:
    q, k, v = qkv((2, 4), 64, 300, 16)
    one, more = (lj.attention(q, k, v, threads=n) for n in (1, 3))
    assert np.array_equal(one, more)

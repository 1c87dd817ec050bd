"""What JAX does to functions, done to attention: vmap, jit, checkpoint, scan, export, donation, second derivatives."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import levelhead as lh
from jax_calls import H, S, T, arrays
from processes import fresh
from support import Array, qkv

lj = lh.jax
N = 3  # what is mapped


def many(*parts: Array) -> list[Array]:
    return [np.stack([x * (1 + i) for i in range(N)]) for x in parts]


@jax.jit
def loss(q: Any, k: Any, v: Any, scale: Any, sinks: Any, bias: Any) -> Any:
    seen = lj.observe(q, k, v, scale=scale, sinks=sinks, mask=bias, causal=True)
    return (seen.output**2).sum() + (seen.logsumexp * jnp.arange(T)).sum()


# Which arguments are mapped; an option per head that is mapped makes the calls run one by one.
AXES = {
    "q, k, v": (0, 0, 0, None, None, None),
    "queries alone": (0, None, None, None, None, None),
    "keys and sinks": (None, 0, None, None, 0, None),
    "scale and bias": (None, None, None, 0, None, 0),
    "everything": (0, 0, 0, 0, 0, 0),
}


@pytest.mark.parametrize("name", AXES)
def test_vmap_of_the_gradient_is_the_gradients_stacked(name: str) -> None:
    rng = np.random.default_rng(2)
    q, k, v = arrays()
    bias = rng.standard_normal((T, S)).astype(np.float32)
    single = (q, k, v, np.float32(0.3), rng.standard_normal(H).astype(np.float32), bias)
    axes = AXES[name]
    given = [np.stack([x * (1 + i) for i in range(N)]) if a == 0 else x for x, a in zip(single, axes, strict=True)]
    gradient = jax.jit(jax.value_and_grad(loss, tuple(range(6))))
    together = jax.jit(jax.vmap(jax.value_and_grad(loss, tuple(range(6))), in_axes=axes))(*given)
    for i in range(N):
        value, parts = gradient(*(x[i] if a == 0 else x for x, a in zip(given, axes, strict=True)))
        np.testing.assert_allclose(together[0][i], value, rtol=1e-6)
        for j, (ours, alone) in enumerate(zip(together[1], parts, strict=True)):
            assert np.array_equal(ours[i], alone), j


def test_vmap_twice_and_along_another_axis() -> None:
    q, k, v = arrays()
    qs = np.stack(many(q), 0).reshape(N, *q.shape)
    twice = jax.vmap(jax.vmap(lj.attention, in_axes=(0, 0, None)), in_axes=(0, None, 0))
    out = jax.jit(twice)(qs, k, np.stack(many(v)[0])[:, 0])  # over a batch, then over its rows
    for i in range(N):
        for b in range(len(q)):
            assert np.array_equal(out[i, b], lh.attention(qs[i, b], k[b], many(v)[0][i, 0]))
    last = jax.vmap(lj.attention, in_axes=(3, None, None), out_axes=3)(np.moveaxis(qs, 0, 3), k, v)
    assert np.array_equal(last[..., 1, :], lh.attention(qs[1], k, v))


def test_vmap_of_statistics_lengths_and_dropout() -> None:
    q, k, v = arrays()
    lengths = np.array([[S, 3], [4, 0], [1, S]], np.int32)

    def seen(q: Any, lengths: Any, seed: Any) -> Any:
        return lj.observe(q, k, v, key_lengths=lengths, dropout=0.4, seed=seed)

    together = jax.jit(jax.vmap(seen))(np.stack([q] * N), lengths, np.arange(N))
    for i in range(N):
        alone = lh.observe(q, k, v, key_lengths=lengths[i], dropout=0.4, seed=i)
        assert np.array_equal(together.output[i], alone.output)
        assert np.array_equal(together.sums[i], alone.state.sums)
        assert np.array_equal(together.counts[i], alone.state.counts)


def test_vmap_of_gradients_in_one_batch() -> None:
    rng = np.random.default_rng(5)
    q, k, v = (np.swapaxes(x, 1, 2) for x in arrays())
    lengths = np.array([[S, 3], [4, 0], [1, S]], np.int32)
    masks, ids = rng.random((N, 1, H, T, S)) < 0.6, rng.integers(0, 2, (N, 2, S))

    def loss(q: Any, k: Any, v: Any, lengths: Any, mask: Any, ids: Any) -> Any:
        segments = (ids[:, :T], ids)
        options = {"key_lengths": lengths, "mask": mask, "segments": segments, "query_start": lengths}
        seen = lj.observe(q, k, v, layout="BTNH", causal=True, **options)
        lse = jnp.where(jnp.isfinite(seen.logsumexp), seen.logsumexp, 0.0)
        return (seen.output**2).sum() + (lse**2).sum(), (seen.sums, seen.counts)

    gradient = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    together = jax.jit(jax.vmap(gradient, in_axes=(None, None, 0, 0, 0, 0)))(
        q, k, np.stack(many(v)[0]), lengths, masks, ids
    )
    alone = jax.jit(gradient)
    for i in range(N):
        expected = alone(q, k, many(v)[0][i], lengths[i], masks[i], ids[i])
        for ours, one in zip(jax.tree.leaves(together), jax.tree.leaves(expected), strict=True):
            assert np.array_equal(ours[i], one, equal_nan=True)


def test_a_jacobian_maps_the_backward_pass() -> None:
    q, k, v = qkv((2,), 3, 5, 4)
    jacobian = jax.jit(jax.jacrev(lj.attention))(q, k, v)

    def plain(q: Any) -> Any:
        return jax.nn.softmax(jnp.einsum("htd,hsd->hts", q, k) / 2) @ v

    np.testing.assert_allclose(jacobian, jax.jit(jax.jacrev(plain))(q), atol=2e-6)


def test_checkpoint_and_scan_over_layers() -> None:
    q, _, _ = qkv((2, 2), 6, 6, 8)
    weights = np.random.default_rng(0).standard_normal((4, 8, 8)).astype(np.float32) / 3

    def run(weights: Any, wrap: Any) -> Any:
        layer = wrap(lambda x, w: x + lj.attention(x @ w, x, x, causal=True))
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), q, weights)
        return (x**2).sum()

    plain = jax.jit(jax.grad(lambda w: run(w, lambda f: f)))(weights)
    again = jax.jit(jax.grad(lambda w: run(w, jax.checkpoint)))(weights)
    np.testing.assert_allclose(again, plain, rtol=1e-5)
    x = jnp.asarray(q)
    for w in weights:
        x = x + lh.attention(np.asarray(x @ w), np.asarray(x), np.asarray(x), causal=True)
    np.testing.assert_allclose(run(weights, jax.checkpoint), (x**2).sum(), rtol=1e-5)


def test_export_round_trip() -> None:
    q, k, v = arrays()
    checks = [export.DisabledSafetyCheck.custom_call("levelhead_attend")]
    exported = export.export(jax.jit(lambda *x: lj.attention(*x, causal=True)), disabled_checks=checks)(q, k, v)
    again = export.deserialize(exported.serialize())
    assert np.array_equal(again.call(q, k, v), lh.attention(q, k, v, causal=True))


def test_an_exported_gradient_runs_in_another_process(tmp_path: Path) -> None:
    q, k, v = arrays()
    calls = ("levelhead_attend", "levelhead_attend_backward")
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in calls]
    exported = export.export(jax.jit(lj.attention), disabled_checks=checks)(q, k, v)
    (tmp_path / "attention").write_bytes(exported.serialize(vjp_order=1))
    np.savez(tmp_path / "arrays.npz", q=q, k=k, v=v)
    script = """
        import sys, jax, numpy as np
        import levelhead.jax  # the custom calls
        arrays = np.load(sys.argv[1] + "/arrays.npz")
        exported = jax.export.deserialize(bytearray(open(sys.argv[1] + "/attention", "rb").read()))
        gradient = jax.grad(lambda *x: (exported.call(*x) ** 2).sum())(*(arrays[name] for name in "qkv"))
        np.save(sys.argv[1] + "/gradient.npy", gradient)
    """
    fresh(textwrap.dedent(script), tmp_path)
    expected = jax.grad(lambda *x: (lj.attention(*x) ** 2).sum())(q, k, v)
    np.testing.assert_allclose(np.load(tmp_path / "gradient.npy"), expected, atol=1e-6)


def test_donated_arrays() -> None:
    q, k, v = qkv((2, 4), 8, 8, 8)
    donated = jnp.array(q)
    out = jax.jit(lj.attention, donate_argnums=0)(donated, k, v)
    assert donated.is_deleted()
    assert np.array_equal(out, lh.attention(q, k, v))


def test_second_derivatives_come_from_the_formula() -> None:
    q, k, v = qkv((1, 2), 4, 5, 3)
    sinks, bias = np.ones(2, np.float32), np.ones((4, 5), np.float32)

    def plain(q: Any, k: Any, v: Any, sinks: Any, bias: Any) -> Any:
        s = jnp.einsum("bhtd,bhsd->bhts", q, k) / np.sqrt(3) + bias
        s = jnp.concatenate([s, jnp.broadcast_to(sinks[:, None, None], (*s.shape[:-1], 1))], -1)
        return jax.nn.softmax(s)[..., :-1] @ v

    def ours(q: Any, k: Any, v: Any, sinks: Any, bias: Any) -> Any:
        return lj.attention(q, k, v, sinks=sinks, mask=bias)

    def penalty(attend: Any) -> Any:
        first = jax.grad(lambda *x: (attend(*x) ** 3).sum(), tuple(range(5)))
        return jax.jit(jax.grad(lambda *x: sum((g**2).sum() for g in first(*x)), tuple(range(5))))

    for a, b in zip(penalty(ours)(q, k, v, sinks, bias), penalty(plain)(q, k, v, sinks, bias), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    dropped = penalty(lambda q, k, v, *_: lj.attention(q, k, v, dropout=0.1, seed=1))
    with pytest.raises(lh.LevelheadError, match="dropout"):
        dropped(q, k, v, sinks, bias)


def test_what_is_hidden_touches_no_second_derivative() -> None:
    q, k, v = qkv((1, 2), 4, 5, 3)
    scale, seen = np.array([0.3, 0.7], np.float32), np.arange(5) != 3

    def second(k: Any, v: Any, mask: Any) -> Any:
        def first(q: Any, scale: Any) -> Any:
            attend = jax.grad(
                lambda *x: (lj.attention(x[0], k, v, scale=x[1], mask=mask, softcap=2.0) ** 2).sum(), (0, 1)
            )
            return sum((g**2).sum() for g in attend(q, scale))

        return jax.grad(first, (0, 1))(q, scale)

    second = jax.jit(second)
    spoiled = k.copy(), v.copy()
    spoiled[0][..., 3, 1], spoiled[1][..., 3, 0] = np.nan, np.inf
    for mask in (seen, np.where(seen, 0.0, -np.inf).astype(np.float32)):
        for ours, expected in zip(second(*spoiled, mask), second(k, v, mask), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-5)
    assert all(np.isnan(x).any() for x in second(*spoiled, np.ones(5, bool)))


def test_a_gradient_of_statistics_is_refused_and_statistics_beside_a_loss_are_not() -> None:
    q, k, v = qkv((1, 2), 4, 5, 4)
    weights = np.ones((2, 4, 4), np.float32)
    with pytest.raises(lh.LevelheadError, match="observe: expected no gradient by rows and heads"):
        jax.grad(lambda q: lj.observe(q, k, v).rows.entropy.sum())(q)

    def loss(weights: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, w: Any) -> Any:
            seen = lj.observe(x @ w, k, v)
            return seen.output, seen.rows.entropy

        x, entropy = jax.lax.scan(layer, q, weights)
        return x.sum(), entropy

    gradient, entropy = jax.jit(jax.grad(loss, has_aux=True))(weights)
    assert entropy.shape == (2, 1, 2, 4) and np.isfinite(gradient).all() and gradient.any()


def test_what_needs_no_gradient_gets_none() -> None:
    q, k, v = arrays()
    bias = np.zeros((T, S), np.float32)
    text = jax.jit(jax.grad(lambda q: lj.attention(q, k, v, mask=bias).sum())).lower(q).as_text()
    assert 'results = "dq"' in text and "dmask" not in text


def test_slopes_of_an_array_are_no_obstacle_to_other_gradients() -> None:
    q, k, v = arrays()

    def loss(q: Any, slopes: Any) -> Any:
        return (lj.attention(q, k, v, alibi=jax.lax.stop_gradient(slopes), causal=True) ** 2).sum()

    slopes = jnp.linspace(0.1, 1.0, H)
    dq, none = jax.jit(jax.grad(loss, (0, 1)))(q, slopes)
    expected = jax.grad(lambda q: (lj.attention(q, k, v, alibi=np.asarray(slopes), causal=True) ** 2).sum())(q)
    np.testing.assert_allclose(dq, expected, atol=1e-6)
    assert not none.any()


def test_lengths_that_are_known_when_it_runs_are_checked_then() -> None:
    q, k, v = arrays()
    attend = jax.jit(lambda n: lj.attention(q, k, v, key_lengths=n))
    assert np.array_equal(attend(np.array([1, S])), lh.attention(q, k, v, key_lengths=np.array([1, S])))
    refused = (ValueError, jax.errors.JaxRuntimeError)  # which of them depends on when the program runs
    with pytest.raises(refused, match=f"key_lengths: lengths from 0 to {S} expected, given {S + 1}"):
        attend(np.array([1, S + 1])).block_until_ready()
    with pytest.raises(lh.LevelheadError, match="key_lengths"):
        lj.attention(q, k, v, key_lengths=jnp.array([1, S + 1]))


def test_a_gradient_by_one_array_is_the_same_after_one_by_another() -> None:
    """JAX keeps the traced call: what was differentiated last must not decide what the next gradient reaches."""
    q, k, v = qkv((2, 4), 5, 7, 8)

    def by(function: Any, place: int) -> Any:
        return jax.grad(lambda *x: (function(*x) ** 2).sum(), place)(q, k, v)

    expected = [by(lj.attention, place) for place in range(3)]
    others = {
        "cond": lambda *x: jax.lax.cond(True, lj.attention, lambda q, k, v: q, *x),
        "checkpoint": jax.checkpoint(lj.attention),
        "scan": lambda q, k, v: jax.lax.scan(lambda x, _: (lj.attention(x, k, v), None), q, None, length=1)[0],
        "vmap": lambda *x: jax.vmap(lj.attention)(*(part[None] for part in x))[0],
    }
    for name, function in others.items():
        for place in (2, 0, 1):
            np.testing.assert_allclose(by(function, place), expected[place], atol=1e-6, err_msg=name)


def test_promotion_that_is_strict_elsewhere() -> None:
    """Programs that set it for their own code call levelhead as they call `jax.nn`."""
    q, k, v = qkv((2, 4), 5, 7, 8)

    def step(q: Any) -> Any:
        seen = lj.observe(q, k, v, scale="log-n", alibi=True, query_lengths=np.array([5, 3]))
        other = lj.dot_product_attention(q, q, q, key_value_seq_lengths=jnp.array([2, 4], jnp.int32))
        return seen.output.sum() + other.sum(), seen.heads.mean_entropy

    expected = jax.grad(step, has_aux=True)(q)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        strict = jax.grad(step, has_aux=True)(q)
        jax.grad(lambda scale: jax.grad(lambda s: (lj.attention(q, k, v, scale=s) ** 2).sum())(scale))(0.3)
        _, seen = lj.watch(lambda q: jax.nn.dot_product_attention(q, q, q))(q)
        assert seen.run().last.records[0].heads.rows.tolist() == [8] * 5
    for ours, theirs in zip(jax.tree.leaves(strict), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(ours, theirs)


def test_a_tree_of_an_observation_can_be_printed() -> None:
    q, k, v = qkv((2, 4), 5, 7, 8)
    shapes = jax.eval_shape(lj.observe, q, k, v)
    assert repr(shapes) == "Observation(of ShapeDtypeStruct, 7 keys)"
    assert "Observation(of tuple" in repr(jax.tree.map(np.shape, lj.observe(q, k, v), is_leaf=lambda x: False))

"""Attention under `shard_map` over four devices: heads and batch alone, keys joined by the merge law."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import levelhead as lh
from support import qkv

lj = lh.jax
GATHERS = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


@pytest.fixture(scope="module")
def mesh() -> Any:
    assert len(jax.devices()) >= 4  # tests/conftest.py asks for them
    return jax.make_mesh((2, 2), ("b", "h"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def text_of(function: Any, *arrays: Any) -> str:
    text: str = jax.jit(function).lower(*arrays).compile().as_text()
    return text


def test_batch_and_heads_are_split_without_communication(mesh: Any) -> None:
    q, k, v = qkv((4, 4), 16, 24, 8, groups=2)
    spec = P("b", "h")

    @partial(jax.shard_map, mesh=mesh, in_specs=(spec, spec, spec), out_specs=(spec, spec))
    def attend(q: Any, k: Any, v: Any) -> Any:
        seen = lj.observe(q, k, v, causal=True)
        return seen.output, seen.rows.entropy

    out, entropy = jax.jit(attend)(q, k, v)
    theirs = lh.observe(q, k, v, causal=True)
    assert np.array_equal(out, theirs.output)
    np.testing.assert_allclose(entropy, theirs.rows.entropy, atol=1e-5)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return (attend(q, k, v)[0] ** 2).sum()

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    alone = jax.jit(jax.grad(lambda *x: (lj.attention(*x, causal=True) ** 2).sum(), (0, 1, 2)))(q, k, v)
    for ours, expected in zip(gradients, alone, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)
    placed = [jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)) for x in (q, k, v)]
    text = text_of(lambda *x: attend(*x)[0], *placed)
    assert "levelhead_attend" in text and not any(word in text for word in GATHERS)


def test_outside_of_jit_it_goes_through_shard_map_too(mesh: Any) -> None:
    q, _, _ = qkv((4, 4), 8, 8, 8)
    attend = jax.shard_map(lambda q: lj.attention(q, q, q), mesh=mesh, in_specs=P("b", "h"), out_specs=P("b", "h"))
    assert np.array_equal(attend(q), lh.attention(q, q, q))
    gradient, alone = (jax.grad(lambda q, f=f: (f(q) ** 2).sum())(q) for f in (attend, lambda q: lj.attention(q, q, q)))
    np.testing.assert_allclose(gradient, alone, atol=1e-6)


def test_arrays_on_a_mesh_of_explicit_axes() -> None:
    explicit = jax.make_mesh((2, 2), ("b", "h"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    q, k, v = qkv((4, 4), 8, 8, 8, groups=2)

    def loss(q: Any, k: Any, v: Any) -> Any:
        seen = lj.observe(q, k, v, causal=True)
        return (seen.output**2).sum(), (seen.output, seen.heads.max_logit)

    gradient = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    placed = [jax.device_put(x, jax.sharding.NamedSharding(explicit, P("b", "h"))) for x in (q, k, v)]
    ours, alone = gradient(*placed), gradient(q, k, v)
    assert ours[0][1][0].sharding.spec[:2] == ("b", "h")
    for mine, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)


def test_a_watch_inside_of_shard_map(mesh: Any) -> None:
    q = np.swapaxes(qkv((4, 4), 8, 8, 8)[0], 1, 2)

    def attend(q: Any) -> Any:
        return jax.nn.dot_product_attention(q, q, q)

    def seen_with(leave: Any) -> Any:
        function = jax.shard_map(lambda q: leave(lj.watch(attend)(q)[1]), mesh=mesh, in_specs=P("b"), out_specs=P("b"))
        return jax.jit(function)(q)

    record = seen_with(lambda seen: jax.tree.map(lambda x: x[None], seen)).run().last.records[0]
    alone = lj.watch(attend)(q)[1].run().last.records[0]
    assert record.heads.rows.tolist() == alone.heads.rows.tolist() == [4 * 8] * 4
    np.testing.assert_allclose(record.heads.mean_entropy, alone.heads.mean_entropy, rtol=1e-6)
    with pytest.raises(lh.LevelheadError, match=r"4 heads, as the call had, got 8.*x\[None\]"):
        seen_with(lambda seen: seen).run()


def test_a_watch_on_a_mesh_of_explicit_axes() -> None:
    explicit = jax.make_mesh((4,), ("b",), axis_types=(jax.sharding.AxisType.Explicit,))
    (q, _, _), watched = qkv((4, 8), 4, 4, 8), jax.jit(lj.watch(lambda q: jax.nn.dot_product_attention(q, q, q)))
    placed = jax.device_put(q, jax.sharding.NamedSharding(explicit, P("b")))
    ours, alone = watched(placed)[1].calls[0], watched(q)[1].calls[0]
    np.testing.assert_allclose(ours.tally, alone.tally, rtol=1e-5)
    assert np.array_equal(ours.q, alone.q)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, sinks": {"causal": True, "sinks": np.linspace(-1, 1, 4).astype(np.float32)},
    "window, lengths": {"window": (7, 2), "key_lengths": np.array([30, 3])},
    "softcap, alibi": {"softcap": 2.0, "alibi": np.array([0.5, 0.25, 1.0, 0.0])},
    "where queries begin": {"alibi": True, "causal": True, "query_start": 3},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("layout", ["BNTH", "BTNH"])
def test_keys_over_an_axis_give_the_result_of_one_device(mesh: Any, name: str, layout: Any) -> None:
    options = OPTIONS[name]
    q, k, v = qkv((2, 4), 12, 32, 8, groups=2)
    turn = (lambda x: np.swapaxes(x, 1, 2)) if layout == "BTNH" else (lambda x: x)
    keys = P("b", "h") if layout == "BTNH" else P("b", None, "h")
    lengths = {key: jnp.asarray(x) for key, x in options.items() if key == "key_lengths"}
    others = {key: x for key, x in options.items() if key not in lengths}

    @partial(jax.shard_map, mesh=mesh, in_specs=(P("b"), keys, keys, P("b")), out_specs=P("b"))
    def part(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        seen = lj.observe(q, k, v, layout=layout, keys_over="h", **others, **lengths)
        x = seen.rows
        return seen.output, seen.logsumexp, {f: getattr(x, f) for f in x.__dataclass_fields__}

    out, logsumexp, rows = jax.jit(part)(turn(q), turn(k), turn(v), lengths)
    theirs = lh.observe(q, k, v, **options)
    np.testing.assert_allclose(out, turn(theirs.output), atol=2e-6)
    np.testing.assert_allclose(logsumexp, theirs.logsumexp, atol=2e-6)
    for field, ours in rows.items():
        np.testing.assert_allclose(ours, getattr(theirs.rows, field), atol=3e-5, rtol=3e-5, err_msg=field)


def test_queries_that_do_not_exist_are_the_same_on_every_device(mesh: Any) -> None:
    q, k, v = qkv((2, 4), 8, 16, 8)
    options: Any = {"query_lengths": np.array([3, 8])}

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(None, None, "h"), P(None, None, "h")), out_specs=P())
    def spread(q: Any, k: Any, v: Any) -> Any:
        return lj.observe(q, k, v, keys_over="h", **options)

    found, alone = jax.jit(spread)(q, k, v), lj.observe(q, k, v, **options)
    np.testing.assert_allclose(found.heads.mean_entropy, alone.heads.mean_entropy, rtol=1e-5)
    np.testing.assert_allclose(found.output, alone.output, atol=1e-6)


def test_gradients_go_through_the_join(mesh: Any) -> None:
    q, k, v = qkv((2, 4), 12, 32, 8)
    sinks = np.zeros(4, np.float32)

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(None, None, "h"), P(None, None, "h"), P()), out_specs=P())
    def attend(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return lj.attention(q, k, v, causal=True, sinks=sinks, keys_over="h")

    def gradients(attend: Any) -> Any:
        return jax.jit(jax.grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2, 3)))(q, k, v, sinks)

    alone = gradients(lambda q, k, v, sinks: lj.attention(q, k, v, causal=True, sinks=sinks))
    for ours, expected in zip(gradients(attend), alone, strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-5)
    assert "all-gather" not in text_of(attend, q, k, v, sinks)


@pytest.mark.parametrize("options", [{"dropout": 0.1, "seed": 1}, {"scale": "log-n"}, {"segments": np.zeros(8, int)}])
def test_what_a_part_of_the_keys_does_not_know_is_refused(mesh: Any, options: dict[str, Any]) -> None:
    q, k, _ = qkv((2,), 8, 16, 4)

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(None, "h")), out_specs=P())
    def part(q: Any, k: Any) -> Any:
        return lj.observe(q, k, keys_over="h", **options).logsumexp

    with pytest.raises(lh.LevelheadError, match=next(iter(options))):
        part(q, k)


@pytest.mark.parametrize(
    ("of_q", "of_k", "message"), [(P(), P(), "k: expected a part"), (P(None, "h"), P(None, "h"), "q: expected whole")]
)
def test_what_keys_over_needs_to_be_spread_or_whole(mesh: Any, of_q: Any, of_k: Any, message: str) -> None:
    q, k, _ = qkv((2,), 8, 16, 4)

    @partial(jax.shard_map, mesh=mesh, in_specs=(of_q, of_k), out_specs=P())
    def part(q: Any, k: Any) -> Any:
        return lj.observe(q, k, keys_over="h").logsumexp

    with pytest.raises(lh.LevelheadError, match=message):
        part(q, k)


@pytest.mark.parametrize("axis", ["h", 3])
def test_keys_over_an_axis_that_is_not_there_is_refused(axis: Any) -> None:
    q, k, _ = qkv((2,), 8, 16, 4)
    with pytest.raises(lh.LevelheadError, match="keys_over: expected an axis of the mesh, inside jax.shard_map"):
        lj.observe(q, k, keys_over=axis)


def test_a_shard_of_the_width_is_refused(mesh: Any) -> None:
    q, k, v = qkv((2,), 8, 16, 4)

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(None, None, "h"), P()), out_specs=P())
    def split(q: Any, k: Any, v: Any) -> Any:
        return lj.attention(q, k, v)

    with pytest.raises(lh.LevelheadError, match="key width 4"):
        split(q, k, v)


def test_a_width_that_is_spread_over_an_explicit_axis_is_refused() -> None:
    explicit = jax.make_mesh((2,), ("s",), axis_types=(jax.sharding.AxisType.Explicit,))
    q, k, v = qkv((2,), 8, 16, 4)
    spread = jax.sharding.NamedSharding(explicit, P(None, None, "s"))
    for name, given in (("q", (jax.device_put(q, spread), k, v)), ("k", (q, jax.device_put(k, spread), v))):
        with pytest.raises(lh.LevelheadError, match=rf"^{name}: expected a width that every device has whole.*'s'"):
            lj.attention(*given)

"""What a JAX watch notes of a call: hidden keys, options, layers in between, calls of one module at several places."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import levelhead as lh
from support import qkv

lj = lh.jax
q, k, v = (np.swapaxes(x, 1, 2) for x in qkv((2, 4), 12, 12, 16))


def only(function: Any, *arrays: Any) -> Any:
    """The record of the one call that a function makes."""
    _, seen = lj.watch(function)(*arrays)
    (record,) = seen.run().last.records
    return record


def test_numbers_that_stand_for_minus_infinity_hide() -> None:
    bias = np.where(np.tril(np.ones((12, 12), bool)), 0.0, -1e9).astype(np.float32)[None, None]
    hidden = only(lambda q: jax.nn.dot_product_attention(q, k, v, bias=bias), q).heads
    causal = only(lambda q: jax.nn.dot_product_attention(q, k, v, is_causal=True), q).heads
    for name in ("mean_entropy", "min_logit", "max_logit", "var_logit", "lone_rows"):
        np.testing.assert_allclose(getattr(hidden, name), getattr(causal, name), rtol=1e-5, err_msg=name)


def test_options_and_lengths_are_noted() -> None:
    def call(q: Any) -> Any:
        return lj.attention(
            q, k, v, layout="BTNH", softcap=5.0, sinks=jnp.ones(4), query_lengths=np.array([12, 3]), causal=True
        )

    record = only(call, q)
    facts = record.facts
    assert (facts.how, facts.softcap, facts.sinks, facts.causal) == ("levelhead", 5.0, True, True)
    assert (facts.d_k, facts.kv_heads, facts.queries, facts.keys) == (16, 4, 12, 12)
    assert record.heads.rows.tolist() == [15] * 4
    expected = lh.observe(
        *(np.swapaxes(x, 1, 2) for x in (q, k)), softcap=5.0, sinks=np.ones(4), query_lengths=[12, 3], causal=True
    )
    np.testing.assert_allclose(record.heads.max_logit, expected.heads.max_logit.max(0), rtol=1e-5)


def test_each_place_of_a_function_has_a_record() -> None:
    def twice(q: Any) -> Any:
        first = jax.nn.dot_product_attention(q, k, v)
        return jax.nn.dot_product_attention(3.0 * first, k, v)

    _, seen = lj.watch(twice)(q)
    records = seen.run().last.records
    assert [record.module for record in records] == ["", " (2)"]
    assert seen.run().coverage[0].calls == 2


def test_steps_become_one_run() -> None:
    _, seen = lj.watch(lambda q: jax.nn.dot_product_attention(q, k, v))(q)
    run = lj.run({10: seen, 20: seen}, expected_scale=0.25)
    assert [snapshot.step for snapshot in run.snapshots] == [10, 20] and run.expected_scale == 0.25
    with pytest.raises(lh.LevelheadError, match="at least one observed attention call"):
        lh.diagnose(lj.watch(lambda q: q)(q)[1])
    with pytest.raises(lh.LevelheadError, match="traced"):
        jax.jit(lambda q: lj.watch(lambda q: jax.nn.dot_product_attention(q, q, q))(q)[1].run() and q)(q)


def test_threads_watch_at_the_same_time() -> None:
    """The one that began first ends first: the other one's later calls are seen, and nothing is left replaced."""
    began, ended = threading.Event(), threading.Event()
    before, found = jax.nn.dot_product_attention, []

    def waiting(q: Any) -> Any:
        began.set()
        assert ended.wait(60)
        return jax.nn.dot_product_attention(q, k, v)

    def first(q: Any) -> Any:
        other.start()
        assert began.wait(60)
        return jax.nn.dot_product_attention(q, k, v)

    other = threading.Thread(target=lambda: found.append(lj.watch(waiting)(q)[1]))
    mine = lj.watch(first)(q)[1]
    ended.set()
    other.join()
    assert [len(seen.calls) for seen in (mine, *found)] == [1, 1]
    assert jax.nn.dot_product_attention is before

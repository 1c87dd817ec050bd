"""The plain-JAX path for other devices: held to the kernel, never a T × S buffer."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import levelhead as lh
from jax_calls import OPTIONS, E, H, arrays, learned, numpy_gradients
from levelhead.jax import formula
from levelhead.jax.call import described

lj = lh.jax

# Each option is in one of these.
MIXED: dict[str, tuple[str, ...]] = {
    "positions": ("causal", "alibi", "sinks", "key lengths", "bias", "softcap", "query start"),
    "hidden": ("window", "bool mask", "segments", "query lengths"),
    "cosine": ("cosine", "head bias"),
    "log-n": ("log-n", "one-sided window"),
    "log-n of packed sequences": ("log-n", "segments", "key lengths"),
    "scale per head": ("scale per head", "row bias"),
}


def mixed(name: str) -> dict[str, Any]:
    return {key: x for part in MIXED[name] for key, x in OPTIONS[part].items()}


@pytest.mark.parametrize("name", MIXED)
def test_states_and_gradients_are_those_of_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formula, "CHUNK", 8)  # two chunks and a rest
    q, k, v = arrays()
    options = mixed(name)
    theirs = lh.observe(q, k, v, **options)
    rng = np.random.default_rng(4)
    dout = rng.standard_normal((*q.shape[:-1], E)).astype(np.float32)
    dlse = np.where(np.isfinite(theirs.logsumexp), rng.standard_normal(q.shape[:-1]), 0.0).astype(np.float32)
    moved = learned(options)
    plan, given, _ = described(q, k, v, options | moved, layout="BNTH")
    names = ("q", "k", "v", *moved)

    @jax.jit
    def both(given: Any) -> Any:
        found = formula.states(plan, given)
        return (
            found.sums,
            found.counts,
            found.acc,
            formula.gradients(plan, names, given, theirs.output, theirs.logsumexp, dout, dlse),
        )

    sums, counts, acc, gradients = both(given)
    rows = lh.stats.rows(np.asarray(sums), np.asarray(counts), options.get("sinks"), theirs.exists)
    for field in lh.stats.Rows.__dataclass_fields__:
        ours, expected = getattr(rows, field), getattr(theirs.rows, field)
        if expected.dtype == np.int64:
            assert np.array_equal(ours, expected), field
        else:
            np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-5, err_msg=field)
    np.testing.assert_allclose(acc * rows.top1[..., None], theirs.output, atol=1e-5)
    for field, expected in numpy_gradients(q, k, v, dout, dlse, options, names).items():
        np.testing.assert_allclose(
            gradients[field].reshape(expected.shape), expected, rtol=1e-4, atol=3e-5, err_msg=field
        )


def test_every_option_is_in_a_mixture() -> None:
    left = set(OPTIONS) - {part for parts in MIXED.values() for part in parts}
    assert left == {"none", "many", "scale", "dropout"}  # three are made of others; dropout is the kernel's alone


def test_a_hidden_nan_touches_nothing_and_a_visible_one_its_rows() -> None:
    q, k, v = arrays()
    k[..., 3, :], v[..., 5, 0] = np.nan, np.inf
    for options in ({"mask": ~np.isin(np.arange(k.shape[-2]), (3, 5))}, {"causal": True}):
        plan, given, _ = described(q, k, v, options, layout="BNTH")
        found, theirs = jax.jit(lambda x, plan=plan: formula.states(plan, x).acc)(given), lh.observe(q, k, v, **options)
        assert np.array_equal(np.isfinite(found), np.isfinite(theirs.output))


def test_a_hidden_nan_touches_no_gradient() -> None:
    q, k, v = arrays()
    dout, dlse = np.ones((*q.shape[:-1], E), np.float32), np.zeros(q.shape[:-1], np.float32)
    options = {"mask": np.arange(k.shape[-2]) != 3, "scale": jnp.ones(H), "softcap": 2.0}
    names = ("q", "k", "v", "scale")

    @partial(jax.jit, static_argnums=0)
    def gradients(plan: Any, given: Any, out: Any, lse: Any) -> Any:
        return formula.gradients(plan, names, given, out, lse, dout, dlse)

    seen = lh.observe(q, k, v, mask=options["mask"], scale=1.0, softcap=2.0)
    plan, given, _ = described(q, k, v, options, layout="BNTH")
    k[..., 3, :], v[..., 3, 0] = np.nan, np.inf
    spoiled = given | {"k": jnp.asarray(k), "v": jnp.asarray(v)}
    found = [gradients(plan, x, seen.output, seen.logsumexp) for x in (given, spoiled)]
    for name in names:
        assert np.array_equal(found[0][name], found[1][name]), name


LARGE = {"T": 1024, "S": 2048}


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_on_other_platforms_nothing_is_as_large_as_the_logits(platform: str) -> None:
    q, k = (jax.ShapeDtypeStruct((1, H, n, 16), np.dtype("bfloat16")) for n in LARGE.values())

    def step(q: Any, k: Any, v: Any) -> Any:
        seen = lj.observe(q, k, v, causal=True, softcap=20.0, alibi=True)
        gradients = jax.grad(lambda *x: lj.attention(*x, causal=True).astype("float32").sum(), (0, 1, 2))(q, k, v)
        return seen.rows, seen.output, gradients

    text = export.export(jax.jit(step), platforms=[platform])(q, k, k).mlir_module()
    assert "custom_call @levelhead" not in text
    sizes = {
        int(np.prod([int(n) for n in found.split("x")[:-1]])) for found in re.findall(r"tensor<((?:\d+x)+\w+)>", text)
    }
    assert max(sizes) == H * LARGE["T"] * formula.CHUNK < H * LARGE["T"] * LARGE["S"]
    assert "tensor<1x4x1024xf32>" in text  # statistics are float32, whatever the inputs are


def test_the_cpu_runs_the_kernel_alone() -> None:
    q, k, v = arrays()
    text = jax.jit(lj.attention).lower(q, k, v).compile().as_text()
    assert "levelhead_attend" in text and " while(" not in text

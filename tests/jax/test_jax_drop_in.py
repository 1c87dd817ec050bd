"""`dot_product_attention` beside JAX's own, over the cases that JAX tests it with: forward, residual, gradients."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import levelhead as lh
from support import Array

lj = lh.jax
B, T, S, N, H = 2, 128, 128, 4, 32

# Half types: JAX rounds the weights to them before the second product, levelhead does not.
BOUNDS = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def inputs(dtype: str = "bfloat16", groups: int = 1, T: int = T, S: int = S, B: int = B) -> tuple[Any, ...]:
    rng = np.random.default_rng(11)
    shapes = ((B, T, N, H), (B, S, N // groups, H), (B, S, N // groups, H), (B, T, N, H))
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def both(*arrays: Any, names: tuple[str, ...] = (), **fixed: Any) -> tuple[Any, Any]:
    """Output, residual and gradients of ours and of JAX's. The last array is the gradient of the output; arrays after
    the first three are the arguments `names`."""

    def run(attend: Any, *given: Any) -> Any:
        *moved, dout = given

        def forward(*moved: Any) -> Any:
            named = dict(zip(names, moved[3:], strict=True))
            return attend(*moved[:3], **named, **fixed, return_residual=True)

        out, pull, residual = jax.vjp(forward, *moved, has_aux=True)
        return out, residual, pull(dout)

    return jax.jit(lambda *x: (run(lj.dot_product_attention, *x), run(jax.nn.dot_product_attention, *x)))(*arrays)


def assert_close(results: tuple[Any, Any], bound: float) -> None:
    for ours, theirs in zip(*map(jax.tree.leaves, results), strict=True):
        if ours.dtype == jax.dtypes.float0:
            continue
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        wide, expected = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        largest = max(1.0, float(np.abs(expected[np.abs(expected) < 1e30]).max(initial=0.0)))
        np.testing.assert_allclose(wide, expected, atol=bound * largest, rtol=bound)


def test_the_signature_is_that_of_jax() -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (lj.dot_product_attention, jax.nn.dot_product_attention))
    assert [(x.name, x.kind, x.default) for x in ours.values()] == [
        (x.name, x.kind, x.default) for x in theirs.values()
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_dtypes_and_groups(dtype: str, groups: int) -> None:
    assert_close(both(*inputs(dtype, groups)), BOUNDS[dtype])


def test_float16_which_jax_itself_does_not_multiply_on_cpus() -> None:
    halves = inputs("float16", 2)
    ours, _ = both(*(x.astype(jnp.float32) for x in halves), is_causal=True)
    out, pull = jax.vjp(lambda *x: lj.dot_product_attention(*x, is_causal=True), *halves[:3])
    for half, full in zip((out, *pull(halves[3])), (ours[0], *ours[2]), strict=True):
        assert half.dtype == jnp.float16
        np.testing.assert_allclose(half.astype(jnp.float32), full, atol=BOUNDS["float16"], rtol=BOUNDS["float16"])


LENGTHS = np.array([100, 37], np.int32)
RNG = np.random.default_rng(0)
BIAS, CUSTOM = RNG.standard_normal((1, N, T, S)).astype(np.float32), RNG.random((B, 1, T, S)) < 0.5
CUSTOM[0, 0, 5] = False  # a row that sees nothing
PADDING = {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS}
MODES: dict[str, dict[str, Any]] = {
    "bias": {"bias": BIAS},
    "causal": {"is_causal": True},
    "padding": PADDING,
    "custom": {"mask": CUSTOM},
    "causal, padding": {"is_causal": True} | PADDING,
    "custom, padding": {"mask": CUSTOM} | PADDING,
    "bias, causal": {"bias": BIAS, "is_causal": True},
    "bias, custom": {"bias": BIAS, "mask": CUSTOM},
    "causal, window": {"is_causal": True, "local_window_size": 10},
    "keys alone": {"key_value_seq_lengths": np.array([0, S], np.int32)},
    "window (1, 0)": {"local_window_size": (1, 0)},
    "window (3, 5)": {"local_window_size": (3, 5)},
    "scale": {"scale": 0.5},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masks_lengths_and_windows(mode: str, dtype: str) -> None:
    given = MODES[mode]
    names = tuple(name for name, x in given.items() if isinstance(x, np.ndarray))
    fixed = {name: x for name, x in given.items() if name not in names}
    q, k, v, dout = inputs(dtype, 2)
    assert_close(
        both(q, k, v, *(jnp.asarray(given[name]) for name in names), dout, names=names, **fixed), BOUNDS[dtype]
    )


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gradients_under_vmap(groups: int) -> None:
    q, k, v, dout = inputs("bfloat16", groups)

    def run(attend: Any) -> Any:
        out, pull = jax.vjp(attend, q, k, v, None, None)
        return out, pull(dout)

    mapped = jax.vmap(lj.dot_product_attention, in_axes=(0, 0, 0, None, None))
    assert_close((run(mapped), run(jax.nn.dot_product_attention)), BOUNDS["bfloat16"])


@pytest.mark.parametrize("mapped", [False, True])
def test_the_gradient_of_one_array_that_is_all_three_and_of_its_bias(mapped: bool) -> None:
    x, *_ = inputs("bfloat16")
    bias = jnp.asarray(RNG.standard_normal((B, N, T, S)), jnp.bfloat16)
    mask = jnp.ones((1, 1, S), bool)

    def run(attend: Any) -> Any:
        function: Any = lambda x, bias, mask: attend(x, x, x, bias, mask)  # noqa: E731
        if mapped:
            function = jax.vmap(function, in_axes=(0, 0, None))
        out, pull = jax.vjp(function, x, bias, mask)
        return out, pull(x)

    assert_close(jax.jit(lambda: (run(lj.dot_product_attention), run(jax.nn.dot_product_attention)))(), 4e-2)


@pytest.mark.parametrize("sides", [(1, 1), (1, N), (B, 1), (B, N)])
def test_the_gradient_of_a_bias(sides: tuple[int, int]) -> None:
    q, k, v, dout = inputs("bfloat16")
    bias = jnp.asarray(np.random.default_rng(1).standard_normal((*sides, T, S)), jnp.bfloat16)
    assert_close(both(q, k, v, bias, dout, names=("bias",)), 4e-2)


def test_fewer_queries_than_keys_count_from_the_first() -> None:
    arrays = inputs("float32", T=40, S=64)
    assert_close(both(*arrays, is_causal=True, local_window_size=(20, 3)), BOUNDS["float32"])


@pytest.mark.parametrize("given", [{}, {"mask": np.ones((1, 1, T, 0), bool)}, PADDING, {"local_window_size": 2}])
def test_without_any_key(given: dict[str, Any]) -> None:
    arrays = inputs("float32", S=0)
    given = given | {name: np.zeros_like(x) for name, x in given.items() if name in PADDING}
    assert_close(both(*arrays, **given), 0.0)


def test_without_a_batch_and_under_vmap() -> None:
    q, k, v, _ = inputs("float32")
    alone = lj.dot_product_attention(q[0], k[0], v[0], is_causal=True)
    expected: Array = np.asarray(jax.nn.dot_product_attention(q[0], k[0], v[0], is_causal=True))
    np.testing.assert_allclose(alone, expected, atol=1e-5)
    mapped = jax.jit(jax.vmap(lambda *x: lj.dot_product_attention(*x, is_causal=True)))(q, k, v)
    assert np.array_equal(mapped[0], alone)
    assert lj.dot_product_attention(q[0], k[0], v[0], return_residual=True)[1].shape == (T, N)


REFUSED: dict[str, dict[str, Any]] = {
    "a float mask": {"mask": np.zeros((1, 1, T, S), np.float32)},
    "lengths of another shape": {"query_seq_lengths": np.zeros(3, np.int32)},
    "another value": {"value": np.zeros((B, S, N, 16), np.float32)},
    "heads that do not divide": {"query": np.zeros((B, T, 3, H), np.float32)},
    "mixed dtypes": {"query": np.zeros((B, T, N, H), np.float16)},
    "heads before tokens": {"query": np.zeros((B, N, T, 16), np.float32)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_jax_refuses_is_refused_as_a_value_error(name: str) -> None:
    q, k, v, _ = inputs("float32", groups=2)
    given = {"query": q, "key": k, "value": v} | REFUSED[name]
    with pytest.raises(ValueError):
        jax.nn.dot_product_attention(**given)
    with pytest.raises(lh.LevelheadError) as refused:
        lj.dot_product_attention(**given)
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_a_shape_that_does_not_broadcast_names_its_argument(name: str) -> None:
    q, k, v, _ = inputs("float32")
    with pytest.raises(lh.LevelheadError, match=rf"^{name}: expected a shape that broadcasts to \(2, 4, 128, 128\)"):
        lj.dot_product_attention(q, k, v, **{name: np.zeros((1, 3, T, S), bool if name == "mask" else np.float32)})


def test_another_implementation_is_refused() -> None:
    q, k, v, _ = inputs("float32")
    with pytest.raises(lh.LevelheadError, match="implementation"):
        lj.dot_product_attention(q, k, v, implementation="cudnn")

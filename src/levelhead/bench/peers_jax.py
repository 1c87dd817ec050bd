"""JAX as a peer: `jax.nn.dot_product_attention`, compiled, and its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from levelhead.bench.calls import Array, Call, Parts, Refused, Variants, refuse_large_scores
from levelhead.bench.gradients import Step
from levelhead.bench.inputs import Problem


@contextmanager
def session(threads: int) -> Iterator[str]:
    yield f"XLA's pool takes the CPUs of the process ({threads}) when it starts"


def attention(problem: Problem, threads: int) -> Variants:
    case = problem.case
    refuse_large_scores(case)
    if case.softcap is not None:
        raise Refused("dot_product_attention has no soft cap")
    return {"dot_product_attention": partial(_attention, problem)}


def training(step: Step, threads: int) -> Variants:
    refuse_large_scores(step.case)
    return {"vjp of dot_product_attention": partial(_training, step)}


def _attention(problem: Problem) -> Call:
    import jax

    arrays = _arrays(problem.q, problem.k, problem.v)
    fixed, arguments = _options(problem)

    def attend(q: Any, k: Any, v: Any, arguments: dict[str, Any]) -> Any:
        return jax.nn.dot_product_attention(q, k, v, **arguments, **fixed)

    compiled = jax.jit(attend).lower(*arrays, arguments).compile()
    return Call(lambda: compiled(*arrays, arguments).block_until_ready(), _read)


def _training(step: Step) -> Call:
    import jax

    arrays = _arrays(step.q, step.k, step.v, step.dout)
    fixed, arguments = _options(step)

    def learn(q: Any, k: Any, v: Any, dout: Any, arguments: dict[str, Any]) -> Any:
        attend = partial(jax.nn.dot_product_attention, **arguments, **fixed)
        out, back = jax.vjp(attend, q, k, v)
        return out, *back(dout)

    compiled = jax.jit(learn).lower(*arrays, arguments).compile()

    def read(results: Any) -> Parts:
        return dict(zip(("out", "dq", "dk", "dv"), map(_read, results), strict=True))

    return Call(lambda: jax.block_until_ready(compiled(*arrays, arguments)), read)


def _arrays(*arrays: Array) -> list[Any]:
    """In JAX's layout, (B, T, H, D)."""
    import jax

    return [jax.numpy.asarray(x.swapaxes(1, 2)) for x in arrays]


def _read(x: Any) -> Array:
    array: Array = np.asarray(x).swapaxes(1, 2)
    return array


def _options(problem: Problem) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords that are compiled in, and those that are arrays."""
    import jax

    case = problem.case
    fixed: dict[str, Any] = {}
    extra: dict[str, Array] = {}
    if case.causal and case.T == case.S:
        fixed["is_causal"] = True
    elif case.window and case.T == case.S:
        fixed["local_window_size"] = (case.window - 1, 0)
    elif problem.lengths is not None:
        extra["key_value_seq_lengths"] = problem.lengths.astype(np.int32)
    elif case.alibi or case.mask == "float":
        assert problem.bias is not None
        extra["bias"] = problem.bias
    elif problem.visible is not None:
        extra["mask"] = problem.visible
    return fixed, {name: jax.numpy.asarray(x) for name, x in extra.items()}

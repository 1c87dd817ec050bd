"""JAX as a peer: `jax.nn.dot_product_attention`, compiled, and its gradients; and levelhead called from JAX."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from levelhead.bench.calls import Array, Call, Differentiable, Parts, Refused, Variants, named, refuse_large_scores
from levelhead.bench.inputs import Problem


def variants(problem: Problem, threads: int) -> Variants:
    case = problem.case
    refuse_large_scores(case)
    if case.softcap is not None:
        raise Refused("dot_product_attention has no soft cap")
    name = "vjp of dot_product_attention" if case.gradients else "dot_product_attention"
    return {name: partial(_attention, problem)}


def _attention(problem: Problem) -> Call:
    import jax

    case, mask = problem.case, problem.bias_or_mask
    fixed: dict[str, Any] = {}  # compiled in
    arrays: Parts = {}
    if case.only_causal:
        fixed["is_causal"] = True
    elif case.window and case.T == case.S:
        fixed["local_window_size"] = (case.window - 1, 0)
    elif problem.lengths is not None:
        arrays["key_value_seq_lengths"] = problem.lengths.astype(np.int32)
    elif mask is not None:
        arrays["mask" if mask.dtype == bool else "bias"] = mask
    options = {name: jax.numpy.asarray(x) for name, x in arrays.items()}
    attend = partial(jax.nn.dot_product_attention, **fixed)
    return call(problem, attend, lambda x: x.swapaxes(1, 2), **options)  # (B, H, T, D) to (B, T, H, D), and back


def ours(problem: Problem, threads: int) -> Call:
    """levelhead on arrays of JAX, under jit."""
    from levelhead.jax import attention

    return call(problem, partial(attention, threads=threads, **problem.options))


def call(
    problem: Differentiable, attend: Callable[..., Any], layout: Callable[[Array], Array] = np.asarray, **options: Any
) -> Call:
    """A call that gives the output, and with it the gradients by all arguments if the case is about them.

    `layout` is applied to all arrays and to the results; `options` are JAX's arrays.
    """
    import jax

    def read(result: Any) -> Array:
        return layout(np.asarray(result))

    arguments = [jax.numpy.asarray(layout(x)) for x in problem.arguments.values()]
    if not problem.case.gradients:
        forward = jax.jit(attend).lower(*arguments, **options).compile()
        return Call(lambda: forward(*arguments, **options).block_until_ready(), read)

    def step(dout: Any, *arguments: Any, **options: Any) -> Any:
        out, back = jax.vjp(partial(attend, **options), *arguments)
        return out, *back(dout)

    dout = jax.numpy.asarray(layout(problem.dout))
    compiled = jax.jit(step).lower(dout, *arguments, **options).compile()
    return Call(
        lambda: jax.block_until_ready(compiled(dout, *arguments, **options)),
        lambda results: named(problem, map(read, results)),
    )

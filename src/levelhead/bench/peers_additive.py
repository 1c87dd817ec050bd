"""Additive attention: levelhead, and the formula as PyTorch and JAX users write it.

The plain formulation stores (T, S, A) numbers; compilers may avoid that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from levelhead.additive import additive_attention
from levelhead.bench import peers_torch
from levelhead.bench.additive import Additive
from levelhead.bench.calls import Call, Parts, Variants, refuse_large_scores


def ours(problem: Additive, threads: int) -> Variants:
    return {"additive_attention": partial(_torch_call, problem, additive_attention)}


def plain(problem: Additive, threads: int) -> Variants:
    refuse_large_scores(problem.case)
    return {"plain": partial(_torch_call, problem, _plain)}


def compiled(problem: Additive, threads: int) -> Variants:
    import torch

    def build() -> Call:
        torch._dynamo.reset()
        return _torch_call(problem, torch.compile(_plain, dynamic=False), warm=True)

    return {"torch.compile": build}


def jax(problem: Additive, threads: int) -> Variants:
    return {"jit": partial(_jax_call, problem)}


def _plain(q: Any, k: Any, v: Any, w_q: Any, w_k: Any, w_v: Any) -> Any:
    import torch

    u = torch.tanh((q @ w_q.mT)[..., :, None, :] + (k @ w_k.mT)[..., None, :, :])
    return torch.softmax(u @ w_v, -1) @ v


def _torch_call(problem: Additive, attend: Callable[..., Any], warm: bool = False) -> Call:
    arguments = problem.arguments
    leaves = [peers_torch.tensor(x) for x in arguments.values()]
    if not problem.case.gradients:
        return Call(lambda: (attend(*leaves),), partial(peers_torch.read_step, ()), warm)
    run = peers_torch.step(attend, leaves, peers_torch.tensor(problem.dout))
    return Call(run, partial(peers_torch.read_step, tuple(arguments)), warm)


def _jax_call(problem: Additive) -> Call:
    import jax
    from jax import numpy as jnp

    def attend(q: Any, k: Any, v: Any, w_q: Any, w_k: Any, w_v: Any) -> Any:
        u = jnp.tanh((q @ w_q.T)[..., :, None, :] + (k @ w_k.T)[..., None, :, :])
        return jax.nn.softmax(u @ w_v, -1) @ v

    def learn(dout: Any, *arguments: Any) -> Any:
        if not problem.case.gradients:
            return (attend(*arguments),)
        out, back = jax.vjp(attend, *arguments)
        return out, *back(dout)

    arrays = [jnp.asarray(x) for x in (problem.dout, *problem.arguments.values())]
    run = jax.jit(learn).lower(*arrays).compile()
    names = ["out", *(f"d{name}" for name in problem.arguments)]

    def read(results: Any) -> Parts:
        return dict(zip(names, map(np.asarray, results), strict=False))  # the output alone, or all

    return Call(lambda: jax.block_until_ready(run(*arrays)), read)

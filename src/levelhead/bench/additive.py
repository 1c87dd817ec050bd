"""Additive attention: arrays, weights, the truth in float64 NumPy; the formula as PyTorch and JAX users write it.

    out = softmax(w_v · tanh(W_q q + W_k k)) v

Counted neither in FMAs nor in bytes: nearly all of its work is tanh, which no limit is measured for. The plain
formulation stores (T, S, A) numbers; compilers may avoid that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from levelhead.additive import additive_attention
from levelhead.bench import inputs, peers_jax, peers_torch
from levelhead.bench.calls import Array, Parts, Uncounted, Variants, refuse_large_scores
from levelhead.bench.cases import Case

_BLOCK = 64  # query rows at a time: (rows, S, A) in float64


@dataclass(frozen=True)
class Additive(Uncounted):
    case: Case
    q: Array  # (B, H, T, D)
    k: Array  # (B, H, S, D)
    v: Array  # (B, H, S, E)
    w_q: Array  # (A, D), as are w_k, and w_v of (A,): the same for all heads
    w_k: Array
    w_v: Array
    dout: Array

    @property
    def arguments(self) -> Parts:
        """The arguments of `levelhead.additive_attention` that have gradients, by name."""
        return {name: getattr(self, name) for name in ("q", "k", "v", "w_q", "w_k", "w_v")}

    def truth(self) -> Parts:
        wide = {name: x.astype(np.float64) for name, x in self.arguments.items()}
        dout = self.dout.astype(np.float64)
        parts = {f"d{name}": np.zeros(x.shape) for name, x in wide.items()}
        parts["out"] = np.empty(dout.shape)
        for b, h in np.ndindex(*dout.shape[:2]):
            for first in range(0, self.case.T, _BLOCK):
                self._add(wide, dout, parts, (b, h, slice(first, first + _BLOCK)))
        return parts if self.case.gradients else {"out": parts["out"]}

    def _add(self, x: Parts, dout: Array, parts: Parts, at: tuple[int, int, slice]) -> None:
        """Adds the query rows `at`: their output, and their share of every gradient."""
        head = at[:2]
        q, k, v = x["q"][at], x["k"][head], x["v"][head]
        u = np.tanh((q @ x["w_q"].T)[:, None] + k @ x["w_k"].T)  # (rows, S, A)
        s = u @ x["w_v"]
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        parts["out"][at] = p @ v
        if not self.case.gradients:
            return
        parts["dv"][head] += p.T @ dout[at]
        dp = dout[at] @ v.T
        ds = p * (dp - (p * dp).sum(-1, keepdims=True))
        parts["dw_v"] += np.tensordot(ds, u, 2)
        du = ds[..., None] * x["w_v"] * (1 - u * u)
        by_query, by_key = du.sum(1), du.sum(0)
        parts["dq"][at] = by_query @ x["w_q"]
        parts["dk"][head] += by_key @ x["w_k"]
        parts["dw_q"] += by_query.T @ q
        parts["dw_k"] += by_key.T @ k

    @property
    def output_bytes(self) -> int:
        gradients = sum(x.nbytes for x in self.arguments.values()) if self.case.gradients else 0
        return int(self.dout.nbytes + gradients)


def make(case: Case, seed: int = 0) -> Additive:
    assert case.additive is not None
    q, k, v, dout = inputs.numbers(case, seed)
    random = np.random.default_rng((seed, case.additive))
    # Projections of spread 1, and scores of spread about 1 once tanh has squeezed them.
    shapes = ((case.additive, case.D), (case.additive, case.D), (case.additive,))
    w_q, w_k, w_v = ((random.standard_normal(shape) / np.sqrt(shape[-1])).astype(q.dtype) for shape in shapes)
    return Additive(case, q, k, v, w_q, w_k, w_v, dout)


# ---- implementations --------------------------------------------------------


def ours(problem: Additive, threads: int) -> Variants:
    return {"additive_attention": partial(peers_torch.call, problem, additive_attention)}


def plain(problem: Additive, threads: int) -> Variants:
    refuse_large_scores(problem.case)
    return {"plain": partial(peers_torch.call, problem, _plain)}


def _plain(q: Any, k: Any, v: Any, w_q: Any, w_k: Any, w_v: Any) -> Any:
    import torch

    u = torch.tanh((q @ w_q.mT)[..., :, None, :] + (k @ w_k.mT)[..., None, :, :])
    return torch.softmax(u @ w_v, -1) @ v


def compiled(problem: Additive, threads: int) -> Variants:
    return {"torch.compile": partial(peers_torch.compiled_call, problem, _plain)}


def jax(problem: Additive, threads: int) -> Variants:
    import jax

    def attend(q: Any, k: Any, v: Any, w_q: Any, w_k: Any, w_v: Any) -> Any:
        u = jax.numpy.tanh((q @ w_q.T)[..., :, None, :] + (k @ w_k.T)[..., None, :, :])
        return jax.nn.softmax(u @ w_v, -1) @ v

    return {"jit": partial(peers_jax.call, problem, attend)}

"""The arrays of a pass forward, or forward and backward, and the truth about it.

Inputs are standard normal, so logits have a spread of 1, as a level head has. Masks belong to the case; only q, k and v
change with the seed. The truth is `levelhead.reference` in float64; of a forward pass on a sample of query rows: all
heads and keys, but never a whole matrix of scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np

from levelhead import reference
from levelhead.bench.calls import Array, Parts
from levelhead.bench.cases import Case
from levelhead.call import segments
from levelhead.extras import command, need

ROWS = 64  # query rows compared with the truth, of each head
_BLOCK = 256  # query rows at a time where all are compared: scores in float64 that stay near the caches
_VISIBLE = 0.9  # share of a random boolean mask that is True


@dataclass(frozen=True)
class Problem:
    """A forward pass with numbers in it."""

    case: Case
    q: Array  # (B, H, T, D)
    k: Array  # (B, G, S, D)
    v: Array  # (B, G, S, E)
    dout: Array  # (B, H, T, E), a gradient of the output for cases with a backward pass

    @property
    def arguments(self) -> Parts:
        return {"q": self.q, "k": self.k, "v": self.v}

    @cached_property
    def lengths(self) -> Array | None:
        """How many keys each batch row has: all, 3/4, 1/2, 1/4, ..."""
        if not self.case.padding:
            return None
        B, S = self.case.B, self.case.S
        return np.maximum(S * (B - np.arange(B)) // B, 1)

    @cached_property
    def ends(self) -> Array | None:
        """Cumulative lengths of packed sequences: 1/32, 1/16, ... of the tokens, then the rest."""
        if not self.case.packed:
            return None
        T = self.case.T
        parts = np.array([1, 2, 5, 3, 8, 4, 2, 7]) * T // 32
        parts[-1] += T - parts.sum()
        return np.concatenate([[0], np.cumsum(parts)])

    @cached_property
    def ids(self) -> Array | None:
        return None if self.ends is None else segments.segment_ids(self.ends)

    @cached_property
    def mask(self) -> Array | None:
        """The caller's own mask (T, S)."""
        random, shape = np.random.default_rng(7), (self.case.T, self.case.S)
        if self.case.mask == "bool":
            return random.random(shape, dtype=np.float32) < _VISIBLE
        if self.case.mask == "float":
            return random.standard_normal(shape, dtype=np.float32)
        return None

    @cached_property
    def options(self) -> dict[str, Any]:
        """Keywords for `levelhead.attention`; only those that are used."""
        case = self.case
        options = dict(
            causal=case.causal or None,
            window=None if case.window is None else (case.window - 1, 0),
            mask=self.mask,
            softcap=case.softcap,
            alibi=case.alibi or None,
            key_lengths=self.lengths,
            segments=self.ids,
        )
        return {name: value for name, value in options.items() if value is not None}

    @cached_property
    def visible(self) -> Array | None:
        """Which keys each query sees, as one boolean mask (B or 1, 1, T, S); None: all."""
        case = self.case
        p, j = np.arange(case.S - case.T, case.S)[:, None], np.arange(case.S)
        masks: list[Array] = []
        if case.causal or case.window:
            masks.append(j <= p)
        if case.window:
            masks.append(j > p - case.window)
        if case.mask == "bool" and self.mask is not None:
            masks.append(self.mask)
        if self.ids is not None:
            masks.append(self.ids[:, None] == self.ids)
        if self.lengths is not None:
            inside = (j < self.lengths[:, None])[:, None, None]
            masks.append(np.broadcast_to(inside, (case.B, 1, case.T, case.S)))
        visible = reduce(np.logical_and, masks) if masks else None
        return visible[None, None] if visible is not None and visible.ndim == 2 else visible

    @cached_property
    def bias(self) -> Array | None:
        """Everything that is added to a logit, as one float32 array (B or 1, H or 1, T, S)."""
        case = self.case
        terms: list[Array] = []
        if case.mask == "float" and self.mask is not None:
            terms.append(self.mask[None, None])
        if case.alibi:
            slopes = segments.alibi_slopes(case.H)[None, :, None, None]
            distance = np.abs(np.arange(case.S - case.T, case.S)[:, None] - np.arange(case.S))
            terms.append((-slopes * distance).astype(np.float32))
        if self.visible is not None:
            terms.append(np.where(self.visible, np.float32(0), np.float32(-np.inf)))
        return reduce(np.add, terms) if terms else None

    @property
    def bias_or_mask(self) -> Array | None:
        """For peers that take either: the bias if something is added to logits, else which keys are visible."""
        return self.bias if self.case.alibi or self.case.mask == "float" else self.visible

    def truth(self) -> Parts:
        """Attention of the sampled rows, (B, H, rows, E)."""
        case, rows = self.case, sampled_rows(self.case)
        options = dict(self.options)
        if self.mask is not None:
            options["mask"] = self.mask[rows]
        if self.ids is not None:
            options["segments"] = (self.ids[rows], self.ids)
        options["query_start"], options["query_runs"] = case.S - case.T, [(int(row), 1, 1) for row in rows]
        return {"out": reference.attention(self.q[:, :, rows], self.k, self.v, **options)}

    def sampled(self, result: Array) -> Parts:
        return {"out": result[:, :, sampled_rows(self.case)]}

    def flops(self) -> int | None:
        """A multiplication and an addition per visible pair and column of k and of v."""
        return 2 * (self.case.D + self.case.E) * visible_pairs(self)

    def traffic(self) -> int | None:
        """q, k, v and the result; of shorter batch rows the keys that they have."""
        keys = self.k.nbytes + self.v.nbytes
        if self.lengths is not None:
            keys = keys * int(self.lengths.sum()) // (self.case.B * self.case.S)
        return int(self.q.nbytes + keys + self.output_bytes)

    @property
    def output_bytes(self) -> int:
        case = self.case
        return case.B * case.H * case.T * case.E * self.q.dtype.itemsize


class Step(Problem):
    """A forward and a backward pass with numbers in them.

    The truth is of all rows: a gradient by one key is a sum over all queries, so a sample would cost as much.
    """

    def truth(self) -> Parts:
        case = self.case
        assert not case.altered, "options that name query rows would have to be cut with them"
        parts: Parts = dict(
            out=np.empty(self.dout.shape),
            dq=np.empty(self.q.shape),
            dk=np.zeros(self.k.shape),
            dv=np.zeros(self.v.shape),
        )
        for first in range(0, case.T, _BLOCK):
            rows = slice(first, first + _BLOCK)
            q, options = self.q[:, :, rows], self.options | dict(query_start=case.S - case.T + first)
            gradients = reference.attention_backward(self.dout[:, :, rows], q, self.k, self.v, **options)
            parts["out"][:, :, rows] = reference.attention(q, self.k, self.v, **options)
            parts["dq"][:, :, rows] = gradients["q"]
            parts["dk"] += gradients["k"]
            parts["dv"] += gradients["v"]
        return parts

    def sampled(self, result: Parts) -> Parts:  # type: ignore[override]
        return result

    def flops(self) -> int:
        """Two products forward, five backward: q kᵀ and dout vᵀ, then dv, dq and dk."""
        D, E = self.case.D, self.case.E
        return 2 * (D + E + 3 * D + 2 * E) * visible_pairs(self)

    def traffic(self) -> int:
        """q, k, v and dout in, the output and three gradients out."""
        return 2 * self.output_bytes  # every array has a gradient of its size

    @property
    def output_bytes(self) -> int:
        return int(self.dout.nbytes + self.q.nbytes + self.k.nbytes + self.v.nbytes)


def make(case: Case, seed: int = 0) -> Problem:
    return (Step if case.gradients else Problem)(case, *numbers(case, seed))


def numbers(case: Case, seed: int) -> tuple[Array, Array, Array, Array]:
    """q, k, v and dout."""
    random, dtype = np.random.default_rng(seed), numpy_dtype(case.dtype)

    def drawn(*shape: int) -> Array:
        return random.standard_normal(shape, dtype=np.float32).astype(dtype)

    q = drawn(case.B, case.H, case.T, case.D)
    k = drawn(case.B, case.G, case.S, case.D)
    v = drawn(case.B, case.G, case.S, case.E)
    return q, k, v, drawn(case.B, case.H, case.T, case.E)


def numpy_dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        need("bfloat16", "ml_dtypes", install=command("bench"))  # adds the name to NumPy's
    return np.dtype(name)


def sampled_rows(case: Case) -> Array:
    """Query rows spread evenly, both ends among them."""
    return np.unique(np.linspace(0, case.T - 1, min(ROWS, case.T)).round().astype(int))


def visible_pairs(problem: Problem) -> int:
    """Pairs (query, key) that the softmax sees, over batch and heads: the work there is to do."""
    case = problem.case
    if case.mask == "bool" or case.padding or case.packed:
        assert problem.visible is not None
        return int(problem.visible.sum()) * case.H * (case.B // len(problem.visible))
    p = np.arange(case.S - case.T, case.S)
    last = np.minimum(p + 1, case.S) if case.causal or case.window else np.full(case.T, case.S)
    first = np.maximum(p + 1 - case.window, 0) if case.window else np.zeros(case.T, int)
    return int(np.maximum(last - first, 0).sum()) * case.B * case.H

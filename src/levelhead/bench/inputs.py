"""The arrays of a forward pass, and the truth about some of its rows.

Inputs are standard normal, so logits have a spread of 1, as a level head has. Masks belong to the case; only q, k and v
change with the seed. The truth is `levelhead.reference` in float64 on a sample of query rows: all heads and keys, but
never a whole matrix of scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from levelhead import reference
from levelhead.bench.calls import Array, Parts
from levelhead.bench.cases import Case
from levelhead.call import segments

ROWS = 64  # query rows compared with the truth, of each head
_VISIBLE = 0.9  # share of a random boolean mask that is True


@dataclass(frozen=True)
class Problem:
    """A forward pass with numbers in it."""

    case: Case
    q: Array  # (B, H, T, D)
    k: Array  # (B, G, S, D)
    v: Array  # (B, G, S, E)

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
        visible: Array | None = None
        if case.causal or case.window:
            visible = j <= p
        if visible is not None and case.window:
            visible &= j > p - case.window
        if case.mask == "bool":
            visible = self.mask if visible is None else visible & self.mask
        if self.ids is not None:
            same = self.ids[:, None] == self.ids
            visible = same if visible is None else visible & same
        if self.lengths is not None:
            inside = np.broadcast_to((j < self.lengths[:, None])[:, None, None], (case.B, 1, case.T, case.S))
            return inside if visible is None else inside & visible
        return None if visible is None else visible[None, None]

    @cached_property
    def bias(self) -> Array | None:
        """Everything that is added to a logit, as one float32 array (B or 1, H or 1, T, S)."""
        case = self.case
        bias: Array | None = None
        if case.mask == "float" and self.mask is not None:
            bias = self.mask[None, None]
        if case.alibi:
            slopes = segments.alibi_slopes(case.H)[None, :, None, None]
            distance = np.abs(np.arange(case.S - case.T, case.S)[:, None] - np.arange(case.S))
            added = (-slopes * distance).astype(np.float32)
            bias = added if bias is None else bias + added
        if self.visible is not None:
            hidden = np.where(self.visible, np.float32(0), np.float32(-np.inf))
            bias = hidden if bias is None else bias + hidden
        return bias

    def truth(self) -> Parts:
        """Attention of the sampled rows, (B, H, rows, E)."""
        case, rows = self.case, sampled_rows(self.case)
        options = dict(self.options)
        if self.mask is not None:
            options["mask"] = self.mask[rows]
        if self.ids is not None:
            options["segments"] = (self.ids[rows], self.ids)
        out = reference.attention(
            self.q[:, :, rows],
            self.k,
            self.v,
            query_start=case.S - case.T,
            query_runs=[(int(row), 1, 1) for row in rows],
            **options,
        )
        return {"out": out}

    def sampled(self, result: Array) -> Parts:
        return {"out": result[:, :, sampled_rows(self.case)]}

    def flops(self) -> int | None:
        """A multiplication and an addition per visible pair and column of k and of v."""
        return 2 * (self.case.D + self.case.E) * visible_pairs(self)

    def traffic(self) -> int | None:
        """q, k, v and the result."""
        return int(self.q.nbytes + self.k.nbytes + self.v.nbytes + self.output_bytes)

    @property
    def output_bytes(self) -> int:
        case = self.case
        return case.B * case.H * case.T * case.E * self.q.dtype.itemsize


def make(case: Case, seed: int = 0) -> Problem:
    q, k, v, _ = numbers(case, seed)
    return Problem(case, q, k, v)


def numbers(case: Case, seed: int) -> tuple[Array, Array, Array, Array]:
    """q, k, v, and a gradient of the output for cases with a backward pass."""
    random = np.random.default_rng(seed)
    dtype = numpy_dtype(case.dtype)
    q, k, v, dout = (
        random.standard_normal(shape, dtype=np.float32).astype(dtype)
        for shape in (
            (case.B, case.H, case.T, case.D),
            (case.B, case.G, case.S, case.D),
            (case.B, case.G, case.S, case.E),
            (case.B, case.H, case.T, case.E),
        )
    )
    return q, k, v, dout


def numpy_dtype(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


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

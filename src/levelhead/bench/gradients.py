"""A forward and a backward pass: its arrays, a gradient of its output, and the truth.

The truth is `levelhead.reference` in float64, of all rows: a gradient by one key is a sum over all queries, so a sample
would cost as much.
"""

from __future__ import annotations

import numpy as np

from levelhead import reference
from levelhead.bench import inputs
from levelhead.bench.calls import Parts
from levelhead.bench.cases import Case

_BLOCK = 256  # query rows at a time: scores in float64 that stay near the caches


class Step(inputs.Problem):
    """A forward and a backward pass with numbers in them."""

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
        return 2 * (D + E + 3 * D + 2 * E) * inputs.visible_pairs(self)

    def traffic(self) -> int:
        """q, k, v and dout in, the output and three gradients out."""
        return 2 * self.output_bytes  # every array has a gradient of its size

    @property
    def output_bytes(self) -> int:
        return int(self.dout.nbytes + self.q.nbytes + self.k.nbytes + self.v.nbytes)


def make(case: Case, seed: int = 0) -> Step:
    return Step(case, *inputs.numbers(case, seed))

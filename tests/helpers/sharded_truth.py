"""The reference's answer to a sharded case, and the bounds a distributed result is held to. Holds no test."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from levelhead import reference
from sharded import Case, Found, numpy, plain_options
from support import check_output, check_rows, magnitude

# Of the largest gradient, as in test_gradients.py; sums over ranks are taken in float32.
GRADIENTS = {"float32": 4e-6, "float64": 1e-11, "float16": 2e-3, "bfloat16": 2e-2}
SUMMED = 4  # what is summed over all rows cancels, and its error with it less than it does


@cache
def truth_of(feature: str, crossed: bool, world: int, n: int, dtype: str) -> tuple[Any, Any]:
    """The reference's, and its gradients; they know of no plan and no split."""
    case = Case("ring", feature, "crossed" if crossed else "contiguous", world, n, dtype)
    q, k, v, dout, dlse = (numpy(x) for x in case.arrays.values())
    options = plain_options(case)
    seen = reference.observe(q, k, v, **options)
    given = np.where(np.isfinite(seen.logsumexp), dlse, 0.0)
    gradients = reference.attention_backward(dout, q, k, v, dlogsumexp=given, **options)
    if np.ndim(options.get("scale")) == 0:
        gradients["scale"] = gradients["scale"].sum()
    return seen, gradients


def check(case: Case, found: Found) -> None:
    """Within the kernel's own bounds of the reference."""
    seen, _ = truth_of(case.feature, case.split == "crossed", case.world, case.n, case.dtype)
    M = max(magnitude(seen.rows.max), magnitude(seen.rows.min))
    largest = magnitude(numpy(case.arrays["v"])) / (1.0 - case.options.get("dropout", 0.0))
    for out in (found.out, found.plain):
        check_output(numpy(out), seen.output, largest, M=M)
    sinks = case.options.get("sinks")
    check_rows(found.rows, seen.rows, sinks=None if sinks is None else sinks.numpy())
    lse = numpy(found.logsumexp)
    np.testing.assert_allclose(lse, seen.logsumexp, rtol=1e-5, atol=1e-5)
    check_gradients(case, found, max(1.0, M / 8))


def check_gradients(case: Case, found: Found, times: float = 1.0) -> None:
    """Within so many times the bounds of gradients."""
    _, gradients = truth_of(case.feature, case.split == "crossed", case.world, case.n, case.dtype)
    for name, x in found.gradients.items():
        want = gradients[name]
        assert x.shape == np.shape(want), name
        error = np.abs(numpy(x).astype(np.float64) - want).max(initial=0.0)
        # Of a bias that all keys share, the gradient by the output is 0: no rounding may remain of it.
        kind = "float32" if (case.feature, name) == ("row-bias", "mask") else case.dtype  # the mask's own
        bound = GRADIENTS[kind] * (1 + np.abs(want).max(initial=0.0))
        bound *= SUMMED if name in ("scale", "sinks") else 1
        assert error <= bound * times, (name, error, bound)

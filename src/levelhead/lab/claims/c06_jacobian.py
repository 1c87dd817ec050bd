"""C6: the gradient through a softmax is p(1 - p), and nothing is left of it near 0 and 1."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.lab.claim import Claim, Outcome, Params, Plot, Tell, Verdict
from levelhead.lab.measure import logit_gradients
from levelhead.lab.settings import whole, within
from levelhead.weights import weights

Array = NDArray[Any]

EXACT = 1e-12  # float64 in, float64 out
DIFFERENCE, STEP = 1e-8, 1e-5  # of central differences, whose error is about STEP²
DEAD = 1e-6  # of a largest possible 1/4


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    keys, rows = whole("keys", params["keys"], 2, 4096), whole("rows", params["rows"], 1)
    gap = within("gap", params["gap"], 0, 700)
    random = np.random.default_rng(seed)
    off, off_difference = 0.0, 0.0
    for row in range(rows):
        tell(row / rows, "one Jacobian against its formula")
        logits = random.standard_normal(keys) * random.uniform(0.5, 8)
        p, J = jacobian(logits)
        off = max(off, float(np.abs(J - (np.diag(p) - np.outer(p, p))).max()))
        off_difference = max(off_difference, float(np.abs(J - differences(logits)).max()))
    gaps = np.linspace(-gap, gap, 81)
    pairs = [jacobian(np.array([apart, 0.0])) for apart in gaps]
    p, left = np.array([p[0] for p, _ in pairs]), np.array([J[0, 0] for _, J in pairs])
    follows = float(np.abs(left - p * (1 - p)).max())
    right = max(off, follows) <= EXACT and off_difference <= DIFFERENCE
    dies = max(left[0], left[-1]) <= DEAD and abs(left.max() - 0.25) < EXACT
    verdict: Verdict = "refuted"
    if right:
        verdict = "confirmed" if dies else "caveat"
    return Outcome(
        theory={"largest": 0.25, "at p → 0": 0.0, "at p → 1": 0.0, "J - formula": 0.0},
        measured={
            "largest": float(left.max()),
            "at p → 0": float(left[0]),
            "at p → 1": float(left[-1]),
            "J - formula": max(off, follows),
        },
        stderr=None,
        verdict=verdict,
        details={
            "gap": gaps.tolist(),
            "p": p.tolist(),
            "dp/ds": left.tolist(),
            "p(1-p)": (p * (1 - p)).tolist(),
            "J - differences": off_difference,
        },
    )


def jacobian(logits: Array) -> tuple[Array, Array]:
    """p = softmax(logits) and dp_i/ds_j, from the core's own forward and backward pass.

    Every logit is a key of width 1 for the query 1, which is repeated: row i has the gradient of weight i alone.
    """
    n = logits.size
    p, J = logit_gradients(np.eye(n), np.ones((n, 1)), logits[:, None], 1.0)
    return p[0], J


def differences(logits: Array) -> Array:
    """The same Jacobian without a backward pass: each logit moved a little both ways."""
    moved = np.eye(logits.size) * STEP
    q = np.ones((logits.size, 1, 1))
    up, down = (weights(q, (logits + sign * moved)[..., None], 1.0)[:, 0] for sign in (1, -1))
    return np.asarray((up - down).T / (2 * STEP))


CLAIM = Claim(
    id="C6",
    claim="The softmax gradient is governed by p(1 - p), and dies as p goes to 0 or 1.",
    derivation=(
        "p_i = exp(s_i)/Z gives dp_i/ds_j = p_i (δ_ij - p_j): the Jacobian is diag(p) - p pᵀ.\n"
        "Its diagonal is p(1 - p): at most 1/4, at p = 1/2, and about 1 - p near 1. No entry of\n"
        "a row is larger than its diagonal one, so when all p are near 0 or 1 the whole of it\n"
        "is gone."
    ),
    criterion=(
        "confirmed: the core's gradient equals diag(p) - p pᵀ within 1e-12 and central "
        "differences of its own weights within 1e-8, p(1 - p) peaks at 1/4, and is below 1e-6 "
        "at the largest gap between two logits, both ways; caveat: it does not die; else "
        "refuted"
    ),
    expected="confirmed",
    quick={"keys": 16, "rows": 32, "gap": 20.0},
    full={"keys": 64, "rows": 256},
    experiment=experiment,
    plots=(
        Plot(
            "What is left of the gradient",
            "gap of two logits",
            "dp/ds",
            {"gradient of the core": ("details", "dp/ds")},
            along=("details", "gap"),
            theory={"p(1 - p), theory": ("details", "p(1-p)")},
        ),
    ),
)

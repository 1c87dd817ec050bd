"""C13a: additive scores are bounded by ‖v‖₁, not by 1, and grow when v does."""

from __future__ import annotations

import numpy as np

from levelhead.additive import additive_attention
from levelhead.lab.claim import Claim, Outcome, Params, Plot, Tell, Verdict
from levelhead.lab.measure import Array, curve
from levelhead.lab.settings import ascending, whole

REACHED = 0.999  # of the bound, by keys made to reach it
LINEAR = 1e-6
SATURATED = 0.9  # mean top-1 weight


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    batches, keys = whole("batches", params["batches"], 2), whole("keys", params["keys"], 3)
    width = whole("width", params["width"], 1)
    d_k = whole("d_k", params["d_k"], width)  # so that some key reaches every sign pattern of tanh
    growths = ascending("growths", params["growths"])
    spread: list[list[float]] = [[] for _ in growths]
    top1: list[list[float]] = [[] for _ in growths]
    reached, largest, bounds = [], [], []
    for batch in range(batches):
        tell(batch / batches, "additive scores")
        rng = np.random.default_rng((seed, batch))
        q, k, w, v = _problem(rng, d_k, keys, width)
        for at, growth in enumerate(growths):
            scores, weights = additive(q, k, w, growth * v)
            bound = growth * np.abs(v).sum()
            spread[at].append(float(scores[:-1].std()))
            top1[at].append(float(weights[:-1].max() / weights[:-1].sum()))
            reached.append(float(scores[-1] / bound))
            largest.append(float(np.abs(scores).max() / bound))
        bounds.append(float(np.abs(v).sum()))
    by_growth = np.asarray(spread) / np.asarray(growths)[:, None]
    linear = float(np.abs(by_growth / by_growth[0] - 1).max())
    sharp = curve(growths, top1)
    bounded = max(largest) <= 1 + 1e-9 and min(reached) >= REACHED and min(bounds) > 1
    grows = linear <= LINEAR and sharp.y[-1] >= SATURATED
    verdict: Verdict = "refuted"
    if bounded:
        verdict = "confirmed" if grows else "caveat"
    return Outcome(
        theory={"largest |s|/‖v‖₁": 1.0, "reached |s|/‖v‖₁": 1.0, "spread/growth - 1": 0.0},
        measured={
            "largest |s|/‖v‖₁": max(largest),
            "reached |s|/‖v‖₁": min(reached),
            "spread/growth - 1": linear,
            "‖v‖₁": float(np.mean(bounds)),
            "top1": list(sharp.y),
        },
        stderr={
            "largest |s|/‖v‖₁": None,
            "reached |s|/‖v‖₁": None,
            "spread/growth - 1": None,
            "‖v‖₁": float(np.std(bounds, ddof=1) / np.sqrt(batches)),
            "top1": list(sharp.stderr),
        },
        verdict=verdict,
        details={"spread": curve(growths, spread).json(), "top1": sharp.json()},
    )


def _problem(rng: np.random.Generator, d_k: int, keys: int, width: int) -> tuple[Array, Array, Array, Array]:
    """A query, random keys and, last, the key whose score is as large as any can be."""
    q, k = rng.standard_normal((1, d_k)), rng.standard_normal((keys, d_k))
    w = rng.standard_normal((width, d_k)) / np.sqrt(d_k)
    v = rng.standard_normal(width) / np.sqrt(width)
    best = np.linalg.pinv(w) @ (20 * np.sign(v)) - q[0]  # tanh(W q + W k) = sign(v), as good as
    return q, np.vstack([k, best]), w, v


def additive(q: Array, k: Array, w: Array, v: Array) -> tuple[Array, Array]:
    """Scores and weights of one query, from the core.

    A key of -q, put in front, has the score v · tanh(0) = 0; so s_j = ln(p_j/p_0).
    """
    k = np.vstack([-q, k])
    p = np.asarray(additive_attention(q, k, np.eye(len(k)), w, w, v))[0]
    return np.log(p[1:] / p[0]), p[1:]


CLAIM = Claim(
    id="C13a",
    claim="Additive scores are bounded by ‖v‖₁, not by 1: they still grow when v grows.",
    derivation=(
        "s = Σ v_i tanh(·)_i and |tanh| < 1, so |s| < Σ|v_i| = ‖v‖₁, and a key that makes every\n"
        "tanh the sign of v_i comes as close as you like. With v_i of variance 1/A that is\n"
        "about 0.8 √A, 6.4 for A = 64. s is linear in v: let v grow by g in training and all\n"
        "scores do, and softmax saturates as it does for dot products. tanh bounds the terms,\n"
        "not the sum."
    ),
    criterion=(
        "confirmed: no score exceeds ‖v‖₁ > 1, keys made for it reach 99.9 % of it, the spread "
        "of scores grows in proportion to v within 1e-6, and at the largest growth the mean "
        "top-1 weight of random keys is at least 0.9; caveat: bounded, but not saturated so; "
        "else refuted"
    ),
    expected="confirmed",
    quick={"d_k": 64, "width": 64, "keys": 256, "batches": 64, "growths": [1, 2, 4, 8, 16, 32, 64]},
    full={"batches": 512},
    experiment=experiment,
    plots=(
        Plot(
            "Largest weight", "growth of v", "top-1 weight", {"": ("measured", "top1")}, ("params", "growths"), log="x"
        ),
        Plot("Spread of scores", "growth of v", "σ", {"": ("details", "spread")}, log="xy"),
    ),
)

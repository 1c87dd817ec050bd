"""C8a: with the maximum subtracted nothing overflows but a score that was too large to store."""

from __future__ import annotations

import numpy as np

from levelhead.lab import theory
from levelhead.lab.claim import Claim, Outcome, Params, Tell, Verdict
from levelhead.lab.experiment import Setting, weights
from levelhead.lab.rounding import LARGEST, rounded
from levelhead.lab.sampling import Array, count, curve, draw, numbers, shares_agree

HALF = "float16"


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    setting = Setting(d_k=params["d_k"], divide="none", keys=params["keys"], seed=seed)
    batches, queries = count(params, "batches", 2), count(params, "queries", 1)
    q, k = draw(setting, batches, queries)
    scales = numbers(params, "scales")
    tell(0.0, "the core at every scale")
    lost = [float(_lost(weights(q, k, scale)).mean()) for scale in scales]
    growths = numbers(params, "growths")
    stored, shifted, core = [], [], []
    same = True
    for done, growth in enumerate(growths):
        tell((1 + done) / (1 + len(growths)), f"entries of standard deviation {growth:g}")
        large_q, large_k = ((growth * x).astype(np.float16) for x in (q, k))
        wide = large_q.astype(np.float32) @ large_k.astype(np.float32).swapaxes(-1, -2)
        scores = rounded(wide, HALF)
        too_large, failed = np.isposinf(scores).any(-1), _lost(shifted_softmax(scores))
        same = same and bool((too_large == failed).all())
        stored.append(too_large.mean(-1))
        shifted.append(failed.mean(-1))
        core.append(_lost(weights(large_q, large_k, 1.0)).mean(-1))
    share = curve(growths, stored)
    expected = [
        theory.overflowing(setting.d_k, setting.keys, growth**2, LARGEST[HALF])
        for growth in growths
    ]
    as_predicted = shares_agree(share, expected, batches * queries)
    never = not any(lost) and not np.any(core)
    verdict: Verdict = "refuted"
    if never:
        verdict = "confirmed" if same and as_predicted and share.y[-1] > 0.5 else "caveat"
    return Outcome(
        theory={"core": [0.0] * len(scales), "float16 score infinite": expected},
        measured={"core": lost, "float16 score infinite": list(share.y)},
        stderr={"core": [0.0] * len(scales), "float16 score infinite": list(share.stderr)},
        verdict=verdict,
        details={
            "score infinite": share.json(),
            "shifted softmax of float16 scores lost": curve(growths, shifted).json(),
            "core on the same float16 arrays lost": curve(growths, core).json(),
        },
    )


def shifted_softmax(scores: Array) -> Array:
    """A float16 softmax that subtracts its maximum, every step rounded."""
    with np.errstate(invalid="ignore", over="ignore"):
        powers = rounded(np.exp(rounded(scores - scores.max(-1, keepdims=True), HALF)), HALF)
        found: Array = rounded(powers / powers.sum(-1, keepdims=True), HALF)
    return found


def _lost(p: Array) -> Array:
    """Which rows are no weights any more: not finite, or not of sum 1."""
    total = p.astype(np.float64).sum(-1)
    lost: Array = ~(np.abs(total - 1) < 0.05)
    return lost


CLAIM = Claim(
    id="C8a",
    claim=(
        "A softmax that subtracts its maximum overflows at no scale; what overflows is the "
        "low-precision score itself."
    ),
    derivation=(
        "softmax(s) = softmax(s - max s), and exp of numbers ≤ 0 is at most 1. The largest\n"
        "weight has exp(0) = 1 in the sum, so it is never 0/0 either. What must be a number is\n"
        "s: a float16 score is infinite from 65520 on, and inf - inf is NaN. With entries of\n"
        "standard deviation g a row gets there with probability 1 - Φ(65504/(g²√d_k))^n. The\n"
        "core keeps the scores of float16 arrays in float32, which ends at 3.4e38."
    ),
    criterion=(
        "confirmed: no row of the core is lost at any scale or growth, float16 scores are "
        "infinite as often as theory says (within 4 standard errors) and for most rows at the "
        "largest growth, and a shifted float16 softmax loses exactly those rows; caveat: only "
        "the core's part holds; else refuted"
    ),
    expected="confirmed",
    quick={
        "d_k": 64,
        "keys": 256,
        "batches": 64,
        "queries": 8,
        "scales": [1.0, 1e3, 1e6, 1e12, 1e24, 1e36],
        "growths": [1.0, 16.0, 32.0, 48.0, 64.0, 96.0],
    },
    full={"batches": 512},
    experiment=experiment,
)

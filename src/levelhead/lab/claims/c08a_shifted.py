"""C8a: with the maximum subtracted nothing overflows but a score that was too large to store."""

from __future__ import annotations

import numpy as np

from levelhead.lab import theory
from levelhead.lab.claim import Claim, Outcome, Params, Plot, Tell, Verdict
from levelhead.lab.measure import Array, Setting, batch_sizes, batches, curve, gather
from levelhead.lab.rounding import LARGEST, rounded
from levelhead.lab.settings import ascending
from levelhead.lab.verdict import shares_agree
from levelhead.weights import weights

HALF = "float16"


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    setting = Setting(d_k=params["d_k"], scale="none", keys=params["keys"], seed=seed)
    number, queries = batch_sizes(params)
    scales, growths = ascending("scales", params["scales"]), ascending("growths", params["growths"])
    at_scale, grown = [], []
    for done, scale in enumerate(scales):
        tell(done / len(scales) / 2, f"the core at a scale of {scale:g}")
        drawn = batches(setting, number, queries)
        at_scale.append(gather({"core": _lost(weights(q, k, scale))} for q, k in drawn))
    for done, growth in enumerate(growths):
        tell((1 + done / len(growths)) / 2, f"entries of standard deviation {growth:g}")
        drawn = batches(setting, number, queries)
        grown.append(gather(_in_half(growth * q, growth * k) for q, k in drawn))
    lost = [float(one["core"].mean()) for one in at_scale]
    infinite, shifted, core = (
        curve(growths, [one[name].mean(-1) for one in grown]) for name in ("infinite", "shifted", "core")
    )
    same = all(bool((one["infinite"] == one["shifted"]).all()) for one in grown)
    expected = [theory.overflowing(setting.d_k, setting.keys, growth**2, LARGEST[HALF]) for growth in growths]
    as_predicted = shares_agree(infinite, expected, number * queries)
    never = not any(lost) and not any(core.y)
    verdict: Verdict = "refuted"
    if never:
        verdict = "confirmed" if same and as_predicted and infinite.y[-1] > 0.5 else "caveat"
    return Outcome(
        theory={"core": [0.0] * len(scales), "float16 score infinite": expected},
        measured={"core": lost, "float16 score infinite": list(infinite.y)},
        stderr={"core": [0.0] * len(scales), "float16 score infinite": list(infinite.stderr)},
        verdict=verdict,
        details={
            "score infinite": infinite.json(),
            "shifted softmax of float16 scores lost": shifted.json(),
            "core on the same float16 arrays lost": core.json(),
        },
    )


def _in_half(q: Array, k: Array) -> dict[str, Array]:
    """Of float16 arrays, which rows (B, T) have an infinite float16 score, which of them a shifted
    float16 softmax loses, and which the core does."""
    q, k = q.astype(np.float16), k.astype(np.float16)
    scores = rounded(q.astype(np.float32) @ k.astype(np.float32).swapaxes(-1, -2), HALF)
    return {
        "infinite": np.asarray(np.isposinf(scores).any(-1)),
        "shifted": _lost(shifted_softmax(scores)),
        "core": _lost(weights(q, k, 1.0)),
    }


def shifted_softmax(scores: Array) -> Array:
    """A float16 softmax that subtracts its maximum, every step rounded."""
    with np.errstate(invalid="ignore", over="ignore"):
        powers = rounded(np.exp(rounded(scores - scores.max(-1, keepdims=True), HALF)), HALF)
        total = rounded(powers.sum(-1, keepdims=True), HALF)
        found: Array = rounded(powers / total, HALF)
    return found


def _lost(p: Array) -> Array:
    """Which rows are no weights any more: not finite, or not of sum 1."""
    total = p.astype(np.float64).sum(-1)
    lost: Array = ~(np.abs(total - 1) < 0.05)
    return lost


CLAIM = Claim(
    id="C8a",
    claim=(
        "A softmax that subtracts its maximum overflows at no scale; what overflows is the low-precision score itself."
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
    plots=(
        Plot(
            "Rows with an infinite float16 score",
            "standard deviation of the entries",
            "share of rows",
            {"": ("measured", "float16 score infinite")},
            along=("params", "growths"),
        ),
    ),
)

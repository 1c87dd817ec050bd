"""C9: dividing by d_k over-shrinks: at initialisation attention is flat."""

from __future__ import annotations

import math

import numpy as np

from levelhead import stats
from levelhead.lab import theory
from levelhead.lab.claim import Claim, Outcome, Params, Plot, Tell, Verdict
from levelhead.lab.measure import Curve, over_widths, settings
from levelhead.lab.verdict import agree


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    measured = over_widths(params, seed, lambda x, words: tell(x / 2, words), params["scale"])
    root = over_widths(params, seed, lambda x, words: tell((1 + x) / 2, words), "1/sqrt(d_k)")
    whole = math.log(params["keys"])
    chosen = settings(params, seed, params["scale"])
    expected = [theory.softmax_of(one.d_k, one.keys, one.factor).entropy for one in chosen]
    entropy = measured["entropy"]
    # The difference from a uniform row is tiny, so the comparison is of that difference.
    deficit = Curve(entropy.x, tuple(whole - y for y in entropy.y), entropy.stderr)
    as_predicted = agree(deficit, whole - np.asarray(expected), relative=0.02)
    flat, level = (
        [stats.level(y / whole, s) for y, s in zip(one["entropy"].y, one["saturated"].y, strict=True)]
        for one in (measured, root)
    )
    contrast = flat[-1] == "flat" and set(level) == {"level"}
    approaching = entropy.y[-1] > entropy.y[0] and as_predicted
    verdict: Verdict = "confirmed" if contrast and approaching else "refuted"
    return Outcome(
        theory={"H/ln n": [x / whole for x in expected]},
        measured={"H/ln n": [y / whole for y in entropy.y]},
        stderr={"H/ln n": [y / whole for y in entropy.stderr]},
        verdict=verdict,
        details={
            **{name: one.json() for name, one in measured.items()},
            "under √d_k": {name: one.json() for name, one in root.items()},
            "deficit": deficit.json(),
            "levels": {"d_k": flat, "√d_k": level},
        },
    )


CLAIM = Claim(
    id="C9",
    claim="Dividing by d_k over-shrinks: attention is too flat.",
    derivation=(
        "At initialisation q·k has standard deviation √d_k, so q·k/d_k has 1/√d_k, and small\n"
        "logits give H ≈ ln n - σ²/2 = ln n - 1/(2 d_k): uniform but for 1/(2 d_k), and the\n"
        "more so the wider the head. Under √d_k it is ln n - 1/2 at every width. This is about\n"
        "independent q and k; what training does to them is C9a."
    ),
    criterion=(
        "confirmed: ln n - H is as theory says within 4 standard errors (or 2 %) at every d_k, "
        f"H rises, at the largest d_k the gauge reads flat (H/ln n ≥ {stats.FLAT}), and under "
        "√d_k it reads level at every d_k; else refuted"
    ),
    expected="confirmed",
    quick={"d_k": [4, 16, 64, 256, 1024], "keys": 256, "batches": 64, "queries": 8, "scale": "1/d_k"},
    full={"d_k": [4, 16, 64, 256, 1024, 4096], "batches": 256},
    experiment=experiment,
    plots=(Plot("Entropy, divided by d_k", "d_k", "H/ln n", {"": ("measured", "H/ln n")}, ("params", "d_k"), log="x"),),
)

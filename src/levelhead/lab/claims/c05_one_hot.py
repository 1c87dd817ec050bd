"""C5: without a scale, large heads look at one key."""

from __future__ import annotations

from levelhead.lab import theory
from levelhead.lab.claim import Claim, Outcome, Params, Plot, Tell, Verdict
from levelhead.lab.measure import over_widths, settings
from levelhead.lab.verdict import BOUND, agree

NEAR_ONE_HOT = 0.9  # mean top-1 weight


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    measured = over_widths(params, seed, tell, params["scale"])
    entropy, top1 = measured["entropy"], measured["top1"]
    predicted = [theory.softmax_of(one.d_k, one.keys, one.factor) for one in settings(params, seed, params["scale"])]
    expected = {"entropy": [row.entropy for row in predicted], "top1": [row.top1 for row in predicted]}
    sharper = max(entropy.steps()) < -BOUND and min(top1.steps()) > BOUND
    as_predicted = all(agree(measured[name], expected[name], relative=0.003) for name in expected)
    verdict: Verdict = "refuted"
    if sharper and as_predicted:
        verdict = "confirmed" if top1.y[-1] >= NEAR_ONE_HOT else "caveat"
    return Outcome(
        theory=expected,
        measured={"entropy": list(entropy.y), "top1": list(top1.y)},
        stderr={"entropy": list(entropy.stderr), "top1": list(top1.stderr)},
        verdict=verdict,
        details={name: one.json() for name, one in measured.items()},
    )


CLAIM = Claim(
    id="C5",
    claim="At large d_k, unscaled, the softmax goes near one-hot: one key takes all the attention.",
    derivation=(
        "For a query q and normal keys the n logits are independent and normal with σ = |q| ≈\n"
        "√d_k. Up to σ = √(2 ln n) many keys share the weight and H ≈ ln n - σ²/2. Beyond it\n"
        "the few largest logits hold it all: their gaps are about σ/√(2 ln n), so 1 - Σp² ≈ √(2\n"
        "ln n)/σ goes to 0 like 1/√d_k. Both ends, and what lies between, are integrated\n"
        "numerically (lab/theory.py). So a head with d_k below about 2 ln n is safe without a\n"
        "scale."
    ),
    criterion=(
        "confirmed: from each d_k to the next entropy falls and top-1 weight rises by more than "
        "4 standard errors, both as theory says within 4 standard errors and 0.3 %, and the mean "
        f"top-1 weight at the largest d_k is at least {NEAR_ONE_HOT}; caveat: all but "
        "the last; else refuted"
    ),
    expected="confirmed",
    quick={"d_k": [4, 16, 64, 256, 1024], "keys": 256, "batches": 64, "queries": 8, "scale": "none"},
    full={"d_k": [1, 4, 16, 64, 256, 1024, 4096], "batches": 256},
    experiment=experiment,
    plots=(
        Plot("Entropy, undivided", "d_k", "H in nats", {"": ("measured", "entropy")}, ("params", "d_k"), log="x"),
        Plot(
            "Largest weight, undivided", "d_k", "top-1 weight", {"": ("measured", "top1")}, ("params", "d_k"), log="x"
        ),
    ),
)

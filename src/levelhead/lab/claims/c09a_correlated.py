"""C9a: once a query and its key are correlated, their product grows like d_k."""

from __future__ import annotations

import numpy as np

from levelhead.lab.claim import Claim, Outcome, Params, Plot, Tell, Verdict
from levelhead.lab.measure import Array, Curve, curve, factor_of, pair_logits, settings
from levelhead.lab.settings import whole, within
from levelhead.lab.verdict import BOUND, agree, slope
from levelhead.weights import weights

RULES = {"none": 1.0, "1/sqrt(d_k)": 0.5, "1/d_k": 0.0}  # scale -> the exponent of growth in theory


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    rho = within("correlation", params["correlation"], 0, 1)
    chosen, pairs = settings(params, seed, "1/d_k"), whole("pairs", params["pairs"], 2)
    widths = [one.d_k for one in chosen]
    logit: dict[str, list[Array]] = {rule: [] for rule in RULES}
    match: dict[str, list[Array]] = {rule: [] for rule in RULES}
    for done, one in enumerate(chosen):
        tell(done / len(chosen), f"d_k = {one.d_k}")
        q, k = _correlated(one.d_k, one.keys, pairs, rho, seed)
        for rule in RULES:
            factor = factor_of(rule, one.d_k)
            logit[rule].append(pair_logits(q, k[:, 0], factor))
            match[rule].append(weights(q[:, None], k, factor)[:, 0, 0])
    grown = {rule: curve(widths, samples) for rule, samples in logit.items()}
    theory = {rule: [rho * d * factor_of(rule, d) for d in widths] for rule in RULES}
    slopes = {rule: _exponent(one) for rule, one in grown.items()}
    as_predicted = all(agree(one, theory[rule]) for rule, one in grown.items())
    fits = [fit for rule in RULES if (fit := slopes[rule]) is not None]
    grows = len(fits) == len(RULES) and all(
        abs(value - RULES[rule]) <= BOUND * error for rule, (value, error) in zip(RULES, fits, strict=True)
    )
    verdict: Verdict = "confirmed" if grows and as_predicted else "refuted"
    return Outcome(
        theory={"exponent": RULES, "mean logit": theory},
        measured={
            "exponent": {rule: fit and fit[0] for rule, fit in slopes.items()},
            "mean logit": {rule: list(one.y) for rule, one in grown.items()},
        },
        stderr={
            "exponent": {rule: fit and fit[1] for rule, fit in slopes.items()},
            "mean logit": {rule: list(one.stderr) for rule, one in grown.items()},
        },
        verdict=verdict,
        details={
            "logit": {rule: one.json() for rule, one in grown.items()},
            "weight of the match": {rule: curve(widths, x).json() for rule, x in match.items()},
        },
    )


def _correlated(d_k: int, keys: int, pairs: int, rho: float, seed: int) -> tuple[Array, Array]:
    """Queries (N, D) with keys (N, S, D), of which the first is correlated with its query."""
    random = np.random.default_rng((seed, d_k))
    q = random.standard_normal((pairs, d_k), np.float32)
    k = random.standard_normal((pairs, keys, d_k), np.float32)
    k[:, 0] = np.float32(rho) * q + np.float32((1 - rho**2) ** 0.5) * k[:, 0]
    return q, k


def _exponent(measured: Curve) -> tuple[float, float] | None:
    """None where the mean cannot be distinguished from 0."""
    sure = all(y > BOUND * error for y, error in zip(measured.y, measured.stderr, strict=True))
    return slope(measured) if sure else None


CLAIM = Claim(
    id="C9a",
    claim=("Once training correlates q and k, q·k grows like d_k, and 1/d_k is the right scale (as µP has it)."),
    derivation=(
        "Entries with correlation ρ: k = ρ q + √(1-ρ²) z, so E q·k = ρ d_k, and its spread is\n"
        "still of the order √d_k. A match thus stands out by ρ d_k unscaled, by ρ √d_k under\n"
        "√d_k, which grows without limit as heads get wider, and by ρ under d_k, at every\n"
        "width. ρ alone is at most 1, which is little beside ln n: with 1/d_k a constant in\n"
        "front (8/d_k, say) has to set how sharp a match is; √d_k sets it by width. Before q\n"
        "and k are correlated 1/d_k is flat (C9)."
    ),
    criterion=(
        "confirmed: the mean logit of a correlated pair is ρ d_k · scale within 4 standard "
        "errors, and its fitted exponent in d_k is 1 unscaled, 1/2 under √d_k and 0 under d_k, "
        "within 4 standard errors; else refuted"
    ),
    expected="confirmed",
    quick={"d_k": [16, 64, 256, 1024], "keys": 32, "pairs": 1024, "correlation": 0.5},
    full={"d_k": [16, 32, 64, 128, 256, 512, 1024], "pairs": 4096},
    experiment=experiment,
    plots=(
        Plot("Logit of a match", "d_k", "mean logit", {"": ("measured", "mean logit")}, ("params", "d_k"), log="xy"),
        Plot("Weight of a match", "d_k", "weight", {"": ("details", "weight of the match")}, log="x"),
    ),
)

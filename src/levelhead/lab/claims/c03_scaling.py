"""C3: dividing by √d_k gives back the variance that d_k = 1 has, whatever that was."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.lab.claim import Claim, Outcome, Params, Plot, Tell, UndecidedError
from levelhead.lab.measure import pair_logits
from levelhead.lab.settings import numbers, whole
from levelhead.lab.verdict import judged, log_variance

DERIVATION = """\
Var(cX) = E[(cX − cE[X])²] = c² Var(X). If entries have any variance, call a the variance of one
product qᵢkᵢ, which is Var(q·k) at d_k = 1. Terms are independent, so at d_k it is d_k · a: 64a
at 64. With c = 1/√d_k: Var(q·k/√d_k) = d_k · a / d_k = a. The root belongs to c² in the first
line: dividing by d_k itself would leave a/d_k."""

EXCESS = 6.0  # kurtosis of a product of two normal numbers; a sum of d_k has 6/d_k
FACTORS = (0.125, 3.0)  # c of Var(cX) = c² Var(X)
EXACT = 1e-12  # relative, of float64: that law holds for any samples, not on average
PRECISE = 0.05  # standard error of a ratio above which the claim is undecided


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    variances = numbers("a", params["a"], 1e-6, 1e6)
    d_k = whole("d_k", params["d_k"], 2, 4096)
    samples = whole("samples", params["samples"], 16, 1 << 22)
    random = np.random.default_rng(seed)
    growth, back, errors, square = [], [], [], 0.0
    for number, a in enumerate(variances):
        tell(number / len(variances), f"a = {a:g}")
        one, many = (_pairs(random, samples, width, a) for width in (1, d_k))
        at_1, error_1 = log_variance(pair_logits(one[0], one[1], "none"), EXCESS)
        at_d, error_d = log_variance(pair_logits(many[0], many[1], "none"), EXCESS / d_k)
        scaled, _ = log_variance(pair_logits(many[0], many[1], params["scale"]), EXCESS / d_k)
        growth.append(np.exp(at_d - at_1))
        back.append(np.exp(scaled) / a)
        errors.append((np.hypot(error_1, error_d), error_d))
        square = max(square, *(_square_gap(many, c) for c in FACTORS))
    to_growth, to_back = np.array(errors).T
    if to_growth.max() > PRECISE:
        raise UndecidedError(f"{samples} samples leave the ratio uncertain; set samples higher")
    verdict = judged([*np.log(np.array(growth) / d_k) / to_growth, *np.log(back) / to_back])
    grew = f"Var(q·k) at d_k = {d_k} over that at 1"
    again = "Var of the scaled q·k, over a"
    law = "|Var(cX) / (c² Var(X)) − 1|, largest"
    return Outcome(
        theory={grew: [float(d_k)] * len(growth), again: [1.0] * len(back), law: 0.0},
        measured={grew: growth, again: back, law: square},
        stderr={grew: growth * to_growth, again: back * to_back, law: None},
        verdict=verdict if square < EXACT else "refuted",
        details={"a": variances},
    )


def _pairs(random: np.random.Generator, samples: int, width: int, a: float) -> NDArray[Any]:
    """q and k whose products qᵢkᵢ have variance a."""
    pairs: NDArray[Any] = a**0.25 * random.standard_normal((2, samples, width))
    return pairs


def _square_gap(pairs: NDArray[Any], c: float) -> float:
    q, k = pairs
    return float(abs(pair_logits(q, k, c).var() / (c**2 * pair_logits(q, k, 1.0).var()) - 1))


CLAIM = Claim(
    id="C3",
    claim="If Var(q·k) is a at d_k = 1, it is d_k · a at d_k, and dividing by √d_k restores a.",
    derivation=DERIVATION,
    criterion=(
        "For every a: confirmed if Var(q·k) at d_k is within 3 standard errors of d_k times "
        "that at 1, and the scaled variance within 3 of a; refuted if one is beyond 5, or if "
        "Var(cX) is not c² Var(X) to 1e-12; undecided between, or if a ratio's standard error "
        "exceeds 5 %."
    ),
    expected="confirmed",
    quick={"a": [0.1, 1.0, 25.0], "d_k": 64, "samples": 65536, "scale": "1/sqrt(d_k)"},
    full={"samples": 1 << 18},
    experiment=experiment,
    plots=(
        Plot(
            "Scaled, the variance is a again",
            "a, the variance at d_k = 1",
            "variance / a",
            {"scaled q·k": ("measured", "Var of the scaled q·k, over a")},
            along=("details", "a"),
            log="x",
        ),
    ),
)

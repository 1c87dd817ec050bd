"""C4: softmax turns a gap of logits into a ratio of weights. The notes' numbers, to the digit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.lab.claim import Claim, Outcome, Params, Plot, Tell
from levelhead.lab.settings import within
from levelhead.weights import weights

DERIVATION = """\
pᵢ = e^sᵢ / Σⱼ e^sⱼ, so pᵢ/pⱼ = e^(sᵢ − sⱼ): a gap is exponentiated. 7 against 3 is 2.3 to 1
before and e⁴ = 54.6 to 1 after; scaling the logits by c raises every ratio to the power c,
which is how √d_k takes the exaggeration back. Only gaps count: [1007, 1003] gives the weights
of [7, 3]. The core gets the logits as one query q = [1], keys k = logits, and values that are
the identity."""

# What the notes print: numbers to so many decimals, and "≈" as within 1e-9.
NOTES: list[tuple[list[float], list[float], float]] = [
    ([7, 3], [0.98, 0.02], 0.005),
    ([4, 5], [0.2689, 0.7311], 0.00005),
    ([1, 10], [0.0001, 0.9999], 0.00005),
    ([25, 2, -3], [1.0, 0.0, 0.0], 1e-9),
]
DTYPES = ("float64", "float32")
GAPS = np.array([0.0, 0.1, 1.0, 4.0, 9.0, 16.0, 64.0])
CLOSE = 1e-5  # of ln(p₁/p₂) to the gap, relative to 1 + gap, in float32


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    scale = within("scale", params["scale"], 0.0, 1e3)
    theory: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    right = True
    for logits, printed, half in NOTES:
        for dtype in DTYPES:
            p = _softmax(np.array(logits, dtype), scale)
            theory[f"{logits}, {dtype}"] = printed
            measured[f"{logits}, {dtype}"] = p
            right &= bool(np.all(np.abs(p.astype(np.float64) - printed) <= half))
    away = "|ln(p₁/p₂) − gap| / (1 + gap), largest"
    theory[away] = 0.0
    measured[away] = max(_ratio_gap(dtype, scale) for dtype in DTYPES)
    exponential = measured[away] < CLOSE
    return Outcome(
        theory=theory,
        measured=measured,
        stderr=None,
        verdict="confirmed" if right and exponential else "refuted",
        details={
            "gap": GAPS,
            "ratio of logits 10 + gap : 10": 1 + GAPS / 10,
            "weights": np.exp(GAPS),
            "ratio of weights": _ratios("float64", scale),
        },
    )


def _softmax(logits: NDArray[Any], scale: float) -> NDArray[Any]:
    one = np.ones((1, 1), logits.dtype)
    p: NDArray[Any] = weights(one, logits[:, None], scale)[0]
    return p


def _ratio_gap(dtype: str, scale: float) -> float:
    """How far the logarithm of two weights' ratio is from the gap of their logits."""
    return float(np.max(np.abs(np.log(_ratios(dtype, scale)) - GAPS) / (1 + GAPS)))


def _ratios(dtype: str, scale: float) -> NDArray[np.float64]:
    """p₁/p₂ of two logits for every gap between them."""
    pairs = np.array([_softmax(np.array([gap, 0], dtype), scale) for gap in GAPS], np.float64)
    ratios: NDArray[np.float64] = pairs[:, 0] / pairs[:, 1]
    return ratios


CLAIM = Claim(
    id="C4",
    claim="Softmax exaggerates gaps: a difference of logits becomes a ratio of weights.",
    derivation=DERIVATION,
    criterion=(
        "Confirmed if the core, in float64 and in float32, gives every digit the notes print "
        "([7, 3], [4, 5], [1, 10], [25, 2, −3]; ≈ is within 1e-9) and ln(p₁/p₂) is the gap to "
        "1e-5, for gaps from 0 to 64; refuted otherwise."
    ),
    expected="confirmed",
    quick={"scale": 1.0},
    full={},
    experiment=experiment,
    plots=(
        Plot(
            "A gap becomes a ratio",
            "gap of two logits",
            "p₁/p₂",
            {"measured": ("details", "ratio of weights")},
            along=("details", "gap"),
            theory={"theory: exp(gap)": ("details", "weights")},
            log="y",
        ),
    ),
)

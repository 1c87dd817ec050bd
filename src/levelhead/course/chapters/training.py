"""Chapter 6: does training care? The undivided gradient is larger, and still teaches less: it reaches few scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead import stats
from levelhead.attention import attention
from levelhead.course.chapter import Chapter
from levelhead.course.numbers import Number, live, recorded, theory
from levelhead.course.results import claim, claim_number, measured
from levelhead.lab import measure
from levelhead.lab import recorded as records
from levelhead.lab.claims.c07_vanishing import LEARNT
from levelhead.lab.claims.c12_training import BOUNDS
from levelhead.lab.figures import training
from levelhead.weights import weights

TOKENS, WIDTH, VALUES = 64, 64, 32  # of the head that the samples compute
D_K = 256
DEPTH = 8  # layers of the trainings that are drawn
COLOURS = ("nothing", "root", "width")  # of training.RULES
# Ratios, undivided over divided by √d_k, with the optimiser of the trainings that they were measured in: those of the
# claims, which the lab's grid trains with Adam, but for the movement of W_Q. "none": before the first step.
RATIOS = {
    "first": "none",
    "gradient": "adam",
    "moved": "sgd",
    "reached": "adam",
    "steps_drawn": "adam",
    "steps": "adam",
    "steps_deep": "adam",
    "steps_narrow": "adam",
    "values_gradient": "adam",
    "values": "adam",
}
DARKEST = 4  # times the mean push: as dark as a score is drawn
_SHADES = 9

Array = NDArray[Any]


@cache
def _toy() -> dict[str, tuple[float, Array, float]]:
    """By divisor, of one head at its beginning: ‖dL/dW_Q‖; dL/ds, the push on each of its scores; the share of its rows
    that are near one-hot.

    The loss is the mean square distance from random targets.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((TOKENS, WIDTH))
    w_q, w_k, w_v = (rng.standard_normal((WIDTH, n)) / math.sqrt(WIDTH) for n in (D_K, D_K, VALUES))
    target = rng.standard_normal((TOKENS, VALUES))
    q, k, v = x @ w_q, x @ w_k, x @ w_v
    found = {}
    for name, scale in (("undivided", 1.0), ("divided", 1 / math.sqrt(D_K))):
        output = np.asarray(attention(q, k, v, scale=scale))
        dp = 2 * (output - target) / target.size @ v.T
        saturated = float((weights(q, k, scale).max(-1) >= stats.SATURATED_ROW).mean())
        _, ds = measure.logit_gradients(dp, q, k, scale)
        found[name] = (float(np.linalg.norm(x.T @ (ds @ k) * scale)), ds, saturated)
    return found


def _reached(push: Array) -> float:
    """The share of the scores that the gradient reaches."""
    return float(np.abs(push).sum() ** 2 / (push.size * (push**2).sum()))


def _rows_of_half(push: Array) -> int:
    """How many rows have half of the push between them, at least."""
    rows = np.sort(np.abs(push).sum(1))[::-1]
    return int(np.searchsorted(np.cumsum(rows), rows.sum() / 2)) + 1


def _shades(push: Array) -> list[str]:
    """A digit for each score, a text for each row: 0 is white."""
    size = np.abs(push) / np.abs(push).mean() / DARKEST
    return ["".join(map(str, row)) for row in np.rint(_SHADES * np.minimum(size, 1)).astype(int)]


def numbers() -> Mapping[str, Number]:
    here = "levelhead, seed 0"
    toy = _toy()
    return {
        "d_k": theory(D_K, "chosen"),
        "root": theory(math.isqrt(D_K), "√256"),
        "depth": theory(DEPTH, "chosen"),
        "toy_gradient": live(toy["undivided"][0] / toy["divided"][0], here),
        "toy_reached_undivided": live(_reached(toy["undivided"][1]), here),
        "toy_reached_divided": live(_reached(toy["divided"][1]), here),
        "toy_saturated": live(toy["undivided"][2], here),
        "toy_rows_undivided": live(_rows_of_half(toy["undivided"][1]), here),
        "toy_rows_divided": live(_rows_of_half(toy["divided"][1]), here),
        "tokens": theory(TOKENS, "chosen"),
        "darkest": theory(DARKEST, "chosen"),
        "learnt": theory(LEARNT, "chosen"),
        "first_narrow": _first(0),
        "first_wide": _first(-1),
        "first": measured("C7a", f"gradient of W_Q at step 0, d_k {D_K}"),
        "gradient": measured("C7", "gradient of W_Q"),
        "moved": measured("C7", "movement of W_Q"),
        "reached": measured("C7", "logits reached"),
        "values": measured("C7a", "movement of W_V"),
        "values_gradient": measured("C7a", "gradient of W_V"),
        "steps": measured("C12", f"steps, d_k {D_K}"),
        "steps_narrow": measured("C12", "steps, d_k 16"),
        "narrow": theory(16, "chosen"),
        "steps_deep": measured("C12", f"steps, depth {DEPTH}"),
        "loss_reached": theory(BOUNDS["retrieval"], "chosen"),
        "steps_drawn": recorded(_steps_drawn(), "C12"),
        "missed": recorded(max(claim("C12")["details"]["missed"].values()), "C12"),
        "seeds": recorded(claim("C12")["params"]["seeds"], "C12"),
    }


def _first(at: int) -> Number:
    """The ratio of the gradients of W_Q at the first step, at the narrowest or the widest head."""
    first = claim("C7a")["details"]["first"]
    return claim_number("C7a", first["y"][at], stderr=first["stderr"][at])


def _steps_drawn() -> float:
    """Steps of the drawn medians to the loss of C12, undivided over divided by √d_k."""
    steps, bound = records.load("training")["step"], BOUNDS["retrieval"]

    def reached(colour: str) -> float:
        losses = _losses()[colour]["y"]
        at = next(i for i, loss in enumerate(losses) if loss < bound)
        return float(np.interp(bound, losses[at : at - 2 : -1], steps[at : at - 2 : -1]))

    return reached("nothing") / reached("root")


@cache
def _losses() -> dict[str, dict[str, list[float]]]:
    figure = training.figure(measure.Setting(), task="retrieval", width=D_K, depth=DEPTH).json()
    drawn = figure["charts"][0]["series"]
    return {colour: {name: drawn[i][name] for name in ("y", "low", "high")} for i, colour in enumerate(COLOURS)}


def data() -> Any:
    record = records.load("training")
    first = claim("C7a")["details"]["first"]
    return {
        "losses": _losses(),
        "step": record["step"],
        "first": {"d_k": first["x"], "ratio": first["y"], "stderr": first["stderr"]},
        "push": {name: _shades(push) for name, (_, push, _) in _toy().items()},
        "shades": _SHADES,
        "ratios": RATIOS,
    }


CHAPTER = Chapter(
    "training",
    options=("smaller", "same", "larger"),
    answer="larger",
    claims=("C7", "C7a", "C12"),
    numbers=numbers,
    data=data,
    steps=3,
)

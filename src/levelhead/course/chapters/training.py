"""Chapter 6: does training care? The undivided gradient is larger, and still teaches less: it reaches few scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from levelhead.attention import attention
from levelhead.course.chapter import Chapter
from levelhead.course.numbers import Number, live, recorded, theory
from levelhead.course.results import claim, measured
from levelhead.lab import measure
from levelhead.lab import recorded as records
from levelhead.lab.claims.c12_training import BOUNDS
from levelhead.lab.figures import training

TOKENS, WIDTH, VALUES = 64, 64, 32  # of the head that the samples compute
D_K = 256
DEPTH = 8  # layers of the trainings that are drawn
COLOURS = ("nothing", "root", "width")  # of training.RULES


@cache
def _toy() -> dict[str, tuple[float, float]]:
    """By divisor, ‖dL/dW_Q‖ of one head at its beginning, and the share of its scores that the gradient reaches.

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
        _, ds = measure.logit_gradients(dp, q, k, scale)
        reached = np.abs(ds).sum() ** 2 / (ds.size * (ds**2).sum())
        found[name] = (float(np.linalg.norm(x.T @ (ds @ k) * scale)), float(reached))
    return found


def numbers() -> Mapping[str, Number]:
    here = "levelhead, seed 0"
    toy = _toy()
    return {
        "d_k": theory(D_K, "chosen"),
        "root": theory(math.isqrt(D_K), "√256"),
        "depth": theory(DEPTH, "chosen"),
        "toy_gradient": live(toy["undivided"][0] / toy["divided"][0], here),
        "toy_reached_undivided": live(toy["undivided"][1], here),
        "toy_reached_divided": live(toy["divided"][1], here),
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
        "steps_drawn": recorded(_steps_drawn(), "training.json"),
        "seeds": recorded(claim("C12")["params"]["seeds"], "C12"),
    }


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
        "ratios": ["gradient", "moved", "reached", "steps"],
    }


CHAPTER = Chapter(
    "training",
    options=("smaller", "same", "larger"),
    answer="larger",
    claims=("C7", "C7a", "C12"),
    numbers=numbers,
    data=data,
)

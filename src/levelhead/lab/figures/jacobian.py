"""What saturation costs: the Jacobian of the softmax at the page's row, and how much of it is left.

J = diag(p) - p pᵀ says how the weights move when the logits do. It is not computed from p here: it
is the gradient that the core's backward pass sends through the softmax.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.attention import observe
from levelhead.gradients import attention_backward
from levelhead.lab import experiment, sweep
from levelhead.lab.experiment import Setting, divided
from levelhead.lab.figure import Axis, Chart, Fact, Figure, Series
from levelhead.lab.figures import parts

DEPENDS = ("d_k", "divide", "keys")
SHOWN = 24  # keys; an export holds this picture for every setting of its grid
_LINES = ("none", "sqrt", "d_k")


def figure(setting: Setting) -> Figure:
    q, k = experiment.row(setting)
    rows = observe(q, k, scale=setting.scale).rows
    products = experiment.logits(np.broadcast_to(q, k.shape), k, 1.0)
    norm = float(sweep.statistics(products[None], setting.scale)["jacobian"].item())
    n = setting.keys
    return Figure(
        "jacobian",
        "What saturation costs",
        (_heat(jacobian(q, k, setting.scale, min(n, SHOWN)), n), _norms(setting)),
        setting.python("jacobian"),
        facts=(
            Fact("‖J‖_F of the row", norm, "live"),
            Fact("‖J‖_F of a flat row", math.sqrt(n - 1) / n, "theory", formula="√(n - 1)/n"),
            Fact("‖J‖_F at most", 0.5, "theory", formula="two keys of weight ½ each"),
            *parts.row_facts(rows),
        ),
        gauges=(parts.gauge_of("this row", rows),),
        note="Row i is how the weights move when logit i does. A one-hot row has J = 0: no "
        "gradient reaches its logits. Undivided, the mean norm first grows with d_k and then dies; "
        "divided by √d_k it stays where it is. Scaling buys constancy, not the largest gradient.",
    )


def jacobian(q: NDArray[Any], k: NDArray[Any], scale: float, shown: int) -> NDArray[np.float64]:
    """The first keys' block of J, from the core: a mask of zeros is added to the logits, so its
    gradient is the logits'. Query i of `shown` equal ones asks for weight i alone."""
    queries = np.broadcast_to(q, (shown, q.shape[-1]))
    values, asked = (np.eye(x, shown, dtype=np.float32) for x in (len(k), shown))
    mask = np.zeros((shown, len(k)), np.float32)
    seen = observe(queries, k, values, scale=scale, mask=mask)
    (gradient,) = attention_backward(
        asked, queries, k, values, seen.output, seen.logsumexp, wrt=("mask",), scale=scale, mask=mask
    )
    found: NDArray[np.float64] = np.asarray(gradient, np.float64)[:, :shown]
    return found


def _heat(J: NDArray[np.float64], n: int) -> Chart:
    at = np.arange(len(J))
    z = [[float(f"{x:.3g}") for x in line] for line in J]
    some = "" if n == len(J) else f", first {len(J)} of {n} keys"
    about = f"{len(J)} × {len(J)} numbers from {J.min():.3g} to {J.max():.3g}, largest on the diagonal"
    return Chart(
        f"J of this row{some}",
        Axis("weight of key j"),
        Axis("logit of key i"),
        (Series("J", "live", "heat", at, at, z=z),),
        about,
    )


def _norms(setting: Setting) -> Chart:
    found = {
        divided(one, setting.power): sweep.curves(setting.keys, setting.seed, one, setting.power)
        for one in dict.fromkeys((*_LINES, setting.divide))
    }
    norms = {name: curves["jacobian"] for name, curves in found.items()}
    about = "; ".join(f"{name}: {curve.ends()}" for name, curve in norms.items())
    series = [curve.line(name) for name, curve in norms.items()]
    return Chart("Mean ‖J‖_F against d_k", sweep.AXIS, Axis("mean ‖J‖_F"), series, about)

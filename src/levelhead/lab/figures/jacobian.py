"""What saturation costs: the Jacobian of the softmax at the page's row, and its norm against d_k.

J = diag(p) - p pᵀ is the derivative of the weights by the logits. It is not computed from p here: it is the gradient of
the core's backward pass.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.attention import observe
from levelhead.lab import measure
from levelhead.lab.figure import Axis, Chart, Fact, Figure, Series
from levelhead.lab.figures import parts
from levelhead.lab.measure import Setting, divided, over_nested_widths

NEEDS = ("d_k", "scale", "power", "keys", "seed")
CLAIMS = ("C6", "C7a", "C8", "C11")
SHOWN = 24  # keys; an export holds this picture for every setting of its grid
_LINES = ("none", "1/sqrt(d_k)", "1/d_k")


def figure(setting: Setting) -> Figure:
    q, k = measure.row(setting)
    rows = observe(q, k, scale=setting.factor).rows
    products = measure.pair_logits(np.broadcast_to(q, k.shape), k, 1.0)
    norm = float(measure.row_statistics(products[None], setting.factor)["jacobian"].item())
    n = setting.keys
    return Figure(
        "jacobian",
        "What saturation costs",
        (_heat(jacobian(q, k, setting.factor, min(n, SHOWN)), n), _norms(setting)),
        parts.code("jacobian", setting),
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


def jacobian(q: NDArray[Any], k: NDArray[Any], factor: float, shown: int) -> NDArray[np.float64]:
    """The first keys' block of J: the query is repeated, and row i has the gradient of weight i alone."""
    queries = np.broadcast_to(q, (shown, q.shape[-1]))
    _, J = measure.logit_gradients(np.eye(shown, dtype=np.float32), queries, k, factor)
    return J.astype(np.float64)[:, :shown]


def _heat(J: NDArray[np.float64], n: int) -> Chart:
    at = np.arange(len(J))
    z = [[float(f"{x:.3g}") for x in line] for line in J]
    some = "" if n == len(J) else f", first {len(J)} of {n} keys"
    about = f"{len(J)} × {len(J)} numbers from {J.min():.3g} to {J.max():.3g}, largest on the diagonal"
    return Chart(
        f"J of this row{some}",
        Axis("weight of key j"),
        Axis("logit of key i"),
        (Series("J", "live", "heat", at, at, z=z, shades=(-0.25, 0.25)),),  # p(1 - p) is 1/4 at most
        about,
    )


def _norms(setting: Setting) -> Chart:
    norms = {
        divided(scale, setting.power): over_nested_widths(setting.keys, setting.seed, scale, setting.power)["jacobian"]
        for scale in dict.fromkeys((*_LINES, setting.scale))
    }
    series = [parts.line(curve, name) for name, curve in norms.items()]
    return Chart("Mean ‖J‖_F against d_k", parts.AXIS, Axis("mean ‖J‖_F", range=parts.NORM), series, parts.ends(norms))

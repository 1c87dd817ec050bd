"""Does training care? Recorded trainings of a small transformer under three divisors, seed by seed.

The trainings are `lab/recorded/training.json`; nothing is trained here. A line is the median over
seeds, its band reaches from the lowest seed to the highest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.lab import recorded
from levelhead.lab.experiment import Setting, python, wrong
from levelhead.lab.figure import Axis, Chart, Fact, Figure, Series

DEPENDS: tuple[str, ...] = ()
RULES = {"none": "undivided", "1/sqrt(d_k)": "divided by √d_k", "1/d_k": "divided by d_k"}
_CHARTS = (
    ("loss", "Loss in training", "nats", False),
    ("held_out", "Loss on what is never trained on", "nats", False),
    ("grad_q", "Gradient of W_Q", "‖dL/dW_Q‖", True),
    ("grad_k", "Gradient of W_K", "‖dL/dW_K‖", True),
    ("grad_v", "Gradient of W_V", "‖dL/dW_V‖", True),
    ("entropy", "Entropy of the heads", "mean H/ln n", False),
)

Runs = list[Mapping[str, Any]]
Array = NDArray[np.float64]


def figure(
    setting: Setting, *, task: str = "retrieval", width: int = 256, depth: int = 1
) -> Figure:
    """`width` is the d_k of the trained heads, `depth` their layers."""
    record = recorded.load("training")
    chosen = {"task": task, "width": width, "depth": depth}
    runs = _chosen(record["runs"], chosen)
    by_rule = {rule: [run for run in runs if run["rule"] == rule] for rule in RULES}
    by_rule = {rule: some for rule, some in by_rule.items() if some}
    return Figure(
        "training",
        "Does training care?",
        tuple(_chart(by_rule, *one) for one in _CHARTS),
        python("training", **chosen),
        facts=tuple(_facts(by_rule)),
        note="Lines are medians over seeds, bands reach from the lowest seed to the highest. All "
        "that differs between the lines is the number that multiplies q·k.",
        recorded=recorded.source(record),
        extra={"chosen": chosen, "choices": _choices(record["runs"])},
    )


def _choices(runs: Runs) -> dict[str, list[Any]]:
    """What there is to choose from."""
    names = {"task": "task", "width": "d_k", "depth": "depth"}
    return {name: sorted({run[key] for run in runs}) for name, key in names.items()}


def _chosen(runs: Runs, wanted: Mapping[str, Any]) -> Runs:
    for name, known in _choices(runs).items():
        if isinstance(wanted[name], bool) or wanted[name] not in known:
            raise wrong(name, f"one of {', '.join(map(str, known))}", wanted[name])
    found = [
        run
        for run in runs
        if (run["task"], run["d_k"], run["depth"]) == tuple(wanted.values())
    ]
    if not found:
        given = ", ".join(f"{name} {value}" for name, value in wanted.items())
        raise wrong("task", "a combination that was recorded", given)
    return found


def _values(runs: Runs, what: str) -> Array:
    """(seeds, marks); what was not finite is NaN."""
    return np.array([run[what] for run in runs], np.float64)


def _chart(by_rule: Mapping[str, Runs], what: str, title: str, unit: str, log: bool) -> Chart:
    series = []
    for rule, runs in by_rule.items():
        values = _values(runs, what)
        series.append(
            Series(
                RULES[rule], "recorded", "line", runs[0]["step"], np.median(values, axis=0),
                low=values.min(axis=0), high=values.max(axis=0),
            )  # fmt: skip
        )
    ends = (
        f"{RULES[rule]} {np.median(_values(runs, what)[:, -1]):.3g} at the end"
        for rule, runs in by_rule.items()
    )
    return Chart(title, Axis("step"), Axis(unit, log=log), series, "; ".join(ends))


def _facts(by_rule: Mapping[str, Runs]) -> list[Fact]:
    found = []
    for rule, runs in by_rule.items():
        for label, what, mark in (
            ("held-out loss at the end", "held_out", -1),
            ("‖dL/dW_Q‖ at step 0", "grad_q", 0),
        ):
            values = _values(runs, what)[:, mark]
            error = float(values.std(ddof=1) / math.sqrt(values.size)) if values.size > 1 else None
            found.append(Fact(f"{label}, {RULES[rule]}", float(values.mean()), "recorded", error))
    found.append(Fact("seeds of each", min(map(len, by_rule.values())), "recorded"))
    return found

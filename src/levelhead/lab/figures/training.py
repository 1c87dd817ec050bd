"""Does training care? Recorded trainings of a small transformer under three divisors, seed by seed.

The trainings are `lab/recorded/training.json`; nothing is trained here. Of each task those are
shown that differ in the rule alone: with Adam, most sequences to learn from, and the usual rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import mode
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.lab import recorded
from levelhead.lab.figure import Axis, Chart, Fact, Figure, Series, snippet
from levelhead.lab.measure import Setting, divided
from levelhead.lab.settings import refused

NEEDS = ("task", "width", "depth")
CLAIMS = ("C7", "C7a", "C12", "C16")
RULES = ("none", "1/sqrt(d_k)", "1/d_k")
_CHARTS = (
    ("loss", "Loss in training", "nats", False),
    ("held_out", "Loss on what is never trained on", "nats", False),
    ("q", "Gradient of W_Q", "‖dL/dW_Q‖", True),
    ("k", "Gradient of W_K", "‖dL/dW_K‖", True),
    ("v", "Gradient of W_V", "‖dL/dW_V‖", True),
    ("entropy", "Entropy of the heads", "mean H/ln n", False),
)

Runs = list[Mapping[str, Any]]
Array = NDArray[np.float64]


def figure(setting: Setting, *, task: str = "retrieval", width: int = 256, depth: int = 1) -> Figure:
    """`width` is the d_k of the trained heads, `depth` their layers."""
    record = recorded.load("training")
    runs = _usual(record["runs"])
    chosen = {"task": task, "width": width, "depth": depth}
    some = _chosen(runs, chosen)
    by_rule = {rule: [run for run in some if run["rule"] == rule] for rule in RULES}
    by_rule = {rule: those for rule, those in by_rule.items() if those}
    return Figure(
        "training",
        "Does training care?",
        tuple(_chart(by_rule, record["step"], *one) for one in _CHARTS),
        snippet("training", **chosen),
        facts=tuple(_facts(by_rule)),
        note="Lines are medians over seeds, bands reach from the lowest seed to the highest. All "
        "that differs between the lines is the number that multiplies q·k.",
        recorded=recorded.source(record["about"]),
        extra={"chosen": chosen, "choices": _choices(runs)},
    )


def _usual(runs: Runs) -> Runs:
    """Without those that vary the optimiser, the rate or the examples, or take no step."""
    usual: Runs = []
    for task in dict.fromkeys(run["task"] for run in runs):
        some = [run for run in runs if run["task"] == task and run["optimiser"] == "adam" and len(run["loss"]) > 1]
        most = max(run["examples"] for run in some)
        rate = mode(run["rate"] for run in some)
        usual += [run for run in some if (run["examples"], run["rate"]) == (most, rate)]
    return usual


def _choices(runs: Runs) -> dict[str, list[Any]]:
    """What there is to choose from."""
    names = {"task": "task", "width": "d_k", "depth": "depth"}
    return {name: sorted({run[key] for run in runs}) for name, key in names.items()}


def _chosen(runs: Runs, wanted: Mapping[str, Any]) -> Runs:
    for name, known in _choices(runs).items():
        if isinstance(wanted[name], bool) or wanted[name] not in known:
            raise refused(name, f"one of {', '.join(map(str, known))}", wanted[name])
    values = tuple(wanted.values())
    selected = [run for run in runs if (run["task"], run["d_k"], run["depth"]) == values]
    if not selected:
        words = ", ".join(f"{name} {value}" for name, value in wanted.items())
        raise refused("task", "a combination that was recorded", words)
    return selected


def _values(runs: Runs, quantity: str) -> Array:
    """(seeds, marks); NaN where a training had left the finite numbers."""
    if quantity == "entropy":  # by mark, layer and head
        mean: Array = np.array([run["entropy"] for run in runs], np.float64).mean((-2, -1))
        return mean
    of = [run["gradient"][quantity] if quantity in run["gradient"] else run[quantity] for run in runs]
    return np.array(of, np.float64)


def _chart(by_rule: Mapping[str, Runs], step: list[int], quantity: str, title: str, unit: str, log: bool) -> Chart:
    series, ends = [], []
    for rule, runs in by_rule.items():
        values = _values(runs, quantity)
        median, low, high = np.median(values, axis=0), values.min(axis=0), values.max(axis=0)
        x, name = step[: len(median)], divided(rule)
        series.append(Series(name, "recorded", "line", x, median, low=low, high=high))
        ends.append(f"{name}: {median[0]:.3g} to {median[-1]:.3g}")
    return Chart(title, Axis("step"), Axis(unit, log=log), series, "; ".join(ends))


def _facts(by_rule: Mapping[str, Runs]) -> list[Fact]:
    facts = []
    for rule, runs in by_rule.items():
        for label, quantity, mark in (("held-out loss at the end", "held_out", -1), ("‖dL/dW_Q‖ at step 0", "q", 0)):
            label = f"{label}, {divided(rule)}"
            facts.append(_mean(label, _values(runs, quantity)[:, mark]))
    facts.append(Fact("seeds of each", min(map(len, by_rule.values())), "recorded"))
    return facts


def _mean(label: str, values: Array) -> Fact:
    """Over the seeds, with its standard error; seeds that left the finite numbers are counted."""
    lost = int((~np.isfinite(values)).sum())
    if lost:
        return Fact(label, f"not finite with {lost} of {values.size} seeds", "recorded")
    error = float(values.std(ddof=1) / math.sqrt(values.size)) if values.size > 1 else None
    return Fact(label, float(values.mean()), "recorded", error)

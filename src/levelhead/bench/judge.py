"""From numbers to verdicts: ratios, shares of the limits, bars, fitted exponents.

Works on the plain dictionaries that go into the JSON file, so that an old result can be judged again.
"""

from __future__ import annotations

from statistics import geometric_mean, linear_regression
from typing import Any, TypeAlias

import numpy as np

from levelhead.bench.bars import Bar

Cell: TypeAlias = dict[str, Any]

# The project's bar for accuracy, against PyTorch's own error in the same cell.
RMS, MAX = 1.05, 1.25
TRUSTED = "PyTorch"


def verdict(cell: Cell, limits: dict[str, float]) -> dict[str, Any]:
    """The verdict on a cell's numbers; `word` is met, below, lost, alone, wrong or missing."""
    if "missing" in cell:
        return dict(word="missing", why=cell["missing"])
    results = {result["name"]: result for result in cell["results"]}
    ours = results.get("levelhead")
    if ours is None:
        return dict(word="wrong", why=cell["refused"].get("levelhead", "not measured"))
    rivals = {name: result for name, result in results.items() if name != "levelhead"}
    judged = _rates(cell, ours["best"], limits)
    # A model's error is that of everything else in it, and one row of logits is no sample.
    whole_model = "model" in cell["options"]
    judged["accuracy"] = None if whole_model else _accuracy(ours, rivals.get(TRUSTED))
    bar = Bar(**cell["bar"])
    if bar.against in rivals:
        rivals = {bar.against: rivals[bar.against]}
    if not rivals:
        return judged | dict(word="alone", why="no peer to compare with")
    for by in ("best", "median"):
        fastest = min(rivals.values(), key=lambda result: float(result[by]))
        judged[f"fastest_by_{by}"] = fastest["name"]
        judged[f"ratio_by_{by}"] = fastest[by] / ours[by]
    judged |= _ceiling(judged)
    held = {name: result for name, result in rivals.items() if name != bar.without} or rivals
    held = {bar.set_for: rivals[bar.set_for]} if bar.set_for in rivals else held
    judged["ratio_to_bar"] = min(result["best"] for result in held.values()) / ours["best"]
    return judged | _word(judged, bar, cell["observed"])


def _rates(cell: Cell, taken: float, limits: dict[str, float]) -> dict[str, Any]:
    """How fast, and how near the machine's limits; nothing where the work was not counted."""
    if cell["flops"] is None:
        return {}
    gflops, gbytes = cell["flops"] / taken / 1e9, cell["bytes"] / taken / 1e9
    of_peak = gflops / cell.get("gflops_limit", limits["gflops"])
    of_bandwidth = gbytes / cell.get("gbytes_limit", limits["gbytes"])
    return dict(gflops=gflops, gbytes=gbytes, of_peak=of_peak, of_bandwidth=of_bandwidth)


def _ceiling(judged: dict[str, Any]) -> dict[str, Any]:
    """The ratio that this machine would allow: at the whole of the limit that is nearer."""
    if "of_peak" not in judged:
        return {}
    share, limit = max((judged["of_peak"], "FMA peak"), (judged["of_bandwidth"], "memory bandwidth"))
    if share >= 1:  # from a cache, or by instructions that do more than an FMA
        return {}
    return dict(ceiling=judged["ratio_by_best"] / share, limit=limit)


def _word(judged: dict[str, Any], bar: Bar, observed: bool) -> dict[str, str]:
    ratio = judged["ratio_by_best"]
    if ratio < 1 and not observed:
        return dict(word="lost", why=f"{judged['fastest_by_best']} is faster; bar {bar}")
    enough = judged["ratio_to_bar"] >= bar.ratio
    if bar.peak is not None:
        enough = enough or (judged["of_peak"] >= bar.peak and ratio >= bar.floor)
    if bar.bandwidth is not None:
        enough = enough and judged["of_bandwidth"] >= bar.bandwidth
    return dict(word="met" if enough else "below", why=f"bar {bar}")


def _accuracy(ours: dict[str, Any], trusted: dict[str, Any] | None) -> dict[str, Any] | None:
    """Our error over PyTorch's, of the worst part of the answer; None where PyTorch has none."""
    if trusted is None or not trusted["error"]["rms"]:
        return None
    mine, theirs = (r["error"].get("parts") or {"all": r["error"]} for r in (ours, trusted))
    rms, largest = ({part: float(mine[part][how] / theirs[part][how]) for part in mine} for how in ("rms", "max"))
    met = max(rms.values()) <= RMS and max(largest.values()) <= MAX
    accuracy: dict[str, Any] = dict(rms=max(rms.values()), max=max(largest.values()), met=met)
    if len(mine) > 1:
        accuracy["of"] = max(mine, key=lambda part: max(rms[part] / RMS, largest[part] / MAX))
    return accuracy


def summary(cells: list[Cell]) -> dict[str, Any]:
    """The whole grid in a few numbers. Cells against ourselves have no part in the mean."""
    words: dict[str, list[str]] = {}
    for cell in cells:
        words.setdefault(cell["verdict"]["word"], []).append(cell["name"])
    raced = [c["verdict"] for c in cells if "ratio_by_best" in c["verdict"] and not c["observed"]]
    worse = [c["name"] for c in cells if (c["verdict"].get("accuracy") or {}).get("met") is False]
    return dict(
        cells=len(cells),
        compared=len(raced),
        geometric_mean={
            by: geometric_mean(verdict[f"ratio_by_{by}"] for verdict in raced) if raced else None
            for by in ("best", "median")
        },
        words=words,
        less_accurate_than_pytorch=worse,
        exponents=_exponents(cells, "best"),
        memory_exponents=_exponents(cells, "memory"),
    )


def _exponents(cells: list[Cell], cost: str) -> dict[str, float]:
    """Seconds ("best") or bytes ("memory") of one head ~ T to this power, per group of cells.

    Bytes are the peak extra memory with the result and the inputs, or a call that needs next to nothing would leave
    only noise to fit. Least squares in the logarithms of both, where there are two lengths or more.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        ours: dict[str, Any] = next((r for r in cell["results"] if r["name"] == "levelhead"), {})
        taken = ours.get(cost)
        if cell["fit"] and isinstance(taken, int | float):  # memory may be the reason why there is none
            inputs = cell["bytes"] if cost == "memory" else 0
            T, heads = cell["shape"]["T"], cell["shape"]["B"] * cell["shape"]["H"]
            points.setdefault(cell["fit"], []).append((T, (taken + inputs) / heads))
    logarithms = {name: np.log(measured).T.tolist() for name, measured in points.items()}
    return {name: linear_regression(x, y).slope for name, (x, y) in logarithms.items() if len(set(x)) > 1}

"""Time and error by length, levelhead beside others: a committed run, or a short one made here.

Cells where another library is faster are shown like the others. `levelhead.bench` measures; a live run takes about ten
seconds and gives a rough comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from levelhead.lab import recorded
from levelhead.lab.figure import Axis, Chart, Fact, Figure, Series, Source, snippet
from levelhead.lab.measure import Setting
from levelhead.lab.settings import refused

NEEDS: tuple[str, ...] = ()
CLAIMS = ("C14",)
LIVE = ("dense-d64-512", "dense-d64-1024", "causal-d64-1024")  # cells of a live run
FAMILIES = ("dense", "causal")
OURS = "levelhead"

Tell = Callable[[str, str], None]  # a cell, what is going on there
Cell = Mapping[str, Any]


def figure(setting: Setting, *, live: bool = False, tell: Tell = lambda cell, doing: None) -> Figure:
    """`tell` is called with the progress of a live run."""
    if not isinstance(live, bool):
        raise refused("live", "True or False", live)
    run = reduced(_measured(tell)) if live else recorded.load("speed")
    source: Source = "live" if live else "recorded"
    cells: list[Cell] = run["cells"]
    raced = [cell for cell in cells if cell["ratio"] is not None]
    behind = [cell for cell in raced if cell["ratio"] < 1]
    lengths = [family for family in FAMILIES if _of(cells, family)]
    return Figure(
        "speed",
        "Speed on this machine" if live else "Speed, as recorded",
        (
            *(_times(family, _of(cells, family), source) for family in lengths),
            _errors(_of(cells, "dense"), source),
            _ratios(raced, source),
        ),
        snippet("speed", **({"live": True} if live else {})),
        facts=(
            Fact("cells compared", len(raced), source),
            Fact("cells where another library is faster", len(behind), source),
            *(Fact(f"{cell['name']}: {cell['fastest']} over levelhead", cell["ratio"], source) for cell in behind),
        ),
        note=_note(run, behind),
        recorded="" if live else recorded.source(run["about"]),
        extra={"about": run["about"]},
    )


def _measured(tell: Tell) -> dict[str, Any]:
    from levelhead.bench.cases import select
    from levelhead.bench.cell import Effort
    from levelhead.bench.run import QUICK, bench

    effort = Effort(rounds=1, seeds=1, memory=False, left_out=QUICK.left_out, long=0.01, least=0.1, array=2**26)
    return bench(select(LIVE), effort=effort, tell=tell)


def reduced(result: Mapping[str, Any]) -> dict[str, Any]:
    """What figures need of a benchmark: best time in seconds and error, by cell and who."""
    machine = result["machine"]
    return {
        "about": {
            "cpu": machine["cpu"],
            "threads": result["threads"],
            "isa": machine["isa"],
            "date": result["date"][:10],
            "levelhead": result["levelhead"],
            "versions": dict(result["versions"]),
        },
        "cells": [_cell(cell) for cell in result["cells"] if not cell["observed"]],
    }


def _cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    shape, verdict = cell["shape"], cell["verdict"]
    ratio = verdict.get("ratio_by_best")
    return {
        "name": cell["name"],
        "family": cell["family"] if shape["D"] == 64 else f"{cell['family']} {shape['D']} wide",
        "tokens": shape["T"],
        "heads": shape["B"] * shape["H"],
        "fastest": verdict.get("fastest_by_best", ""),
        "ratio": None if ratio is None else _short(ratio),
        "seconds": {one["name"]: _short(one["best"]) for one in cell["results"]},
        "error": {one["name"]: _short(one["error"]["rms"]) for one in cell["results"]},
    }


def _short(x: float) -> float:
    return float(f"{x:.4g}")


def _of(cells: list[Cell], family: str) -> list[Cell]:
    return [cell for cell in cells if cell["family"] == family]


def _lines(cells: list[Cell], quantity: str) -> dict[str, dict[int, float]]:
    """Who → tokens → number, levelhead first."""
    names = dict.fromkeys(name for cell in cells for name in cell[quantity])
    return {name: {cell["tokens"]: cell[quantity][name] for cell in cells if name in cell[quantity]} for name in names}


def _times(family: str, cells: list[Cell], source: Source) -> Chart:
    per_head: list[Cell] = [
        {**cell, "each": {name: 1e3 * x / cell["heads"] for name, x in cell["seconds"].items()}} for cell in cells
    ]
    series = [
        Series(name, source, "points", list(line), list(line.values()))
        for name, line in _lines(per_head, "each").items()
    ]
    about = "; ".join(
        f"{cell['tokens']} tokens: {cell['fastest']} takes {cell['ratio']:.3g} times levelhead's" for cell in cells
    )
    unit = Axis("milliseconds per head", log=True)
    return Chart(f"Time, {family}, d_k = 64", Axis("tokens", log=True), unit, series, about)


def _errors(cells: list[Cell], source: Source) -> Chart:
    series = [
        Series(name, source, "points", list(line), list(line.values())) for name, line in _lines(cells, "error").items()
    ]
    unit = Axis("root mean square error against float64", log=True)
    title = "Error, dense, d_k = 64"
    return Chart(title, Axis("tokens", log=True), unit, series, "the same cells as in time")


def _ratios(cells: list[Cell], source: Source) -> Chart:
    order = sorted(cells, key=lambda cell: float(cell["ratio"]))
    bars = Series(
        "fastest of the others / levelhead",
        source,
        "bars",
        [cell["name"] for cell in order],
        [cell["ratio"] for cell in order],
    )
    about = f"from {order[0]['ratio']:.3g} to {order[-1]['ratio']:.3g}; below 1 levelhead is behind"
    return Chart("Every cell", Axis("cell"), Axis("times faster", log=True), (bars,), about)


def _note(run: Mapping[str, Any], behind: list[Cell]) -> str:
    about = run["about"]
    where = f"{about['cpu']}, {about['threads']} threads, {about['isa']}"
    lost = ", ".join(cell["name"] for cell in behind) or "none"
    return f"Fastest of several calls, all on the same CPUs: {where}. Behind in: {lost}."

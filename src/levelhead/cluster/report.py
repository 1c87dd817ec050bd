"""A run of `levelhead cluster-bench` as text: time, where it went, bytes against the bound.

Made from the dictionary that `--json` writes. Every cell is shown; wrong answers are counted at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from levelhead.bench.report import seconds
from levelhead.words import aligned

SHARES = ("compute", "wait", "other", "transfer")  # of the time
HEAD = ("tokens", "", "plan", "split", "passes", "time", "one process", "speedup", *SHARES, "received", "of bound")
_LEFT = {1, 2, 3, 4}  # columns of words


def report(run: dict[str, Any]) -> Iterator[str]:
    """The run as a text of lines."""
    machine, effort = run["machine"], run["effort"]
    yield (
        f"levelhead {run['levelhead']}: {run['world']} ranks × {run['threads']} threads on "
        f"{run['hosts']} machines with {machine['threads']} CPUs, {machine['cpu']}, "
        f"{machine['isa']}; {run['backend']}, {run['date']}"
    )
    yield f"{effort['heads']} heads of width {effort['width']}, float32; the slowest rank's median"
    for kind, words in (("strong", "the same sequence"), ("weak", "as many tokens on each rank")):
        yield f"\n-- {kind} scaling: {words}, whatever the world"
        yield from aligned([HEAD, *(row(c) for c in run["cells"] if c["kind"] == kind)], _LEFT)
    for plan, why in run["left_out"].items():
        yield f"\nleft out: {plan} ({why})"
    wrong = [cell for cell in run["cells"] if not cell["right"]]
    yield f"\n{len(run['cells'])} cells; " + (
        f"{len(wrong)} WRONG, the first by {wrong[0]['error']:.1e}" if wrong else "all answers are those of one process"
    )
    if run["world"] * run["threads"] > machine["threads"] and run["hosts"] == 1:
        yield "ranks share CPUs: times show what the plans cost, not what a cluster would gain"


def row(cell: dict[str, Any]) -> tuple[str, ...]:
    """One cell, as HEAD."""
    problem, alone = cell["problem"], cell["alone"]["same_threads"]
    kind = "decode" if problem["queries"] else "causal" if problem["causal"] else "dense"
    return (
        f"{problem['tokens']}",
        kind,
        *(cell[name] for name in ("plan", "split", "passes")),
        seconds(cell["median"]),
        seconds(alone),
        f"{alone / cell['median']:.2f}×",
        *(f"{share(cell, name):.0%}" for name in SHARES),
        mib(fmean(cell["ranks"]["received"])),
        over_bound(cell),
    )


def share(cell: dict[str, Any], kind: str) -> float:
    """Of the traced time, the mean over ranks; transfers overlap with the rest."""
    return fmean(cell["ranks"][kind]) / fmean(cell["ranks"]["seconds"])


def over_bound(cell: dict[str, Any]) -> str:
    """Bytes received over the least that the plan needs."""
    bound = sum(cell["bytes"]["bound"])
    return f"{sum(cell['ranks']['received']) / bound:.3f}×" if bound else "-"


def mib(number: float) -> str:
    return f"{number / 2**20:.2f} MiB"

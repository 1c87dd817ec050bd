"""Your model: a level for every head of a run, the findings of `diagnose`, and the history of the heads.

The run is a file of `levelhead doctor` or of a watch; without one, a recorded sample. Nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from levelhead import stats
from levelhead.diagnosis.diagnose import as_run, diagnose
from levelhead.diagnosis.findings import SEVERITIES, Findings, counted
from levelhead.lab import recorded
from levelhead.lab.figure import Axis, Chart, Fact, Figure, Series
from levelhead.lab.measure import Setting
from levelhead.runs import record
from levelhead.runs.record import Record, Run
from levelhead.show import view
from levelhead.words import module_title

NEEDS: tuple[str, ...] = ()
CLAIMS = ("C11a", "C15")
_POINTS, _MOST = 20_000, 200  # of all heads' histories; of one
_OPEN = "import levelhead as lh\n\n"


def figure(setting: Setting, *, run: Any = None) -> Figure:
    """`run` is whatever `diagnose` takes: a `Run`, a watch, the path of a saved run."""
    sample = recorded.load("heads") if run is None else None
    shown = record.from_json(sample) if sample is not None else as_run(run)
    findings = diagnose(shown)
    records = shown.latest
    counts = view.levels(records)
    return Figure(
        "heads",
        f"{shown.model or 'Your model'}: a level for every head",
        (_entropies(records),),
        _python(None if run is None else shown.model),
        facts=(
            Fact("heads", sum(counts.values()), "recorded"),
            *(Fact(f"heads that are {level}", n, "recorded") for level, n in counts.items() if n),
            Fact("findings", counted(findings), "recorded"),
        ),
        note="A level is a description: healthy models have saturated heads on purpose. What is "
        "wrong, if anything, the findings say.",
        recorded="; ".join(
            [f"a run of levelhead {shown.version}", *shown.notes]
            + ([recorded.source(sample["about"])] if sample else [])
        ),
        extra={
            "model": shown.model,
            "rows": _rows(records, findings),
            "findings": [_finding(one) for one in findings.to_json()],
            "steps": len(shown.snapshots),
            "history": _history(shown),
            "bounds": bounds(),
        },
    )


def _python(model: str | None) -> str:
    if model is None:
        return f'{_OPEN}print(lh.lab.figure("heads"))\n'
    return f'{_OPEN}print(lh.lab.figure("heads", run="run.json"))  # the run of {model!r}\n'


def _entropies(records: tuple[Record, ...]) -> Chart:
    """A heat map, modules by heads; a module may have fewer heads than another."""
    most = max(len(one.tally) for one in records)
    z = np.full((len(records), most), np.nan)
    for line, one in zip(z, records, strict=True):
        line[: len(one.tally)] = one.heads.normalised_entropy
    names = [module_title(one.module) for one in records]
    about = f"{len(records)} modules with up to {most} heads each"
    heat = Series("H/ln n", "recorded", "heat", np.arange(most), names, z=z, shades=(0.0, 1.0))
    return Chart("H/ln n of every head", Axis("head"), Axis("module"), (heat,), about)


def _rows(records: tuple[Record, ...], findings: Findings) -> list[dict[str, Any]]:
    return [
        {
            "module": one.module,
            "heads": [_head(one, h) | {"finding": _gravest(findings, one.module, h)} for h in range(len(one.tally))],
        }
        for one in records
    ]


def _head(one: Record, h: int) -> dict[str, Any]:
    heads, level = one.heads, one.heads.levels[h]
    place = stats.bubble(float(heads.normalised_entropy[h]), level)
    return {
        "level": level,
        "bubble": None if place is None else place / 8,
        "normalised_entropy": heads.normalised_entropy[h],
        "top1": heads.mean_top1[h],
        "max_logit": heads.max_logit[h],
        "saturated": heads.saturated[h],
    }


def _gravest(findings: Findings, module: str, head: int) -> str:
    """The gravest severity among the findings about a head or its module; "" without any."""
    about = (
        SEVERITIES.index(one.severity)
        for one in findings
        if one.module == module and (one.head in (None, head) or (isinstance(one.head, tuple) and head in one.head))
    )
    worst = max(about, default=None)
    return "" if worst is None else SEVERITIES[worst]


def _finding(finding: Mapping[str, Any]) -> dict[str, Any]:
    names = ("kind", "severity", "module", "head", "evidence", "why", "advice")
    return {name: finding[name] for name in names}


def _history(run: Run) -> dict[str, dict[str, list[float]]]:
    """Entropy and largest logit of every head by step, thinned evenly; empty for a single step."""
    if len(run.snapshots) < 2:
        return {}
    heads = sum(len(one.tally) for one in run.latest)
    points = max(2, min(_MOST, _POINTS // max(heads, 1), len(run.snapshots)))
    kept = np.unique(np.linspace(0, len(run.snapshots) - 1, points).round().astype(int))
    history: dict[str, dict[str, list[float]]] = {}
    for snapshot in (run.snapshots[i] for i in kept):
        for one, h in snapshot.each():
            past = history.setdefault(f"{one.module}/{h}", {"step": [], "normalised_entropy": [], "max_logit": []})
            past["step"].append(snapshot.step)
            past["normalised_entropy"].append(float(one.heads.normalised_entropy[h]))
            past["max_logit"].append(float(one.heads.max_logit[h]))
    return history


def bounds() -> dict[str, Any]:
    """The bounds of levels and the places of bubbles, for the page, which reads run files in the browser."""
    return {
        "flat": stats.FLAT,
        "sharp": stats.SHARP,
        "saturated": stats.SATURATED,
        "share": stats.SATURATED_SHARE,
        "entropies": stats.ENTROPIES,
        "places": [place / 8 for place in stats.PLACES],
        "cells": {level: [low / 8, high / 8] for level, (low, high) in stats.CELLS.items()},
    }

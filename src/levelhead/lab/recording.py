"""Trainings as a committed file keeps them: rounded, one line each, and back again.

A line holds a plan's fields and its curves' fields side by side. The steps of the marks are those
of all trainings together, written once: a training has as many of the first as it has losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from levelhead.json_numbers import json_value, number_from_json
from levelhead.lab.plan import Curves, Plan
from levelhead.lab.seeds import Training

_DIGITS, _ENTROPY_DIGITS = 3, 2  # that are kept


def packed(runs: Sequence[Training]) -> dict[str, Any]:
    """{"step": …, "runs": […]}, which JSON can hold."""
    step = max((run.curves.step for run in runs), key=len)
    return {"step": step, "runs": [_line(run, step) for run in runs]}


def unpacked(recording: dict[str, Any]) -> list[Training]:
    """The trainings again, as precise as they were kept."""
    names = [field.name for field in fields(Plan)]
    found = []
    for line in recording["runs"]:
        curves = {name: _numbers(x) for name, x in line.items() if name not in names}
        step = recording["step"][: len(line["loss"])]
        found.append(Training(Plan(**{x: line[x] for x in names}), Curves(step=step, **curves)))
    return found


def _line(run: Training, step: list[int]) -> dict[str, Any]:
    curves = asdict(run.curves)
    if curves.pop("step") != step[: len(run.curves.loss)]:
        raise ValueError("trainings in one file have their marks at the same steps")
    entropy = rounded(curves.pop("entropy"), _ENTROPY_DIGITS)
    return {**asdict(run.plan), **rounded(curves, _DIGITS), "entropy": entropy}


def rounded(x: Any, digits: int) -> Any:
    """JSON values with so many digits; null for what is not finite."""
    return json_value(x, digits=digits, whole="float")


def _numbers(x: Any) -> Any:
    """NaN for null."""
    if isinstance(x, dict):
        return {name: _numbers(each) for name, each in x.items()}
    if isinstance(x, list):
        return [_numbers(each) for each in x]
    return number_from_json(x)

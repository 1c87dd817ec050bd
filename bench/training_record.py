"""Records the full trainings behind C7, C7a, C12 and C16, with the verdicts that they give.

    python bench/training_record.py src/levelhead/lab/recorded/training.json

About 20 minutes on one thread; what has been trained before is taken from the cache. The verdicts are those of the
rounded numbers in the file, so that they can be drawn from it again.

A training is one line: a plan's fields and its curves' fields side by side. The steps of the marks are those of all
trainings together, written once: a training has as many of the first as it has losses.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from about import machine, versions
from levelhead.json_numbers import json_value, number_from_json
from levelhead.lab import tasks, training, transformer
from levelhead.lab.claims import c07_vanishing, c07a_honest_half, c12_training, c16_generalise
from levelhead.lab.plan import Curves, Plan
from levelhead.lab.seeds import Training
from levelhead.lab.training_cache import trained

CLAIMS = (c07_vanishing, c07a_honest_half, c12_training, c16_generalise)
SEED = 0
DIGITS = 4  # of what claims say
CURVE_DIGITS, ENTROPY_DIGITS = 3, 2  # of a training


def parameters(module: Any, size: str) -> dict[str, Any]:
    claim = module.CLAIM
    return {**claim.quick, **(claim.full if size == "full" else {})}


def about() -> dict[str, Any]:
    return {
        **machine(threads=1),
        "versions": versions(),
        "command": "python bench/training_record.py src/levelhead/lab/recorded/training.json",
        "method": f"pre-norm transformer, width {transformer.WIDTH}, {transformer.HEADS} heads, "
        f"values of width {transformer.WIDTH // transformer.HEADS} at any d_k, "
        f"batches of {training.TOKENS} tokens, Adam{training.BETAS} or SGD with momentum "
        f"{training.MOMENTUM}, no clipping, no warm-up; attention by levelhead",
        "tasks": {
            "retrieval": f"{tasks.PAIRS} pairs of a key and a value, then the keys again: which value came with each?",
            "text": f"the next byte of pydoc_data.topics, windows of {tasks.WINDOW}",
        },
        "curves": "at every mark: loss and gradient are means since the mark before; held_out, "
        "moved (‖W − W₀‖ / ‖W₀‖) and entropy (H/ln n by layer and head) are of that step",
    }


def judged(module: Any, size: str, kept: dict[Plan, Training]) -> dict[str, Any]:
    """A claim's verdict on the trainings that are kept."""
    params = parameters(module, size)
    outcome = module.judge([kept[plan] for plan in module.wanted(params, SEED)])
    numbers = {"measured": outcome.measured, "stderr": outcome.stderr, **outcome.details}
    return {"verdict": outcome.verdict, **rounded(numbers, DIGITS)}


def recorded(size: str) -> dict[str, Any]:
    """All trainings of a size, and what the claims make of them; those of quick as well."""
    sizes = ["quick", *(["full"] if size == "full" else [])]
    wanted = [plan for x in sizes for module in CLAIMS for plan in module.wanted(parameters(module, x), SEED)]
    content = packed(trained(list(dict.fromkeys(wanted)), show_progress))
    kept = {run.plan: run for run in unpacked(content)}
    claims = {x: {module.CLAIM.id: judged(module, x, kept) for module in CLAIMS} for x in sizes}
    return {"about": about(), "seed": SEED, "claims": claims, **content}


def packed(runs: Sequence[Training]) -> dict[str, Any]:
    """{"step": …, "runs": […]}, which JSON can hold."""
    step = max((run.curves.step for run in runs), key=len)
    return {"step": step, "runs": [_line(run, step) for run in runs]}


def unpacked(recording: dict[str, Any]) -> list[Training]:
    """The trainings again, as precise as they were kept."""
    names = [field.name for field in fields(Plan)]
    trainings = []
    for line in recording["runs"]:
        curves = {name: _numbers(x) for name, x in line.items() if name not in names}
        step = recording["step"][: len(line["loss"])]
        trainings.append(Training(Plan(**{x: line[x] for x in names}), Curves(step=step, **curves)))
    return trainings


def _line(run: Training, step: list[int]) -> dict[str, Any]:
    curves = asdict(run.curves)
    if curves.pop("step") != step[: len(run.curves.loss)]:
        raise ValueError("trainings in one file have their marks at the same steps")
    entropy = rounded(curves.pop("entropy"), ENTROPY_DIGITS)
    return {**asdict(run.plan), **rounded(curves, CURVE_DIGITS), "entropy": entropy}


def rounded(x: Any, digits: int) -> Any:
    """JSON values with so many digits; null for what is not finite."""
    return json_value(x, digits=digits)


def _numbers(x: Any) -> Any:
    """NaN for null."""
    if isinstance(x, dict):
        return {name: _numbers(each) for name, each in x.items()}
    if isinstance(x, list):
        return [_numbers(each) for each in x]
    return number_from_json(x)


def show_progress(share: float, step: str) -> None:
    print(f"{100 * share:5.1f} %  {step}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="the trainings behind C7, C7a, C12 and C16")
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("--size", choices=("quick", "full"), default="full")
    arguments = parser.parse_args()
    content = recorded(arguments.size)
    runs = content.pop("runs")
    head = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    lines = (json.dumps(run, allow_nan=False, separators=(",", ":")) for run in runs)
    text = head.removesuffix("\n}") + ',\n "runs": [\n' + ",\n".join(lines) + "\n]}\n"
    arguments.file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

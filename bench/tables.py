"""Puts the tables of bench/results/*.json into the pages of docs/ that have a place for them.

    python bench/tables.py

A table stands between `<!-- FILE: TABLE -->` and `<!-- end -->`, FILE being the result's name without ".json". Tests
hold the documents to it: no number there is older than its file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import device_tables
from cluster import paper_tables
from cluster import tables as cluster_tables
from levelhead.bench.bars import Bar
from levelhead.bench.cases import OFF
from levelhead.bench.report import seconds

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DOCUMENTS = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("from-jax", "gpu", "kernel", "health", "lab", "remedies", "scaling", "statistics", "watch")
    ),
)
SHOWN = (  # in the README, with all that a peer won
    "dense-d64-1024",
    "dense-d128-4096",
    "causal-d64-1024",
    "causal-d128-4096",
    "bf16-causal-1024",
    "f16-causal-1024",
    "tiny-torch",
    "gqa-decode-8192",
    "window-4096",
    "mask-bool",
    "softcap",
    "training-dense-d64-1024",
    "training-dense-d128-1024",
    "training-causal-d64-1024",
    "training-onehead-dense-4096",
    "additive-512",
    "model-minilm-128",
    "model-smollm2-2048",
)
HALVES = ("bfloat16", "float16")  # whose cells are dense, causal or short
FAR = 0.1  # of a limit: what takes the time is neither arithmetic nor memory
PLACE = re.compile(r"<!-- ([\w.-]+): ([\w. ]+) -->\n(.*?)<!-- end -->\n", re.DOTALL)


def table(file: str, name: str) -> str:
    if name == "verdicts":
        return "\n".join(verdicts(RESULTS / f"{file}.jsonl")) + "\n"
    result = json.loads((RESULTS / f"{file}.json").read_text())
    computed = {"families": families, "cells": cells, "memory": memory, "some": some}
    computed |= {"added": added, "ceilings": ceilings}
    computed |= cluster_tables.TABLES | paper_tables.TABLES | device_tables.TABLES
    lines = computed[name](result) if name in computed else result["tables"][name]
    return "\n".join(lines) + "\n"


def verdicts(file: Path) -> list[str]:
    """The lab's claims: what each says, its verdict, and when it would be another."""
    found = [json.loads(line) for line in file.read_text().splitlines()]
    shown = ("id", "claim", "verdict", "criterion")
    return [
        "| | claim | verdict | criterion |",
        "|---|---|---|---|",
        *(" ".join(f"| {' | '.join(one[key] for key in shown)} |".split()) for one in found),
    ]


def families(result: dict[str, Any]) -> list[str]:
    """The cells of a benchmark by family: how far ahead, how near the limit, what is left."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for cell in result["cells"]:
        if "ratio_by_best" in cell["verdict"] and not cell["observed"]:
            family = cell["family"]
            name = f"{family}, {cell['name'].split('-')[1]}" if family in HALVES else family
            kinds.setdefault(name, []).append(cell["verdict"])
    kinds["all"] = [said for group in kinds.values() for said in group]
    return [
        "| family | cells | by minimum, smallest to largest | mean | of its limit | at the limit "
        "| mean | met | ahead | lost |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_family(kind, said) for kind, said in kinds.items()),
    ]


def _family(kind: str, said: list[dict[str, Any]]) -> str:
    ratios = [x["ratio_by_best"] for x in said]
    # What is not counted in FMAs and bytes (tanh, whole models) is far from all limits.
    shares = [max(x.get("of_peak", 0.0), x.get("of_bandwidth", 0.0)) for x in said]
    # What is beyond a limit (a cache, pairs of bfloat16) or far from both has none of them to name.
    ceilings = [x.get("ceiling", x["ratio_by_best"]) for x in said]
    ceilings = [
        ratio if share < FAR else ceiling for ratio, share, ceiling in zip(ratios, shares, ceilings, strict=True)
    ]
    near = f"{min(shares):.0%} to {max(shares):.0%}" if any(shares) else "-"
    words = [x["word"] for x in said]
    return (
        f"| {kind} | {len(said)} | {_span(ratios)} | {geometric_mean(ratios):.2f}× "
        f"| {near} | {_span(ceilings)} | {geometric_mean(ceilings):.2f}× "
        f"| {words.count('met')} | {words.count('below')} | {words.count('lost')} |"
    )


def cells(result: dict[str, Any]) -> list[str]:
    """A benchmark cell by cell: times, the ratio, what it is held to, the error."""
    return [
        "| cell | ours | fastest peer | by minimum | by median | bar | | error over PyTorch's |",
        "|---|---|---|---|---|---|---|---|",
        *(_cell(cell) for cell in result["cells"] if "ratio_by_best" in cell["verdict"]),
    ]


def ceilings(result: dict[str, Any]) -> list[str]:
    """Cells that arithmetic bounds: the ratio, what it would be at the peak, and how much of that is reached."""
    return [
        "| cell | ours | fastest peer | by minimum | by median | at the limit | of the peak |",
        "|---|---|---|---|---|---|---|",
        *(_beside_its_limit(cell) for cell in result["cells"]),
    ]


def _beside_its_limit(cell: dict[str, Any]) -> str:
    said = cell["verdict"]
    ratios = (said[name] for name in ("ratio_by_best", "ratio_by_median", "ceiling"))
    return f"{_times(cell)} | {' | '.join(f'{ratio:.2f}×' for ratio in ratios)} | {said['of_peak']:.0%} |"


def _cell(cell: dict[str, Any]) -> str:
    said, accuracy = cell["verdict"], cell["verdict"]["accuracy"]
    error = "-" if accuracy is None else f"{accuracy['rms']:.2f} (largest {accuracy['max']:.2f})"
    ratios = f"{said['ratio_by_best']:.2f}× | {said['ratio_by_median']:.2f}×"
    return f"{_times(cell)} | {ratios} | {Bar(**cell['bar'])} | {said['word']} | {error} |"


def _times(cell: dict[str, Any]) -> str:
    """The first columns of a cell's row: its name, our time, the fastest peer's."""
    fastest = cell["verdict"]["fastest_by_best"]
    times = {result["name"]: seconds(result["best"]) for result in cell["results"]}
    return f"| {cell['name']} | {times['levelhead']} | {times[fastest]} {fastest}"


def added(result: dict[str, Any]) -> list[str]:
    """What statistics add to a call, by minimum and by median."""
    lines = ["| | without | with statistics | adds, by minimum | by median |", "|---|---|---|---|---|"]
    for cell in result["cells"]:
        said = {one["name"]: one for one in cell["results"]}
        plain, seen = said[OFF], said["levelhead"]
        more = (f"{seen[by] / plain[by] - 1:+.1%}" for by in ("best", "median"))
        times = f"{seconds(plain['best'])} | {seconds(seen['best'])}"
        name = cell["name"].removeprefix("statistics-")
        lines.append(f"| {name} | {times} | {' | '.join(more)} |")
    return lines


def some(result: dict[str, Any]) -> list[str]:
    """A few cells that stand for the others, and every one that a peer won."""
    chosen = [cell for cell in result["cells"] if cell["name"] in SHOWN or cell["verdict"]["word"] == "lost"]
    return [
        "| | levelhead | fastest other | times as fast | error, of PyTorch's |",
        "|---|---|---|---|---|",
        *(_some(cell) for cell in chosen),
    ]


def _some(cell: dict[str, Any]) -> str:
    said, accuracy = cell["verdict"], cell["verdict"]["accuracy"]
    bold = "**" if said["word"] == "lost" else ""
    error = "-" if accuracy is None else f"{accuracy['rms']:.2f}"
    return f"{_times(cell)} | {bold}{said['ratio_by_best']:.2f}{bold} | {error} |"


def memory(result: dict[str, Any]) -> list[str]:
    """Peak extra memory of a call where it was weighed, in MiB, of every peer."""
    weighed = [
        (cell["name"], {found["name"]: found["memory"] for found in cell["results"]})
        for cell in result["cells"]
        if all("memory" in found for found in cell["results"]) and cell["results"]
    ]
    names = list(dict.fromkeys(name for _, taken in weighed for name in taken))
    return [
        f"| cell | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
        *(f"| {cell} | {' | '.join(_mib(taken.get(n)) for n in names)} |" for cell, taken in weighed),
    ]


def _mib(taken: int | str | None) -> str:
    return f"{taken / 2**20:.1f}" if isinstance(taken, int) else taken or "-"


def _span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}×"


def filled(text: str) -> str:
    """The text with every table as its file has it."""
    return PLACE.sub(lambda found: f"<!-- {found[1]}: {found[2]} -->\n{table(found[1], found[2])}<!-- end -->\n", text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text()))

"""A result as text: the table, every cell that was lost, the peers that were not measured and why.

Made from the dictionary that `--json` writes; no cell is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from levelhead.bench.cases import Case
from levelhead.words import aligned

Result: TypeAlias = dict[str, Any]

MARKS = {"met": "met", "below": "BELOW", "lost": "LOST", "alone": "alone", "wrong": "WRONG", "missing": "missing"}
_HEAD = ("case", "ours", "fastest peer", "ratio", "median", "rate", "of limit", "error", "verdict")
_LEFT = {0, 2, 8}  # columns of words


def listing(cases: list[Case]) -> Iterator[str]:
    """Names, shapes and bars, for `--list`."""
    for case in cases:
        width = f"{case.D}" if case.D == case.E else f"{case.D}/{case.E}"
        heads = f"{case.H}" if not case.grouped else f"{case.H}/{case.G}"
        shape = f"B {case.B}  H {heads}  T {case.T}  S {case.S}  d {width}  {case.dtype}"
        yield f"{case.name:<28} {shape:<56} {case.bar}"


def report(result: Result) -> Iterator[str]:
    yield from _heading(result)
    yield from _table(result["cells"])
    yield from _shortfalls(result["cells"])
    yield from _absent(result["cells"])
    yield from _memory(result["cells"])
    yield from _closing(result["summary"])


def _heading(result: Result) -> Iterator[str]:
    machine, limits = result["machine"], result["limits"]
    yield (
        f"levelhead {result['levelhead']} on {machine['cpu']}, {result['threads']} threads, "
        f"{machine['isa']}; {result['date']}"
    )
    yield f"measured here: FMA peak {limits['gflops']:.0f} GFLOP/s, memory bandwidth {limits['gbytes']:.1f} GB/s"
    yield ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    for name, how in result["threads_set_by"].items():
        yield f"  {name}: {how}"
    yield ""


def _table(cells: list[Result]) -> Iterator[str]:
    head, *lines = aligned([_HEAD, *map(_row, cells)], _LEFT)
    yield head
    family = None
    for line, cell in zip(lines, cells, strict=True):
        if cell["family"] != family:
            family = cell["family"]
            yield f"-- {family}"
        yield line
    yield ""


def _row(cell: Result) -> tuple[str, ...]:
    verdict = cell["verdict"]
    ours = _of(cell, "levelhead")
    if ours is None:
        return (cell["name"], *"-------", f"{MARKS[verdict['word']]}: {verdict['why']}")
    rival, ratios = "-", ("-", "-")
    if "ratio_by_best" in verdict:
        name = verdict["fastest_by_best"]
        fastest = _of(cell, name)
        assert fastest is not None
        rival = f"{seconds(fastest['best'])} {name}"
        ratios = (f"{verdict['ratio_by_best']:.2f}×", f"{verdict['ratio_by_median']:.2f}×")
    if "gflops" not in verdict:
        rate, share = "-", "-"
    elif cell["decode"]:
        rate, share = f"{verdict['gbytes']:.1f} GB/s", f"{verdict['of_bandwidth']:.0%} memory"
    else:
        rate, share = f"{verdict['gflops']:.1f} GFLOP/s", f"{verdict['of_peak']:.0%} FMA"
    accuracy = verdict["accuracy"]
    error = f"{ours['error']['rms']:.1e}"
    if accuracy is not None:
        worse = "" if accuracy["met"] else " ".join(["!", *filter(None, [accuracy.get("of")])])
        error += f" ({accuracy['rms']:.2f}/{accuracy['max']:.2f}{worse})"
    word = MARKS[verdict["word"]]
    if cell["observed"] and "ratio_by_best" in verdict:
        word += f" ({1 / verdict['ratio_by_best'] - 1:+.1%})"
    return (cell["name"], seconds(ours["best"]), rival, *ratios, rate, share, error, word)


def _shortfalls(cells: list[Result]) -> Iterator[str]:
    for word, title in (
        ("wrong", "Wrong"),
        ("missing", "Missing"),
        ("lost", "Lost: a peer is faster"),
        ("below", "Ahead, but below the bar"),
        ("alone", "No peer to compare with"),
    ):
        matching = [cell for cell in cells if cell["verdict"]["word"] == word]
        if matching:
            yield f"{title} ({len(matching)} of {len(cells)})"
        for cell in matching:
            verdict = cell["verdict"]
            ratio = f"{verdict['ratio_by_best']:.2f}×, " if "ratio_by_best" in verdict else ""
            share = ""
            if "of_peak" in verdict:
                share = f"{verdict['of_peak']:.0%} of FMA peak, {verdict['of_bandwidth']:.0%} of memory; "
            ceiling = ""
            if "ceiling" in verdict and not cell["observed"]:
                ceiling = f"; all of the {verdict['limit']} would be {verdict['ceiling']:.2f}×"
            yield f"  {cell['name']:<28} {ratio}{share}{verdict['why']}{ceiling}"
    yield "error: RMS against float64 (ours / PyTorch's: RMS/maximum; ! over 1.05 or 1.25)"
    yield ""


def _absent(cells: list[Result]) -> Iterator[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        for name, why in cell["refused"].items():
            reasons.setdefault((name, why), []).append(cell["name"])
    lines = []
    for (name, why), names in sorted(reasons.items()):
        shown = ", ".join(names[:3]) + (f", … ({len(names)} cells)" if len(names) > 3 else "")
        lines.append(f"  {name}: {why} [{shown}]")
    yield from _section("Not measured, and why", lines)


def _memory(cells: list[Result]) -> Iterator[str]:
    lines = []
    for cell in cells:
        sizes = {r["name"]: r["memory"] for r in cell["results"] if "memory" in r}
        parts = (f"{name} ({x})" if isinstance(x, str) else f"{name} {x / 2**20:.1f} MiB" for name, x in sizes.items())
        if sizes:
            lines.append(f"  {cell['name']:<18} {', '.join(parts)}")
    yield from _section("Peak extra memory of a call, beyond inputs and result", lines)


def _section(title: str, lines: list[str]) -> list[str]:
    return [title, *lines, ""] if lines else []


def _closing(summary: Result) -> Iterator[str]:
    mean, words = summary["geometric_mean"], summary["words"]
    counts = ", ".join(f"{len(names)} {word}" for word, names in words.items())
    yield f"{summary['cells']} cells: {counts}"
    if mean["best"] is not None:
        yield (
            f"geometric mean against the fastest peer of each of {summary['compared']} cells: "
            f"{mean['best']:.2f}× by minimum, {mean['median']:.2f}× by median"
        )
    for title, key in (("cost", "exponents"), ("memory with inputs", "memory_exponents")):
        for name, power in summary[key].items():
            yield f"{title} of {name} grows as tokens^{power:.2f}"
    if worse := summary["less_accurate_than_pytorch"]:
        yield f"less accurate than PyTorch allows: {', '.join(worse)}"


def _of(cell: Result, name: str) -> Result | None:
    return next((result for result in cell["results"] if result["name"] == name), None)


def seconds(time: float) -> str:
    """Seconds in a unit that reads well.

    >>> seconds(0.00234), seconds(3.2e-6), seconds(1.5)
    ('2.34 ms', '3.20 µs', '1.50 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if time >= size:
            return f"{time / size:.3g} {unit}" if time >= 10 * size else f"{time / size:.2f} {unit}"
    return f"{time / 1e-6:.2f} µs"

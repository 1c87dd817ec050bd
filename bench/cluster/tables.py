"""The tables of docs/scaling.md, from a file of runs: measurements as they are, then the model.

A file holds several runs of `levelhead cluster-bench`, each with its world and its link. The model is fitted to the
runs in FITTED; the world and the links that it never saw are its test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any, TypeAlias

from cluster.fit import Measured, errors, fit, measured
from cluster.load import BACKWARD, FORWARD, flops, pairs
from cluster.scaling_model import Link, Machine, predict
from cluster.winners import GBIT
from levelhead.bench.report import seconds
from levelhead.cluster.problem import PASSES, Problem
from levelhead.cluster.report import mib, over_bound, share

Result: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[int, bool, str, str]  # tokens, causal, plan, split

FITTED = (1, 2, 4)  # worlds without a limited link


def local(result: Result) -> list[Result]:
    """The runs inside one machine, by world."""
    return sorted((run for run in result["runs"] if run["link"] is None), key=lambda r: r["world"])


def linked(result: Result) -> list[Result]:
    """The runs over a link of limited rate, the fastest first."""
    runs = [run for run in result["runs"] if run["link"] is not None]
    return sorted(runs, key=lambda run: -float(run["link"]["gbit"]))


def machine(result: Result) -> Machine:
    """The model's constants, of one core."""
    cells = [cell for run in local(result) if run["world"] in FITTED for cell in measured(run)]
    return fit(cells, local(result)[0]["machine"]["threads"])


def link_of(run: Result) -> Link:
    return Link(run["link"]["gbit"] * GBIT, run["link"]["latency"])


# ---- what was measured


def about(result: Result) -> list[str]:
    """When and where, how large and how often."""
    run = local(result)[0]
    effort, versions = run["effort"], run["versions"]
    told = {
        "machine": f"{run['machine']['cpu']}, {run['machine']['threads']} cores, "
        f"{run['machine']['isa']}; torch {versions['torch']}, {run['backend']}",
        "when": run["date"][:10],
        "effort": f"{effort['name']}: {effort['rounds']} rounds",
        "problem": f"{effort['heads']} heads of width {effort['width']}, float32; decode: {effort['queries']} queries",
        "links left out": "; ".join(f"{k}: {v}" for k, v in result["left_out"].items()) or "none",
    }
    return ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in told.items())]


def strong(result: Result) -> list[str]:
    """Forward / forward and backward, of the longest sequence."""
    runs = local(result)
    rows: dict[Key, list[str]] = {}
    for run in runs:
        for key, cells in _by_key(run, "strong").items():
            if key not in rows:
                rows[key] = [_pair(cells, lambda cell: cell["alone"]["same_threads"])]
                rows[key].append(_pair(cells, lambda cell: cell["alone"]["all_cpus"]))
            rows[key].append(_pair(cells, lambda cell: cell["median"]))
    return [
        f"| tokens | plan | split | one process, 1 thread | all CPUs | {_worlds(runs)} |",
        f"|---|---|---|---|---|{'---|' * len(runs)}",
        *(f"| {_named(key)} | {' | '.join(row)} |" for key, row in rows.items()),
    ]


def weak(result: Result) -> list[str]:
    """GFLOP/s of all ranks together, forward and backward, at the most tokens per rank."""
    runs = local(result)
    rows: dict[tuple[bool, str, str], list[str]] = {}
    for run in runs:
        for (_, causal, plan, split), cells in _by_key(run, "weak").items():
            cell = cells["train"]
            problem = Problem(**cell["problem"])
            work = float(flops(problem, pairs(problem), FORWARD + BACKWARD))
            rows.setdefault((causal, plan, split), []).append(f"{work / cell['median'] / 1e9:.1f}")
    return [
        f"| plan | split | {_worlds(runs)} |",
        f"|---|---|{'---|' * len(runs)}",
        *(
            f"| {plan} | {_shape(causal, plan)}, {split} | {' | '.join(row)} |"
            for (causal, plan, split), row in rows.items()
        ),
    ]


def where(result: Result) -> list[str]:
    """Shares of a rank's time, of the longest balanced causal sequence, forward and backward."""
    lines = ["| ranks | plan | time | compute | wait | other | in transfer |"]
    lines.append("|---|---|---|---|---|---|---|")
    for run in [*local(result), *linked(result)]:
        for cell in _balanced(run, "train"):
            shares = [f"{share(cell, x):.0%}" for x in ("compute", "wait", "other", "transfer")]
            told = [_ranks(run), cell["plan"], seconds(cell["median"]), *shares]
            lines.append(f"| {' | '.join(told)} |")
    return lines


def traffic(result: Result) -> list[str]:
    """Received per rank against the bound: forward, then forward and backward."""
    lines = ["| ranks | plan | forward | over its bound | and backward | over its bound |"]
    lines.append("|---|---|---|---|---|---|")
    for run in local(result)[1:]:
        passes = zip(_balanced(run, "forward"), _balanced(run, "train"), strict=True)
        for forward, train in passes:
            told = [_ranks(run), forward["plan"]]
            for cell in (forward, train):
                told += [mib(fmean(cell["ranks"]["received"])), over_bound(cell)]
            lines.append(f"| {' | '.join(told)} |")
    return lines


# ---- the model against it


def constants(result: Result) -> list[str]:
    """The fitted constants, as rates where that reads better."""
    found = machine(result)
    told = {
        "forward, all keys at once": _rate(found.forward, "GFLOP/s"),
        "forward, block by block": _rate(found.blocks, "GFLOP/s"),
        "backward": _rate(found.backward, "GFLOP/s"),
        "decode: reading keys and values": _rate(found.read, "GB/s"),
        "decode: writing their gradients": _rate(found.written, "GB/s"),
        "copying what was received": _rate(found.copy, "GB/s"),
        "merging states and sums": _rate(found.merge, "GB/s"),
        "a message": seconds(found.message) if found.message else "too small to see",
        "a pass through a plan": seconds(found.call) if found.call else "too small to see",
    }
    return ["| of one core | |", "|---|---|", *(f"| {k} | {v} |" for k, v in told.items())]


def model(result: Result) -> list[str]:
    """How far the model is off, where it was fitted and where it was not."""
    found = machine(result)
    fitted = [cell for run in local(result) if run["world"] in FITTED for cell in measured(run)]
    kinds: list[tuple[str, list[Measured], Link | None]] = [("fitted to", fitted, None)]
    for run in local(result):
        if run["world"] not in FITTED:
            kinds.append((f"never seen: {_ranks(run)} ranks", measured(run), None))
    for run in linked(result):
        kinds.append((f"never seen: {_ranks(run)}", measured(run), link_of(run)))
    lines = ["| measurements | cells | median error | largest | too slow by |", "|---|---|---|---|---|"]
    for words, cells, link in kinds:
        off = errors(found, cells, link)
        lines.append(f"| {words} | {off.cells} | {off.median:.0%} | {off.largest:.0%} | {off.bias:+.0%} |")
    return lines


def links(result: Result) -> list[str]:
    """On limited links: measured, predicted, and predicted if nothing overlapped."""
    found = machine(result)
    lines = ["| link | plan | passes | measured | model | without overlap |", "|---|---|---|---|---|---|"]
    for run in linked(result):
        for passes in ("forward", "train"):
            for cell in _balanced(run, passes):
                each = Problem(**cell["problem"])
                guesses = [
                    seconds(
                        predict(
                            cell["plan"],
                            each,
                            run["world"],
                            found,
                            link_of(run),
                            passes=passes,
                            split=cell["split"],
                            overlap=overlap,
                        ).total
                    )
                    for overlap in (True, False)
                ]
                told = [f"{run['link']['gbit']:g} Gbit/s", cell["plan"], passes]
                told += [seconds(cell["median"]), *guesses]
                lines.append(f"| {' | '.join(told)} |")
    return lines


# ---- helpers


def _by_key(run: Result, kind: str) -> dict[Key, dict[str, Result]]:
    """The cells of a run's longest sequence (and decode's) by what they are, then by passes."""
    cells = [cell for cell in run["cells"] if cell["kind"] == kind]
    longest = max(cell["problem"]["tokens"] for cell in cells if cell["plan"] != "decode")
    found: dict[Key, dict[str, Result]] = {}
    for cell in cells:
        problem = cell["problem"]
        if cell["plan"] == "decode" or problem["tokens"] == longest:
            key = (problem["tokens"], problem["causal"], cell["plan"], cell["split"])
            found.setdefault(key, {})[cell["passes"]] = cell
    return found


def _balanced(run: Result, passes: str) -> Iterator[Result]:
    """The longest causal zig-zag cells of a run, and decode's."""
    for (_, causal, plan, split), cells in _by_key(run, "strong").items():
        if plan == "decode" or (causal and split == "zigzag"):
            yield cells[passes]


def _pair(cells: dict[str, Result], of: Callable[[Result], float]) -> str:
    return " / ".join(seconds(of(cells[passes])) for passes in PASSES)


def _worlds(runs: list[Result]) -> str:
    return " | ".join(f"{run['world']} rank{'s' * (run['world'] > 1)}" for run in runs)


def _named(key: Key) -> str:
    tokens, causal, plan, split = key
    return f"{tokens} {_shape(causal, plan)} | {plan} | {split}"


def _shape(causal: bool, plan: str) -> str:
    return "decode" if plan == "decode" else "causal" if causal else "dense"


def _ranks(run: Result) -> str:
    link = run["link"]
    return f"{run['world']}" if link is None else f"{run['world']} over {link['gbit']:g} Gbit/s"


def _rate(per_unit: float, unit: str) -> str:
    return f"{1e-9 / per_unit:.1f} {unit}" if per_unit else "too fast to see"


TABLES: dict[str, Callable[[Result], list[str]]] = {
    "about": about,
    "strong": strong,
    "weak": weak,
    "where": where,
    "traffic": traffic,
    "constants": constants,
    "model": model,
    "links": links,
}

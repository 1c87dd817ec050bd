"""The figure of a claim, drawn from its result: the charts that the claim declares, and every number beside theory.

A result may come from this process, from the cache or from a record; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from levelhead.call.scaling import RULES
from levelhead.lab.claim import Claim, Path, Plot
from levelhead.lab.figure import Axis, Chart, Fact, Figure, Series, Shape, Source
from levelhead.lab.measure import divided

Fields = Mapping[str, Any]  # theory, measured, stderr, verdict, params, seed and details of a result

_SHOWN = 8  # numbers of a list


def claim_figure(claim: Claim, result: Fields, code: str, source: Source, recorded: str = "") -> Figure:
    """`code` prints the figure again; `recorded` is where a recorded result comes from."""
    verdict = result["verdict"]
    compared = {"verdict": verdict, "expected": claim.expected}
    expected = "as expected" if verdict == claim.expected else f"expected {claim.expected}"
    return Figure(
        claim.id,
        claim.claim,
        [chart for plot in claim.plots if (chart := _chart(plot, result, source)) is not None],
        code,
        facts=tuple(_facts(result, source)),
        note=f"Verdict: {verdict}, {expected}. Criterion: {claim.criterion}",
        recorded=recorded,
        extra=compared | {"derivation": claim.derivation, "params": result["params"], "seed": result["seed"]},
    )


def at(value: Any, path: Path) -> Any:
    """The value at the end of a path; None if there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is no mapping, with the path to it."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, part in value.items():
        yield from leaves(part, (*path, name))


# ---- charts ------------------------------------------------------------------


def _chart(plot: Plot, result: Fields, source: Source) -> Chart | None:
    if plot.heat:
        series = list(_heat(plot, result, source))
    else:
        measured = [one for name, path in plot.lines.items() for one in _lines(plot, result, name, path, source)]
        theory = [one for name, path in plot.theory.items() for one in _lines(plot, result, name, path, "theory")]
        series = [*measured, *theory] if measured else []
    if not series:
        return None
    about = "; ".join(_ends(one) for one in series if one.shape != "heat")
    axes = Axis(plot.x, log="x" in plot.log), Axis(plot.y, log="y" in plot.log)
    return Chart(plot.title, *axes, series, about or "a number in every cell")


def _heat(plot: Plot, result: Fields, source: Source) -> Iterator[Series]:
    for path in plot.lines.values():
        rows = at(result, path)
        if isinstance(rows, list) and rows and isinstance(rows[0], list):
            z = _numbers(rows)
            yield Series(plot.title, source, "heat", np.arange(z.shape[1]), np.arange(z.shape[0]), z=z)


def _lines(plot: Plot, result: Fields, name: str, path: Path, source: Source) -> Iterator[Series]:
    """The line at a path with its theory, or those of every name below it."""
    value = at(result, path)
    curve = isinstance(value, Mapping) and {"x", "y"} <= value.keys()
    if isinstance(value, Mapping) and not curve:
        for part in value:
            yield from _lines(plot, result, part, (*path, part), source)
        return
    if curve:
        x, y, error = value["x"], value["y"], value.get("stderr")
    elif isinstance(value, list):
        x, y, error = at(result, plot.along) if plot.along else list(range(len(value))), value, None
    else:
        return
    if not isinstance(x, list) or len(x) != len(y):
        return
    label = divided(name) if name in RULES else name or path[-1]
    expected: Any = None
    if path[0] == "measured":
        error, expected = at(result["stderr"], path[1:]), at(result["theory"], path[1:])
    compared = isinstance(expected, list) and len(expected) == len(x)
    # Points, where a line of theory goes through them: two lines on top of each other look like one.
    yield _series(label, source, "points" if compared or (plot.theory and source != "theory") else "line", x, y, error)
    if compared:
        yield _series(f"{label}, theory", "theory", "line", x, expected, None)


def _series(name: str, source: Source, shape: Shape, x: Sequence[float], y: Sequence[Any], error: Any) -> Series:
    """Two standard errors to either side are a band around a line, and bars at points."""
    mean = _numbers(y)
    if not isinstance(error, list) or len(error) != len(y):
        return Series(name, source, shape, x, mean)
    spread = 2 * _numbers(error)
    return Series(name, source, shape, x, mean, low=mean - spread, high=mean + spread)


def _numbers(values: Sequence[Any]) -> Any:
    return np.array(values, np.float64)  # None is NaN


def _ends(series: Series) -> str:
    y = np.asarray(series.y, np.float64)
    return f"{series.name}: {y[0]:.3g} to {y[-1]:.3g}"


# ---- numbers -----------------------------------------------------------------


def _facts(result: Fields, source: Source) -> Iterator[Fact]:
    """Every number, and the theory of it, if it has one."""
    for path, value in leaves(result["measured"]):
        label = ", ".join(path) or "measured"
        yield from _fact(label, value, source, at(result["stderr"], path))
        yield from _fact(label, at(result["theory"], path), "theory", None)
    if isinstance(result["theory"], str):
        yield Fact("theory", result["theory"], "theory")


def _fact(label: str, value: Any, source: Source, error: Any) -> Iterator[Fact]:
    if value is None or isinstance(value, Mapping):
        return
    if isinstance(value, list):
        some = ", ".join(_short(x) for x in value[:_SHOWN])
        yield Fact(label, f"{some}, …" if len(value) > _SHOWN else some, source)
    else:
        stderr = error if isinstance(error, int | float) else None
        yield Fact(label, value if isinstance(value, str) else float(value), source, stderr)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_short(x) for x in value)}]"
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)

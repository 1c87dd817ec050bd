"""The history of a run as SVG: largest logit, entropy and what was logged over the steps, a line per module.

Alarms are marked on the curves where a watch would have raised them. Colours of lines go from the first module to the
last; their names are in the legend and in a tooltip. Nothing is judged here: alarms come from `logit_growth`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from levelhead.diagnosis import logit_growth, thresholds
from levelhead.diagnosis.findings import number
from levelhead.runs.record import Run
from levelhead.words import module_title

_WIDTH, _HEIGHT = 860, 190  # of a chart, in user units
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 24
_POINTS = 256  # of a line, at most
_NAMED = 8  # modules in the legend


@dataclass(frozen=True)
class Line:
    """One curve: a module's, or that of a number that was logged."""

    name: str
    colour: str
    points: tuple[tuple[float, float], ...]  # finite ones


@dataclass(frozen=True)
class Mark:
    """An alarm on a curve."""

    step: float
    level: float
    words: str


def charts(run: Run) -> str:
    """All charts, with a legend; empty for a run of one step."""
    if len({snapshot.step for snapshot in run.snapshots}) < 2:
        return ""
    marks = list(_marks(run))
    sampled = any(record.facts.sampled for snapshot in run.snapshots for record in snapshot.records)
    title = "largest |logit|, of sampled rows: a lower bound" if sampled else "largest |logit|"
    parts = [_chart(title, _logits(run), marks, log=True, on_curve=True)]
    parts.append(_chart("entropy, H/ln n", _entropies(run), marks, bounds=(0.0, 1.0)))
    for name, points in run.logged.items():
        kept = tuple((float(step), x) for step, x in _thinned(points) if math.isfinite(x))
        if len(kept) > 1:
            parts.append(_chart(name, [Line(name, "currentColor", kept)], marks))
    return f'{_legend(run, marks)}<div class="scroll">{"".join(parts)}</div>'


# ---- what is drawn


def _marks(run: Run) -> Iterator[Mark]:
    """The first alarm of each module, found as a watch would have on the way."""
    for module, curve in logit_growth.curves(run).items():
        thin = max(1, len(curve.steps) // _POINTS)
        thinned = logit_growth.Curve(curve.steps[::thin], curve.values[::thin])
        for n in range(1, len(thinned.steps) + 1):
            if raised := logit_growth.alarms(thinned.until(n)):
                worst = max(raised, key=lambda alarm: alarm.level)
                step = float(thinned.steps[n - 1])
                words = f"{worst.severity}: logit growth in {module_title(module)} head {worst.head} at step {step:.0f}"
                yield Mark(step, worst.level, f"{words}: {number(worst.level)}")
                break


def _logits(run: Run) -> list[Line]:
    curves = logit_growth.curves(run)
    values = {name: np.max(np.nan_to_num(curve.values, nan=-1.0), axis=1) for name, curve in curves.items()}
    return [_line(run, name, zip(curves[name].steps, x, strict=True), least=1e-9) for name, x in values.items()]


def _entropies(run: Run) -> list[Line]:
    points: dict[str, list[tuple[float, float]]] = {}
    for snapshot in run.snapshots:
        for record in snapshot.records:
            known = record.heads.normalised_entropy[np.isfinite(record.heads.normalised_entropy)]
            if len(known):
                points.setdefault(record.module, []).append((snapshot.step, float(np.mean(known))))
    return [_line(run, name, mine) for name, mine in points.items()]


def _line(run: Run, name: str, points: Iterable[tuple[float, float]], least: float = -math.inf) -> Line:
    kept = [(float(step), float(x)) for step, x in points if math.isfinite(x) and x >= least]
    return Line(module_title(name), _colours(run)[name], tuple(_thinned(kept)))


def _colours(run: Run) -> Mapping[str, str]:
    names = [record.module for record in run.latest]
    last = max(len(names) - 1, 1)
    return {name: f"hsl({210 + 150 * i / last:.0f} 65% 55%)" for i, name in enumerate(names)}


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Every so many-th point, and always the last."""
    every = max(1, len(points) // _POINTS)
    return [*points[:-1:every], *points[-1:]]


# ---- the drawing


def _chart(
    title: str,
    lines: Sequence[Line],
    marks: Sequence[Mark],
    *,
    log: bool = False,
    bounds: tuple[float, float] | None = None,
    on_curve: bool = False,
) -> str:
    steps = [step for line in lines for step, _ in line.points]
    values = [x for line in lines for _, x in line.points]
    if not steps:
        return ""
    first, last = min(steps), max(max(steps), min(steps) + 1)
    low, high = bounds or (min(values), max(values))
    if log:
        low, high = 10 ** math.floor(math.log10(max(low, 1e-2))), 10 ** math.ceil(math.log10(max(high, 10.0)))
    elif high <= low:
        low, high = low - 0.5, high + 0.5

    def x_of(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y_of(value: float) -> float:
        share = math.log(max(value, low) / low) / math.log(high / low) if log else (value - low) / (high - low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    drawn = [_grid(_ticks(low, high, log), y_of)]
    drawn += [_text(x_of(step), _HEIGHT - 6, f"{step:,.0f}", "middle") for step in _steps(first, last)]
    for line in lines:
        path = "M" + "L".join(f"{x_of(step):.1f} {y_of(value):.1f}" for step, value in line.points)
        drawn.append(
            f'<path d="{path}" fill="none" stroke="{line.colour}" stroke-width="1.6" stroke-linejoin="round">'
            f"<title>{escape(line.name)}</title></path>"
        )
    drawn += [_mark(mark, x_of(mark.step), y_of(mark.level) if on_curve else None) for mark in marks]
    label = f"{escape(title)} over steps {first:,.0f} to {last:,.0f}"
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'style="width:100%;min-width:560px" role="img" aria-label="{label}">{"".join(drawn)}</svg></figure>\n'
    )


def _grid(ticks: Sequence[float], y_of: Callable[[float], float]) -> str:
    return "".join(
        f'<path class="grid-line" d="M{_LEFT} {y_of(tick):.1f}H{_WIDTH - _RIGHT}"/>'
        + _text(_LEFT - 6, y_of(tick) + 4, number(tick), "end")
        for tick in ticks
    )


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        return [10.0**n for n in range(round(math.log10(low)), round(math.log10(high)) + 1)]
    return [low + (high - low) * i / 4 for i in range(5)]


def _steps(first: float, last: float) -> list[float]:
    return [first + (last - first) * i / 5 for i in range(6)]


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _mark(mark: Mark, x: float, y: float | None) -> str:
    line = f'<path d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" class="alarm-line"/>'
    if y is None:
        return line
    shape = f'<path class="warning-mark" d="M{x:.1f} {y - 9:.1f}l7 12h-14z"><title>{escape(mark.words)}</title></path>'
    return line + shape


def _legend(run: Run, marks: Sequence[Mark]) -> str:
    colours = list(_colours(run).items())
    shown = colours if len(colours) <= _NAMED else [*colours[: _NAMED // 2], *colours[-_NAMED // 2 :]]
    items = [
        f'<span><svg viewBox="0 0 22 8" style="width:22px;display:inline-block"><path d="M0 4H22" stroke="{colour}" '
        f'stroke-width="3"/></svg> {escape(module_title(name))}</span>'
        for name, colour in shown
    ]
    if len(colours) > len(shown):
        items.insert(_NAMED // 2, f"<span>… {len(colours) - len(shown)} more …</span>")
    alarms = "".join(f"<li>{escape(mark.words)}</li>" for mark in marks[:_NAMED])
    rest = f"<li>… and {len(marks) - _NAMED} more</li>" if len(marks) > _NAMED else ""
    said = f'<ul class="alarms">{alarms}{rest}</ul>' if marks else '<p class="soft">No alarm on the way.</p>'
    bound = f"The loss suffers from about {number(thresholds.DETERIORATES)} on."
    return f'<p class="legend">{" ".join(items)}</p>{said}<p class="soft">{bound}</p>'

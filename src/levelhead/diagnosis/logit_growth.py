"""Logit growth: whether a head's largest |logit| approaches values where training breaks.

In any training logits rise and level off, so neither a level nor a rise alone is an alarm. A rise counts if it is
significant (Mann-Kendall), more than a random walk of the same jumps would rise (successive maxima are correlated,
which Mann-Kendall does not know), and at its present pace (Theil-Sen, which ignores outliers) soon reaches values where
the loss suffers. Windows of all lengths at the end of the curve are tested, so that a calm past does not hide a late
blow-up. A curve can be tested at any earlier point, too: this is how lead times are measured. Of sampled rows a value
where the loss suffers stays in force until later samples would have had its row, if it were still there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from levelhead.diagnosis import thresholds
from levelhead.diagnosis.findings import Finding, Severity, link, worst_heads
from levelhead.runs import row_sample
from levelhead.runs.record import Record, Run, Snapshot
from levelhead.runs.tally import Floats

KIND = "logit growth"
_AT_MOST = 64  # points a window is thinned to: all pairs are compared


@dataclass(frozen=True)
class Curve:
    """The largest |logit| of a module's heads over the steps."""

    steps: Floats  # (N,)
    values: Floats  # (N, H); NaN: nothing seen
    missed: Floats = field(default_factory=lambda: np.zeros(0))  # (N,) the share of rows not sampled; (0,): none

    def until(self, points: int) -> Curve:
        """The first points of it."""
        return Curve(self.steps[:points], self.values[:points], self.missed[:points])

    @property
    def level(self) -> Floats:
        """(H,) the value in force at the end: the last, or one from `DETERIORATES` on that later samples may miss."""
        last = self.values[-1]
        unseen = np.cumprod(self.missed[:0:-1])[::-1]  # that no later point has a row of each point but the last
        earlier = self.values[:-1][unseen >= thresholds.MISSED] if len(unseen) else self.values[:0]
        highest = np.fmax.reduce(earlier, axis=0, initial=-np.inf)
        level: Floats = np.where(highest >= thresholds.DETERIORATES, np.fmax(highest, last), last)
        return level


@dataclass(frozen=True)
class Pace:
    """How fast a head's curve rises over a window at its end."""

    start: float  # on the fitted line, where the window begins and ends
    end: float
    last_step: float
    slope: float  # per step
    growth: float  # of the logarithm, per step
    span: float  # steps of the window
    scatter: float  # standard deviation around the line
    points: int
    drift: float  # the rise of the logarithm, in standard deviations of a random walk with the same jumps

    @property
    def sure(self) -> bool:
        """Whether the rise is too large for chance: one of many windows rises now and then."""
        clear = self.end - self.start >= thresholds.CLEAR * self.scatter
        steady = clear and self.points >= 2 * thresholds.POINTS
        return self._walk_z >= thresholds.SIGNIFICANT and (steady or self.end >= thresholds.GROWN * self.start)

    @property
    def _walk_z(self) -> float:
        """The drift as a normal deviate: jumps of a short window are few, and their size is uncertain (Student's t, by
        Wallace's approximation)."""
        free = self.points - 2
        return float(np.sqrt(free * np.log1p(self.drift**2 / free)) * (8 * free + 1) / (8 * free + 3))

    @property
    def later(self) -> float:
        """What it would be after twice the window, if it kept growing by the same factor."""
        return self.end * float(np.exp(min(thresholds.HALVES * self.growth * self.span, 99.0)))

    def reaches(self, level: float) -> float:
        """The step at which the line reaches a level."""
        return self.last_step + max(level - self.end, 0.0) / self.slope


@dataclass(frozen=True)
class Alarm:
    """A head that needs a finding."""

    head: int
    severity: Severity
    level: float
    pace: Pace | None  # None: high, but not known to grow


def largest(record: Record) -> Floats:
    """(H,) the largest |logit|; NaN where nothing was recorded.

    A mask or bias that is merely large, -1e4 or ALiBi's, is part of the least logit and does no harm. So the least
    counts only where nothing can have been added.
    """
    heads = record.heads
    high = np.where(heads.rows > 0, np.abs(heads.max_logit), np.nan)
    if record.facts.masked:  # as a softmax by hand always may be
        return high
    return np.where(heads.rows > 0, np.maximum(high, np.abs(heads.min_logit)), np.nan)


Points: TypeAlias = dict[str, list[tuple[int, Floats, float]]]  # by module: steps, `largest`, share of rows missed


def extend(points: Points, snapshot: Snapshot) -> None:
    """Adds a step to the points of its modules."""
    for record in snapshot.records:
        mine = points.setdefault(record.module, [])
        if mine and len(mine[-1][1]) != len(record.tally):
            mine.clear()  # heads were pruned or added: another module by the same name
        mine.append((snapshot.step, largest(record), row_sample.missed(record)))


def curves(run: Run) -> dict[str, Curve]:
    """The curve of every module of a run."""
    points: Points = {}
    for snapshot in run.snapshots:
        extend(points, snapshot)
    return curves_of(points)


def curves_of(points: Points) -> dict[str, Curve]:
    """The points as curves."""
    return {
        name: Curve(*(np.array(each, np.float64) for each in zip(*mine, strict=True))) for name, mine in points.items()
    }


def alarms(curve: Curve) -> list[Alarm]:
    """The heads of a curve that need a finding at its end."""
    if not len(curve.steps):
        return []
    now = curve.level
    high = np.flatnonzero((now >= thresholds.ORDINARY) & _may_alarm(curve))  # the others are fine whatever they do
    candidates = (_alarm(curve, int(head), float(now[head])) for head in high)
    return [alarm for alarm in candidates if alarm]


def _may_alarm(curve: Curve) -> NDArray[np.bool_]:
    """Heads that a rule can apply to, found at once for all: a watch asks after every step.

    Below 1e3 a head must have risen by half over its later half, or within it so far that four times as much is 1e3;
    and one of its windows must rise significantly. Heads with gaps have windows of their own: these are not left out.
    """
    values, sizes = curve.values, _windows(len(curve.steps))
    late = values[-max(sizes[:1] or [1]) :]
    least, most = (of(np.nan_to_num(late, nan=fill), 0) for of, fill in ((np.min, np.inf), (np.max, -np.inf)))
    far = most + 2 * thresholds.AHEAD * np.maximum(most - least, 0.0) >= thresholds.DETERIORATES
    grown = (most >= thresholds.CLIPPED) & (most >= thresholds.GROWN * least)
    rising: NDArray[np.bool_] = np.asarray(np.isnan(values).any(0))
    chosen = np.flatnonzero((far | grown) & ~rising)
    for n in sizes if len(chosen) else ():
        rising[chosen] |= _trend(_thinned(curve.steps[-n:]), _thinned(values[-n:, chosen])) >= thresholds.SIGNIFICANT
    return np.asarray(((far | grown) & rising) | (curve.level >= thresholds.DETERIORATES))


def is_rising(curve: Curve, head: int) -> bool:
    """Whether a head's curve rises beyond chance over its later half; that alone is no alarm."""
    kept = np.isfinite(curve.values[:, head])
    windows = _windows(int(kept.sum()))
    pace = _pace(curve.steps[kept][-windows[0] :], curve.values[kept, head][-windows[0] :]) if windows else None
    return pace is not None and pace.sure


def first_alarm(run: Run) -> tuple[int, str, int] | None:
    """(step, module, head) of the first alarm that a watch would have raised on the way."""
    every = curves(run)
    steps = sorted({float(step) for curve in every.values() for step in curve.steps})
    for step in steps:
        for name, curve in every.items():
            points = int(np.searchsorted(curve.steps, step, side="right"))
            if points and curve.steps[points - 1] == step and (raised := alarms(curve.until(points))):
                return int(step), name, raised[0].head
    return None


def check(run: Run) -> Iterator[Finding]:
    """One finding per module and severity."""
    return judged(curves(run))


def judged(every: Mapping[str, Curve]) -> Iterator[Finding]:
    """The findings about these curves."""
    for name, curve in every.items():
        raised = alarms(curve)
        for severity, growing in itertools.product(("error", "warning"), (True, False)):
            if same := [alarm for alarm in raised if (alarm.severity, bool(alarm.pace)) == (severity, growing)]:
                yield _finding(name, same)


# ---- one head


def _alarm(curve: Curve, head: int, level: float) -> Alarm | None:
    kept = np.isfinite(curve.values[:, head])
    steps, values = curve.steps[kept], curve.values[kept, head]
    paces = [_pace(steps[-n:], values[-n:]) for n in _windows(len(values))]
    rising = [pace for pace in paces if pace]
    if level >= thresholds.DETERIORATES:
        grave = level >= thresholds.DIVERGES or rising
        return Alarm(head, "error" if grave else "warning", level, rising[-1] if rising else None)
    for pace in rising:
        ahead = pace.end + pace.slope * thresholds.AHEAD * pace.span
        if pace.sure and ahead >= thresholds.DETERIORATES:
            return Alarm(head, "warning", level, pace)
    if rising and all(paces[:2]):  # over half of the watch, and still over its last quarter
        half, lately = rising[0], float(np.median(values[-thresholds.POINTS // 2 :]))
        drift = max(half.drift, _drift(np.log(_thinned(np.maximum(values, 1.0)))))
        # Both: a line continues a rise that is over, and a few points may be high by chance.
        high = min(lately, half.end) >= max(thresholds.CLIPPED, thresholds.GROWN * half.start)
        soon = min(half.later, _after_quarter(steps, values)) >= thresholds.DETERIORATES
        if high and soon and drift >= thresholds.SIGNIFICANT:
            return Alarm(head, "warning", level, half)
    return None


def _after_quarter(steps: Floats, values: Floats) -> float:
    """What the curve would be at the factor of its last quarter: in a healthy training the rise is slower there."""
    n = max(len(values) // 4, thresholds.POINTS // 2)
    x, y = _thinned(steps[-n:]), np.log(_thinned(np.maximum(values[-n:], 1.0)))
    growth = _slope(x, y)
    end = float(np.median(y - growth * (x - x[-1])))
    return float(np.exp(min(end + thresholds.QUARTERS * growth * (x[-1] - x[0]), 99.0)))


def _slope(steps: Floats, values: Floats) -> float:
    """Theil-Sen: the median over all pairs of points; 0 where all have the same step."""
    earlier, later = _pairs(len(steps))
    rise, time = values[later] - values[earlier], steps[later] - steps[earlier]
    return float(np.median(rise[time > 0] / time[time > 0])) if (time > 0).any() else 0.0


def _windows(points: int) -> list[int]:
    """Half of the curve, a quarter and so on, as long as there are enough points for a trend."""
    if points < thresholds.POINTS:
        return []
    sizes = [max(points // 2, thresholds.POINTS)]
    while sizes[-1] // 2 >= thresholds.POINTS:
        sizes.append(sizes[-1] // 2)
    return sizes


def _pace(steps: Floats, values: Floats) -> Pace | None:
    """The pace of a window; None: it does not rise significantly."""
    steps, values = _thinned(steps), _thinned(values)
    n = len(values)
    if _trend(steps, values) < thresholds.SIGNIFICANT:
        return None
    slope = _slope(steps, values)
    if slope <= 0:
        return None
    around = values - slope * steps
    base, scatter = float(np.median(around)), float(np.std(around))
    first, last = float(steps[0]), float(steps[-1])
    logs = np.log(np.maximum(values, 1.0))  # below 1 it hardly matters
    line = (base + slope * first, base + slope * last)
    return Pace(*line, last, slope, _slope(steps, logs), last - first, scatter, n, _drift(logs))


def _trend(steps: Floats, values: Floats) -> Floats:
    """Mann-Kendall's z, along the first axis."""
    n = len(steps)
    earlier, later = _pairs(n)
    time = steps[later] > steps[earlier]
    signs = np.sign((values[later] - values[earlier])[time]).sum(0)
    z: Floats = (signs - 1) / np.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    return z


def _drift(logs: Floats) -> float:
    """How far a curve rose, in standard deviations of a random walk with the same jumps.

    A walk is the most that correlation between successive points can do. Where points are independent, jumps turn back:
    as far as that is sure, by two standard errors, the walk is shorter.
    """
    jumps, some = np.diff(logs), max(3, len(logs) // 8)
    around = jumps - jumps.mean()
    squares = max(float(around @ around), 1e-24)
    back = min(float(around[1:] @ around[:-1]) / squares + 2 / np.sqrt(len(jumps)), 0.0)
    walk = np.sqrt(squares / (len(jumps) - 1) * max(1 + 2 * back, 0.1) * (len(logs) - some))
    return float((np.median(logs[-some:]) - np.median(logs[:some])) / walk)


@lru_cache(maxsize=_AT_MOST)
def _pairs(n: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    return np.triu_indices(n, 1)


def _thinned(x: Floats) -> Floats:
    """At most `_AT_MOST` points, medians of equally many; the latest are all among them."""
    size = -(-len(x) // _AT_MOST)
    whole: Floats = np.median(x[len(x) % size :].reshape(-1, size, *x.shape[1:]), axis=1) if size > 1 else x
    return whole


# ---- in words

_LANDMARKS = {"step_at_1e3": thresholds.DETERIORATES, "step_at_1e4": thresholds.DIVERGES}


def _finding(module: str, same: list[Alarm]) -> Finding:
    worst = max(same, key=lambda alarm: alarm.level)
    evidence = {"max_logit": worst.level}
    why = _WHY[worst.severity]
    if pace := worst.pace:
        evidence |= {"growth_per_1000_steps": pace.slope * 1e3, "step": pace.last_step}
        for name, level in _LANDMARKS.items():
            if worst.level < level:
                evidence[name] = float(round(pace.reaches(level)))
    else:
        why += " Whether it grows is not known: that takes more steps."
    head = worst_heads(sorted(alarm.head for alarm in same))
    return Finding(KIND, worst.severity, module, head, evidence, why, _ADVICE, link(KIND))


_WHY: dict[Severity, str] = {
    "warning": "Attention logits this large, or on this course, end with near one-hot weights and a loss that gets "
    "worse (from about 1e3) or diverges (above 1e4). The norms of q and k grow before the loss shows anything.",
    "error": "Logits above 1e3 worsen the loss, and no run of the study with logits above 1e4 survived.",
}
_ADVICE = (
    "Lower the learning rate or lengthen its warm-up; put a norm on q and k; cap the logits; or "
    "clip the q and k weights after each optimiser step (QK-Clip). Weight decay on q and k helps "
    "slowly. If the loss is bad already, go back to a checkpoint from before the growth."
)

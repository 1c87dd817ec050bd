"""The trainings of a logit-growth result, as two SVG files: for light and for dark pages.

Above the largest |logit| of each training, logarithmic, below its loss; what was plain in red, with QK-norm in blue,
with QK-clip in yellow. A dot is a first alarm, a tick the divergence. Draws what the file says; trains nothing.

    python bench/growth_plot.py FILE DIR
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from levelhead.bench.plot import FONT, Theme, line, text, write

WIDTH, LEFT, RIGHT = 880, 64, 20
TOP, LOGITS, GAP, LOSS, FOOT = 94, 220, 34, 170, 40
HEIGHT = TOP + LOGITS + GAP + LOSS + FOOT
LEVELS = {10**3: "the loss suffers (arXiv 2309.14322)", 10**4: "no run survives (same)"}
DECADES = range(6)
TITLE = "Logits grow before the loss diverges"

Place = Callable[[float], float]


def plot(result: dict[str, Any], folder: Path) -> list[Path]:
    """Writes logit-growth-light.svg and logit-growth-dark.svg and returns their paths."""
    return write(folder, "logit-growth", partial(_svg, result))


def _svg(result: dict[str, Any], theme: Theme) -> Iterator[str]:
    said = result["summary"]
    runs = [run for run in result["runs"] if run["rate"] == said["rate"]]
    colours = {"plain": theme.lost, "QK-norm": theme.ahead, "QK-clip": theme.below}
    size = f"width='{WIDTH}' height='{HEIGHT}' viewBox='0 0 {WIDTH} {HEIGHT}'"
    yield f"<svg xmlns='http://www.w3.org/2000/svg' {size} {FONT} font-size='11' role='img'>"
    yield f"<title>{TITLE}</title>"
    yield f"<rect width='100%' height='100%' fill='{theme.paper}'/>"
    yield text(16, 24, TITLE, theme.ink, size=15, weight=600)
    leads = said["leads"]
    words = f"learning rate {said['rate']:g}, {said['seeds']} seeds each; "
    words += f"from alarm to divergence {min(leads)} to {max(leads)} steps"
    yield text(16, 42, words, theme.ink)
    yield from _legend(theme, colours)

    def x(step: float) -> float:
        return LEFT + step / result["steps"] * (WIDTH - LEFT - RIGHT)

    def logit(value: float) -> float:
        share = math.log10(max(value, 1.0)) / DECADES[-1]
        return TOP + LOGITS * (1 - min(share, 1.06))

    def loss(value: float) -> float:
        return TOP + LOGITS + GAP + LOSS * (1 - value / 4.0)

    yield from _axes(result, theme, x, logit, loss)
    for run in sorted(runs, key=lambda run: -list(colours).index(run["variant"])):
        colour = colours[run["variant"]]
        steps = [i * result["every"] for i in range(len(run["largest"]))]
        yield _path(map(x, steps), map(logit, run["largest"]), colour)
        yield _path(map(x, steps), (loss(value) for value in _smooth(run["losses"])), colour)
    for run in runs:
        if run["alarm"]:
            step = run["alarm"]["step"]
            then = _smooth(run["losses"])[step // result["every"]]
            yield _dot(x(step), logit(run["alarm"]["at"]), theme)
            yield _dot(x(step), loss(then), theme)
        if run["diverged"] is not None:
            at, height = x(run["diverged"]), loss(result["chance"] / 2)
            yield line(at, height - 8, at, height + 8, theme.ink, width=1.5)
    yield "</svg>"


def _axes(result: dict[str, Any], theme: Theme, x: Place, logit: Place, loss: Place) -> Iterator[str]:
    right = WIDTH - RIGHT
    for power in DECADES:
        level = 10**power
        yield line(LEFT, logit(level), right, logit(level), theme.faint)
        yield text(LEFT - 6, logit(level) + 4, f"{level:,}", theme.ink, anchor="end")
        if level in LEVELS:
            yield text(LEFT + 6, logit(level) - 4, LEVELS[level], theme.ink)
    for value in range(5):
        yield line(LEFT, loss(value), right, loss(value), theme.faint)
        yield text(LEFT - 6, loss(value) + 4, str(value), theme.ink, anchor="end")
    for step in range(0, result["steps"] + 1, 100):
        yield text(x(step), HEIGHT - 22, str(step), theme.ink, anchor="middle")
    yield text(LEFT, TOP - 8, "largest |logit| of all heads", theme.ink, weight=600)
    yield text(LEFT, loss(4) - 8, "loss", theme.ink, weight=600)
    yield text(right, HEIGHT - 6, "step", theme.ink, anchor="end")


def _legend(theme: Theme, colours: dict[str, str]) -> Iterator[str]:
    x = 16.0
    for words, colour in colours.items():
        yield line(x, 57, x + 16, 57, colour, width=2)
        yield text(x + 21, 61, words, theme.ink)
        x += 40 + 6 * len(words)
    yield _dot(x + 5, 57, theme)
    yield text(x + 14, 61, "first alarm", theme.ink)
    yield line(x + 88, 51, x + 88, 63, theme.ink, width=1.5)
    yield text(x + 96, 61, "diverged: half of what not attending costs, for good", theme.ink)


def _dot(x: float, y: float, theme: Theme) -> str:
    colours = f"fill='{theme.ink}' stroke='{theme.paper}' stroke-width='1'"
    return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' {colours}/>"


def _path(xs: Iterable[float], ys: Iterable[float], colour: str) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    return f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='1.2'/>"


def _smooth(losses: list[float]) -> list[float]:
    """Means of four, 20 steps, as the marks are made from."""
    parts = (losses[max(0, i - 3) : i + 1] for i in range(len(losses)))
    return [sum(part) / len(part) for part in parts]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    for path in plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])):
        print(path)

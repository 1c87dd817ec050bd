"""The winning plan over ranks and tokens, one field per link, as two SVG files: for light and for dark pages. Every
square is one prediction of `winners`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from cluster.scaling_model import Machine
from cluster.winners import ALONE, Paper, winner
from levelhead.bench.plot import FONT, Theme, text, write

LINKS = (1.0, 10.0, 100.0)  # Gbit/s
WORLDS = tuple(2**n for n in range(1, 13))
TOKENS = tuple(2**n for n in range(12, 25))
SQUARE, LEFT, TOP, GAP, FOOT = 18, 56, 96, 52, 48
WIDTH = LEFT + len(LINKS) * (SQUARE * len(WORLDS) + GAP)
HEIGHT = TOP + SQUARE * len(TOKENS) + FOOT
TITLE = "Which plan wins, by the model: one training step of one layer's attention"


def plot(core: Machine, paper: Paper, folder: Path) -> list[Path]:
    """Writes scaling-light.svg and scaling-dark.svg and returns their paths."""
    return write(folder, "scaling", partial(_svg, core, paper))


def _colours(theme: Theme) -> dict[str, str]:
    return {
        ALONE: theme.faint,
        "all-gather": theme.below,
        "ring": theme.ahead,
        "ulysses": theme.ink,
        "none": theme.paper,
    }


def _svg(core: Machine, paper: Paper, theme: Theme) -> Iterator[str]:
    size = f"width='{WIDTH}' height='{HEIGHT}' viewBox='0 0 {WIDTH} {HEIGHT}'"
    yield f"<svg xmlns='http://www.w3.org/2000/svg' {size} {FONT} font-size='11' role='img'>"
    yield f"<title>{TITLE}</title>"
    yield f"<rect width='100%' height='100%' fill='{theme.paper}'/>"
    yield text(16, 24, TITLE, theme.ink, size=15, weight=600)
    words = (
        f"{paper.heads} heads on {paper.groups} groups of width {paper.width}, bfloat16, causal, "
        f"balanced; hosts of {paper.cores} cores"
    )
    yield text(16, 42, words, theme.ink)
    yield from _legend(theme)
    for number, gbit in enumerate(LINKS):
        left = LEFT + number * (SQUARE * len(WORLDS) + GAP)
        yield from _field(core, paper, gbit, left, theme)
    yield "</svg>"


def _field(core: Machine, paper: Paper, gbit: float, left: float, theme: Theme) -> Iterator[str]:
    colours, bottom = _colours(theme), TOP + SQUARE * len(TOKENS)
    yield text(left, TOP - 8, f"{gbit:g} Gbit/s", theme.ink, weight=600)
    yield text(left - 4, TOP - 8, "tokens", theme.ink, anchor="end")
    for i, world in enumerate(WORLDS):
        for j, tokens in enumerate(reversed(TOKENS)):
            best = winner(paper, core, tokens, world, gbit)
            x, y = left + SQUARE * i, TOP + SQUARE * j
            title = f"{world} hosts, {_short(tokens)} tokens: {best.plan}, {best.why}"
            yield (
                f"<rect x='{x}' y='{y}' width='{SQUARE - 1}' height='{SQUARE - 1}' "
                f"fill='{colours[best.plan]}'><title>{title}</title></rect>"
            )
    yield from _labels(WORLDS, left, bottom, theme)
    yield text(left + SQUARE * len(WORLDS) / 2, bottom + 32, "hosts", theme.ink, anchor="middle")
    for j, tokens in enumerate(reversed(TOKENS)):
        if j % 2 == 0:
            yield text(left - 4, TOP + SQUARE * j + 13, _short(tokens), theme.ink, anchor="end")


def _labels(worlds: Sequence[int], left: float, bottom: float, theme: Theme) -> Iterator[str]:
    for i, world in enumerate(worlds):
        if i % 3 == 0 or i == len(worlds) - 1:
            x = left + SQUARE * i + SQUARE / 2
            yield text(x, bottom + 15, _short(world), theme.ink, anchor="middle")


def _legend(theme: Theme) -> Iterator[str]:
    x = 16.0
    for plan, colour in _colours(theme).items():
        words = {ALONE: "one host alone", "none": "fits nowhere"}.get(plan, plan)
        edge = f"stroke='{theme.ink}' stroke-width='0.5'"
        yield f"<rect x='{x:.1f}' y='54' width='9' height='9' rx='2' fill='{colour}' {edge}/>"
        yield text(x + 14, 62, words, theme.ink)
        x += 34 + 6 * len(words)


def _short(number: int) -> str:
    for unit, name in ((2**20, "M"), (2**10, "k")):
        if number >= unit:
            return f"{number // unit}{name}"
    return str(number)

"""Why the tile sizes are what they are: the core built with others, timed in turns with itself.

Each variant is a copy of core/ with a few constants changed, built as a module of its own; all are loaded side by side.
In every round the core as it is and then each variant of a group compute the same head (levelhead::forward, one thread)
a few times, and only ratios within a round count, so that it does not matter when the machine is slow. Needs cmake and
a compiler, nothing else.

    python bench/tiles.py --isa avx512 --json bench/results/tiles-NAME.json

It changes numbers only: an idea that needs other code is no variant, and is told in docs/kernel.md.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

CORE = Path(__file__).resolve().parent.parent / "core"
WIDTHS = (64, 128)
CALLS = 3  # of a turn, after one to warm up

# ---- variants ---------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A core with other constants: (file, constant as it is written, what comes instead)."""

    group: str
    value: str
    changes: tuple[tuple[str, str, str], ...] = ()

    @property
    def name(self) -> str:
        """For its directory: a change to one instruction set's file is that set's own."""
        own = " ".join(file for file, _, _ in self.changes if file.startswith("isa_"))
        return re.sub(r"\W+", "-", f"{self.group} {self.value} {own}").strip("-")


AS_IT_IS = Variant("the core", "as it is")


def variants(isa: str) -> list[Variant]:
    plan, tile = "plan.h", "kernel_tile.inl.h"
    found = []
    for keys in (128, 256, 512, 1024):
        # The budget in bytes out of the way, the number of keys is what largest_key_block says.
        budget = (plan, "block_bytes = 256 * 1024", "block_bytes = 1 << 30")
        most = (plan, "largest_key_block = 512", f"largest_key_block = {keys}")
        found.append(Variant("key block", str(keys), (budget, most)))
    for rows in (24, 48, 96, 192):
        change = (plan, "long_query_block = 96", f"long_query_block = {rows}")
        found.append(Variant("query block", str(rows), (change,)))
    own = {"avx512": 12, "avx2": 6}[isa]
    for rows in {"avx512": (6, 8, 12, 14), "avx2": (4, 6)}[isa]:
        tall = (f"isa_{isa}.cpp", f"LEVELHEAD_TILE_ROWS {own}", f"LEVELHEAD_TILE_ROWS {rows}")
        block = (plan, "long_query_block = 96", f"long_query_block = {96 // rows * rows}")
        found.append(Variant("tile rows", str(rows), (tall, block)))
    for value, pieces in (("32", "D / 32"), ("d / 2", "2"), ("none", "1")):
        change = (plan, "T <= few_queries ? 4 : 2", f"T <= few_queries ? 4 : {pieces}")
        found.append(Variant("score chunk", value, (change,)))
    for value, keys in (("128", 128), ("256", 256), ("none", 1 << 20)):
        change = (tile, "value_chunk = 256", f"value_chunk = {keys}")
        found.append(Variant("value chunk", value, (change,)))
    return found


def changed(variant: Variant, file: str, text: str) -> str:
    """The text of core/`file` in the variant; a constant not there exactly once is an error."""
    for place, old, new in variant.changes:
        if place == file:
            if text.count(old) != 1:
                raise SystemExit(f"tiles: bring me up to date: '{old}' is not once in core/{file}")
            text = text.replace(old, new)
    return text


def built(variant: Variant, work: Path) -> Path:
    """The variant's module; what was built before and has not changed is not built again."""
    place, build = work / variant.name, work / variant.name / "build"
    print(f"tiles: building {variant.group} {variant.value}", file=sys.stderr)
    for source in CORE.rglob("*"):
        if source.is_file():
            file = source.relative_to(CORE)
            copy, text = place / "core" / file, changed(variant, str(file), source.read_text())
            if not copy.exists() or copy.read_text() != text:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(text)
    for command in (
        ["cmake", "-S", str(place / "core" / "test"), "-B", str(build)],
        ["cmake", "--build", str(build), "--target", "ladder_turn", "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"tiles: {' '.join(command)} failed\n{done.stdout}{done.stderr}")
    return next((build / "core" / "ladder").glob("libladder_turn.*"))


# ---- measuring --------------------------------------------------------------


class Head(ctypes.Structure):
    """core/ladder/ladder.h"""

    _fields_ = (
        *((letter, ctypes.c_int64) for letter in "TSd"),
        *((letter, ctypes.c_void_p) for letter in "qkv"),
        ("scale", ctypes.c_float),
        ("out", ctypes.c_void_p),
    )


class Problem:
    """One head of random numbers, and room for its result."""

    def __init__(self, tokens: int, d: int) -> None:
        chance = random.Random(1)
        self.inputs = [array("f", (chance.gauss(0, 1) for _ in range(tokens * d))) for _ in range(3)]
        self.out = array("f", bytes(4 * tokens * d))
        q, k, v, out = (x.buffer_info()[0] for x in (*self.inputs, self.out))
        self.head = Head(tokens, tokens, d, q, k, v, d**-0.5, out)


Turn = Callable[[Problem, int], list[float]]


def loaded(module: Path, isa: str) -> Turn:
    """Seconds of each of some calls."""
    function = ctypes.CDLL(str(module)).levelhead_ladder_turn

    def turn(problem: Problem, calls: int) -> list[float]:
        seconds = (ctypes.c_double * calls)()
        if function(isa.encode(), ctypes.byref(problem.head), calls, seconds):
            raise SystemExit(f"tiles: {isa} does not run here")
        return list(seconds)

    return turn


def checked(turns: dict[Variant, Turn], problem: Problem) -> None:
    """All of them compute the same, up to rounding."""
    turns[AS_IT_IS](problem, 1)
    right = problem.out[:]
    for variant, turn in turns.items():
        problem.out[:] = array("f", bytes(4 * len(right)))
        turn(problem, 1)
        if not all(abs(a - b) < 1e-5 for a, b in zip(problem.out, right, strict=True)):
            raise SystemExit(f"tiles: {variant.group} {variant.value} computes something else")


Pairs = list[tuple[float, float]]  # best of a turn, and of the core's turn in the same round


def raced(turns: dict[Variant, Turn], problem: Problem, rounds: int) -> dict[Variant, Pairs]:
    found: dict[Variant, Pairs] = {variant: [] for variant in turns if variant != AS_IT_IS}
    for _ in range(rounds):
        best = {variant: min(turn(problem, 1 + CALLS)[1:]) for variant, turn in turns.items()}
        for variant, pairs in found.items():
            pairs.append((best[variant], best[AS_IT_IS]))
    return found


# ---- what comes out ---------------------------------------------------------


def table(group: str, races: dict[int, dict[Variant, Pairs]]) -> list[str]:
    """Best time, and the median and the quartiles of the ratios, per width."""
    head = "".join(f" d {d}: ms | against the core | middle half |" for d in races)
    lines = [f"| {group} |{head}", "|---" * (1 + 3 * len(races)) + "|"]
    for variant in next(iter(races.values())):
        row = f"| {variant.value} |"
        for race in races.values():
            pairs = race[variant]
            low, middle, high = statistics.quantiles([a / b - 1 for a, b in pairs], n=4)
            best = min(a for a, _ in pairs)
            row += f" {1e3 * best:.2f} | {middle:+.1%} | {low:+.1%} to {high:+.1%} |"
        lines.append(row)
    return lines


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description="the core with other tile sizes, timed in turns")
    parser.add_argument("--isa", choices=("avx512", "avx2"), required=True)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=25, help="at least 2")
    parser.add_argument("--group", action="append", help="only this group, e.g. 'key block'")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--work", type=Path, help="where to build, and find what was built before")
    parser.add_argument("--build", action="store_true", help="build only; wants --work")
    given = parser.parse_args()
    chosen = [v for v in variants(given.isa) if v.group in (given.group or [v.group])]
    with tempfile.TemporaryDirectory() as scratch:
        work = given.work or Path(scratch)
        modules = {variant: built(variant, work) for variant in (AS_IT_IS, *chosen)}
        if given.build:
            return
        turns = {variant: loaded(module, given.isa) for variant, module in modules.items()}
    problems = {d: Problem(given.tokens, d) for d in WIDTHS}
    result = dict(
        kind="tiles",
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        cpu=cpu(),
        isa=given.isa,
        threads=1,
        tokens=given.tokens,
        rounds=given.rounds,
        tables={},
        variants=[],
    )
    for problem in problems.values():
        checked(turns, problem)
    for group in dict.fromkeys(variant.group for variant in chosen):
        own = {v: turn for v, turn in turns.items() if v == AS_IT_IS or v.group == group}
        races = {d: raced(own, problem, given.rounds) for d, problem in problems.items()}
        result["tables"][group] = table(group, races)
        print("\n".join(result["tables"][group]), end="\n\n")
        result["variants"] += [
            dict(group=group, value=v.value, changes=v.changes, turns={d: races[d][v] for d in races})
            for v in own
            if v != AS_IT_IS
        ]
    if given.json:
        given.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

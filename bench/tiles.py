"""Why the tile sizes are what they are: the core built with others, timed in turns with itself.

Each variant is a copy of core/ with a few constants changed, built in a directory of its own. Every
round then runs each variant's `ladder` for a moment (levelhead::forward alone, one thread), so that
a machine that slows down slows all of them. Needs cmake and a compiler, nothing else.

    python bench/tiles.py --isa avx512 --json bench/results/tiles-NAME.json

It changes numbers only: an idea that needs other code is no variant, and is told in docs/kernel.md.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CORE = Path(__file__).resolve().parent.parent / "core"
WIDTHS = (64, 128)


@dataclass(frozen=True)
class Variant:
    """A core with other constants: (file, constant as it is written, its new value)."""

    group: str
    value: str
    changes: tuple[tuple[str, str, str], ...] = ()

    @property
    def name(self) -> str:
        return re.sub(r"\W+", "-", f"{self.group} {self.value}")


AS_IT_IS = Variant("the core", "as it is")


def variants(isa: str) -> list[Variant]:
    plan, tile = "plan.h", "kernel_tile.inl.h"
    found = [AS_IT_IS]
    for keys in (128, 256, 512, 1024):
        # The budget in bytes out of the way, the number of keys is what largest_key_block says.
        budget = (plan, "block_bytes = 256 * 1024", "block_bytes = 1 << 30")
        most = (plan, "largest_key_block = 512", f"largest_key_block = {keys}")
        found.append(Variant("key block", str(keys), (budget, most)))
    for rows in (24, 48, 96, 192):
        change = (plan, "long_query_block = 96", f"long_query_block = {rows}")
        found.append(Variant("query block", str(rows), (change,)))
    own = {"avx512": 12, "avx2": 6}[isa]
    for rows in {"avx512": (6, 8, 10, 12, 14), "avx2": (3, 4, 5, 6)}[isa]:
        block = 96 // rows * rows if 96 % rows else 96
        found.append(
            Variant(
                "tile rows",
                str(rows),
                (
                    (f"isa_{isa}.cpp", f"LEVELHEAD_TILE_ROWS {own}", f"LEVELHEAD_TILE_ROWS {rows}"),
                    (plan, "long_query_block = 96", f"long_query_block = {block}"),
                ),
            )
        )
    for keys in (64, 128, 256, 1 << 20):
        change = (tile, "value_chunk = 256", f"value_chunk = {keys}")
        found.append(Variant("value chunk", "none" if keys > 1024 else str(keys), (change,)))
    for chunk in ("32", "(D + 1) / 2", "D"):
        change = (tile, "D <= 16 ? D : (D + 1) / 2", f"D <= 16 ? D : {chunk}")
        found.append(Variant("score chunk", {"32": "32", "D": "none"}.get(chunk, "d / 2"), (change,)))
    return found


def changed(variant: Variant, core: Path) -> None:
    """Changes the copy of the core at `core`; a constant that is not there exactly once is an error."""
    for file, old, new in variant.changes:
        text = (core / file).read_text()
        if text.count(old) != 1:
            raise SystemExit(f"tiles: expected '{old}' once in core/{file}: bring this script up to date")
        (core / file).write_text(text.replace(old, new))


def built(variant: Variant, work: Path) -> Path:
    """The variant's `ladder`, built unless it is there."""
    place = work / variant.name
    program = place / "build" / "core" / "ladder" / "ladder"
    if program.exists():
        return program
    print(f"tiles: building {variant.group} {variant.value}", file=sys.stderr)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(CORE, place / "core")
    changed(variant, place / "core")
    build = str(place / "build")
    for command in (
        ["cmake", "-S", str(place / "core" / "test"), "-B", build, "-DCMAKE_BUILD_TYPE=Release"],
        ["cmake", "--build", build, "--target", "ladder", "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"tiles: {' '.join(command)} failed\n{done.stdout}{done.stderr}")
    return program


def one_turn(program: Path, isa: str, tokens: int, core_step: str = "8") -> dict[str, Any]:
    """A burst of calls for each width."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [str(program), "--isa", isa, "--tokens", str(tokens), "--step", core_step]
        command += [word for width in WIDTHS for word in ("--width", str(width))]
        subprocess.run(
            [*command, "--rounds", "1", "--json", file.name], check=True, stdout=subprocess.DEVNULL
        )
        found: dict[str, Any] = json.loads(Path(file.name).read_text())
        return found


def measured(
    programs: dict[Variant, Path], isa: str, tokens: int, rounds: int
) -> tuple[dict[str, Any], dict[Variant, dict[int, list[float]]]]:
    samples: dict[Variant, dict[int, list[float]]] = {v: {d: [] for d in WIDTHS} for v in programs}
    last: dict[str, Any] = {}
    for _ in range(rounds):
        for variant, program in programs.items():
            last = one_turn(program, isa, tokens)
            for race in last["races"]:
                samples[variant][race["d"]] += race["steps"][0]["samples"]
    return last, samples


def tables(samples: dict[Variant, dict[int, list[float]]]) -> dict[str, list[str]]:
    """A Markdown table per group; times relative to the core as it is."""
    found: dict[str, list[str]] = {}
    for variant, times in samples.items():
        if variant == AS_IT_IS:
            continue
        if variant.group not in found:
            heads = "".join(f" d {d}: ms | by minimum | by median |" for d in WIDTHS)
            found[variant.group] = [f"| {variant.group} |{heads}", "|---" * (1 + 3 * len(WIDTHS)) + "|"]
        row = f"| {variant.value} |"
        for d in WIDTHS:
            best, own = min(times[d]), samples[AS_IT_IS][d]
            middle = statistics.median(times[d]) / statistics.median(own)
            row += f" {1e3 * best:.2f} | {best / min(own) - 1:+.1%} | {middle - 1:+.1%} |"
        found[variant.group].append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--isa", choices=("avx512", "avx2"), required=True)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--group", action="append", help="only this group, e.g. 'key block'")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--work", type=Path, help="where to build, and to find what was built before")
    parser.add_argument("--build", action="store_true", help="build only")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = given.work or Path(scratch)
        chosen = [
            v for v in variants(given.isa) if v == AS_IT_IS or v.group in (given.group or [v.group])
        ]
        programs = {variant: built(variant, work / given.isa) for variant in chosen}
        if given.build:
            return
        last, samples = measured(programs, given.isa, given.tokens, given.rounds)
    shown = tables(samples)
    for lines in shown.values():
        print("\n".join(lines), end="\n\n")
    if given.json:
        result = {key: last[key] for key in ("date", "cpu", "compiler", "isa", "threads", "tokens")}
        result = dict(kind="tiles") | result | dict(rounds=given.rounds, tables=shown)
        result["variants"] = [
            dict(group=v.group, value=v.value, changes=v.changes, samples=times)
            for v, times in samples.items()
        ]
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""`levelhead bench`: its arguments, its file, its drawing. The measurement is `levelhead.bench`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from levelhead.cache import write_named, writing
from levelhead.cli.command import Commands, check_writable


def add(commands: Commands) -> None:
    parser = commands.add_parser("bench", help="speed, error and memory against every peer found")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a dozen cells, under a minute (default)")
    size.add_argument("--full", action="store_true", help="every cell, more than an hour")
    parser.add_argument("--case", action="append", default=[], metavar="GLOB", help="only these cells; may be repeated")
    parser.add_argument("--skip", action="append", default=[], metavar="GLOB", help="not these; may be repeated")
    parser.add_argument("--threads", type=int, metavar="N", help="of every peer; default: all CPUs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    parser.add_argument("--list", action="store_true", help="names, shapes and bars of the cells")
    parser.add_argument("--plot", nargs=2, type=Path, metavar=("FILE", "DIR"), help="draw the result in FILE")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Iterator[str]:
    """Measures, lists or draws; yields what to print."""
    from levelhead.bench import cases, plot, progress, report, run  # `levelhead info` does without them

    if arguments.plot:
        source, folder = arguments.plot
        result = json.loads(source.read_text(encoding="utf-8"))
        for path in plot.plot(result, folder, source.stem.split("-")[0]):
            yield str(path)
        return
    quick = arguments.quick or not (arguments.full or arguments.case or arguments.list)
    chosen = cases.select(arguments.case, skip=arguments.skip, quick=quick)
    if arguments.list:
        yield from report.listing(chosen)
        return
    if arguments.json:
        with writing("--json", arguments.json):
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
        check_writable("--json", arguments.json)
    shown = progress.Progress(len(chosen))

    def save(result: dict[str, Any]) -> None:
        if arguments.json:
            write_named("--json", arguments.json, json.dumps(result, indent=1) + "\n")

    try:
        effort = run.QUICK if quick else run.FULL
        result = run.bench(chosen, threads=arguments.threads, effort=effort, tell=shown.tell, save=save)
    finally:
        shown.clear()
    yield from report.report(result)

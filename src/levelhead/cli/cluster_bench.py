"""`levelhead cluster-bench`: its arguments and its file. Runs on every rank that torchrun starts.

Only rank 0 prints and writes. The measurement is `levelhead.cluster`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

from levelhead.cache import write_named
from levelhead.cli.command import Commands, add_command, check_writable

_ABOUT = """attention over ranks: scaling, bytes moved, waiting; under torchrun

Strong and weak scaling of every plan over the ranks that torchrun started.

examples:
  torchrun --nproc-per-node 2 -m levelhead cluster-bench
  torchrun --nnodes 2 --node-rank 0 --master-addr HOST --nproc-per-node 1 -m levelhead cluster-bench --full
exit code: 0 fine, 1 if an answer was wrong, 2 bad input
"""


def add(commands: Commands) -> None:
    parser = add_command(commands, "cluster-bench", run, _ABOUT)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--tiny", action="store_true", help="a few tokens: does it run at all?")
    size.add_argument("--quick", action="store_true", help="under a minute (default)")
    size.add_argument("--full", action="store_true", help="several minutes")
    parser.add_argument("--threads", type=int, metavar="N", help="per rank; default: CPUs / ranks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")


def run(arguments: argparse.Namespace) -> Generator[str, None, int]:
    """Measures with the other ranks; yields what to print, on rank 0, and returns the exit code."""
    from levelhead.bench.progress import Progress
    from levelhead.cluster import cases, report, session

    rank, world = session.launched()
    threads = session.threads_per_rank(arguments.threads)
    file: Path | None = arguments.json if rank == 0 else None
    check_writable("--json", file)
    size = next((name for name in ("tiny", "full") if getattr(arguments, name)), "quick")
    effort = cases.EFFORTS[size]
    shown = Progress(len({cell.about for cell in cases.cells(effort, world)}))

    def save(result: dict[str, Any]) -> None:
        if file is not None:
            write_named("--json", file, json.dumps(result) + "\n")

    try:
        tell = shown.tell if rank == 0 else lambda cell, doing: None
        result = session.bench(effort, threads, tell=tell, save=save)
    finally:
        shown.clear()
    if result is None:
        return 0
    yield from report.report(result)
    return int(not all(cell["right"] for cell in result["cells"]))

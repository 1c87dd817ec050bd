"""The command line: parses, runs one command and prints what it yields. `info` is here, other commands in own files.

Commands call the public API and compute nothing else. Stdout is for data: errors go to stderr. Exit codes: 0 fine, 1
failed, 2 wrong usage or bad input; `doctor`, `diagnose`: 1 if they found something, `lab`: 1 if a verdict is not as
expected.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence

import levelhead as lh
from levelhead.cli import bench, cache, cards, cluster_bench, diagnose, docs, doctor, explain, lab, page, tour
from levelhead.terminal import message, replace_what_cannot_be_encoded

_EXAMPLES = """examples:
  levelhead info --json
  levelhead tour
  levelhead bench --quick
  levelhead doctor minilm
  levelhead diagnose run.jsonl --html run.html
  levelhead explain "The dog chased the ball because it was fast." --token it
  levelhead lab run all
  levelhead page
  levelhead cards --chapter softmax
  levelhead docs wrong-scale
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    >>> main(["--version"])
    Traceback (most recent call last):
    SystemExit: 0
    """
    replace_what_cannot_be_encoded()
    arguments = _parser().parse_args(argv)
    try:
        return _print(arguments.run(arguments))
    except lh.LevelheadError as error:
        message(error)
        return int(arguments.failed)
    except KeyboardInterrupt:
        message("interrupted")
        return 128 + signal.SIGINT  # as shells have it
    except BrokenPipeError:  # the reader has seen enough (`levelhead tour | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _print(texts: Iterator[str]) -> int:
    """Prints what a command yields; what it returns is the exit code."""
    while True:
        try:
            text = next(texts)
        except StopIteration as end:
            return end.value or 0
        print(text, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="levelhead",
        description="Exact attention that can tell you whether every head is level.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(failed=1)
    parser.add_argument("--version", action="version", version=f"levelhead {lh.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    info = commands.add_parser("info", help="version, instruction set, threads, and why so")
    info.add_argument("--json", action="store_true", help="for programs")
    info.set_defaults(run=_info)
    tour.add(commands, parser)
    for command in (bench, cache, cards, diagnose, docs, doctor, explain, lab, page, cluster_bench):
        command.add(commands)
    return parser


def _info(arguments: argparse.Namespace) -> Iterator[str]:
    info = lh.info()
    yield json.dumps(dict(info), indent=2) if arguments.json else repr(info)

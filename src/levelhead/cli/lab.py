"""`levelhead lab`: its arguments, its output, its exit code. Results come from `levelhead.lab`.

With `--json -`, stdout has one JSON object a line and nothing else; progress is on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from levelhead.cache import write_named
from levelhead.cli.command import STDOUT, Commands, add_command, check_writable
from levelhead.errors import bad_value
from levelhead.terminal import colour_wanted, write_utf8

_ABOUT = """every claim about √d_k, measured

Claims about scaled dot-product attention as experiments on the real core.

examples:
  levelhead lab list
  levelhead lab show C1
  levelhead lab run C1 C4
  levelhead lab run C1 --set shared=0.1 --seed 7
  levelhead lab run all --json results.jsonl
exit code: 0 fine, 1 if a verdict other than undecided is not the expected one,
2 bad input, or an experiment that crashed
"""


def add(commands: Commands) -> None:
    parser = add_command(commands, "lab", None, _ABOUT)
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    actions.add_parser("list", help="ids, expected verdicts and sentences").set_defaults(run=_list)
    shown = actions.add_parser("show", help="derivation, criterion and parameters of claims")
    shown.add_argument("ids", nargs="+", metavar="ID", help="C1, c7a, …, or all")
    shown.set_defaults(run=_show)
    run = actions.add_parser("run", help="measure claims", epilog=parser.epilog, formatter_class=parser.formatter_class)
    run.set_defaults(run=_run)
    run.add_argument("ids", nargs="+", metavar="ID", help="C1, c7a, …, or all")
    run.add_argument("--seed", type=int, default=0, metavar="N", help="of everything random")
    run.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a parameter of the claims that have it (`lab show`); may be repeated",
    )
    run.add_argument("--json", metavar="FILE", help="an object a line; - is stdout, and only that")
    run.add_argument("--jobs", type=int, metavar="N", help="side by side; default: 2 at most")
    run.add_argument("--full", action="store_true", help="the sizes of the committed results")
    run.add_argument("--fresh", action="store_true", help="measure even what is cached")


def _list(arguments: argparse.Namespace) -> Iterator[str]:
    from levelhead.lab import registry, report

    yield from report.listing(registry.claims())


def _show(arguments: argparse.Namespace) -> Iterator[str]:
    from levelhead.lab import registry, report

    for number, claim in enumerate(registry.chosen(arguments.ids)):
        yield from [""] * (number > 0)
        yield from report.claim_lines(claim)


def _run(arguments: argparse.Namespace) -> Generator[str, None, int]:
    """Measures, yields what to print, and returns the exit code."""
    from levelhead.lab import registry, report, runner

    check_writable("--json", arguments.json)
    ids = [claim.id for claim in registry.chosen(arguments.ids)]
    shown = report.Progress(ids)
    options = {name: getattr(arguments, name) for name in ("seed", "full", "jobs", "fresh")}
    results = []
    if arguments.json == STDOUT:
        write_utf8()
    try:
        for result in runner.run(ids, params=_changes(arguments.set), tell=shown.tell, **options):
            results.append(result)
            shown.add(result.id, result.verdict)
            shown.clear()
            if arguments.json == STDOUT:
                yield _line(result.json())
            else:
                yield from report.result_lines(result, colour=colour_wanted(sys.stdout))
    finally:
        shown.clear()
    if arguments.json != STDOUT:
        yield report.summary(results)
        if arguments.json:
            write_named("--json", arguments.json, "".join(_line(result.json()) + "\n" for result in results))
            yield f"wrote {arguments.json}"
    return int(not all(result.as_expected for result in results))


def _line(result: dict[str, Any]) -> str:
    return json.dumps(result, ensure_ascii=False, allow_nan=False)


def _changes(options: Sequence[str]) -> dict[str, Any]:
    """Parameters from `name=value`: a value is JSON, or else a word."""
    changes = {}
    for text in options:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise bad_value("--set", "NAME=VALUE", repr(text), "Write it like samples=1000")
        try:
            changes[name] = json.loads(value)
        except ValueError:
            changes[name] = value
    return changes

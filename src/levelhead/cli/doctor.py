"""`levelhead doctor`: its arguments, its files, its exit code.

The examination is `levelhead.watching.doctor`. Bad input is refused before any work. The content of all files is ready
before the first is written; each is written whole.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from levelhead.cli.command import STDOUT, Commands, add_command, number_or_rule, requested_files, written
from levelhead.errors import bad_value
from levelhead.terminal import StatusLine, colour_wanted, width_of

if TYPE_CHECKING:
    from levelhead.diagnosis.compare import Comparison
    from levelhead.models import Opened
    from levelhead.preflight_checks.result import Preflight
    from levelhead.watching.doctor import Examination, Tell

_ABOUT = """is every head of a local model level?

Has a local model read a text and examines every head of it.

examples:
  levelhead doctor minilm
  levelhead doctor checkpoint/ --text notes.txt --html heads.html
  levelhead doctor after/ --against before/ --json -
  levelhead doctor checkpoint/ --preflight
exit code: 0 fine, 1 if a finding is a warning or an error, 2 bad input
"""


def add(commands: Commands) -> None:
    parser = add_command(commands, "doctor", run, _ABOUT)
    parser.add_argument("model", metavar="MODEL", help="minilm, smollm2, a directory, a GGUF file")
    parser.add_argument("--text", metavar="FILE", help="UTF-8 to read, - is stdin; default: ours")
    parser.add_argument("--against", metavar="OTHER", help="compare with this earlier checkpoint")
    parser.add_argument("--json", metavar="FILE", help="write everything there; - is stdout")
    parser.add_argument("--html", metavar="FILE", help="write a self-contained page there")
    parser.add_argument("--table", action="store_true", help="print a line per head as well")
    parser.add_argument("--tokens", type=int, metavar="N", help="of the text at most")
    parser.add_argument("--rows", type=int, metavar="N", help="sample N query rows per call")
    parser.add_argument("--threads", type=int, metavar="N", help="default: as many as torch takes")
    parser.add_argument("--deep", action="store_true", default=None, help="see hand-written attention, too")
    parser.add_argument("--preflight", action="store_true", help="perturb it: causality, padding, …")
    parser.add_argument("--scale", metavar="S", help="the scale that is right, where not 1/√d_k")


def run(arguments: argparse.Namespace) -> Generator[str, None, int]:
    """Examines, writes the files, yields what to print, and returns the exit code."""
    files = requested_files(arguments)
    text = None if arguments.text is None else _read(arguments.text)
    line = StatusLine()
    try:
        examined, earlier, comparison, flight = _examined(arguments, text, line.show)
    finally:
        line.clear()
    contents = _contents(files, examined, earlier, comparison, flight)
    yield from written(files, contents, _report(examined, comparison, flight, arguments.table))
    fine = examined.healthy and (earlier is None or earlier.healthy) and (flight is None or flight.passed)
    return int(not fine)


def _examined(
    arguments: argparse.Namespace, text: str | None, tell: Tell
) -> tuple[Examination, Examination | None, Comparison | None, Preflight | None]:
    from levelhead import models

    for name in filter(None, (arguments.model, arguments.against)):
        models.check_openable(name)  # the watch would ask for fewer packages
    from levelhead.diagnosis.compare import compare
    from levelhead.watching.doctor import TOKENS, doctor

    options: dict[str, Any] = {name: getattr(arguments, name) for name in ("rows", "threads", "deep")}
    options["tokens"] = TOKENS if arguments.tokens is None else arguments.tokens
    options |= dict(expected_scale=number_or_rule(arguments.scale), tell=tell)
    model, against = arguments.model, arguments.against
    if arguments.preflight:  # opened once for both
        model, against = models.open(model), None if against is None else models.open(against)
    examined = doctor(model, text, **options)
    earlier = None if against is None else doctor(against, text, **options)
    flight = _flown(model, against, text, options) if arguments.preflight else None
    return examined, earlier, None if earlier is None else compare(earlier.run, examined.run), flight


def _flown(model: Opened, against: Opened | None, text: str | None, options: dict[str, Any]) -> Preflight:
    from levelhead.preflight_checks.local import preflight_opened
    from levelhead.watching.doctor import sample

    options["tell"]("pre-flight")
    scale = options["expected_scale"]
    return preflight_opened(model, sample() if text is None else text, against=against, expected_scale=scale)


def _contents(
    files: dict[str, str],
    examined: Examination,
    earlier: Examination | None,
    comparison: Comparison | None,
    flight: Preflight | None,
) -> dict[str, str]:
    """The content of each requested file."""
    from levelhead.show import html

    contents = {}
    if "json" in files:
        content = examined.to_json()
        if earlier is not None and comparison is not None:
            content["against"] = earlier.to_json()
            content["comparison"] = comparison.to_json()
        if flight is not None:
            content["preflight"] = flight.to_json()
        contents["json"] = json.dumps(content, allow_nan=False) + "\n"
    if "html" in files:
        contents["html"] = html.html(examined.run, examined.findings, comparison)
    return contents


def _report(
    examined: Examination, comparison: Comparison | None, flight: Preflight | None, table: bool
) -> Iterator[str]:
    from levelhead.diagnosis.findings import counted
    from levelhead.show import text

    yield text.text(examined.run, examined.findings, colour=colour_wanted(sys.stdout), table=table)
    if comparison is not None:
        yield "\n" + "\n".join(comparison.lines())
    yield f"\n{examined.run.model}: {counted(examined.findings)}"
    yield from text.verdict_lines(examined.findings, width_of())
    if flight is not None:
        yield "\n" + str(flight)


def _read(file: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if file == STDOUT else Path(file).read_bytes()
        return raw.decode("utf-8")
    except OSError as error:
        given = f"{file!r}: {error.strerror}"
    except UnicodeDecodeError as error:
        given = f"{file!r}, which is not: {error.reason} at byte {error.start}"
    raise bad_value("--text", "a readable text", given, "Give a file of UTF-8 text, or - for stdin")

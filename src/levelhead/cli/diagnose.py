"""`levelhead diagnose RUN`: findings and verdict of a recorded run; its files, its exit code.

Reads what `watch.save`, a JSONL or a Parquet sink, or `levelhead doctor --json` wrote. No model is opened, and torch is
not needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from levelhead.cli.command import Commands, add_command, number_or_rule, requested_files, written
from levelhead.terminal import colour_wanted, width_of

if TYPE_CHECKING:
    from levelhead.diagnosis.findings import Findings
    from levelhead.runs.record import Run

_ABOUT = """is attention the cause? findings and verdict of a recorded run

Reads a run that was recorded while a model was watched, and judges every head of it.

examples:
  levelhead diagnose run.jsonl
  levelhead diagnose run.jsonl --html run.html
  levelhead diagnose run.json --json - | jq .verdict
exit code: 0 fine, 1 if a finding is a warning or an error, 2 bad input
"""


def add(commands: Commands) -> None:
    parser = add_command(commands, "diagnose", run, _ABOUT)
    parser.add_argument("file", metavar="RUN", help="a file of save or JSONL, a directory of Parquet")
    parser.add_argument("--html", metavar="FILE", help="write a self-contained page with curves there; - is stdout")
    parser.add_argument("--json", metavar="FILE", help="write findings and verdict there; - is stdout")
    parser.add_argument("--scale", metavar="S", help="the scale that is right, where not 1/√d_k")


def run(arguments: argparse.Namespace) -> Generator[str, None, int]:
    """Judges, writes the files, yields what to print, and returns the exit code."""
    from levelhead.diagnosis.diagnose import diagnose
    from levelhead.runs import files

    wanted = requested_files(arguments)
    recorded = files.read(arguments.file)
    findings = diagnose(recorded, expected_scale=number_or_rule(arguments.scale))
    contents = {name: _content(name, recorded, findings) for name in wanted}
    yield from written(wanted, contents, _report(recorded, findings))
    return int(any(finding.severity != "note" for finding in findings))


def _content(name: str, recorded: Run, findings: Findings) -> str:
    from levelhead.show import html

    if name == "html":
        return html.html(recorded, findings)
    said = findings.verdict
    content = {
        "model": recorded.model,
        "steps": [snapshot.step for snapshot in recorded.snapshots],
        "verdict": str(said),
        "not_judged": [] if said is None else list(said.not_judged),
        "findings": findings.to_json(),
        "notes": list(recorded.notes),
    }
    return json.dumps(content, allow_nan=False, ensure_ascii=False) + "\n"


def _report(recorded: Run, findings: Findings) -> Iterator[str]:
    from levelhead.show import text

    yield text.text(recorded, findings, colour=colour_wanted(sys.stdout), width=width_of(), table=False)
    yield ""
    yield from text.verdict_lines(findings, width_of())

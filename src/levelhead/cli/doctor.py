"""`levelhead doctor`: its arguments, its files, its exit code.

Everything it says comes from `levelhead.health`. Bad input is refused before any work; files are
made whole before the first is written, and put in place in one go each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from levelhead.cli.files import STDOUT, check_writable, write
from levelhead.errors import LevelheadValueError, expected

if TYPE_CHECKING:
    from levelhead.diagnosis.compare import Comparison
    from levelhead.watching.doctor import Examination, Tell

BAD_INPUT = 2
_EXAMPLES = """examples:
  levelhead doctor minilm
  levelhead doctor checkpoint/ --text notes.txt --html heads.html
  levelhead doctor after/ --against before/ --json -
exit code: 0 fine, 1 if a finding is a warning or an error, 2 bad input
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command and its options."""
    parser = commands.add_parser(
        "doctor",
        help="is every head of a local model level?",
        description="Has a local model read a text and examines every head of it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="minilm, smollm2, a directory, a GGUF file")
    parser.add_argument("--text", metavar="FILE", help="UTF-8 to read, - is stdin; default: ours")
    parser.add_argument("--against", metavar="OTHER", help="compare with this earlier checkpoint")
    parser.add_argument("--json", metavar="FILE", help="write everything there; - is stdout")
    parser.add_argument("--html", metavar="FILE", help="write a self-contained page there")
    parser.add_argument("--table", action="store_true", help="print a line per head as well")
    parser.add_argument("--tokens", type=int, metavar="N", help="of the text at most")
    parser.add_argument("--rows", type=int, metavar="N", help="sample N query rows per call")
    parser.add_argument("--threads", type=int, metavar="N", help="default: as many as torch takes")
    parser.add_argument("--deep", action="store_true", help="see hand-written attention, too")
    parser.add_argument("--scale", metavar="S", help="the scale that is right, where not 1/√d_k")
    parser.set_defaults(run=run, failed=BAD_INPUT)


def run(arguments: argparse.Namespace) -> Generator[str, None, int]:
    """Examines, writes the files, yields what to print, and returns the exit code."""
    files = {name: getattr(arguments, name) for name in ("json", "html")}
    for name, file in files.items():
        check_writable(f"--{name}", file)
    text = None if arguments.text is None else _read(arguments.text)
    with _progress() as tell:
        seen, earlier, comparison = _examined(arguments, text, tell)
    written = _contents(files, seen, earlier, comparison)
    for name, content in written.items():
        if files[name] != STDOUT:
            write(f"--{name}", files[name], content)
    if arguments.json == STDOUT:
        yield written["json"].rstrip("\n")
    else:
        yield from _told(seen, comparison, arguments.table)
        yield from (f"wrote {files[name]}" for name in written)
    return int(not (seen.healthy and (earlier is None or earlier.healthy)))


def _examined(
    arguments: argparse.Namespace, text: str | None, tell: Tell
) -> tuple[Examination, Examination | None, Comparison | None]:
    from levelhead.diagnosis.compare import compare
    from levelhead.watching.doctor import TOKENS, doctor

    options: dict[str, Any] = {
        "tokens": TOKENS if arguments.tokens is None else arguments.tokens,
        "rows": arguments.rows,
        "threads": arguments.threads,
        "deep": arguments.deep,
        "expected_scale": _number(arguments.scale),
        "tell": tell,
    }
    seen = doctor(arguments.model, text, **options)
    if arguments.against is None:
        return seen, None, None
    earlier = doctor(arguments.against, text, **options)
    return seen, earlier, compare(earlier.run, seen.run)


def _number(scale: str | None) -> float | str | None:
    """A scale as people type it: a number, or else a rule's name."""
    try:
        return None if scale is None else float(scale)
    except ValueError:
        return scale


def _contents(
    files: dict[str, str | None], seen: Examination, earlier: Examination | None, comparison: Comparison | None
) -> dict[str, str]:
    """What each file that was asked for will hold."""
    from levelhead.show import html

    contents = {}
    if files["json"]:
        found = seen.to_json()
        if earlier is not None and comparison is not None:
            found["against"] = earlier.to_json()
            found["comparison"] = comparison.to_json()
        contents["json"] = json.dumps(found, allow_nan=False) + "\n"
    if files["html"]:
        contents["html"] = html.html(seen.run, seen.findings, comparison)
    return contents


def _told(seen: Examination, comparison: Comparison | None, table: bool) -> Iterator[str]:
    from levelhead.diagnosis.findings import verdict
    from levelhead.show import text as report

    colour = report.colour_wanted(sys.stdout)
    yield report.text(seen.run, seen.findings, colour=colour, table=table)
    if comparison is not None:
        yield "\n" + "\n".join(comparison.lines())
    yield ""
    yield f"{seen.run.model}: {verdict(seen.findings)}"


# ---- files ------------------------------------------------------------------


def _read(file: str) -> str:
    advice = "Give a file of UTF-8 text, or - for stdin"
    try:
        raw = sys.stdin.buffer.read() if file == STDOUT else Path(file).read_bytes()
        return raw.decode("utf-8")
    except OSError as error:
        given = f"{file!r}: {error.strerror}"
    except UnicodeDecodeError as error:
        given = f"{file!r}, which is not: {error.reason} at byte {error.start}"
    raise LevelheadValueError(expected("--text", "a readable text", given, advice))


@contextmanager
def _progress() -> Iterator[Tell]:
    """A line on stderr that is wiped at the end; nothing where there is no terminal."""
    terminal = sys.stderr.isatty()

    def show(words: str) -> None:
        if terminal:
            print(f"\r\x1b[2K{words}"[:100], end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        show("")

"""`levelhead explain`: its arguments, its files, what it prints.

The explanation is `levelhead.explanation`. Bad input is refused before a model is opened; with `--json -` stdout has
JSON and nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from levelhead.cli.command import Commands, add_command, requested_files, written
from levelhead.errors import bad_value
from levelhead.terminal import NARROW, colour_wanted

if TYPE_CHECKING:
    from levelhead.explanation import TextExplanation

_WIDEST = 1000  # columns
_ABOUT = """a sentence through attention, step by step

Shows one head at work on a sentence: five steps with their numbers and shapes, with the scale and without.

examples:
  levelhead explain "The dog chased the ball because it was fast." --token it
  levelhead explain "Love Apple phones" --model random
  levelhead explain "A short sentence." --layer 2 --head 5 --html head.html
"""


def add(commands: Commands) -> None:
    parser = add_command(commands, "explain", run, _ABOUT)
    parser.add_argument("sentence", metavar="SENTENCE", help="up to 2,000 characters")
    parser.add_argument("--model", metavar="M", help="minilm, smollm2 or random; default: minilm if installed")
    parser.add_argument("--layer", type=int, metavar="L", help="from 0; default: chosen, and said")
    parser.add_argument("--head", type=int, metavar="H", help="from 0; default: chosen, and said")
    parser.add_argument("--token", metavar="WORD", help="where does this word look, in every head?")
    parser.add_argument("--width", type=int, metavar="N", help="columns; default: the terminal's")
    parser.add_argument("--json", metavar="FILE", help="write every number there; - is stdout")
    parser.add_argument("--html", metavar="FILE", help="write a self-contained page there")
    parser.add_argument("--svg", metavar="FILE", help="write block and weights there, as a drawing")


def run(arguments: argparse.Namespace) -> Iterator[str]:
    """Explains, writes the files, yields what to print."""
    from levelhead.explanation import explain_text

    files, width = requested_files(arguments, ("json", "html", "svg")), arguments.width
    if width is not None and not NARROW <= width <= _WIDEST:
        wanted = f"a number of columns from {NARROW} to {_WIDEST}"
        raise bad_value("--width", wanted, width, "Leave it out for yours")
    explained = explain_text(
        arguments.sentence, model=arguments.model, layer=arguments.layer, head=arguments.head, token=arguments.token
    )
    contents = {name: _content(name, explained) for name in files}
    yield from written(files, contents, [explained.text(colour=colour_wanted(sys.stdout), width=width)])


def _content(name: str, explained: TextExplanation) -> str:
    if name == "json":
        return json.dumps(explained.to_json(), ensure_ascii=False, allow_nan=False) + "\n"
    return explained.html() if name == "html" else explained.svg()

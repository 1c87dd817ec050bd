"""`levelhead docs`: the documentation that is installed, a page or a section of it, as text."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from levelhead import documentation
from levelhead.cli.command import Commands, add_command

_ABOUT = """read the documentation in the terminal

Prints a page, or a section of one, from the copy that is installed. Findings name their section.

examples:
  levelhead docs
  levelhead docs wrong-scale
  levelhead docs health the-gauge
With LEVELHEAD_SITE set to the address of a site, findings and copied links point to it instead.
exit code: 2 if there is no such page or section
"""


def add(commands: Commands) -> None:
    parser = add_command(commands, "docs", run, _ABOUT)
    parser.add_argument("name", nargs="*", metavar="NAME", help="a page, a heading, or both; none: what there is")


def run(arguments: argparse.Namespace) -> Iterator[str]:
    """Yields the text; without a name the pages, by what one wants."""
    yield documentation.section(arguments.name or [documentation.START])
    if not arguments.name:
        yield f"\npages: {', '.join(name for name in documentation.pages() if name != documentation.START)}"

"""`levelhead cache`: what levelhead keeps outside its package, where, how large; and its removal."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from levelhead import cache
from levelhead.cli.command import Commands, add_command
from levelhead.words import aligned, in_bytes

_ABOUT = """files that levelhead keeps, their place and size

Prints the directory and the size of what levelhead keeps between runs: models that were de-quantised, results and
trainings of the lab. All of it is made again when it is needed. LEVELHEAD_CACHE names another directory.

examples:
  levelhead cache
  levelhead cache --clear
Nothing else is kept outside the installed package. Files that levelhead did not make are left.
exit code: 2 if something cannot be removed
"""


def add(commands: Commands) -> None:
    parser = add_command(commands, "cache", run, _ABOUT)
    parser.add_argument("--clear", action="store_true", help="remove it; not while another process fills it")


def run(arguments: argparse.Namespace) -> Iterator[str]:
    """Yields place and sizes; with --clear it removes what it names."""
    sizes, folder = cache.sizes(), cache.directory()
    if arguments.clear:
        cache.clear()  # directories that a run made and did not fill, too
    if not sizes:
        yield f"nothing is kept in {folder}"
        return
    yield f"{'removed from' if arguments.clear else 'kept in'} {folder}:"
    holds = {part.name: part.holds for part in cache.PARTS}
    rows = [(f"  {name}", in_bytes(size), holds[name]) for name, size in sizes.items()]
    yield from aligned(rows, left={0, 2})
    if not arguments.clear:
        yield "levelhead cache --clear removes it; it is made again when it is needed"

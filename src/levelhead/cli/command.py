"""What commands share: exit codes, a parser with examples, files checked before any work and written whole."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from levelhead.cache import write_named
from levelhead.errors import bad_value
from levelhead.terminal import write_utf8

BAD_INPUT = 2  # exit code; argparse uses the same for wrong usage
STDOUT = "-"  # in place of a file's name

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Run: TypeAlias = Callable[[argparse.Namespace], Iterator[str]]  # yields what to print, may return the exit code


def add_command(commands: Commands, name: str, run: Run | None, about: str) -> argparse.ArgumentParser:
    """A command whose errors are bad input. `about` is three paragraphs: the line in the list of all commands, the
    description, and the examples at the end of its help."""
    help, description, examples = about.split("\n\n")
    parser = commands.add_parser(
        name, help=help, description=description, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(run=run, failed=BAD_INPUT)
    return parser


def check_writable(option: str, file: str | Path | None) -> None:
    """Refuses a file that cannot be written, before minutes of work."""
    if file is None or file == STDOUT:
        return
    if not str(file):
        raise bad_value(option, "a file", "an empty name", "Name a file, or leave the option out")
    path = Path(file)
    if path.is_dir():
        raise bad_value(option, "a file", f"the directory {str(file)!r}", "Name a file in it")
    if path.exists() and not path.is_file():  # a pipe or a device, which needs no file beside it
        return
    path = Path(os.path.realpath(path))
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        wanted = "a file in a directory that can be written to"
        raise bad_value(option, wanted, repr(str(file)), "Make the directory first")


def requested_files(arguments: argparse.Namespace, names: Iterable[str] = ("json", "html")) -> dict[str, str]:
    """The files of these options that are asked for; refused unless all can be written."""
    files = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if list(files.values()).count(STDOUT) > 1:
        options = ", ".join(f"--{name}" for name in files)
        raise bad_value(options, "one of them on stdout", "several", "Name a file for the others")
    for name, file in files.items():
        check_writable(f"--{name}", file)
    return files


def written(files: dict[str, str], contents: dict[str, str], report: Iterable[str]) -> Iterator[str]:
    """Writes the contents of all files; yields what to print: the one for stdout, else the report and their names."""
    for name, file in files.items():
        if file != STDOUT:
            write_named(f"--{name}", file, contents[name])
    if STDOUT in files.values():
        write_utf8()
        yield next(contents[name] for name, file in files.items() if file == STDOUT).rstrip("\n")
    else:
        yield from report
        yield from (f"wrote {file}" for file in files.values())


def number_or_rule(scale: str | None) -> float | str | None:
    """A scale from the command line: a number, or else a rule's name."""
    try:
        return None if scale is None else float(scale)
    except ValueError:
        return scale

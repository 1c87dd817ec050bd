"""`levelhead page`: its arguments, its one line on stdout, its exit code.

The line is the link, complete and flushed, so that a program can wait for it; all other messages go to stderr. Bad
input is refused before a port is taken or a figure computed.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import webbrowser
from collections.abc import Generator
from pathlib import Path

from levelhead.cli.command import Commands, add_command, requested_files, written
from levelhead.errors import bad_value
from levelhead.terminal import message

_PORTS = range(1024, 65536)
_ABOUT = """play with √d_k in the browser

Serves a local page where every number comes from the core.

examples:
  levelhead page
  levelhead page --run heads.json --no-open
  levelhead page --export page.html
exit code: 0 after Ctrl-C, 2 bad input
"""


def add(commands: Commands) -> None:
    parser = add_command(commands, "page", run, _ABOUT)
    parser.add_argument("--port", type=int, default=0, metavar="N", help="default: any free one")
    parser.add_argument("--no-open", action="store_true", help="print the link, open no browser")
    parser.add_argument("--run", metavar="FILE", dest="file", help="show this run, follow it live")
    parser.add_argument("--export", metavar="FILE", help="write one HTML file instead of serving")


def run(arguments: argparse.Namespace) -> Generator[str, None, int]:
    """Yields the link, then serves until Ctrl-C; or writes the export."""
    from levelhead.page import assets

    assets.check_installed()
    file = None if arguments.file is None else Path(arguments.file)
    if arguments.export is not None:
        from levelhead.page.export import exported

        files = requested_files(arguments, ["export"])
        yield from written(files, {"export": exported(run=file, tell=message)}, ())
        return 0
    if arguments.port != 0 and arguments.port not in _PORTS:
        wanted = f"{_PORTS[0]} to {_PORTS[-1]}"
        raise bad_value("--port", wanted, arguments.port, "Leave it out to take any free port")
    from levelhead.page import server

    page = server.open_page(arguments.port, run=file)
    yield page.url
    message("serving this machine alone; Ctrl-C ends it")
    if not arguments.no_open:
        threading.Thread(target=_open, args=(page.url,), daemon=True).start()
    page.serve()
    if page.computing.is_busy:
        # A model or a measurement takes seconds and cannot be stopped. The page writes no files, so nothing is left
        # half done.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


def _open(url: str) -> None:
    # In a thread of its own: some browsers return only when they are closed.
    if not webbrowser.open(url):
        message("found no browser to open; use the link above")

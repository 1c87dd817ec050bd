"""The command line: one file per command; `main` parses and dispatches."""

from __future__ import annotations

from levelhead.cli.main import main

__all__ = ["main"]

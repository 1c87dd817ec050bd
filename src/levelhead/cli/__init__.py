"""Commands of the command line that deserve a file of their own; `cli` puts them together."""

from __future__ import annotations

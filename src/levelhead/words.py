"""Small pieces of text that every report shares."""

from __future__ import annotations


def plural(n: int, what: str) -> str:
    """`3 heads`, `1 head`."""
    return f"{n} {what}{'s' * (n != 1)}"


def module_title(module: str) -> str:
    """A module's full name, also where the model itself is the module."""
    return f"(the model itself){module}" if module[:1] in ("", " ") else module  # " (call 2)" is a part of it

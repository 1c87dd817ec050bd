"""Small pieces of text that every report shares."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence


def plural(n: int, what: str) -> str:
    """`3 heads`, `1 head`."""
    return f"{n} {what}{'s' * (n != 1)}"


def aligned(rows: Sequence[Sequence[str]], left: Container[int]) -> Iterator[str]:
    """Columns of equal width, aligned to the right; those in `left`, which hold words, to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        parts = (
            text.ljust(width) if i in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(parts).rstrip()


def in_bytes(size: int) -> str:
    """`512 B`, `1.5 MB`, `541 MB`: three digits, in powers of 1000."""
    value, units = float(size), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def module_title(module: str) -> str:
    """A module's full name, also where the model itself is the module."""
    return f"(the model itself){module}" if module[:1] in ("", " ") else module  # " (call 2)" is a part of it

"""Block sizes of the observing kernel, by width, type and number of rows. Everything here is plain arithmetic."""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    rows: int  # BM: query rows of a program
    keys: int  # BN: keys of a tile
    width: int  # BD: the part of the width that is multiplied at a time
    warps: int
    stages: int


PROGRAMS = 256  # at least so many keep a large GPU busy: about two for each of its processors
SPAN = 512  # keys of a program at least: below that, joining costs more than it saves


def tiles(D: int, size: int, rows: int) -> Tiles:
    """For a width D, elements of `size` bytes and so many rows that share their keys."""
    fits = 256 // size  # 128 of a half type, 64 of float32: a tile of 32 keys then has 8 KiB
    width = max(16, _power(D))
    if width > fits:
        width = 64 if D % 128 and not D % 64 else fits
    # Larger blocks of float32, which the tensor cores do not multiply exactly, do not fit the registers.
    block = 64 if size < 4 else 32
    return Tiles(rows=16 if rows <= 16 else block, keys=32, width=width, warps=4, stages=2)


def parts(programs: int, S: int) -> int:
    """Into how many ranges S keys are divided, where so many programs would each have all."""
    return max(1, min(PROGRAMS // max(programs, 1), S // SPAN))


def ranges(S: int, parts: int, keys: int) -> tuple[int, int]:
    """How many ranges that really are, and the keys of each: a multiple of a tile."""
    span = max(1, -(-S // (parts * keys))) * keys
    return max(1, -(-S // span)), span


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()

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
    fits = 256 // size  # 128 of a half type, 64 of float32: a tile of 64 keys then has 16 KiB
    width = max(16, _power(D))
    if width > fits:
        width = 64 if D % 128 and not D % 64 else fits
    few = rows <= 16
    return Tiles(rows=16 if few else 64, keys=32, width=width, warps=4, stages=2)


def splits(programs: int, S: int, keys: int) -> tuple[int, int]:
    """Into how many parts the keys are divided, and the keys of each: a multiple of a tile."""
    wanted = max(1, min(PROGRAMS // max(programs, 1), S // SPAN))
    span = -(-S // (wanted * keys)) * keys if S else keys
    return max(1, -(-S // span)), span


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()

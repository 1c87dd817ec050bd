"""Block sizes of the observing kernel, by width, type and number of rows. Everything here is plain arithmetic."""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    rows: int  # BM: query rows of a program
    keys: int  # BN: keys of a tile in which something is hidden
    full: int  # BF: keys of one in which nothing is
    width: int  # BD: the part of the width that is multiplied at a time
    warps: int
    stages: int


# What multiplies matrices of a half type: nothing, each warp for itself (mma.sync of NVIDIA's sm_80 to 89 and 120, WMMA
# of AMD's gfx11 and 12), or all warps of a block together (wgmma, tcgen05) or wide ones (MFMA).
NOTHING, WARP, BLOCK = "nothing", "warp", "block"
PROGRAMS = 256  # at least so many keep a large GPU busy: about two for each of its processors
MOST_KEYS = 64  # of any tile
SPAN = 512  # keys of a program at least: below that, joining costs more than it saves


def unit(nvidia: bool, major: int) -> str:
    """Of a device, by the major version of its architecture: 8 of sm_89, 9 of gfx942."""
    if nvidia:
        return NOTHING if major < 8 else BLOCK if 9 <= major < 12 else WARP
    return BLOCK if major == 9 else WARP


def tiles(D: int, size: int, rows: int, unit: str = BLOCK) -> Tiles:
    """For a width D, elements of `size` bytes and so many rows that share their keys. Sizes are the largest whose
    registers do not spill, and whose shared memory every such device has (bench/device_kernel.py). Where a warp
    multiplies alone, warps side by side along the keys would have to meet for every sum."""
    fits = 256 // size  # 128 of a half type, 64 of float32
    width = max(16, _power(D))
    if width > fits:
        width = 64 if D % 128 and not D % 64 else fits
    if unit == NOTHING:
        return Tiles(16, 32, 32, min(width, 64), warps=4, stages=2)
    if rows <= 16 or size == 4:  # NVIDIA's tensor cores do not multiply float32 exactly, and threads have few registers
        return Tiles(16, 32, 32, width, warps=4, stages=2)
    if unit == WARP and D > 128:
        return Tiles(64, 16, 32, min(width, 64), warps=4, stages=2)
    if unit == WARP:
        return Tiles(64, 16, 32, width, warps=2, stages=2)
    return Tiles(64, 32, 64 if D <= 128 else 32, width, warps=4, stages=2)


def registers(nvidia: bool) -> dict[str, int]:
    """All that a thread of NVIDIA's may have: else its assembler spills some to run one block more at a time."""
    return {"maxnreg": 255} if nvidia else {}


def parts(programs: int, S: int) -> int:
    """Into how many ranges S keys are divided, where so many programs would each have all."""
    return max(1, min(PROGRAMS // max(programs, 1), S // SPAN))


def ranges(S: int, parts: int, keys: int) -> tuple[int, int]:
    """How many ranges that really are, and the keys of each: a multiple of a tile."""
    span = max(1, -(-S // (parts * keys))) * keys
    return max(1, -(-S // span)), span


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()

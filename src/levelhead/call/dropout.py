"""Which weights dropout keeps: a hash of the seed and of absolute positions, and nothing else.

So the same weights fall for any tiling, any number of threads and any sharding. The core computes
the same bits; this is the definition.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

SEEDS = 2**62  # so many are drawn from, where PyTorch's generator gives one

U64: TypeAlias = NDArray[np.uint64]
U32: TypeAlias = NDArray[np.uint32]


def dropout_keep(
    seed: int, rate: float, heads: int, p: NDArray[np.int64], j: NDArray[np.int64], first: tuple[int, int] = (0, 0)
) -> NDArray[np.bool_]:
    """Which weights survive, (B, H, T, S), for query positions p (B, T), key positions j (S,).

    `first`: the numbers of the first batch row and head, of a part of a call.
    The row's key is hashed in 64 bits, once; each weight then costs two rounds of 32 bits.
    """
    b, h = (np.arange(at, at + n, dtype=np.uint64) for at, n in zip(first, (len(p), heads), strict=True))
    row = _splitmix(_splitmix(np.array([seed], np.uint64)) ^ b)[:, None]
    row = _splitmix(row ^ h)[:, :, None]
    row = _splitmix(row ^ p.astype(np.uint64)[:, None, :])[..., None]  # two's complement
    j_low, j_high = _halves(j.astype(np.uint64))
    low, high = _halves(row)
    x = _mix(_mix(j_low ^ low) ^ (high + j_high * np.uint32(0x9E3779B9)))
    keep: NDArray[np.bool_] = x >= np.uint32(int(rate * 2**32))
    return keep


def _halves(x: U64) -> tuple[U32, U32]:
    return x.astype(np.uint32), (x >> np.uint64(32)).astype(np.uint32)


def _splitmix(x: U64) -> U64:
    """SplitMix64 (Steele, Lea, Flood 2014)."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: U64 = z ^ (z >> np.uint64(31))
    return result


def _mix(x: U32) -> U32:
    """The 32-bit finaliser "lowbias32" (Wellons 2018)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    result: U32 = x ^ (x >> np.uint32(16))
    return result

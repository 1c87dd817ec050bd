"""Reads and writes beyond an array: every input and output borders on a memory page without access rights, before or
behind it, so that an access beyond the array ends the process.

Each case runs in a process of its own, which prints the sizes before every call, so that a fault is reported with its
sizes. Run as a script, this file is that process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from levelhead import _core, reference
from levelhead.call import options as scoring
from support import DTYPES, ISAS, Array, check_output, kind, magnitude, qkv, running_on, storage

PAGE = mmap.PAGESIZE
NO_ACCESS, READ_ONLY, READ_WRITE = 0, 1, 3  # PROT_* of sys/mman.h
END = ("front", "back")


class Fence:
    """Memory for one array that borders on a page without access rights at one of its ends."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, end: str) -> None:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        body = max(PAGE, -(-nbytes // PAGE) * PAGE)
        self._pages = mmap.mmap(-1, body + 2 * PAGE)
        self._body = body
        offset = PAGE if end == "front" else PAGE + body - nbytes
        self.array = np.ndarray(shape, dtype, self._pages, offset)
        self._start = self.array.ctypes.data - offset
        self._protect(0, PAGE, NO_ACCESS)
        self._protect(PAGE + body, PAGE, NO_ACCESS)

    def freeze(self) -> None:
        """From now on a write into the array is a fault too."""
        self._protect(PAGE, self._body, READ_ONLY)

    def _protect(self, offset: int, length: int, access: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(self._start + offset)
        if libc.mprotect(address, ctypes.c_size_t(length), access) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")


def fenced(x: Array, end: str) -> Array:
    """A read-only copy of x behind a fence. The copy keeps the fence alive."""
    fence = Fence(x.shape, x.dtype, end)
    fence.array[...] = x
    fence.freeze()
    return fence.array


# ---- what runs in the other process

# T, S, D, E: at, one above and one below the sizes of vectors and tiles.
SIZES = [
    *((n, n, n, n) for n in range(1, 20)),
    *((1, S, 3, 5) for S in (*range(1, 36), 47, 48, 49, 63, 64, 65, 127, 128, 129, 511, 513)),
    *((T, 7, 2, 3) for T in (*range(1, 26), 47, 48, 49, 95, 96, 97, 193)),
    *((6, 33, D, 1) for D in (*range(1, 34), 63, 64, 65, 80, 127, 192)),
    *((7, 17, 1, E) for E in (*range(1, 34), 63, 64, 65, 80, 127, 128)),
    *((13, 70, D, E) for D, E in ((64, 64), (65, 63), (17, 96), (33, 31))),
]


def options_for(T: int, S: int, turn: int, dtype: str) -> dict[str, Any]:
    rng = np.random.default_rng(turn)
    bias = rng.standard_normal((2, T, S)).astype("f4")
    choices: list[dict[str, Any]] = [
        {},
        dict(causal=True),
        dict(mask=bias > -1),
        dict(mask=bias, window=(5, 3)),
        dict(mask=bias.astype(kind(dtype)), softcap=3.0),
        dict(mask=bias[:, :1], sinks=np.zeros(2)),
        dict(mask=bias[:1, :, :1] > 0, key_lengths=np.array([S // 2])),
        dict(segments=(rng.integers(0, 2, T), rng.integers(0, 2, S)), alibi=True),
    ]
    return choices[turn % len(choices)]


def run(dtype: str, T: int, S: int, D: int, E: int, end: str, options: dict[str, Any]) -> None:
    """One forward pass with everything fenced, checked against the reference."""
    q, k, v = qkv((2,), T, S, D, E, groups=1, dtype=dtype, seed=T + S + D + E)
    truth = reference.observe(q, k, v, **options)
    scored = scoring.describe(scoring.shape_of(q.shape, k.shape, v.shape), dtype_name=dtype, **options)
    arguments: dict[str, Any] = {}
    for name in ("causal", "left", "right", "softcap"):
        arguments[name] = getattr(scored, name)
    arguments["scale"] = fenced(scored.scale, end)
    for name in ("sinks", "alibi", "key_lengths", "query_segments", "key_segments", "query_start"):
        value = getattr(scored, name)
        arguments[name] = None if value is None else fenced(np.ascontiguousarray(value), end)
    if scored.mask is not None:  # the memory is that of the caller's mask, then broadcast
        mask = fenced(storage(np.ascontiguousarray(options["mask"])), end)
        arguments["mask"] = np.broadcast_to(mask, (2, T, S))
    wide = "f8" if dtype == "float64" else "f4"
    out = Fence((2, T, E), kind(dtype), end).array
    acc = Fence((2, T, E), wide, end).array
    sums = Fence((2, T, 8), wide, end).array
    counts = Fence((2, T, 2), "i8", end).array
    memory = [fenced(storage(x), end) for x in (q, k, v)]
    _core.forward(*memory, out=storage(out), acc=acc, sums=sums, counts=counts, threads=1, **arguments)
    assert truth.output is not None
    check_output(out, truth.output, magnitude(v))
    np.testing.assert_array_equal(counts[..., 0], truth.rows.count)
    again = Fence((2, T, E), kind(dtype), end).array
    _core.finish(fenced(acc, end), fenced(sums, end), arguments["sinks"], storage(again))
    assert again.tobytes() == out.tobytes()
    _core.forward(*memory[:2], None, sums=sums, counts=counts, threads=2, **arguments)
    parts = [fenced(x, end) for x in (sums, counts, acc)]
    _core.merge(*parts, *parts, S, sums, counts, acc)
    plain = Fence((2, T, E), kind(dtype), end).array
    _core.forward(*memory, out=storage(plain), threads=2, **arguments)
    assert plain.tobytes() == out.tobytes()


def run_all(isa: str, dtype: str) -> None:
    with running_on(isa):
        for turn, ((T, S, D, E), end) in enumerate(itertools.product(SIZES, END)):
            turn += turn // 16  # so that an end is not always combined with the same options
            options = options_for(T, S, turn, dtype)
            names = ", ".join(options)
            print(f"T={T} S={S} D={D} E={E} {end} [{names}]", flush=True)
            run(dtype, T, S, D, E, end, options)
            rows_apart(dtype, T, S, D, E, end)
        for n, end in itertools.product((*range(1, 40), 512, 513), END):
            wide = "f8" if dtype == "float64" else "f4"
            out = Fence((n,), wide, end).array
            _core.exponential(fenced(-np.arange(n).astype(wide), end), out)
            assert out[0] == 1


def rows_apart(dtype: str, T: int, S: int, D: int, E: int, end: str) -> None:
    """Rows of an interleaved array: the last one ends, or the first begins, at the fence."""
    width = D + E + 3
    both = np.random.default_rng(0).standard_normal((S, width)).astype(kind(dtype))
    room = fenced(storage(both), end)
    room = room[:, -D - E :] if end == "back" else room[:, : D + E]
    q = fenced(storage(np.ones((T, D), kind(dtype))), end)
    wide_out = Fence((T, E + 2), kind(dtype), end).array
    out = wide_out[:, 2:] if end == "back" else wide_out[:, :E]
    start = np.array([S - T])
    k, v = (room[:, E:], room[:, :E]) if end == "back" else (room[:, :D], room[:, D:])
    _core.forward(q, k, v, out=storage(out), scale=np.ones(1), query_start=start, threads=1)
    assert not wide_out[:, :2].any() if end == "back" else not wide_out[:, E:].any()


def trespass(where: str) -> None:
    """Accesses the protected page, to show that the fence works."""
    array = Fence((5,), "f4", "back" if where == "behind" else "front").array
    if where == "inside":
        array = fenced(array, "back")
        ctypes.c_float.from_address(array.ctypes.data).value = 1.0
    else:
        address = array.ctypes.data + (20 if where == "behind" else -4)
        print(ctypes.c_float.from_address(address).value)


# ---- what pytest runs


def child(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(reference.__file__).parents[1]), str(Path(__file__).parents[1] / "helpers")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, env=env, timeout=240, check=False
    )


def last_lines(text: str, n: int) -> Iterator[str]:
    yield from text.splitlines()[-n:]


@pytest.mark.parametrize("where", ["behind", "before", "inside"])
def test_the_fence_works(where: str) -> None:
    done = child("trespass", where)
    assert done.returncode in (-signal.SIGSEGV, -signal.SIGBUS), done


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_no_access_beyond_an_array(isa: str, dtype: str) -> None:
    done = child(isa, dtype)
    output = "\n".join([*last_lines(done.stdout, 1), *last_lines(done.stderr, 25)])
    assert done.returncode == 0, f"status {done.returncode} after {output}"
    assert len(done.stdout.splitlines()) == len(SIZES) * len(END)


if __name__ == "__main__":
    faulthandler.enable()
    if sys.argv[1] == "trespass":
        trespass(sys.argv[2])
    else:
        run_all(*sys.argv[1:])

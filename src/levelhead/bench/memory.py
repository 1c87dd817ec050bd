"""Peak extra memory of one call, in an interpreter of its own.

Extra is what the process needed at its worst during the call, beyond what it held before, minus the result. The
libraries are warm (a small problem ran), the inputs and masks are there; nothing of the measured size has run yet,
unless the call compiles itself at first. Linux only: it reads /proc.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from levelhead.bench import peers, problems
from levelhead.bench.bars import FLOOR
from levelhead.bench.calls import Refused
from levelhead.bench.cases import Case

_SMALL = 64  # tokens of the warm-up problem
_PATIENCE = 300  # seconds, compiling included


def extra(case: Case, name: str, variant: str, threads: int) -> int | str:
    """Bytes, or the reason why there are none."""
    if not Path("/proc/self/clear_refs").exists():
        return "needs /proc"
    order = json.dumps([asdict(replace(case, bar=FLOOR)) | {"bar": None}, name, variant, threads])
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, order], capture_output=True, text=True, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        return f"took over {_PATIENCE} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["died"])[-1]
    return int(done.stdout.split()[-1])


def _measured(case: Case, name: str, variant: str, threads: int) -> int:
    peer = {peer.name: peer for peer in peers.implementations()}[name]
    with peers.on_cpus(threads), peer.session(threads):
        _warm_up(peer, case, threads)
        problem = problems.make(case)
        call = peer.variants(problem, threads)[variant]()
        if call.warm:
            call.run()
        with suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # free pages kept back would hide growth
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the peak, starts anew
        before = _bytes("VmRSS")
        result = call.run()
        peak = _bytes("VmHWM")
        del result
    return max(0, peak - before - problem.output_bytes)


def _warm_up(peer: peers.Implementation, case: Case, threads: int) -> None:
    """Thread pools, lazy imports and code caches are no part of a call's memory."""
    small = replace(case, T=min(case.T, _SMALL), S=min(case.S, _SMALL))
    with suppress(Refused):
        for build in list(peer.variants(problems.make(small), threads).values())[:1]:
            call = build()
            if not call.warm:
                call.run()


def _bytes(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024


if __name__ == "__main__":
    fields, name, variant, threads = json.loads(sys.argv[1])
    print(_measured(Case(**(fields | {"bar": FLOOR})), name, variant, threads))

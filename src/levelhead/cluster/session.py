"""One launch of `levelhead cluster-bench`: joins the ranks that torchrun started, measures, leaves.

The result is a dictionary on rank 0 and None elsewhere. `measure` measures a cell.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from levelhead import _core
from levelhead.bench.limits import checked_threads
from levelhead.cluster.cases import Effort, cells, left_out
from levelhead.errors import bad_value
from levelhead.extras import command, require
from levelhead.info import measured_here

COMMAND = "torchrun --nproc-per-node 2 -m levelhead cluster-bench"
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # variables that it sets on every rank
PATIENCE = timedelta(minutes=20)  # for a rank that runs a whole problem alone
METHOD = (
    "Every round starts at a barrier; the slowest rank's time counts. Once not traced (seconds), once traced (ranks: "
    "seconds, compute, transfer, wait, bytes sent and received, other). alone: rank 0 computes the whole problem "
    "while the others sleep, with the threads of one rank and with all CPUs. error: largest distance of a row from "
    "that answer."
)


def launched() -> tuple[int, int]:
    """This process's rank and how many there are, from torchrun."""
    require("cluster-bench", "torch", install=f"{command('torch')}, then {COMMAND}")
    missing = [name for name in TORCHRUN if not os.environ.get(name)]
    if missing:
        what, given = "to be started by torchrun on every rank", f"no {' and no '.join(missing)}"
        raise bad_value("cluster-bench", what, given, f"Run: {COMMAND}")
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def threads_per_rank(threads: int | None) -> int:
    """Of each rank's kernel; None: this machine's CPUs shared among the ranks on it."""
    share = max(1, _core.default_threads() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return checked_threads(threads, share, "Leave it out to share them evenly")


def bench(
    effort: Effort, threads: int, *, tell: Callable[[str, str], None], save: Callable[[dict[str, Any]], None]
) -> dict[str, Any] | None:
    """Measures every cell that this world can run; `save` gets the result so far, on rank 0."""
    import torch.distributed as dist

    from levelhead.cluster.measure import measure

    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        header = _header(effort, world, threads)
        measured = measure(
            cells(effort, world), threads, effort.rounds, tell, lambda so_far: save(header | {"cells": so_far})
        )
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return header | {"cells": measured} if rank == 0 else None


def _header(effort: Effort, world: int, threads: int) -> dict[str, Any]:
    import torch

    header = measured_here()
    header["machine"]["threads"] = _core.default_threads()
    header["versions"]["torch"] = torch.__version__
    return header | dict(
        backend="gloo",
        world=world,
        hosts=_hosts(),
        threads=threads,
        method=METHOD,
        effort=asdict(effort),
        left_out=left_out(effort, world),
    )


def _hosts() -> int:
    """Machines that take part, counted by hashes of their names."""
    import torch

    from levelhead.cluster.measure import gathered

    name = hashlib.blake2b(socket.gethostname().encode(), digest_size=7).digest()
    return len(set(gathered(torch.tensor(int.from_bytes(name, "little"))).tolist()))

"""One rank of test_distributed_network.py, run by it in a namespace: network_rank.py WHAT FILE
CABLE. Leaves a pickle of what it found in FILE."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import astuple
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import levelhead as lh
from levelhead.distributed import Trace
from sharded import PLANS, Case, compute


def cases(rank: int, trace: Trace) -> dict[str, Any]:
    """Every plan over the network."""
    chosen = [
        Case(plan, feature, split, dist.get_world_size())
        for plan in PLANS
        for feature, split in (("causal", "zigzag"), ("bias", "ragged"))
    ]
    found = []
    for case in chosen:
        arrays, options = case.part(rank)
        more = {"plan": case.plan, "split": case.splits, "trace": trace}
        found.append(compute(arrays, options, lh.distributed, **more))
    return {"cases": chosen, "found": found}


def ring(rank: int, trace: Trace) -> dict[str, Any]:
    """A block of 2 MiB to each side, forward and backward."""
    draw = torch.Generator().manual_seed(rank)
    q, k, v = (torch.randn(4, 1024, 64, generator=draw).requires_grad_() for _ in range(3))
    lh.distributed.attention(q, k, v, plan="ring", trace=trace).sum().backward()
    return {"events": json.dumps([astuple(event) for event in trace.events])}


def main(what: str, file: str, cable: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    trace, rank = Trace(), dist.get_rank()
    counter = Path(f"/sys/class/net/{cable}/statistics/tx_bytes")
    before = int(counter.read_text())
    found = {"cases": cases, "ring": ring}[what](rank, trace)
    dist.barrier()
    moved = {"sent": trace.sent, "on the cable": int(counter.read_text()) - before}
    Path(file).write_bytes(pickle.dumps(found | moved))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What ranks cost each other in a step: `gather=` of a watch, and QK-clip, without any model that runs.

Processes of this machine over gloo, so the figures are those of pickling, copying and agreeing, not of a network. A
step's records are made up, of the sizes of real models: (layers, heads). For a clip, the maxima of all heads are there
and a step is `step()`: with nothing above the bound (one collective), and with every head above it (a second one, and
all q and k weights written). Steps of the first rank, after a warm-up that contains the agreement.

    python bench/rank_cost.py [--json FILE] [--ranks 2]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

import levelhead as lh
from about import machine, versions
from levelhead.remedies import QKClip
from levelhead.runs.record import Snapshot

SIZES = {"12 layers of 12 heads": (12, 12), "32 layers of 32 heads": (32, 32)}
STEPS, D = 25, 8
CLIPS = {"QK-clip, nothing above the bound": 1e6, "all heads above": 1e-9}


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj = (nn.Linear(D * heads, D * heads, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k = (p(x).unflatten(-1, (-1, D)).transpose(1, 2) for p in (self.q_proj, self.k_proj))
        return x + F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


def taken(step: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of a step."""
    each = []
    for n in range(STEPS + 1):
        torch.distributed.barrier()
        started = time.perf_counter()
        step()
        if n:
            each.append(1e3 * (time.perf_counter() - started))
    return {"best": round(min(each), 3), "median": round(statistics.median(each), 3)}


def measured(layers: int, heads: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention(heads) for _ in range(layers)))
    x = torch.randn(1, 8, D * heads)
    found: dict[str, Any] = {}
    with torch.no_grad(), lh.watch(model, gather=True, history=2) as w:
        model(x)
        records = w.last.records
        w.step()
        gather = w._gathering
        found["gather"] = taken(lambda: gather(Snapshot(1, records), 1, model))
    found["bytes of a rank"] = float(sum(record.tally.nbytes for record in records))
    for name, tau in CLIPS.items():
        with torch.no_grad(), QKClip(model, tau) as clip:
            model(x)
            seen = dict(clip._seen)

            def step(clip: QKClip = clip, seen: Any = seen) -> None:
                clip._seen = dict(seen)
                clip.step()

            found[name] = taken(step)
    return found


def rank(number: int, world: int, port: int, answers: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=number, world_size=world)
    found = {name: measured(*size) for name, size in SIZES.items()}
    if number == 0:
        answers.put(found)
    torch.distributed.destroy_process_group()


def table(found: dict[str, dict[str, Any]], ranks: int) -> list[str]:
    columns = ("gather", *CLIPS)
    lines = [f"| {ranks} ranks, ms of a step: best (median) | `gather=True` | {' | '.join(CLIPS)} |", "|---" * 4 + "|"]
    return [*lines, *(f"| {name} | {' | '.join(map(_span, map(x.get, columns)))} |" for name, x in found.items())]


def _span(milliseconds: Any) -> str:
    return f"{milliseconds['best']:.3g} ({milliseconds['median']:.3g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    load = round(os.getloadavg()[0], 1)  # of other work, before any of this
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    ranks = [context.Process(target=rank, args=(n, options.ranks, port, answers)) for n in range(options.ranks)]
    for process in ranks:
        process.start()
    found = answers.get()
    for process in ranks:
        process.join()
    lines = table(found, options.ranks)
    print("\n".join(lines))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            about = {**machine(1), "load": load, "versions": versions()}
            json.dump(
                {"about": about, "ranks": options.ranks, "found": found, "tables": {"step": lines}}, file, indent=1
            )
            file.write("\n")


if __name__ == "__main__":
    main()

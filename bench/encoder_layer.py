"""Two pools on two cores: attention between the other operations of a real PyTorch encoder layer.

PyTorch's workers spin for a while after each of its operations, where levelhead's would work. What that costs: the
attention call within a layer (norm, qkv projection, attention, output projection, norm, two-layer perceptron) beside
the same call alone, by PyTorch, by levelhead on a pool of its own, and by levelhead on PyTorch's team. Bursts in round
robin: 50 ms idle, 2 warm-ups, 10 timed calls, next.

    python bench/encoder_layer.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

import levelhead as lh
from about import machine

WIDTH, HEADS = 512, 8
ROUNDS, WARM, CALLS, IDLE = 4, 2, 10, 0.05
# Batch rows and tokens: a sentence, a batch of them, a page, a batch of pages.
SHAPES = ((1, 64), (8, 64), (1, 512), (4, 512))

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Layer(torch.nn.Module):
    """One pre-norm encoder layer whose attention is exchanged, and timed, from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
        self.spent = 0.0

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        B, T, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(B, T, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        begin = time.perf_counter()
        y = attend(q, k, v)
        self.spent = time.perf_counter() - begin
        x = x + self.out(y.transpose(1, 2).reshape(B, T, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


def burst(layer: Layer, x: torch.Tensor, attend: Attend) -> list[tuple[float, float]]:
    """Seconds of whole layers, and of the attention within them."""
    time.sleep(IDLE)
    taken = []
    for _ in range(WARM + CALLS):
        begin = time.perf_counter()
        layer(x, attend)
        taken.append((time.perf_counter() - begin, layer.spent))
    return taken[WARM:]


def burst_alone(attend: Attend, *qkv: torch.Tensor) -> list[float]:
    time.sleep(IDLE)
    taken = []
    for _ in range(WARM + CALLS):
        begin = time.perf_counter()
        attend(*qkv)
        taken.append(time.perf_counter() - begin)
    return taken[WARM:]


def measure(ways: dict[str, Attend], B: int, T: int) -> dict[str, dict[str, list[float]]]:
    layer, x = Layer().eval(), torch.randn(B, T, WIDTH)
    qkv = [torch.randn(B, HEADS, T, WIDTH // HEADS) for _ in range(3)]
    times: dict[str, dict[str, list[float]]] = {way: {"layer": [], "within": [], "alone": []} for way in ways}
    for _ in range(ROUNDS):
        for way, attend in ways.items():
            for whole, within in burst(layer, x, attend):
                times[way]["layer"].append(whole)
                times[way]["within"].append(within)
            times[way]["alone"] += burst_alone(attend, *qkv)
    return times


def lines(cells: list[dict[str, Any]]) -> list[str]:
    """The results as a table: milliseconds, minimum and median."""
    table = ["| batch x tokens | attention by | within the layer | alone | the whole layer |", "|---|---|---|---|---|"]
    for cell in cells:
        for way, times in cell["times"].items():
            both = (
                f"{1e3 * min(times[place]):.3g} / {1e3 * statistics.median(times[place]):.3g}"
                for place in ("within", "alone", "layer")
            )
            table.append(f"| {cell['B']} x {cell['T']} | {way} | {' | '.join(both)} |")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="attention within an encoder layer")
    parser.add_argument("--json", metavar="FILE")
    file = parser.parse_args().json
    torch.set_grad_enabled(False)
    threads = torch.get_num_threads()
    ways: dict[str, Attend] = {
        "PyTorch": functional.scaled_dot_product_attention,
        "levelhead, a pool of its own": partial(lh.attention, threads=threads),
        "levelhead, on PyTorch's team": lh.attention,
    }
    cells = []
    for B, T in SHAPES:
        cells.append({"B": B, "T": T, "times": measure(ways, B, T)})
        print("\n".join(lines(cells[-1:])[2 if len(cells) > 1 else 0 :]), flush=True)
    if file:
        about = {**machine(threads), "torch": torch.__version__, "python": platform.python_version()}
        with open(file, "w") as f:
            json.dump({"about": about, "tables": {"layer": lines(cells)}, "cells": cells}, f)


if __name__ == "__main__":
    main()

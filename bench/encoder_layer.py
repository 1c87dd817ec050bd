"""Two pools on two cores: attention between the other operations of a real PyTorch encoder layer.

PyTorch's workers spin for a while after each of its operations, where levelhead's would work. What
that costs: a layer (norm, qkv projection, attention, output projection, norm, two-layer
perceptron) with PyTorch's attention and with levelhead's, and the attention call within the layer
beside the same call alone. Bursts in round robin: 50 ms idle, 2 warm-ups, 10 timed calls, next.

    python bench/encoder_layer.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
from torch.nn import functional

import levelhead as lh
from levelhead import info

WIDTH, HEADS = 512, 8
ROUNDS = 5
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


def burst(call: Callable[[], Any]) -> list[float]:
    time.sleep(0.05)
    times = []
    for i in range(12):
        begin = time.perf_counter()
        spent = call()
        times.append((time.perf_counter() - begin if spent is None else spent, i))
    return [took for took, i in times if i >= 2]


def measure(B: int, T: int) -> dict[str, dict[str, float]]:
    layer, x = Layer().eval(), torch.randn(B, T, WIDTH)
    q, k, v = (torch.randn(B, HEADS, T, WIDTH // HEADS) for _ in range(3))
    ways: dict[str, Attend] = {
        "PyTorch": functional.scaled_dot_product_attention,
        "levelhead": lh.attention,
    }

    def whole(attend: Attend) -> Callable[[], None]:
        return lambda: void(layer(x, attend))

    def within(attend: Attend) -> Callable[[], float]:
        return lambda: (layer(x, attend), layer.spent)[1]

    def alone(attend: Attend) -> Callable[[], None]:
        return lambda: void(attend(q, k, v))

    calls = {
        f"{name}, {place}": make(attend)
        for name, attend in ways.items()
        for place, make in (("layer", whole), ("within", within), ("alone", alone))
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name] += burst(call)
    return {
        name: {"min_ms": 1e3 * min(t), "median_ms": 1e3 * statistics.median(t)}
        for name, t in times.items()
    }


def void(_: object) -> None:
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    file = parser.parse_args().json
    torch.set_grad_enabled(False)
    threads = torch.get_num_threads()
    print(f"{threads} threads, width {WIDTH}, {HEADS} heads; ms, minimum / median")
    cells = []
    for B, T in SHAPES:
        found = measure(B, T)
        cells.append({"B": B, "T": T, "times": found})
        for name, t in found.items():
            print(f"{B} x {T:5}  {name:20} {t['min_ms']:8.3f} {t['median_ms']:8.3f}", flush=True)
    if file:
        about = {"date": date.today().isoformat(), "cpu": info.info()["cpu"], "threads": threads}
        about |= {"torch": torch.__version__, "python": platform.python_version()}
        with open(file, "w") as f:
            json.dump({"about": about, "cells": cells}, f, indent=1)


if __name__ == "__main__":
    main()

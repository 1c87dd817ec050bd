"""What watching costs: training steps of a four-layer model, watched and not, in turns.

A step is a forward pass, a loss, a backward pass and the optimiser. Turns of fifty steps in round robin: not watched;
watched with every=50, so that one step of a turn is looked at and the hooks are there in all; watched at every step,
with PyTorch's attention and with levelhead's in its place. Every second round runs in reverse, so that no order has
an advantage. A turn is compared with the unwatched one of its own round, because the machine's speed changes between
rounds by more than watching costs; the median of these ratios is the answer, with its standard error.

    python bench/watch_cost.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

import levelhead as lh
from about import machine

WIDTH, HEADS, LAYERS = 256, 4, 4
BATCH, TOKENS = 4, 256
STEPS, ROUNDS = 50, 20


def model() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS)


def turn(step: Callable[[], None], *, every: int | None, levelhead: bool, of: nn.Module) -> float:
    """Seconds per step of a turn."""
    with ExitStack() as stack:
        if levelhead:
            stack.enter_context(lh.torch.patch())
        watch = None if every is None else stack.enter_context(lh.watch(of, every=every))
        step()
        if watch is not None and every != 1:  # the first step was looked at: begin a new turn there
            for _ in range(every - 1):
                watch.step()
        begin = time.perf_counter()
        for _ in range(STEPS):
            step()
            if watch is not None:
                watch.step()
        return (time.perf_counter() - begin) / STEPS


WAYS: dict[str, dict[str, Any]] = {
    "not watched": {"every": None, "levelhead": False},
    "every=50": {"every": 50, "levelhead": False},
    "every=1": {"every": 1, "levelhead": False},
    "levelhead's attention, not watched": {"every": None, "levelhead": True},
    "levelhead's attention, every=1": {"every": 1, "levelhead": True},
}
BASE = {  # compared with which
    "every=50": "not watched",
    "every=1": "not watched",
    "levelhead's attention, every=1": "levelhead's attention, not watched",
}


def added(taken: list[float], base: list[float]) -> dict[str, float]:
    """What watching adds to a step, as a share: by minima, by medians, and round by round."""
    rounds = sorted(mine / other - 1 for mine, other in zip(taken, base, strict=True))
    quarter = len(rounds) // 4
    spread = (rounds[-1 - quarter] - rounds[quarter]) / 1.349  # of a normal with these quartiles
    return {
        "minima": min(taken) / min(base) - 1,
        "medians": statistics.median(taken) / statistics.median(base) - 1,
        "paired": statistics.median(rounds),
        "paired_stderr": 1.253 * spread / len(rounds) ** 0.5,  # of a median
    }


def lines(times: dict[str, list[float]]) -> list[str]:
    """The results as a table: milliseconds per step, and what watching adds."""
    table = [
        "| training step | minimum, ms | median, ms | watching adds, round by round | by minima |",
        "|---|---|---|---|---|",
    ]
    for way, taken in times.items():
        words = "- | -"
        if way in BASE:
            more = added(taken, times[BASE[way]])
            words = f"{more['paired']:+.1%} ± {more['paired_stderr']:.1%} | {more['minima']:+.1%}"
        low, middle = 1e3 * min(taken), 1e3 * statistics.median(taken)
        table.append(f"| {way} | {low:.1f} | {middle:.1f} | {words} |")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="what watching costs")
    parser.add_argument("--json", metavar="FILE")
    file = parser.parse_args().json
    torch.manual_seed(0)
    net = model()
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-4)
    x = torch.randn(BATCH, TOKENS, WIDTH)

    def step() -> None:
        loss = net(x).square().mean()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(ROUNDS):
        for way in list(WAYS)[:: -1 if number % 2 else 1]:
            times[way].append(turn(step, of=net, **WAYS[way]))
        print(f"round {number + 1} of {ROUNDS}", flush=True)
    print("\n".join(lines(times)))
    if file:
        about = {
            **machine(torch.get_num_threads()),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "model": f"{LAYERS} layers, width {WIDTH}, {HEADS} heads, {BATCH} x {TOKENS} tokens",
        }
        with open(file, "w") as f:
            json.dump({"about": about, "tables": {"cost": lines(times)}, "times": times}, f)
            f.write("\n")


if __name__ == "__main__":
    main()

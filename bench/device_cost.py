"""What observing a call costs: kernels launched and bytes moved, counted; and times, on the device that is there.

Counted is every operator that touches memory: what it reads and writes, each number once (a stretched dimension counts
once, views cost nothing). The Triton kernel is not run for that; its loads and stores are counted from its grid, by
the tiles that it would visit. Where there is a GPU, times are measured instead, beside those of attention itself; on a
CPU with --times the core and the path of plain torch.

    python bench/device_cost.py [--device NAME] [--times | --no-times] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from about import machine, versions
from levelhead.watching import measure, taken_rows
from levelhead.watching.measure import Call, call_of

SHAPES = {"training": (1, 8, 2, 2048, 64), "short": (4, 8, 8, 256, 64), "decoding": (4, 8, 2, 1, 64)}  # B, H, G, T, D
CACHED = 2048  # keys of a decoding step
OPTIONS: dict[str, dict[str, Any]] = {"dense": {}, "causal": {"causal": True}, "window": {"causal": True, "left": 256}}
FREE = ("empty", "new_empty", "detach", "alias", "lift_fresh", "_unsafe_view", "_local_scalar_dense")


class Counter(TorchDispatchMode):
    """Kernels and bytes of everything inside."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(FREE) and torch.Tag.inplace_view not in func.tags:
            self.kernels += 1
            flat, _ = torch.utils._pytree.tree_flatten((args, kwargs, result))
            self.bytes += sum(touched(x) for x in flat if isinstance(x, Tensor))
        return result


def touched(x: Tensor) -> int:
    """Bytes of its numbers, a stretched dimension once."""
    numbers = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        numbers *= size if stride else min(size, 1)
    return numbers * x.element_size()


class Launch:
    """Stands for a Triton kernel: counts what a launch would load and store."""

    def __init__(self, counter: Counter, kind: str) -> None:
        self.counter, self.kind = counter, kind

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: Any, **meta: Any) -> None:
            self.counter.kernels += 1
            tensors = [x for x in given if isinstance(x, Tensor)]
            if self.kind == "observe":
                q, k, *rest = tensors
                keys = visited(given, meta, grid[0])
                self.counter.bytes += touched(q) + keys * q.shape[3] * k.element_size()
                mask = given[7]
                if mask is not None:  # read by every head
                    self.counter.bytes += keys * meta["BM"] * mask.element_size()
                tensors = [x for x in rest if x is not mask]
            self.counter.bytes += sum(touched(x) for x in tensors)

        return launch


def visited(given: tuple[Any, ...], meta: dict[str, Any], programs: int) -> int:
    """Keys that all programs load, by position: what the kernel's tiles cover."""
    B, H, R, S, T, span = given[-6:]
    left, right = given[17], given[18]
    start = 0 if given[13] is None else int(given[13][0])
    blocks, parts = -(-meta["PACK"] * R // meta["BM"]), -(-S // span)
    total = 0
    for block in range(blocks):
        first, last = block * meta["BM"], min((block + 1) * meta["BM"], meta["PACK"] * R) - 1
        rows = (first * T // R, -(-last * T // R)) if meta["PACK"] == 1 else (0, T - 1)  # of a sample: about there
        high = min(S, start + rows[1] + 1) if meta["CAUSAL"] else S
        high = high if right is None else min(high, start + rows[1] + right + 1)
        low = 0 if left is None else max(0, start + rows[0] - left) // meta["BN"] * meta["BN"]
        total += max(0, -(-high // meta["BN"]) * meta["BN"] - low)
    assert programs == blocks * parts * (H // meta["PACK"]) * B
    return total * (H // meta["PACK"]) * B


def calls(device: str, dtype: torch.dtype) -> dict[str, Call]:
    found = {}
    for shape, (B, H, G, T, D) in SHAPES.items():
        S = CACHED if shape == "decoding" else T
        q, k = (torch.randn(B, heads, n, D, device=device, dtype=dtype) for heads, n in ((H, T), (G, S)))
        for name, fields in OPTIONS.items():
            start = S - T if name != "dense" and T != S else None
            found[f"{shape}, {name}"] = call_of(q, k, D**-0.5, start, **fields)
    B, H, G, T, D = SHAPES["training"]
    plain = found["training, dense"]
    seen = torch.ones(T, T, dtype=torch.bool, device=device).tril()[None, None]
    masks = {"mask of numbers": torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype), "boolean mask": seen}
    return found | {f"training, {name}": call_of(plain.q, plain.k, D**-0.5, mask=x) for name, x in masks.items()}


def sample(call: Call) -> Tensor | None:
    """The rows that a watch with every=1 takes; None: all."""
    return taken_rows.taken(call, SimpleNamespace(rows=taken_rows.AUTO, every=1, turn=0), 0)


def counted(call: Call, by_torch: bool | None, rows: Tensor | None = None) -> dict[str, float]:
    counter = Counter()
    if by_torch is None:
        from levelhead.device import launch, operator

        for name in ("observe", "join", "tally", "hiding"):
            setattr(launch, f"{name}_kernel", Launch(counter, name))
        operator.observe = lambda q, k, scoring, *more: operator._observe(q, k, *scoring, *more, 0)
    with counter:
        measure.tallied(call, rows=rows, by_torch=by_torch)
    logits = call.q.shape[0] * call.q.shape[1] * call.q.shape[2] * call.k.shape[2]
    return {"kernels": counter.kernels, "bytes": counter.bytes, "bytes per logit": round(counter.bytes / logits, 2)}


def timed(run: Callable[[], Any], device: str) -> float:
    """Seconds of a call: the median of 20 after 5."""
    wait = (lambda: None) if device == "cpu" else torch.get_device_module(device).synchronize
    samples = []
    for number in range(25):
        wait()
        begin = time.perf_counter()
        run()
        wait()
        if number >= 5:
            samples.append(time.perf_counter() - begin)
    return statistics.median(samples)


def times(call: Call, device: str) -> dict[str, float]:
    q, k, rows = call.q, call.k, sample(call)
    causal = call.scoring.causal and call.scoring.left is None and q.shape[2] == k.shape[2]
    found = {
        "attention": timed(
            lambda: functional.scaled_dot_product_attention(q, k, k, is_causal=causal, enable_gqa=True), device
        ),
        "observed": timed(lambda: measure.tallied(call), device),
        "observed, a sample of rows": timed(lambda: measure.tallied(call, rows=rows), device),
        "observed by plain torch": timed(lambda: measure.tallied(call, by_torch=True), device),
    }
    return {name: round(seconds, 7) for name, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="what observing a call costs")
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    parser.add_argument("--device", default="cpu" if there is None else there.type)
    parser.add_argument("--times", action=argparse.BooleanOptionalAction, help="instead of counts; default: on a GPU")
    parser.add_argument("--paths", default="torch,triton,sampled", help="which paths to count")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.manual_seed(0)
    options.times = options.device != "cpu" if options.times is None else options.times
    if not options.times and options.device == "cpu":
        os.environ |= {"TRITON_INTERPRET": "1", "LEVELHEAD_OBSERVE": "triton"}  # so that the kernel is chosen
    found: dict[str, Any] = {}
    dtype = torch.bfloat16 if options.device != "cpu" or not options.times else torch.float32
    for name, call in calls(options.device, dtype).items():
        if options.times:
            found[name] = times(call, options.device)
        else:
            ways = {"torch": (True, None), "triton": (None, None), "sampled": (None, sample(call))}
            found[name] = {path: counted(call, *ways[path]) for path in options.paths.split(",")}
        print(name, json.dumps(found[name]), flush=True)
    if options.json:
        about = machine(torch.get_num_threads()) | versions() | {"device": options.device}
        kind = "times, in seconds" if options.times else "counted per observed call"
        Path(options.json).write_text(json.dumps({"about": about, kind: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

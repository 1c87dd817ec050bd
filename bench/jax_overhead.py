"""What a tiny call costs under JAX: levelhead's custom call, JAX's own attention, and a program of almost nothing.

One head of 8 tokens, width 16, float32. All three are compiled and called with the same arrays, in turns. The program
of almost nothing changes the sign of q, so what it takes is JAX's way into XLA and back. Microseconds per call.

    python bench/jax_overhead.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import jax

import levelhead as lh
from about import machine

SHAPE = (1, 1, 8, 16)
ROUNDS, WARM, CALLS = 300, 20, 200


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--json", help="writes the figures into this file")
    file = options.parse_args().json
    q, k, v = (jax.random.normal(jax.random.key(i), SHAPE) for i in range(3))
    programs = {
        "a sign changed": lambda q, k, v: -q,
        "levelhead.jax.attention": lh.jax.attention,
        "jax.nn.dot_product_attention": jax.nn.dot_product_attention,
    }
    compiled = {name: jax.jit(program).lower(q, k, v).compile() for name, program in programs.items()}
    samples: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(ROUNDS):
        for name, call in compiled.items():
            for _ in range(WARM):
                call(q, k, v).block_until_ready()
            started = time.perf_counter()
            for _ in range(CALLS):
                call(q, k, v).block_until_ready()
            samples[name].append(1e6 * (time.perf_counter() - started) / CALLS)
    found = {name: {"best": min(x), "median": statistics.median(x)} for name, x in samples.items()}
    for name, times in found.items():
        print(f"{name:30} {times['best']:6.2f} µs best, {times['median']:6.2f} median")
    if file:
        about = machine(lh.info().threads) | {"jax": jax.__version__, "shape": SHAPE, "rounds": ROUNDS, "calls": CALLS}
        with open(file, "w") as to:
            json.dump({"about": about, "microseconds": found}, to, indent=1)


if __name__ == "__main__":
    main()

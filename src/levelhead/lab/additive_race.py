"""The time of additive attention and of the dot product, each in its fastest implementation.

levelhead streams both through its core. Where PyTorch is installed its fused attention runs too, and additive attention
as it is written there, which stores (T, S, A) numbers. They take turns in bursts; what is compared is the fastest of
each kind, so that a slow implementation decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from levelhead.additive import additive_attention
from levelhead.attention import attention
from levelhead.bench import measure, peers_torch
from levelhead.extras import installed

_STORED = 2**29  # bytes of (T, S, A) beyond which the plain formulation is left out
_CALLS = 5  # timed in a burst


@dataclass(frozen=True)
class Race:
    """Seconds per call, and how much longer the fastest additive one takes."""

    seconds: Mapping[str, float]  # the median over rounds of each round's best
    ratio: tuple[float, float]  # mean over rounds of ln(additive/dot), and its standard error


def race(length: int, width: int, d_k: int, rounds: int, threads: int) -> Race:
    """One head of so many tokens; additive attention has `width` terms, and its projections."""
    rng = np.random.default_rng(length)
    q, k, v = rng.standard_normal((3, length, d_k), np.float32)
    w_q, w_k = rng.standard_normal((2, width, d_k), np.float32) / np.float32(math.sqrt(d_k))
    w_v = rng.standard_normal(width, np.float32) / np.float32(math.sqrt(width))
    dot: dict[str, Callable[[], Any]] = {"levelhead dot": partial(attention, q, k, v, threads=threads)}
    additive: dict[str, Callable[[], Any]] = {
        "levelhead additive": partial(additive_attention, q, k, v, w_q, w_k, w_v, threads=threads)
    }
    has_torch = installed("torch")
    with peers_torch.session(threads) if has_torch else nullcontext():
        if has_torch:
            dot["PyTorch dot"], plain = _torch_calls(q, k, v, w_q, w_k, w_v)
            if 4 * length * length * width <= _STORED:
                additive["PyTorch additive"] = plain
        taken = _take_turns({**dot, **additive}, rounds)
    seconds = {name: float(np.median(by_round)) for name, by_round in taken.items()}
    first, second = (taken[min(kind, key=lambda name: seconds[name])] for kind in (additive, dot))
    gaps = np.log(first / second)
    return Race(seconds, (float(gaps.mean()), float(gaps.std(ddof=1) / math.sqrt(rounds))))


def _take_turns(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    """The best of each round, (rounds,), by name: what disturbs a clock only ever adds to it."""
    batches = {name: measure.batch(measure.estimate(run)) for name, run in runs.items()}
    plans = {name: measure.Plan(rounds, measure.WARM, _CALLS, batch) for name, batch in batches.items()}
    timed = measure.bursts(runs, plans)
    return {name: np.min(np.reshape(one.samples, (rounds, _CALLS)), -1) for name, one in timed.items()}


def _torch_calls(*arrays: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Its fused dot product, and additive attention as its users write it."""
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention
    q, k, v, w_q, w_k, w_v = (torch.from_numpy(np.array(x)) for x in arrays)

    def dot() -> Any:
        return attend(q[None, None], k[None, None], v[None, None])

    def additive() -> Any:
        u = torch.tanh((q @ w_q.mT)[:, None] + k @ w_k.mT)
        return torch.softmax(u @ w_v, -1) @ v

    return dot, additive

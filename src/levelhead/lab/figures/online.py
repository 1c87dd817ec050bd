"""Attention without the matrix: keys come in tiles, and a few numbers are all that is kept.

Each tile is observed on its own and merged into the state, as the kernel does with its own tiles;
the order of tiles may be shuffled. The state after the last tile is the attention.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead import state
from levelhead.attention import attention, observe
from levelhead.lab import measure
from levelhead.lab.figure import Axis, Chart, Fact, Figure, Series
from levelhead.lab.figures import parts
from levelhead.lab.measure import Setting, normals
from levelhead.lab.parameters import check
from levelhead.observation import Observation, merge

NEEDS = ("d_k", "scale", "power", "keys", "seed", "tile", "order")
CLAIMS = ("C8a", "C14")
E = 8  # width of the values
TILES = 64  # at most: with many keys, a tile is larger than requested

Array = NDArray[Any]


def figure(setting: Setting, *, tile: int = 8, order: int = 0) -> Figure:
    check(tile=tile, order=order)
    tile = min(max(tile, -(-setting.keys // TILES)), setting.keys)
    q, k = measure.row(setting)
    v = normals(setting.seed, "row values", setting.keys, E)
    begins = list(range(0, setting.keys, tile))
    tiles = [observe(q, k[i : i + tile], v[i : i + tile], scale=setting.factor) for i in begins]
    arrived = _shuffled(len(begins), order)
    states = _merged([tiles[i] for i in arrived])
    in_order = states[-1] if order == 0 else reduce(merge, tiles)
    whole = attention(q, k, v, scale=setting.factor)
    difference = _apart(states[-1].output, in_order.output)
    ranges = [(begins[i], min(begins[i] + tile, setting.keys)) for i in arrived]
    steps = [_step(*pair) for pair in zip(ranges, states, strict=True)]
    arrived_keys = np.cumsum([end - begin for begin, end in ranges])
    rows = states[-1].rows
    return Figure(
        "online",
        "The softmax, tile by tile",
        _charts(arrived_keys, steps, setting.keys),
        parts.code("online", setting, tile=tile, order=order),
        facts=(
            Fact("keys per tile", tile, "live"),
            Fact("tiles", len(begins), "live"),
            Fact("largest difference, shuffled against in order", difference, "live"),
            Fact("largest difference, merged against at once", _apart(states[-1].output, whole), "live"),
            Fact(
                "numbers kept per row, however many keys",
                len(state.SUMS) + E,
                "theory",
                formula="8 sums and the output's width",
            ),
            *parts.row_facts(rows),
        ),
        gauges=(parts.gauge_of("after the last tile", rows),),
        note="m is the largest logit so far, l = Σ exp(s - m). A tile with a larger logit rescales "
        "what is there. Merging is exact in any order, up to the rounding of float32.",
        extra={"tile": tile, "order": order, "steps": steps, "difference": difference, "whole": np.asarray(whole)[0]},
    )


def _shuffled(tiles: int, order: int) -> list[int]:
    """In which order tiles arrive; 0: as they are. Each order begins with another tile than the one before, so that
    it is another one, however few tiles there are."""
    if order == 0:
        return list(range(tiles))
    first = order % tiles
    rest = [i for i in range(tiles) if i != first]
    shuffled = [int(i) for i in np.random.default_rng(order).permutation(rest)]
    if shuffled == sorted(shuffled):
        shuffled.reverse()  # behind tile 0 it would be order 0
    return [first, *shuffled]


def _merged(observations: list[Observation]) -> list[Observation]:
    """The state after each."""
    states = observations[:1]
    for one in observations[1:]:
        states.append(merge(states[-1], one))
    return states


def _step(keys: tuple[int, int], observation: Observation) -> dict[str, Any]:
    rows = observation.rows
    return {
        "keys": keys,
        "m": float(rows.max.item()),
        "l": float(observation.state.sums[..., state.L].item()),
        "entropy": float(rows.entropy.item()),
        "output": np.asarray(observation.output)[0],
    }


def _apart(a: Any, b: Any) -> float:
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def _charts(arrived_keys: Array, steps: list[dict[str, Any]], keys: int) -> tuple[Chart, ...]:
    columns = {name: [step[name] for step in steps] for name in ("m", "l", "entropy")}
    axis = Axis("keys seen", range=(0.0, float(keys)))
    entropy = Series("entropy of the state", "live", "line", arrived_keys, columns["entropy"])
    most = Series("at most: ln of the keys seen", "theory", "line", arrived_keys, np.log(arrived_keys))
    return (
        Chart(
            "Running maximum m",
            axis,
            Axis("m"),
            (_line("m", arrived_keys, columns["m"]),),
            f"from {columns['m'][0]:.3g} to {columns['m'][-1]:.3g}, never falling",
        ),
        Chart(
            "Running sum l",
            axis,
            Axis("l = Σ exp(s - m)", range=(0.0, float(keys))),  # from 1, one-hot, to the keys seen, flat
            (_line("l", arrived_keys, columns["l"]),),
            f"{columns['l'][-1]:.3g} at the end",
        ),
        Chart(
            "Entropy so far",
            axis,
            Axis("nats", range=(0.0, 1.02 * math.log(keys))),
            (entropy, most),
            f"{columns['entropy'][-1]:.3g} at the end, of at most {math.log(keys):.3g}",
        ),
    )


def _line(name: str, x: Array, y: Any) -> Series:
    return Series(name, "live", "line", x, y)

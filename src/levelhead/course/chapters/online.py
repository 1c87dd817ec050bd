"""Chapter 10: the softmax without the matrix. Keys arrive in tiles; a maximum and a few sums are all that is kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, reduce
from itertools import permutations
from typing import Any

import numpy as np

from levelhead import reference, state
from levelhead.attention import observe
from levelhead.course.chapter import Chapter
from levelhead.course.numbers import Number, live, recorded, theory
from levelhead.course.results import claim
from levelhead.observation import Observation, merge

SCORES = (1, 2, 0, 1, 4, 2, 3, -1)
VALUES = (3, 1, 4, 1, 5, 9, 2, 6)
TILE = 2
NAMES = "ABCD"  # of the tiles
ORDERS = ((0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0), (1, 3, 0, 2), (0, 2, 1, 3), (3, 0, 2, 1))  # no two neighbours alike
HALF = 2  # tiles that have arrived when the question is asked
LONG, D_K, SHUFFLES = 2048, 64, 8  # a row as long as a text, of the usual width
TOKENS = 131_072


@cache
def _tiles() -> tuple[Observation, ...]:
    """Each tile by the core, alone: a head of width 1 whose query is 1, so that the keys are the scores."""
    keys, values = (np.array(row, np.float32)[:, None] for row in (SCORES, VALUES))
    starts = range(0, len(SCORES), TILE)
    return tuple(
        observe(np.ones((1, 1), np.float32), keys[i : i + TILE], values[i : i + TILE], scale=1.0) for i in starts
    )


def _kept(one: Observation) -> dict[str, float]:
    """m, l = Σ e^(s − m), a = Σ e^(s − m) v, b = Σ e^(s − m) s, and what they give: a / l and the entropy."""
    m, total = one.rows.max.item(), float(one.state.sums[..., state.L].item())
    output, entropy = float(np.asarray(one.output).item()), one.rows.entropy.item()
    b = (m + math.log(total) - entropy) * total
    return {"m": m, "l": total, "a": output * total, "b": b, "output": output, "entropy": entropy}


@cache
def merged(order: tuple[int, ...]) -> tuple[dict[str, float], ...]:
    """What is kept after each tile."""
    found = [_tiles()[order[0]]]
    for i in order[1:]:
        found.append(merge(found[-1], _tiles()[i]))
    return tuple(_kept(one) for one in found)


def _apart() -> float:
    """The largest difference between two orders of the tiles, over all orders."""
    outputs = [merged(order)[-1]["output"] for order in permutations(range(len(NAMES)))]
    return max(outputs) - min(outputs)


@cache
def _long() -> float:
    """A long row in shuffled tiles: its largest difference from the definition, which stores the row, in float64."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, D_K), np.float32) for n in (1, LONG, LONG))
    tiles = [observe(q, k[i : i + D_K], v[i : i + D_K]) for i in range(0, LONG, D_K)]
    whole = reference.attention(q, k, v)
    shuffled = (rng.permutation(len(tiles)) for _ in range(SHUFFLES))
    return max(
        float(np.abs(np.asarray(reduce(merge, [tiles[i] for i in order]).output) - whole).max()) for order in shuffled
    )


def numbers() -> Mapping[str, Number]:
    here = "levelhead"
    steps = merged(ORDERS[0])
    half, after, end = steps[HALF - 1], steps[HALF], steps[-1]
    old, new = max(SCORES[: HALF * TILE]), max(SCORES)
    factor = math.exp(old - new)
    return {
        "keys": theory(len(SCORES), "chosen"),
        "tile": theory(TILE, "chosen"),
        "m_half": theory(old, "chosen"),
        "m_new": theory(new, "chosen"),
        "l_half": live(half["l"], here, 3),
        "factor": theory(factor, "e^(2 − 4)", 3),
        "l_rescaled": live(factor * half["l"], here, 3),
        "l_after": live(after["l"], here, 3),
        "output": live(end["output"], here, 4),
        "entropy": live(end["entropy"], here, 3),
        "orders": theory(math.factorial(len(NAMES)), "4!"),
        "apart": live(_apart(), f"{here}, float32", 1),
        "long": theory(LONG, "chosen"),
        "long_apart": live(_long(), f"{here}, float32, {SHUFFLES} orders, seed 0", 1),
        "tokens": theory(TOKENS, "chosen"),
        "matrix": theory(4 * TOKENS**2 / 1e9, "4 · 131072² / 10⁹"),
        "width": theory(D_K, "chosen"),
        "held": theory(2 + D_K, "2 + 64"),
        "exponent": recorded(claim("C14")["measured"]["exponent: 1/sqrt(d_k)"], "C14", 4),
    }


def _step(order: tuple[int, ...], at: int) -> dict[str, Any]:
    """What a step shows: what was kept, the factor on it, what the tile adds, what is kept, each key's part of l."""
    before, now = merged(order)[at - 2] if at > 1 else None, merged(order)[at - 1]
    factor = math.exp(before["m"] - now["m"]) if before else 0.0
    rescaled = {name: factor * before[name] if before else 0.0 for name in "lab"}
    arrived = [key for i in order[:at] for key in range(i * TILE, (i + 1) * TILE)]
    return {
        "before": before,
        "factor": factor,
        "rescaled": rescaled,
        "added": {name: now[name] - rescaled[name] for name in "lab"},
        "now": now,
        "parts": [math.exp(SCORES[key] - now["m"]) for key in arrived],
    }


def data() -> Any:
    return {
        "scores": SCORES,
        "values": VALUES,
        "tile": TILE,
        "names": NAMES,
        "half": HALF,
        "orders": [
            {"tiles": order, "steps": [_step(order, at) for at in range(1, len(order) + 1)]} for order in ORDERS
        ],
    }


CHAPTER = Chapter(
    "online",
    options=("nothing", "rescale", "again"),
    answer="rescale",
    claims=("C8a", "C14"),
    numbers=numbers,
    data=data,
    steps=1 + len(NAMES),
)

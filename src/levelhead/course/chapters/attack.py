"""Chapter 9: attack the assumption. A query and its key become correlated, entries grow; what the cures do, and do not.

A row has one match: a key whose entries have correlation ρ with the query's. The other keys are independent of it. All
entries have standard deviation σ. Scores of every ρ and σ come from one draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead import stats
from levelhead.attention import observe
from levelhead.course.chapter import Chapter
from levelhead.course.numbers import Number, live, theory
from levelhead.course.results import claim, claim_number
from levelhead.lab.figures import parts
from levelhead.lab.measure import pair_logits
from levelhead.lab.theory import normal_density, over_queries

D_K, KEYS, ROWS, CAP = 64, 32, 512, 30
RHOS = tuple(i / 10 for i in range(10))
SIGMAS = (0.5, 1, 2, 4, 8, 16)
RHO, SIGMA, BIG = 0.5, 1, 8  # of the text
CURES = ("root", "width", "norm", "cap")
# What a step sets: ρ, σ, cure. The first step shows the chart over widths.
STEPS = ((RHO, SIGMA, "root"), (RHO, SIGMA, "root"), (0.0, 4, "root"), (RHO, 4, "norm"), (RHO, BIG, "cap"))
PAIRS = 16384  # queries with their match, whose spread the derivation measures
_PINNED = 0.1  # slope of the softcap below which a score counts as pinned
_MANY = 0.3  # share of pinned scores that is worth a word
_FOUND = 0.5  # weight of the match

Array = NDArray[Any]


@cache
def _drawn() -> tuple[Array, Array]:
    """Queries (rows, d_k), and as many independent keys for each: (rows, keys, d_k)."""
    rng = np.random.default_rng(0)
    q, z = rng.standard_normal((ROWS, D_K)), rng.standard_normal((ROWS, KEYS, D_K))
    return q.astype(np.float32), z.astype(np.float32)


@cache
def _scores(rho: float, scale: float | str) -> Array:
    """(rows, keys) in float64, σ = 1; the first key is the match."""
    q, z = _drawn()
    match = np.float32(rho) * q + np.float32(math.sqrt(1 - rho**2)) * z[:, 0]
    first = pair_logits(q, match, scale)[:, None]
    return np.concatenate([first, _others(scale)], axis=1).astype(np.float64)


@cache
def _others(scale: float | str) -> Array:
    q, z = _drawn()
    return pair_logits(np.broadcast_to(q[:, None], z.shape)[:, 1:], z[:, 1:], scale)


@cache
def match_spread(rho: float) -> tuple[float, float]:
    """The spread of the scores of a match, divided by √d_k, σ = 1, with its standard error."""
    q, z = np.random.default_rng(0).standard_normal((2, PAIRS, D_K)).astype(np.float32)
    match = np.float32(rho) * q + np.float32(math.sqrt(1 - rho**2)) * z
    away = pair_logits(q, match, 1 / math.sqrt(D_K)).astype(np.float64) - rho * math.sqrt(D_K)
    variance, error = parts.mean(away**2)
    return math.sqrt(variance), error / (2 * math.sqrt(variance))


@cache
def cell(cure: str, sigma: float, rho: float) -> dict[str, Any]:
    """A row with a match under one cure: means over the rows."""
    variance = sigma**2
    factor = {"norm": 1.0, "width": variance / math.sqrt(D_K)}.get(cure, variance)
    raw = _scores(rho, "cosine" if cure == "norm" else 1 / math.sqrt(D_K))
    capped: dict[str, Any] = {"softcap": float(CAP)} if cure == "cap" else {}
    # A score is a key of width 1 for the query 1.
    rows = observe(np.ones((ROWS, 1, 1, 1)), raw[:, None, :, None], scale=factor, **capped).rows
    s = factor * raw
    slope = np.ones_like(s)
    if capped:
        bent = np.tanh(s / CAP)
        s, slope = CAP * bent, 1 - bent**2
    p = np.exp(s - rows.logsumexp.reshape(ROWS, 1))
    mean, error = parts.mean(s[:, 0])
    saturated = float((rows.top1 >= stats.SATURATED_ROW).mean())
    gauge = parts.gauge("", float(rows.entropy.mean()) / math.log(KEYS), saturated)
    found = {
        "mean": mean,
        "error": error,
        "law": _law(cure, variance, rho),
        "others": float(s[:, 1:].std()),
        "match": float(p[:, 0].mean()),
        "top": float(rows.top1.mean()),
        "softmax": float(1 - rows.sum_p2.mean()),
        "left": float((p * (1 - p) * slope).sum(1).mean()),
        "pinned": float((slope < _PINNED).mean()),
        "level": gauge.level,
        "bubble": gauge.bubble,
        "entropy": gauge.normalised_entropy,
    }
    return found | {"verdict": _verdict(found, rho)}


def _verdict(found: Mapping[str, Any], rho: float) -> str:
    """What there is to say of a row; its level alone does not say whether it is right. Without correlation there is no
    match."""
    sure = found["level"] in ("saturated", "sharp")
    if found["pinned"] >= _MANY:
        return "pinned"
    if found["match"] >= _FOUND:
        return "found" if sure else "leads"
    if sure:
        return "other" if rho else "chance"
    return "flat" if found["level"] == "flat" else "open"


def _law(cure: str, variance: float, rho: float) -> float:
    """The mean score of the match in theory."""
    if cure == "norm":  # the mean of a cosine, to first order in 1/d_k
        return math.sqrt(D_K) * rho * (1 - (1 - rho**2) / (2 * D_K))
    mean = rho * variance * math.sqrt(D_K)
    if cure != "cap":
        return mean / math.sqrt(D_K) if cure == "width" else mean
    x = np.linspace(-6, 6, 201)
    share = normal_density(x, 0.0, 1.0) * (x[1] - x[0])

    def bent(norm: float) -> float:  # of one |q|, where the score is normal
        s = variance * norm * (rho * norm + math.sqrt(1 - rho**2) * x) / math.sqrt(D_K)
        return float(share @ (CAP * np.tanh(s / CAP)))

    return over_queries(D_K, bent)


def numbers() -> Mapping[str, Number]:
    grown, healthy = claim("C9a"), claim("C11a")
    widths: list[int] = grown["params"]["d_k"]
    draws = f"{ROWS} draws, seed 0"
    match = grown["details"]["weight of the match"]

    def weight(rule: str, at: int) -> Number:
        return claim_number("C9a", match[rule]["y"][at], stderr=match[rule]["stderr"][at])

    def mean(rule: str, at: int) -> Number:
        return claim_number(
            "C9a", grown["measured"]["mean logit"][rule][at], stderr=grown["stderr"]["mean logit"][rule][at]
        )

    def measured(cure: str, sigma: float, name: str, digits: int = 2) -> Number:
        return live(cell(cure, sigma, RHO)[name], draws, digits)

    def share(name: str) -> Number:
        return claim_number("C11a", healthy["measured"][name], 3, stderr=healthy["stderr"][name])

    spread, error = match_spread(RHO)
    return {
        "d_k": theory(D_K, "chosen"),
        "keys": theory(KEYS, "chosen"),
        "pairs": theory(PAIRS, "chosen"),
        "match_spread": live(spread, f"{PAIRS} draws, seed 0", 3),
        "match_error": live(error, f"{PAIRS} draws, seed 0", 1),
        "match_law": theory(math.sqrt(1 + RHO**2), "√(1 + 0.5²)", 3),
        "even": theory(1 / KEYS, "1/32"),
        "rho": theory(RHO, "chosen"),
        "sigma": theory(SIGMA, "chosen"),
        "big": theory(BIG, "chosen"),
        "cap": theory(CAP, "chosen"),
        "narrow": theory(widths[0], "chosen"),
        "wide": theory(widths[-1], "chosen"),
        "score_narrow": mean("1/sqrt(d_k)", 0),
        "score_wide": mean("1/sqrt(d_k)", -1),
        "level_narrow": mean("1/d_k", 0),
        "level_wide": mean("1/d_k", -1),
        "root_narrow": weight("1/sqrt(d_k)", 0),
        "root_wide": weight("1/sqrt(d_k)", -1),
        "width_narrow": weight("1/d_k", 0),
        "width_wide": weight("1/d_k", -1),
        "score": measured("root", SIGMA, "mean"),
        "norm_match": measured("norm", SIGMA, "match"),
        "grown": theory(STEPS[2][1], "chosen"),
        "chance_top": live(cell("root", STEPS[2][1], 0.0)["top"], draws),
        "root_match": measured("root", SIGMA, "match"),
        "root_big": measured("root", BIG, "match"),
        "cap_big": measured("cap", BIG, "match"),
        "cap_left": measured("cap", BIG, "left"),
        "cap_softmax": measured("cap", BIG, "softmax"),
        "slope": theory(1 - math.tanh(2) ** 2, "1 − tanh²(2)"),
        "one_hot": share("rows near one-hot"),
        "place": share("of those at one place"),
        "complaints": claim_number("C11a", healthy["measured"]["complaints"]),
    }


def data() -> Any:
    grown = claim("C9a")
    rules = {"nothing": "none", "root": "1/sqrt(d_k)", "width": "1/d_k"}
    columns = tuple(cell("root", SIGMA, RHO))
    return {
        "rhos": RHOS,
        "sigmas": SIGMAS,
        "steps": [{"rho": RHOS.index(rho), "sigma": SIGMAS.index(sigma), "cure": cure} for rho, sigma, cure in STEPS],
        "grid": {
            cure: [{name: [cell(cure, sigma, rho)[name] for rho in RHOS] for name in columns} for sigma in SIGMAS]
            for cure in CURES
        },
        "widths": grown["params"]["d_k"],
        "grown": {
            colour: {part: grown[part]["mean logit"][rule] for part in ("measured", "stderr", "theory")}
            for colour, rule in rules.items()
        },
    }


CHAPTER = Chapter(
    "attack",
    options=("same", "root", "width"),
    answer="root",
    claims=("C9a", "C11a"),
    numbers=numbers,
    data=data,
    steps=len(STEPS),
)

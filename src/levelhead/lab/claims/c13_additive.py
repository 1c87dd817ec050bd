"""C13: additive attention needs no scale, and is slower. Both halves are measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import numpy as np

from levelhead.additive import additive_attention
from levelhead.lab import theory
from levelhead.lab.additive_race import Race, race
from levelhead.lab.claim import Claim, Outcome, Params, Plot, Tell, Verdict
from levelhead.lab.measure import Array, Curve, Setting, batch_sizes, curve, over_widths, settings
from levelhead.lab.settings import ascending, whole
from levelhead.lab.verdict import BOUND, agree

BAND = 0.05  # of the mean over d_k: how far entropy may drift
CLOCK = {"time_d_k": 1, "rounds": 3, "threads": 1}  # the parameters of a race, with their smallest values
ROOM = 0.1  # of the variance, whose batches are skewed in narrow heads: their error is, too


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    width = whole("width", params["width"], 1)
    lengths = [int(x) for x in ascending("lengths", params["lengths"])]
    clock = [whole(name, params[name], least) for name, least in CLOCK.items()]
    entropy, variance = _additive(params, seed, lambda x, words: tell(x / 4, words), fan_in=True)
    bare, _ = _additive(params, seed, lambda x, words: tell((1 + x) / 4, words), fan_in=False)
    dot = over_widths(params, seed, lambda x, words: tell((2 + x) / 4, words), "none")["entropy"]
    races = []
    for done, length in enumerate(lengths):
        tell((3 + done / len(lengths)) / 4, f"timing {length} tokens")
        races.append(race(length, width, *clock))
    expected = [_variance(int(d_k)) for d_k in variance.x]
    stable = agree(variance, expected, relative=ROOM) and _drift(entropy) <= BAND
    stable = stable and _drift(dot) > BAND  # where a dot product would have needed the scale
    ratios = [one.ratio for one in races]
    return Outcome(
        theory={
            "score variance": expected,
            "entropy": [theory.expected_softmax(x**0.5, params["keys"]).entropy for x in expected],
            "time of additive over dot product": "above 1",
        },
        measured={
            "score variance": list(variance.y),
            "entropy": list(entropy.y),
            "time of additive over dot product": [math.exp(x) for x, _ in ratios],
        },
        stderr={
            "score variance": list(variance.stderr),
            "entropy": list(entropy.stderr),
            "time of additive over dot product": [math.exp(x) * error for x, error in ratios],
        },
        verdict=_verdict(stable, ratios),
        details={
            "entropy": entropy.json(),
            "variance": variance.json(),
            "entropy, W of variance 1": bare.json(),
            "entropy, dot product unscaled": dot.json(),
            "entropy, dot product by √d_k": over_widths(params, seed, _silent, "1/sqrt(d_k)")["entropy"].json(),
            "seconds": _seconds(lengths, races),
        },
    )


def _verdict(stable: bool, ratios: list[tuple[float, float]]) -> Verdict:
    slower = [x > BOUND * error for x, error in ratios]
    faster = [x < -BOUND * error for x, error in ratios]
    if not all(a or b for a, b in zip(slower, faster, strict=True)):
        return "undecided"
    if stable and all(slower):
        return "confirmed"
    return "caveat" if stable or all(slower) else "refuted"


def _additive(params: Params, seed: int, tell: Tell, *, fan_in: bool) -> tuple[Curve, Curve]:
    """Entropy of the weights, and variance of the scores within a row, over d_k.

    The weights are drawn anew for each batch: they are what the expectation runs over too.
    """
    chosen = settings(params, seed, "none")
    batches, queries = batch_sizes(params)
    entropies, variances = [], []
    for done, one in enumerate(chosen):
        tell(done / len(chosen), f"additive attention, d_k = {one.d_k}")
        rngs = [np.random.default_rng((seed, one.d_k, batch)) for batch in range(batches)]
        p = np.stack([_weights(rng, one, queries, params["width"], fan_in) for rng in rngs])
        log = np.log(p)
        entropies.append(-(p * log).sum(-1).mean(-1))
        # ln p is the score less the row's logsumexp.
        variances.append(log.var(-1, ddof=1).mean(-1))
    widths = [one.d_k for one in chosen]
    return curve(widths, entropies), curve(widths, variances)


def _weights(rng: np.random.Generator, one: Setting, queries: int, width: int, fan_in: bool) -> Array:
    q, k = rng.standard_normal((queries, one.d_k)), rng.standard_normal((one.keys, one.d_k))
    w_q, w_k = rng.standard_normal((2, width, one.d_k)) / (math.sqrt(one.d_k) if fan_in else 1.0)
    v = rng.standard_normal(width)
    v /= np.linalg.norm(v)  # what C13 holds fixed, and C13a lets grow
    return np.asarray(additive_attention(q, k, np.eye(one.keys), w_q, w_k, v))


def _variance(d_k: int) -> float:
    """E Var_b tanh(a + b): over keys, of one term of the score; a, b are normal with the variances
    |q|²/d_k and |w|²/d_k, w being a row of W_k."""
    x = np.linspace(-7, 7, 141)
    share = np.exp(-x * x / 2)
    share /= share.sum()

    def variance(query: float, row: float) -> float:
        values = np.tanh((query * x[:, None] + row * x) / math.sqrt(d_k))
        return float(share @ (values**2 @ share - (values @ share) ** 2))

    def over_rows(query: float) -> float:
        return theory.over_queries(d_k, partial(variance, query))

    return theory.over_queries(d_k, over_rows)


def _drift(over_d_k: Curve) -> float:
    y = np.asarray(over_d_k.y)
    return float(np.abs(y / y.mean() - 1).max())


def _seconds(lengths: list[int], races: list[Race]) -> Mapping[str, object]:
    names = sorted({name for one in races for name in one.seconds})
    return {"x": lengths, **{name: [one.seconds.get(name) for one in races] for name in names}}


def _silent(share: float, words: str) -> None:
    """This part takes too little time to be reported."""


CLAIM = Claim(
    id="C13",
    claim="Additive attention does not need the scale (tanh bounds each term), but is slower.",
    derivation=(
        "s = Σ v_i tanh(W_q q + W_k k)_i. With rows of W of variance 1/d_k (as every Linear\n"
        "starts) the arguments are normal with variance 2 at any d_k; over keys a term has\n"
        "variance E_a Var_b tanh(a + b), and s has ‖v‖² times that. With W of variance 1 tanh\n"
        "only becomes a sign: the spread stays below ‖v‖, though tanh then passes little\n"
        "gradient on; the 1/√d_k has moved into W. A pair of tokens costs A tanh and A\n"
        "multiply-adds instead of d_k multiply-adds, and a tanh is worth about ten of those."
    ),
    criterion=(
        "confirmed: over d_k the variance of additive scores is as theory says (4 standard "
        "errors, or 10 %) and entropy stays within 5 % of its mean, where that of unscaled dot "
        "products does not; and the fastest additive implementation takes longer than the "
        "fastest dot product at every length by more than 4 standard errors; caveat: one half "
        "holds; undecided: the clock cannot tell them apart; else refuted"
    ),
    expected="confirmed",
    quick={
        "d_k": [4, 16, 64, 256, 1024],
        "keys": 256,
        "batches": 128,
        "queries": 8,
        "width": 64,
        "time_d_k": 64,
        "lengths": [128, 512],
        "rounds": 5,
        "threads": 1,
    },
    full={"batches": 256, "lengths": [64, 128, 256, 512, 1024, 2048], "rounds": 9},
    experiment=experiment,
    alone=True,
    plots=(
        Plot(
            "Variance of additive scores",
            "d_k",
            "variance",
            {"": ("measured", "score variance")},
            along=("params", "d_k"),
            log="x",
        ),
        Plot(
            "Entropy",
            "d_k",
            "H in nats",
            {
                "additive": ("measured", "entropy"),
                "dot product, undivided": ("details", "entropy, dot product unscaled"),
            },
            along=("params", "d_k"),
            log="x",
        ),
        Plot(
            "Time",
            "tokens",
            "additive over dot product",
            {"": ("measured", "time of additive over dot product")},
            along=("params", "lengths"),
            log="xy",
        ),
    ),
)

"""C10: the root of the model's width as a divisor: it shrinks too much, and only ever that."""

from __future__ import annotations

from math import sqrt

import numpy as np

from levelhead.call import scaling
from levelhead.lab import theory
from levelhead.lab.claim import Claim, Outcome, Params, Plot, Tell, Verdict
from levelhead.lab.measure import Setting, batch_sizes, batches, curve, gather, statistics
from levelhead.lab.settings import ascending
from levelhead.lab.verdict import BOUND, agree


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    widths = [int(x) for x in ascending("widths", params["widths"])]
    setting = Setting(d_k=params["d_k"], keys=params["keys"], seed=seed)
    batch_count, queries = batch_sizes(params)
    measured = []
    for done, width in enumerate(widths):
        tell(done / len(widths), f"divided by √{width}")
        rule = scaling.rule("1/sqrt(d)", width=width)
        measured.append(gather(statistics(q, k, rule) for q, k in batches(setting, batch_count, queries)))
    heads = [width / setting.d_k for width in widths]
    std = curve(heads, [one["std"] for one in measured])
    entropy = curve(heads, [one["entropy"] for one in measured])
    root = [1 / sqrt(number) for number in heads]
    rows = [theory.softmax_of(setting.d_k, setting.keys, 1 / sqrt(width)) for width in widths]
    right = agree(std, root, relative=0.005) and agree(entropy, [row.entropy for row in rows], relative=0.003)
    away = (np.asarray(std.y) - 1) / np.asarray(std.stderr)
    under, over = bool(np.any(away > BOUND)), bool(np.any(away < -BOUND))
    verdict: Verdict = "refuted"
    if right and over:
        verdict = "confirmed" if under else "caveat"
    return Outcome(
        theory={"logit std": root, "entropy": [row.entropy for row in rows]},
        measured={"logit std": list(std.y), "entropy": list(entropy.y)},
        stderr={"logit std": list(std.stderr), "entropy": list(entropy.stderr)},
        verdict=verdict,
        details={"std": std.json(), "entropy": entropy.json(), "heads": heads},
    )


CLAIM = Claim(
    id="C10",
    claim=("Dividing by √d, d the model's width, under- or over-corrects, depending on the number of heads."),
    derivation=(
        "d = heads · d_k, so q·k/√d has standard deviation √(d_k/d) = 1/√heads: right with one\n"
        "head, and smaller with more. It never exceeds 1, for d is never below d_k. So it can\n"
        "only over-correct, by √heads: with d = 12288 and 96 heads of d_k = 128, by 9.8, and H\n"
        "≈ ln n - 1/(2 heads)."
    ),
    criterion=(
        "confirmed: the logits' standard deviation is 1/√heads within 4 standard errors and 0.5 %, "
        "entropy as theory says within 4 and 0.3 %, and the deviation is below 1 by more than 4 "
        "errors at some widths and above 1 at others; caveat: it is below 1 and "
        "never above; else refuted"
    ),
    expected="caveat",
    quick={"d_k": 128, "widths": [128, 512, 1024, 2048, 4096, 12288], "keys": 256, "batches": 128, "queries": 8},
    full={"batches": 1024},
    experiment=experiment,
    plots=(
        Plot(
            "Spread of logits, divided by √d",
            "heads",
            "σ",
            {"": ("measured", "logit std")},
            along=("details", "heads"),
            log="x",
        ),
        Plot(
            "Entropy, divided by √d", "heads", "H in nats", {"": ("measured", "entropy")}, ("details", "heads"), log="x"
        ),
    ),
)

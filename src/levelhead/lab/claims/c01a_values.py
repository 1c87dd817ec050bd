"""C1a: values have no part in the scores. Their width and their numbers change, no logit does."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.attention import observe
from levelhead.lab.claim import Claim, Outcome, Params, Tell, Verdict
from levelhead.lab.settings import numbers, whole

DERIVATION = """\
One of the notes blames the width of V for large scores, too. But s = q·k · scale has no v in
it: V comes in after the softmax, output = Σ pⱼ vⱼ. So other values, or wider ones, leave every
logit as it is, to the bit. Statistics over many keys are sums: with other values of the same
width they keep their bits as well; with another width the kernel cuts the keys into other
tiles, adds in another order, and sums may differ by rounding. Control: a wider K does change
the logits."""

ROUNDING = 1e-5  # relative, of float32 sums over some hundred keys in another order
QUERIES = 32
FACTORS = (1.0, -1000.0)  # what values are multiplied by


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    widths = numbers("widths", params["widths"], 1, 1 << 14, least=2)
    tokens = whole("tokens", params["tokens"], 2, 4096)
    d_k = whole("d_k", params["d_k"], 1, 4096)
    random = np.random.default_rng(seed)
    q, k = _queries_and_keys(random, tokens, d_k)
    wider_q, wider_k = _queries_and_keys(random, tokens, 2 * d_k)
    logits, sums = _logits(q, k, None), _statistics(q, k, None)
    changed, values_bits, width_gap = 0, 0, 0.0
    for number, width in enumerate(widths):
        tell(number / len(widths), f"values of width {width}")
        v = random.standard_normal((tokens, width), np.float32)
        same_width = _statistics(q, k, v)
        for factor in FACTORS:
            changed += _differing(_logits(q, k, factor * v), logits)
            changed_sums = _statistics(q, k, factor * v)
            values_bits += sum(_differing(changed_sums[name], same_width[name]) for name in changed_sums)
            width_gap = max(width_gap, *(_gap(changed_sums[name], sums[name]) for name in changed_sums))
    control = _differing(_logits(wider_q, wider_k, None), logits)
    return Outcome(
        theory={
            "logits changed by V": 0,
            "statistics changed by other values": 0,
            "statistics, other width: largest relative change": f"rounding, under {ROUNDING:g}",
            "logits changed by a wider K": logits.size,
        },
        measured={
            "logits changed by V": changed,
            "statistics changed by other values": values_bits,
            "statistics, other width: largest relative change": width_gap,
            "logits changed by a wider K": control,
        },
        stderr=None,
        verdict=_verdict(changed + values_bits, width_gap, control / logits.size),
        details={"compared": len(widths) * len(FACTORS) * logits.size},
    )


def _queries_and_keys(random: np.random.Generator, tokens: int, d_k: int) -> tuple[NDArray[Any], NDArray[Any]]:
    q, k = (random.standard_normal((n, d_k), np.float32) for n in (QUERIES, tokens))
    return q, k


def _verdict(changed: int, gap: float, control: float) -> Verdict:
    if control < 0.9:  # a comparison that sees nothing proves nothing
        return "undecided"
    return "refuted" if changed == 0 and gap < ROUNDING else "confirmed"


def _logits(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any] | None) -> NDArray[Any]:
    """Every single logit (T, S) while these values are attended to: each pair alone in its row."""
    T, S = len(q), len(k)
    pairs_q = np.broadcast_to(q[:, None, None, None, :], (T, S, 1, 1, q.shape[-1]))
    pairs_k = np.broadcast_to(k[None, :, None, None, :], (T, S, 1, 1, k.shape[-1]))
    pairs_v = None
    if v is not None:
        pairs_v = np.broadcast_to(v[None, :, None, None, :], (T, S, 1, 1, v.shape[-1]))
    observation = observe(pairs_q, pairs_k, pairs_v, scale="none")
    return np.asarray(observation.logsumexp)[..., 0, 0]


def _statistics(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any] | None) -> dict[str, Any]:
    rows = observe(q, k, v).rows
    return {field.name: np.asarray(getattr(rows, field.name)) for field in fields(rows)}


def _differing(a: NDArray[Any], b: NDArray[Any]) -> int:
    """How many numbers have other bits."""
    return int(np.sum(a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}")))


def _gap(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30))


CLAIM = Claim(
    id="C1a",
    claim="The scores also grow with the width of V.",
    derivation=DERIVATION,
    criterion=(
        "Refuted if, for values of every width and size, no logit and with equal width no "
        "statistic changes a bit, and sums over keys change by rounding alone (1e-5); confirmed "
        "otherwise; undecided if a wider K does not change at least nine logits in ten, which "
        "is the control."
    ),
    expected="refuted",
    quick={"widths": [1, 16, 64, 256, 1024], "tokens": 200, "d_k": 64},
    full={"widths": [1, 16, 64, 256, 1024, 4096], "tokens": 500},
    experiment=experiment,
)

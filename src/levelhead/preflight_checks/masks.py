"""Checks of masks, from the keys that each query sees in the watched calls.

A mask is judged only where its form says what was meant: causal but for one token, the other half of the square, or a
constant in place of hidden logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from levelhead.preflight_checks.calls import SeenCall
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.result import finding

CAUSAL, NEXT, NOT_SELF, INVERTED = "causal", "sees the next token", "does not see itself", "inverted mask"
FILLED = "mask without effect"


class Form(NamedTuple):
    """What a square mask looks like."""

    name: str | None
    why: str = ""


def form(seen: SeenCall) -> Form:
    """Of one call; None: no form that says what was meant."""
    shown = seen.shown() if seen.square else None
    if shown is None or not shown.any():
        return Form(None)
    T = shown.shape[0]
    i, j = torch.arange(T)[:, None], torch.arange(T)[None]
    shown = shown.cpu()
    inner = slice(1, T - 1)  # the first and last row may see nothing, and then all
    if shown.all():
        return Form(FILLED, "") if _filled(seen) is not None else Form(None)
    later, own, earlier = (_some(shown, x)[inner] for x in (j > i, j == i, j < i))
    if not later.any():
        if own.all():
            return Form(CAUSAL)
        return Form(NOT_SELF) if not own.any() and earlier.all() else Form(None)
    further = _some(shown, j > i + 1)[1 : T - 2]
    if T > 3 and not further.any() and later.all() and own.all() and earlier.all():
        return Form(NEXT)
    if later.all() and not earlier.any():
        return Form(INVERTED)
    return Form(None)


def _some(shown: Tensor, where: Tensor) -> Tensor:
    return (shown & where).any(1)


def _filled(seen: SeenCall) -> float | None:
    """The small constant that stands in all later logits, where -1e9 was meant."""
    if seen.logits is None or not seen.call.ready:
        return None
    T = seen.logits.shape[2]
    later = torch.ones(T, T, dtype=torch.bool, device=seen.logits.device).triu(1)
    values, others = (set(seen.logits[..., chosen].flatten().tolist()) for chosen in (later, ~later))
    value = float(next(iter(values), 1.0))
    return value if len(values) == 1 and len(others) > T and abs(value) < 1.0 else None


_WHY = {
    NEXT: (
        "Every query sees one key beyond its own: the mask begins one diagonal too late, so the model reads the token "
        "that it must predict.",
        "Use tril() or triu(diagonal=1) for what is hidden; not tril(1), not triu(2).",
    ),
    NOT_SELF: (
        "No query sees its own key: the mask begins one diagonal too early, and the first row sees nothing.",
        "Use triu(diagonal=1) for what is hidden; triu() hides the diagonal.",
    ),
    INVERTED: (
        "Queries see later keys and no earlier ones: the mask is inverted or transposed.",
        "In scaled_dot_product_attention True means visible; in nn.MultiheadAttention and masked_fill it means hidden.",
    ),
    FILLED: (
        "All later logits are one small constant: the mask fills with 1e-9 where -1e9 was meant, and hides nothing.",
        "Fill with -inf, or torch.finfo(dtype).min.",
    ),
}


def forms(flight: Flight, calls: Sequence[SeenCall], meant: bool | None) -> str | None:
    """Judges the form of every mask; returns why the model should be causal, if something says so. `meant`: what the
    user says about that."""
    name, changed = "form of masks", "which keys each query sees"
    if meant is False:
        flight.unknown(name, changed, "causal=False: a look-ahead or a reversed mask may be meant")
        return None
    found = {seen.module: form(seen).name for seen in calls if seen.square}
    wrong = {module: kind for module, kind in found.items() if kind in _WHY}
    causal = [module for module, kind in found.items() if kind == CAUSAL]
    if wrong:
        notes = [finding(kind, "error", module, *_WHY[kind]) for module, kind in wrong.items() if kind]
        flight.failed(name, changed, ", ".join(sorted({kind for kind in wrong.values() if kind})), *notes)
    elif found:
        flight.passed(name, changed, f"{len(causal)} of {len(found)} modules are causal, no mask has a wrong form")
    else:
        flight.unknown(name, changed, "no call with as many queries as keys was seen")
    if wrong:
        return f"its masks have the form of causal ones ({next(iter(wrong.values()))})"
    if causal and 2 * len(causal) > len(found):
        return f"{len(causal)} of {len(found)} of its attention modules are causal"
    return None

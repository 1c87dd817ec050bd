"""Checks of masks, from the keys that each query sees in the watched calls.

A mask is judged only where its form says what was meant: causal but for one token, the other half of the square, or a
constant in place of hidden logits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from levelhead.preflight_checks import own_key
from levelhead.preflight_checks.calls import SeenCall
from levelhead.preflight_checks.causality import Claim
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.result import finding

CAUSAL, NEXT, NOT_SELF, INVERTED = "causal", "sees the next token", "does not see itself", "inverted mask"
FILLED, PLUS, TOP_LEFT = "mask without effect", "mask with the wrong sign", "causal from the first key of a cache"
START = "causal at the first tokens only"
_HUGE = 5e3  # own: a logit beyond was filled in or added by a mask
_NOTHING = 16.0  # own: e^-16; a fill that is no further below the visible logits leaves them a share


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
    if _plus(seen):
        return Form(PLUS)
    if shown.all():
        return Form(FILLED) if _filled(seen) or _added(seen) else Form(None)
    if torch.equal(shown, torch.ones_like(shown).tril().flip(1)):
        return Form(INVERTED)
    if _ends_early(shown):
        return Form(START)
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


def _ends_early(shown: Tensor) -> bool:
    """Whether a smaller causal mask stands in a square that is visible elsewhere: one kept of shorter inputs."""
    T = len(shown)
    for n in range(4, T - 1):
        smaller = torch.ones_like(shown)
        smaller[:n, :n] = smaller[:n, :n].tril()
        if torch.equal(shown, smaller):
            return True
    return False


def _some(shown: Tensor, where: Tensor) -> Tensor:
    return (shown & where).any(1)


def _filled(seen: SeenCall) -> bool:
    """Whether one constant stands in all later logits and hides nothing: 1e-9 where -1e9 was meant."""
    if seen.logits is None or not seen.call.ready:
        return False
    later = _later(seen.logits)
    values, others = (set(seen.logits[..., chosen].flatten().tolist()) for chosen in (later, ~later))
    value = float(next(iter(values), math.nan))
    return len(values) == 1 and len(others) > len(later) and abs(value) < _HUGE and value > min(others) - _NOTHING


def _added(seen: SeenCall) -> bool:
    """Whether one small number is added to all later logits, or to all others: a mask of 0 and 1, or times 1e-9."""
    bias = additions(seen)
    if bias is None:
        return False
    later = _later(bias)
    first, second = (bias[..., chosen] for chosen in (later, ~later))
    near = 1e-4 if not seen.call.ready else 2e-3
    if any(float(x.amax() - x.amin()) > near for x in (first, second)):
        return False
    return near < abs(float(first.mean() - second.mean())) < _NOTHING


def additions(seen: SeenCall) -> Tensor | None:
    """(B, H, T, S): what is added to the scaled products; None: not known."""
    if not seen.call.ready:
        mask = seen.call.scoring.mask
        if mask is None or not mask.is_floating_point():
            return None
        return torch.broadcast_to(mask.double(), (*seen.call.q.shape[:3], seen.keys))
    if seen.logits is None or not seen.whole:
        return None
    products = seen.q.double() @ seen.k.double().repeat_interleave(seen.q.shape[1] // seen.k.shape[1], 1).mT
    x, y = (z[..., _later(z).logical_not()].flatten() for z in (products, seen.logits.double()))
    dx, dy = x - x.mean(), y - y.mean()
    slope = (dx * dy).sum() / dx.square().sum().clamp(min=1e-30)
    return seen.logits.double() - slope * products


def _plus(seen: SeenCall) -> bool:
    """Whether hidden keys got a large number in place of a small one, the same ones in every head."""
    if seen.logits is None:
        return False
    huge = seen.logits.nan_to_num(nan=0.0, posinf=0.0) > _HUGE
    return bool(huge.any()) and not bool(huge.all(-1).any()) and bool((huge == huge[:, :1]).all())


def _later(x: Tensor) -> Tensor:
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)


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
        "All later logits are filled with one small constant (1e-9 where -1e9 was meant), or get one added (a mask of "
        "0 and 1 that is no bool): the mask does not hide them.",
        "Fill with -inf, or torch.finfo(dtype).min; give scaled_dot_product_attention a bool mask.",
    ),
    PLUS: (
        "Hidden keys get a large positive logit: the sign of the mask's number is wrong, so queries see only what "
        "is to be hidden.",
        "Fill with, or add, -inf or torch.finfo(dtype).min.",
    ),
    START: (
        "The mask is causal among the first tokens, and everything else is visible: it was made for shorter inputs and "
        "kept.",
        "Make the mask for the number of tokens of each call, or for the longest input.",
    ),
    TOP_LEFT: (
        "There are more keys than queries, and query t sees keys 0 … t: the mask does not count the cached keys in "
        "front, and the last keys, the newest ones, are never seen.",
        "Hide keys with key > query + (keys - queries); is_causal=True of torch begins at the first key. Of one new "
        "token nothing is hidden.",
    ),
}


def forms(flight: Flight, calls: Sequence[SeenCall], meant: bool | None) -> Claim | None:
    """Judges the form of every mask; returns why the model should be causal, if something says so. `meant`: what the
    user says about that."""
    name, changed = "form of masks", "which keys each query sees"
    if meant is False:
        flight.unknown(name, changed, "causal=False: a look-ahead or a reversed mask may be meant")
        return None
    found = {seen.module: form(seen).name for seen in calls if seen.square and not seen.call.crossed}
    found |= {seen.module: kind for seen in calls if (kind := _with_cache(seen)) is not None}
    found = _both_directions(found)
    hidden = [module for module, kind in found.items() if kind == NOT_SELF]
    found |= dict.fromkeys(own_key.last_resort(flight, hidden), CAUSAL)
    wrong = {module: kind for module, kind in found.items() if kind in _WHY}
    causal = [module for module, kind in found.items() if kind == CAUSAL]
    if wrong:
        notes = [finding(kind, "error", module, *_WHY[kind]) for module, kind in wrong.items() if kind]
        flight.failed(name, changed, ", ".join(sorted({kind for kind in wrong.values() if kind})), *notes)
    elif found:
        flight.passed(name, changed, f"{len(causal)} of {len(found)} modules are causal, no mask has a wrong form")
    else:
        flight.unknown(name, changed, "no call with as many queries as keys was seen")
    return _claim(found, wrong)


def _claim(found: Mapping[str, str | None], wrong: Mapping[str, str | None]) -> Claim | None:
    """A stack of layers most of which are causal: the others should be. Encoders, pooling heads and the like beside
    it may be anything."""
    if wrong:
        why = f"its masks have the form of causal ones ({next(iter(wrong.values()))})"
        return Claim(why, frozenset(found if set(found.values()) <= {CAUSAL, *_WHY} else wrong))
    stacks = [group for group in _stacks(found).values() if 4 * _count(group, found, CAUSAL) >= 3 * len(group)]
    if not stacks:
        return None
    inside = [module for group in stacks for module in group]
    why = f"{_count(inside, found, CAUSAL)} of {len(inside)} of its attention modules are causal"
    return Claim(why, frozenset(inside))


def _both_directions(found: Mapping[str, str | None]) -> dict[str, str | None]:
    """Without the masks that look backwards where as many look forwards: a model of both directions."""
    names = list(found)
    backward, forward = (_count(names, found, kind) for kind in (INVERTED, CAUSAL))
    if not backward or backward != forward:
        return dict(found)
    return {module: None if kind in (INVERTED, CAUSAL) else kind for module, kind in found.items()}


def _stacks(modules: Iterable[str]) -> dict[str, list[str]]:
    """Modules whose names differ by numbers only."""
    groups: dict[str, list[str]] = {}
    for module in modules:
        groups.setdefault(re.sub(r"\d+", "#", module), []).append(module)
    return groups


def _count(modules: Sequence[str], found: Mapping[str, str | None], kind: str) -> int:
    return sum(found[module] == kind for module in modules)


def deliberate(seen: SeenCall) -> bool:
    """Whether later keys are visible in part: a prefix or blocks, which is a design."""
    shown = seen.shown() if seen.square else None
    if shown is None:
        return False
    later = torch.ones_like(shown).triu(1)
    return bool(shown[later].any()) and not bool(shown[later].all())


def _with_cache(seen: SeenCall) -> str | None:
    """Fewer queries than keys: a cache is in front. A causal mask that begins at the first key does not count it: no
    query ever sees the last keys, though these hold something. One that ends behind the last key looks ahead."""
    T, S = seen.queries, seen.keys
    shown = seen.shown() if 2 < T < S and not seen.call.crossed and seen.whole else None
    if shown is None:
        return None
    ones = torch.ones_like(shown)
    if torch.equal(shown, ones.tril()) and bool((seen.k[:, :, T:].abs().amax((1, 3)) > 0).all()):
        return TOP_LEFT
    return NEXT if torch.equal(shown, ones.tril(S - T + 1)) else None

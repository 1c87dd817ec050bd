"""Decoding behind a cache: a token read on its own must get what a pass over the whole text gives it.

Judged of causal models. Every module's output for the token is compared; the calls of the first one that differs say
why: its query or key is turned for another place, keys are missing, other keys are hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from levelhead.errors import LevelheadError
from levelhead.preflight_checks.cache_steps import Steps, steps
from levelhead.preflight_checks.calls import SeenCall, seen_calls
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.passes import Part, Tape, distance, taped, taped_parts
from levelhead.preflight_checks.places import Grid
from levelhead.preflight_checks.result import finding

NAME, CHANGED, KIND = "cached decoding", "tokens read one by one behind a cache", "cached decoding differs"
_TIMES = 3  # tokens that are read one by one
# Shares of the largest number: what a module may differ by (kernels for one query sum in another order, state-space
# layers have another formula), and what the model's output must differ by.
_NEAR = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 2e-2}
_SEEN = {torch.float64: 1e-8, torch.float32: 3e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def check(flight: Flight) -> None:
    """Compares the outputs for single tokens with those of the whole pass."""
    batch = flight.batch.without_padding()
    found = steps(batch)
    if isinstance(found, str):
        return flight.unknown(NAME, CHANGED, found)
    if any(check.name == "causality" and check.verdict != "passed" for check in flight.checks):
        return flight.unknown(NAME, CHANGED, "the model is not known to be causal: a cache may change its results")
    if found.tokens < _TIMES + 2 or (batch.padding_mask() is not None and not batch.unpadded(found.stream).all()):
        return flight.unknown(NAME, CHANGED, "too few tokens, or which of them are padding is not known")
    first = min(found.tokens - _TIMES, max(2, found.tokens // 2))
    whole = taped(found.batch)
    try:
        tapes = taped_parts(batch, _parts(found, first, _TIMES))[1:]
    except LevelheadError as error:
        return flight.unknown(NAME, CHANGED, f"a pass behind a cache failed: {error}"[:300])
    compared = [_compared(whole, tape, found, first + n) for n, tape in enumerate(tapes)]
    if None in compared:
        return flight.unknown(NAME, CHANGED, "no output has a place for every token")
    wrong = next((one for one in compared if one is not None and one.wrong), None)
    if wrong is None:
        return flight.passed(NAME, CHANGED, f"tokens {first} … {first + _TIMES - 1} got what the whole text gives them")
    reason = _reason(found, first, wrong)
    if reason is None:
        why = "outputs differ, and no call says why: the model keeps no cache, or reads more than these tokens"
        return flight.unknown(NAME, CHANGED, why)
    if _generates_alike(found, first, wrong):
        return flight.unknown(NAME, CHANGED, "outputs differ, but not in generate(), which prepares more arguments")
    why = f"Token {wrong.token}, read behind a cache, gets other results than in a pass over the whole text: {reason}."
    advice = "Count the cached tokens in positions and masks, and keep keys as they are at the product."
    what = f"token {wrong.token} moved by {wrong.size:.2g} of the largest output"
    fault = finding(KIND, "error", wrong.module, why, advice, change=wrong.size, token=float(wrong.token))
    return flight.failed(NAME, CHANGED, what, fault)


def _parts(found: Steps, first: int, then: int) -> list[Part]:
    """What each pass is called with: the first tokens, then one by one."""
    ends = [(0, first), *((t, t + 1) for t in range(first, first + then))]
    return [partial(found.part, start, end) for start, end in ends]


# ---- what differs


@dataclass(frozen=True)
class _Compared:
    """One token of the whole pass and the same token behind a cache."""

    size: float  # of the model's output, as a share of the largest
    wrong: bool
    module: str  # the first that differs where its inputs do not
    token: int


def _compared(whole: Tape, part: Tape, found: Steps, t: int) -> _Compared | None:
    """None: no output has a place for every token."""
    first: str | None = None
    size, dtype = None, torch.float32
    for key, new in part.entries.items():
        old = whole.entries.get(key)
        pairs = [] if old is None else _at(old.outputs, new.outputs, found, t)
        if old is None or not pairs:
            continue
        size, dtype = _size(pairs), pairs[0][0].dtype
        near = _NEAR.get(dtype, 1e-3)
        if first is None and size > near:
            first = key[0] if _size(_at(old.inputs, new.inputs, found, t)) <= near / 10 else None
    if size is None:
        return None
    wrong = size > _NEAR.get(dtype, 1e-3) or (first is not None and size > _SEEN.get(dtype, 3e-5))
    return _Compared(size, wrong, first or "", t)


def _at(old: list[Tensor], new: list[Tensor], found: Steps, t: int) -> list[tuple[Tensor, Tensor, float]]:
    """Pairs of numbers for one token, and the largest number."""
    rows, tokens = found.batch.sizes(found.stream)
    pairs = []
    for a, b in zip(old, new, strict=False):
        x, y = Grid(rows, tokens).by_token(a), Grid(rows, 1).by_token(b)
        if x is not None and y is not None and x.shape[2] == y.shape[2]:
            pairs.append((x[:, t], y[:, 0], float(a.double().nan_to_num(posinf=0.0, neginf=0.0).abs().max())))
    return pairs


def _size(pairs: list[tuple[Tensor, Tensor, float]]) -> float:
    return max((distance(*pair) for pair in pairs), default=0.0)


# ---- why


def _reason(found: Steps, first: int, wrong: _Compared) -> str | None:
    """What is wrong in the calls of the first module; None: there is no cache at all, or nothing shows it."""
    marks: list[int] = []
    every = _calls(found, _parts(found, first, wrong.token - first + 1), marks)
    whole = _calls(found, [lambda before: found.batch], [])
    behind = every[marks[-1] :]
    alone = behind and all(call.keys == call.queries for call in behind if not call.call.crossed)
    if alone:
        return None
    pairs = [(old, new) for new in behind if not new.call.crossed for old in whole if old.module == new.module]
    pairs = [(old, new) for old, new in pairs if (old.queries, new.queries) == (found.tokens, 1)]
    for old, new in pairs:
        if new.module == wrong.module or (wrong.module and new.module.startswith(f"{wrong.module}.")):
            return _of_calls(old, new, wrong.token)
    if wrong.module:
        return "this module is the first whose output differs"
    t, near = wrong.token, 10 * _NEAR.get(behind[0].q.dtype, 1e-3) if behind else 0.0
    if pairs and pairs[0][0].whole and _far(pairs[0][0].q[:, :, t], pairs[0][1].q[:, :, 0]) > near:
        return "what enters its layers differs already: positions do not count the cached tokens"
    return None


def _calls(found: Steps, parts: list[Part], marks: list[int]) -> list[SeenCall]:
    return seen_calls(found.batch, parts=parts, marks=marks)[1]


def _of_calls(old: SeenCall, new: SeenCall, t: int) -> str:
    n = t + 1
    if new.keys < n:
        return f"its query sees {new.keys} keys, not {n}: the cache is not read, or lost some"
    if not (old.whole and new.whole):
        return "its attention differs"
    near = 10 * _NEAR.get(new.q.dtype, 1e-3)
    for a, b, what in ((old.q[:, :, t], new.q[:, :, 0], "query"), (old.k[:, :, t], new.k[:, :, t], "key")):
        if _far(a, b) > near:
            turned = _far(a.norm(dim=-1), b.norm(dim=-1)) < near
            place = "is turned for another place: RoPE does not count the cached tokens"
            return f"its {what} {place if turned else 'differs'}"
    if _far(old.k[:, :, :t], new.k[:, :, :t]) > near:
        return "the cached keys are not those of the whole text (turned twice, or not at all)"
    before, after = old.hidden(), new.hidden()
    if before is not None and after is not None and not torch.equal(before[:, :, t, :n], after[:, :, 0, :n]):
        return "other keys are hidden from its query: the mask does not count the cached tokens"
    return "the cached values, or what is done behind the softmax, differ"


def _far(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return 1.0
    return float((a.double() - b.double()).abs().max()) / max(float(a.double().abs().max()), 1e-30)


def _generates_alike(found: Steps, first: int, wrong: _Compared) -> bool:
    """Whether a Hugging Face model's own loop gives the same logits with and without a cache: there the arguments for
    later tokens come from the model itself."""
    model: Any = found.batch.model
    if not hasattr(model, "generate") or not hasattr(model, "can_generate") or not model.can_generate():
        return False
    given = {name: x for name, x in found.part(0, first, None).kwargs.items() if isinstance(x, Tensor)}
    options = dict(max_new_tokens=_TIMES, min_new_tokens=_TIMES, do_sample=False, num_beams=1, pad_token_id=0)
    options |= dict(output_logits=True, return_dict_in_generate=True)
    try:
        both = [model.generate(**given, use_cache=flag, **options).logits for flag in (True, False)]
    except Exception:
        return True  # it cannot be confirmed
    gaps = [_far(b.double(), a.double()) for a, b in zip(*both, strict=True)]
    return max(gaps[1:]) < 0.1 * wrong.size

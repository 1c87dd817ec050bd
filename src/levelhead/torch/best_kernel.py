"""Attention by PyTorch's own kernels, with levelhead's options: which kernel serves a call, and that kernel's call.

`scaled_dot_product_attention` takes what it can say itself: one scale, a mask, causality from the first key on.
Everything else is a function of the score for `flex_attention`, which is fused on CUDA and ROCm; elsewhere positions
become a mask that is formed, and functions of the score run unfused, where PyTorch has no gradient on CPU and MPS. What
no kernel serves is refused. Results are PyTorch's, untouched, but for sinks: their share is taken off at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from levelhead import reference
from levelhead.call.options import BATCH, TOKENS, Scoring, fields
from levelhead.errors import LevelheadError, bad_value
from levelhead.torch import sdpa
from levelhead.torch.flex import HIDING, by_flex, grouped
from levelhead.torch.operators import wide
from levelhead.torch.tensor_options import Described

SDPA, FLEX, FORMED = "sdpa", "flex", "sdpa with a formed mask"
_SAID_BY_SDPA = {"scale", "mask", "dropout", "seed", "query_start"}
_PLACES = HIDING | {"alibi"}  # what a mask can say
_BY_BATCH_ROW = fields(BATCH, TOKENS)
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # older ones fix such sizes
_WIDTH = 16  # of a head at least, in Triton's products


def _holds(condition: Any) -> bool:
    """Whether it does, of sizes. An exported graph serves every length: what is not true of all is not true."""
    if _is_exporting():
        return statically_known_true(condition)
    return bool(condition)


class Wanted(NamedTuple):
    """What decides on the kernel."""

    device: str
    places: frozenset[str]  # options that say which keys a query sees, or add a bias by position
    scores: frozenset[str]  # options that change scores otherwise: no mask can say them
    gradient: bool
    fits_flex: bool = True  # widths and dtype


def wanted(q: Tensor, k: Tensor, v: Tensor, call: Described) -> Wanted:
    scoring = call.scoring
    for name, set_ in (("cosine", scoring.cosine), ("log-n", scoring.log_n)):
        if set_:
            raise _unserved("scale", f'a rule other than "{name}"', f'"{name}"', "Scale q and k before the call")
    names = set(scoring.keywords()) - _SAID_BY_SDPA
    if "causal" in names and call.start is not None:
        if _holds(call.start >= call.shape.S - 1):  # every key lies before the first query
            names.remove("causal")
        elif names == {"causal"} and scoring.mask is None and _holds(call.start == 0):
            names.remove("causal")  # as SDPA means it
    scores = names - _PLACES | ({"scale"} if call.factor is None else set())
    learned = (q, k, v, scoring.scale, scoring.mask, scoring.sinks)
    gradient = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in learned)
    fits = min(q.shape[-1], v.shape[-1]) >= _WIDTH and q.dtype is not torch.float64
    return Wanted(q.device.type, frozenset(names & _PLACES), frozenset(scores), gradient, fits)


def kernel_for(call: Wanted) -> str:
    """The fastest kernel of PyTorch that serves such a call."""
    if not call.places and not call.scores:
        return SDPA
    if call.device == "cuda" and call.fits_flex:
        return FLEX
    if not call.scores:
        return FORMED
    given = ", ".join(sorted(call.scores))
    if call.device == "cuda":
        advice = "flex_attention multiplies heads at least 16 wide, of float32 or a half type"
        raise _unserved(given, "other widths or another dtype with it", "this call", advice)
    if call.gradient and call.device in ("cpu", "mps"):
        advice = "Compute under torch.no_grad(), or leave it out"
        raise _unserved(given, f"no gradient with it on {call.device}", "requires_grad=True", advice)
    return FLEX


def attend(q: Tensor, k: Tensor, v: Tensor, call: Described) -> tuple[Tensor, str]:
    """The output (B, H, T, E) of q (B, H, T, D), k and v, and which kernel computed it."""
    scoring = call.scoring
    if 0 in (*q.shape[:3], k.shape[2]):  # nothing is attended to, whatever the options say
        return sdpa.ORIGINAL(q, k, v, enable_gqa=grouped(q, k)), SDPA
    kernel = kernel_for(wanted(q, k, v, call))
    if scoring.dropout and kernel == FLEX:
        advice = "Leave it out, or the options beside it"
        raise _unserved("dropout", "0 where flex_attention computes", scoring.dropout, advice)
    if kernel == FLEX:
        return by_flex(q, k, v, call, shared(call)), kernel
    mask = scoring.mask
    if kernel == FORMED:
        mask = _formed(q, k, call)
    elif mask is not None and mask.dim() < 2:
        mask = mask.reshape(1, -1)
    causal = False
    if kernel == SDPA and scoring.causal and mask is None and _holds(call.start == 0) and not _holds(call.shape.S <= 1):
        causal = True  # in a branch: a comparison of symbolic sizes is a symbol, which SDPA does not take
    # Through its module, where neither a watch nor `patch` puts another in its place.
    out = sdpa.ORIGINAL(q, k, v, mask, scoring.dropout, causal, scale=call.factor, enable_gqa=grouped(q, k))
    return out, kernel


def _formed(q: Tensor, k: Tensor, call: Described) -> Tensor:
    """A mask (B or 1, H or 1, T, S) that says what the options say, without their scores: bool if it adds nothing."""
    (T, S), scoring = (q.shape[2], k.shape[2]), shared(call)
    i, j = (torch.arange(n, device=q.device) for n in (T, S))
    adds = scoring.mask is not None and scoring.mask.dtype is not torch.bool
    if scoring.alibi is None and not adds:
        seen: Tensor = scoring.visible(i, j)[:, None]
        return seen if scoring.mask is None else seen & scoring.mask
    heads = 1 if scoring.alibi is None else q.shape[1]
    several = [x for x in (getattr(scoring, name) for name in _BY_BATCH_ROW) if x is not None and len(x) != 1]
    B = q.shape[0] if several else 1
    nothing = torch.zeros((B, heads, T, S), dtype=wide(q.dtype), device=q.device)
    bias: Tensor = reference.score(scoring._replace(scale=nothing.new_ones(heads)), nothing, i, j)
    return bias.to(wide(q.dtype))


def shared(call: Described) -> Scoring:
    """The options with one position for all batch rows, where it is known."""
    scoring = call.scoring
    if call.start is None or scoring.query_start is None:
        return scoring
    return scoring._replace(query_start=scoring.query_start[:1].clone().fill_(call.start))


def _unserved(name: str, what: str, given: object, advice: str) -> LevelheadError:
    return bad_value(name, f"{what}: PyTorch's kernels compute here", given, advice)

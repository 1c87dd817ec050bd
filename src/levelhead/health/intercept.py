"""Where attention calls are caught: torch's function, transformers' interface, levelhead's own.

Each way in is wrapped so that it calls what it always called, with the same arguments, and tells
the watch of the place that is running what was asked of the softmax. One set of wrappers serves
all watches; the first puts it in, the last takes it out. Whoever computes attention with levelhead
gives the statistics of that very pass.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from levelhead.attention import attention as levelhead_attention
from levelhead.attention import observe
from levelhead.health import amend, operator, transformers_calls
from levelhead.health.measure import Call, from_scores
from levelhead.health.places import Place, current
from levelhead.torch import sdpa
from levelhead.torch.interface import attention as interface_attention
from levelhead.torch.ops import observing
from levelhead.torch.swap import Function, Swap

_KEPT = (*sdpa.KEPT, "levelhead.attention", __name__)
WEIGHTS = "nn.MultiheadAttention, weights asked for"


class Interception:
    """The wrappers, in place while somebody holds them."""

    def __init__(self) -> None:
        self._holders = 0
        self._lock = threading.Lock()
        self._swap: Swap | None = None
        self._interface = transformers_calls.Interface(_transformers_over)
        self._fast_path = True

    def hold(self) -> None:
        with self._lock:
            self._holders += 1
            if self._holders > 1:
                return
            originals = (sdpa.ORIGINAL, sdpa.scaled_dot_product_attention)
            instead: dict[Function, Function] = {f: _sdpa_over(f) for f in originals}
            instead[levelhead_attention] = _attention_over(levelhead_attention)
            instead[functional.softmax] = _softmax_over(functional.softmax)
            self._swap = Swap(instead, _KEPT)
            self._interface.install()
            # The native fast path of nn.MultiheadAttention shows nobody its scores.
            self._fast_path = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            assert self._swap is not None
            self._swap.undo()
            self._interface.remove()
            torch.backends.mha.set_fastpath_enabled(self._fast_path)


def _around(place: Place, how: str, run: Callable[[], Any], describe: Callable[[], Call]) -> Any:
    """Runs a call as it is, and has the place's watch look at it."""
    if place.busy or not place.watch.wanted():
        return run()
    place.busy = True
    try:
        with observing() as passes:
            result = run()
    finally:
        place.busy = False
    if len(passes) == 1:
        place.watch.saw_pass(place, how, passes[0])
    else:
        place.watch.saw(place, how, describe())
    return result


# ---- torch's function, and levelhead's drop-in for it


def _sdpa_over(original: Function) -> Function:
    usual = "sdpa" if original is sdpa.ORIGINAL else "levelhead"

    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        amendment = amend.current()
        terms = None if amendment is None else amendment.over(query, key, scale)
        if terms is not None:
            query, key = terms.q, terms.k
            scale = None if isinstance(terms.scale, tuple) else terms.scale

        def run() -> Any:
            options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
            if terms is not None:
                return terms.sdpa(original, value, enable_gqa, **options)
            return original(query, key, value, scale=scale, enable_gqa=enable_gqa, **options)

        place = current()
        if place is None or place.busy:
            return run()

        def describe() -> Call:
            heads = place.heads
            found = described(query, key, value, attn_mask, is_causal, scale, enable_gqa, heads)
            return found if terms is None else terms.described(found)

        how = place.via or usual
        if torch.compiler.is_compiling():
            if terms is None or not terms.log_n:  # which no description can say
                operator.trace(place, describe(), how)
            return run()
        place.watch.follow(place, query, key, value)
        return _around(place, how, run, describe)

    return scaled_dot_product_attention


def described(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None,
    gqa: bool, heads: int | None,
) -> Call:  # fmt: skip
    """A call in torch's convention as ours: four dimensions, positions from the first query."""
    factor = (1 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0) if scale is None else float(scale)
    if q.dim() == 3 and k.shape[0] == q.shape[0]:  # (batch · heads, T, D), or (batch, T, D)
        each = heads if heads and q.shape[0] % heads == 0 else 1
        if mask is not None and mask.dim() == 3 and mask.shape[0] > 1:
            mask = mask.reshape(-1, each, *mask.shape[1:])
        q, k = (x.reshape(-1, each, *x.shape[1:]) for x in (q, k))
        return Call(q, k, factor, mask, causal)
    q, k, _ = sdpa.broadcast(q, k, v, gqa)
    if q.dim() > 4:
        if mask is not None:
            last = ((1,) * 3 + tuple(mask.shape))[-3:]
            mask = mask.expand((*q.shape[:-3], *last)).reshape(-1, *last)
        q, k = (x.reshape(-1, *x.shape[-3:]) for x in (q, k))
    return Call(q, k, factor, mask, causal)


# ---- levelhead's own function


def _attention_over(original: Function) -> Function:
    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        place = current()
        plain = isinstance(q, Tensor) and options.get("out") is None
        if place is None or place.busy or not plain or torch.compiler.is_compiling():
            return original(q, k, v, **options)
        place.watch.follow(place, q, k, v)
        if not place.watch.wanted():
            return original(q, k, v, **options)
        options.pop("out", None)
        seen = observe(q, k, v, **options)
        place.watch.saw_observation(place, "levelhead", seen, q, k, options)
        return seen.output

    return attention


# ---- a softmax in the open: that of nn.MultiheadAttention when it is asked for weights, and that
# ---- of a transformers function nobody can describe


def _softmax_over(original: Function) -> Function:
    def softmax(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        place = current()
        if place is None or place.busy or torch.compiler.is_compiling():
            return original(input, *args, **kwargs)
        own = isinstance(place.module, nn.MultiheadAttention)
        if not own and not place.open:
            return original(input, *args, **kwargs)

        def describe() -> Call:
            heads = place.heads or 1
            return from_scores(input if input.dim() == 4 else _by_head(input, heads))

        how = WEIGHTS if own else place.via
        return _around(place, how, lambda: original(input, *args, **kwargs), describe)

    return softmax


def _by_head(scores: Tensor, heads: int) -> Tensor:
    each = heads if scores.shape[0] % heads == 0 else 1
    return scores.reshape(-1, each, *scores.shape[-2:])


# ---- transformers' interface


def _transformers_over(original: Function, name: str) -> Function:
    how = f"huggingface:{name}"

    def attention(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        amendment = amend.of(module)
        ours = amendment is not None and amend.is_ours(name, query)
        if amendment is not None:
            kwargs = amendment.for_interface(name, module, query, kwargs)

        def run() -> Any:
            if ours:
                given = (name == "eager", module, query, key, *args)
                return interface_attention(*given, **kwargs), None
            return original(module, query, key, *args, **kwargs)

        place = current()
        if place is None or place.busy:
            return run()

        def describe() -> Call | None:
            if ours and amend.has_no_description(kwargs):
                return None
            given = (name, original, module, query, key, *args)
            return transformers_calls.describe(*given, **kwargs)

        # Torch's function is called inside, or levelhead's, and says what was really asked.
        inside = not torch.compiler.is_compiling() if ours else name == "sdpa"
        if inside:
            return _labelled(place, how, run)
        call = describe()
        if torch.compiler.is_compiling():
            if call is None:
                return run()
            operator.trace(place, call, how)
            place.busy = True
            result = run()
            place.busy = False
            return result
        place.watch.follow(place, query, key, args[0] if args else kwargs.get("value"))
        if call is None:
            place.open = True
            try:
                return _labelled(place, how, run)
            finally:
                place.open = False
        return _around(place, how, run, lambda: call)

    return attention


def _labelled(place: Place, how: str, run: Callable[[], Any]) -> Any:
    """Runs what will be caught further inside, or is levelhead's."""
    place.via = how
    if torch.compiler.is_compiling():
        result = run()
        place.via = ""
        return result
    try:
        with observing() as passes:
            result = run()
    finally:
        place.via = ""
    if passes and place.watch.wanted():
        place.watch.saw_pass(place, f"{how}, levelhead", passes[0])
    return result


INTERCEPTION = Interception()

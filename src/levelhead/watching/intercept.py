"""Where attention calls are caught: torch's function, transformers' interface, levelhead's own.

Each way in is wrapped so that it calls what it always called, with the same arguments, and tells
the watch of the place that is running what was asked of the softmax. One set of wrappers serves
all watches; the first puts it in, the last takes it out. Whoever computes attention with levelhead
gives the statistics of that very pass.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from levelhead.attention import attention as levelhead_attention
from levelhead.attention import observe
from levelhead.distributed.attention import attention as sharded_attention
from levelhead.distributed.attention import look
from levelhead.torch import sdpa
from levelhead.torch.functorch import attend
from levelhead.torch.huggingface.options import attention as interface_attention
from levelhead.torch.operators import Options, observing
from levelhead.torch.swap import Function, Swap
from levelhead.watching import amend, compiled, transformers_calls
from levelhead.watching.measure import Call, from_scores, plain
from levelhead.watching.module_stack import Frame, current, traced

_KEPT = (*sdpa.KEPT, "levelhead.attention", "levelhead.torch.huggingface", __name__)
WEIGHTS = "nn.MultiheadAttention, weights asked for"


class Interception:
    """The wrappers, in place while somebody holds them."""

    def __init__(self) -> None:
        self._holders = 0
        self._lock = threading.Lock()
        self._swaps: list[Swap] = []
        self._interface = transformers_calls.Interface(_transformers_called)
        self._fast_path = True

    def hold(self) -> None:
        with self._lock:
            self._holders += 1
            if self._holders > 1:
                return
            originals = (sdpa.ORIGINAL, sdpa.scaled_dot_product_attention)
            instead: dict[Function, Function] = {f: _sdpa_over(f) for f in originals}
            instead[levelhead_attention] = _attention_over(levelhead_attention)
            instead[sharded_attention] = _sharded_over(sharded_attention)
            instead[functional.softmax] = _softmax_over(functional.softmax)
            whole = functional.multi_head_attention_forward
            instead[whole] = _multihead_over(whole)
            self._swaps = [Swap(instead, _KEPT), Swap({attend: _operator_over(attend)}, (attend.__module__, __name__))]
            self._interface.install()
            # The native fast path of nn.MultiheadAttention shows nobody its scores.
            self._fast_path = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)

    def lifted(self) -> AbstractContextManager[None]:
        """Torch's modules show the original functions while the block runs."""
        return self._swaps[0].lifted() if self._swaps else nullcontext()

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            for swap in self._swaps:
                swap.undo()
            self._interface.remove()
            torch.backends.mha.set_fastpath_enabled(self._fast_path)
            traced.clear()  # a run that Ctrl-C ended may have left something


def _around(frame: Frame, how: str, run: Callable[[], Any], describe: Callable[[], Call]) -> Any:
    """Runs a call as it is, and has the place's watch look at it."""
    watch = frame.place.watch
    if frame.busy or not watch.wanted():
        return run()
    frame.busy = True
    try:
        with observing() as passes:
            result = run()
        if len(passes) == 1:
            watch.saw_pass(frame, how, passes[0])
        else:
            watch.saw(frame, how, describe())
    finally:
        frame.busy = False
    return result


def _traced(frame: Frame, how: str, run: Callable[[], Any], call: Call) -> Any:
    """The same for torch.compile: the graph will tell."""
    compiled.trace(frame.place, call, how)
    frame.busy = True
    result = run()
    frame.busy = False
    return result


def _retraced(x: Any) -> bool:
    """Whether a part of a graph is run on tensors without numbers, after it was traced."""
    return torch.compiler.is_compiling() and type(x) not in (Tensor, nn.Parameter)


def _unseen(frame: Frame, *tensors: Any) -> bool:
    """Whether a call cannot be looked at; the coverage report then says so."""
    odd = next((x for x in tensors if isinstance(x, Tensor) and not plain(x)), None)
    if odd is None:
        return False
    if frame.place.watch.wanted():
        frame.place.unseen[f"ran on {_kind(odd)}, which nobody can look into"] = None
    return True


def _kind(x: Tensor) -> str:
    if x.is_nested:
        return "nested tensors"
    return "meta tensors" if x.is_meta else f"tensors of type {type(x).__name__}"


# ---- torch's function, and levelhead's drop-in for it


def _sdpa_over(original: Function) -> Function:
    usual = "sdpa" if original is sdpa.ORIGINAL else "levelhead"

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
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

        mask = attn_mask
        if any(map(_is_subclass, (query, key, value, attn_mask))):
            if torch.compiler.is_compiling() and _is_causal_bias(attn_mask):
                # What torch would do. It ends in a call of plain tensors, which is caught.
                return attn_mask._dispatch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            run = _lifted(run)
            if _is_causal_bias(attn_mask):
                mask = attn_mask._materialize(query.device)
        frame = current()
        if frame is None or frame.busy or _retraced(query):
            return run()

        def describe() -> Call:
            heads = frame.place.heads
            found = described(query, key, value, mask, is_causal, scale, enable_gqa, heads)
            return found if terms is None else terms.described(found)

        how = frame.via or usual
        if torch.compiler.is_compiling():
            if terms is not None and terms.log_n:  # which no description can say
                return run()
            return _traced(frame, how, run, describe())
        if _unseen(frame, query, key, mask):
            return run()
        frame.place.watch.follow(frame, query, key, value)
        return _around(frame, how, run, describe)

    return scaled_dot_product_attention


def _is_subclass(x: Any) -> bool:
    """Whether a tensor has its own rule for the functions it is passed to."""
    if not isinstance(x, Tensor) or type(x) in (Tensor, nn.Parameter):
        return False
    return type(x).__torch_function__ is not torch._C._disabled_torch_function_impl


def _is_causal_bias(mask: Any) -> bool:
    bias = sys.modules.get("torch.nn.attention.bias")
    return bias is not None and type(mask) is bias.CausalBias


def _lifted(run: Callable[[], Any]) -> Callable[[], Any]:
    """Runs a call of tensor subclasses while torch's modules show the functions they had."""

    def lifted() -> Any:
        if torch.compiler.is_compiling():  # Dynamo cannot trace the change
            return run()
        with INTERCEPTION.lifted():
            return run()

    return lifted


def described(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    gqa: bool,
    heads: int | None,
) -> Call:
    """A call in torch's convention as ours: four dimensions, positions from the first query."""
    if torch.is_autocast_enabled(q.device.type) and q.dtype is torch.float32:
        dtype = torch.get_autocast_dtype(q.device.type)  # what torch's function casts them to
        q, k, v = (x.to(dtype) for x in (q, k, v))
    factor = (1 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0) if scale is None else float(scale)
    if q.dim() == 3 and k.shape[0] == q.shape[0]:  # (batch · heads, T, D), or (batch, T, D)
        each = heads if heads and q.shape[0] % heads == 0 else 1
        if mask is not None and mask.dim() == 3 and mask.shape[0] > 1:
            mask = torch.unflatten(mask, 0, (-1, each))
        q, k = (torch.unflatten(x, 0, (-1, each)) for x in (q, k))
        return Call(q, k, factor, mask, causal)
    q, k, _ = sdpa.broadcast(q, k, v, gqa)
    if q.dim() > 4:
        if mask is not None:
            last = ((1,) * 3 + tuple(mask.shape))[-3:]
            mask = mask.expand((*q.shape[:-3], *last)).flatten(0, -4)
        q, k = (x.flatten(0, -4) for x in (q, k))
    return Call(q, k, factor, mask, causal)


# ---- levelhead's own function


def _attention_over(original: Function) -> Function:
    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        frame = current()
        ours = isinstance(q, Tensor) and options.get("out") is None
        if frame is None or frame.busy or not ours or torch.compiler.is_compiling():
            return original(q, k, v, **options)
        if _unseen(frame, q, k):
            return original(q, k, v, **options)
        watch = frame.place.watch
        watch.follow(frame, q, k, v)
        if not watch.wanted():
            return original(q, k, v, **options)
        options.pop("out", None)
        seen = observe(q, k, v, **options)
        watch.saw_observation(frame, "levelhead", seen, q, k, options)
        return seen.output

    return attention


def _sharded_over(original: Function) -> Function:
    """Over `levelhead.distributed.attention`. All ranks must look at the same steps, as they all
    take part in each other's statistics; a rank that does not is an error there."""

    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        frame = current()
        if frame is None or frame.busy or not isinstance(q, Tensor) or _unseen(frame, q, k):
            return original(q, k, v, **options)
        watch = frame.place.watch
        watch.follow(frame, q, k, v, _parts(options))
        if not watch.wanted():
            return original(q, k, v, **options)
        scoring = dict.fromkeys(_SCORING) | {"causal": False, "dropout": 0.0}
        given = scoring | {name: x for name, x in options.items() if name in scoring}
        how = {name: x for name, x in options.items() if name not in scoring}
        seen, call = look(q, k, v, given, **how)
        watch.saw_shard(frame, seen, q, k, (given, how), call)
        return seen.output

    return attention


def _parts(options: dict[str, Any]) -> tuple[int, int]:
    """Over how many ranks the queries lie, and the keys."""
    dist = torch.distributed
    running = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size(options.get("group")) if running else 1
    return (1 if options.get("plan") == "decode" else world), world


_SCORING = (
    "scale",
    "causal",
    "window",
    "mask",
    "softcap",
    "sinks",
    "alibi",
    "key_lengths",
    "segments",
    "query_start",
    "dropout",
    "seed",
)


def _operator_over(original: Function) -> Function:
    """Over `ops.attend`: what leads to levelhead's operator inside a graph is seen there."""

    def attend(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Any:
        frame = current() if torch.compiler.is_compiling() else None
        if frame is None or frame.busy or _retraced(q) or not _is_call(options):
            return original(q, k, v, options)
        lead = (1,) * (4 - q.dim())
        q4, k4 = (x.reshape(*lead, *x.shape) if lead else x for x in (q, k))
        call = Call(
            q4,
            k4,
            options.scale,
            options.mask,
            options.causal,
            0,
            options.left,
            options.right,
            options.softcap,
            options.sinks,
        )
        how = f"{frame.via}, levelhead" if frame.via else "levelhead"
        return _traced(frame, how, lambda: original(q, k, v, options), call)

    return attend


def _is_call(options: Options) -> bool:
    """Whether a `Call` says all of it."""
    rest = (options.alibi, options.key_lengths, options.query_segments, options.query_start)
    return not (options.cosine or options.log_n or any(x is not None for x in rest))


# ---- a softmax in the open: that of nn.MultiheadAttention when it is asked for weights, and that
# ---- of a transformers function nobody can describe


def _softmax_over(original: Function) -> Function:
    def softmax(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        frame = current()
        if frame is None or frame.busy or _retraced(input):
            return original(input, *args, **kwargs)
        place = frame.place
        own = isinstance(place.module, nn.MultiheadAttention)
        legacy = place.legacy and input.dim() == 4 and input.shape[1] == place.heads
        if not own and not legacy and not frame.open:
            return original(input, *args, **kwargs)

        def run() -> Any:
            return original(input, *args, **kwargs)

        def describe() -> Call:
            heads = place.heads or 1
            return from_scores(input if input.dim() == 4 else _by_head(input, heads))

        how = WEIGHTS if own else frame.via or "huggingface:eager"
        if torch.compiler.is_compiling():
            return _traced(frame, how, run, describe())
        return run() if _unseen(frame, input) else _around(frame, how, run, describe)

    return softmax


def _multihead_over(original: Function) -> Function:
    """torch.compile takes torch's function as a whole, so nobody would see the call in it; it goes
    into a function of the same code that it does not know."""
    copy = FunctionType(original.__code__, original.__globals__, "multi_head_attention", original.__defaults__)
    copy.__kwdefaults__ = original.__kwdefaults__

    def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return copy(*args, **kwargs)
        return original(*args, **kwargs)

    return multi_head_attention_forward


def _by_head(scores: Tensor, heads: int) -> Tensor:
    each = heads if scores.shape[0] % heads == 0 else 1
    return scores.reshape(-1, each, *scores.shape[-2:])


# ---- transformers' interface


def _transformers_called(
    original: Function, name: str, module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any
) -> Any:
    amendment = amend.of(module)
    ours = amendment is not None and amend.is_ours(name, query)
    if amendment is not None:
        kwargs = amendment.for_interface(name, module, query, kwargs)

    def run() -> Any:
        if ours:
            given = (name == "eager", module, query, key, *args)
            return interface_attention(*given, **kwargs), None
        return original(module, query, key, *args, **kwargs)

    frame = current()
    if frame is None or frame.busy or _retraced(query):
        return run()
    compiling = torch.compiler.is_compiling()
    if not compiling and _unseen(frame, query, key):
        return run()
    how = f"huggingface:{name}"
    frame.kv_heads = key.shape[1]
    # Torch's function is called inside, or levelhead's, and says what was really asked.
    if (not compiling) if ours else name == "sdpa":
        return _labelled(frame, how, run)
    served = isinstance(original, functools.partial)  # by levelhead, which tells of itself
    known = not served and frame.place.understood if compiling or served else None
    given = (name, known, original, module, query, key, *args)
    call = None
    if not (ours and amend.has_no_description(kwargs)):
        call = transformers_calls.describe(*given, **kwargs)
    if not compiling:
        value = args[0] if args else kwargs.get("value")
        frame.place.watch.follow(frame, query, key, value)
    if call is None:
        frame.open = not served
        result = _labelled(frame, how, run)  # after an error the frame is gone
        frame.open = False
        return result
    if compiling:
        return _traced(frame, how, run, call)
    return _around(frame, how, run, lambda: call)


def _labelled(frame: Frame, how: str, run: Callable[[], Any]) -> Any:
    """Runs what will be caught further inside, or is levelhead's."""
    frame.via = how
    if torch.compiler.is_compiling():
        result = run()
        frame.via = ""
        return result
    try:
        with observing() as passes:
            result = run()
    finally:
        frame.via = ""
    if passes and frame.place.watch.wanted():
        frame.place.watch.saw_pass(frame, f"{how}, levelhead", passes[0])
    return result


INTERCEPTION = Interception()

"""Interception of attention calls: of torch's function and levelhead's own here, of others in modules beside.

Each function is replaced by a wrapper that calls it with the same arguments, and has the watch of the running module
measure the call. One set of wrappers serves all watches: the first one installs it, the last one removes it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from levelhead.attention import attention as levelhead_attention
from levelhead.attention import observe
from levelhead.call.options import NAMES, Options, Scoring
from levelhead.distributed.attention import attention as sharded_attention
from levelhead.distributed.attention import look
from levelhead.observation import Observation
from levelhead.torch import observed, sdpa
from levelhead.torch.functorch import attend
from levelhead.torch.huggingface import formula
from levelhead.torch.huggingface.functions import AttentionHook
from levelhead.torch.swap import Function, Layer, Swap, showing
from levelhead.torch.tensor_options import Described
from levelhead.watching import amend, folded_heads, native_fast_path
from levelhead.watching.compiler_graphs import COMPILER
from levelhead.watching.copies import reduce_over, script_over
from levelhead.watching.functions.torch_functions import describe_sdpa
from levelhead.watching.intercept_known import note, run_taught
from levelhead.watching.intercept_softmax import BY_HAND, multihead_over, softmax_over
from levelhead.watching.intercept_transformers import transformers_attention
from levelhead.watching.measure import Call
from levelhead.watching.module_stack import GradientInputs, Observed, current, traced
from levelhead.watching.observe_call import cannot_be_read, is_retraced, run_labelled, run_observed, run_traced
from levelhead.watching.wrapped import Wrapped

# Modules that keep the originals: those that define them, compare with them, or compile them.
_COMPILES = "transformers.integrations.flex_attention"
SIGHT = "observed_attention"
_KEPT = (*sdpa.KEPT, levelhead_attention.__module__, __name__, _COMPILES)


class Interception:
    """The wrappers, installed between the first `hold` and the last `release`."""

    def __init__(self) -> None:
        self._holders = 0
        self._lock = threading.Lock()
        self._swaps: list[Swap] = []
        self.wrapped = Wrapped(_KEPT)
        self._copies: Layer | None = None
        self._modules = 0  # that were loaded when they were looked through
        self._transformers = AttentionHook(transformers_attention)
        self._has_transformers = False

    def hold(self) -> None:
        with self._lock:
            self._holders += 1
            if self._holders > 1:
                return
            originals = (sdpa.ORIGINAL, sdpa.scaled_dot_product_attention)
            instead: dict[Function, Function] = {f: _sdpa_over(f) for f in originals}
            instead[levelhead_attention] = _attention_over(levelhead_attention)
            instead[sharded_attention] = _attention_over(sharded_attention)
            instead[functional.softmax] = softmax_over(functional.softmax)
            multihead = functional.multi_head_attention_forward
            instead[multihead] = multihead_over(multihead)
            instead[torch.jit.script] = script_over(torch.jit.script, self.all_lifted)
            swapped: list[tuple[dict[Function, Function], tuple[str, ...]]] = [
                (instead, _KEPT),
                ({attend: _operator_over(attend)}, (attend.__module__, __name__)),
                ({formula.computed: _formula_over(formula.computed)}, (__name__,)),
                ({observed.computed: _sight_over(observed.computed)}, (__name__,)),
                (native_fast_path.instead(), (native_fast_path.__name__, __name__)),
            ]
            new = self.wrapped.begin(instead, {sdpa.ORIGINAL: _sdpa_over})
            among = showing([*new, *(function for functions, _ in swapped for function in functions)])
            self._swaps = [Swap(functions, kept, among) for functions, kept in swapped]
            self.wrapped.swap(new, among)
            self._modules = len(sys.modules)
            self._has_transformers = "transformers" in sys.modules
            if self._has_transformers:
                self._transformers.install()
            COMPILER.hold()
            self._copies = Layer(nn.Module, "__reduce_ex__", partial(reduce_over, original_of=self.wrapped.original_of))

    def refresh(self) -> None:
        """Wraps functions whose library was loaded since."""
        if self._holders and len(sys.modules) != self._modules:
            with self._lock:
                self._modules = len(sys.modules)
                self.wrapped.extend()
                COMPILER.hold()
                if not self._has_transformers and "transformers" in sys.modules:
                    self._has_transformers = True
                    self._transformers.install()

    def lifted(self) -> AbstractContextManager[None]:
        """Torch's modules contain the original functions while the block runs."""
        return self._swaps[0].lifted() if self._swaps else nullcontext()

    @contextmanager
    def all_lifted(self) -> Iterator[None]:
        """The same for every wrapper by name, for code that reads functions instead of calling them."""
        with ExitStack() as lifts:
            for swap in self._swaps:
                lifts.enter_context(swap.lifted())
            yield

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            for swap in self._swaps:
                swap.undo()
            self.wrapped.end()
            if self._has_transformers:
                self._transformers.remove()
            COMPILER.release()
            if self._copies is not None:
                self._copies.undo()
            traced.clear()  # after Ctrl-C no hook ran, and old frames remain


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
                # As torch does it. This ends in a call with plain tensors, which is intercepted.
                return attn_mask._dispatch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            run = _lifted(run)
            if _is_causal_bias(attn_mask):
                mask = attn_mask._materialize(query.device)
        frame = current()
        if frame is None or frame.busy or is_retraced(query) or not isinstance(query, Tensor):
            return run()
        if original in frame.watch.describers:
            options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
            return run_taught(frame, original, run, (query, key, value), options | {"enable_gqa": enable_gqa})

        def describe() -> Call:
            call = describe_sdpa((query, key, value), mask, is_causal, scale, enable_gqa)
            return call if terms is None else terms.described(call)

        path = frame.via or usual
        if enable_gqa and not frame.kv_heads and query.dim() != 4:  # then their description repeats them
            frame.kv_heads = key.shape[-3]
        if torch.compiler.is_compiling():
            return run_traced(frame, path, run, describe())
        if cannot_be_read(frame, query, key, mask):
            return run()
        if frame.watch.wanted() and folded_heads.is_other(frame, query, key, value):
            laid = folded_heads.found(frame, describe())
            frame.watch.follow_gradients(frame, GradientInputs(query, key, value, views=laid.views))
            return run_observed(frame, path, run, lambda: laid.call, as_described=True)
        frame.watch.follow_gradients(frame, GradientInputs(query, key, value))
        return run_observed(frame, path, run, describe)

    # So that it is pickled by name, as the function in its place is.
    scaled_dot_product_attention.__module__ = "torch.nn.functional"
    scaled_dot_product_attention.__qualname__ = scaled_dot_product_attention.__name__
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
    """`run` for tensor subclasses: meanwhile torch's modules contain the original functions."""

    def lifted() -> Any:
        if torch.compiler.is_compiling():  # Dynamo cannot trace the change
            return run()
        with INTERCEPTION.lifted():
            return run()

    return lifted


# ---- levelhead's own functions


def _attention_over(original: Function) -> Function:
    """Over `levelhead.attention`, or `levelhead.distributed.attention`. All ranks of the latter must measure the same
    steps, because the statistics of each rank need the others; a rank that does not is an error there."""
    sharded = original is sharded_attention
    between_graphs = f"{original.__module__}.{original.__name__} runs between compiled graphs and is not observed there"

    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        frame = current()
        if frame is not None and torch.compiler.is_compiling() and not frame.busy:
            note(frame, between_graphs)
        skipped = not isinstance(q, Tensor) or (
            not sharded and (options.get("out") is not None or torch.compiler.is_compiling())
        )
        if frame is None or frame.busy or skipped or cannot_be_read(frame, q, k):
            return original(q, k, v, **options)
        frame.watch.follow_gradients(frame, GradientInputs(q, k, v, _parts(options) if sharded else (1, 1)))
        if not frame.watch.wanted():
            return original(q, k, v, **options)
        observed = (_look if sharded else _observe)(q, k, v, options)
        frame.watch.record_observed(frame, observed)
        return observed.observation.output

    return attention


def _observe(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Observed:
    options.pop("out", None)

    def again(scale: Any) -> Observation:
        return observe(q.detach(), k.detach(), **(options | {"scale": scale}))

    return Observed("levelhead", observe(q, k, v, **options), q, k, options, again)


def _look(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Observed:
    own: Options = {name: x for name, x in options.items() if name in NAMES}  # type: ignore[assignment]
    others = {name: x for name, x in options.items() if name not in NAMES}

    def again(scale: Any) -> Observation:
        return look(q.detach(), k.detach(), None, {**own, "scale": scale}, **others)[0]

    observation, shard = look(q, k, v, own, **others)
    return Observed(f"levelhead.distributed, {shard.plan}", observation, q, k, own, again, shard)


def _parts(options: dict[str, Any]) -> tuple[int, int]:
    """The number of ranks that share the queries, and the keys."""
    dist = torch.distributed
    running = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size(options.get("group")) if running else 1
    return (1 if options.get("plan") == "decode" else world), world


def _operator_over(original: Function) -> Function:
    """Over `functorch.attend`, through which all calls of levelhead's operator in a graph go."""

    def attend(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, *rest: Any, **how: Any) -> Any:
        frame = current() if torch.compiler.is_compiling() else None
        if frame is None or frame.busy or is_retraced(q):
            return original(q, k, v, scoring, *rest, **how)
        lead = (1,) * (4 - q.dim())
        q4, k4 = (x.reshape(*lead, *x.shape) if lead else x for x in (q, k))
        path = f"{frame.via}, levelhead" if frame.via else "levelhead"
        return run_traced(frame, path, lambda: original(q, k, v, scoring, *rest, **how), Call(q4, k4, scoring))

    return attend


def _sight_over(original: Function) -> Function:
    """Over what `levelhead.torch.observed_attention` computes."""

    def computed(q: Tensor, k: Tensor, v: Tensor, call: Described, *rest: Any) -> Any:
        frame = current()
        if frame is None or frame.busy or is_retraced(q):
            return original(q, k, v, call, *rest)
        described = Call(q, k, call.scoring, start=call.start)
        if torch.compiler.is_compiling():
            return run_traced(frame, SIGHT, lambda: original(q, k, v, call, *rest), described)
        frame.watch.follow_gradients(frame, GradientInputs(q, k, v))
        return run_observed(frame, SIGHT, lambda: original(q, k, v, call, *rest), lambda: described)

    return computed


def _formula_over(original: Function) -> Function:
    """Over `formula.computed`: attention that a module writes out, served by `use(model)`."""

    def computed(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        frame = current()
        if frame is None or frame.busy:
            return original(q, k, v, *rest)
        frame.watch.follow_gradients(frame, GradientInputs(q, k, v))
        return run_labelled(frame, BY_HAND, lambda: original(q, k, v, *rest))

    return computed


INTERCEPTION = Interception()

"""What says that a model is meant to be causal, where no mask is: a triangle that it keeps and does not apply, a mask
in some heads or rows only, tokens in and their vocabulary out beside a cache or the name of such a model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from levelhead.preflight_checks.calls import SeenCall
from levelhead.preflight_checks.flight import Flight

_CACHES = {"past_key_values", "past_key_value", "layer_past", "kv_cache", "use_cache", "start_pos", "kv_caches"}
_NAMES = re.compile(r"GPT|CausalLM|CausalTransformer|Llama|Autoregressive|DecoderOnly", re.IGNORECASE)
_NOT = re.compile(r"mask|bert|diffusion|encoder", re.IGNORECASE)


def evidence(flight: Flight, calls: Sequence[SeenCall]) -> str | None:
    """Why a model that is not causal should be; None: nothing says so, or its masks show later keys by design."""
    if type(flight.model).__module__.startswith(("transformers.", "transformers_modules.")):
        return None
    own = [call for call in calls if call.square and not call.call.crossed]
    for call in own:
        if (why := _in_part(flight, call)) is not None:
            return why
    open_calls = [call for call in own if _open(call)]
    if open_calls and _together(flight, own):
        return f"one of the softmaxes of {open_calls[0].module} is causal and another is not"
    if not open_calls or any(map(_closed, own)):
        return None
    return _triangle(flight, open_calls) or _language_model(flight)


def _open(call: SeenCall) -> bool:
    """Whether later keys are seen as earlier ones are: all of them, or those of a window to both sides."""
    shown = call.shown()
    if shown is None:
        return False
    T = len(shown)
    away = (torch.arange(T)[:, None] - torch.arange(T)[None]).abs()
    reach = int(away[shown.cpu()].max()) if bool(shown.any()) else 0
    return reach > 0 and torch.equal(shown.cpu(), away <= reach)


def _closed(call: SeenCall) -> bool:
    shown = call.shown()
    return shown is not None and not bool(shown.triu(1).any())


def _in_part(flight: Flight, call: SeenCall) -> str | None:
    """A mask that is causal in some heads, rows of the batch or queries, and shows the others everything."""
    hidden = call.hidden()
    if hidden is None or any(x.dim() > 2 and not x.is_floating_point() for x in flight.batch.tensors().values()):
        return None  # a mask of the batch may differ from row to row
    later = torch.ones_like(hidden[0, 0]).triu(1)
    shows = ~hidden[..., later]  # (B, H, later pairs)
    everything, nothing = shows.all(-1), ~shows.any(-1)  # (B, H)
    if bool((everything | nothing).all()) and bool(everything.any()) and bool(nothing.any()):
        return f"the mask of {call.module} is causal in some heads or rows and shows the others everything"
    return _first_queries(call, ~hidden.all(0).all(0))


def _first_queries(call: SeenCall, shown: Tensor) -> str | None:
    T = len(shown)
    full = int(shown.all(1).int().cumprod(0).sum())  # first queries that see everything
    causal = torch.equal(shown[full:], torch.ones_like(shown).tril()[full:])
    if 3 <= full < T - 2 and causal:
        return f"the mask of {call.module} is causal from query {full} on and shows the first ones everything"
    return None


def _together(flight: Flight, own: Sequence[SeenCall]) -> bool:
    """Whether one run of a module holds a causal softmax and an open one."""
    for module in {call.module for call in own}:
        here = [call for call in own if call.module == module]
        once = (module, 0) in flight.tape.entries and (module, 1) not in flight.tape.entries
        if once and any(map(_closed, here)) and any(map(_open, here)):
            return True
    return False


def _triangle(flight: Flight, calls: Sequence[SeenCall]) -> str | None:
    """A causal mask that a module of attention, or one around it, keeps."""
    modules = dict(flight.model.named_modules())
    for call in calls:
        name = call.module
        while name in modules:
            flags = [getattr(modules[name], word, None) for word in ("causal", "is_causal")]
            held = [key for key, x in modules[name].named_buffers(recurse=False) if _is_triangle(x)]
            if held and False not in flags:
                return f"{name or type(flight.model).__name__} keeps a causal mask, {held[0]}"
            if not name:
                break
            name = name.rpartition(".")[0]
    return None


def _is_triangle(x: Tensor) -> bool:
    """Whether one number stands above the diagonal and another below and on it, or the other way round."""
    if x.dim() < 2 or x.shape[-1] != x.shape[-2] or x.shape[-1] < 4 or x.numel() != x.shape[-1] ** 2:
        return False
    square = x.reshape(x.shape[-2:])
    above = torch.ones_like(square, dtype=torch.bool).triu(1)
    first, second = square[above], square[~above]
    return bool((first == first[0]).all()) and bool((second == second[0]).all()) and bool(first[0] != second[0])


def _language_model(flight: Flight) -> str | None:
    """Token ids in, and a number for each word of the vocabulary out for every token."""
    stream = flight.batch.stream()
    if stream is None or flight.batch[stream].is_floating_point() or len(flight.batch.streams()) > 1:
        return None
    words = {m.num_embeddings for m in flight.model.modules() if isinstance(m, nn.Embedding)}
    grid = flight.grid(stream)
    by_token = [tokens for x in flight.tape.outputs if (tokens := grid.by_token(x)) is not None]
    if not any(x.shape[2] in words for x in by_token):
        return None
    name = type(flight.model).__name__
    if _NOT.search(name):
        return None
    caches = sorted(_CACHES & set(inspect.signature(flight.model.forward).parameters))
    if getattr(getattr(flight.model, "config", None), "is_decoder", False) is True:
        return "it gives the vocabulary for every token, and its configuration says is_decoder"
    if caches:
        return f"it gives the vocabulary for every token and takes a cache ({caches[0]})"
    return f"it gives the vocabulary for every token and is called {name}" if _NAMES.search(name) else None

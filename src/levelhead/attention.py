"""The front: check, describe the problem, run the core, return the caller's type.

Everything a caller can get wrong is refused before any memory for a result exists. The arithmetic lives in the core,
the meaning of the options in `call.options`, the families of arrays in `call.arrays`; this file leads from one to the
next. Plain calls are short: most take `_core.fast_attention`, and the description of the others is kept per shape.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, TypeAlias, cast

import numpy as np

from levelhead import _core, front_ends
from levelhead.call import arrays
from levelhead.call.arrays import Array, Origin
from levelhead.call.dropout import SEEDS
from levelhead.call.options import (
    DEFAULTS,
    Options,
    Shape,
    SlowOptions,
    describe,
    documented,
    known,
    logit_cap,
    shape_of,
)
from levelhead.call.prepare import described, first_keys_of, for_core, team_for
from levelhead.chosen_weights import row_indices, weights_of_rows
from levelhead.observation import ArrayT, Observation, Unpack
from levelhead.state import unwritten

Sizes: TypeAlias = tuple[int, ...]

_REMEMBERED = 256  # descriptions of calls without arrays, about 1 kB each; decoding has a new length at every step
_SIMPLE = {type(None), bool, int, float, str}
_DIFFERENTIABLE = ("scale", "mask", "sinks")  # options that may require gradients


@documented()
def attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    scale: Any = None,
    causal: bool = False,
    threads: int | None = None,
    out: ArrayT | None = None,
    **others: Unpack[SlowOptions],
) -> ArrayT:
    """Exact scaled dot-product attention: softmax(scale · q kᵀ, as the options say) v.

    Args:
        q: queries (..., H, T, D), or (T, D) for one head. float32, float64, float16, bfloat16;
            NumPy, torch on the CPU, DLPack or the buffer protocol; any strides, never copied.
        k: keys (..., G, S, D); query head h uses head h // (H / G).
        v: values (..., G, S, E).
        {options}
        threads: at most so many; the result has the same bits for any number.
        out: where to write the result, of its shape, dtype and family.

    Returns:
        (..., H, T, E) in q's dtype and family. A row that sees no key is 0.

    >>> q = np.ones((2, 3, 4), np.float32)
    >>> attention(q, q, q, causal=True).shape
    (2, 3, 4)
    """
    if out is None and (not others or _are_defaults(others)):
        result = _core.fast_attention(q, k, v, scale, causal, threads)
        if result is not None:
            return cast(ArrayT, result)
    options: Options = {"scale": scale, "causal": causal, **others}
    known("attention", options)
    options = _replayed(q, options)
    if _is_differentiated(q, k, v, options):
        serving = front_ends.serving("torch", "attention")
        return cast(ArrayT, serving.attention(q, k, v, options, threads=threads, out=out))
    q_view, k_view, v_view, origin = arrays.take(q, k, v)
    _, keywords, _ = _described(q_view.shape, k_view.shape, v_view.shape, origin, options)
    shape = (*q_view.shape[:-1], v_view.shape[-1])
    team = team_for(threads, origin)
    if out is None:
        memory = np.empty(shape, origin.storage)
    else:
        inputs = (("q", q_view), ("k", k_view), ("v", v_view), *keywords.items())
        memory = arrays.take_out(out, shape, origin, inputs)
    _core.forward(q_view, k_view, v_view, out=memory, **team, **keywords)
    if out is None:
        return cast(ArrayT, origin.give(memory))
    arrays.mark_written(out, origin)
    return out


@documented()
def observe(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT | None = None,
    *,
    weights: Any = None,
    threads: int | None = None,
    **options: Unpack[Options],
) -> Observation[ArrayT]:
    """Attention with every statistic of its softmax, in the same pass.

    Args:
        q, k, v: as in `attention`; without v, only the statistics are computed.
        {options}
        weights: query rows whose attention weights are wanted: an index, several, a slice, or True for all.
            They take B · H · rows · S numbers of q's dtype; more than 4 GiB is an error.
        threads: at most so many; the result has the same bits for any number.

    Returns:
        An `Observation`: `.output` (the bits of `attention`), `.logsumexp`, `.rows`, `.heads`, and
        `.weights` (..., H, rows, S) if asked for, without dropout; it prints as a table, and
        `merge` joins it with the observation of later keys.

    >>> q = np.ones((2, 3, 4), np.float32)
    >>> observe(q, q, causal=True).rows.count[0]
    array([1, 2, 3])
    """
    known("observe", options)
    options = _replayed(q, options)
    if _is_differentiated(q, k, v, options):
        serving = front_ends.serving("torch", "attention")
        return cast("Observation[ArrayT]", serving.observe(q, k, v, options, threads=threads, weights=weights))
    v_view: Array | None = None
    if v is None:
        q_view, k_view, origin = arrays.take_pair(q, k)
    else:
        q_view, k_view, v_view, origin = arrays.take(q, k, v)
    v_shape = None if v_view is None else v_view.shape
    sizes, keywords, exists = _described(q_view.shape, k_view.shape, v_shape, origin, options)
    chosen = None if weights is None else row_indices(weights, sizes, origin.dtype)
    team = team_for(threads, origin)
    rows: Sizes = q_view.shape[:-1]
    first = first_keys_of(keywords)
    state = unwritten(rows, sizes.E, origin.wide, sizes.S, first)
    observation: Observation[ArrayT] = Observation(state, keywords.get("sinks"), origin, exists, logit_cap(keywords))
    out = None if sizes.E is None else np.empty((*rows, sizes.E), origin.storage)
    into: dict[str, Any] = {"out": out, "sums": state.sums, "counts": state.counts, "acc": state.acc}
    _core.forward(q_view, k_view, v_view, first_keys=first, **into, **team, **keywords)
    if out is not None:
        vars(observation)["output"] = origin.give(out)  # the bits of reading it off, computed by all threads
    if chosen is not None:
        scoring = described(sizes, origin, options)
        vars(observation)["weights"] = weights_of_rows(q_view, k_view, sizes, scoring, chosen, origin)
    return observation


def _is_differentiated(q: Any, k: Any, v: Any, options: Options) -> bool:
    """Whether PyTorch differentiates the call, or compiles it: Dynamo cannot trace the NumPy path."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    tensors = [x for x in (q, k, v, *map(options.get, _DIFFERENTIABLE)) if isinstance(x, torch.Tensor)]
    if tensors and torch.compiler.is_compiling():
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _replayed(q: Any, options: Options) -> Options:
    """With a seed from PyTorch's generator for tensors: checkpointing replays that one, and drops the same weights."""
    torch = sys.modules.get("torch")
    rate = options.get("dropout")
    if torch is None or not isinstance(rate, float) or not rate or options.get("seed") is not None:
        return options
    return {**options, "seed": int(torch.randint(SEEDS, ()))} if isinstance(q, torch.Tensor) else options


def _are_defaults(options: SlowOptions) -> bool:
    for name, x in options.items():
        default = DEFAULTS.get(name, DEFAULTS)  # an unknown option equals no default
        if x is not default and (type(x) is not type(default) or x != default):
            return False
    return True


def _described(
    q: Sizes, k: Sizes, v: Sizes | None, origin: Origin, options: Options
) -> tuple[Shape, dict[str, Any], Array | None]:
    """Shape, core keywords, and which rows exist (None: all)."""
    kinds = _simple_kinds(options) if options else ()
    if kinds is not None:
        return _remembered(q, k, v, origin.dtype, tuple(options.items()), kinds)
    sizes = shape_of(q, k, v)
    scoring = described(sizes, origin, options)
    return sizes, for_core(scoring, sizes), scoring.existing_rows(sizes)


def _simple_kinds(options: Options) -> tuple[type, ...] | None:
    """The types of the options, all numbers and words, so that 1 cannot find the entry of True; None: others are
    among them, or chance, or rows that do not exist, which take an array as long as the queries.
    """
    kinds: list[type] = []
    for value in options.values():
        kinds.extend(map(type, value) if type(value) is tuple else (type(value),))
    simple = _SIMPLE.issuperset(kinds) and not options.get("dropout") and options.get("query_lengths") is None
    return tuple(kinds) if simple else None


@lru_cache(_REMEMBERED)
def _remembered(
    q: Sizes, k: Sizes, v: Sizes | None, dtype: str, options: tuple[tuple[str, Any], ...], kinds: tuple[type, ...]
) -> tuple[Shape, dict[str, Any], Array | None]:
    """As `_described`; its arrays are read-only, as an observation shows its sinks and all such calls share them."""
    sizes = shape_of(q, k, v)
    scoring = describe(sizes, dtype_name=dtype, **dict(options))
    keywords = for_core(scoring, sizes)
    for array in keywords.values():
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    return sizes, keywords, None

"""The front door: check, describe the problem, run the core, give back the caller's type.

Everything a caller can get wrong is refused here, before any memory for a result exists. The
arithmetic lives in the core, the meaning of the options in `scoring`, the families of arrays in
`arrays`; this file only leads from one to the next. Plain calls are short: most go straight through
`_core.fast_attention`, and what that leaves of them is described once per shape.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from levelhead import _core, arrays, checks, scoring
from levelhead.arrays import Array, Origin
from levelhead.errors import LevelheadValueError, expected
from levelhead.observation import Observation
from levelhead.state import unwritten

Sizes: TypeAlias = tuple[int, ...]

# Descriptions kept of plain calls. Decoding meets a new length at every step, so this bounds
# memory (about 1 kB each) rather than trying to hold a whole generation.
_REMEMBERED = 256
_MOST_THREADS = 2**15  # a C int in the core, which itself stops at far fewer


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
    alibi: Any = None,
    key_lengths: Any = None,
    segments: Any = None,
    query_start: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    threads: int | None = None,
    out: Any = None,
) -> Any:
    """Exact scaled dot-product attention: softmax(scale · q kᵀ, as the options say) v.

    Args:
        q: queries (..., H, T, D), or (T, D) for one head. float32, float64, float16, bfloat16;
            NumPy, torch on the CPU, DLPack or the buffer protocol; any strides, never copied.
        k: keys (..., G, S, D); query head h uses head h // (H / G).
        v: values (..., G, S, E).
        scale: None for 1/√d_k, a number, one per head, or a rule of `levelhead.scaling`.
        causal: hide keys after the query's position p = query_start + i.
        window: (left, right), keep p - left <= j <= p + right; None on a side: no limit.
        mask: bool (True: may attend) or additive float, broadcastable to (..., H, T, S).
        softcap: c > 0 bounds the scaled logits, c · tanh(s / c).
        sinks: (H,) one extra logit per head in the denominator.
        alibi: (H,) slopes, or True for the standard ones; adds -slope · |p - j|.
        key_lengths: how many keys of each batch row exist.
        segments: (query ids, key ids) or one array for both; attention stays within an id.
        query_start: position of the first query, one or per batch row; default S - T.
        dropout: share of weights dropped, a function of `seed` and positions alone.
        seed: makes dropout reproducible.
        threads: at most so many; the result has the same bits for any number.
        out: where to write the result, of its shape, dtype and family.

    Returns:
        (..., H, T, E) in q's dtype and family. A row that sees no key is 0.

    >>> q = np.ones((2, 3, 4), np.float32)
    >>> attention(q, q, q, causal=True).shape
    (2, 3, 4)
    """
    plain = (
        mask is None
        and window is None
        and softcap is None
        and sinks is None
        and alibi is None
        and key_lengths is None
        and segments is None
        and query_start is None
        and seed is None
        and type(dropout) is float
        and dropout == 0.0
    )
    if plain and out is None:
        done = _core.fast_attention(q, k, v, scale, causal, threads)
        if done is not None:
            return done
    given = {
        "scale": scale,
        "causal": causal,
        "window": window,
        "mask": mask,
        "softcap": softcap,
        "sinks": sinks,
        "alibi": alibi,
        "key_lengths": key_lengths,
        "segments": segments,
        "query_start": query_start,
        "dropout": dropout,
        "seed": seed,
    }
    if _learns(q, k, v, scale, mask, sinks):
        return _calls().attention(q, k, v, threads=threads, out=out, **given)
    q, k, v, origin = arrays.take(q, k, v)
    if plain and (scale is None or type(scale) is float or type(scale) is str):
        _, options = _plain(q.shape, k.shape, v.shape, origin.dtype, scale, causal)
    else:
        options = options_for_core(scoring.shape_of(q.shape, k.shape, v.shape), origin, **given)
    shape = (*q.shape[:-1], v.shape[-1])
    team = team_for(threads, origin)
    if out is None:
        result = np.empty(shape, origin.storage)
        _core.forward(q, k, v, out=result, **team, **options)
        return origin.give(result)
    inputs = (("q", q), ("k", k), ("v", v), *options.items())
    view = arrays.take_out(out, shape, origin, inputs)
    _core.forward(q, k, v, out=view, **team, **options)
    arrays.mark_written(out, origin)
    return out


def observe(
    q: Any,
    k: Any,
    v: Any = None,
    *,
    scale: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
    alibi: Any = None,
    key_lengths: Any = None,
    segments: Any = None,
    query_start: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    threads: int | None = None,
) -> Observation:
    """Attention with every statistic of its softmax, in the same pass.

    The arguments are those of `attention`. Without v, only the statistics are computed.

    Returns:
        An `Observation`: `.output` (the bits of `attention`), `.logsumexp`, `.rows`, `.heads`;
        it prints as a table, and `merge` joins it with the observation of later keys.

    >>> q = np.ones((2, 3, 4), np.float32)
    >>> observe(q, q, causal=True).rows.count[0]
    array([1, 2, 3])
    """
    given = {
        "scale": scale,
        "causal": causal,
        "window": window,
        "mask": mask,
        "softcap": softcap,
        "sinks": sinks,
        "alibi": alibi,
        "key_lengths": key_lengths,
        "segments": segments,
        "query_start": query_start,
        "dropout": dropout,
        "seed": seed,
    }
    if _learns(q, k, v, scale, mask, sinks):
        seen: Observation = _calls().observe(q, k, v, threads=threads, **given)
        return seen
    v_view: Array | None = None
    if v is None:
        q, k, origin = arrays.take_pair(q, k)
    else:
        q, k, v_view, origin = arrays.take(q, k, v)
    v_shape = None if v_view is None else v_view.shape
    if _is_plain(given):
        shape, options = _plain(q.shape, k.shape, v_shape, origin.dtype, scale, causal)
    else:
        shape = scoring.shape_of(q.shape, k.shape, v_shape)
        options = options_for_core(shape, origin, **given)
    team = team_for(threads, origin)
    rows: Sizes = q.shape[:-1]
    made = unwritten(rows, shape.E, origin.wide, shape.S)
    seen = Observation(made, options.get("sinks"), origin)
    into: dict[str, Any] = {"sums": made.sums, "counts": made.counts}
    if v_view is None:
        _core.forward(q, k, None, **into, **team, **options)
        return seen
    out = np.empty((*rows, v_view.shape[-1]), origin.storage)
    _core.forward(q, k, v_view, out=out, acc=made.acc, **into, **team, **options)
    vars(seen)["output"] = origin.give(out)  # what reading it off would give, made by all threads
    return seen


def _learns(*given: Any) -> bool:
    """Whether PyTorch is to know how the result came about."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    if tensors and torch.compiler.is_compiling():  # there, the way of tensors is out of sight
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _calls() -> ModuleType:
    """The way of tensors that learn. It lies above this file, and is met when it is needed."""
    return import_module("levelhead.torch.calls")


def _is_plain(given: dict[str, Any]) -> bool:
    """Whether options are such that their description can be remembered."""
    kinds = {name: type(x) for name, x in given.items() if x is not None}
    plain = kinds.pop("causal", None) is bool and kinds.pop("dropout", None) is float
    return plain and given["dropout"] == 0.0 and kinds in ({}, {"scale": float}, {"scale": str})


@lru_cache(maxsize=_REMEMBERED, typed=True)  # typed: causal=1 must not find the answer for True
def _plain(
    q: Sizes, k: Sizes, v: Sizes | None, dtype: str, scale: Any, causal: bool
) -> tuple[scoring.Shape, dict[str, Any]]:
    """Shape and core options of a call without arrays among its options."""
    shape = scoring.shape_of(q, k, v)
    scored = scoring.describe(shape, scale=scale, causal=causal, dtype_name=dtype)
    return shape, _for_core(scored)


def options_for_core(shape: scoring.Shape, origin: Origin, **options: Any) -> dict[str, Any]:
    """The scoring options of a call, checked, as the core's keywords."""
    options["mask"] = arrays.take_mask(options["mask"], origin)
    for name in ("scale", "sinks", "alibi", "key_lengths", "segments", "query_start"):
        options[name] = arrays.option(name, options[name])
    described = _for_core(scoring.describe(shape, dtype_name=origin.dtype, **options))
    if "mask" in described and not shape.lead:  # (T, D) is one head without its axis
        described["mask"] = described["mask"][0]
    return described


def _for_core(scored: scoring.Scoring) -> dict[str, Any]:
    """`Scoring` as the core's keywords; what is off is left out, which is cheaper to pass."""
    options = {
        "scale": scored.scale.factor,
        "query_start": _solid(scored.query_start),
        "cosine": scored.scale.cosine or None,
        "log_n": scored.scale.log_n or None,
        "causal": scored.causal or None,
        "left": scored.left,
        "right": scored.right,
        "mask": scored.mask,
        "softcap": scored.softcap,
        "sinks": scored.sinks,
        "alibi": scored.alibi,
        "key_lengths": _solid(scored.key_lengths),
        "query_segments": _solid(scored.query_segments),
        "key_segments": _solid(scored.key_segments),
    }
    if scored.dropout:
        options |= {"dropout": scored.dropout, "seed": scored.seed}
    return {name: value for name, value in options.items() if value is not None}


def _solid(ids: Array | None) -> Array | None:
    """Integers one after another in memory, as the core reads them; a broadcast view is not."""
    return None if ids is None else np.ascontiguousarray(ids)


def team_for(threads: int | None, origin: Origin) -> dict[str, Any]:
    """How many threads, and whose: torch's own, which are awake, unless told a number."""
    if threads is None:
        if origin.family == "torch":
            return {"threads": sys.modules["torch"].get_num_threads(), "torchs_team": True}
        return {"threads": _core.default_threads()}
    what, advice = "an integer of at least 1", "Leave it out to use what the machine allows"
    team = checks.integer("threads", threads, what, advice)
    if team < 1:
        raise LevelheadValueError(expected("threads", what, team, advice))
    return {"threads": min(team, _MOST_THREADS)}

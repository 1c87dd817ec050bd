"""From a caller's arrays and options to the core's keywords, and the threads that a call runs on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from levelhead import _core, checks
from levelhead.call import arrays, options
from levelhead.call.arrays import Array, Origin
from levelhead.call.options import Scoring, Shape, shape_of
from levelhead.call.segments import first_keys

_MOST_THREADS = 2**15  # a C int in the core, which itself stops at far fewer


def described(shape: Shape, origin: Origin, given: Mapping[str, Any], *, queries: int | None = None) -> Scoring:
    """The options of a call, from any array family, checked and in their normal form."""
    views = {**given, "mask": arrays.take_mask(given.get("mask"), origin)}
    for name in options.ARRAYS:
        views[name] = arrays.option(name, given.get(name))
    return options.describe(shape, dtype_name=origin.dtype, queries=queries, **views)


def existing_tokens(argument: str, lengths: Any, batch: tuple[int, ...], tokens: int) -> Array | None:
    """Which tokens exist by `key_lengths` or `query_lengths`, batch + (tokens, 1); None: all.

    For code that works on tokens before they are divided into heads.
    """
    if lengths is None:
        return None
    shape = shape_of((*batch, 1, tokens, 1), (*batch, 1, tokens, 1), None)
    checked = getattr(options.describe(shape, **{argument: arrays.option(argument, lengths)}), argument)
    exists = np.arange(tokens) < checked[:, None]
    return None if exists.all() else exists.reshape((*batch, tokens, 1))


def for_core(scoring: Scoring, shape: Shape) -> dict[str, Any]:
    """The normal form as the core's keywords; what is off is left out, which is cheaper to pass."""
    keywords = scoring.keywords()
    for name in options.fields(options.BATCH, options.TOKENS):
        if name in keywords:  # one after another in memory; a broadcast view is not
            keywords[name] = np.ascontiguousarray(keywords[name])
    if "mask" in keywords and not shape.lead:  # (T, D) is one head without its axis
        keywords["mask"] = keywords["mask"][0]
    return keywords


def first_keys_of(keywords: Mapping[str, Any]) -> Array | None:
    """The first key of each query's segment (B, T), for the core and the state; None: no segments, so key 0."""
    if keywords.get("query_segments") is None:
        return None
    return first_keys(np.asarray(keywords["query_segments"]), np.asarray(keywords["key_segments"]))


def team_for(threads: int | None, origin: Origin) -> dict[str, Any]:
    """How many threads, and which: PyTorch's own are awake, so tensors run on them unless `threads` is a number."""
    if threads is None:
        if origin.family == "torch":
            return {"threads": sys.modules["torch"].get_num_threads(), "torchs_team": True}
        return {"threads": _core.default_threads()}
    advice = "Leave it out to use what the machine allows"
    team = checks.integer("threads", threads, "an integer of at least 1", advice, lambda n: n >= 1)
    return {"threads": min(team, _MOST_THREADS)}

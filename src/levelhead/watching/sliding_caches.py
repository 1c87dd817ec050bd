"""How many keys of a sequence have left a cache, as those before a sliding window do.

Then a document's first key is none of a call's. transformers' caches count the tokens that each layer has seen; the
cache is found among the arguments of the modules that are running. Where it is not seen, as in a compiled graph, the
number of keys shows whether some may have left.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import nn

from levelhead.watching.module_stack import Frame

NOT_KNOWN = (
    "whether the first key has left a cache with a sliding window is not seen: the weight on the oldest key that is "
    "left counts as that on the first"
)
_CALL = nn.Module._call_impl.__code__


def gone(frame: Frame, queries: int, keys: int) -> int | None:
    """How many keys came before those of a call, and have left; None: not known."""
    if queries >= keys > 1:
        return 0
    module = frame.watched.module
    if frame.place is None:  # not in a graph, whose cache counts when the graph has run
        for cache in _caches(frame):
            layers, number = cache.layers, getattr(module, "layer_idx", None)
            if not isinstance(number, int) or not layers:
                continue
            layer = layers[min(number, len(layers) - 1)]  # those behind share an earlier one's keys
            if not getattr(layer, "is_sliding", False):
                return 0
            return _left(layer, queries, keys)
    window = _window(module)
    return None if window is not None and keys == window - 1 + queries else 0


def _left(layer: Any, queries: int, keys: int) -> int:
    seen = int(layer.get_seq_length())
    window = getattr(layer, "sliding_window", getattr(layer, "max_cache_len", None))
    kept = min(keys, window - 1 + queries) if isinstance(window, int) else keys
    return max(seen - kept, 0)


def _caches(frame: Frame) -> Iterator[Any]:
    """Among the arguments of the module and of those around it, the innermost first."""
    at: FrameType | None = sys._getframe(1)
    while at is not None:
        if at.f_code is _CALL:
            given = at.f_locals
            for x in (*given.get("args", ()), *given.get("kwargs", {}).values()):
                cache = getattr(x, "self_attention_cache", x)
                if isinstance(getattr(cache, "layers", None), list) and hasattr(cache, "get_seq_length"):
                    yield cache
            if given.get("self") is frame.watch.model:
                return
        at = at.f_back


def _window(module: nn.Module) -> int | None:
    """The width of a module's window, if it has one."""
    config = getattr(module, "config", None)
    window = module.sliding_window if hasattr(module, "sliding_window") else getattr(config, "sliding_window", None)
    return window if isinstance(window, int) and window > 1 else None

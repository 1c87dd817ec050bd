"""A window that is set, against the keys that queries see: missing, off by one, or narrower than set.

Some keys may be visible to all later queries beside the window: attention sinks, global tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from levelhead.diagnosis.findings import Finding
from levelhead.errors import LevelheadError
from levelhead.preflight_checks.calls import SeenCall, seen_calls
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.positions import constant
from levelhead.preflight_checks.result import finding


def check(
    flight: Flight, windows: Mapping[str, float], exact: Collection[str], calls: Sequence[SeenCall]
) -> Iterator[Finding]:
    """`windows`: of modules; `exact`: those whose setting says how many keys are meant, the query's own among them."""
    stream = flight.batch.stream()
    tokens = flight.grid(stream).tokens if stream is not None else -1
    narrow: dict[str, Finding] = {}
    for call in calls:
        window = windows.get(call.module)
        shown = call.shown() if window and call.square and call.queries == tokens else None
        if window is None or shown is None or tokens < window + 2:
            continue
        reach = _reach(shown.cpu(), int(window))
        count = call.module in exact and not reach.later
        if count and reach.furthest == reach.least and reach.furthest in (window, window - 2) and window > 2:
            keys = f"{reach.furthest + 1:g} keys, itself and {reach.furthest:g} before"
            why = f"A sliding window of {window:g} is set, and a query sees {keys}: the window is off by one."
            advice = "Show keys with query - key < window, as transformers and FlashAttention's (window - 1, 0) do."
            yield _finding("window off by one", call.module, why, advice, window, reach.furthest)
        elif reach.furthest > window:
            why = f"A window of {window:g} is set, and queries see keys further back: the window is not in the mask."
            advice = "Hide keys with query - key >= window, or pass the window to the attention function."
            yield _finding("window missing", call.module, why, advice, window, reach.furthest)
        elif count and reach.least < window - 1:
            why = f"A sliding window of {window:g} is set, and some queries see {reach.least + 1:g} keys only, itself "
            why += "among them: the window is cut, or tokens are attended to in chunks."
            advice = "Show all keys with query - key < window, also over the borders of chunks."
            narrow[call.module] = _finding("window too narrow", call.module, why, advice, window, reach.least)
    if narrow:
        yield from _also_of_one_text(flight, narrow, windows)


def _finding(kind: str, module: str, why: str, advice: str, window: float, furthest: float) -> Finding:
    return finding(kind, "warning", module, why, advice, window=window, furthest=furthest)


@dataclass(frozen=True)
class _Reach:
    """How far back the queries see that have enough tokens before them."""

    furthest: float
    least: float
    later: bool  # whether any query sees a later key


def _reach(shown: Tensor, window: int) -> _Reach:
    T = len(shown)
    i, j = torch.arange(T)[:, None], torch.arange(T)[None]
    beyond = i - j > window
    everywhere = (shown | ~beyond).all(0) & beyond.any(0)  # keys that all queries see, however far
    confined = ~(shown & beyond).any(0) & beyond.any(0)
    wide = (shown | (j > i)).all(1)  # queries that see everything before them
    back = torch.where(shown, i - j, torch.zeros_like(i - j))
    later = bool((shown & (j > i)).any())
    if bool(confined.any()):  # else all keys are seen from everywhere: there is no window
        back[:, everywhere] = 0
        back[wide] = 0
    rows = back.amax(1)[window + 1 :]
    narrow = rows[~wide[window + 1 :]] if bool(confined.any()) else rows
    return _Reach(float(rows.max()), float(narrow.min()) if len(narrow) else float(window), later)


def _also_of_one_text(flight: Flight, found: Mapping[str, Finding], windows: Mapping[str, float]) -> Iterator[Finding]:
    """Those that hold with the same token at every place and no padding: documents packed into a row have ends."""
    stream = flight.batch.stream()
    words = ("position", "segment", "doc", "seq_idx", "seqlens", "seq_lens")
    if stream is None or any(word in name for name in flight.batch.names.values() for word in words):
        return
    batch = constant(flight.batch, stream)
    if (mask := batch.padding_mask()) is not None and not bool((batch[mask] == batch[mask].flatten()[0]).all()):
        return
    try:
        calls = seen_calls(batch)[1]
    except LevelheadError:
        return
    for call in calls:
        shown = call.shown() if call.module in found and call.square else None
        if shown is not None and _reach(shown.cpu(), int(windows[call.module])).least < windows[call.module] - 1:
            yield found[call.module]

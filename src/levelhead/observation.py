"""`Observation`: the mergeable state of an attention call, and everything that is read off it.

It holds sums, never scores: its size is O(tokens · d). Output and logsumexp are computed from the state by the core,
with the code of `attention`, so the bits agree; sinks are applied only then, so that a merge cannot count one twice.
The formulas of the statistics are in `stats`; this file only prints them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, cast

import numpy as np
from numpy.typing import NDArray

from levelhead import _core, front_ends, stats
from levelhead.call.arrays import Origin
from levelhead.errors import bad_type, bad_value
from levelhead.state import FIRST, State, first_of, identity
from levelhead.words import aligned

if TYPE_CHECKING:
    from typing_extensions import TypeVar
    from typing_extensions import Unpack as Unpack

    ArrayT = TypeVar("ArrayT", default=Any)  # so that a plain `Observation` satisfies strict checkers
else:
    from typing import TypeVar

    ArrayT = TypeVar("ArrayT")
    if sys.version_info >= (3, 11):
        from typing import Unpack
    else:

        class Unpack:
            """Stands for `typing.Unpack`, so that `typing.get_type_hints` works on Python 3.10."""

            def __class_getitem__(cls, item: Any) -> Any:
                return item


SHOWN = 32  # heads printed; a longer table would push its own titles off a terminal


@dataclass(frozen=True, eq=False, repr=False)
class Observation(Generic[ArrayT]):
    """The result of `observe`: a state per query row, made by `observe` and `merge`.

    Print it for one line per head; in a notebook it shows as a table.
    """

    state: State
    sinks: NDArray[np.float64] | None  # (H,), applied when a result is read off
    origin: Origin  # the family and dtype of q, which results have again
    exists: NDArray[np.bool_] | None = None  # rows that exist, broadcastable to (..., H, T); None: all
    cap: float | None = None  # of the call's logits, for `diagnose`; those of the state are capped already

    @property
    def keys(self) -> int:
        """How many key positions were covered, hidden ones too."""
        return self.state.keys

    @cached_property
    def output(self) -> ArrayT:
        """(..., H, T, E) in q's dtype and family, with the bits of `attention`."""
        acc = self.state.acc
        if acc is None:
            given = "one made without v, which holds statistics only"
            raise bad_value("output", "an observation with values", given, "Call observe(q, k, v)")
        out = np.empty(acc.shape, self.origin.storage)
        _core.finish(acc, self.state.sums, self.sinks, out)
        return cast(ArrayT, self.origin.give(out))

    @cached_property
    def weights(self) -> ArrayT:
        """(..., H, rows, S) in q's dtype and family: what `observe(weights=rows)` was asked for."""
        given = "one made without it, or by a merge"
        raise bad_value("weights", "an observation with weights", given, "Call observe(q, k, weights=rows)")

    @cached_property
    def logsumexp(self) -> Any:
        """(..., H, T) natural log of the softmax denominator, float32 (float64 for float64)."""
        return self.origin.give(self.rows.logsumexp.astype(self.origin.wide))

    @cached_property
    def rows(self) -> stats.Rows:
        """Every statistic per query row, NumPy arrays (..., H, T)."""
        return stats.rows(self.state.sums, self.state.counts, self.sinks, self.exists)

    @cached_property
    def heads(self) -> stats.Heads:
        """The rows summed up per head, NumPy arrays (..., H)."""
        return stats.heads(self.rows, self.exists)

    def identity(self) -> Observation[ArrayT]:
        """No key observed, of this observation's kind: merging it on either side changes nothing."""
        sums, acc = self.state.sums, self.state.acc
        width = None if acc is None else acc.shape[-1]
        empty = identity(sums.shape[:-1], width, sums.dtype)
        return Observation(empty, self.sinks, self.origin, self.exists, self.cap)

    def __repr__(self) -> str:
        lines = _lines(self.heads, self.sinks is not None)
        text = list(aligned(lines, left={lines[0].index(title) for title in ("gauge", "level")}))
        return "\n".join([self._title(), *text[: SHOWN + 1], *_rest(lines)])

    def _repr_html_(self) -> str:
        shown: Any = front_ends.serving("notebook", "html")
        lines = _lines(self.heads, self.sinks is not None, draw=shown.gauge)
        table: str = shown.table(self._title(), lines, _rest(lines), SHOWN)
        return table

    def _title(self) -> str:
        lead = self.state.sums.shape[:-1]
        *batch, H, T = lead if len(lead) > 1 else (1, *lead)
        acc = self.state.acc
        values = "statistics only" if acc is None else f"values of width {acc.shape[-1]}"
        sizes = f"{H} head{'s' * (H != 1)} x {T} queries x {self.keys} keys, {values}"
        over = f", batch {tuple(batch)}: means over it, max logit the largest" if batch else ""
        return f"Observation of {sizes}, {self.origin.dtype} ({self.origin.family}){over}"


def merge(a: Observation[ArrayT], b: Observation[ArrayT]) -> Observation[ArrayT]:
    """Join the observations of the same queries over earlier keys (a) and later keys (b).

    Positions are counted from the first key of each part, so a part observed on its own needs `query_start`, and
    "log-n" scales by the keys of a part alone.

    >>> from levelhead import observe
    >>> q, k = np.ones((4, 8), np.float32), np.ones((6, 8), np.float32)
    >>> merge(observe(q, k[:2]), observe(q, k[2:])).rows.count
    array([6, 6, 6, 6])
    """
    for name, part in (("a", a), ("b", b)):
        if not isinstance(part, Observation):
            raise bad_type(name, "an Observation", type(part).__name__, "observe() makes one")
    ours, theirs = _describe(a), _describe(b)
    for what, value in ours.items():
        if theirs[what] != value:
            advice = "Observe the same queries with the same options over both ranges of keys"
            raise bad_value("b", f"the {what} of a, {value}", theirs[what], advice)
    first, second = a.state, b.state
    sums, counts = np.empty_like(first.sums), np.empty_like(first.counts)
    acc = None if first.acc is None else np.empty_like(first.acc)
    parts = (first.sums, first.counts, first.acc, second.sums, second.counts, second.acc)
    _core.merge(*parts, first.keys, sums, counts, acc)
    sums[..., FIRST], first_keys = first_of(first, second, first.keys)
    state = State(sums, counts, acc, first.keys + second.keys, first_keys)
    return Observation(state, a.sinks, a.origin, a.exists, a.cap)


def _describe(part: Observation[Any]) -> dict[str, Any]:
    """What two observations must share to be of the same queries."""
    acc, sinks = part.state.acc, part.sinks
    return {
        "family": part.origin.family,
        "dtype": part.origin.dtype,
        "shape of rows (..., heads, queries)": part.state.sums.shape[:-1],
        "width of values": None if acc is None else acc.shape[-1],
        "sinks": None if sinks is None else sinks.tolist(),
        "soft cap": part.cap,
        "queries that exist": None if part.exists is None else _Lengths(part.exists.sum(-1).ravel().tolist()),
    }


class _Lengths(list[int]):
    """Existing queries of each batch row, printed short."""

    def __repr__(self) -> str:
        return f"[{', '.join(map(str, self[:8]))}{', …' * (len(self) > 8)}]"

    __str__ = __repr__


def _lines(
    heads: stats.Heads, with_sinks: bool, draw: Callable[[float, stats.Level], str] = stats.gauge
) -> list[tuple[str, ...]]:
    """The titles, then one line of cells per head; `draw` makes a gauge."""
    some, several = heads.rows > 0, heads.rows + heads.empty_rows > heads.lone_rows
    entropy = _over_batch(heads.normalised_entropy, several)
    saturated = _over_batch(heads.saturated, several)
    largest = _by_head(heads.max_logit).max(0, initial=-np.inf)
    levels = [stats.level(*pair) for pair in zip(entropy, saturated, strict=True)]
    columns: dict[str, list[str]] = {
        "head": [str(h) for h in range(len(entropy))],
        "gauge": [draw(*pair) for pair in zip(entropy, levels, strict=True)],
        "level": [str(level) for level in levels],
        "H/ln n": [number(x) for x in entropy],
        "top-1": [number(x) for x in _over_batch(heads.mean_top1, some)],
        "max logit": [number(x, 2) for x in largest],
        "logit std": [number(x, 2) for x in np.sqrt(_over_batch(heads.var_logit, some))],
        "saturated": [number(100 * x, 0, "%") for x in saturated],
        "gradient left": [number(x) for x in _over_batch(heads.gradient, some)],
        "first key": [number(x) for x in _over_batch(heads.mean_first, some)],
    }
    if with_sinks:
        columns["sink"] = [number(x) for x in _over_batch(heads.mean_sink, some)]
    return [tuple(columns), *zip(*columns.values(), strict=True)]


def _rest(lines: list[tuple[str, ...]]) -> list[str]:
    hidden = len(lines) - 1 - SHOWN
    return [f"… {hidden} more"] if hidden > 0 else []


def _by_head(x: NDArray[Any]) -> NDArray[Any]:
    """(..., H) as (B, H); a head without an axis of its own gets one."""
    x = np.atleast_1d(x)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _over_batch(x: NDArray[Any], keep: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Mean per head over the batch rows that have something to say; a NaN among them stays."""
    total, n = _by_head(np.where(keep, x, 0.0)).sum(0), _by_head(keep).sum(0)
    return np.where(n > 0, total / np.maximum(n, 1), np.nan)


def number(x: float, digits: int = 3, unit: str = "") -> str:
    """Fixed digits, so that columns can be compared; scientific where those would run away."""
    if np.isnan(x):
        return "-"
    return f"{x:.{digits}e}" if 1e6 <= abs(x) < np.inf else f"{x:.{digits}f}{unit}"

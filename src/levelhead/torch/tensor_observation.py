"""An `Observation` whose states are tensors: they stay on their device until a statistic is read off them.

So observing waits for no device, and a compiled graph can return one. It holds statistics only, detached from every
graph; the output is the caller's alone.
"""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from levelhead.call.arrays import Origin
from levelhead.call.options import Scoring, logit_cap
from levelhead.observation import Observation
from levelhead.state import State

if TYPE_CHECKING:
    from numpy.typing import NDArray


_OUTSIDE = "statistics of an observation are read on the host: return it from what is compiled, and read it there"


_REASON: Any = {"reason": _OUTSIDE} if "reason" in signature(torch.compiler.disable).parameters else {}


def _on_host(of: Any) -> Any:
    """A cached attribute, read outside of compiled code: a graph breaks there, and fullgraph=True names the reason."""
    compute = getattr(of, "func", of)

    def read(seen: TensorObservation) -> Any:
        known = vars(seen)
        if compute.__name__ not in known:
            known[compute.__name__] = compute(seen)
        return known[compute.__name__]

    outside: Any = torch.compiler.disable
    return property(outside(read, **_REASON), doc=compute.__doc__)


class TensorObservation(Observation[Tensor]):
    """As `Observation`. `path` says which kernels computed the output and the statistics."""

    path: str
    sums: Tensor  # (..., H, T, 8), as `state` lays them out
    counts: Tensor  # (..., H, T, 2)
    _scoring: Scoring
    _keys: int
    _first_keys: Tensor | None  # (B, T)

    def __init__(
        self,
        sums: Tensor,
        counts: Tensor,
        scoring: Scoring,
        keys: int,
        first_keys: Tensor | None,
        origin: Origin,
        path: str,
    ) -> None:
        fields = {"sums": sums, "counts": counts, "_keys": keys, "_first_keys": first_keys}
        # Copies: a learned sink is another after the optimizer's step, and statistics are often read later.
        sinks, lengths = (None if x is None else x.detach().clone() for x in (scoring.sinks, scoring.query_lengths))
        cap = logit_cap(scoring._asdict())
        kept = Scoring(None, sinks=sinks, query_lengths=lengths)
        for name, x in (fields | {"_scoring": kept, "origin": origin, "path": path, "cap": cap}).items():
            object.__setattr__(self, name, x)  # the dataclass is frozen

    def _state(self) -> State:
        """The same on the host; reading it waits for the device."""
        *batch, T, _ = self.sums.shape
        first: Any = self._first_keys
        if first is not None:  # the same for all heads
            first = _host(first).reshape((*batch[:-1], 1, T)[-len(batch) - 1 :])
        return State(_host(self.sums), _host(self.counts), None, self._keys, first)

    def _sinks(self) -> NDArray[np.float64] | None:
        """(H,), applied when a result is read off."""
        sinks = self._scoring.sinks
        return None if sinks is None else _host(sinks).astype(np.float64)

    def _exists(self) -> NDArray[np.bool_] | None:
        """Rows that exist, broadcastable to (..., H, T); None: all."""
        lengths, (*batch, T, _) = self._scoring.query_lengths, self.sums.shape
        if lengths is None:
            return None
        exists: NDArray[np.bool_] = np.arange(T) < _host(lengths)[:, None]
        return None if exists.all() else exists.reshape((*batch[:-1], 1, T)[-len(batch) - 1 :])

    state: Any = _on_host(_state)
    sinks: Any = _on_host(_sinks)
    exists: Any = _on_host(_exists)
    rows: Any = _on_host(Observation.rows)
    heads: Any = _on_host(Observation.heads)
    logsumexp: Any = _on_host(Observation.logsumexp)


def _host(x: Tensor) -> NDArray[Any]:
    x = x.detach()
    return (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).cpu().contiguous().numpy()

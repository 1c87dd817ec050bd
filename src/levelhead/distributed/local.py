"""What one rank computes: a kernel call over a block of keys at any positions of the sequence, its gradients, and the
join of the states of two blocks.

No message is sent here. States are float32 (float64 for float64) whatever the inputs are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from levelhead import _core, state
from levelhead.call.arrays import Array, stretched
from levelhead.call.segments import first_keys, positions
from levelhead.distributed.split import Runs, select
from levelhead.distributed.trace import Trace, timed
from levelhead.state import State
from levelhead.torch.operators import memory, wide

FAR = 1000.0  # a logsumexp beyond it may be too coarse for its weights; the core has its own, higher bounds
LONG = 128  # keys; for fewer, a second call and a join cost more than they save


@dataclass(frozen=True, slots=True)
class QueryRows:
    """The queries of a kernel call, and everything about the call but its keys."""

    q: Tensor
    runs: Runs
    scale: Tensor  # (H,) float64
    options: Mapping[str, Any]  # the core's: flags, per-head arrays, lengths, threads
    mask: Tensor | None = None  # broadcastable to (..., H, T, all keys)
    sinks: Tensor | None = None  # (H,)
    ids: tuple[Array, Array] | None = None  # of segments: of the queries (B, T), of all keys by position (B, S)

    def keywords(self, keys: Runs) -> dict[str, Any]:
        """The core's keywords for keys at some positions."""
        keywords = dict(self.options)
        keywords["scale"] = memory(self.scale.contiguous())
        keywords["query_runs"] = list(self.runs) or [(0, 0, 1)]
        keywords["key_runs"] = list(keys) or [(0, 0, 1)]
        if self.ids is not None:
            keywords["query_segments"] = self.ids[0]
            keywords["key_segments"] = np.ascontiguousarray(select(self.ids[1], keys, -1))
        if self.mask is not None:
            columns = self.mask if self.mask.shape[-1] == 1 else select(self.mask, keys, -1)
            n = sum(length for _, length, _ in keys)
            keywords["mask"] = memory(columns.expand((*self.q.shape[:-1], n)))
        return keywords

    def first_keys(self) -> Array | None:
        """The position of the first key of each row's segment (B, T); None: no segments, so position 0."""
        return None if self.ids is None else first_keys(*self.ids)

    def first_among(self, keys: Runs) -> Array | None:
        """The same as an index into keys at some positions; -1: it is not among them."""
        if self.ids is None:
            return None
        place = np.full(self.ids[1].shape[1] + 1, -1)  # the last: for those that have none
        place[positions(keys)] = np.arange(sum(length for _, length, _ in keys))
        return place[first_keys(*self.ids)]

    def sink_logits(self) -> Array | None:
        """The sinks as the core expects them."""
        return None if self.sinks is None else memory(self.sinks.to(torch.float64).contiguous())

    def widened(self) -> QueryRows:
        """The same in float32, if it is of a half type: for bfloat16 the core may round weights, too."""
        real, mask = wide(self.q.dtype), self.mask
        half = mask is not None and mask.dtype in (torch.float16, torch.bfloat16)
        return replace(self, q=self.q.to(real), mask=mask.float() if mask is not None and half else mask)


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """Keys and values of a kernel call, and their positions."""

    k: Tensor
    v: Tensor
    runs: Runs

    def widened(self) -> KeyBlock:
        """As `QueryRows.widened`."""
        return replace(self, k=self.k.to(wide(self.k.dtype)), v=self.v.to(wide(self.v.dtype)))

    def named(self, names: Collection[str] = ("k", "v")) -> dict[str, Tensor]:
        """Those of keys and values that are among the names."""
        return {name: x for name, x in (("k", self.k), ("v", self.v)) if name in names}

    def pieces(self) -> Iterator[tuple[slice, KeyBlock]]:
        """Run by run, where runs are long: within one run the kernel skips hidden tiles; with several runs it tests key
        by key, which takes up to three times as long."""
        long = all(length >= LONG for _, length, _ in self.runs)
        if len(self.runs) < 2 or not long:
            yield slice(None), self
            return
        first = 0
        for run in self.runs:
            part = slice(first, first + run[1])
            yield part, KeyBlock(self.k[..., part, :], self.v[..., part, :], (run,))
            first = part.stop


def unwritten(rows: QueryRows, block: KeyBlock, *, values: bool = True) -> State:
    """Memory for the states of the rows, with or without their sums of values."""
    real = np.float64 if rows.q.dtype is torch.float64 else np.float32
    return state.unwritten(tuple(rows.q.shape[:-1]), block.v.shape[-1] if values else None, real, block.k.shape[-2])


def forward(rows: QueryRows, block: KeyBlock, states: State | None, trace: Trace | None, **into: Any) -> None:
    """One kernel call, which writes the states and the arrays of `into`."""
    if states is not None:
        into |= {"sums": states.sums, "counts": states.counts, "acc": states.acc}
        into["first_keys"] = rows.first_among(block.runs)
    with timed(trace, "compute", "forward"):
        _core.forward(memory(rows.q), memory(block.k), memory(block.v), **into, **rows.keywords(block.runs))


def observe(rows: QueryRows, block: KeyBlock, trace: Trace | None = None) -> State:
    """The states of the rows after the block's keys."""

    def parts() -> Iterator[State]:
        for _, piece in block.pieces():
            states = unwritten(rows, piece)
            forward(rows, piece, states, trace)
            yield states

    return reduce(join, parts())


def join(a: State, b: State) -> State:
    """The state over the keys of both, written over b.

    Positions in states are absolute here. On equal maxima the lower position is the arg-maximum, in whatever order
    shards are joined.
    """
    assert a.acc is not None and b.acc is not None
    tied = a.sums[..., state.MAX] == b.sums[..., state.MAX]
    tied &= (a.counts[..., state.ARGMAX] >= 0) & (b.counts[..., state.ARGMAX] >= 0)
    lower = np.minimum(a.counts[..., state.ARGMAX], b.counts[..., state.ARGMAX])
    _core.merge(a.sums, a.counts, a.acc, b.sums, b.counts, b.acc, 0, b.sums, b.counts, b.acc)
    argmax = b.counts[..., state.ARGMAX]
    argmax[...] = np.where(tied & (argmax >= 0), lower, argmax)
    return State(b.sums, b.counts, b.acc, a.keys + b.keys)


def read(states: State, rows: QueryRows, exists: Array | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output (in `dtype`) and logsumexp of the states over all keys; the sinks are added here, once, to the rows that
    exist."""
    assert states.acc is not None
    sinks = rows.sink_logits()
    out = torch.empty(states.acc.shape, dtype=dtype)
    _core.finish(states.acc, states.sums, sinks, memory(out))
    m, l = (states.sums[..., i].astype(np.float64) for i in (state.MAX, state.L))  # noqa: E741
    z = np.asarray(-np.inf) if sinks is None else sinks[:, None]
    z = z if exists is None else np.where(exists, z, -np.inf)
    with np.errstate(all="ignore"):
        top = np.where(m == -np.inf, 0.0, m * state.LN2)
        logsumexp = top + np.log(l + np.exp(z - top))
    return out, torch.from_numpy(logsumexp.astype(states.sums.dtype))


def has_far_rows(logsumexp: Tensor) -> bool:
    """Whether some row's logsumexp is far from zero: a backward pass over parts of the keys needs the sums then."""
    return bool(((logsumexp.abs() > FAR) & logsumexp.isfinite()).any())


@dataclass(frozen=True, slots=True)
class OutputGradients:
    """The output of a call and the gradients of it: where the backward pass starts."""

    out: Tensor  # not rounded to a half type if the gradient of a mask is wanted: it is a sum of many
    logsumexp: Tensor
    dout: Tensor
    dlogsumexp: Tensor | None
    kept: tuple[Tensor, ...] = ()  # what the plan kept of its forward pass
    sums: Tensor | None = None  # of the states over all keys, for rows whose logsumexp is too coarse


def differentiate(
    rows: QueryRows, block: KeyBlock, gradients: OutputGradients, into: Mapping[str, Tensor], trace: Trace | None = None
) -> None:
    """Writes the gradients to `into` (q, k, v, scale, sinks, mask); that of the mask is added.

    The weights follow from the logsumexp of all keys, so the gradients of several blocks add up; only the gradient of
    the sinks is the same from each block.
    """
    # The core takes the sums of such rows once more, over the keys it is given: these must be all.
    whole = gradients.sums is None and has_far_rows(gradients.logsumexp)
    for number, (part, piece) in enumerate([(slice(None), block)] if whole else block.pieces()):
        own = {name: x if number == 0 else torch.empty_like(x) for name, x in into.items()}
        own |= {name: into[name][..., part, :] for name in into.keys() & {"k", "v"}}
        own |= {name: into[name] for name in into.keys() & {"mask"}}
        if number > 0:
            own.pop("sinks", None)
        _differentiate(rows, piece, gradients, own, trace)
        if number > 0:
            for name in own.keys() & {"q", "scale"}:
                into[name].add_(own[name])


def _differentiate(
    rows: QueryRows, block: KeyBlock, gradients: OutputGradients, into: Mapping[str, Tensor], trace: Trace | None
) -> None:
    arrays: dict[str, Any] = {f"d{name}": memory(x) for name, x in into.items() if name != "mask"}
    dmask: Tensor | None = None
    if "mask" in into:
        *lead, columns = into["mask"].shape
        keys = block.k.shape[-2]
        dmask = torch.zeros((*lead, columns if columns == 1 else keys), dtype=wide(rows.q.dtype))
        arrays["dmask"] = stretched(memory(dmask), (*rows.q.shape[:-1], keys))
    dlse = gradients.dlogsumexp
    per_row = None if dlse is None else memory(dlse.to(gradients.logsumexp.dtype).contiguous())
    with timed(trace, "compute", "backward"):
        _core.backward(
            memory(gradients.dout),
            memory(rows.q),
            memory(block.k),
            memory(block.v),
            memory(gradients.out),
            memory(gradients.logsumexp),
            dlogsumexp=per_row,
            sums=None if gradients.sums is None else memory(gradients.sums),
            sinks=rows.sink_logits(),
            **arrays,
            **rows.keywords(block.runs),
        )
    if dmask is not None:
        if into["mask"].shape[-1] == 1:
            into["mask"].add_(dmask)
        else:
            into["mask"].index_add_(-1, torch.from_numpy(positions(block.runs)), dmask)

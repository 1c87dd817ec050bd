"""The front door of `lh.distributed`: attention over a sequence whose tokens are spread over ranks.

Checks, lets the ranks agree, runs a plan, and tells autograd. The plans are in files of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from levelhead.distributed import call as calls
from levelhead.distributed import decode, gathered, ring, ulysses
from levelhead.distributed.agree import agree, mark
from levelhead.distributed.call import Asked, Call
from levelhead.distributed.local import OutputGradients
from levelhead.distributed.plan import ForwardResult
from levelhead.distributed.split import Split
from levelhead.distributed.trace import Trace
from levelhead.distributed.wire import Wire
from levelhead.errors import LevelheadError, LevelheadTypeError, expected
from levelhead.observation import Observation
from levelhead.state import State
from levelhead.torch.functorch import untraced

_PLANS: Mapping[str, ModuleType] = {"all-gather": gathered, "ring": ring, "decode": decode, "ulysses": ulysses}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    plan: str = "all-gather",
    split: Split | list[tuple[int, int, int]] | tuple[Any, Any] | None = None,
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
    timeout: Any = None,
    verify: bool = True,
    trace: Trace | None = None,
) -> Tensor:
    """`levelhead.attention` where each rank of a group holds a part of the tokens.

    Every rank calls it with the same options, and gets the output of its own queries. Each
    differentiates the loss of its own rows: what comes back for k and v has been summed over the
    ranks, once. A scale, sinks or anything else that all ranks hold a copy of gets the part of this
    rank's rows; sum it over the ranks, as for any weight. (In plan "decode" every rank has all rows
    and the same loss, and all gradients are whole.)

    Args:
        q: this rank's queries (..., H, T, D); in plan "decode" all of them. On the CPU.
        k: this rank's keys (..., G, S, D).
        v: this rank's values (..., G, S, E).
        group: of torch.distributed; None is all ranks.
        plan: "all-gather" (one collective; memory for all keys), "ring" (memory of a few shards,
            transfers overlap the kernel), "decode" (few queries, keys stay), "ulysses" (heads for
            tokens; heads must divide).
        split: which positions this rank holds: a `Split`, or this rank's own runs as a list; a
            pair where queries and keys lie differently. None: one rank after another, in order.
            Own runs are compared with those of the others, so that a rank that took another one's
            shard is noticed; a `Split` only with the shards' lengths.
        scale, causal, window, softcap, sinks, alibi, query_start, dropout: as in
            `levelhead.attention`; positions are those of the whole sequence.
        mask: this rank's queries × all keys by position, boolean or additive.
        key_lengths: keys that count of each batch row, in the whole sequence.
        segments: ids of this rank's tokens, one array or (queries', keys').
        seed: of dropout; None: the first rank draws one for all.
        timeout: seconds to wait for other ranks; None is the group's own.
        verify: whether rows are checked to have seen the keys that the options leave them.
        trace: where to note bytes and times.

    Returns:
        (..., H, T, E) in q's dtype.

    Raises:
        LevelheadError: on every rank, where ranks disagree or one of them is lost.
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
    found = _run("attention", q, k, v, plan, split, threads, given, group, timeout, verify, trace)
    out: Tensor = found[0]
    return out


def observe(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    group: Any = None,
    plan: str = "all-gather",
    split: Split | list[tuple[int, int, int]] | tuple[Any, Any] | None = None,
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
    timeout: Any = None,
    verify: bool = True,
    trace: Trace | None = None,
) -> Observation:
    """`attention` with every statistic of its softmax, over all keys of the sequence.

    The arguments are those of `attention`; without v, statistics only.

    Returns:
        An `Observation` of this rank's rows (in plan "decode": of all), as one process would have
        made it; key positions are those of the whole sequence. Output and logsumexp are
        differentiable.
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
    return look(
        q,
        k,
        v,
        given,
        group=group,
        plan=plan,
        split=split,
        threads=threads,
        timeout=timeout,
        verify=verify,
        trace=trace,
    )[0]


def look(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    options: dict[str, Any],
    *,
    group: Any = None,
    plan: str = "all-gather",
    split: Any = None,
    threads: int | None = None,
    timeout: Any = None,
    verify: bool = True,
    trace: Trace | None = None,
) -> tuple[Observation, Call]:
    """`observe`, and what the ranks agreed on: where this rank's rows sit in the sequence."""
    values = k[..., :0] if v is None and isinstance(k, Tensor) else v
    out, logsumexp, call, state = _run(
        "observe", q, k, values, plan, split, threads, options, group, timeout, verify, trace
    )
    flat = q.dim() == 2
    made = State(
        state.sums[0] if flat else state.sums,
        state.counts[0] if flat else state.counts,
        None if v is None else state.acc[0] if flat else state.acc,
        call.keys.n,
    )
    seen = Observation(made, call.rows.sink_logits(), call.origin)
    vars(seen)["logsumexp"] = logsumexp
    if v is not None:
        vars(seen)["output"] = out
    return seen, call


@untraced
def _run(
    kind: str,
    q: Any,
    k: Any,
    v: Any,
    plan: Any,
    split: Any,
    threads: Any,
    options: dict[str, Any],
    group: Any,
    timeout: Any,
    verify: bool,
    trace: Trace | None,
) -> tuple[Any, ...]:
    """Output, logsumexp, the call and, when observing, the states of its rows."""
    wire = Wire(group, timeout, trace)
    asked, refusal = _asked(wire, q, k, v, plan, split, threads, options)
    call = calls.settle(wire, kind, plan, asked, refusal, verify)
    assert asked is not None
    rows = call.rows
    found: dict[str, Any] = {}
    out, logsumexp = _Attend.apply(  # type: ignore[no-untyped-call]
        call, found, kind == "observe", rows.q, asked.k, asked.v, rows.scale, rows.mask, rows.sinks
    )
    if q.dim() == 2:
        out, logsumexp = out[0], logsumexp[0] if kind == "observe" else logsumexp
    return out, logsumexp, call, found.get("state")


def _asked(
    wire: Wire, q: Any, k: Any, v: Any, plan: Any, split: Any, threads: Any, options: dict[str, Any]
) -> tuple[Asked | None, LevelheadError | None]:
    """What is asked on this rank, or why that cannot be: the others must hear of it."""
    try:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, Tensor):
                given, advice = type(x).__name__, "Convert it with torch.from_numpy"
                raise LevelheadTypeError(expected(name, "a torch tensor", given, advice))
        if q.dim() == k.dim() == v.dim() == 2:  # one head without its axis
            q, k, v = q[None], k[None], v[None]
        asked = calls.ask(q, k, v, plan, split, threads, options)
        if plan == "ulysses":
            ulysses.refuse(asked.shape.H, asked.shape.G, wire.world)
        return asked, None
    except LevelheadError as error:
        return None, error


class _Attend(torch.autograd.Function):
    """A plan's two passes. All ranks come through both, in the same order."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        found: dict[str, Any],
        stats: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        seen: ForwardResult = _PLANS[call.plan].forward(call, k, v, stats=stats)
        found["state"] = seen.state
        ctx.save_for_backward(q, k, v, seen.out, seen.logsumexp, scale, mask, sinks)
        ctx.call, ctx.kept = call, seen.kept
        ctx.set_materialize_grads(False)
        return seen.out, seen.logsumexp

    @staticmethod
    @once_differentiable  # a second derivative would need another plan
    def backward(ctx: Any, dout: Tensor | None, dlogsumexp: Tensor | None) -> tuple[Any, ...]:
        call: Call = ctx.call
        q, k, v, out, logsumexp, scale, mask, sinks = ctx.saved_tensors
        names = ("call", "found", "stats", "q", "k", "v", "scale", "mask", "sinks")
        wanted = {name for name, x in zip(names, ctx.needs_input_grad, strict=True) if x}
        same = {"gradients": mark(sorted(wanted)), "logsumexp": int(dlogsumexp is not None)}
        agree(call.wire, f"the backward pass of call {call.number}", same, {})
        dout = torch.zeros_like(out) if dout is None else dout.to(out.dtype)
        result = OutputGradients(out, logsumexp, dout, dlogsumexp)
        found = _PLANS[call.plan].backward(call, k, v, result, ctx.kept, wanted)
        of = {"q": q, "k": k, "v": v, "scale": scale, "mask": mask, "sinks": sinks}
        grads = {name: x.to(of[name].dtype) for name, x in found.items() if name in wanted}
        return tuple(grads.get(name) for name in names)

"""`lh.distributed.attention` and `observe`: attention over a sequence whose tokens are spread over ranks.

Checks, lets the ranks agree, runs a plan, and registers its gradient. The plans are in files of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from levelhead.call.options import Options, documented, known, logit_cap
from levelhead.distributed import call as calls
from levelhead.distributed import decode, gathered, ring, ulysses
from levelhead.distributed.agree import agree, mark
from levelhead.distributed.call import Agreement, SplitLike, Spread
from levelhead.distributed.local import KeyBlock, OutputGradients
from levelhead.distributed.plan import ForwardResult
from levelhead.distributed.trace import Trace
from levelhead.distributed.wire import Wire
from levelhead.observation import Observation, Unpack
from levelhead.state import State
from levelhead.torch.functorch import untraced
from levelhead.torch.operators import first_order, wide

_PLANS: Mapping[str, ModuleType] = {"all-gather": gathered, "ring": ring, "decode": decode, "ulysses": ulysses}
_INPUTS = ("q", "k", "v", "scale", "mask", "sinks")  # of `_Attend` that may need gradients


@documented()
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    plan: str = "all-gather",
    split: SplitLike = None,
    threads: int | None = None,
    timeout: Any = None,
    verify: bool = True,
    trace: Trace | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """`levelhead.attention` where each rank of a group holds a part of the tokens.

    Every rank calls it with the same options, and gets the output of its own queries. Each differentiates the loss of
    its own rows: what comes back for k and v has been summed over the ranks, once. A scale, sinks or anything else that
    all ranks hold a copy of gets the part of this rank's rows; sum it over the ranks, as for any weight. (In plan
    "decode" every rank has all rows and the same loss, and all gradients are whole.)

    Args:
        q: this rank's queries (..., H, T, D); in plan "decode" all of them. On the CPU.
        k: this rank's keys (..., G, S, D).
        v: this rank's values (..., G, S, E).
        group: of torch.distributed; None is all ranks.
        plan: "all-gather" (one collective; memory for all keys), "ring" (memory of a few shards, transfers overlap the
            kernel), "decode" (few queries, keys stay), "ulysses" (heads for tokens; heads must divide).
        split: which positions this rank holds: a `Split`, or this rank's own runs as a list; a pair where queries and
            keys lie differently. None: one rank after another, in order. Own runs are compared with those of the
            others, so that a rank that took another one's shard is noticed; a `Split` only with the shards' lengths.
        {options}
            Positions and lengths are those of the whole sequence; a mask is this rank's queries × all keys by
            position; segments are the ids of this rank's tokens; without a seed the first rank draws one for all.
        timeout: seconds to wait for other ranks; None is the group's own.
        verify: whether rows are checked to have seen the keys that the options leave them.
        trace: where to note bytes and times.

    Returns:
        (..., H, T, E) in q's dtype.

    Raises:
        LevelheadError: on every rank, where ranks disagree or one of them is lost.
    """
    known("attention", options)
    spread = Spread(group, plan, split, threads, timeout, verify, trace)
    output: Tensor = _run("attention", q, k, v, options, spread)[0]
    return output


@documented()
def observe(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    group: Any = None,
    plan: str = "all-gather",
    split: SplitLike = None,
    threads: int | None = None,
    timeout: Any = None,
    verify: bool = True,
    trace: Trace | None = None,
    **options: Unpack[Options],
) -> Observation[Tensor]:
    """`attention` with every statistic of its softmax, over all keys of the sequence.

    Args:
        q, k, v, group, plan, split, threads, timeout, verify, trace: as in `attention`; without v, statistics only.
        {options}

    Returns:
        An `Observation` of this rank's rows (in plan "decode": of all), as one process would have made it; key
        positions are those of the whole sequence. Output and logsumexp are differentiable.
    """
    known("observe", options)
    spread = Spread(group, plan, split, threads, timeout, verify, trace)
    return look(q, k, v, options, **spread._asdict())[0]


def look(
    q: Tensor, k: Tensor, v: Tensor | None, options: Options, **spread: Any
) -> tuple[Observation[Tensor], Agreement]:
    """`observe`, and what the ranks agreed on: where this rank's rows sit in the sequence."""
    values = k[..., :0] if v is None and isinstance(k, Tensor) else v
    out, logsumexp, agreement, state = _run("observe", q, k, values, options, Spread(**spread))
    first = agreement.rows.first_keys()
    first = None if first is None else first.reshape((*state.sums.shape[:-3], 1, state.sums.shape[-2]))
    parts: tuple[Any, ...] = (state.sums, state.counts, None if v is None else state.acc, first, agreement.exists)
    sums, counts, acc, first, exists = (x[0] if q.dim() == 2 and x is not None else x for x in parts)
    states = State(sums, counts, acc, agreement.keys.n, first)
    sinks = agreement.rows.sink_logits()  # may be the caller's own memory
    sinks = None if sinks is None else sinks.copy()
    observation: Observation[Tensor] = Observation(states, sinks, agreement.origin, exists, logit_cap(options))
    vars(observation)["logsumexp"] = logsumexp
    if v is not None:
        vars(observation)["output"] = out
    return observation, agreement


@untraced
def _run(kind: str, q: Any, k: Any, v: Any, options: Options, spread: Spread) -> tuple[Any, ...]:
    """Output, logsumexp, the agreement and, when observing, the states of its rows."""
    wire = Wire(spread.group, spread.timeout, spread.trace)
    checked, agreement = calls.agreed(wire, kind, lambda: calls.check(q, k, v, options, spread, wire.world))
    rows = agreement.rows
    states: dict[str, Any] = {}
    out, logsumexp = _Attend.apply(  # type: ignore[no-untyped-call]
        agreement, states, kind == "observe", rows.q, checked.k, checked.v, rows.scale, rows.mask, rows.sinks
    )
    if q.dim() == 2:
        out, logsumexp = out[0], logsumexp[0] if kind == "observe" else logsumexp
    return out, logsumexp, agreement, states.get("state")


class _Attend(torch.autograd.Function):
    """A plan's two passes. All ranks come through both, in the same order."""

    @staticmethod
    def forward(ctx: Any, call: Agreement, states: dict[str, Any], stats: bool, *inputs: Any) -> tuple[Tensor, Tensor]:
        _, k, v, *_ = inputs
        own = KeyBlock(k, v, call.keys.runs[call.wire.rank])
        # A mask's gradient sums dout·out over many keys: the rounding of a half type would add up.
        precise = ctx.needs_input_grad[3 + _INPUTS.index("mask")] and wide(k.dtype) is not k.dtype
        result: ForwardResult = _PLANS[call.plan].forward(call, own, stats=stats, precise=precise)
        states["state"] = result.state
        exact = result.out if result.exact is None else result.exact
        ctx.save_for_backward(exact, result.logsumexp, *inputs)
        ctx.call, ctx.kept, ctx.sums = call, result.kept, result.sums
        ctx.set_materialize_grads(False)
        return result.out, result.logsumexp

    @staticmethod
    @first_order  # a second derivative would need another plan
    def backward(ctx: Any, dout: Tensor | None, dlogsumexp: Tensor | None) -> tuple[Any, ...]:
        call: Agreement = ctx.call
        out, logsumexp, *saved = ctx.saved_tensors
        inputs = dict(zip(_INPUTS, saved, strict=True))
        _, _, _, *needed = ctx.needs_input_grad
        wanted = {name for name, x in zip(_INPUTS, needed, strict=True) if x}
        same = {"gradients": mark(sorted(wanted)), "logsumexp": int(dlogsumexp is not None)}
        agree(call.wire, f"the backward pass of call {call.number}", same, {})
        dout = (torch.zeros_like(out) if dout is None else dout).to(inputs["q"].dtype)
        of_output = OutputGradients(out, logsumexp, dout, dlogsumexp, ctx.kept, ctx.sums)
        own = KeyBlock(inputs["k"], inputs["v"], call.keys.runs[call.wire.rank])
        gradients = _PLANS[call.plan].backward(call, own, of_output, wanted)
        grads = {name: x.to(inputs[name].dtype) for name, x in gradients.items() if name in wanted}
        return None, None, None, *map(grads.get, _INPUTS)

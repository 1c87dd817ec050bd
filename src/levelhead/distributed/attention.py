"""`lh.distributed.attention` and `observe`: attention over a sequence whose tokens are spread over ranks.

Checks, lets the ranks agree, runs a plan, and registers its gradient. The plans are in files of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from levelhead.call.options import Options, documented, known
from levelhead.distributed import call as calls
from levelhead.distributed import decode, gathered, ring, ulysses
from levelhead.distributed.agree import agree, mark
from levelhead.distributed.call import Agreement, Arguments, Checked, SplitLike
from levelhead.distributed.local import OutputGradients
from levelhead.distributed.plan import ForwardResult
from levelhead.distributed.trace import Trace
from levelhead.distributed.wire import Wire
from levelhead.errors import LevelheadError
from levelhead.observation import Observation
from levelhead.state import State
from levelhead.torch.functorch import untraced

if TYPE_CHECKING:
    from typing_extensions import Unpack

_PLANS: Mapping[str, ModuleType] = {"all-gather": gathered, "ring": ring, "decode": decode, "ulysses": ulysses}


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
    arguments = Arguments(q, k, v, plan, split, threads, options)
    output: Tensor = _run("attention", arguments, Wire(group, timeout, trace), verify)[0]
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
        An `Observation` of this rank's rows (in plan "decode": of all), as one process would have
        made it; key positions are those of the whole sequence. Output and logsumexp are
        differentiable.
    """
    known("observe", options)
    how: dict[str, Any] = {"group": group, "plan": plan, "split": split, "threads": threads}
    return look(q, k, v, options, **how, timeout=timeout, verify=verify, trace=trace)[0]


def look(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    options: Options,
    *,
    group: Any = None,
    plan: str = "all-gather",
    split: SplitLike = None,
    threads: int | None = None,
    timeout: Any = None,
    verify: bool = True,
    trace: Trace | None = None,
) -> tuple[Observation[Tensor], Agreement]:
    """`observe`, and what the ranks agreed on: where this rank's rows sit in the sequence."""
    values = k[..., :0] if v is None and isinstance(k, Tensor) else v
    arguments = Arguments(q, k, values, plan, split, threads, options)
    out, logsumexp, agreement, state = _run("observe", arguments, Wire(group, timeout, trace), verify)
    flat = q.dim() == 2
    parts: tuple[Any, ...] = (state.sums, state.counts, None if v is None else state.acc, agreement.exists)
    sums, counts, acc, exists = (x[0] if flat and x is not None else x for x in parts)
    observation: Observation[Tensor] = Observation(
        State(sums, counts, acc, agreement.keys.n), agreement.rows.sink_logits(), agreement.origin, exists
    )
    vars(observation)["logsumexp"] = logsumexp
    if v is not None:
        vars(observation)["output"] = out
    return observation, agreement


@untraced
def _run(kind: str, arguments: Arguments, wire: Wire, verify: bool) -> tuple[Any, ...]:
    """Output, logsumexp, the agreement and, when observing, the states of its rows."""
    checked, refusal = _checked(wire, arguments)
    agreement = calls.agreed(wire, kind, arguments.plan, checked, refusal, verify)
    assert checked is not None
    rows = agreement.rows
    states: dict[str, Any] = {}
    out, logsumexp = _Attend.apply(  # type: ignore[no-untyped-call]
        agreement, states, kind == "observe", rows.q, checked.k, checked.v, rows.scale, rows.mask, rows.sinks
    )
    if arguments.q.dim() == 2:
        out, logsumexp = out[0], logsumexp[0] if kind == "observe" else logsumexp
    return out, logsumexp, agreement, states.get("state")


def _checked(wire: Wire, arguments: Arguments) -> tuple[Checked | None, LevelheadError | None]:
    """This rank's arguments, or why they are refused; the other ranks learn of a refusal."""
    try:
        checked = calls.check(arguments)
        if arguments.plan == "ulysses":
            ulysses.refuse(checked.shape.H, checked.shape.G, wire.world)
        return checked, None
    except LevelheadError as error:
        return None, error


class _Attend(torch.autograd.Function):
    """A plan's two passes. All ranks come through both, in the same order."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Agreement,
        states: dict[str, Any],
        stats: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        seen: ForwardResult = _PLANS[call.plan].forward(call, k, v, stats=stats)
        states["state"] = seen.state
        ctx.save_for_backward(q, k, v, seen.out, seen.logsumexp, scale, mask, sinks)
        ctx.call, ctx.kept = call, seen.kept
        ctx.set_materialize_grads(False)
        return seen.out, seen.logsumexp

    @staticmethod
    @once_differentiable  # a second derivative would need another plan
    def backward(ctx: Any, dout: Tensor | None, dlogsumexp: Tensor | None) -> tuple[Any, ...]:
        call: Agreement = ctx.call
        q, k, v, out, logsumexp, scale, mask, sinks = ctx.saved_tensors
        names = ("call", "states", "stats", "q", "k", "v", "scale", "mask", "sinks")
        wanted = {name for name, x in zip(names, ctx.needs_input_grad, strict=True) if x}
        same = {"gradients": mark(sorted(wanted)), "logsumexp": int(dlogsumexp is not None)}
        agree(call.wire, f"the backward pass of call {call.number}", same, {})
        dout = torch.zeros_like(out) if dout is None else dout.to(out.dtype)
        result = OutputGradients(out, logsumexp, dout, dlogsumexp)
        gradients = _PLANS[call.plan].backward(call, k, v, result, ctx.kept, wanted)
        of = {"q": q, "k": k, "v": v, "scale": scale, "mask": mask, "sinks": sinks}
        grads = {name: x.to(of[name].dtype) for name, x in gradients.items() if name in wanted}
        return tuple(grads.get(name) for name in names)

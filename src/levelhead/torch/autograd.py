"""`levelhead.attention` and `levelhead.observe` for tensors that learn.

The arguments are checked where they always are; what is learned (q, k, v, a number or one per head
as scale, an additive mask, sinks) goes into the operator as it is, so that gradients find their way
back. `levelhead.attention` leads here; nobody needs to call this file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from levelhead import _core
from levelhead.attention import options_for_core, team_for
from levelhead.call import arrays, scoring
from levelhead.call.arrays import Origin
from levelhead.errors import LevelheadTypeError, LevelheadValueError, expected
from levelhead.observation import Observation
from levelhead.state import COUNTS, SUMS, State
from levelhead.torch.functorch import attend, untraced
from levelhead.torch.operators import Options, differentiate, for_core, memory, remember, wide


@untraced
def attention(q: Tensor, k: Tensor, v: Tensor, *, threads: int | None, out: Any, **options: Any) -> Tensor:
    """As `levelhead.attention`, differentiable."""
    if out is not None:
        advice = "Leave it out, or compute under torch.no_grad() and outside torch.compile"
        raise LevelheadValueError(expected("out", "None with gradients", "an array", advice))
    described, _, _ = _describe(q, k, v, threads, options)
    found, _ = attend(q, k, v, described)
    return found


@untraced
def observe(q: Tensor, k: Tensor, v: Tensor | None, *, threads: int | None, **options: Any) -> Observation:
    """As `levelhead.observe`; its output and its logsumexp are differentiable."""
    described, origin, sinks = _describe(q, k, v, threads, options)
    state: dict[str, Any] = {}
    values = k[..., :0] if v is None else v  # values of no width: statistics only
    out, logsumexp = _Observe.apply(state, v is not None, q, k, values, *described)  # type: ignore[no-untyped-call]
    seen = Observation(State(keys=k.shape[-2], **state), sinks, origin)
    vars(seen)["logsumexp"] = logsumexp
    if v is not None:
        vars(seen)["output"] = out
    return seen


class _Observe(torch.autograd.Function):
    """One pass that leaves the rows' states in `state`, which is not differentiated."""

    @staticmethod
    def forward(
        ctx: Any, state: dict[str, Any], valued: bool, q: Tensor, k: Tensor, v: Tensor, *given: Any
    ) -> tuple[Tensor, Tensor]:
        options, rows = Options(*given), tuple(q.shape[:-1])
        out = q.new_empty((*rows, v.shape[-1]))
        logsumexp = q.new_empty(rows, dtype=wide(q.dtype))
        real = memory(logsumexp).dtype
        state["sums"] = np.empty((*rows, len(SUMS)), real)
        state["counts"] = np.empty((*rows, len(COUNTS)), np.int64)
        state["acc"] = np.empty((*rows, v.shape[-1]), real) if valued else None
        into = {"out": memory(out), "logsumexp": memory(logsumexp)} | state
        _core.forward(memory(q), memory(k), memory(v), **into, **for_core(options, q, k))
        remember(ctx, q, k, v, options, (out, logsumexp))
        return out, logsumexp

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlogsumexp: Tensor | None) -> tuple[Any, ...]:
        names = ("state", "valued", "q", "k", "v", *Options._fields)
        needs = dict(zip(names, ctx.needs_input_grad, strict=True))
        wanted = tuple(needs[name] for name in ("q", "k", "v", "scale", "mask", "sinks"))
        call = torch.ops.levelhead.attend_backward
        found = differentiate(ctx, dout, dlogsumexp, wanted, call)
        return tuple(found.get(name) for name in names)


def _describe(
    q: Tensor, k: Tensor, v: Tensor | None, threads: int | None, options: dict[str, Any]
) -> tuple[Options, Origin, Any]:
    """The operator's options, where q came from, and the sinks as an observation keeps them."""
    given = [x for x in (q, k, v) if x is not None]
    if not all(isinstance(x, Tensor) for x in given):
        kinds = ", ".join(type(x).__name__ for x in given)
        wanted = "torch tensors, as an option is one that learns"
        advice = "Convert them with torch.from_numpy, or detach the option"
        raise LevelheadTypeError(expected("q, k, v", wanted, kinds, advice))
    with torch.no_grad():  # what is checked here is not what is differentiated
        if v is None:
            seen_q, seen_k, origin = arrays.take_pair(q, k)
            shape = scoring.shape_of(seen_q.shape, seen_k.shape, None)
        else:
            seen_q, seen_k, seen_v, origin = arrays.take(q, k, v)
            shape = scoring.shape_of(seen_q.shape, seen_k.shape, seen_v.shape)
        core = options_for_core(shape, origin, **options)
        team = team_for(threads, origin)
    sinks = core.get("sinks")
    found: dict[str, Any] = {name: core[name] for name in _PLAIN & core.keys()}
    for name in _ARRAYS & core.keys():
        found[name] = torch.from_numpy(np.array(core[name]))
    for name in ("mask", "sinks"):
        if isinstance(options[name], Tensor):
            found[name] = options[name]
    if "mask" in found and found["mask"].dim() > max(q.dim(), 2):
        found["mask"] = found["mask"][0]  # q of rank 2 is one head without its axis
    if isinstance(options["scale"], Tensor):
        found["scale"] = options["scale"].to(torch.float64).expand(shape.H)
    if "seed" in core:
        found["seed"] = torch.tensor(np.uint64(core["seed"]).astype(np.int64))
    if threads is not None:
        found["threads"] = team["threads"]
    return Options(**found), origin, sinks


_ARRAYS = {"scale", "mask", "sinks", "alibi", "key_lengths", "query_segments", "key_segments"}
_ARRAYS |= {"query_start"}
_PLAIN = {"cosine", "log_n", "causal", "left", "right", "softcap", "dropout"}

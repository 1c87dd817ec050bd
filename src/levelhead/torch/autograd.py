"""`levelhead.attention` and `levelhead.observe` for tensors that PyTorch differentiates.

What is differentiated (q, k, v, a number or one per head as scale, an additive mask, sinks) enters the operator as it
is, so that gradients reach it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from levelhead.call import arrays
from levelhead.call.arrays import Origin
from levelhead.call.options import BATCH, HEADS, MASK, TOKENS, Options, Scoring, Shape, fields, logit_cap, shape_of
from levelhead.call.prepare import described, first_keys_of, for_core, team_for
from levelhead.chosen_weights import row_indices
from levelhead.errors import bad_type, bad_value
from levelhead.observation import Observation
from levelhead.state import State, unwritten
from levelhead.torch import operators
from levelhead.torch.functorch import attend, untraced
from levelhead.torch.operators import memory
from levelhead.torch.weights import weights as weights_of

_LEARNED = ("scale", "mask", "sinks")  # options that gradients reach


@untraced
def attention(q: Tensor, k: Tensor, v: Tensor, options: Options, *, threads: int | None, out: Any) -> Tensor:
    """As `levelhead.attention`, differentiable."""
    if out is not None:
        advice = "Leave it out, or compute under torch.no_grad() and outside torch.compile"
        raise bad_value("out", "None with gradients", "an array", advice)
    scoring, _, _, team = scoring_of(q, k, v, threads, options)
    return attend(q, k, v, scoring, team)[0]


@untraced
def observe(
    q: Tensor, k: Tensor, v: Tensor | None, options: Options, *, threads: int | None, weights: Any = None
) -> Observation[Tensor]:
    """As `levelhead.observe`; its output, its logsumexp and its weights are differentiable."""
    scoring, shape, origin, team = scoring_of(q, k, v, threads, options)
    chosen = None if weights is None else torch.from_numpy(row_indices(weights, shape, origin.dtype))
    first, width = first_keys_of(scoring._asdict()), None if v is None else v.shape[-1]
    state = unwritten(tuple(q.shape[:-1]), width, origin.wide, k.shape[-2], first)
    values = k[..., :0] if v is None else v  # values of no width: statistics only
    out, logsumexp = _Observe.apply(state, q, k, values, *scoring, team, False)  # type: ignore[no-untyped-call]
    sinks = None if scoring.sinks is None else memory(scoring.sinks.detach().to(torch.float64, copy=True))
    exists = scoring.existing_rows(shape, torch.arange(shape.T))
    seen = None if exists is None else exists.numpy()
    observation: Observation[Tensor] = Observation(state, sinks, origin, seen, logit_cap(scoring._asdict()))
    vars(observation)["logsumexp"] = logsumexp
    if chosen is not None:
        vars(observation)["weights"] = weights_of(q, k, scoring, chosen)
    if v is not None:
        vars(observation)["output"] = out
    return observation


class _Observe(torch.autograd.Function):
    """One pass that writes the rows' states to `state`, which is not differentiated."""

    @staticmethod
    def forward(ctx: Any, state: State, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        scoring, threads = operators.unpacked(arguments)
        output = operators.forward(q, k, v, state, operators.for_core(scoring, q, k, threads))
        operators.setup(ctx, (q, k, v, *arguments), output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlogsumexp: Tensor | None) -> tuple[Tensor | None, ...]:
        return operators.backward(ctx, dout, dlogsumexp, names=("state", *operators.ARGUMENTS))


def tensors_in(x: Any) -> list[Tensor]:
    """The tensors of an option, which may be a pair or a list."""
    return [part for part in (x if isinstance(x, tuple | list) else (x,)) if isinstance(part, Tensor)]


def refuse_gradients(options: Mapping[str, Any]) -> None:
    """An option that requires gradients and has none would be learned in vain."""
    for name, x in options.items():
        if x is None or x is False or name in _LEARNED:
            continue  # most are: small calls come here, too
        if any(part.requires_grad for part in tensors_in(x)) and torch.is_grad_enabled():
            wanted = "a tensor that needs no gradient"
            raise bad_value(name, wanted, "requires_grad=True", "There is no gradient by it: pass it detached")


def scoring_of(
    q: Tensor, k: Tensor, v: Tensor | None, threads: int | None, options: Options
) -> tuple[Scoring, Shape, Origin, int | None]:
    """The options as tensors, those of the caller where gradients are to reach them; shape, origin, threads."""
    tensors = [x for x in (q, k, v) if x is not None]
    if not all(isinstance(x, Tensor) for x in tensors):
        kinds = ", ".join(type(x).__name__ for x in tensors)
        wanted = "torch tensors, as an option requires gradients"
        raise bad_type("q, k, v", wanted, kinds, "Convert them with torch.from_numpy, or detach the option")
    refuse_gradients(options)
    with torch.no_grad():  # the checks are not differentiated
        *views, origin = arrays.take_pair(q, k) if v is None else arrays.take(q, k, v)
        shape = shape_of(*(view.shape for view in views), *([None] if v is None else []))
        scoring = described(shape, origin, options)
        team = team_for(threads, origin)
    keywords = for_core(scoring, shape)
    changed: dict[str, Any] = {
        name: torch.from_numpy(np.array(keywords[name]))
        for name in fields(HEADS, MASK, BATCH, TOKENS)
        if name in keywords
    }
    for name in ("mask", "sinks"):
        if isinstance(options.get(name), Tensor):
            changed[name] = options[name]
    if "mask" in changed and changed["mask"].dim() > max(q.dim(), 2):
        changed["mask"] = changed["mask"][0]  # q of rank 2 is one head without its axis
    scale = options.get("scale")
    if isinstance(scale, Tensor):
        changed["scale"] = scale.to(torch.float64).expand(shape.H)
    changed["seed"] = torch.tensor(np.uint64(scoring.seed).astype(np.int64)) if scoring.dropout else None
    return scoring._replace(**changed), shape, origin, None if threads is None else team["threads"]

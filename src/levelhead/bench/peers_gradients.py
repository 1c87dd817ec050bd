"""A forward and a backward pass in PyTorch: levelhead, scaled_dot_product_attention, FlexAttention.

Each gets the same leaves and the same gradient of the output, and computes the output and the gradients by q, k and v.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from levelhead.attention import attention
from levelhead.bench import peers_torch
from levelhead.bench.calls import Call, Variants
from levelhead.bench.gradients import Step

_NAMES = ("q", "k", "v")


def ours(step: Step, threads: int) -> Variants:
    return {"attention": partial(_call, step, partial(attention, **step.options))}


def sdpa(step: Step, threads: int) -> Variants:
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    case = step.case
    options = peers_torch.sdpa_options(step)
    variants: Variants = {"sdpa": partial(_call, step, partial(sdpa, **options))}
    if case.grouped:
        options = {name: value for name, value in options.items() if name != "enable_gqa"}
        repeated = partial(_repeated, partial(sdpa, **options), case.H // case.G)
        variants["sdpa, keys repeated"] = partial(_call, step, repeated)
    if case.plain and not case.grouped and case.T <= peers_torch.SMALL:
        attend = partial(peers_torch.three_steps, case.D**-0.5)
        variants["matmul, softmax, matmul"] = partial(_call, step, attend)
    return variants


def flex(step: Step, threads: int) -> Variants:
    peers_torch.flex(step, threads)  # refuses what it refuses forward

    def build() -> Call:
        attend, options = peers_torch.flex_compiled(step.case)
        return _call(step, partial(attend, **options), warm=True)

    return {"compiled": build}


def _call(step: Step, attend: Callable[..., Any], warm: bool = False) -> Call:
    leaves = [peers_torch.tensor(x) for x in (step.q, step.k, step.v)]
    run = peers_torch.step(attend, leaves, peers_torch.tensor(step.dout))
    return Call(run, partial(peers_torch.read_step, _NAMES), warm)


def _repeated(attend: Callable[..., Any], times: int, q: Any, k: Any, v: Any) -> Any:
    """A group's keys and values once per query head, which PyTorch may do faster than grouping."""
    return attend(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))

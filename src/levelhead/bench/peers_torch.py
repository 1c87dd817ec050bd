"""PyTorch as a peer: scaled_dot_product_attention, eager and compiled, and FlexAttention compiled.

Tensors share memory with the problem's arrays. Gradients are off for the whole measurement, so no call pays for a
context manager; steps of training, which are long, turn them on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np

from levelhead.bench.calls import Array, Call, Differentiable, Refused, Variants, named, refuse_large_scores
from levelhead.bench.cases import Case
from levelhead.bench.inputs import Problem
from levelhead.call import segments

SMALL = 512  # tokens up to which three plain operators may beat the fused one


@contextmanager
def session(threads: int) -> Iterator[str]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            yield f"torch.set_num_threads({threads}), torch.no_grad()"
    finally:
        torch.set_num_threads(before)


def tensor(x: Array) -> Any:
    import torch

    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.require(x, requirements=["W"]))


def call(problem: Differentiable, attend: Callable[..., Any], warm: bool = False) -> Call:
    """A call that gives the output, and with it the gradients by all arguments if the case is about them."""
    import torch

    leaves = tuple(tensor(x) for x in problem.arguments.values())
    if not problem.case.gradients:
        return Call(lambda: attend(*leaves), _read, warm)
    dout = tensor(problem.dout)
    for leaf in leaves:
        leaf.requires_grad_()

    def step() -> tuple[Any, ...]:
        with torch.enable_grad():
            out = attend(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    return Call(step, lambda results: named(problem, map(_read, results)), warm)


def _read(out: Any) -> Array:
    result: Array = out.detach().float().numpy()
    return result


# ---- scaled_dot_product_attention -------------------------------------------


def sdpa(problem: Problem, threads: int) -> Variants:
    case = problem.case
    _refuse(case)
    variants: Variants = {"sdpa": partial(_sdpa, problem)}
    if case.packed:
        variants["sdpa per sequence"] = partial(_per_sequence, problem)
    if case.padding:
        variants["sdpa per row"] = partial(_per_row, problem)
    if case.grouped and case.gradients:
        variants["sdpa, keys repeated"] = partial(_keys_repeated, problem)
    if _small(case):
        variants["matmul, softmax, matmul"] = partial(call, problem, _three_steps)
    return variants


def _refuse(case: Case) -> None:
    if case.softcap is not None:
        raise Refused("scaled_dot_product_attention has no soft cap")
    if case.D != case.E:
        refuse_large_scores(case)  # unequal widths take the path that stores them


def _small(case: Case) -> bool:
    return case.plain and not case.grouped and case.T <= SMALL


def _sdpa(problem: Problem) -> Call:
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    options = _options(problem)
    return call(problem, partial(sdpa, **options) if options else sdpa)


def _options(problem: Problem) -> dict[str, Any]:
    return _masking(problem) | ({"enable_gqa": True} if problem.case.grouped else {})


def _masking(problem: Problem) -> dict[str, Any]:
    """Arguments of scaled_dot_product_attention that hide keys or add a bias."""
    if problem.case.only_causal:
        return {"is_causal": True}
    mask = problem.bias_or_mask
    return {} if mask is None else {"attn_mask": tensor(mask)}


def _per_sequence(problem: Problem) -> Call:
    """Packed sequences without a mask: one call each, results side by side."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    assert problem.ends is not None
    spans = [slice(*pair) for pair in pairwise(problem.ends.tolist())]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return torch.cat([sdpa(q[:, :, at], k[:, :, at], v[:, :, at]) for at in spans], dim=2)

    return call(problem, attend)


def _per_row(problem: Problem) -> Call:
    """Padding without a mask: one call per batch row, its keys cut to length."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    assert problem.lengths is not None
    cuts = list(enumerate(problem.lengths.tolist()))

    def attend(q: Any, k: Any, v: Any) -> Any:
        return torch.cat([sdpa(q[b, None], k[b, None, :, :n], v[b, None, :, :n]) for b, n in cuts])

    return call(problem, attend)


def _keys_repeated(problem: Problem) -> Call:
    """A group's keys and values once per query head, which PyTorch may do faster than grouping."""
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    times, options = problem.case.H // problem.case.G, _masking(problem)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return sdpa(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1), **options)

    return call(problem, attend)


def _three_steps(q: Any, k: Any, v: Any) -> Any:
    import torch

    return torch.softmax((q * q.shape[-1] ** -0.5) @ k.mT, dim=-1) @ v


# ---- what torch.compile makes of a function ---------------------------------


def compiled(problem: Problem, threads: int) -> Variants:
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    _refuse(problem.case)
    variants: Variants = {"sdpa": partial(compiled_call, problem, sdpa, **_options(problem))}
    if _small(problem.case):
        variants["matmul, softmax, matmul"] = partial(compiled_call, problem, _three_steps)
    return variants


def compiled_call(problem: Differentiable, function: Callable[..., Any], **options: Any) -> Call:
    return call(problem, partial(_compiled(problem.case, function), **options), warm=True)


@lru_cache(maxsize=4)  # the seeds of one case share what was compiled for it
def _compiled(case: Case, function: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    _forget_other_cases(case)
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled


@lru_cache(maxsize=1)
def _forget_other_cases(case: Case) -> None:
    """torch.compile serves few sizes of one function, then runs it as it is."""
    import torch

    torch._dynamo.reset()


# ---- FlexAttention ----------------------------------------------------------


def flex(problem: Problem, threads: int) -> Variants:
    if problem.case.plain:
        raise Refused("nothing to compile: without a mask it is scaled_dot_product_attention")
    return {"compiled": partial(_flex, problem)}


def _flex(problem: Problem) -> Call:
    from torch.nn.attention import flex_attention as flex

    return compiled_call(problem, flex.flex_attention, **_flex_options(problem.case))


@lru_cache(maxsize=1)  # the seeds of one case share the functions that were compiled for it
def _flex_options(case: Case) -> dict[str, Any]:
    from torch.nn.attention import flex_attention as flex

    empty = Problem(case, *[np.empty(0)] * 4)  # masks do not depend on q, k, v
    options: dict[str, Any] = {"enable_gqa": case.grouped}
    mask_mod = _mask_mod(empty)
    if mask_mod is not None:
        rows = case.B if case.padding else None
        options["block_mask"] = flex.create_block_mask(mask_mod, rows, None, case.T, case.S, device="cpu")
    score_mod = _score_mod(empty)
    if score_mod is not None:
        options["score_mod"] = score_mod
    return options


def _mask_mod(problem: Problem) -> Callable[..., Any] | None:
    case = problem.case
    shift = case.S - case.T
    if case.window:
        width = case.window
        return lambda b, h, i, j: (j <= i + shift) & (j > i + shift - width)
    if case.causal:
        return lambda b, h, i, j: j <= i + shift
    if problem.ids is not None:
        ids = tensor(problem.ids)
        return lambda b, h, i, j: ids[i] == ids[j]
    if problem.lengths is not None:
        lengths = tensor(problem.lengths)
        return lambda b, h, i, j: j < lengths[b]
    if case.mask == "bool" and problem.mask is not None:
        mask = tensor(problem.mask)
        return lambda b, h, i, j: mask[i, j]
    return None


def _score_mod(problem: Problem) -> Callable[..., Any] | None:
    import torch

    case = problem.case
    shift = case.S - case.T
    if case.softcap is not None:
        cap = case.softcap
        return lambda s, b, h, i, j: cap * torch.tanh(s / cap)
    if case.alibi:
        slopes = tensor(segments.alibi_slopes(case.H).astype(np.float32))
        return lambda s, b, h, i, j: s - slopes[h] * (i + shift - j).abs()
    if case.mask == "float" and problem.mask is not None:
        added = tensor(problem.mask)
        return lambda s, b, h, i, j: s + added[i, j]
    return None

"""The core as functions of JAX: attention with its states, its gradient, and the gradient's own gradient.

On the CPU both are custom calls, elsewhere the formula over chunks of keys (`formula`); which of them runs is decided
when the program is lowered for its platform. The pure wheel has no kernel: there it is the formula everywhere. What a
call is made of is in a `Plan`; arrays come by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from levelhead import stats
from levelhead.errors import bad_value
from levelhead.info import is_pure
from levelhead.jax import formula
from levelhead.jax.call import Arrays, Plan, heads_first, wide
from levelhead.jax.promotion import usual_promotion
from levelhead.jax.varying import as_varying, axes_of, result_types, with_auto_axes
from levelhead.state import COUNTS, SUMS

WANTED = ("q", "k", "v", "scale", "mask", "sinks")  # what has a gradient
_FORWARD, _BACKWARD = "levelhead_attend", "levelhead_attend_backward"

_COMPILED = not is_pure()
if _COMPILED:
    from levelhead import _jax_ffi

    jax.ffi.register_ffi_target(_FORWARD, _jax_ffi.attend, platform="cpu")
    jax.ffi.register_ffi_target(_BACKWARD, _jax_ffi.attend_backward, platform="cpu")


def _on_platform(
    plan: Plan, by_kernel: Callable[..., Arrays], by_formula: Callable[..., Arrays], *given: Any
) -> Arrays:
    if not plan.dropout:
        found: Arrays = (
            lax.platform_dependent(*given, cpu=by_kernel, default=by_formula) if _COMPILED else by_formula(*given)
        )
        return found
    if not _COMPILED:
        raise bad_value(
            "dropout", "0 in the pure wheel, whose JAX has no kernel", plan.dropout, "Only the kernel draws it"
        )
    return by_kernel(*given)


def _custom_call(target: str, plan: Plan, operands: Arrays, results: dict[str, tuple[tuple[int, ...], Any]]) -> Arrays:
    call = jax.ffi.ffi_call(target, result_types(results.values(), operands), vmap_method="expand_dims")
    names = {"operands": " ".join(operands), "results": " ".join(results)}
    found = call(*operands.values(), **names, **plan.attributes())
    return dict(zip(results, found, strict=True))


def _rows(plan: Plan, arrays: Arrays) -> tuple[int, ...]:
    return heads_first(arrays["q"].shape, plan.tokens_first)[:-1]


# ---- forward


def _forward_by_kernel(plan: Plan, arrays: Arrays) -> Arrays:
    rows, width, real = _rows(plan, arrays), arrays["v"].shape[-1], wide(arrays["q"].dtype)
    results: dict[str, Any] = {"out": ((*arrays["q"].shape[:-1], width), arrays["q"].dtype), "logsumexp": (rows, real)}
    if plan.observed:
        counted = jnp.arange(1).dtype
        results |= {"sums": ((*rows, len(SUMS)), real), "counts": ((*rows, len(COUNTS)), counted)}
        results |= {"acc": ((*rows, width), real)}
    return _custom_call(_FORWARD, plan, arrays, results)


def _forward_by_formula(plan: Plan, arrays: Arrays) -> Arrays:
    states = formula.states(plan, arrays)
    scoring = plan.scoring(arrays, states.sums.dtype)
    exists = scoring.exists(jnp.arange(states.sums.shape[-2]))
    exists = None if exists is None else exists.reshape(*states.sums.shape[:-3], 1, -1)
    rows = stats.rows(states.sums, states.counts, scoring.sinks, exists)
    assert states.acc is not None
    out: Any = states.acc * rows.top1[..., None]
    out = (out.swapaxes(-2, -3) if plan.tokens_first else out).astype(arrays["q"].dtype)
    found = {"out": out, "logsumexp": rows.logsumexp.astype(states.sums.dtype)}
    found |= {"sums": states.sums, "counts": states.counts, "acc": states.acc} if plan.observed else {}
    varying: Arrays = as_varying(found, axes_of(arrays))  # as the kernel's: what holds no number varies over nothing
    return varying


@partial(jax.jit, static_argnums=0)
def _forward(plan: Plan, arrays: Arrays) -> Arrays:
    return _on_platform(plan, partial(_forward_by_kernel, plan), partial(_forward_by_formula, plan), arrays)


@partial(jax.jit, static_argnums=0)  # shard_map outside of jit takes no function with symbolic zeros but so
def attend(plan: Plan, arrays: Arrays) -> Arrays:
    """Output and logsumexp, and with `plan.observed` the states, by name. Only the first two are differentiated."""
    given = tuple(range(plan.rank - 1))
    rows = heads_first((*given, -1), plan.tokens_first)[:-1]
    results = {"out": (given, 1), "logsumexp": (rows, 0)}
    results |= dict.fromkeys(("sums", "counts", "acc") if plan.observed else (), (rows, 1))
    found: Arrays = with_auto_axes(partial(_attend, plan), arrays, arrays["q"], results)
    return found


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, arrays: Arrays) -> Arrays:
    found: Arrays = _forward(plan, arrays)
    return found


def _as_shape(wanted: tuple[str, ...]) -> Any:
    """What is wanted, as the shape of an empty array among what is kept for the backward pass.

    JAX keeps the pytree of what is kept once for each traced call, that of the last differentiation: a gradient by
    other arrays since would change the names in it. Shapes go with the arrays.
    """
    return jnp.zeros((sum(1 << n for n, name in enumerate(WANTED) if name in wanted), 0), jnp.bool_)


def _from_shape(shape: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(name for n, name in enumerate(WANTED) if shape[0] >> n & 1)


@usual_promotion
def _attend_kept(plan: Plan, marked: Any) -> tuple[Arrays, Any]:
    if "alibi" in marked and marked["alibi"].perturbed:  # it would be learned in vain
        advice = "There is no gradient by it: pass jax.lax.stop_gradient(alibi)"
        raise bad_value("alibi", "slopes that need no gradient", "slopes that are differentiated", advice)
    arrays = {name: x.value for name, x in marked.items()}
    wanted = tuple(
        name
        for name in WANTED
        if name in marked and marked[name].perturbed and jnp.issubdtype(arrays[name].dtype, jnp.floating)
    )
    found = _attend(plan, arrays)
    return found, (_as_shape(wanted), arrays, found["out"], found["logsumexp"])


@usual_promotion
def _attend_back(plan: Plan, kept: Any, incoming: Arrays) -> tuple[Arrays]:
    marks, arrays, out, logsumexp = kept
    wanted = _from_shape(marks.shape)
    if not all(_is_zero(incoming[name]) for name in ("sums", "acc") if name in incoming):
        advice = "Only output and logsumexp of an observation have one: use these, or jax.lax.stop_gradient"
        raise bad_value("observe", "no gradient by rows and heads of the statistics", "one", advice)
    dout, dlogsumexp = (None if _is_zero(incoming[name]) else incoming[name] for name in ("out", "logsumexp"))
    none: Arrays = dict.fromkeys(arrays)
    if not wanted or (dout is None and dlogsumexp is None):
        return (none,)
    dout = jnp.zeros_like(out) if dout is None else dout
    upstream = {"dout": dout} | ({} if dlogsumexp is None else {"dlogsumexp": dlogsumexp})
    plain = plan._replace(observed=False)
    return (none | attend_back(plain, wanted, arrays, {"out": out, "logsumexp": logsumexp}, upstream),)


def _is_zero(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


_attend.defvjp(_attend_kept, _attend_back, symbolic_zeros=True)


# ---- backward


def _backward_by_kernel(
    plan: Plan, wanted: tuple[str, ...], arrays: Arrays, results: Arrays, upstream: Arrays
) -> Arrays:
    real, heads = wide(arrays["q"].dtype), _rows(plan, arrays)[-2]
    types = {
        name: (arrays[name].shape, real if name in ("mask", "scale", "sinks") else arrays[name].dtype)
        for name in wanted
    }
    types |= {name: ((heads,), real) for name in ("scale", "sinks") if name in wanted}
    named = {f"d{name}": x for name, x in types.items()}
    upstream = upstream | {"dout": upstream["dout"].astype(arrays["q"].dtype)}
    found = _custom_call(_BACKWARD, plan, arrays | results | upstream, named)
    return {name: found[f"d{name}"].astype(arrays[name].dtype) for name in wanted}


def _backward_by_formula(
    plan: Plan, wanted: tuple[str, ...], arrays: Arrays, results: Arrays, upstream: Arrays
) -> Arrays:
    logsumexp = results["logsumexp"]
    dlogsumexp = upstream.get("dlogsumexp", jnp.zeros_like(logsumexp))
    return formula.gradients(plan, wanted, arrays, results["out"], logsumexp, upstream["dout"], dlogsumexp)


@partial(jax.jit, static_argnums=(0, 1))
def _backward(plan: Plan, wanted: tuple[str, ...], arrays: Arrays, results: Arrays, upstream: Arrays) -> Arrays:
    by_kernel, by_formula = partial(_backward_by_kernel, plan, wanted), partial(_backward_by_formula, plan, wanted)
    if "mask" in wanted and wide(arrays["q"].dtype) != arrays["q"].dtype:
        # A mask's gradient is a sum of many: the rounding of dout · out in a half type would add up in it.
        floats = ("q", "k", "v", "mask")
        exact = _forward(plan, arrays | {name: arrays[name].astype(jnp.float32) for name in floats})
        results = results | {"out": exact["out"]}
    return _on_platform(plan, by_kernel, by_formula, arrays, results, upstream)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_back(plan: Plan, wanted: tuple[str, ...], arrays: Arrays, results: Arrays, upstream: Arrays) -> Arrays:
    """The gradients of `attend` by the arrays in `wanted`. `results` count as functions of the arrays."""
    found: Arrays = _backward(plan, wanted, arrays, results, upstream)
    return found


@usual_promotion
def _attend_back_kept(plan: Plan, wanted: tuple[str, ...], *inputs: Arrays) -> tuple[Arrays, Any]:
    return attend_back(plan, wanted, *inputs), inputs


@usual_promotion
def _attend_back_back(plan: Plan, wanted: tuple[str, ...], inputs: Any, incoming: Arrays) -> tuple[Any, ...]:
    """From the formula, with the whole matrix of logits."""
    if plan.dropout:
        advice = "Use dropout=0.0 where you need second derivatives"
        raise bad_value("dropout", "0 in second derivatives", plan.dropout, advice)
    arrays, _, upstream = inputs
    moved = {name: x for name, x in arrays.items() if name in WANTED and jnp.issubdtype(x.dtype, jnp.floating)}

    def first(moved: Arrays, upstream: Arrays) -> Arrays:
        def forward(these: Arrays) -> tuple[Any, Any]:
            return formula.whole(plan, arrays | moved | these)

        (out, logsumexp), pull = jax.vjp(forward, {name: moved[name] for name in wanted})
        per_row = upstream.get("dlogsumexp", jnp.zeros_like(logsumexp)).astype(logsumexp.dtype)
        found: Arrays = pull((upstream["dout"].astype(out.dtype), per_row))[0]
        return found

    _, pull = jax.vjp(first, moved, upstream)
    by_arrays, by_upstream = pull(incoming)
    return dict.fromkeys(arrays) | by_arrays, {"out": None, "logsumexp": None}, by_upstream


attend_back.defvjp(_attend_back_kept, _attend_back_back)

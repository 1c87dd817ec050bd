"""The gradients: weights from the logsumexp, then `reference`'s formulas, part by part."""

from __future__ import annotations

from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from levelhead import reference, state
from levelhead.numpy_core import additive
from levelhead.numpy_core.forward import rounded, store
from levelhead.numpy_core.machine import check_isa
from levelhead.numpy_core.problem import Part, Problem, agreed, dealt, four

Array: TypeAlias = NDArray[Any]

# From where a logsumexp is so far from zero that its rounding is an error of weights (`is_far` in state.h).
_FAR = {4: 2.0**10, 8: 2.0**20}  # by the bytes of a number


def backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    logsumexp: Any,
    *,
    dlogsumexp: Any | None = None,
    sums: Any | None = None,
    sinks: Any | None = None,
    dq: Any | None = None,
    dk: Any | None = None,
    dv: Any | None = None,
    dmask: Any | None = None,
    dsinks: Any | None = None,
    dscale: Any | None = None,
    dadditive: Any | None = None,
    threads: int = 1,
    torchs_team: bool = False,
    **options: Any,
) -> None:
    check_isa()
    problem = Problem(q, k, v, options)
    shape, real = problem.shape, problem.real
    rows: dict[str, tuple[Any, int | None, Any]] = {"dout": (dout, shape.E, None), "out": (out, shape.E, None)}
    rows |= {"logsumexp": (logsumexp, None, real), "dlogsumexp": (dlogsumexp, None, real)}
    rows["sums"] = sums, len(state.SUMS), real
    given = {name: problem.per_row(name, *x) for name, x in rows.items() if x[0] is not None}
    extra = np.full(shape.H, -np.inf) if sinks is None else agreed("sinks", sinks, (shape.H,), np.float64)
    queries = {name: four(agreed(f"d{name}", x, np.shape(q))) for name, x in (("q", dq),) if x is not None}
    keys = {
        name: four(agreed(f"d{name}", x, np.shape(of))) for name, x, of in (("k", dk, k), ("v", dv, v)) if x is not None
    }
    sizes = (("sinks", dsinks, shape.H), ("scale", dscale, shape.H), ("additive", dadditive, shape.D))
    totals = {name: agreed(f"d{name}", x, (n,), np.float64) for name, x, n in sizes if x is not None}
    for target in (*totals.values(), *(keys.values() if shape.T == 0 else ())):
        target[...] = 0
    mask = None if dmask is None else problem.per_row("dmask", dmask, shape.S, real)

    def compute(parts: list[Part]) -> dict[str, Array]:
        """The parts of the same keys, whose gradients add up."""
        found: dict[str, Array] = {}
        with np.errstate(all="ignore"):
            for part in parts:
                own = _gradients(part, {name: x[part.place] for name, x in given.items()}, extra[part.heads])
                for name, target in queries.items():
                    store(target, part.place, own[name])
                if mask is not None:
                    _add(mask[part.place], own["mask"])
                for name in (*keys, *totals):
                    found[name] = found[name] + own[name] if name in found else own[name]
            for name, target in keys.items():
                store(target, parts[0].keys, found[name])
        return found

    together = [list(parts) for _, parts in groupby(problem.parts(), key=lambda part: part.keys)]
    alone = mask is not None  # a bias that was broadcast has one place for several parts
    for parts, found in zip(together, dealt(compute, together, 1 if alone else threads), strict=True):
        for name, target in totals.items():
            target[... if name == "additive" else parts[0].heads] += found[name]


def _gradients(part: Part, given: dict[str, Array], sinks: Array) -> dict[str, Array]:
    """By what the part has, sums over heads of a group, rows and batch rows included; the mask's for each logit."""
    shape, scoring, exists = part.shape, part.scoring, part.exists()
    rows = np.True_ if exists is None else exists[..., None]
    s = part.logits()
    seen = s != -np.inf
    sink = np.where(rows, sinks[:, None, None], -np.inf)
    (w, w_sink), kept = _weights(s, given, sink), part.kept()
    dout = np.where(rows, reference.wide(given["dout"]), 0.0)
    assert part.v is not None
    dw = reference.slope_of_weights(dout, part.v, shape, seen, kept)
    delta = (dout * reference.wide(given["out"])).sum(-1, keepdims=True)
    if "dlogsumexp" in given:
        delta = delta - np.where(rows, given["dlogsumexp"], 0.0)
    ds = np.where(seen, w * (dw - delta), 0.0)
    by_values = reference.weigh(np.swapaxes(kept * w, -1, -2), dout, np.swapaxes(seen, -1, -2))
    found = {"mask": ds, "sinks": reference.sum_of_heads(-(w_sink * delta))}
    if part.weights is None:
        found |= reference.through_logits(ds, part.q, part.k, shape, scoring, part.index, part.j)
        found["scale"] = reference.sum_of_heads(found["scale"])
    else:
        spread = reference.spread_heads(part.k, shape)
        found["q"], found["k"], found["additive"] = additive.gradients(ds, part.q, spread, part.weights)
    return found | {name: reference.sum_of_group(x, shape) for name, x in (("k", found["k"]), ("v", by_values))}


def _weights(s: Array, given: dict[str, Array], sink: Array) -> tuple[Array, Array]:
    """Those of the keys, (b, h, t, S), and of the sink, (b, h, t, 1): from the logsumexp, where its rounding does not
    matter; else from the maximum and the sum, given where the problem has some of the keys alone."""
    lse = given["logsumexp"]
    far = np.isfinite(lse) & (np.abs(lse) > _FAR[lse.itemsize])
    seen = s != -np.inf
    w, w_sink = np.where(seen, np.exp(s - lse), 0.0), np.where(sink == -np.inf, 0.0, np.exp(sink - lse))
    if not far.any():
        return w, w_sink
    partial = "sums" in given  # whose maximum is one of the rounded logits
    _, units, m, _, e = reference.exponentials(rounded(s, lse.dtype) if partial else s)
    m, l, z = m[..., None], e.sum(-1, keepdims=True), sink / state.LN2  # noqa: E741
    if partial:
        m, l = (given["sums"][..., [column]] for column in (state.MAX, state.L))  # noqa: E741
    top = np.maximum(m.astype(np.float64), z)
    total = np.exp2(m - top) * l + np.exp2(z - top)
    return np.where(far & seen, np.exp2(units - top) / total, w), np.where(far, np.exp2(z - top) / total, w_sink)


def _add(target: Array, x: Array) -> None:
    """Adds to memory of which axes of stride 0 have one place for all of their indices."""
    for axis, (stride, n) in enumerate(zip(target.strides, target.shape, strict=True)):
        if stride == 0 and n > 1:
            x, target = x.sum(axis, keepdims=True), target[(slice(None),) * axis + (slice(1),)]
    target += x

"""Attention and its states: `forward`, and `finish`, `merge` and `exponential`, which read and join states.

Logits are formed in float64 and rounded to the type that states are kept in, since a state's maximum must be one of its
logits. An output is read off its state, so that attention, observe and a merge end in the same bits.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from levelhead import reference, state, stats
from levelhead.call.halves import as_bfloat16
from levelhead.numpy_core.machine import check_isa
from levelhead.numpy_core.problem import Part, Problem, agreed, dealt
from levelhead.state import State

Array: TypeAlias = NDArray[Any]

_NOWHERE = np.iinfo(np.int64).min  # no key is at this position


def forward(
    q: Any,
    k: Any,
    v: Any | None,
    *,
    out: Any | None = None,
    logsumexp: Any | None = None,
    acc: Any | None = None,
    sums: Any | None = None,
    counts: Any | None = None,
    sinks: Any | None = None,
    first_keys: Any | None = None,
    threads: int = 1,
    torchs_team: bool = False,
    **options: Any,
) -> None:
    check_isa()
    problem = Problem(q, k, None if out is None and acc is None else v, options)
    batch = problem.shape.batch or (1,)
    first = None
    if first_keys is not None:  # places of keys, which `reference` knows by their positions
        places = agreed("first_keys", first_keys, (problem.shape.B, problem.shape.T), np.int64)
        first = np.append(problem.j, _NOWHERE)[places].reshape(*batch, 1, problem.shape.T, 1)
    E, real = problem.shape.E, problem.real
    columns: dict[str, tuple[Any, int | None, Any]] = {"out": (out, E, None), "acc": (acc, E, real)}
    columns |= {"logsumexp": (logsumexp, None, real), "counts": (counts, len(state.COUNTS), np.int64)}
    columns["sums"] = sums, len(state.SUMS), real
    results = {name: problem.per_row(name, *given) for name, given in columns.items() if given[0] is not None}
    sinks = None if sinks is None else agreed("sinks", sinks, (problem.shape.H,), np.float64)

    def compute(part: Part) -> None:
        with np.errstate(all="ignore"):
            found = _state(part, 0 if first is None else first[part.tokens], "sums" in results)
            own = None if sinks is None else sinks[part.heads]
            rows = stats.rows(found.sums, found.counts, own, part.exists())
            parts = {
                "logsumexp": rows.logsumexp[..., None],
                "acc": found.acc,
                "sums": found.sums,
                "counts": found.counts,
            }
            if "out" in results:
                parts["out"] = _output(found.acc, rows)
            for name, result in results.items():
                store(result, part.place, parts[name])

    for _ in dealt(compute, problem.parts(), threads):
        pass


def _state(part: Part, first_key: Any, whole: bool) -> State:
    """The state of a part's rows in the type of states; not whole: what an output needs of it, m, l and acc."""
    logits, real = part.logits(), part.real
    s = rounded(logits, real)
    if whole:
        sums, counts, e = reference.sums_of(s, part.j, first_key)
    else:
        _, _, m, _, e = reference.exponentials(s)
        nothing = state.identity(part.q.shape[:-1], None, real)
        sums, counts = nothing.sums, nothing.counts
        sums[..., state.MAX], sums[..., state.L] = m, e.sum(-1)
    acc = None
    if part.v is not None:
        values = reference.spread_heads(part.v, part.shape).astype(real)
        acc = reference.weigh((e * part.kept()).astype(real, copy=False), values, logits != -np.inf)
    return State(sums, counts, acc, len(part.j))


def rounded(logits: Array, real: np.dtype[Any]) -> Array:
    """Logits in the type of states; the lowest number is no -inf, which hides."""
    return np.where(logits == -np.inf, -np.inf, np.maximum(logits, np.finfo(real).min)).astype(real)


def _output(acc: Array | None, rows: stats.Rows) -> Array:
    assert acc is not None
    return acc * rows.top1[..., None]


def store(target: Array, place: tuple[Any, ...], x: Any) -> None:
    """Writes numbers in the target's type, which for bfloat16 is its bits."""
    target[place] = as_bfloat16(x.astype(np.float32)) if target.dtype == np.uint16 else x


def finish(acc: Any, sums: Any, sinks: Any | None, out: Any) -> None:
    acc, sums, out = map(np.asarray, (acc, sums, out))
    counts = state.identity(sums.shape[:-1], None).counts
    store(out, (...,), _output(acc, stats.rows(sums, counts, sinks)))


def merge(
    sums_a: Any,
    counts_a: Any,
    acc_a: Any | None,
    sums_b: Any,
    counts_b: Any,
    acc_b: Any | None,
    shift: int,
    sums: Any,
    counts: Any,
    acc: Any | None,
) -> None:
    """`reference.merge`; the results may lie where either state does."""
    a, b = (
        State(
            np.asarray(sums_, np.float64),
            np.asarray(counts_),
            None if acc_ is None else np.asarray(acc_, np.float64),
            shift,
        )
        for sums_, counts_, acc_ in ((sums_a, counts_a, acc_a), (sums_b, counts_b, acc_b))
    )
    merged = reference.merge(a, b, shift)
    with np.errstate(all="ignore"):
        sums[...], counts[...] = merged.sums, merged.counts
        if acc is not None:
            acc[...] = merged.acc


def exponential(x: Any, out: Any) -> None:
    """2^x; 0 instead of subnormal numbers, which would depend on a caller's flags."""
    np.exp2(x, out=out)
    out[out < np.finfo(out.dtype).tiny] = 0


def fast_attention(q: Any, k: Any, v: Any, scale: Any, causal: Any, threads: Any, as_query: bool = False) -> Any | None:
    """None: there is no fast call here."""
    return None


def register_torch(torch: ModuleType) -> None:
    """Nothing to do: this core borrows none of PyTorch's threads."""

"""`explain`: attention on arrays of one sequence, with every step kept.

Checks, asks the core for each step (`steps`), and keeps what it says. Sizes are limited: nobody
reads a larger table, and a step costs a call per key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from levelhead.attention import attention, observe
from levelhead.call import scoring
from levelhead.errors import LevelheadTypeError, LevelheadValueError, expected
from levelhead.explanation import core_steps, option_words
from levelhead.explanation.head_report import HeadReport
from levelhead.explanation.head_steps import Array, Gauge, Head
from levelhead.explanation.renderable import Renderable

__all__ = ["LIMIT", "Explanation", "explain"]

LIMIT = 512  # tokens


@dataclass(frozen=True, eq=False, repr=False)
class Explanation(Renderable):
    """Attention with every step kept, in arrays of the rank that was given.

    Print it for the steps of the first head; in a notebook it draws itself. `text(head=h)` and
    `head(h)` have those of another one.
    """

    q: Array
    k: Array
    v: Array
    scores: Array  # (H, T, S): Q Kᵀ
    scaled: Array  # (H, T, S): times the scale
    logits: Array  # (H, T, S): what enters the softmax, -inf where hidden
    weights: Array  # (H, T, S)
    output: Array  # (H, T, E), the bits of `attention`
    unscaled: Array  # (H, T, S): the weights there would be without the scale
    labels: tuple[tuple[str, ...], tuple[str, ...]]  # of the queries, of the keys
    names: tuple[str, ...]  # of the heads
    scales: tuple[str, ...]  # "÷ √64", for each head
    changes: tuple[str, ...]  # what happens between scale and softmax
    gauges: tuple[Gauge, ...]  # for each head
    unscaled_gauges: tuple[Gauge, ...]

    def head(self, h: int = 0) -> Head:
        """The steps of one head, counted from 0."""
        if not 0 <= h < len(self.names):
            wanted = f"a head from 0 to {len(self.names) - 1}"
            raise LevelheadValueError(expected("head", wanted, h, "Count heads from 0"))
        shared = h if self.k.ndim == 2 else h * self.k.shape[0] // len(self.names)
        own = ("q", "scores", "scaled", "logits", "weights", "output", "unscaled")
        arrays = {name: self._of(name, h) for name in own}
        arrays |= {name: self._of(name, shared) for name in ("k", "v")}
        return Head(
            name=self.names[h],
            **arrays,
            queries=self.labels[0],
            keys=self.labels[1],
            scale=self.scales[h],
            changes=self.changes,
            gauge=self.gauges[h],
            unscaled_gauge=self.unscaled_gauges[h],
        )

    def _of(self, name: str, head: int) -> Array:
        array: Array = getattr(self, name)
        return array if array.ndim == 2 else array[head]

    def story(self, head: int | None = None) -> HeadReport:
        """What is told of one head, the first unless another is named."""
        one = self.head(head or 0)
        sizes = f"{len(one.queries)} queries, {len(one.keys)} keys, d_k = {one.q.shape[1]}"
        return HeadReport(title=f"{one.name} of {len(self.names)}", about=sizes, head=one)

    def to_json(self) -> dict[str, Any]:
        """Every head with every number, as plain lists."""
        return {"heads": [self.head(h).to_json() for h in range(len(self.names))]}


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
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
    labels: Sequence[str] | tuple[Sequence[str], Sequence[str]] | None = None,
    names: Sequence[str] | None = None,
) -> Explanation:
    """Attention on one sequence with every step kept: scores, scaled, weights, output.

    The options mean what they do in `attention`. Beside the weights stand those without the scale.

    Args:
        q: queries (T, D) or (H, T, D), up to 512 tokens; k and v likewise, with G heads.
        labels: the tokens' names, or a pair of lists: of the queries, of the keys.
        names: the heads' names.

    >>> q = np.eye(3, 4, dtype=np.float32)
    >>> explain(q, q, q, labels=["a", "b", "c"]).weights.shape
    (3, 3)
    """
    q, k, v = (x.detach() if hasattr(x, "detach") else x for x in (q, k, v))
    sizes = scoring.shape_of(*(_shape(x) for x in (("q", q), ("k", k), ("v", v))))
    _check(sizes)
    known, named = _labels(labels, sizes), _names(names, sizes.H)
    options = {
        "causal": causal,
        "window": window,
        "mask": mask,
        "softcap": softcap,
        "sinks": sinks,
        "alibi": alibi,
        "key_lengths": key_lengths,
        "segments": segments,
        "query_start": query_start,
    }
    output = _numpy(attention(q, k, v, scale=scale, **options))
    q, k, v = _numpy(q), _numpy(k), _numpy(v)
    options["mask"] = None if mask is None else _numpy(mask)
    scored = scoring.describe(sizes, scale=scale, dtype_name=q.dtype.name, **options)
    changes = option_words.changes(scored)
    one_by_one = _row_by_row(q, k, scale, scored, options)
    scaled = core_steps.logits(*one_by_one)
    return Explanation(
        q=q,
        k=k,
        v=v,
        output=output,
        scaled=scaled,
        scores=core_steps.logits(q, k, "none"),
        logits=core_steps.logits(*one_by_one, scored) if changes else scaled,
        weights=core_steps.weights(q, k, scale, **options),
        unscaled=core_steps.weights(q, k, "none", **options),
        labels=known,
        names=named,
        changes=changes,
        scales=tuple(option_words.scale_words(scored.scale, h, sizes.D) for h in range(sizes.H)),
        gauges=core_steps.gauges(q, k, scale, **options),
        unscaled_gauges=core_steps.gauges(q, k, "none", **options),
    )


def _row_by_row(
    q: Array, k: Array, scale: Any, scored: scoring.Scoring, options: dict[str, Any]
) -> tuple[Array, Array, Any]:
    """q, k and scale for calls of one key each, where "log-n" would find n = 1: q brings its ln n
    along."""
    if not scored.scale.log_n:
        return q, k, scale
    n = np.maximum(observe(q, k, **options).rows.count, 1)
    return q * np.log(n)[..., None].astype(q.dtype), k, "1/sqrt(d_k)"


def _numpy(x: Any) -> Array:
    """As NumPy; halves are widened, which loses nothing."""
    if type(x).__module__.startswith("torch"):
        x = x.detach()
        x = (x.float() if x.element_size() == 2 else x).numpy()
    array = np.asarray(x)
    return array if array.dtype.name in ("float32", "float64", "bool") else array.astype(np.float32)


# ---- what cannot be explained -----------------------------------------------


def _shape(named: tuple[str, Any]) -> tuple[int, ...]:
    name, x = named
    if not hasattr(x, "shape"):
        advice = "Make an array of it: np.asarray(..., np.float32)"
        raise LevelheadTypeError(expected(name, "an array", type(x).__name__, advice))
    return tuple(x.shape)


def _check(sizes: scoring.Shape) -> None:
    if sizes.batch:
        given = f"a batch of shape {sizes.batch}"
        advice = "Explain one row of it at a time: q[0], k[0], v[0]"
        raise LevelheadValueError(expected("q", "(T, D) or (H, T, D)", given, advice))
    if max(sizes.T, sizes.S) > LIMIT:
        given = f"{sizes.T} queries and {sizes.S} keys"
        advice = "Nobody reads a larger table; lh.observe sums up long sequences"
        raise LevelheadValueError(expected("q", f"at most {LIMIT} tokens", given, advice))
    if not (sizes.T and sizes.S and sizes.H and sizes.D and sizes.E):
        given = f"{sizes.T} queries and {sizes.S} keys in {sizes.H} heads of width {sizes.D}"
        raise LevelheadValueError(expected("q", "at least one of each", given, "Give some tokens"))


def _labels(given: Any, sizes: scoring.Shape) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if given is None:
        return tuple(map(str, range(sizes.T))), tuple(map(str, range(sizes.S)))
    pair = given
    if not (isinstance(given, tuple) and len(given) == 2 and not isinstance(given[0], str)):
        pair = (given, given)
    queries, keys = (tuple(map(str, side)) for side in pair)
    if (len(queries), len(keys)) != (sizes.T, sizes.S):
        wanted = f"{sizes.T} names of queries and {sizes.S} of keys"
        found = f"{len(queries)} and {len(keys)}"
        advice = "Give one list for both, or a pair of lists"
        raise LevelheadValueError(expected("labels", wanted, found, advice))
    return queries, keys


def _names(given: Sequence[str] | None, heads: int) -> tuple[str, ...]:
    names = tuple(f"head {h}" for h in range(heads)) if given is None else tuple(map(str, given))
    if len(names) != heads:
        wanted = f"a name for each of {heads} heads"
        raise LevelheadValueError(expected("names", wanted, len(names), "Leave it out for numbers"))
    return names

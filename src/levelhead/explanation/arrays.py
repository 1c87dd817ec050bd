"""`explain`: attention on arrays of one sequence, with every step kept.

Checks the arguments and computes each step with the core. Sizes are limited: the result is a table for readers, and the
logits cost a call per key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from levelhead import _core, stats
from levelhead.attention import attention
from levelhead.call.options import CERTAIN, CertainOptions, Scoring, Shape, describe, documented, known, shape_of
from levelhead.call.prepare import for_core
from levelhead.errors import bad_type, bad_value
from levelhead.explanation import option_words
from levelhead.explanation.forward_pass import AttentionCall
from levelhead.explanation.head_report import HeadReport
from levelhead.explanation.head_steps import Array, Gauge, Head, StepArrays
from levelhead.explanation.renderable import Renderable
from levelhead.observation import Unpack
from levelhead.state import unwritten

LIMIT = 512  # tokens


@dataclass(frozen=True, eq=False, repr=False)
class Explanation(Renderable, StepArrays):
    """Attention with every step kept, in arrays of the rank of the arguments.

    Print it for the steps of the first head; a notebook draws them. `text(head=h)` and `head(h)` have another head's.
    """

    labels: tuple[tuple[str, ...], tuple[str, ...]]  # of the queries, of the keys
    names: tuple[str, ...]  # of the heads
    scales: tuple[str, ...]  # "÷ √64", for each head
    changes: tuple[str, ...]  # what happens between scale and softmax
    gauges: tuple[Gauge, ...]  # for each head
    unscaled_gauges: tuple[Gauge, ...]

    def head(self, h: int = 0) -> Head:
        """The steps of one head, counted from 0."""
        if not 0 <= h < len(self.names):
            raise bad_value("head", f"a head from 0 to {len(self.names) - 1}", h, "Count heads from 0")
        key_head = h * self.k.shape[0] // len(self.names)
        heads = {name: key_head if name in ("k", "v") else h for name in self.arrays()}
        return Head(
            name=self.names[h],
            **{name: x if x.ndim == 2 else x[heads[name]] for name, x in self.arrays().items()},
            queries=self.labels[0],
            keys=self.labels[1],
            scale=self.scales[h],
            changes=self.changes,
            gauge=self.gauges[h],
            unscaled_gauge=self.unscaled_gauges[h],
        )

    def story(self, head: int | None = None) -> HeadReport:
        """What is shown of one head, by default the first."""
        one = self.head(head or 0)
        sizes = f"{len(one.queries)} queries, {len(one.keys)} keys, d_k = {one.q.shape[1]}"
        return HeadReport(title=f"{one.name} of {len(self.names)}", about=sizes, head=one)

    def to_json(self) -> dict[str, Any]:
        """Every head with every number, as plain lists."""
        return {"heads": [self.head(h).to_json() for h in range(len(self.names))]}


@documented(CERTAIN)
def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    labels: Sequence[str] | tuple[Sequence[str], Sequence[str]] | None = None,
    names: Sequence[str] | None = None,
    **options: Unpack[CertainOptions],
) -> Explanation:
    """Attention on one sequence with every step kept: scores, scaled, weights, output.

    The weights without the scale are kept beside the weights.

    Args:
        q: queries (T, D) or (H, T, D), up to 512 tokens; k and v likewise, with G heads.
        {options}
        labels: the tokens' names, or a pair of lists: of the queries, of the keys.
        names: the heads' names.

    >>> q = np.eye(3, 4, dtype=np.float32)
    >>> explain(q, q, q, labels=["a", "b", "c"]).weights.shape
    (3, 3)
    """
    known("explain", options, CERTAIN)
    q, k, v = (x.detach() if hasattr(x, "detach") else x for x in (q, k, v))
    sizes = shape_of(_shape("q", q), _shape("k", k), _shape("v", v))
    _check(sizes)
    token_labels, head_names = _labels(labels, sizes), _names(names, sizes.H)
    output = _numpy(attention(q, k, v, **options))
    q, k, v = _numpy(q), _numpy(k), _numpy(v)
    rest: dict[str, Any] = {**options}
    scale = rest.pop("scale", None)
    if rest.get("mask") is not None:
        rest["mask"] = _numpy(rest["mask"])
    scoring = describe(sizes, scale=scale, dtype_name=q.dtype.name, **rest)
    changes = option_words.changes(scoring)
    call = AttentionCall(q, k, v, scale, rest)
    unscaled = call.unscaled()
    scaled = _logits(q, k, scoring, scale_only=True)
    return Explanation(
        q=q,
        k=k,
        v=v,
        output=output,
        scaled=scaled,
        scores=_logits(q, k, Scoring(np.ones(sizes.H))),
        logits=_logits(q, k, scoring) if changes else scaled,
        weights=call.weights(),
        unscaled=unscaled.weights(),
        labels=token_labels,
        names=head_names,
        changes=changes,
        scales=tuple(option_words.scale_words(scoring, h, sizes.D) for h in range(sizes.H)),
        gauges=call.gauges(),
        unscaled_gauges=unscaled.gauges(),
    )


def _logits(q: Array, k: Array, scoring: Scoring, *, scale_only: bool = False) -> Array:
    """(…, T, S): what enters the softmax, or the scaled scores alone.

    Each is the logsumexp of a call whose only key sits at its own position.
    """
    T, S = q.shape[-2], k.shape[-2]
    shape = shape_of(q.shape, k.shape, None)
    if scoring.log_n:  # a call of one key would count n = 1
        n = np.maximum(scoring.visible(np.arange(T), np.arange(S)).sum(-1), 1).reshape(T, 1)
        q, scoring = q * np.log(n).astype(q.dtype), scoring._replace(log_n=False)
    scoring = Scoring(scoring.scale, cosine=scoring.cosine) if scale_only else scoring._replace(sinks=None, dropout=0.0)
    keywords = for_core(scoring, shape)
    columns = []
    for j in range(S):
        own = {name: np.ascontiguousarray(keywords[name][..., j : j + 1]) for name in _BY_KEY if name in keywords}
        state = unwritten(q.shape[:-1], None, q.dtype, 1)
        into: dict[str, Any] = {"sums": state.sums, "counts": state.counts, "key_runs": [(j, 1, 1)]}
        _core.forward(q, k[..., j : j + 1, :], None, threads=1, **{**keywords, **own}, **into)
        columns.append(stats.rows(state.sums, state.counts, None).logsumexp.astype(q.dtype))
    return np.stack(columns, -1)


_BY_KEY = ("mask", "key_segments")  # keywords whose last axis is that of the keys


def _numpy(x: Any) -> Array:
    """As NumPy; 16-bit floats become float32, which is exact."""
    if type(x).__module__.startswith("torch"):
        x = x.detach()
        x = (x.float() if x.element_size() == 2 else x).numpy()
    array = np.asarray(x)
    return array if array.dtype.name in ("float32", "float64", "bool") else array.astype(np.float32)


# ---- errors -----------------------------------------------------------------


def _shape(name: str, x: Any) -> tuple[int, ...]:
    if not hasattr(x, "shape"):
        raise bad_type(name, "an array", type(x).__name__, "Make an array of it: np.asarray(..., np.float32)")
    return tuple(x.shape)


def _check(sizes: Shape) -> None:
    if sizes.batch:
        advice = "Explain one row of it at a time: q[0], k[0], v[0]"
        raise bad_value("q", "(T, D) or (H, T, D)", f"a batch of shape {sizes.batch}", advice)
    tokens = f"{sizes.T} queries and {sizes.S} keys"
    if max(sizes.T, sizes.S) > LIMIT:
        raise bad_value("q", f"at most {LIMIT} tokens", tokens, "lh.observe summarises long sequences")
    if not (sizes.T and sizes.S and sizes.H and sizes.D and sizes.E):
        given = f"{tokens} in {sizes.H} heads of width {sizes.D}"
        raise bad_value("q", "at least one of each", given, "Give some tokens")


def _labels(labels: Any, sizes: Shape) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if labels is None:
        labels = range(sizes.T), range(sizes.S)
    elif not (isinstance(labels, tuple) and len(labels) == 2 and not isinstance(labels[0], str)):
        labels = labels, labels
    queries, keys = (tuple(map(str, side)) for side in labels)
    if (len(queries), len(keys)) != (sizes.T, sizes.S):
        wanted, given = f"{sizes.T} names of queries and {sizes.S} of keys", f"{len(queries)} and {len(keys)}"
        raise bad_value("labels", wanted, given, "Give one list for both, or a pair of lists")
    return queries, keys


def _names(given: Sequence[str] | None, heads: int) -> tuple[str, ...]:
    names = tuple(f"head {h}" for h in range(heads)) if given is None else tuple(map(str, given))
    if len(names) != heads:
        raise bad_value("names", f"a name for each of {heads} heads", len(names), "Leave it out for numbers")
    return names

"""Collects attention calls while a model is traced: which module calls, after which layers, with which statistics.

Functions and layers are wrapped only inside `collecting`, and only calls of this thread are collected. What is
collected are arrays of the same trace as the model's results, so they leave with them; a call inside a further
transform of the model (scan, vmap, checkpoint, jit) cannot leave so, and is refused with a word about what can.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from levelhead import stats
from levelhead.errors import bad_value
from levelhead.jax.call import Layout
from levelhead.jax.front import listening, observe
from levelhead.jax.promotion import usual_promotion
from levelhead.jax.replaced import Replacements, in_place
from levelhead.jax.seen import Call, Layer
from levelhead.jax.varying import with_auto_axes
from levelhead.runs import tally
from levelhead.runs.record import Facts

SAMPLE = 32  # tokens of a call and of the layers before it
_RECENT = 16  # layers of a module and of those around it
# Additive numbers that mean "hidden": models write -1e9 or the lowest number of a type instead of -inf.
_HIDES = -1e9
_HIDES_HALF = -3e4  # float16 ends at -65504


@dataclass
class _Frame:
    """A module that is running."""

    name: str
    kind: str
    ran: list[tuple[Layer, Any, Any]] = field(default_factory=list)  # with its output, and the trace of that


@dataclass
class Collector:
    """Of one pass."""

    names: dict[int, str]  # of modules, by identity
    trace: Any = field(default_factory=jax.extend.core.get_opaque_trace_state)
    frames: list[_Frame] = field(default_factory=lambda: [_Frame("", "function")])
    calls: list[Call] = field(default_factory=list)

    def attended(self, how: str, q: Any, k: Any, options: dict[str, Any], layout: Layout = "BTNH") -> None:
        """Measures a call of these queries and keys."""
        here = jax.extend.core.get_opaque_trace_state()
        if here != self.trace:
            wanted = "attention in the trace of the watched function itself"
            advice = (
                "Watch inside that transform and return what was seen from it; for Flax NNX "
                "attention_fn=levelhead.jax.flax_attention with sow_weights=True goes through scan and remat"
            )
            raise bad_value("watch", wanted, "attention inside a scan, vmap, checkpoint or jit of the model", advice)
        frame = self.frames[-1]
        ran = [one for frame in self.frames for one in frame.ran][-_RECENT:]
        ran = [one for one in ran if one[2] == here]
        with self.pause():
            call = measured(how, q, k, options, layout, frame.name, frame.kind, [one[:2] for one in ran])
        self.calls.append(call)

    def layer(self, layer: Layer, output: Any, frame: _Frame | None = None) -> None:
        """Notes a layer that ran in a frame, by default the innermost, and its output (..., F) at some tokens."""
        features = _sampled(jax.lax.stop_gradient(output).reshape(layer.tokens, -1), layer.tokens)
        frame = self.frames[-1] if frame is None else frame
        frame.ran.append((layer, features, jax.extend.core.get_opaque_trace_state()))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What runs inside was collected already, or belongs to the measurement."""
        _active.collector = listening.measure = None
        try:
            yield
        finally:
            _active.collector, listening.measure = self, self.attended


_active = threading.local()
# What was jitted and traced before is traced anew while a model is watched, or its calls would not be seen.
_watching = jax.make_user_context(default_value=False)


def current() -> Collector | None:
    """The collector of this thread, unless it is paused."""
    return getattr(_active, "collector", None)


@usual_promotion
def measured(
    how: str,
    q: Any,
    k: Any,
    options: dict[str, Any],
    layout: Layout,
    module: str,
    kind: str,
    ran: list[tuple[Layer, Any]],
) -> Call:
    """The statistics of a call, and what is known of it."""
    q, k = (jax.lax.stop_gradient(jnp.asarray(x)) for x in (q, k))
    options = {name: jax.lax.stop_gradient(x) if isinstance(x, jax.Array) else x for name, x in options.items()}
    options["mask"] = _hidden(options.get("mask"), q.dtype)
    seen = observe(q, k, layout=layout, **{name: x for name, x in options.items() if name not in ("dropout", "seed")})
    q, k = (x.swapaxes(-2, -3) if layout == "BTNH" and x.ndim > 2 else x for x in (q, k))
    rows = {name: _by_batch(getattr(seen.rows, name)) for name in stats.Rows.__dataclass_fields__}
    if seen.query_lengths is not None:
        rows["exists"] = jnp.broadcast_to(_by_batch(seen._exists(jnp)), rows["count"].shape)
    heads = with_auto_axes(lambda x: {"heads": tally.of_rows(x, jnp)}, rows, rows["count"], {"heads": ((), 2)})["heads"]
    H, (T, D), S = heads.shape[0], q.shape[-2:], k.shape[-2]
    for name, x in (("q", q), ("k", k)):
        by_head = x.reshape(-1, *x.shape[-3:]) if x.ndim > 2 else x[None, None]
        squares = jnp.square(by_head.astype(jnp.float32)).sum((0, 2, 3))
        heads = heads.at[:, tally.INDEX[f"{name}_squares"]].set(jnp.repeat(squares, H // max(by_head.shape[1], 1)))
        heads = heads.at[:, tally.INDEX[f"{name}_count"]].set(by_head.shape[0] * by_head.shape[2] * D)
    scale = options.get("scale")
    known = scale is None or isinstance(scale, int | float | np.floating)
    number = (float(D) ** -0.5 if scale is None else float(scale)) if known else None
    facts = Facts(
        kind=kind,
        how=how,
        d_k=D,
        kv_heads=k.shape[-3] if k.ndim > 2 else 1,
        queries=T,
        keys=S,
        dtype=str(q.dtype),
        scale=number,
        causal=bool(options.get("causal")),
        masked=options.get("mask") is not None,
        softcap=options.get("softcap"),
        sinks=options.get("sinks") is not None,
    )
    by_token = [_tokens_first(x) for x in (q, k)]
    tokens = len(by_token[0]), len(by_token[1])
    q_sample, k_sample = (_sampled(x, len(x)) for x in by_token)
    layers, outputs = tuple(layer for layer, _ in ran), tuple(x for _, x in ran)
    array = scale if isinstance(scale, jax.Array) else None
    return Call(heads, q_sample, k_sample, outputs, array, module, facts, layers, tokens, H)


def _by_batch(x: Any) -> Any:
    """Fields of rows (..., H, T) as (B, H, T)."""
    return x.reshape(-1, *x.shape[-2:]) if x.ndim > 1 else x[None, None]


def _hidden(mask: Any, dtype: Any) -> Any:
    if mask is None or mask.dtype == jnp.bool_:
        return mask
    below = _HIDES_HALF if jnp.float16 in (mask.dtype, dtype) else _HIDES
    return jnp.where(mask <= below, -jnp.inf, mask)


def _tokens_first(x: Any) -> Any:
    """(..., H, T, D) as (tokens, H, D)."""
    if x.ndim < 3:
        return x[:, None]
    x = x.swapaxes(-2, -3)
    return x.reshape(-1, *x.shape[-2:])


def _sampled(x: Any, tokens: int) -> Any:
    """Always the same tokens of so many, from (tokens, ...)."""
    each = np.arange(SAMPLE)
    at = each * tokens // SAMPLE if tokens >= SAMPLE else np.arange(tokens)
    return with_auto_axes(lambda x: {"x": x[at]}, x, x, {"x": ((), x.ndim)})["x"]


# ---- while it runs


@contextmanager
def collecting(names: dict[int, str], replacements: Callable[[], Replacements]) -> Iterator[Collector]:
    """What runs inside is collected."""
    outer, collector = (getattr(_active, "collector", None), listening.measure), Collector(names)
    with ExitStack() as stack:
        stack.enter_context(in_place(replacements))
        _active.collector, listening.measure = collector, collector.attended
        stack.enter_context(_watching(True))
        try:
            yield collector
        finally:
            _active.collector, listening.measure = outer


_NORMS = ("LayerNorm", "RMSNorm", "LayerNormalization", "RMSNormalization")


def followed(call: Any, projections: tuple[type, ...]) -> Any:
    """A class's `__call__`, so that it is known which module runs, and what projections and norms put out."""

    @wraps(call)
    def run(self: Any, *args: Any, **keywords: Any) -> Any:
        collector = current()
        if collector is None:
            return call(self, *args, **keywords)
        outer = collector.frames[-1]
        name = collector.names.get(id(self), f"{outer.name}.{type(self).__name__}".lstrip("."))
        collector.frames.append(_Frame(name, type(self).__name__))
        try:
            out = call(self, *args, **keywords)
        finally:
            collector.frames.pop()
        norm = type(self).__name__ in _NORMS
        if (norm or isinstance(self, projections)) and isinstance(out, jax.Array) and args and np.ndim(args[0]) > 1:
            *lead, width = args[0].shape
            tokens = math.prod(lead)
            if tokens and out.size % tokens == 0:
                layer = Layer(name.rpartition(".")[2], norm, None if norm else width, tokens)
                collector.layer(layer, out, outer)
        return out

    return run


def measuring(function: Any, how: str, read: Callable[..., tuple[Any, Any, dict[str, Any]]]) -> Any:
    """An attention function that is measured before it computes; `read` gives q, k and the options of its arguments."""

    @wraps(function)
    def run(*args: Any, **keywords: Any) -> Any:
        collector = current()
        if collector is None:
            return function(*args, **keywords)
        collector.attended(how, *read(*args, **keywords))
        with collector.pause():
            return function(*args, **keywords)

    return run

"""A call on JAX arrays: what is fixed when it is traced, as a `Plan`, and its arrays by name.

Options that are numbers, words, lists or NumPy arrays are checked like everywhere else. JAX arrays stay arrays, traced
or not: their shapes and dtypes are checked here, and lengths by the kernel, since a traced number is not known. What is
one number per head and no JAX array is fixed in double; what is one per batch row or token is an array in any case, so
that other lengths compile nothing anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from levelhead import checks
from levelhead.call import options
from levelhead.call.options import BATCH, HEADS, TOKENS, Scoring, Shape, fields
from levelhead.call.shapes import broadcasting, fitting
from levelhead.errors import LevelheadValueError, bad_type, bad_value

Arrays: TypeAlias = dict[str, Any]
Layout: TypeAlias = Literal["BNTH", "BTNH"]

LAYOUTS = ("BNTH", "BTNH")
_DTYPES = ("float32", "float64", "float16", "bfloat16")
_HEADS, _BATCH, _TOKENS = fields(HEADS), fields(BATCH), fields(TOKENS)


class Plan(NamedTuple):
    """Everything of a call but its arrays; hashable, so that calls alike are traced and compiled once."""

    rank: int  # of q, its axis of heads included
    tokens_first: bool  # (..., T, H, D) instead of (..., H, T, D)
    scale: tuple[float, ...] | None = None  # one per head; None: among the arrays
    sinks: tuple[float, ...] | None = None
    alibi: tuple[float, ...] | None = None
    start: int | None = None  # the position of the first query; None: among the arrays
    cosine: bool = False
    log_n: bool = False
    causal: bool = False
    left: int | None = None
    right: int | None = None
    softcap: float | None = None
    dropout: float = 0.0
    threads: int | None = None
    observed: bool = False  # the states of the rows are wanted, too

    def scoring(self, arrays: Arrays, dtype: Any) -> Scoring:
        """The options with arrays of JAX, numbers per head in `dtype`."""
        found: dict[str, Any] = {name: arrays.get(name) for name in (*_BATCH, *_TOKENS, "mask")}
        found |= {name: self.per_head(name, arrays, dtype) for name in _HEADS}
        if self.start is not None:
            found["query_start"] = jnp.full((1,), self.start)
        plain: dict[str, Any] = {
            name: getattr(self, name) for name in Scoring._fields if name in self._fields and name not in found
        }
        return Scoring(**found, **plain)

    def per_head(self, name: str, arrays: Arrays, dtype: Any) -> Any:
        """An option of one number per head as an array, fixed or not; None: the call has none."""
        fixed = getattr(self, name)
        x = arrays.get(name) if fixed is None else jnp.asarray(fixed, dtype)
        return None if x is None else x.astype(dtype)

    def attributes(self) -> dict[str, Any]:
        """For the custom call: what is off is left out."""
        given = {"rank": self.rank, "tokens_first": self.tokens_first, "start": self.start, "threads": self.threads}
        given |= {name: getattr(self, name) for name in ("cosine", "log_n", "causal", "left", "right")}
        found: dict[str, Any] = {name: np.int64(x) for name, x in given.items() if x is not None and x is not False}
        found |= {name: np.array(x) for name in _HEADS if (x := getattr(self, name)) is not None}
        return found | {name: np.float64(x) for name in ("softcap", "dropout") if (x := getattr(self, name))}


def wide(dtype: Any) -> Any:
    """What is computed in."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def described(
    q: Any, k: Any, v: Any, given: Mapping[str, Any], *, layout: str, threads: int | None = None, observed: bool = False
) -> tuple[Plan, Arrays, Shape]:
    """The call, checked; q of two dimensions has a head's axis in the arrays. v None: values of no width."""
    if layout not in LAYOUTS:
        advice = "BNTH has heads before tokens, BTNH tokens before heads, as jax.nn has"
        raise bad_value("layout", '"BNTH" or "BTNH"', checks.short_repr(layout), advice)
    tokens_first = layout == "BTNH"
    arrays = {name: _array(name, x) for name, x in (("q", q), ("k", k), ("v", v)) if x is not None or name != "v"}
    for name, x in arrays.items():
        if x.dtype != arrays["q"].dtype:
            given_dtype = f"{x.dtype} beside {arrays['q'].dtype}"
            raise bad_type(name, f"the dtype of q, {arrays['q'].dtype}", given_dtype, "Convert with astype")
    for name, x in arrays.items():
        if not all(isinstance(n, int) for n in x.shape):
            raise bad_value(name, "sizes that are numbers", f"the shape {x.shape}", "Export once for each size")
    for name in ("q", "k"):
        if any(jax.typeof(arrays[name]).sharding.spec[arrays[name].ndim - 1 :]):
            given_axis = f"one spread over {jax.typeof(arrays[name]).sharding.spec[-1]!r}"
            advice = "Every logit needs it: jax.sharding.reshard it, and spread batch rows or heads"
            raise bad_value(name, "a width that every device has whole", given_axis, advice)
    shape = _shape({name: x.shape for name, x in arrays.items()}, tokens_first)
    if v is None:
        arrays["v"] = arrays["k"][..., :0]
    if len(shape.lead) == 0:
        arrays = {name: x[None] if not tokens_first else x[:, None] for name, x in arrays.items()}
    plan = Plan(arrays["q"].ndim, tokens_first, threads=_threads(threads), observed=observed)
    given = {name: _known(x) if name in (*_BATCH, "segments") else x for name, x in given.items()}
    traced = {name: x for name, x in given.items() if name not in ("mask", "seed") and _holds_jax(x)}
    plain = {name: x for name, x in given.items() if name not in traced and name not in ("mask", "seed")}
    scoring = options.describe(shape, dtype_name=str(arrays["q"].dtype), **plain)
    plan = plan._replace(**{name: getattr(scoring, name) for name in Scoring._fields if name in _FIXED})
    for name in _HEADS:
        x = getattr(scoring, name)
        fixed: dict[str, Any] = {name: None if x is None or name in traced else tuple(x.tolist())}
        plan = plan._replace(**fixed)
    arrays |= {
        name: _integers(name, x) for name in ("key_lengths", *_TOKENS) if (x := getattr(scoring, name)) is not None
    }
    if scoring.query_lengths is not None:
        arrays["query_lengths"] = _integers("query_lengths", scoring.query_lengths)
    begin = given.get("query_start")
    if begin is None or isinstance(begin, int | np.integer):
        plan = plan._replace(start=int(scoring.query_start[0]) if shape.B else 0)
    elif "query_start" not in traced:
        arrays["query_start"] = _integers("query_start", scoring.query_start)
    for name, x in traced.items():
        arrays |= _checked(name, x, shape)
    if given.get("mask") is not None:
        arrays["mask"] = _mask(given["mask"], arrays["q"].dtype, shape)
    if plan.dropout:
        arrays["seed"] = _seed(given.get("seed"))
    return plan, arrays, shape


_FIXED = ("cosine", "log_n", "causal", "left", "right", "softcap", "dropout")


def _array(name: str, x: Any) -> Any:
    wanted = "a JAX or NumPy array of float32, float64, float16 or bfloat16"
    if not isinstance(x, jax.Array | np.ndarray) or isinstance(x, np.ma.MaskedArray):
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise bad_type(name, wanted, kind, f"Convert it, e.g. jnp.asarray({name})")
    if str(x.dtype) not in _DTYPES:
        raise bad_type(name, wanted, f"dtype {x.dtype}", f"Convert {name} to a floating dtype first")
    array = jnp.asarray(x)
    if array.dtype != x.dtype:
        advice = 'Convert it to float32, or jax.config.update("jax_enable_x64", True)'
        raise bad_type(name, "float32 or narrower without jax_enable_x64", f"dtype {x.dtype}", advice)
    return array


def heads_first(shape: tuple[int, ...], tokens_first: bool) -> tuple[int, ...]:
    """The shape as (..., heads, tokens, width)."""
    return (*shape[:-3], shape[-2], shape[-3], shape[-1]) if tokens_first and len(shape) > 2 else tuple(shape)


def _shape(sides: dict[str, tuple[int, ...]], tokens_first: bool) -> Shape:
    """The sizes; where they do not fit, whether they would in the other layout."""

    def read(as_tokens_first: bool) -> Shape:
        q, k, v = (heads_first(sides[name], as_tokens_first) if name in sides else None for name in "qkv")
        assert q is not None and k is not None
        return fitting(q, k, v)

    try:
        return read(tokens_first)
    except LevelheadValueError as error:
        try:
            read(not tokens_first)
        except LevelheadValueError:
            raise error from None
        here, there = (LAYOUTS[tokens_first], LAYOUTS[not tokens_first])
        given = ", ".join(f"{name} {shape}" for name, shape in sides.items())
        advice = f'They fit in the other one: pass layout="{there}"'
        raise bad_value("layout", f"arrays that fit together in the layout {here}", given, advice) from error


def _threads(threads: Any) -> int | None:
    if threads is None:
        return None
    return checks.integer("threads", threads, "an integer of at least 1", "Leave it out", lambda n: 1 <= n < 2**15)


def _known(x: Any) -> Any:
    """JAX arrays whose numbers are known, as NumPy's: these can be checked."""
    if isinstance(x, tuple):
        return tuple(map(_known, x))
    return np.asarray(x) if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) else x


def _holds_jax(x: Any) -> bool:
    return isinstance(x, jax.Array) or (isinstance(x, tuple) and any(isinstance(part, jax.Array) for part in x))


def _checked(name: str, x: Any, shape: Shape) -> Arrays:
    """An option that is an array of JAX's, or a pair of them, as operands."""
    if name == "segments":
        pair = x if isinstance(x, tuple) else (x, x)
        sizes = ((*(shape.batch or (1,)), n) for n in (shape.T, shape.S))
        ids = (_expanded(name, jnp.asarray(part), full, False) for part, full in zip(pair, sizes, strict=True))
        return {field: part.reshape(shape.B, part.shape[-1]) for field, part in zip(_TOKENS, ids, strict=True)}
    if name in _HEADS:
        return {name: _expanded(name, x, (shape.H,), True)}
    if name in _BATCH:
        return {name: _expanded(name, x, shape.batch or (1,), False).reshape(shape.B)}
    advice = "Pass a number; inside jit it is fixed when the function is traced (static_argnums)"
    raise bad_type(name, "a Python value, no array", f"{type(x).__name__} of JAX", advice)


def _expanded(name: str, x: Any, full: tuple[int, ...], floats: bool) -> Any:
    kind = jnp.floating if floats else jnp.integer
    if not jnp.issubdtype(x.dtype, kind):
        raise bad_type(name, "real numbers" if floats else "integers", x.dtype, "Convert it")
    broadcasting(name, x.shape, full)
    x = x.astype(jnp.float32) if floats and x.dtype.itemsize < 4 else x
    x = x if floats or x.dtype in (jnp.int32, jnp.int64) else x.astype(jnp.int32)
    return jnp.broadcast_to(x.reshape(x.shape[max(x.ndim - len(full), 0) :]), full)


def _mask(mask: Any, dtype: Any, shape: Shape) -> Any:
    wanted = f"a bool mask, or a float mask of dtype {dtype} or float32"
    advice = "Use bool (True = may attend), or cast an additive mask to q's dtype"
    if not isinstance(mask, jax.Array | np.ndarray):
        raise bad_type("mask", wanted, type(mask).__name__, advice)
    if mask.dtype not in (jnp.bool_, jnp.dtype(dtype), jnp.float32):
        raise bad_type("mask", wanted, f"dtype {mask.dtype}", advice)
    full = (*shape.batch, shape.H, shape.T, shape.S)
    broadcasting("mask", mask.shape, full)
    own = mask.shape[max(mask.ndim - len(full), 0) :]
    return jnp.asarray(mask).reshape((*(1,) * (len(full) - len(own)), *own))


def _integers(name: str, x: Any) -> Any:
    array = jnp.asarray(x, jnp.int64 if jax.config.read("jax_enable_x64") else jnp.int32)
    if x.size and int(np.abs(x).max()) > jnp.iinfo(array.dtype).max:
        raise bad_value(name, "integers below 2**31 without jax_enable_x64", int(np.abs(x).max()), "Enable it")
    return array


def _seed(seed: Any) -> Any:
    """Two words of 32 bits, the lower one first."""
    advice = "Pass an integer, or jax.random.bits(key): inside jit a fresh seed would be the same in every step"
    if seed is None:
        raise bad_value("seed", "a seed with dropout", "None", advice)
    if isinstance(seed, jax.Array):
        if seed.shape != () or not jnp.issubdtype(seed.dtype, jnp.integer):
            raise bad_type("seed", "one integer", f"{seed.dtype} of shape {seed.shape}", advice)
        high = seed.astype(jnp.uint64) >> 32 if seed.dtype.itemsize > 4 else jnp.zeros((), jnp.uint32)
        return jnp.stack([seed.astype(jnp.uint32), high.astype(jnp.uint32)])
    what = "an integer with 0 <= seed < 2**64"
    number = checks.integer("seed", seed, what, advice, lambda n: 0 <= n < 2**64)
    return jnp.asarray(np.array([number & 0xFFFFFFFF, number >> 32], np.uint32))

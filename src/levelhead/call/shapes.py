"""The sizes of an attention call, from the shapes of q, k and v, checked together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from levelhead.errors import bad_value
from levelhead.state import SUMS

# Elements per array: bytes and offsets of the widest element (8 bytes) then fit in int64.
_MOST = 2**60


@dataclass(frozen=True, slots=True)
class Shape:
    """q (..., H, T, D), k (..., G, S, D), v (..., G, S, E); (T, D) is one head without its axis."""

    batch: tuple[int, ...]
    B: int  # product of `batch`
    H: int
    G: int
    T: int
    S: int
    D: int
    E: int | None  # None: no values, statistics only
    lead: tuple[int, ...]  # q's shape without its last two axes: batch + (H,), or () for (T, D)


@lru_cache(256)
def shape_of(q_shape: tuple[int, ...], k_shape: tuple[int, ...], v_shape: tuple[int, ...] | None) -> Shape:
    """The sizes, or an error that names the array that does not fit, or is too large."""
    shape = fitting(tuple(q_shape), tuple(k_shape), None if v_shape is None else tuple(v_shape))
    rows = (*shape.batch, shape.H, shape.T)
    sizes = {
        "q": q_shape,
        "k": k_shape,
        "v": v_shape or (),
        "q and k (as logits)": (*rows, shape.S),
        "q and v (as state)": (*rows, max(shape.E or 0, len(SUMS))),
    }
    for name, sides in sizes.items():  # views with stride 0 can be larger than memory
        if math.prod(n for n in sides if n) >= _MOST:
            advice = "Split the call over batch rows, heads or queries"
            raise bad_value(name, "fewer than 2**60 elements", f"shape {tuple(sides)}", advice)
    return shape


def fitting(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...] | None) -> Shape:
    """The same without the check for size, which PyTorch's compiler cannot trace."""
    if len(q) < 2:
        advice = "Use (..., heads, tokens, d), or (tokens, d) for one head"
        raise bad_value("q", "at least 2 dimensions", f"shape {q}", advice)
    for name, other in (("k", k), ("v", v)):
        if other is not None and len(other) != len(q):
            wanted = f"{len(q)} dimensions as in q of shape {q}"
            raise bad_value(name, wanted, f"shape {other}", "Give all arrays the same rank, (..., heads, tokens, d)")
        if other is not None and other[:-3] != q[:-3]:
            wanted = f"leading dimensions {q[:-3]} as in q of shape {q}"
            raise bad_value(name, wanted, f"shape {other}", "Broadcast the arrays to one batch shape first")
    H, G = (q[-3], k[-3]) if len(q) > 2 else (1, 1)
    if (H % G if G else H) != 0:
        wanted = f"a number of heads that divides the {H} heads of q of shape {q}"
        raise bad_value("k", wanted, f"{G} heads in shape {k}", "Query head h uses key head h // (H / G)")
    if k[-1] != q[-1]:
        wanted = f"key width {q[-1]} as in q of shape {q}"
        raise bad_value("k", wanted, f"{k[-1]} in shape {k}", "q and k need the same last dimension")
    if v is not None and v[:-2] != k[:-2]:
        wanted = f"{k[-3]} heads as in k of shape {k}"
        raise bad_value("v", wanted, f"{v[-3]} in shape {v}", "k and v come in the same number of heads")
    if v is not None and v[-2] != k[-2]:
        raise bad_value("v", f"{k[-2]} keys as in k of shape {k}", f"{v[-2]} in shape {v}", "Every key needs one value")
    E = None if v is None else v[-1]
    return Shape(q[:-3], math.prod(q[:-3]), H, G, T=q[-2], S=k[-2], D=q[-1], E=E, lead=q[:-2])


def broadcasting(name: str, given: tuple[int, ...], full: tuple[int, ...]) -> None:
    """Refuses a shape that does not broadcast to `full`; leading axes of size 1 more than that are allowed."""
    lead = max(len(given) - len(full), 0)
    own, sides = given[lead:], full[len(full) - (len(given) - lead) :]
    # Not `in`: a size may be a symbol of PyTorch's compiler.
    if any(n != 1 for n in given[:lead]) or any(n != 1 and n != whole for n, whole in zip(own, sides, strict=True)):
        raise bad_value(name, f"a shape that broadcasts to {tuple(full)}", tuple(given), "Reshape it")

"""Which columns of which layer's output a head's queries or keys are, and by what factor they differ.

Numbers are compared, not names, at some tokens. A copy, a scaled copy and a rotated one (RoPE turns pairs of columns)
keep the squares of columns, or their sums over pairs, in the same proportions; another layer's output does not. What
matches no layer has no origin: nothing is guessed. The earliest layer that matches is the origin.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Indices: TypeAlias = "np.ndarray[Any, np.dtype[np.intp]]"

SAME = 0.998  # cosine of the proportions; rounding to bfloat16 leaves 0.9997, another layer has about 0.4
STEADY = 0.02  # standard deviation over tokens of a logarithm of norms; rounding to bfloat16 leaves 0.003
EVIDENCE = 16  # numbers that must agree: below, chance would do
NAMED_EVIDENCE = 4  # the same for a layer whose name says that it is the projection
MAYBE = 0.8  # cosine at a few tokens below which a place is not looked at closer
_FEW = 8  # tokens
_BLOCKS = 4096  # places in one layer that are tried at most


class Origin(NamedTuple):
    """Of one head: for each part of its width the layer, the columns there, and how both are compared."""

    layers: tuple[int, ...]
    columns: tuple[Indices, ...]
    kinds: tuple[int, ...]

    @property
    def parts(self) -> tuple[int, ...]:
        return tuple(len(columns) for columns in self.columns)


class Factor(NamedTuple):
    """By which a head differs from its origin, and how much that varies over tokens (of the logarithm)."""

    factor: float
    spread: float


def _halves(squares: Floats) -> Floats:
    half = squares.shape[-1] // 2
    return squares[..., :half] + squares[..., half:]


def _pairs(squares: Floats) -> Floats:
    return squares[..., 0::2] + squares[..., 1::2]


# What stays in proportion, of the head and of the layer's columns: the columns themselves; pairs that RoPE turns, which
# are halves apart or neighbours; neighbours that were put halves apart before.
_Sums: TypeAlias = Callable[[Floats], Floats]
_KINDS: tuple[tuple[_Sums, _Sums], ...] = (
    (lambda x: x, lambda x: x),
    (_halves, _halves),
    (_pairs, _pairs),
    (_halves, _pairs),
)
# A constant was added to every token (a bias that the model keeps elsewhere): deviations from the mean stay in
# proportion, with their signs. Or only the norm stays.
CENTRED, WHOLE = len(_KINDS), len(_KINDS) + 1


def find(heads: Floats, layers: Sequence[Floats], named: Collection[int] = ()) -> list[Origin | None]:
    """The origin of every head as a whole.

    Args:
        heads: (n, H, D), at n tokens.
        layers: outputs (n, F) at the same tokens, in the order in which they ran.
        named: layers that are the projection by their names; for them less evidence will do.
    """
    H, D = heads.shape[1:]
    found: list[Origin | None] = [None] * H
    distinct = len(np.unique(heads.reshape(len(heads), -1), axis=0)) if heads.any() else 0
    for kinds in (range(CENTRED), (CENTRED,), (WHOLE,)):  # the strongest evidence first
        for index, layer in enumerate(layers):
            enough = NAMED_EVIDENCE if index in named else EVIDENCE
            judged = [kind for kind in kinds if _is_evidence(kind, distinct, D, enough)]
            for columns in _places(layer.shape[1], D) if judged else ():
                few = layer[_few(len(layer))].take(columns, 1)
                for kind in judged:
                    missing = [h for h, origin in enumerate(found) if origin is None]
                    if not missing:
                        return found
                    if not _may_agree(heads[_few(len(heads))][:, missing], few, kind):
                        continue
                    agrees = _agrees(heads[:, missing], layer.take(columns, 1), kind)
                    for row, h in zip(agrees, missing, strict=True):
                        if row.any():
                            found[h] = Origin((index,), (columns[int(row.argmax())],), (kind,))
    return found


def find_parts(
    found: list[Origin | None],
    heads: Floats,
    layers: Sequence[Floats],
    splits: Sequence[int],
    named: Collection[int] = (),
) -> None:
    """Fills in the origins of heads that consist of two parts with origins of their own; `splits`: possible widths of
    the first."""
    for at in dict.fromkeys(splits):
        missing = [h for h, origin in enumerate(found) if origin is None]
        if not missing or not 0 < at < heads.shape[-1]:
            continue
        firsts = find(heads[:, missing, :at], layers, named)
        begun = {h: origin for h, origin in zip(missing, firsts, strict=True) if origin is not None}
        seconds = find(heads[:, [*begun], at:], layers, named) if begun else []
        for (h, one), other in zip(begun.items(), seconds, strict=True):
            if other is not None:
                found[h] = Origin(one.layers + other.layers, one.columns + other.columns, one.kinds + other.kinds)


def factor(head: Floats, layers: Sequence[Floats], origin: Origin) -> Factor:
    """Of a head (n, D) over its origin."""
    found = np.concatenate([layers[n][:, c] for n, c in zip(origin.layers, origin.columns, strict=True)], axis=1)
    if CENTRED in origin.kinds:
        deviations = (float(np.square(x - x.mean(0)).sum()) for x in (head, found))
        over, under = deviations
        return Factor(math.sqrt(over / under) if under > 0 else math.nan, 0.0)
    of_head, of_layer = (np.square(x).sum(-1) for x in (head, found))
    used = (of_head > 0) & (of_layer > 0) & np.isfinite(of_head) & np.isfinite(of_layer)
    if not used.any():
        return Factor(math.nan, math.nan)
    logs = 0.5 * np.log(of_head[used] / of_layer[used])
    return Factor(float(np.exp(np.median(logs))), float(logs.std()))


def still(heads: Floats, layers: Sequence[Floats], origins: Sequence[Origin | None]) -> bool:
    """Whether origins that were found before hold for these numbers, too."""
    for h, origin in enumerate(origins):
        if origin is None:
            return False
        start = 0
        for layer, columns, kind in zip(*origin, strict=True):
            part = heads[:, h, start : start + len(columns)]
            start += len(columns)
            if layer >= len(layers) or columns.max() >= layers[layer].shape[1]:
                return False
            if not _agrees(part[:, None], layers[layer].take(columns, 1)[:, None], kind).all():
                return False
    return True


def steady(head: Floats) -> bool:
    """Whether a head (n, D) has the same norm at every token: it was normalised."""
    norms = np.sqrt((head * head).sum(-1))
    used = norms[(norms > 0) & np.isfinite(norms)]
    return len(np.unique(head, axis=0)) >= 4 and len(used) > 0 and float(np.log(used).std()) < STEADY / 4


# ---- a head as a whole


def _is_evidence(kind: int, distinct: int, width: int, needed: int) -> bool:
    if kind == WHOLE:
        return distinct >= 8
    if kind == CENTRED:
        return distinct >= 4 and (distinct - 1) * width >= EVIDENCE
    return (kind == 0 or width % 2 == 0) and distinct * ((width if kind == 0 else width // 2) - 1) >= needed


def _few(tokens: int) -> slice:
    """Of the tokens, those at which a place is looked at first."""
    return slice(0, None, max(tokens // _FEW, 1))


def _may_agree(heads: Floats, blocks: Floats, kind: int) -> bool:
    """Whether any of these columns may be one of these heads, by few tokens: `_agrees` decides, and looks at all.

    Few tokens have less to compare, so the bounds are wide. Where they hold nothing, nothing is decided.
    """
    if kind == WHOLE:
        off, _ = _apart(heads, blocks)
        return bool((off < STEADY).any())
    closeness, empty = _closeness(heads, blocks, kind)
    return empty or bool((closeness > MAYBE).any())


def _agrees(heads: Floats, blocks: Floats, kind: int) -> Any:
    """(H, places): whether heads (n, H, D) are these columns (n, places, D); of several the best."""
    if kind == WHOLE:
        off, varies = _apart(heads, blocks)
        good, closeness = (off < STEADY / 3) & (10 * off < varies), -off
    else:
        closeness, _ = _closeness(heads, blocks, kind)
        good = closeness > SAME
    best = np.where(good, closeness, -np.inf)
    return good & (best == best.max(1, keepdims=True))


def _apart(heads: Floats, blocks: Floats) -> tuple[Floats, Floats]:
    """How much the ratio of their norms varies over tokens, and how much the heads' own do; of logarithms."""
    with np.errstate(divide="ignore", invalid="ignore"):
        of_heads, of_blocks = (0.5 * np.log(np.square(x).sum(-1)) for x in (heads, blocks))
        off: Floats = (of_heads[:, :, None] - of_blocks[:, None, :]).std(0)
        return off, of_heads.std(0)[:, None]


def _closeness(heads: Floats, blocks: Floats, kind: int) -> tuple[Floats, bool]:
    """Cosines (H, places), and whether there is a head without numbers."""
    if kind == CENTRED:
        a, b = _centred(heads), _centred(blocks)
        cosines = np.abs(a @ b.T)
    else:
        of_head, of_layer = _KINDS[kind]
        a, b = _proportions(of_head(np.square(heads))), _proportions(of_layer(np.square(blocks)))
        cosines = a @ b.T
    return cosines, not a.any(1).all()


def _centred(x: Floats) -> Floats:
    """(n, many, D) as (many, n·D) of length 1: deviations from the mean over tokens."""
    flat = _finite(x - x.mean(0)).transpose(1, 0, 2).reshape(x.shape[1], -1)
    lengths = np.linalg.norm(flat, axis=1, keepdims=True)
    unit: Floats = flat / np.where(lengths > 0, lengths, 1.0)
    return unit


def _proportions(squares: Floats) -> Floats:
    """(n, many, P) as (many, n·P) of length 1: at every token the shares of the sum."""
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = squares / squares.sum(-1, keepdims=True)
    shares = _finite(shares).transpose(1, 0, 2).reshape(squares.shape[1], -1)
    lengths = np.linalg.norm(shares, axis=1, keepdims=True)
    unit: Floats = shares / np.where(lengths > 0, lengths, 1.0)
    return unit


def _finite(x: Floats) -> Floats:
    """x, with 0 for what is no number; x is changed."""
    x[~np.isfinite(x)] = 0.0
    return x


@functools.lru_cache(maxsize=256)
def _places(features: int, width: int) -> tuple[Indices, ...]:
    """Tables (places, D) of columns that may be one head."""
    if not 0 < width <= features:
        return ()
    step = math.gcd(features, width)
    each = np.arange(width)
    tables = []
    if features // step <= _BLOCKS:  # side by side
        tables.append(np.arange(0, features - width + 1, step)[:, None] + each)
    if features % width == 0 and features > width:  # heads innermost
        many = features // width
        tables.append(np.arange(many)[:, None] + many * each)
        if many % 3 == 0 and many > 3:  # q, k and v innermost
            first = np.arange(0, features, 3 * width)[:, None] + np.arange(3)
            tables.append(first.reshape(-1, 1) + 3 * each)
    return tuple(tables)

"""Which outputs of which projection are the heads of q and of k: found by measurement.

Layouts of joint projections differ, and names do not show them. So the output of every projection is compared with q
and k as they reached the softmax, token by token and head by head, by norm: rotations keep it, a constant factor is
allowed, and any other layout misses it. If nothing fits (a norm in between, a cache, an adapter that adds to the
projection) or two layouts fit, the result is `Unknown` with a reason, never wrong rows. torch's own module is known by
its definition. `probe` calls this for the modules of a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from levelhead.remedies import linear
from levelhead.watching import effective_scale

_TOKENS = 64  # compared at most
_FITS = {torch.float64: 1e-4, torch.float32: 1e-3}  # relative error of a norm
_FITS_HALF = 2e-2
_CLEARLY = 8.0  # how much worse the second best must fit


@dataclass(frozen=True, eq=False)
class Source:
    """Where the heads of q, or of k, come from."""

    module: nn.Module
    weight: str  # names of its parameters
    bias: str | None
    columns: Tensor  # (heads, D) outputs of the projection, by head
    rows: Tensor  # the same in the weight, which ranks may hold in parts
    bias_rows: Tensor
    dim: int = 0  # of the weight, along which its outputs lie
    ratio: float = 1.0  # of what reached the softmax to what came out

    def shared(self, heads: int) -> bool:
        """Whether some of so many query heads have these in common."""
        return len({tuple(row) for row in self.columns.tolist()}) < heads

    def same_rows(self, other: Source) -> bool:
        return self.module is other.module and torch.equal(self.columns, other.columns)


class Unknown(NamedTuple):
    """No answer, and why."""

    why: str


class RanProjection(NamedTuple):
    """A projection that ran since the last attention call."""

    name: str
    module: nn.Module
    output: Tensor
    input: Tensor | None


class Parts(NamedTuple):
    """Heads whose keys have a part of their own and one that all heads share (MLA): what carries positions."""

    own: slice  # of a head's width
    shared: slice
    q_own: Source
    q_shared: Source
    k_own: Source


@dataclass(frozen=True)
class Sources:
    """Of one attention module."""

    heads: int
    d_k: int
    q: Source | Unknown
    k: Source | Unknown
    parts: Parts | None = None
    values: frozenset[str] = frozenset()  # which of "q" and "k" have rows that the values have, too

    @property
    def known(self) -> bool:
        """Whether nothing is left to find out."""
        return self.parts is not None or (isinstance(self.q, Source) and isinstance(self.k, Source))

    def same_rows(self, other: Sources) -> bool:
        """Whether queries and keys of both are known, and come from the same rows."""
        pairs = ((self.q, other.q), (self.k, other.k))
        return all(isinstance(a, Source) and isinstance(b, Source) and a.same_rows(b) for a, b in pairs)


def torchs_own(module: nn.MultiheadAttention) -> tuple[Source, Source | Unknown]:
    """Those of `nn.MultiheadAttention`, which come out of no module of their own."""
    H, D, E = module.num_heads, module.head_dim, module.embed_dim
    bias = None if module.in_proj_bias is None else "in_proj_bias"
    of_q = torch.arange(E).reshape(H, D)
    joint = module.in_proj_weight is not None
    names = ("in_proj_weight",) * 2 if joint else ("q_proj_weight", "k_proj_weight")
    q = Source(module, names[0], bias, of_q, of_q, of_q)
    if module.bias_k is not None:
        return q, Unknown("a key that comes out of no projection (bias_k)")
    of_k = of_q + E if joint else of_q
    return q, Source(module, names[1], bias, of_k, of_k, of_q + E)


def outputs(module: nn.Module) -> int | None:
    """Along which dimension of its weight a projection's outputs lie; None: it is none."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or isinstance(module, nn.Embedding):
        return None
    if isinstance(module, nn.Linear):
        return 0
    return 1 if type(module).__name__ == "Conv1D" else None  # transformers' turned Linear


# ---- comparison


class _Fit(NamedTuple):
    error: float
    ratio: float
    columns: Tensor


def source(
    role: str, module: nn.Module, ran: Sequence[RanProjection], x: Tensor, part: bool = False
) -> Source | Unknown:
    """Where x (B, heads, T, D) of an attention module, as it reached the softmax, came from; `part`: it is a part of
    every head."""
    limit = _limit(x)
    named = [one for one in ran if role in (effective_scale.role(one.name) or "")]
    others = [one for one in ran if all(one is not other for other in named)]
    fits: list[tuple[_Fit, RanProjection]] = []
    for some in (named, others):  # numbers decide; names only set the order
        if not fits:
            fits = [
                (_Fit(error, ratio, columns), one)
                for one in some
                for columns, error, ratio in _compared(one.output, x.detach(), part)
                if error < limit
            ]
    if not fits and (no_weight := _without_a_weight(role, module)):
        return Unknown(no_weight)
    if not fits:
        seen = ", ".join(repr(one.name) for one in ran) or "none that was seen to run"
        why = f"no projection's output is {role} up to a rotation and a factor (compared: {seen})"
        return Unknown(f"{why}; it may be normalised, cached, adapted or compiled in between")
    fits.sort(key=lambda fit: fit[0].error)
    best, one = fits[0]
    floor = max(best.error, limit / 100)
    for other, its in fits[1:]:
        pair = (fit.columns.sort(-1).values for fit in (other, best))
        same = its.module is one.module and torch.equal(*pair)
        if not same and other.error < _CLEARLY * floor:
            return Unknown(f"two layouts fit {role} equally well")
    dim = outputs(one.module)
    assert dim is not None
    if (kept := one.module._parameters["weight"]) is not None and not kept.dtype.is_floating_point:
        return Unknown(f"{one.name!r} is quantised ({kept.dtype})")
    rows = linear.rows_of_outputs(one.module, dim, one.output.shape[-1])
    if rows is None:
        return Unknown(f"the rows of {one.name!r} lie over ranks in an unknown order")
    if one.input is not None and not linear.is_linear(one.module, dim, rows, one.input, one.output, best.columns):
        return Unknown(f"{one.name!r} puts out something else than its weight times its input: a hook or an adapter")
    if added := linear.adapter(one.module, module):
        return Unknown(added)
    bias = "bias" if isinstance(one.module._parameters.get("bias"), Tensor) else None
    by_head = rows[best.columns]
    return Source(one.module, "weight", bias, best.columns, by_head, by_head, dim, best.ratio)


def _without_a_weight(role: str, module: nn.Module) -> str | None:
    """Why a module that is called as the projection of this role is none; None: there is no such module."""
    for name, child in module.named_modules():
        inside = [each for each, _ in child.named_children() if each != "parametrizations"]
        if role in (effective_scale.role(name) or "") and not inside and outputs(child) is None:
            what = f"{name!r} ({type(child).__name__})"
            if isinstance(child, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                width = "x".join(map(str, child.kernel_size))
                return f"{what} is a convolution of width {width}, and only linear layers are projections here"
            return f"{what} has no plain weight: it is computed from others, or quantised"
    return None


def misfit(known: Source, out: Tensor, x: Tensor) -> Tensor:
    """The error of a source for another pass, over the largest that fits; 0 where it cannot be compared."""
    columns = _by_head(known.columns, x.shape[1])
    if columns is None or columns.shape[1] != x.shape[3]:
        return torch.full((), math.inf, dtype=torch.float64, device=x.device)
    errors = [error for *_, error, _ in _errors(out, x.detach(), [columns], known.ratio)]
    best = torch.stack(errors).min() if errors else torch.zeros((), dtype=torch.float64, device=x.device)
    return best / _limit(x)


def _by_head(columns: Tensor, heads: int) -> Tensor | None:
    """Columns of so many heads; None: they are others. A model may repeat its keys in one call, for a mask, and leave
    that to the kernel in the next."""
    has = len(columns)
    if heads % has == 0:
        return columns if heads == has else columns.repeat_interleave(heads // has, 0)
    once = columns[:: has // heads] if has % heads == 0 else columns[:0]
    return once if len(once) and torch.equal(once.repeat_interleave(has // heads, 0), columns) else None


def _limit(x: Tensor) -> float:
    return _FITS.get(x.dtype, _FITS_HALF)


def _compared(out: Tensor, x: Tensor, part: bool) -> Iterator[tuple[Tensor, float, float]]:
    """Every layout of a projection's output, with its error and its factor."""
    _, heads, _, D = x.shape
    for columns, error, ratio in _errors(out, x, _layouts(out.shape[-1], heads, D, part)):
        found, factor = float(error), float(ratio)
        if math.isfinite(found) and factor > 0:
            yield columns, found, factor


def _errors(
    out: Tensor, x: Tensor, layouts: Iterable[Tensor], known: float | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Layouts, their errors and their factors, on the device; `known`: the factor."""
    B, heads, T, D = x.shape
    features = out.shape[-1]
    if features < D or not B * T or out.numel() != B * T * features:
        return
    exact = torch.float32 if x.device.type == "mps" else torch.float64
    wanted = x.to(exact).square().sum(-1).transpose(1, 2).reshape(B * T, heads)
    pick = torch.linspace(0, B * T - 1, min(_TOKENS, B * T)).long().to(x.device)
    wanted = wanted[pick].sqrt()
    chosen = [rows[pick].to(exact).square() for rows in _token_orders(out, B, T)]
    sums = [x.reshape(len(pick), -1, D).sum(-1) if features % D == 0 else None for x in chosen]
    for columns in layouts:
        for squares, blocks in zip(chosen, sums, strict=True):
            norm = _norms(squares, blocks, columns).sqrt()
            ratio = (wanted * norm).sum() / norm.square().sum() if known is None else wanted.new_tensor(known)
            yield columns, (wanted - ratio * norm).abs().max() / wanted.abs().max(), ratio


def _norms(squares: Tensor, blocks: Tensor | None, columns: Tensor) -> Tensor:
    """Σ of the squares of every head; summed once for all layouts that are made of blocks of D."""
    D = columns.shape[1]
    first = columns[:, 0]
    if blocks is not None and not (first % D).any() and bool((columns[:, -1] == first + D - 1).all()):
        return blocks[:, (first // D).to(squares.device)]
    return squares[:, columns.to(squares.device)].sum(-1)


def _token_orders(out: Tensor, B: int, T: int) -> Iterator[Tensor]:
    """Its rows in the order (batch, token), for either order it may have."""
    features = out.shape[-1]
    if out.dim() != 3 or out.shape[0] == B:
        yield out.reshape(B * T, features)
    if B > 1 and (out.dim() != 3 or out.shape[0] == T):
        yield out.reshape(T, B, features).transpose(0, 1).reshape(B * T, features)


def _layouts(features: int, heads: int, D: int, part: bool) -> Iterator[Tensor]:
    """(heads, D) columns: blocks of heads, in one or several groups, anywhere; or spread."""
    every = torch.arange(features)
    yielded: set[tuple[int, ...]] = set()
    for own in (n for n in range(heads, 0, -1) if heads % n == 0):  # keys may have been repeated
        for columns in _blocks(every, own, D, part):
            rows = tuple(columns[:, 0].tolist())
            if rows not in yielded:
                yielded.add(rows)
                yield columns.repeat_interleave(heads // own, 0)
        if features % (own * D) == 0 and D > 1 and not part:
            parts = features // (own * D)
            spread = [*every.reshape(own, D, parts).unbind(-1)] if parts > 1 else []  # (heads, D, parts)
            spread += [part.T for part in every.reshape(parts, D, own)] if own > 1 else []  # (parts, D, heads)
            yield from (columns.repeat_interleave(heads // own, 0) for columns in spread)


def _blocks(every: Tensor, heads: int, D: int, part: bool) -> Iterator[Tensor]:
    features = len(every)
    for groups in (n for n in range(1, heads + 1) if heads % n == 0):
        width, each = features // groups, heads // groups * D
        if features % groups or width < each:
            continue
        for first in range(0, width - each + 1, math.gcd(D, width) if part else D):
            yield every.reshape(groups, width)[:, first : first + each].reshape(heads, D)

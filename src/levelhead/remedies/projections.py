"""Which outputs of which projection are the heads of q and of k: found by measurement.

Layouts of joint projections differ, and names do not show them. So the output of every projection is compared with q
and k as they reached the softmax, token by token and head by head, by norm: rotations keep it, a constant factor is
allowed, and any other layout misses it. If nothing fits (a norm in between, a cache, an adapter that adds to the
projection) or two layouts fit, the result is `Unknown` with a reason, never wrong rows. torch's own module is known by
its definition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from levelhead.watching import effective_scale
from levelhead.watching.measure import Call
from levelhead.watching.module_stack import WatchedModule

_TOKENS = 64  # compared at most
_FITS = {torch.float64: 1e-4, torch.float32: 1e-3}  # relative error of a norm
_FITS_HALF = 2e-2
_TRIES = 3  # calls of a module, until what is unknown stays so
_CLEARLY = 8.0  # how much worse the second best must fit


@dataclass(frozen=True, eq=False)
class Source:
    """Where the heads of q, or of k, come from."""

    module: nn.Module
    weight: str  # names of its parameters
    bias: str | None
    columns: Tensor  # (heads, D) outputs of the projection, by head
    bias_columns: Tensor
    dim: int = 0  # of the weight, along which its outputs lie
    ratio: float = 1.0  # of what reached the softmax to what came out

    def shared(self, heads: int) -> bool:
        """Whether some of so many query heads have these in common."""
        return len({tuple(row) for row in self.columns.tolist()}) < heads


class Unknown(NamedTuple):
    """No answer, and why."""

    why: str


@dataclass(frozen=True)
class Sources:
    """Of one attention module."""

    heads: int
    d_k: int
    q: Source | Unknown
    k: Source | Unknown


class Probe:
    """Listens to a watch until the sources of every module are known; `close` ends it."""

    def __init__(self, watch: Any) -> None:
        self.found: dict[str, Sources] = {}
        self.modules: dict[str, WatchedModule] = {}
        self._tries: dict[str, int] = {}
        self._out: dict[nn.Module, tuple[Tensor, int]] = {}  # since the last attention call
        self._names = {module: name for name, module in watch.model.named_modules()}
        self._watch = watch
        projections = [module for module in watch.model.modules() if _outputs(module) is not None]
        self._hooks = [module.register_forward_hook(self._ran) for module in projections]
        watch.listeners.append(self._called)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._out = [], {}
        if self._called in self._watch.listeners:
            self._watch.listeners.remove(self._called)

    @property
    def settled(self) -> bool:
        """Whether there is nothing left to find out."""
        return bool(self.found) and all(self._is_settled(name) for name in self.found)

    def _is_settled(self, name: str) -> bool:
        sources = self.found.get(name)
        whole = sources is not None and isinstance(sources.q, Source) and isinstance(sources.k, Source)
        return whole or self._tries.get(name, 0) >= _TRIES

    def _ran(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not torch.compiler.is_compiling():
            self._out[module] = (output.detach(), output._version)

    def _called(self, watched: WatchedModule, call: Call, tally: Tensor, q: Tensor, k: Tensor) -> None:
        name = watched.name
        if not self._is_settled(name):
            self._tries[name] = self._tries.get(name, 0) + 1
            self.modules[name] = watched
            sources = self._sources(watched.module, q, k)
            if name not in self.found or isinstance(sources.q, Source):
                self.found[name] = sources
        self._out.clear()

    def _sources(self, module: nn.Module, q: Tensor, k: Tensor) -> Sources:
        if isinstance(module, nn.MultiheadAttention):
            return Sources(module.num_heads, module.head_dim, *torchs_own(module))
        inside = set(module.modules())
        unchanged = {child: out for child, (out, version) in self._out.items() if out._version == version}
        ran = [(self._names.get(child, ""), child, out) for child, out in unchanged.items()]
        # Projections may also belong to the module around the one that makes the call.
        ran = [x for x in ran if x[1] in inside] or ran
        return Sources(q.shape[1], q.shape[3], _source("q", ran, q), _source("k", ran, k))


def torchs_own(module: nn.MultiheadAttention) -> tuple[Source, Source | Unknown]:
    """Those of `nn.MultiheadAttention`, which come out of no module of their own."""
    H, D, E = module.num_heads, module.head_dim, module.embed_dim
    bias = None if module.in_proj_bias is None else "in_proj_bias"
    of_q = torch.arange(E).reshape(H, D)
    joint = module.in_proj_weight is not None
    names = ("in_proj_weight",) * 2 if joint else ("q_proj_weight", "k_proj_weight")
    q = Source(module, names[0], bias, of_q, of_q)
    if module.bias_k is not None:
        return q, Unknown("a key that comes out of no projection (bias_k)")
    return q, Source(module, names[1], bias, of_q + E if joint else of_q, of_q + E)


def _outputs(module: nn.Module) -> int | None:
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
    module: nn.Module
    columns: Tensor


def _source(role: str, ran: list[tuple[str, nn.Module, Tensor]], x: Tensor) -> Source | Unknown:
    """Where x (B, heads, T, D), as it reached the softmax, came from."""
    limit = _FITS.get(x.dtype, _FITS_HALF)
    named = [one for one in ran if role in (effective_scale.role(one[0]) or "")]
    others = [one for one in ran if all(one is not other for other in named)]
    fits: list[_Fit] = []
    for some in (named, others):  # numbers decide; names only set the order
        if not fits:
            fits = [
                _Fit(error, ratio, module, columns)
                for _, module, out in some
                for columns, error, ratio in _compared(out, x.detach())
                if error < limit
            ]
    if not fits:
        seen = ", ".join(repr(name) for name, *_ in ran) or "none that was seen to run"
        why = f"no projection's output is {role} up to a rotation and a factor (compared: {seen})"
        return Unknown(f"{why}; it may be normalised, cached, adapted or compiled in between")
    fits.sort(key=lambda fit: fit.error)
    best = fits[0]
    floor = max(best.error, limit / 100)
    for other in fits[1:]:
        rows = (fit.columns.sort(-1).values for fit in (other, best))
        same = other.module is best.module and torch.equal(*rows)
        if not same and other.error < _CLEARLY * floor:
            return Unknown(f"two layouts fit {role} equally well")
    dim = _outputs(best.module)
    assert dim is not None
    bias = "bias" if isinstance(best.module._parameters.get("bias"), Tensor) else None
    return Source(best.module, "weight", bias, best.columns, best.columns, dim, best.ratio)


def _compared(out: Tensor, x: Tensor) -> Iterator[tuple[Tensor, float, float]]:
    """Every layout of a projection's output, with its error and its factor."""
    B, heads, T, D = x.shape
    features = out.shape[-1]
    if features < D or not B * T or out.numel() != B * T * features:
        return
    wanted = x.to(torch.float64).square().sum(-1).transpose(1, 2).reshape(B * T, heads)
    pick = torch.linspace(0, B * T - 1, min(_TOKENS, B * T)).long().to(x.device)
    wanted = wanted[pick].sqrt()
    for rows in _token_orders(out, B, T):
        squares = rows[pick].to(torch.float64).square()
        blocks = squares.reshape(len(pick), -1, D).sum(-1) if features % D == 0 else None
        for columns in _layouts(features, heads, D):
            norm = _norms(squares, blocks, columns.to(x.device)).sqrt()
            total = float(norm.square().sum())
            ratio = float((wanted * norm).sum()) / total if total else math.nan
            error = float((wanted - ratio * norm).abs().max() / wanted.abs().max())
            if math.isfinite(error) and ratio > 0:
                yield columns, error, ratio


def _norms(squares: Tensor, blocks: Tensor | None, columns: Tensor) -> Tensor:
    """Σ of the squares of every head; summed once for all layouts that are made of blocks of D."""
    D = columns.shape[1]
    first = columns[:, 0]
    if blocks is not None and not (first % D).any() and bool((columns[:, -1] == first + D - 1).all()):
        return blocks[:, first // D]
    return squares[:, columns].sum(-1)


def _token_orders(out: Tensor, B: int, T: int) -> Iterator[Tensor]:
    """Its rows in the order (batch, token), for either order it may have."""
    features = out.shape[-1]
    if out.dim() != 3 or out.shape[0] == B:
        yield out.reshape(B * T, features)
    if B > 1 and (out.dim() != 3 or out.shape[0] == T):
        yield out.reshape(T, B, features).transpose(0, 1).reshape(B * T, features)


def _layouts(features: int, heads: int, D: int) -> Iterator[Tensor]:
    """(heads, D) columns: blocks of heads, in one or several groups, anywhere; or spread."""
    every = torch.arange(features)
    yielded: set[tuple[int, ...]] = set()
    for own in (n for n in range(heads, 0, -1) if heads % n == 0):  # keys may have been repeated
        for columns in _blocks(every, own, D):
            rows = tuple(columns[:, 0].tolist())
            if rows not in yielded:
                yielded.add(rows)
                yield columns.repeat_interleave(heads // own, 0)
        if features % (own * D) == 0 and D > 1:
            parts = features // (own * D)
            spread = [*every.reshape(own, D, parts).unbind(-1)] if parts > 1 else []  # (heads, D, parts)
            spread += [part.T for part in every.reshape(parts, D, own)] if own > 1 else []  # (parts, D, heads)
            yield from (columns.repeat_interleave(heads // own, 0) for columns in spread)


def _blocks(every: Tensor, heads: int, D: int) -> Iterator[Tensor]:
    features = len(every)
    for groups in (n for n in range(1, heads + 1) if heads % n == 0):
        width, each = features // groups, heads // groups * D
        if features % groups or width < each:
            continue
        for first in range(0, width - each + 1, D):
            yield every.reshape(groups, width)[:, first : first + each].reshape(heads, D)

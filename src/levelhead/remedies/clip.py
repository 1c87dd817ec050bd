"""QK-clip: after the optimiser's step, weights of heads whose logits exceed τ are scaled back.

With S the largest logit that a head was seen to have since the last step, and γ = min(1, τ / S), its rows of the q and
k projections are multiplied by √γ each (Kimi K2, arXiv:2507.20534). Where query heads share a key head, or the rows of
k are not known, those of q take the whole of γ, which changes the logits just as much. Heads below τ keep their bits,
and the optimiser its state. A norm of q or k in between would take the scaling back: refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from levelhead.errors import bad_value
from levelhead.remedies.projections import Probe, Source, Sources, Unknown
from levelhead.remedies.remedy import Remedy, Sight, checked, needs_deep, positive, refuse_without_attention, run
from levelhead.runs import tally
from levelhead.torch.masks import hides
from levelhead.watching import effective_scale
from levelhead.watching.measure import Call
from levelhead.watching.module_stack import WatchedModule
from levelhead.watching.watch import Watch

TAU = 100.0  # Kimi K2's
_ROUNDING = 1e-5  # relative: so far above τ is at τ, and stays
_CLOSE = 1e-3  # relative, of a maximum to τ


@dataclass(frozen=True)
class Clipped:
    """What a step did: (module, head) -> γ, the factor of its logits; empty: nothing."""

    heads: dict[tuple[str, int], float]
    largest: float  # logit that was seen, of all heads
    inexact: tuple[str, ...] = ()  # modules whose logits have an additive bias, which γ leaves

    def __len__(self) -> int:
        return len(self.heads)

    def __str__(self) -> str:
        if not self.heads:
            return f"0 heads clipped, largest logit {self.largest:.4g}"
        strongest = min(self.heads.values())
        return f"{len(self)} heads clipped, the strongest by {strongest:.4g}; largest logit {self.largest:.4g}"


@dataclass
class _Seen:
    """What a module's calls have come to since the last step; read once, then."""

    largest: Tensor  # (H,)
    bad_rows: Tensor
    biased: Tensor
    softcap: float | None


class QKClip(Remedy):
    """Call it, or its `step()`, after each step of the optimiser; `undo()` ends it.

    Args:
        watched: the model, which is then watched, or a watch of it (of all query rows).
        tau: no head's largest logit is to exceed it.
        batch: what to call the model with once, to find out which rows belong to which head; else the first forward
            pass shows it, unless it is compiled.
        group: of processes, whose maxima count together; None: all, where there are several.

    A logit is what reaches the softmax, the scale included. Later modules of a deep model see other inputs after
    earlier ones were clipped: their maxima then land near τ, not at it.

    Example:
        >>> import torch, levelhead as lh
        >>> model, batch = lh.torch.MultiHeadAttention(16, 2), torch.randn(1, 5, 16)
        >>> clip = lh.health.remedies.QKClip(model, tau=0.1)
        >>> _ = model(batch)
        >>> len(clip.step())
        2
        >>> _ = clip.verify(batch)
        >>> clip.undo()
    """

    _advice = "Call step() after a forward pass; deep models may need more than one"

    def __init__(self, watched: nn.Module | Watch, tau: float = TAU, *, batch: Any = None, group: Any = None) -> None:
        self.tau = positive("tau", tau, "Kimi K2 uses 100")
        self._name = f"QKClip {self.tau:g}"
        self._group = group
        self._own = not isinstance(watched, Watch)
        if isinstance(watched, Watch):
            if watched.rows is not None:
                advice = "Watch all rows: a sampled maximum is a lower bound"
                raise bad_value("watched", "rows=None", f"rows={watched.rows}", advice)
            self.watch, model = watched, watched.model
        else:
            model = checked(watched)
            refuse_without_attention(model)
            self.watch = Watch(model, deep=needs_deep(model), history=2)
        super().__init__(model, {})
        self._seen: dict[str, _Seen] = {}
        self._probe = Probe(self.watch)
        self.watch.listeners.append(self._called)
        if batch is not None:
            try:
                run(self.watch.model, batch)
                self._refuse_unless_clippable()
            except BaseException:
                self.undo()
                raise
            self._seen = {}

    def _called(self, watched: WatchedModule, call: Call, heads: Tensor, q: Tensor, k: Tensor) -> None:
        self.modules[watched.name] = watched.module
        bad_rows = heads[:, tally.INDEX["nan_rows"]].sum()
        new = _Seen(heads[:, tally.LARGEST].detach().clone(), bad_rows, _biased(call), call.scoring.softcap)
        old = self._seen.get(watched.name)
        if old is not None and old.largest.shape == new.largest.shape:
            new.largest = torch.maximum(old.largest, new.largest)
            new.bad_rows, new.biased = old.bad_rows + new.bad_rows, old.biased | new.biased
        self._seen[watched.name] = new

    def _undo(self) -> None:
        self._probe.close()
        if self._called in self.watch.listeners:
            self.watch.listeners.remove(self._called)
        if self._own:
            self.watch.detach()

    # ---- a step

    def __call__(self, *args: Any, **kwargs: Any) -> Clipped:
        """As `step`; whatever a training loop hands to its hooks is ignored."""
        return self.step()

    def step(self) -> Clipped:
        """Scales back what exceeded τ since the last step. Every process calls it."""
        self._refuse_unless_clippable()
        seen, self._seen = self._seen, {}
        maxima = self._maxima(seen)
        plan = _Plan()
        heads: dict[tuple[str, int], float] = {}
        for name, largest in maxima.items():
            factors = (self._factor(x, seen[name].softcap) for x in largest)
            if over := {head: factor for head, factor in enumerate(factors) if factor < 1.0}:
                plan.add(self._sources(name), over)
                heads |= {(name, head): factor for head, factor in over.items()}
        plan.carry_out()
        if self._probe.settled:
            self._probe.close()
        inexact = tuple(name for name in dict.fromkeys(name for name, _ in heads) if bool(seen[name].biased))
        return Clipped(heads, max((max(x) for x in maxima.values()), default=-math.inf), inexact)

    def _maxima(self, seen: dict[str, _Seen]) -> dict[str, list[float]]:
        """Every head's maximum, of all processes: one collective, one wait for the device."""
        names = list(seen)
        if not names:
            return {}
        bad_rows = torch.stack([seen[name].bad_rows.double() for name in names])
        packed = torch.cat([bad_rows, *(seen[name].largest.double() for name in names)])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(packed, torch.distributed.ReduceOp.MAX, self._group)
        numbers = iter(packed.tolist())
        wrong = [name for name, rows in zip(names, itertools.islice(numbers, len(names)), strict=True) if rows]
        if wrong:
            given = f"NaN or infinite ones in {', '.join(map(repr, wrong))}"
            advice = "No factor brings them back: return to an earlier checkpoint"
            raise bad_value("logits", "finite numbers", given, advice)
        return {name: list(itertools.islice(numbers, len(seen[name].largest))) for name in names}

    def _factor(self, largest: float, softcap: float | None) -> float:
        """γ of one head, of what goes into the cap where there is one."""
        tau = self.tau
        if not largest > tau * (1 + _ROUNDING):
            return 1.0
        if softcap is not None:
            almost = 1 - 1e-6  # beyond, the logit itself is not known
            largest, tau = (math.atanh(min(x / softcap, almost)) for x in (largest, tau))
        return tau / largest

    def _sources(self, name: str) -> Sources:
        sources = self._probe.found.get(name)
        if sources is not None and isinstance(sources.q, Source):
            return sources
        why = sources.q.why if sources is not None and isinstance(sources.q, Unknown) else "none was seen at first"
        advice = "Give QKClip batch=..., so that it sees an uncompiled forward pass"
        raise bad_value("model", "rows that belong to heads", f"{name or 'the model'!r}, where {why}", advice)

    def _refuse_unless_clippable(self) -> None:
        if not self._seen and not self._probe.found:
            advice = "Run the model, in a step that its watch observes, before the first step()"
            raise bad_value("model", "attention calls", "none yet", advice)
        for name, module in self.modules.items():
            if norms := effective_scale.qk_norms(module):
                advice = "Scaled weights would be renormalised away; QK-norm bounds the logits"
                raise bad_value("model", "no QK-norm", f"{', '.join(norms)} in {name or 'the model'!r}", advice)

    # ---- the proof

    @contextmanager
    def _watched(self) -> Iterator[Watch]:
        before = self._seen
        yield self.watch
        self._seen = before

    def _wrong(self, name: str, sight: Sight) -> str | None:
        largest = _largest(sight)
        return None if largest <= self.tau * (1 + _CLOSE) else f"its largest logit is {largest:.6g}"

    def _evidence(self, name: str, sight: Sight) -> str:
        return f"largest logit {_largest(sight):.6g}"


def _largest(sight: Sight) -> float:
    return max(float(heads[:, tally.LARGEST].max()) for _, heads, _, _ in sight.calls)


def _biased(call: Call) -> Tensor:
    """Whether something other than 0 is added to a logit that is shown."""
    mask: Tensor | None = call.scoring.mask
    if mask is None or mask.dtype is torch.bool or call.ready:
        return torch.zeros((), dtype=torch.bool, device=call.q.device)
    return ((mask != 0) & ~hides(mask)).any().detach()


class _Plan:
    """Factors of the rows of parameters: each parameter once, however many modules share it."""

    def __init__(self) -> None:
        self._factors: dict[int, tuple[Tensor, int, Tensor]] = {}

    def add(self, sources: Sources, over: dict[int, float]) -> None:
        q, k = sources.q, sources.k
        assert isinstance(q, Source)
        both = [q] if isinstance(k, Unknown) or k.shared(sources.heads) else [q, k]
        for head, factor in over.items():
            for source in both:
                self._scale(source, head, factor if len(both) == 1 else math.sqrt(factor))

    def _scale(self, source: Source, head: int, factor: float) -> None:
        rows = [(source.weight, source.dim, source.columns)]
        if source.bias is not None:
            rows.append((source.bias, 0, source.bias_columns))
        for name, dim, columns in rows:
            parameter = _plain(source.module, name)
            unscaled = torch.ones(parameter.shape[dim], dtype=torch.float64)
            _, _, factors = self._factors.setdefault(id(parameter), (parameter, dim, unscaled))
            factors[columns[head]] = factors[columns[head]].clamp(max=factor)

    def carry_out(self) -> None:
        with torch.no_grad():
            for parameter, dim, factors in self._factors.values():
                at = (factors != 1.0).nonzero()[:, 0].to(parameter.device)
                shape = [1] * parameter.dim()
                shape[dim] = -1
                times = factors.to(parameter.device)[at].reshape(shape)
                old = parameter.index_select(dim, at)
                parameter.index_copy_(dim, at, (old.double() * times).to(parameter.dtype))


def _plain(module: nn.Module, name: str) -> Tensor:
    """A parameter that keeps what is written into it."""
    parameter = module._parameters.get(name)
    plain = parameter is not None and type(parameter) in (nn.Parameter, Tensor)
    if parameter is None or not plain or parametrize.is_parametrized(module, name):
        given = f"{name} of {type(module).__name__}, which is computed or sharded"
        advice = "Clip before it is parametrised, quantised or sharded"
        raise bad_value("model", "projections of plain weights", given, advice)
    return parameter

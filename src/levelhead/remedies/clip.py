"""QK-clip: after the optimiser's step, weights of heads whose logits exceed τ are scaled back.

With S the largest logit that a head was seen to have since the last step, on any rank, and γ = min(1, τ / S), the rows
of its q and k projections are multiplied by powers of γ (`rows`), so that its logits get the factor γ. Heads below τ
keep their bits, and the optimiser its state. A norm of q or k in between would take the scaling back: refused. Ranks
agree once on the heads (`agreed`); then a step costs one collective, two where something is clipped.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.errors import bad_value
from levelhead.remedies import rows, shards, written
from levelhead.remedies.added import added
from levelhead.remedies.agreed import LOST, NO_WAY_BACK, NOTHING_RAN, AgreedLayer, Described
from levelhead.remedies.clipped import Clipped
from levelhead.remedies.passes import Maxima, Passes, Used
from levelhead.remedies.probe import Probe
from levelhead.remedies.projections import Source, Sources
from levelhead.remedies.remedy import Remedy, Sight, checked, depth, positive, refuse_without_attention, run, uncompiled
from levelhead.remedies.together import Together
from levelhead.runs import tally
from levelhead.watching import amend, effective_scale
from levelhead.watching.measure import Call
from levelhead.watching.module_stack import WatchedModule
from levelhead.watching.observe_call import UNREADABLE
from levelhead.watching.ranks import check_parts
from levelhead.watching.taken_rows import AUTO
from levelhead.watching.watch import Watch
from levelhead.words import module_title

TAU = 100.0  # Kimi K2's
_ROUNDING = 1e-5  # relative: so far above τ is at τ, and stays
_UNSEEN = "none was seen at first"
_CLOSE = 1e-3  # relative, of a maximum to τ or to a cap
_ELSEWHERE = "ran with other weights than its own alone (functional_call), and such passes do not count"
_BIASED = "something is added to its products of q and k, which a clip leaves"


class QKClip(Remedy):
    """Call it, or its `step()`, after each step of the optimiser; `undo()` ends it.

    Args:
        watched: the model, which is then watched, or a watch of it (of all query rows).
        tau: no head's largest logit is to exceed it.
        batch: what to call the model with once, uncompiled, to find out which rows belong to which head; else the
            first forward pass shows it, unless it is compiled.
        group: of processes, whose maxima count together; None: all, where there are several.
        parts: where ranks have layers of equal names with different parameters: "pipeline" if these are different
            layers, or other heads of one layer, in tensors of each rank's own; "replicas" if they are copies that
            drifted apart. None: such ranks are refused.

    A logit is what reaches the softmax, the scale included. Later modules of a deep model see other inputs after
    earlier ones were clipped: their maxima then land near τ, not at it.

    Example:
        >>> import torch, levelhead as lh
        >>> model, batch = lh.torch.MultiHeadAttention(16, 2), torch.randn(1, 5, 16)
        >>> clip = lh.remedies.QKClip(model, tau=0.1)
        >>> _ = model(batch)
        >>> len(clip.step())
        2
        >>> _ = clip.verify(batch)
        >>> clip.undo()
    """

    _advice = "Call step() after a forward pass; deep models may need more than one"

    def __init__(
        self,
        watched: nn.Module | Watch,
        tau: float = TAU,
        *,
        batch: Any = None,
        group: Any = None,
        parts: str | None = None,
    ) -> None:
        self.tau = positive("tau", tau, "Kimi K2 uses 100")
        self._name = f"QKClip {self.tau:g}"
        check_parts(parts)
        self._watches = not isinstance(watched, Watch)
        if isinstance(watched, Watch):
            if watched.rows not in (None, AUTO):
                advice = "Watch all rows: a sampled maximum is a lower bound"
                raise bad_value("watched", "rows=None", f"rows={watched.rows}", advice)
            self.watch, model = watched, watched.model
        else:
            model = checked(watched)
            refuse_without_attention(model)
            self.watch = Watch(model, deep=depth(model), history=2, rows=None)
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            advice = "Shard the model with torch.distributed.fsdp.fully_shard (FSDP2)"
            raise bad_value("model", "weights that keep their shape", "FSDP1, which makes flat pieces of them", advice)
        super().__init__(model, {})
        self._together = Together(self.watch.model, group, parts)
        self._passes = Passes(self.watch.model)
        self._elsewhere: list[str] = []  # layers that ran with other weights alone, since the last step
        self._known: dict[str, tuple[Any, Described]] = {}
        self._kept = written.Kept(self.watch.model)
        self._said: set[str] = set()
        self._probe = Probe(self.watch, self._called)
        self._rows_before, self.watch.rows = self.watch.rows, None  # a clip needs all: "auto" leaves the choice to us
        if batch is not None:
            try:
                with uncompiled(), self.watch.aside():
                    run(self.watch.model, batch)
                seen, _ = self._passes.taken()
                own = self._described(seen)
                if not self._together.group.several:  # else all ranks refuse together, in their first step
                    self._together.agree(seen, own, self._hindered(own))
            except BaseException:
                self.undo()
                raise

    def _called(
        self, layer: str, used: list[Used], watched: WatchedModule, call: Call, heads: Tensor, q: Tensor, k: Tensor
    ) -> None:
        self.modules[watched.name] = watched.module
        bad_rows = heads[:, tally.INDEX["nan_rows"]].sum()
        new = Maxima(heads[:, tally.LARGEST].detach().clone(), bad_rows, added(call, q, k), amend.cap_of(call))
        self._passes.add(layer, used, new)

    def _undo(self) -> None:
        self._probe.close()
        self._kept.close()
        self.watch.rows = self._rows_before
        if self._watches:
            self.watch.detach()

    # ---- a step

    def __call__(self, *args: Any, **kwargs: Any) -> Clipped:
        """As `step`; whatever a training loop hands to its hooks is ignored."""
        return self.step()

    def step(self) -> Clipped:
        """Scales back what exceeded τ since the last step. Every process calls it, also one that ran no pass."""
        shards.resharded(self.watch.model)
        seen, self._elsewhere = self._passes.taken()
        own = self._described(seen)
        self._probe.end_step()
        try:
            return self._step(seen, own)
        finally:
            self._probe.misfits.clear()

    def _step(self, seen: dict[str, Maxima], own: tuple[Described, ...]) -> Clipped:
        facts = self._hindered(own), self._probe.misfits, self._kept.undone()
        exchanged = self._together.exchanged(seen, own, *facts, self.tau)
        self._kept.keep([])
        flags = exchanged.flags
        if lost := [name for name, flag in flags.items() if flag["bad_rows"]]:
            raise bad_value("logits", "finite numbers", f"{LOST}{', '.join(map(repr, lost))}", NO_WAY_BACK)
        over = self._over(exchanged.maxima)
        if over and not self._together.same_bits([layer for layer, _ in over]):
            return self._step(seen, own)  # as other layers
        heads, left = self._write(over, flags)
        near = self._near_their_caps(exchanged.maxima)
        inexact = {name: _BIASED if flags[name]["biased"] else near.get(name, "") for name, _ in heads}
        inexact = {name: why for name, why in inexact.items() if why}
        undone = tuple(name for name, flag in flags.items() if flag["undone"])
        largest = max((max(x.values(), default=-math.inf) for x in exchanged.maxima.values()), default=-math.inf)
        self._tell(undone, left)
        return Clipped(heads, largest, inexact, left, exchanged.idle, undone)

    def _over(self, maxima: dict[str, dict[int, float]]) -> list[tuple[AgreedLayer, dict[int, float]]]:
        """Layers with heads above τ: by head, γ."""
        found = []
        for layer in self._together.layers or ():
            factors = {head: self._factor(x, layer.cap) for head, x in maxima[layer.label].items()}
            if over := {head: factor for head, factor in factors.items() if factor < 1.0}:
                found.append((layer, over))
        return found

    def _near_their_caps(self, maxima: dict[str, dict[int, float]]) -> dict[str, str]:
        """Layers with logits so near to their cap that rounding hides what goes into it."""
        found = {}
        for layer in self._together.layers or ():
            largest = max(maxima[layer.label].values(), default=-math.inf)
            if layer.cap is not None and largest > layer.cap * (1 - _CLOSE):
                found[layer.label] = (
                    f"logits of {largest:.6g} are at their cap of {layer.cap:g}: further steps clip more"
                )
        return found

    def _write(
        self, over: list[tuple[AgreedLayer, dict[int, float]]], flags: dict[str, dict[str, float]]
    ) -> tuple[dict[tuple[str, int], float], dict[tuple[str, int], str]]:
        heads: dict[tuple[str, int], float] = {}
        left: dict[tuple[str, int], str] = {}
        for layer, _ in over:  # every refusal comes before the first change
            if layer.why and not layer.frozen:
                raise _unknown(layer.label, layer.why)
            if flags[layer.label]["misfit"] > 1:
                why = (
                    "its queries or keys are no longer what its projections put out: something is added to them, or"
                    " they come from elsewhere"
                )
                raise _unknown(layer.label, why)
        writes = written.Writes(self.watch.model)
        for layer, factors in over:
            places = {head: place for place, head in enumerate(layer.heads) if head in factors}
            if layer.frozen:
                left |= {(layer.label, place): layer.why for place in places.values()}
                continue
            heads |= {(layer.label, place): factors[head] for head, place in places.items()}
            if self._together.group.number in layer.members:
                writes.scale(layer, factors)
        self._kept.keep(writes.carry_out())
        return heads, left

    def _tell(self, undone: tuple[str, ...], left: dict[tuple[str, int], str]) -> None:
        """A warning for each thing that a training loop should know, once."""
        said = [f"the last clip of {name} was overwritten: {_MASTERS}" for name in undone]
        said += [f"{name} is above the bound, and not clipped: {why}" for (name, _), why in left.items()]
        unread = [(name, why) for name, why in self._unobserved() if why.endswith(UNREADABLE)]
        said += [
            f"{module_title(name)} is never clipped, since no watch sees its logits: it {why}" for name, why in unread
        ]
        said += [f"{module_title(name)} {_ELSEWHERE}" for name in self._elsewhere]
        for words in said:
            if words not in self._said:
                self._said.add(words)
                warnings.warn(f"levelhead: QKClip: {words}", stacklevel=4)

    def _factor(self, largest: float, cap: float | None) -> float:
        """γ of one head, of what goes into the cap where there is one."""
        tau = self.tau
        if not largest > tau * (1 + _ROUNDING):
            return 1.0
        if cap is not None:
            almost = 1 - 1e-6  # beyond, the logit itself is not known
            largest, tau = (math.atanh(min(x / cap, almost)) for x in (largest, tau))
        return tau / largest

    # ---- what this rank knows

    def _described(self, seen: dict[str, Maxima]) -> tuple[Described, ...]:
        """The layers that this rank has ever seen; described again where a pass has shown something new."""
        for name, one in seen.items():
            before = self._known.get(name)
            found = self._probe.found.get(name)
            heads = len(one.largest)
            now = (found, heads, one.cap, self._trained(found))
            if before is None or before[0] != now:
                self._known[name] = (now, self._description(name, heads, one.cap))
        return tuple(described for _, described in self._known.values())

    def _trained(self, found: Sources | None) -> tuple[bool, ...]:
        """Which of the projections are trained: layers may be frozen for a while."""
        each = () if found is None else (found.q, found.k, *(found.parts or ())[2:])
        modules = [x.module for x in each if isinstance(x, Source)]
        return tuple(x.requires_grad for module in modules for x in module.parameters(recurse=False))

    def _description(self, name: str, heads: int, cap: float | None) -> Described:
        sources = self._probe.found.get(name)
        unknown = Described(name, tuple(range(heads)), cap=cap)
        if sources is None:
            return replace(unknown, why=_UNSEEN)
        if sources.heads != heads:
            return replace(unknown, why=f"it was called with {sources.heads} heads at first, then with {heads}")
        unknown = replace(unknown, keys=rows.keys(self.watch.model, sources))
        try:
            shares = rows.shares(self.watch.model, sources)
        except rows.RefusedError as refused:
            return replace(unknown, why=str(refused), frozen=refused.frozen)
        try:
            rows.shares(self.watch.model, sources, keys_stay=True)
        except rows.RefusedError as refused:
            unknown = replace(unknown, no_queries=str(refused), frozen_queries=refused.frozen)
        names = sorted({share.parameter for share in shares})
        holders, found = rows.fingerprint(self.watch.model, names)
        first = rows.first_rows(shares, heads)
        return replace(unknown, heads=first, shares=shares, holders=holders, fingerprint=found)

    def _unobserved(self) -> list[tuple[str, str]]:
        """Modules of which no call was observed, and why."""
        silent = (watched for watched in self.watch.watched_modules if not watched.calls)
        return [(watched.name, why) for watched in silent for why in watched.not_observed]

    def _hindered(self, own: tuple[Described, ...]) -> str:
        """Why this rank cannot clip at all: calls that were not observed, or QK-norms of layers that cannot be written;
        "" if it can."""
        if not own and (lost := self._unobserved()):
            name, why = lost[0]
            return f"{NOTHING_RAN}: {module_title(name)} {why}"
        if not own and self._elsewhere:
            return f"{NOTHING_RAN}: {module_title(self._elsewhere[0])} {_ELSEWHERE}"
        for each in own:
            if not each.why or each.frozen:
                continue
            if norms := effective_scale.qk_norms(self._probe.modules[each.module].module):
                return f"{', '.join(norms)} in {each.module or 'the model'!r}"
        return ""

    # ---- the proof

    @contextmanager
    def _watched(self) -> Iterator[Watch]:
        with self._passes.aside(), self._probe.aside(), self.watch.aside():
            yield self.watch

    def _wrong(self, name: str, sight: Sight) -> str | None:
        largest = _largest(sight)
        close = max(_CLOSE, *(torch.finfo(q.dtype).eps for _, _, q, _ in sight.calls))
        return None if largest <= self.tau * (1 + close) else f"its largest logit is {largest:.6g}"

    def _evidence(self, name: str, sight: Sight) -> str:
        return f"largest logit {_largest(sight):.6g}"


def _largest(sight: Sight) -> float:
    return max(float(heads[:, tally.LARGEST].max()) for _, heads, _, _ in sight.calls)


_MASTERS = "an optimiser that keeps copies of the weights (float32 masters) writes them back; clip those instead"


def _unknown(name: str, why: str) -> Exception:
    advice = "qk_norm and softcap bound logits whatever the weights are"
    if "compiled" in why or why == _UNSEEN:
        advice = "Give QKClip batch=..., so that it sees an uncompiled forward pass"
    title = f"the model{name}" if name[:1] in ("", " ") else name
    return bad_value("model", "rows that belong to heads", f"{title!r}, where {why}", advice)

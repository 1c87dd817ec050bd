"""What one module did in one step: tallies of its heads, and the facts of its calls.

Everything stays on the tensors' device until the step is read; only then the CPU waits for the device. A module that
calls attention with different numbers of heads, or at several places of its code (`call_sites`), has a record for each.
Other calls of it are added up; the scale of each is read, and the one furthest from the right one is recorded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from levelhead.call import scaling
from levelhead.call.options import NAMES, Scoring
from levelhead.observation import Observation
from levelhead.runs import tally
from levelhead.runs.record import MENTIONED, Facts, Record, mentioned
from levelhead.torch.autograd import scoring_of
from levelhead.torch.operators import Pass
from levelhead.watching import (
    call_sites,
    configuration,
    effective_scale,
    learned_scale,
    measure,
    scale_reader,
    sequences,
)
from levelhead.watching.call_sites import Place
from levelhead.watching.effective_scale import NOT_FOLLOWED, NOTHING_RAN, Ran
from levelhead.watching.intercept_softmax import BY_HAND, WEIGHTS
from levelhead.watching.measure import Call
from levelhead.watching.module_stack import Frame, GradientInputs, Observed, Product, WatchedModule, fed, pass_number
from levelhead.watching.scale_reader import Noted, Reader
from levelhead.watching.scale_sides import ALIKE, NORMALISED, Reading
from levelhead.watching.score_slopes import through
from levelhead.watching.taken_rows import Rows, stand_for, taken
from levelhead.watching.undisturbed import undisturbed

_Rules: TypeAlias = dict[str, Tensor]  # scale rule -> tally under it
_Key: TypeAlias = tuple[int, int]  # number of heads, number of the place
_SIZES = 4  # different sizes of calls, and
_NOTED = 16  # different calls of a module whose scales are read in one step
_COMPUTED = "the gradient of {}'s weight is not read: the weight is computed in every pass"
RULES = ("none", "1/sqrt(d_k)", "1/d_k", "1/sqrt(d)")


class Settings(Protocol):
    """What a ledger needs of its watch."""

    rows: Rows  # query rows to measure of each call; None: all
    every: int
    plain_torch: bool | None
    counterfactual: bool
    listeners: list[Callable[..., None]]
    expected_scale: float | str | None
    passes: int  # of the whole model, so far

    @property
    def turn(self) -> int: ...  # the number of the observed step
    @property
    def lock(self) -> AbstractContextManager[Any]: ...  # held while a step changes: several threads may run the model


@dataclass
class _Sheet:
    """The calls of a step with one key: their tally, and the facts of the last one."""

    tally: Tensor
    rules: _Rules
    facts: Facts  # without scale and norms, which are read with the step
    scale: float | Tensor | None


class Ledger:
    """The sheets of one module."""

    def __init__(self, watched: WatchedModule, watch: Settings) -> None:
        self.watched, self.watch = watched, watch
        self._sheets: dict[_Key, _Sheet] = {}
        self._noted: dict[_Key, dict[tuple[Any, ...], Noted]] = {}  # by number in its pass, path and sizes
        self._readings: dict[_Key, Reading] = {}
        self._reader = Reader()
        self._learns: dict[int, dict[str, nn.Parameter]] = {}  # by number of heads: what may be a learned scale
        self._learned: dict[_Key, dict[str, Tensor]] = {}  # what those were at the latest call
        self._pass: int | None = None
        self._calls: dict[_Key, int] = {}  # of this pass
        self._followed: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._hooks: list[Any] = []
        self._measured = itertools.count()  # numbers of this step's calls

    def clear(self) -> None:
        """Starts a new step."""
        self._sheets, self._weights = {}, {}
        self._measured = itertools.count()

    def let_go(self) -> None:
        """Removes the hooks from the projections' weights."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._followed = [], {}

    # ---- calls come in

    def add(self, frame: Frame, path: str, call: Call) -> None:
        """Measures a call."""
        self.measured(frame, path, call)()

    def measured(self, frame: Frame, path: str, call: Call, product: Product | None = None) -> Callable[..., None]:
        """Measures a call, which counts once the result is called, with further facts. `product`: what ready-made
        scores were computed from, if that is known."""
        before = fed(frame)  # later, more will have run
        call = sequences.placed(frame, call, before)
        rows = taken(call, self.watch, next(self._measured))
        weights = () if rows is None else (call.q.shape[2] / rows.shape[1],) * 2

        def at(times: float) -> Tensor:
            by_torch = self.watch.plain_torch
            changed = call if times == 1.0 else measure.rescaled(call, times, by_torch=by_torch)
            return stand_for(measure.tallied(changed, rows=rows, by_torch=by_torch), weights)

        tallied = at(1.0)
        if product is None:
            product = Product(call.q, call.k, None if call.ready else through(call, call.scale))
        else:
            measure.fill_squares(tallied, product.q, product.k)
        rules = self._rules(product.q, at)
        at_place = frame.place or call_sites.place(self.watched.module)
        enter = partial(self._enter, frame, path, call, product, tallied, rules)
        return partial(enter, before=before, at=at_place, sampled=rows is not None, row_weights=weights)

    def add_pass(self, frame: Frame, path: str, computed: Pass) -> None:
        """A call that levelhead computed."""
        q, k, scoring = _four(computed.q), _four(computed.k), computed.scoring
        heads, mask = self.watched.heads or q.shape[1], scoring.mask
        if path.startswith(BY_HAND) and len(q) == 1 and q.shape[1] == k.shape[1] and q.shape[1] % heads == 0:
            q, k = (x.reshape(-1, heads, *x.shape[2:]) for x in (q, k))  # they lay in the batch
            if mask is not None and mask.dim() > 2:
                mask = mask.reshape(-1, heads, *mask.shape[-2:]) if mask.shape[-3] > 1 else mask
            scoring = scoring._replace(mask=mask, scale=scoring.scale[:heads])
        call = sequences.placed(frame, Call(q, k, scoring), fed(frame))
        tallied = measure.from_pass(computed.sums, computed.counts, computed.sinks, call)
        rules = self._rules(q, lambda times: measure.tallied(measure.rescaled(call, times)))
        self._enter(frame, path, call, Product(q, k, scoring.scale), tallied, rules, fused=True)

    def add_observed(self, frame: Frame, observed: Observed) -> None:
        """A call of `levelhead.attention`, or this rank's rows of one of `levelhead.distributed.attention`."""
        q, k, options, shard = _four(observed.q), _four(observed.k), observed.options, observed.shard
        rule = scaling.resolve(options.get("scale"), heads=q.shape[1], d_k=q.shape[3])
        is_number = not (rule.cosine or rule.log_n)  # else there are no variations of it
        own: dict[str, Any] = {name: options[name] for name in MENTIONED if options.get(name) is not None}
        call = Call(q, k, Scoring(torch.from_numpy(rule.factor), cosine=rule.cosine, log_n=rule.log_n, **own))

        if shard is None and observed.q.dim() <= 4:
            given: Any = {name: x for name, x in options.items() if name in NAMES}
            call = replace(call, scoring=scoring_of(observed.q.detach(), observed.k.detach(), None, None, given)[0])
            call = sequences.placed(frame, call, fed(frame))

        def tallied(observation: Observation) -> Tensor:
            state, positions = observation.state, None if shard is None else torch.from_numpy(shard.positions)
            if shard is None and observed.q.dim() <= 4 and observation is observed.observation:
                return measure.from_pass(state.sums, state.counts, observation.sinks, call)
            whole = measure.from_core(state.sums, state.counts, observation.sinks, call, positions, observation.exists)
            # Where every rank has all rows, the first one counts them.
            elsewhere = shard is not None and shard.plan == "decode" and shard.wire.rank != 0
            return _keys_alone(whole) if elsewhere else whole

        rules = self._rules(q, lambda times: tallied(observed.again(rule.factor * times))) if is_number else {}
        whole = {} if shard is None else {"queries": shard.queries.n, "keys": shard.keys.n}  # of the whole sequence
        product = Product(q, k, call.scale if is_number else None)
        self._enter(frame, observed.path, call, product, tallied(observed.observation), rules, fused=True, **whole)

    def _enter(
        self,
        frame: Frame,
        path: str,
        call: Call,
        product: Product,
        tallied: Tensor,
        rules: _Rules,
        *,
        before: Sequence[Ran] | None = None,
        at: Place | None = None,
        **known: Any,
    ) -> None:
        """Adds a measured call to its sheet; `before`: what ran before it, `at`: its place; None: ask now; `known`:
        further facts."""
        watched, (q, k, scale) = self.watched, product
        at = call_sites.place(watched.module) if at is None else at
        with self.watch.lock:
            key = len(tallied), watched.sites.number(frame.sites, len(tallied), at)
        call = replace(call, place=key[1])
        for listener in self.watch.listeners:
            listener(watched, call, tallied, q, k)
        facts: dict[str, Any] = {
            "kind": watched.kind,
            "how": path,
            "d_k": q.shape[3],
            "kv_heads": frame.kv_heads or k.shape[1],
            "queries": call.q.shape[2],
            "keys": call.k.shape[2],
            "dtype": str(q.dtype).removeprefix("torch."),
            "scale": None,
        }
        frame.kv_heads = 0  # that call's
        followed = not call.ready or q is not call.q
        facts["scale_reading"] = NOTHING_RAN if followed else NOT_FOLLOWED
        facts |= mentioned(call.scoring, ready=call.ready) | known
        sheet = _Sheet(tallied, rules, Facts(**facts), scale)
        ran = fed(frame) if before is None else before
        noted = None
        if followed and not effective_scale.is_by_definition(watched.module):
            noted = scale_reader.note(ran, q, k, scale, effective_scale.parts_named(watched.module))
            noted = None if noted is None else noted._replace(by_function=call.score_mod is not None)
        with self.watch.lock:
            for gradients in frame.following:
                gradients.key = key
            frame.following = []
            watched.calls += 1
            watched.single_head = len(tallied) == 1
            watched.attends = True
            watched.paths[path] = None
            old = self._sheets.get(key)
            if old is not None and old.tally.device == tallied.device:
                sheet.tally = tally.merge(old.tally, tallied, torch)
                sheet.facts = sheet.facts.with_rows_of(old.facts)
                both = {rule: tally.merge(old.rules[rule], rules[rule], torch) for rule in rules if rule in old.rules}
                sheet.rules = rules | both
            self._sheets[key] = sheet
            number = self._number_in_pass(frame, key)
            if noted is not None:
                kept, each = self._noted.setdefault(key, {}), (number, path, *q.shape, *k.shape[1:3])
                if each in kept or len(kept) < (_NOTED if number > 1 else _SIZES):
                    kept[each] = noted
                    learns = self._may_learn(key[0])  # copied: a step of the optimiser may come before the reading
                    self._learned[key] = {name: x.detach().clone() for name, x in learns.items()}

    def _may_learn(self, heads: int) -> dict[str, nn.Parameter]:
        if heads not in self._learns:
            around = [one.module for one in self.watched.watch.around(self.watched)]
            self._learns[heads] = learned_scale.candidates(self.watched.module, around, heads)
        return self._learns[heads]

    def _number_in_pass(self, frame: Frame, key: _Key) -> int:
        """How many calls of this key the pass has made so far; 1 where passes are not known."""
        now = pass_number(frame)
        now = -self.watch.passes if now is None else now
        if now != self._pass or not now:
            self._pass, self._calls = now, {}
        number = self._calls[key] = self._calls.get(key, 0) + 1
        self.watched.calls_in_a_pass = max(self.watched.calls_in_a_pass, number)
        return number

    def _rules(self, q: Tensor, at: Callable[[float], Tensor]) -> _Rules:
        """The same heads under every scale rule: what is in force counts as 1/√d_k."""
        if not self.watch.counterfactual:
            return {}
        H, D = q.shape[1], q.shape[3]
        factors = {r: float(scaling.resolve(r, heads=H, d_k=D).factor[0]) for r in RULES}
        return {rule: at(factor * math.sqrt(max(D, 1))) for rule, factor in factors.items()}

    # ---- gradients

    def follow_gradients(self, frame: Frame, inputs: GradientInputs) -> None:
        """Counts dL/dq, dL/dk and dL/dv of this call when they come, and those of the weights."""
        q, k, v, parts, views = inputs
        self._follow_weights(frame)
        shown = views[0](q) if views else q
        heads = shown.shape[-3] if shown.dim() > 3 else self.watched.heads or 1
        call = _Gradients((heads, 1))
        frame.following = [call]
        each = zip(("dq", "dk", "dv"), (q, k, v), (parts[0], parts[1], parts[1]), (*views, *(None,) * 3), strict=False)
        for name, x, shards, view in each:
            if x is not None and x.requires_grad:
                count = partial(self._count, name, call, shards, view)
                x.register_hook(partial(_quietly, count))  # type: ignore[no-untyped-call]

    def _count(
        self, name: str, call: _Gradients, shards: int, view: Callable[[Tensor], Tensor] | None, gradient: Tensor
    ) -> None:
        """A tensor hook: counts a gradient of q, k or v, and does not change it. A shard counts as if the other ranks'
        gradients were equal: each rank counts a whole pass, and the mean over ranks is right."""
        heads = call.key[0]
        g = gradient.detach() if view is None else view(gradient.detach())
        g = g if g.dim() > 3 else g.reshape(g.shape[:-2].numel() // heads, heads, *g.shape[-2:])
        g = g.to(torch.float64 if g.dtype is torch.float64 else torch.float32)
        each = g.square().sum([d for d in range(g.dim()) if d != g.dim() - 3])
        each = each.repeat_interleave(heads // each.shape[0]) * shards
        with self.watch.lock:
            sheet = self._sheets.get(call.key)
            if sheet is None:  # of a step that is over
                return
            new = sheet.tally.clone()  # what was made in inference mode cannot be changed
            new[:, tally.INDEX[f"{name}_squares"]] += each.to(new)
            new[:, tally.INDEX["gradients"]] += name == "dq"
            sheet.tally = new

    def _follow_weights(self, frame: Frame) -> None:
        for child in frame.ran:
            role, weight = effective_scale.role(child.name), effective_scale.held_weight(child.module)
            if child.module is None or role is None or role in self._followed:
                continue
            if parametrize.is_parametrized(child.module, "weight") if weight is None else not weight.is_leaf:
                self.watched.not_observed[_COMPUTED.format(child.name)] = None
                continue
            if weight is None or not weight.requires_grad:
                continue
            self._followed[role] = weight

            def keep(parameter: Tensor, role: str = role) -> None:
                with undisturbed():
                    if parameter.grad is not None:
                        self._weights[role] = torch.linalg.vector_norm(parameter.grad.detach())

            self._hooks.append(weight.register_post_accumulate_grad_hook(keep))  # type: ignore[no-untyped-call]

    # ---- a step is read

    def records(self) -> Iterator[Record]:
        """One for each number of heads, and for each place."""
        several = len({heads for heads, _ in self._sheets}) > 1
        for (heads, place), sheet in list(self._sheets.items()):
            name = self.watched.name + (f" ({heads} heads)" if several else "")
            name += f" (call {place})" if place > 1 else ""
            rules = {rule: _numbers(x) for rule, x in sheet.rules.items()}
            weights = {role: float(x) for role, x in self._weights.items()}
            yield Record(name, self._facts((heads, place), sheet), _numbers(sheet.tally), rules, weights)

    def _facts(self, key: _Key, sheet: _Sheet) -> Facts:
        reading = self._read(key) or Reading(None, sheet.facts.scale_reading)
        module, scale, d_k = self.watched.module, _one_number(sheet.scale), sheet.facts.d_k
        if effective_scale.is_by_definition(module):
            by_hand = sheet.facts.how == WEIGHTS or scale is None  # scaled before it was observed
            scale, d_k = scaling.usual(module.head_dim) if by_hand else scale, module.head_dim
            reading = Reading(scale, effective_scale.BY_DEFINITION, module.embed_dim)
        right = configuration.right_scale(self.watched, d_k)
        present = tuple(effective_scale.qk_norms(module))
        ran = self.watched.ever_ran  # empty for a compiled module: what ran inside it is not known
        return replace(
            sheet.facts,
            d_k=d_k,
            scale=scale,
            effective_scale=reading.scale,
            scale_reading=reading.how,
            model_width=reading.width,
            effective_scales=reading.each,
            head_parts=reading.parts,
            scale_call=reading.call,
            learned_scale=reading.learned,
            architecture=configuration.architecture(self.watched),
            configured_scale=right.scale,
            configured_by=right.by,
            norms_present=present,
            norms_idle=tuple(n for n in present if ran and n not in ran),
        )

    def _read(self, key: _Key) -> Reading | None:
        """Of several different calls, the one whose scale is furthest from the right one."""
        noted = self._noted.pop(key, {})
        if noted:
            fresh = [(each[0], self._reader.read(one, each[0])) for each, one in noted.items()]
            reading = self._furthest(key, fresh)
            values, d_k = self._learned.get(key), self._sheets[key].facts.d_k
            if values and reading.scale is not None:
                scales = reading.each or (reading.scale,) * key[0]
                reading = reading._replace(learned=learned_scale.name_of(values, scales, d_k))
            last = self._readings.get(key)
            if last is None or reading.scale is not None or last.scale is None:
                self._readings[key] = reading
        return self._readings.get(key)

    def _furthest(self, key: _Key, fresh: list[tuple[int, Reading]]) -> Reading:
        """Of readings with their calls' numbers in the pass; a call that is not read beside one that is, is named."""
        right = self._right_scale(key)
        read = [(number, one) for number, one in fresh if one.scale is not None]
        if not read:
            return fresh[-1][1]
        known = {number for number, _ in read}
        for number, one in fresh:
            if number not in known and one.how != NORMALISED:
                self.watched.not_observed[f"the scale of call {number} of a pass is not known: {one.how}"] = None
        scales = [one.scale for _, one in read]
        far = [abs(math.log(scale / right)) for scale in scales if scale is not None]
        number, reading = read[far.index(max(far))]
        differ = max(far) - min(far) > ALIKE and len(known) > 1
        return reading._replace(call=number) if differ else reading

    def _right_scale(self, key: _Key) -> float:
        """To compare the scales of calls with."""
        (heads, _), d_k = key, max(self._sheets[key].facts.d_k, 1)
        wanted = self.watch.expected_scale
        if isinstance(wanted, str):
            return float(scaling.resolve(wanted, heads=heads, d_k=d_k).factor[0])
        configured = configuration.right_scale(self.watched, d_k).scale
        return wanted or configured or 1.0 / math.sqrt(d_k)


@dataclass
class _Gradients:
    """Those of one call, which belong to the sheet with this key."""

    key: _Key


def _four(x: Tensor) -> Tensor:
    """(B, heads, tokens, width), whatever leads."""
    x = x.detach()
    if x.dim() < 4:
        return x.reshape(*(1,) * (4 - x.dim()), *x.shape)
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _quietly(count: Callable[[Tensor], None], gradient: Tensor) -> None:
    with undisturbed():
        count(gradient)


def _keys_alone(whole: Tensor) -> Tensor:
    """The tally of a rank whose rows another rank counts: that of its keys, and nothing else."""
    kept = torch.from_numpy(tally.nothing(len(whole))).to(whole)
    for name in ("k_squares", "k_count"):
        kept[:, tally.INDEX[name]] = whole[:, tally.INDEX[name]]
    return kept


def _one_number(scale: float | Tensor | None) -> float | None:
    """Waits for the device: for when a step is read."""
    if not isinstance(scale, Tensor):
        return None if scale is None else float(scale)
    numbers = set(scale.detach().flatten().tolist())
    return float(numbers.pop()) if len(numbers) == 1 and not any(map(math.isnan, numbers)) else None


def _numbers(x: Tensor) -> Any:
    return x.detach().to("cpu", torch.float64).numpy()

"""What one module has done in one step: tallies of its heads, and the facts of its calls.

Everything stays on the tensors' device until the step is read; only then is waited for it. A
module that calls attention with different numbers of heads has a record for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from levelhead.attention import observe
from levelhead.call import scaling
from levelhead.distributed.attention import look
from levelhead.observation import Observation
from levelhead.runs import tally
from levelhead.runs.record import Facts, Record
from levelhead.torch.operators import Pass
from levelhead.watching import effective_scale, measure
from levelhead.watching.effective_scale import Ran, Reading
from levelhead.watching.intercept import WEIGHTS
from levelhead.watching.measure import Call
from levelhead.watching.module_stack import Frame, Place

Shape: TypeAlias = tuple[int, int, int, int, int]  # B, kv heads, queries, keys, d_k
RULES = ("none", "1/sqrt(d_k)", "1/d_k", "1/sqrt(d)")


@dataclass
class _Sheet:
    """Calls with one number of heads: their tally, and the facts of the last one."""

    tally: Tensor
    how: str
    shape: Shape
    dtype: str
    scale: float | Tensor | None  # None: not one number
    softcap: float | None
    causal: bool
    masked: bool
    sinks: bool
    fused: bool = False
    sampled: bool = False
    rules: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Shard:
    """Rows that are some of a longer sequence's, on one rank of several."""

    positions: Tensor
    queries: int  # of the whole sequence
    keys: int
    told: bool  # whether this rank tells of them


@dataclass
class _Noted:
    """What the scale in force is read from, when the step is."""

    ran: list[Ran]
    scale: float | Tensor | None
    squares: Tensor  # of q and k at the call, and their counts
    shape: Shape
    heads: int


class Ledger:
    def __init__(self, place: Place, watch: Any) -> None:
        self.place, self.watch = place, watch
        self._sheets: dict[int, _Sheet] = {}
        self._noted: _Noted | None = None
        self._reading: Reading | None = None
        self._followed: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._hooks: list[Any] = []

    def clear(self) -> None:
        """A new step."""
        self._sheets, self._weights = {}, {}

    def let_go(self) -> None:
        """Takes the hooks off the projections' weights."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._followed = [], {}

    # ---- calls come in

    def add(
        self,
        frame: Frame,
        how: str,
        call: Call,
        *,
        operands: tuple[Tensor, Tensor] | None = None,
        scale: float | Tensor | None = None,
    ) -> None:
        """A call whose statistics are still to be made. `operands`: what its ready-made scores
        were the product of, and `scale` what that was multiplied by."""
        rows = self.watch.rows

        def at(times: float) -> Tensor:
            changed = call if times == 1.0 else measure.rescaled(call, times)
            return measure.tallied(changed, sample=rows, by_torch=self.watch.plain_torch)

        found = at(1.0)
        q, k = (call.q, call.k) if operands is None else operands
        if operands is not None:
            measure.fill_squares(found, q, k)
        factor = scale if call.ready else call.scale
        sampled = rows is not None and rows < call.q.shape[2]
        rules = self._rules(q, at)
        self._enter(frame, how, call, found, q, k, factor, rules, sampled=sampled)

    def add_pass(self, frame: Frame, how: str, seen: Pass) -> None:
        """A call that levelhead computed."""
        options = seen.options
        q, k = (_four(x) for x in (seen.q, seen.k))
        call = Call(
            q,
            k,
            options.scale,
            options.mask,
            options.causal,
            softcap=options.softcap,
            left=options.left,
            right=options.right,
            sinks=options.sinks,
        )
        shape = tuple(q.shape[:3])
        sums, counts = (x.reshape(*shape, x.shape[-1]) for x in (seen.sums, seen.counts))
        found = measure.from_core(sums, counts, seen.sinks, call)
        rules = self._rules(q, lambda times: measure.tallied(measure.rescaled(call, times)))
        self._enter(frame, how, call, found, q, k, options.scale, rules, fused=True)

    def add_observation(self, frame: Frame, how: str, seen: Observation, q: Tensor, k: Tensor, options: Any) -> None:
        """A call of `levelhead.attention`."""
        given = (q.detach(), k.detach())

        def again(factor: Any) -> Observation:
            return observe(*given, **(options | {"scale": factor}))

        self._add_seen(frame, how, seen, q, k, options, again)

    def add_shard(self, frame: Frame, seen: Observation, q: Tensor, k: Tensor, options: Any, call: Any) -> None:
        """This rank's rows of a call of `levelhead.distributed.attention`. Where every rank has
        all rows, the first one tells of them."""
        given = (q.detach(), k.detach())
        scoring, how = options

        def again(factor: Any) -> Observation:
            return look(*given, None, scoring | {"scale": factor}, **how)[0]

        positions = torch.from_numpy(call.positions)
        told = call.plan != "decode" or call.wire.rank == 0
        shard = _Shard(positions, call.queries.n, call.keys.n, told)
        name = f"levelhead.distributed, {call.plan}"
        self._add_seen(frame, name, seen, q, k, scoring, again, shard)

    def _add_seen(
        self,
        frame: Frame,
        how: str,
        seen: Observation,
        q: Tensor,
        k: Tensor,
        options: Any,
        again: Callable[[Any], Observation],
        shard: _Shard | None = None,
    ) -> None:
        q, k = _four(q), _four(k)
        H, D = q.shape[1], q.shape[3]
        rule = scaling.resolve(options.get("scale"), heads=H, d_k=D)
        plain = not (rule.cosine or rule.log_n)  # else it is no number, and has no variations
        call = Call(
            q,
            k,
            torch.from_numpy(rule.factor),
            options.get("mask"),
            bool(options.get("causal", False)),
            softcap=options.get("softcap"),
            sinks=options.get("sinks"),
        )

        def tallied(seen: Observation) -> Tensor:
            shape, state = tuple(q.shape[:3]), seen.state
            sums, counts = (x.reshape(*shape, x.shape[-1]) for x in (state.sums, state.counts))
            if shard is None:
                return measure.from_core(sums, counts, seen.sinks, call)
            found = measure.from_core(sums, counts, seen.sinks, call, shard.positions)
            return found if shard.told else _keys_alone(found)

        def at(times: float) -> Tensor:
            with torch.no_grad():
                return tallied(again(rule.factor * times))

        rules = self._rules(q, at) if plain else {}
        factor = call.scale if plain else None
        tokens = None if shard is None else (shard.queries, shard.keys)
        self._enter(frame, how, call, tallied(seen), q, k, factor, rules, fused=True, tokens=tokens)

    def _enter(
        self,
        frame: Frame,
        how: str,
        call: Call,
        found: Tensor,
        q: Tensor,
        k: Tensor,
        scale: float | Tensor | None,
        rules: dict[str, Tensor],
        *,
        fused: bool = False,
        sampled: bool = False,
        tokens: tuple[int, int] | None = None,
    ) -> None:
        place, heads = self.place, found.shape[0]
        for listener in self.watch.listeners:
            listener(place, call, found, q, k)
        kv_heads = frame.kv_heads or k.shape[1]
        queries, keys = tokens or (call.q.shape[2], call.k.shape[2])
        shape = (q.shape[0], kv_heads, queries, keys, q.shape[3])
        sheet = _Sheet(
            found,
            how,
            shape,
            str(q.dtype).removeprefix("torch."),
            scale,
            call.softcap,
            call.causal,
            call.mask is not None and not call.ready,
            call.sinks is not None,
            fused,
            sampled,
            rules,
        )
        squares = torch.stack([measure.squares(x) for x in (q, k)]) if frame.ran else None
        with self.watch.lock:
            place.calls += 1
            place.attends = True
            place.ways[how] = None
            old = self._sheets.get(heads)
            if old is not None and old.tally.device == found.device:
                sheet.tally = measure.folded(old.tally, found)
                sheet.rules = {
                    rule: measure.folded(old.rules[rule], new) if rule in old.rules else new
                    for rule, new in rules.items()
                }
            self._sheets[heads] = sheet
            if squares is not None:
                self._noted = _Noted(list(frame.ran), scale, squares, shape, heads)

    def _rules(self, q: Tensor, at: Callable[[float], Tensor]) -> dict[str, Tensor]:
        """The same heads under every scale rule: what is in force counts as 1/√d_k."""
        if not self.watch.counterfactual:
            return {}
        H, D = q.shape[1], q.shape[3]
        factors = {r: float(scaling.resolve(r, heads=H, d_k=D).factor[0]) for r in RULES}
        return {rule: at(factor * math.sqrt(max(D, 1))) for rule, factor in factors.items()}

    # ---- gradients

    def follow(self, frame: Frame, q: Tensor, k: Tensor, v: Tensor | None, parts: tuple[int, int]) -> None:
        """Counts dL/dq, dL/dk and dL/dv of this call when they come, and those of the weights.

        Args:
            parts: over how many ranks the queries lie, and the keys.
        """
        self._follow_weights(frame)
        heads = q.shape[-3] if q.dim() > 3 else self.place.heads or 1
        for name, x, shards in (("dq", q, parts[0]), ("dk", k, parts[1]), ("dv", v, parts[1])):
            if x is not None and x.requires_grad:
                counted = _Counted(self, name, heads, shards)
                x.register_hook(counted)  # type: ignore[no-untyped-call]

    def count(self, name: str, heads: int, gradient: Tensor, shards: int) -> None:
        """A gradient of q, k or v has come. Of a shard, as if the other ranks' were like it: each
        rank counts a whole pass, and their mean is then the whole."""
        g = gradient.detach()
        g = g if g.dim() > 3 else g.reshape(g.shape[:-2].numel() // heads, heads, *g.shape[-2:])
        g = g.to(torch.float64 if g.dtype is torch.float64 else torch.float32)
        each = g.square().sum([d for d in range(g.dim()) if d != g.dim() - 3])
        each = each.repeat_interleave(heads // each.shape[0]) * shards
        with self.watch.lock:
            sheet = self._sheets.get(heads)
            if sheet is None:  # of a step that is over
                return
            new = sheet.tally.clone()  # what was made in inference mode cannot be changed
            new[:, tally.INDEX[f"{name}_squares"]] += each.to(new)
            new[:, tally.INDEX["gradients"]] += name == "dq"
            sheet.tally = new

    def _follow_weights(self, frame: Frame) -> None:
        for child in frame.ran:
            role, weight = effective_scale.role(child.name), getattr(child.module, "weight", None)
            if role is None or role in self._followed or weight is None or not weight.requires_grad:
                continue
            self._followed[role] = weight

            def keep(parameter: Tensor, role: str = role) -> None:
                if parameter.grad is not None:
                    self._weights[role] = torch.linalg.vector_norm(parameter.grad.detach())

            self._hooks.append(weight.register_post_accumulate_grad_hook(keep))

    # ---- a step is read

    def records(self) -> Iterator[Record]:
        """One for each number of heads."""
        for heads, sheet in list(self._sheets.items()):
            name = self.place.name
            if len(self._sheets) > 1:
                name = f"{name} ({heads} heads)"
            rules = {rule: _numbers(x) for rule, x in sheet.rules.items()}
            weights = {role: float(x) for role, x in self._weights.items()}
            yield Record(name, self._facts(heads, sheet), _numbers(sheet.tally), rules, weights)

    def _facts(self, heads: int, sheet: _Sheet) -> Facts:
        _, kv_heads, queries, keys, d_k = sheet.shape
        found = self._read(heads) or Reading(None, "nothing ran before the call")
        module, scale = self.place.module, _one_number(sheet.scale)
        if isinstance(module, nn.MultiheadAttention):
            by_hand = sheet.how == WEIGHTS or scale is None  # scaled before it was seen
            own = 1 / math.sqrt(module.head_dim) if by_hand else scale
            found, scale = Reading(own, effective_scale.BY_DEFINITION, module.embed_dim), own
            d_k = module.head_dim
        norms = [n for n, child in module.named_children() if effective_scale.is_norm(n, child)]
        present = tuple(n for n in norms if effective_scale.is_qk_norm(n))
        ran = self.place.ever_ran  # nothing is known of what runs inside a compiled module
        idle = tuple(n for n in present if ran and n not in ran)
        return Facts(
            kind=self.place.kind,
            how=sheet.how,
            d_k=d_k,
            kv_heads=kv_heads,
            queries=queries,
            keys=keys,
            dtype=sheet.dtype,
            scale=scale,
            effective_scale=found.scale,
            scale_reading=found.how,
            model_width=found.width,
            softcap=sheet.softcap,
            causal=sheet.causal,
            masked=sheet.masked,
            sinks=sheet.sinks,
            sampled=sheet.sampled,
            fused=sheet.fused,
            architecture=_architecture(module),
            norms_present=present,
            norms_idle=idle,
        )

    def _read(self, heads: int) -> Reading | None:
        noted = self._noted
        if noted is not None and noted.heads == heads:
            B, kv_heads, _queries, keys, d_k = noted.shape
            q, k = (math.sqrt(float(x)) for x in noted.squares)
            found = effective_scale.read(
                noted.ran,
                scale=_one_number(noted.scale),
                heads=heads,
                kv_heads=kv_heads,
                d_k=d_k,
                q_rms=q,
                k_rms=k,
                tokens=B * keys,
            )
            if self._reading is None or found.scale is not None or self._reading.scale is None:
                self._reading = found
            self._noted = None
        return self._reading


class _Counted:
    """A hook of a tensor: counts its gradient, and changes nothing."""

    def __init__(self, ledger: Ledger, name: str, heads: int, shards: int) -> None:
        self._ledger, self._name, self._heads, self._shards = ledger, name, heads, shards

    def __call__(self, gradient: Tensor) -> None:
        self._ledger.count(self._name, self._heads, gradient, self._shards)


def _four(x: Tensor) -> Tensor:
    """(B, heads, tokens, width), whatever leads."""
    x = x.detach()
    if x.dim() < 4:
        return x.reshape(*(1,) * (4 - x.dim()), *x.shape)
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _keys_alone(found: Tensor) -> Tensor:
    """The tally of a rank whose rows another rank tells of: of its keys, and nothing else."""
    kept = torch.from_numpy(tally.nothing(len(found))).to(found)
    for name in ("k_squares", "k_count"):
        kept[:, tally.INDEX[name]] = found[:, tally.INDEX[name]]
    return kept


def _one_number(scale: float | Tensor | None) -> float | None:
    """Waits for the device: for when a step is read."""
    if not isinstance(scale, Tensor):
        return None if scale is None else float(scale)
    first, *others = scale.detach().flatten().tolist()
    return float(first) if all(other == first for other in others) else None


def _numbers(x: Tensor) -> Any:
    return x.detach().to("cpu", torch.float64).numpy()


def _architecture(module: nn.Module) -> str | None:
    """Hugging Face's word for the architecture, from the module's own configuration or class."""
    name = getattr(getattr(module, "config", None), "model_type", None)
    if isinstance(name, str):
        return name
    parts = type(module).__module__.split(".")
    return parts[2] if parts[:2] == ["transformers", "models"] and len(parts) > 2 else None

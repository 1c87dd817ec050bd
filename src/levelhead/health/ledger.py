"""What one module has done in one step: tallies of its heads, and the facts of its calls.

Everything stays on the tensors' device until the step is read; only then is waited for it. A
module that calls attention with different numbers of heads has a record for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from levelhead import scaling
from levelhead.health import measure, reading, tally
from levelhead.health.intercept import WEIGHTS
from levelhead.health.measure import Call
from levelhead.health.places import Place
from levelhead.health.reading import Ran, Reading
from levelhead.health.record import Facts, Record
from levelhead.observation import Observation
from levelhead.torch.ops import Pass

RULES = ("none", "1/sqrt(d_k)", "1/d_k", "1/sqrt(d)")


@dataclass
class _Sheet:
    """Calls with one number of heads."""

    tally: Tensor
    call: Call  # the last one, for its facts; its arrays are let go
    how: str
    shape: tuple[int, int, int, int, int]  # B, kv heads, queries, keys, d_k
    dtype: str
    fused: bool = False
    sampled: bool = False
    rules: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class _Noted:
    """What the scale in force is read from, when the step is."""

    ran: list[Ran]
    scale: float | None
    squares: Tensor  # of q and k at the call, and their counts
    shape: tuple[int, int, int, int, int]
    heads: int


class Ledger:
    def __init__(self, place: Place, watch: Any) -> None:
        self.place, self.watch = place, watch
        self._sheets: dict[int, _Sheet] = {}
        self._noted: _Noted | None = None
        self._reading: Reading | None = None
        self._followed: dict[str, nn.Module] = {}
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
        how: str,
        call: Call,
        *,
        operands: tuple[Tensor, Tensor] | None = None,
        scale: float | None = None,
    ) -> None:
        """A call whose statistics are still to be made. `operands`: what its ready-made scores
        were the product of, and `scale` what that was multiplied by."""
        found = measure.tallied(call, sample=self.watch.rows, by_torch=self.watch.plain_torch)
        sampled = self.watch.rows is not None and self.watch.rows < call.q.shape[2]
        if operands is None:
            self._enter(how, call, found, call.q, call.k, sampled=sampled)
        else:
            measure.fill_squares(found, *operands)
            self._enter(how, call, found, *operands, sampled=sampled, scale=scale)

    def add_pass(self, how: str, seen: Pass) -> None:
        """A call that levelhead computed."""
        options = seen.options
        q, k = (_four(x) for x in (seen.q, seen.k))
        call = Call(
            q, k, options.scale, options.mask, options.causal, softcap=options.softcap,
            left=options.left, right=options.right, sinks=options.sinks,
        )  # fmt: skip
        shape = tuple(q.shape[:3])
        sums, counts = (x.reshape(*shape, x.shape[-1]) for x in (seen.sums, seen.counts))
        found = measure.from_core(sums, counts, seen.sinks, call)
        self._enter(how, call, found, q, k, fused=True)

    def add_observation(
        self, how: str, seen: Observation, q: Tensor, k: Tensor, options: dict[str, Any]
    ) -> None:
        """A call of `levelhead.attention`."""
        q, k = _four(q), _four(k)
        H, D = q.shape[1], q.shape[3]
        rule = scaling.resolve(options.get("scale"), heads=H, d_k=D)
        scale = torch.from_numpy(rule.factor)
        plain = not (rule.cosine or rule.log_n)
        call = Call(
            q, k, scale, options.get("mask"), bool(options.get("causal", False)),
            softcap=options.get("softcap"), sinks=options.get("sinks"),
        )  # fmt: skip
        state, shape = seen.state, tuple(q.shape[:3])
        sums, counts = (x.reshape(*shape, x.shape[-1]) for x in (state.sums, state.counts))
        found = measure.from_core(sums, counts, seen.sinks, call)
        self._enter(how, call, found, q, k, fused=True, known=plain)

    def _enter(
        self, how: str, call: Call, found: Tensor, q: Tensor, k: Tensor, *, fused: bool = False,
        sampled: bool = False, known: bool = True, scale: float | None = None,
    ) -> None:  # fmt: skip
        place, heads = self.place, found.shape[0]
        for listener in self.watch.listeners:
            listener(place, call, found, q, k)
        place.calls += 1
        place.attends = True
        place.ways[how] = None
        old = self._sheets.get(heads)
        if old is not None and old.tally.device == found.device:
            found = measure.folded(old.tally, found)
        shape = (q.shape[0], k.shape[1], call.q.shape[2], call.k.shape[2], q.shape[3])
        dtype = str(q.dtype).removeprefix("torch.")
        sheet = _Sheet(found, call, how, shape, dtype, fused, sampled)
        sheet.rules = {} if old is None else old.rules
        if self.watch.counterfactual:
            self._add_rules(sheet, call)
        empty = q[:0, :0]
        number = scale if q is not call.q else _one_number(call.scale) if known else None
        sheet.call = Call(
            empty, empty, math.nan if number is None else number, call.mask, call.causal,
            softcap=call.softcap, sinks=call.sinks, left=call.left, right=call.right,
        )  # fmt: skip
        self._sheets[heads] = sheet
        self._note(q, k, number, shape, heads)

    def _add_rules(self, sheet: _Sheet, call: Call) -> None:
        """The same heads under every scale rule: what is in force counts as 1/√d_k."""
        H, D = call.q.shape[1], call.q.shape[3]
        for rule in RULES:
            times = float(scaling.resolve(rule, heads=H, d_k=D).factor[0]) * math.sqrt(max(D, 1))
            scaled = measure.rescaled(call, times)
            new = measure.tallied(scaled, sample=self.watch.rows, by_torch=self.watch.plain_torch)
            old = sheet.rules.get(rule)
            sheet.rules[rule] = new if old is None else measure.folded(old, new)

    def _note(
        self, q: Tensor, k: Tensor, scale: float | None, shape: tuple[int, int, int, int, int],
        heads: int,
    ) -> None:  # fmt: skip
        if not self.place.ran:
            return
        ran = list(self.place.ran)
        for child in ran:
            child.square()
        squares = torch.stack([measure.squares(x) for x in (q, k)])
        self._noted = _Noted(ran, scale, squares, shape, heads)

    # ---- gradients

    def follow(self, q: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Counts dL/dq, dL/dk and dL/dv of this call when they come, and those of the weights."""
        self._follow_weights()
        heads = q.shape[-3] if q.dim() > 3 else self.place.heads or 1
        for name, x in (("dq", q), ("dk", k), ("dv", v)):
            if x is not None and x.requires_grad:
                x.register_hook(_Counted(self, name, heads))

    def count(self, name: str, heads: int, gradient: Tensor) -> None:
        """A gradient of q, k or v has come."""
        sheet = self._sheets.get(heads)
        if sheet is None:
            return
        g = gradient.detach()
        g = g if g.dim() > 3 else g.reshape(-1, heads, *g.shape[-2:])
        each = g.to(sheet.tally.dtype).square().sum([d for d in range(g.dim()) if d != g.dim() - 3])
        each = each.repeat_interleave(heads // each.shape[0])
        sheet.tally[:, tally.INDEX[f"{name}_squares"]] += each
        if name == "dq":
            sheet.tally[:, tally.INDEX["gradients"]] += 1

    def _follow_weights(self) -> None:
        for child in self.place.ran:
            role, weight = reading.role(child.name), getattr(child.module, "weight", None)
            if role is None or role in self._followed or weight is None or not weight.requires_grad:
                continue
            self._followed[role] = child.module

            def keep(parameter: Tensor, role: str = role) -> None:
                if parameter.grad is not None:
                    self._weights[role] = torch.linalg.vector_norm(parameter.grad.detach())

            self._hooks.append(weight.register_post_accumulate_grad_hook(keep))

    # ---- a step is read

    def records(self) -> Iterator[Record]:
        """One for each number of heads."""
        for heads, sheet in self._sheets.items():
            name = self.place.name
            if len(self._sheets) > 1:
                name = f"{name} ({heads} heads)"
            rules = {rule: _numbers(x) for rule, x in sheet.rules.items()}
            weights = {role: float(x) for role, x in self._weights.items()}
            yield Record(name, self._facts(heads, sheet), _numbers(sheet.tally), rules, weights)

    def _facts(self, heads: int, sheet: _Sheet) -> Facts:
        _, kv_heads, queries, keys, d_k = sheet.shape
        found = self._read(heads) or Reading(None, "nothing ran before the call")
        call, module = sheet.call, self.place.module
        scale = float(call.scale)
        if isinstance(module, nn.MultiheadAttention):
            by_hand = sheet.how == WEIGHTS or math.isnan(scale)  # scaled before it was seen
            own = 1 / math.sqrt(module.head_dim) if by_hand else scale
            found, scale = Reading(own, reading.BY_DEFINITION, module.embed_dim), own
            d_k = module.head_dim
        norms = [n for n, child in module.named_children() if reading.is_norm(n, child)]
        present = tuple(n for n in norms if reading.is_qk_norm(n))
        idle = tuple(n for n in present if n not in self.place.ever_ran)
        return Facts(
            kind=self.place.kind, how=sheet.how, d_k=d_k, kv_heads=kv_heads, queries=queries,
            keys=keys, dtype=sheet.dtype, scale=None if math.isnan(scale) else scale,
            effective_scale=found.scale, scale_reading=found.how, model_width=found.width,
            softcap=call.softcap, causal=call.causal, masked=call.mask is not None,
            sinks=call.sinks is not None, sampled=sheet.sampled, fused=sheet.fused,
            architecture=_architecture(module), norms_present=present, norms_idle=idle,
        )  # fmt: skip

    def _read(self, heads: int) -> Reading | None:
        noted = self._noted
        if noted is not None and noted.heads == heads:
            B, kv_heads, _queries, keys, d_k = noted.shape
            q, k = (math.sqrt(float(x)) for x in noted.squares)
            found = reading.read(
                noted.ran, scale=noted.scale, heads=heads, kv_heads=kv_heads, d_k=d_k,
                q_rms=q, k_rms=k, tokens=B * keys,
            )  # fmt: skip
            if self._reading is None or found.scale is not None or self._reading.scale is None:
                self._reading = found
            self._noted = None
        return self._reading


class _Counted:
    """A hook of a tensor: counts its gradient, and changes nothing."""

    def __init__(self, ledger: Ledger, name: str, heads: int) -> None:
        self._ledger, self._name, self._heads = ledger, name, heads

    def __call__(self, gradient: Tensor) -> None:
        self._ledger.count(self._name, self._heads, gradient)


def _four(x: Tensor) -> Tensor:
    """(B, heads, tokens, width), whatever leads."""
    x = x.detach()
    if x.dim() < 4:
        return x.reshape(*(1,) * (4 - x.dim()), *x.shape)
    return x.reshape(-1, *x.shape[-3:])


def _one_number(scale: float | Tensor) -> float | None:
    if not isinstance(scale, Tensor):
        return float(scale)
    same = bool((scale == scale.flatten()[0]).all())
    return float(scale.flatten()[0]) if same else None


def _numbers(x: Tensor) -> Any:
    return x.detach().to("cpu", torch.float64).numpy()


def _architecture(module: nn.Module) -> str | None:
    """Hugging Face's word for the architecture, from the module's own configuration or class."""
    name = getattr(getattr(module, "config", None), "model_type", None)
    if isinstance(name, str):
        return name
    parts = type(module).__module__.split(".")
    return parts[2] if parts[:2] == ["transformers", "models"] and len(parts) > 2 else None

"""Remedies of the call itself: `softcap` bounds the logits, `rescale` changes what multiplies them.

Weights stay as they are. The call is changed where the model makes it: torch's function, torch's own module, or
transformers' interface; levelhead's module gets other options. A softmax written by hand is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from levelhead.call import scaling
from levelhead.errors import bad_value
from levelhead.remedies.remedy import Remedy, Sight, Verified, checked, implementation, listed, no_attention, positive
from levelhead.runs import tally
from levelhead.torch.huggingface.survey import attending_modules, eager_functions, understood
from levelhead.torch.masks import hides
from levelhead.torch.multihead_forward import FAST_PATH_OFF
from levelhead.torch.nn import MultiHeadAttention
from levelhead.watching import amend
from levelhead.watching.intercept import INTERCEPTION
from levelhead.watching.measure import Call, tallied
from levelhead.watching.watchable import clean, unwrapped
from levelhead.watching.wrapped import Reach

_CLOSE = 1e-5  # relative, of a scale or a bound; half precision is measured as it is


class _OfTheCall(Remedy):
    """Amends the calls of every attention module, under one name."""

    _field = ""  # of an amendment
    _option = ""  # of levelhead's module
    _advice = "The softmax is not computed by a function that the remedy reaches"

    def __init__(self, model: nn.Module, value: Any) -> None:
        super().__init__(model, _reachable(checked(model)))
        amended = {name: getattr(amend.of(module), self._field, None) for name, module in self.modules.items()}
        if taken := [name for name, present in amended.items() if present is not None]:
            wanted = f"a model without a {self._field} of levelhead's"
            raise bad_value("model", wanted, f"one in {', '.join(taken)}", "undo() that one first")
        self._options: list[tuple[MultiHeadAttention, Any]] = []
        INTERCEPTION.hold()
        FAST_PATH_OFF.hold()  # it passes by what a remedy changes
        self._reach = Reach(unwrapped(model), (), INTERCEPTION.wrapped)  # functions that the model holds, too
        for module in self.modules.values():
            if isinstance(module, MultiHeadAttention):
                self._options.append((module, module.options[self._option]))
                module.options[self._option] = value
            else:
                amend.amend(module, **{self._field: value})
            amend.keep_in_mind(module, self._field, self._name)

    def verify(self, batch: Any) -> Verified:
        """As `Remedy.verify`; functions that the model holds since then are reached first."""
        before, self._reach = self._reach, Reach(unwrapped(self.model), (), INTERCEPTION.wrapped)
        before.undo()
        return replace(super().verify(batch), note=amend.NOT_SAVED)

    def _undo(self) -> None:
        for own, before in self._options:
            own.options[self._option] = before
        for module in self.modules.values():
            amend.restore(module, self._field)
            amend.keep_in_mind(module, self._field, None)
        self._reach.undo()
        INTERCEPTION.release()
        FAST_PATH_OFF.release()


class softcap(_OfTheCall):  # noqa: N801  a verb, as `patch` is
    """cap · tanh(logit / cap) in every head, until `undo()`: no logit exceeds the cap.

    On the logits as scaled, before masks and biases; computed by levelhead, with its gradients.

    Args:
        model: any model that calls a function for its attention.
        cap: the bound; Gemma 2 ships with 50.

    Example:
        >>> import torch, levelhead as lh
        >>> model = lh.torch.MultiHeadAttention(16, 2)
        >>> with lh.remedies.softcap(model, 30.0) as remedy:
        ...     print(remedy.verify(torch.randn(1, 5, 16)).remedy)
        softcap 30
    """

    _field = _option = "softcap"

    def __init__(self, model: nn.Module, cap: float) -> None:
        self.cap = positive("cap", cap, "Gemma 2 ships with 50, Grok-1 with 30")
        self._name = f"softcap {self.cap:g}"
        super().__init__(model, self.cap)

    def _wrong(self, name: str, sight: Sight) -> str | None:
        assert sight.record is not None
        cap = sight.record.facts.softcap
        if cap is None or abs(cap - self.cap) > _CLOSE * self.cap:
            return f"the softcap of its call is {cap}"
        largest, bound = _largest(sight), self.cap + _largest_bias(sight)
        if not largest <= bound * (1 + _CLOSE):
            return f"a logit of {largest:.6g} in magnitude exceeds {bound:.6g}"
        return None

    def _evidence(self, name: str, sight: Sight) -> str:
        return f"largest |logit| {_largest(sight):.4g}"


class rescale(_OfTheCall):  # noqa: N801  a verb, as `patch` is
    """Another scale for every head, in place of the one that the call passes, until `undo()`.

    Args:
        model: any model that calls a function for its attention.
        rule: as `scale` of `levelhead.attention`: "1/sqrt(d_k)", "1/d_k", "none", "cosine", "log-n", a number, one per
            head, or a rule with its parameters.

    What a model multiplies its queries with before the call stays: `watch` reads the effective scale of both together.

    Example:
        >>> import torch, levelhead as lh
        >>> model = lh.torch.MultiHeadAttention(16, 2, scale="none")
        >>> with lh.remedies.rescale(model, "1/sqrt(d_k)") as remedy:
        ...     print(remedy.verify(torch.randn(1, 5, 16)))
        rescale 1/sqrt(d_k): in force in 1 modules
          (the model): scale 0.353553
          a state_dict does not have it, apply it again after loading
    """

    _field, _option = "rule", "scale"

    def __init__(self, model: nn.Module, rule: Any) -> None:
        if rule is None:
            rule = "1/sqrt(d_k)"
        heads = np.size(rule) if not isinstance(rule, (str, scaling.Rule)) else 1
        if not (isinstance(rule, scaling.Rule) and isinstance(rule.factor, tuple)):
            scaling.resolve(rule, heads=heads, d_k=1)  # refuses what is no rule
        self.rule = rule
        self._name = f"rescale {rule.name if isinstance(rule, scaling.Rule) else rule}"
        super().__init__(model, rule)

    def _wrong(self, name: str, sight: Sight) -> str | None:
        assert sight.record is not None
        for call, heads, q, k in sight.calls:
            wanted = scaling.resolve(self.rule, heads=q.shape[1], d_k=q.shape[3])
            if len(set(wanted.factor.tolist())) == 1 and not (wanted.cosine or wanted.log_n):
                scale, factor = sight.record.facts.scale, float(wanted.factor[0])
                if scale is None or abs(scale - factor) > _CLOSE * abs(factor):
                    return f"the scale of its call is {scale}, not {factor:.6g}"
                continue
            right, measured = _maxima(call, wanted, q, k), heads[:, tally.LARGEST].double().cpu().numpy()
            if not np.allclose(measured, right, rtol=1e-3, atol=1e-5):
                return f"its largest logits are {measured}, by the rule {right}"
        return None

    def _evidence(self, name: str, sight: Sight) -> str:
        q = sight.calls[-1][2]
        factor = scaling.resolve(self.rule, heads=q.shape[1], d_k=q.shape[3]).factor
        least, most = float(factor.min()), float(factor.max())
        return f"scale {least:.6g}" if least == most else f"scale {least:.6g} to {most:.6g}"


# ---- what reached the softmax


def _largest(sight: Sight) -> float:
    """The largest logit in magnitude."""
    assert sight.record is not None
    heads = sight.record.heads
    return float(np.max(np.abs([heads.max_logit, heads.min_logit])))


def _largest_bias(sight: Sight) -> float:
    """What masks add at most, to what is shown."""

    def of(mask: Tensor | None) -> float:
        if mask is None or not mask.dtype.is_floating_point:
            return 0.0
        shown = mask[~hides(mask)]
        return float(shown.abs().max()) if shown.numel() else 0.0

    return max(of(call.scoring.mask) for call, *_ in sight.calls)


def _maxima(call: Call, scale: scaling.Scale, q: Tensor, k: Tensor) -> Any:
    """Every head's largest logit, from its q and k, by the rule."""
    changed: dict[str, Any] = {"scale": torch.from_numpy(scale.factor), "cosine": scale.cosine, "log_n": scale.log_n}
    return tallied(Call(q, k, call.scoring._replace(**changed)))[:, tally.LARGEST].double().cpu().numpy()


# ---- which modules


def _reachable(model: nn.Module) -> dict[str, nn.Module]:
    """The attention modules whose calls can be amended, or an error that names the others."""
    inner = unwrapped(model)
    own = {clean(name): module for name, module in inner.named_modules() if isinstance(module, MultiHeadAttention)}
    modules: dict[str, nn.Module] = {**own}
    wrong: dict[str, str] = {}
    for one in attending_modules(inner, held=True):
        if isinstance(one.module, MultiHeadAttention):
            continue
        name = clean(one.name)
        modules[name] = one.module
        if isinstance(one.module, nn.MultiheadAttention):
            continue
        kind = type(one.module).__name__
        if not (one.sdpa or one.interface):
            wrong[name] = f"{kind} forms its softmax by hand, where no wrapper can reach it"
        strange = [f.__name__ for f in eager_functions(one.module) if not understood(f)]
        if one.interface and implementation(one.module) == "eager" and strange:
            wrong[name] = f"{kind} computes something else in {', '.join(strange)}"
    if not modules:
        raise no_attention(model)
    if wrong:
        given = f"{len(wrong)} of {len(modules)} that do not:\n{listed(wrong)}\n"
        wanted = "attention modules that ask a function for their attention"
        raise bad_value("model", wanted, given, "Nothing was changed")
    return modules

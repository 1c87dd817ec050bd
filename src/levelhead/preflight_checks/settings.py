"""What a model's configuration or a module's attributes set, against its calls: window, softcap, YaRN's factor.

A setting counts where it is certain: an attribute of the attention module itself, or the configuration of a Hugging
Face model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from levelhead.diagnosis.findings import Finding
from levelhead.errors import LevelheadError
from levelhead.preflight_checks import windows
from levelhead.preflight_checks.calls import SeenCall, seen_calls
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.projections import home
from levelhead.preflight_checks.result import finding
from levelhead.runs.record import Run
from levelhead.watching import effective_scale

_WINDOWS = ("sliding_window", "window", "window_size", "sliding_window_size", "local_window", "attention_window")
_CAPS = (
    "attn_logit_softcapping",
    "softcap",
    "attn_softcap",
    "logit_softcap",
    "logit_cap",
    "logits_soft_cap",
    "attn_logit_softcap",
    "soft_cap",
)
_YARN = ("yarn_factor", "yarn_scale", "yarn_scaling_factor")
_TIMES_CAP = 8.0  # q is enlarged until logits would be so far above the cap


def check(flight: Flight, run: Run, calls: Sequence[SeenCall]) -> None:
    """Every setting of every attention module that was seen."""
    name, changed = "configuration", "window, softcap and YaRN's factor against the calls"
    modules = dict(flight.model.named_modules())
    own = {call.module: modules[home(call.module, modules)] for call in calls if call.module in modules}
    caps = {module: cap for module, m in _capped(own).items() if (cap := _number(m, _CAPS)) is not None}
    set_windows = {module: w for module, m in own.items() if (w := _number(m, _WINDOWS)) is not None}
    exact = {module for module in set_windows if _exact(own[module])}
    found = [*windows.check(flight, set_windows, exact, calls), *_caps(flight, caps, calls), *_yarn(own, run)]
    set_ = [f"window {w:g}" for w in set(set_windows.values())]
    set_ += [f"softcap {c:g}" for c in set(caps.values())]
    if found:
        return flight.failed(name, changed, ", ".join(sorted({f.kind for f in found})), *found)
    if not set_ and not any(_yarn_factor(m) for m in own.values()):
        return flight.unknown(name, changed, "none of them is set")
    return flight.passed(name, changed, ", ".join(sorted(set_)) or "YaRN's factor is in force")


def _number(module: nn.Module, names: Sequence[str]) -> float | None:
    """A setting above 0 of the module, else of its configuration."""
    if names is _WINDOWS and not _slides(module, getattr(module, "config", None)):
        return None
    for name in names:
        if hasattr(module, name):
            value = getattr(module, name)
            value = value[0] if isinstance(value, tuple | list) and value else value
            if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
                return float(value)
            if names is _WINDOWS:  # this layer has none
                return None
    config = getattr(module, "config", None)
    if config is None:
        return None
    value = getattr(config, names[0], None)
    return float(value) if isinstance(value, int | float) and value and value > 0 else None


def _exact(module: nn.Module) -> bool:
    """Whether the setting's name says how many keys are meant: transformers' `sliding_window`."""
    return isinstance(getattr(module, _WINDOWS[0], None), int) or not any(hasattr(module, name) for name in _WINDOWS)


def _slides(module: nn.Module, config: Any) -> bool:
    """Whether a window is that of this layer: of some layers configurations say that they see everything."""
    if config is None:
        return True
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if getattr(config, "use_sliding_window", True) is False or getattr(module, "is_sliding", True) is False:
        return False
    if kinds is None or not isinstance(layer, int) or layer >= len(kinds):
        return kinds is None
    return str(kinds[layer]).startswith("sliding")


# ---- softcap


def _capped(own: Mapping[str, nn.Module]) -> Mapping[str, nn.Module]:
    """Modules that may have a cap: those with an attribute for it; all, if none has one and a configuration says so."""
    named = {module: m for module, m in own.items() if any(hasattr(m, name) for name in _CAPS)}
    return named or own


def _caps(flight: Flight, caps: Mapping[str, float], calls: Sequence[SeenCall]) -> Iterator[Finding]:
    known = {call.module: call.call.scoring.softcap for call in calls if not call.call.ready}
    left = {module: cap for module, cap in caps.items() if known.get(module) != cap}
    if not left:
        return
    now = {call.module: _largest(call) for call in calls}
    factors = {m: _TIMES_CAP * cap / now[m] for m, cap in left.items() if now.get(m)}
    try:
        enlarged = seen_calls(flight.batch, around=lambda: _enlarged(flight.model, factors))[1]
    except LevelheadError:
        return
    for call in enlarged:
        cap, size = left.get(call.module), _largest(call)
        if cap is not None and size > 2 * cap:  # enlarged as asked, and not held back
            why = f"A softcap of {cap:g} is set, and logits pass it: with q enlarged they reach {size:.3g}."
            advice = "Apply cap * tanh(logits / cap) before the mask; scaled_dot_product_attention has no softcap."
            yield finding("softcap missing", "warning", call.module, why, advice, softcap=cap, max_logit=size)


def _largest(call: SeenCall) -> float:
    hidden = call.hidden()
    if call.logits is None or hidden is None:
        return 0.0
    return float(call.logits.masked_fill(hidden, 0.0).nan_to_num().abs().max())


def _enlarged(model: nn.Module, factors: Mapping[str, float]) -> list[Any]:
    """Hooks that multiply the queries' projections of these modules."""
    handles = []
    for name, factor in factors.items():
        for inner, module in model.named_modules():
            own = inner.startswith(f"{name}.") and effective_scale.role(inner) in ("q", "qkv")
            if own and isinstance(getattr(module, "weight", None), Tensor):
                handles.append(module.register_forward_hook(_times(factor)))
    return handles


def _times(factor: float) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return output * factor if isinstance(output, Tensor) else output

    return hook


# ---- YaRN


def _yarn_factor(module: nn.Module) -> float | None:
    """What q and k are to be multiplied with; None: not set, or not by this rule."""
    own = _number(module, _YARN)
    if own is not None:
        return 0.1 * math.log(own) + 1.0 if own > 1 else None
    config = getattr(module, "config", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "yarn" or "mscale" in rope:
        return None
    factor, given = rope.get("factor"), rope.get("attention_factor")
    if given is not None:
        return float(given)
    return 0.1 * math.log(factor) + 1.0 if isinstance(factor, int | float) and factor > 1 else None


def _yarn(own: Mapping[str, nn.Module], run: Run) -> Iterator[Finding]:
    for record in run.latest:
        module = own.get(record.module)
        factor = None if module is None else _yarn_factor(module)
        scale, d_k = record.facts.effective_scale, record.facts.d_k
        if factor is None or factor < 1.02 or scale is None or record.facts.scale_reading != "projections":
            continue
        ratio = scale * math.sqrt(d_k)
        if abs(ratio - 1) < 0.005:
            why = f"YaRN is set, and its factor is not in force: q and k are to be multiplied by {factor:.3g} each."
            advice = "Multiply cos and sin, or q and k, by 0.1 ln(factor) + 1."
            right = factor * factor / math.sqrt(d_k)
            yield finding("YaRN factor missing", "warning", record.module, why, advice, scale=scale, expected=right)


def yarn_explains(module: nn.Module | None, ratio: float) -> bool:
    """Whether a scale so many times 1/√d_k is what YaRN sets."""
    factor = None if module is None else _yarn_factor(module)
    return factor is not None and abs(ratio / factor**2 - 1) < 0.02

"""Whether attention moves anything from one token to another: noise behind the values of one place must reach others.

A layout that the attention function reads otherwise (heads in place of tokens) and a wrong letter of an einsum give
every token its own values only, with weights that sum to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.preflight_checks.calls import SeenCall
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.projections import home, moves
from levelhead.preflight_checks.result import finding
from levelhead.watching import effective_scale

NAME, KIND = "tokens mixed", "tokens do not see each other"
_CHANGED = "the values of one token, behind their projection"
_PLACES = 6  # that are tried, a pass for each
_FEWEST = 4  # places; with fewer, a design may show each token itself only


def check(flight: Flight, calls: Sequence[SeenCall]) -> None:
    """Of every module with a projection of values and as many outputs."""
    homes = _homes(flight, calls)
    if not homes:
        return flight.unknown(NAME, _CHANGED, "no module whose projection of values is known")
    own, others = dict.fromkeys(homes, 0), dict.fromkeys(homes, 0)
    for n in range(_PLACES):
        hooks = [(path, _noisy(n)) for path in homes.values()]
        for module, move in moves(flight, homes, hooks).items():
            if not move.numel():
                continue
            moved = move.reshape(-1, move.shape[-1]).any(1)
            at = _at(n, len(moved))
            own[module] += bool(moved[at])
            others[module] += bool(moved.sum() > moved[at].int())
    mixing = [module for module in homes if others[module]]
    apart = [module for module in homes if not others[module] and own[module] > 2]
    if not apart:
        if not mixing:
            return flight.unknown(NAME, _CHANGED, "no output moved")
        return flight.passed(NAME, _CHANGED, f"other tokens moved in {len(mixing)} of {len(homes)} modules")
    why = "The values of a token move its own output and no other: no token sees another one in this module. The "
    why += "attention function reads heads where tokens are, (B, T, H, D) for (B, H, T, D), or a product of weights "
    why += "and values has the letter of the queries where that of the keys belongs."
    advice = "Give scaled_dot_product_attention (B, H, T, D); multiply as einsum('bhqk,bkhd->bqhd')."
    found = [finding(KIND, "error", module, why, advice) for module in apart]
    return flight.failed(NAME, _CHANGED, "no other token moved", *found)


def _homes(flight: Flight, calls: Sequence[SeenCall]) -> dict[str, str]:
    """Modules around attention calls or with projections of q, k and v -> that of the values. Left out are those whose
    mask shows a token itself only, and those of which something else is known."""
    modules, known = dict(flight.model.named_modules()), {f.module for f in flight.findings}
    found: dict[str, str] = {}
    projecting = [name for name, module in modules.items() if _roles(module) >= {"q", "k", "v"}]
    for name in dict.fromkeys([*(home(call.module, modules) for call in calls if call.module in modules), *projecting]):
        inside = [call for call in calls if call.module == name or call.module.startswith(f"{name}.")]
        if known & {name, *(call.module for call in inside)} or any(map(_alone, inside)):
            continue
        for child, part in modules[name].named_children():
            path = f"{name}.{child}" if name else child
            if effective_scale.role(child) in ("v", "kv", "qkv") and _fits(flight, name, path, part):
                found[name] = path
    return found


def _roles(module: nn.Module) -> set[str | None]:
    return {effective_scale.role(child) for child, _ in module.named_children()}


def _alone(call: SeenCall) -> bool:
    shown = call.shown() if call.square else None
    return shown is not None and bool((shown.int().sum(1) < 2).all())


def _fits(flight: Flight, name: str, path: str, part: nn.Module) -> bool:
    """Whether both ran once, and the module gives a vector for each that the projection gives."""
    entries, weight = flight.tape.entries, getattr(part, "weight", None)
    if any((each, 0) not in entries or (each, 1) in entries for each in (name, path)):
        return False
    made, given = entries[path, 0].outputs, entries[name, 0].outputs
    linear = isinstance(weight, Tensor) and weight.dim() == 2 and bool(made) and made[0].shape[-1] in weight.shape
    lead = made[0].shape[:-1] if made else torch.Size()
    several = lead.numel() >= _FEWEST and lead[-1] > 1  # one token in a row, as a patch in a frame, has no other
    return linear and several and bool(given) and given[0].shape[:-1] == lead


def _at(n: int, places: int) -> int:
    """One of all places, rows and tokens alike."""
    return round(n * (places - 1) / (_PLACES - 1))


def _noisy(n: int) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):
            return None
        changed = output.clone()
        flat = changed.view(-1, changed.shape[-1])
        noise = torch.randn(flat.shape[1], generator=torch.Generator().manual_seed(3)).to(flat)
        flat[_at(n, len(flat))] += 3 * noise * output.float().std().clamp(min=0.1).to(flat)
        return changed

    return hook

"""The order of query heads: what a head's queries do must arrive where that head's outputs are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.diagnosis.findings import Finding
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.projections import GROUPS
from levelhead.preflight_checks.result import finding
from levelhead.preflight_checks.value_probe import Site, heads_out
from levelhead.watching import effective_scale

_MOST = 16  # heads: a pass for each


def check(flight: Flight, sites: Sequence[Site]) -> list[Finding]:
    """Adds noise to the queries of one head at a time, and reads which head's outputs move."""
    known = {site.module: path for site in sites if (path := _queries(flight, site)) is not None}
    chosen = [site for site in sites if site.module in known]
    if not chosen:
        return []
    still = heads_out(flight.batch, flight.tape, chosen, _values)
    moved: dict[str, list[list[int]]] = {site.module: [] for site in chosen}
    for h in range(max(site.heads for site in chosen)):
        out = _with_noise(flight, chosen, known, h)
        for site in chosen:
            if h < site.heads:
                gap = (out[site.module] - still[site.module]).double().nan_to_num().abs().amax((0, 1, 3))
                moved[site.module].append([n for n, x in enumerate(gap.tolist()) if x > 1e-6])
    return [_finding(module, order) for module, order in moved.items() if _is_other_order(order)]


def _is_other_order(moved: Sequence[Sequence[int]]) -> bool:
    """Whether each head moves one output, all of them together every one, and not each its own."""
    singles = [each[0] for each in moved if len(each) == 1]
    return len(singles) == len(moved) == len(set(singles)) and singles != sorted(singles)


def _finding(module: str, order: Sequence[Sequence[int]]) -> Finding:
    h = next(h for h, each in enumerate(order) if each != [h])
    why = f"The queries of head {h} decide what is given as head {order[h][0]}: query heads are in another order than "
    why += "outputs and key/value heads, most often by a view (groups of heads, key heads) for (key heads, groups). "
    why += "Weights of other code do not fit."
    advice = "View queries as (B, T, G, H // G, D): heads of one key head are neighbours."
    return finding(GROUPS, "warning", module, why, advice, heads=len(order))


def _queries(flight: Flight, site: Site) -> str | None:
    """The projection of the queries beside that of the values, if its columns are those of the heads."""
    home = site.values.rpartition(".")[0]
    prefix = f"{home}." if home else ""
    names = [n for n, _ in flight.tape.entries if n.startswith(prefix) and "." not in n[len(prefix) :]]
    found = [n for n in names if effective_scale.role(n) == "q"]
    outputs = flight.tape.entries[found[0], 0].outputs if len(found) == 1 else []
    fits = bool(outputs) and outputs[0].shape[-1] % site.heads == 0 and 1 < site.heads <= _MOST
    return found[0] if fits else None


def _values(site: Site) -> Tensor:
    """The same for every head, other ones for every key."""
    noise = torch.randn(site.rows, site.keys, 1, 1, generator=torch.Generator().manual_seed(7))
    return site.zeros() + noise.to(site.device, site.dtype)


def _with_noise(flight: Flight, sites: Sequence[Site], queries: dict[str, str], h: int) -> dict[str, Tensor]:
    modules = dict(flight.model.named_modules())
    handles = [modules[queries[site.module]].register_forward_hook(_noisy(h, site.heads)) for site in sites]
    try:
        return heads_out(flight.batch, flight.tape, sites, _values)
    finally:
        for handle in handles:
            handle.remove()


def _noisy(h: int, heads: int) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or h >= heads:
            return None
        changed, D = output.clone(), output.shape[-1] // heads
        own = changed[..., h * D : (h + 1) * D]
        noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(8)).to(own)
        own += 2 * noise * output.float().std().clamp(min=0.1).to(own)
        return changed

    return hook

"""The projections of q, k and v of an attention module, and what each of them does to its output.

Noise is added behind a projection, and the module's output must move: by values in proportion to it, for attention is
linear in the values, and not in the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.diagnosis.findings import Finding
from levelhead.preflight_checks.calls import SeenCall
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.passes import Tape, run, tensors
from levelhead.preflight_checks.result import finding
from levelhead.watching import effective_scale

_NEAR = 1e-3


def around(module: str, tape: Tape) -> dict[str, Tensor]:
    """What the projections of a module gave, by role; of the nearest module around it, where it has none itself."""
    while True:
        prefix = f"{module}." if module else ""
        found = {
            role: entry.outputs[0]
            for (name, number), entry in tape.entries.items()
            if name.startswith(prefix) and "." not in name[len(prefix) :] and number == 0 and entry.outputs
            if (role := effective_scale.role(name)) is not None
        }
        if found or not module:
            return found
        module = module.rpartition(".")[0]


def home(module: str, modules: Mapping[str, nn.Module]) -> str:
    """The module, or the nearest around it that has projections: a core of attention has its settings there."""
    here = module
    while here and not any(effective_scale.role(child) for child, _ in modules[here].named_children()):
        here = here.rpartition(".")[0]
    children = modules[here].named_children()
    return here if any(effective_scale.role(child) for child, _ in children) else module


# ---- the order of grouped keys


def key_groups(flight: Flight, calls: Sequence[SeenCall]) -> None:
    """Compares the lengths of keys at the call with those of the projection: rotations keep them."""
    name, looked = "order of key heads", "the lengths of keys at the call and behind their projection"
    known, wrong, found = 0, 0, []
    for call in calls:
        owners = _owners(call, flight.tape)
        if owners is None:
            continue
        known += 1
        named = any(f.kind == GROUPS and f.module == call.module for f in flight.findings)
        wrong += owners.wrong
        if owners.wrong and not named:
            found.append(groups_finding(call.module, owners, "keys"))
    if wrong:
        return flight.failed(name, looked, f"in {wrong} modules", *found)
    if not known:
        return flight.unknown(name, looked, "no module that repeats its keys")
    return flight.passed(name, looked, f"neighbouring heads share keys in {known} modules")


@dataclass(frozen=True)
class Owners:
    """The key/value head that each query head reads, where it is known."""

    of: Mapping[int, int]
    heads: int
    groups: int

    def usual(self, h: int) -> int:
        return h // (self.heads // self.groups)

    @property
    def wrong(self) -> bool:
        """Whether grouped heads are in another order than everywhere else."""
        return 1 < self.groups < self.heads and any(g != self.usual(h) for h, g in self.of.items())


def _owners(call: SeenCall, tape: Tape) -> Owners | None:
    """None: not known, or there are as many key heads as heads."""
    k = around(call.module, tape).get("k")
    B, H, S, D = call.k.shape
    if k is None or k.dim() != 3 or k.shape[:2] != (B, S) or k.shape[2] % D or not 1 < k.shape[2] // D < H:
        return None
    made = k.double().reshape(B, S, -1, D).norm(dim=-1)  # (B, S, G)
    here = call.k.double().norm(dim=-1).transpose(1, 2)  # (B, S, H)
    ratio = (here[..., None] / made[:, :, None].clamp(min=1e-30)).flatten(0, 1)  # (B · S, H, G)
    same = ratio.std(0) < _NEAR * ratio.mean(0)
    if H % made.shape[2] or not bool((same.sum(1) == 1).all()):
        return None
    return Owners(dict(enumerate(same.int().argmax(1).tolist())), H, made.shape[2])


UNUSED, SWAPPED = "values without effect", "keys and values swapped"
GROUPS = "grouped heads in the wrong order"


def groups_finding(module: str, owners: Owners, what: str) -> Finding:
    """Of heads that are tiled, or share key/value heads in any other order than the usual one."""
    H, G, each = owners.heads, owners.groups, owners.heads // owners.groups
    read = f"h mod {G}"
    if any(g != h % G for h, g in owners.of.items()):
        h = next(h for h, g in owners.of.items() if g != owners.usual(h))
        read = f"{owners.of[h]} for h = {h}"
    why = f"The {what} of query head h are those of key/value head {read}; everywhere else it is h // {each}: "
    why += "neighbours share one. Weights of other code do not fit, and a cache or kernel with grouped heads gives "
    why += "other results."
    if len(owners.of) == H and (idle := sorted(set(range(G)) - set(owners.of.values()))):
        why += f" No head reads key/value head {', '.join(map(str, idle))}."
    advice = "Use repeat_interleave(n, dim=1), not repeat(1, n, 1, 1), on k and v alike; or enable_gqa=True."
    return finding(GROUPS, "warning", module, why, advice, heads=H, groups=G)


# ---- what projections do


@dataclass(frozen=True)
class Home:
    """A module with projections of q, k and v."""

    name: str
    children: Mapping[str, tuple[str, slice]]  # role -> child, and which columns of its output

    @property
    def fused(self) -> bool:
        """Whether keys and values come from one projection."""
        return self.children["k"][0] == self.children["v"][0]


def check(flight: Flight, calls: Sequence[SeenCall]) -> None:
    """Adds noise behind every projection, one role at a time, in all modules at once."""
    name, changed = "use of projections", "noise behind the projections of q, k and v"
    known = {f.module for f in flight.findings}  # a wrong mask may hide all values
    homes = [
        home for home in homes_of(flight, calls) if flight.tape.entries[home.name, 0].outputs and home.name not in known
    ]
    if not homes:
        return flight.unknown(name, changed, "no module with projections of q, k and v")
    values = _Moves(flight, homes, "v")
    odd = [home for home in homes if not values.linear(home)]  # not as values are: look closer
    others = {role: _Moves(flight, homes, role) for role in ("q", "k")}
    found = [*_without_effect(flight, [home for home in homes if home not in odd], others)]
    for home in odd:
        if not values.size(home) and max(each.size(home) for each in others.values()):
            why = "What the projection of the values gives changes nothing, while that of the queries or keys does: "
            why += "the attention reads something else as values."
            advice = "Multiply the weights with the projected values."
            found.append(finding(UNUSED, "warning", home.name, why, advice))
        elif values.size(home) and others["k"].linear(home):
            found.append(_swapped(home))
    if found:
        return flight.failed(name, changed, ", ".join(sorted({f.kind for f in found})), *found)
    return flight.passed(name, changed, f"values count as values in {len(homes) - len(odd)} of {len(homes)} modules")


def _swapped(home: Home) -> Finding:
    if home.fused:
        child = home.children["k"][0].rpartition(".")[2]
        why = f"The output is linear in the part of {child} in front of its last part, and not in the last: values are "
        why += "in front of keys there. Weights of other code, where values are last, do not fit."
        advice = "Split in the order q, k, v; or rename the projection if the order is meant."
        return finding(SWAPPED, "warning", home.name, why, advice)
    why = "The output is linear in what the projection of the keys gives, and not in that of the values: keys and "
    why += "values are swapped on the way."
    return finding(SWAPPED, "warning", home.name, why, "Look at the order of arguments: attention(q, k, v).")


def _without_effect(flight: Flight, homes: Sequence[Home], moves: Mapping[str, _Moves]) -> Iterator[Finding]:
    """Projections of queries or keys that change nothing, also with noise on the other side: a side that is zero at
    first would hide the noise."""
    for idle, other, what in (("q", "k", "queries"), ("k", "q", "keys")):
        suspects = [home for home in homes if not moves[idle].size(home) and moves[other].size(home)]
        if not suspects:
            continue
        alone, together = (_moved(flight, suspects, roles, 1.0) for roles in (other, other + idle))
        for home in suspects:
            if torch.equal(alone[home.name], together[home.name]):
                why = f"What the projection of the {what} gives changes nothing, while the others do: the attention "
                why += f"reads something else as {what}, and these weights get no gradient."
                advice = "Look at the arguments: attention(q, k, v); or remove the projection."
                yield finding(f"{what} without effect", "warning", home.name, why, advice)


class _Moves:
    """How the outputs of modules move with noise behind one of their projections, and with twice the noise."""

    def __init__(self, flight: Flight, homes: Sequence[Home], role: str) -> None:
        self._flight, self._homes, self._role = flight, homes, role
        self._once = _moved(flight, homes, role, 1.0)

    @cached_property
    def _twice(self) -> dict[str, Tensor]:
        return _moved(self._flight, self._homes, self._role, 2.0)

    def size(self, home: Home) -> float:
        return largest(self._once[home.name])

    def linear(self, home: Home) -> bool:
        once, twice = self._once[home.name], self._twice[home.name]
        return self.size(home) > 0 and largest(twice - 2 * once) < _NEAR * self.size(home)


def largest(move: Tensor) -> float:
    """How far an output moved at most."""
    return float(move.abs().max()) if move.numel() else 0.0


def homes_of(flight: Flight, calls: Sequence[SeenCall]) -> Iterator[Home]:
    """Modules with projections of all three that ran once."""
    ran = [name for name, _ in flight.tape.entries]
    for name, module in flight.model.named_modules():
        children: dict[str, tuple[str, slice]] = {}
        for child, part in module.named_children():
            path, role = f"{name}.{child}" if name else child, effective_scale.role(child)
            if role is None or ran.count(path) != 1 or not isinstance(part, nn.Module):
                continue
            if role in ("qkv", "kv"):
                inside = (call for call in calls if call.module == name or call.module.startswith(f"{name}."))
                parts = _parts(flight.tape.entries[path, 0].outputs, role, next(inside, None))
                children |= {each: (path, part) for each, part in zip(role, parts, strict=False)}
            else:
                children[role] = (path, slice(None))
        if ran.count(name) == 1 and children.keys() == {"q", "k", "v"}:
            yield Home(name, children)


def _parts(outputs: Sequence[Tensor], role: str, call: SeenCall | None) -> list[slice]:
    """The columns of the parts of a projection that makes several, if these stand side by side; [] if not known."""
    if not outputs or call is None or not call.whole:
        return []
    F, H, D = outputs[0].shape[-1], call.heads, call.q.shape[3]
    if role == "kv":
        return [slice(0, F // 2), slice(F // 2, F)] if F % 2 == 0 else []
    groups = (F // D - H) // 2
    if groups < 1 or (H + 2 * groups) * D != F:
        return []
    return [slice(0, H * D), slice(H * D, F - groups * D), slice(F - groups * D, F)]


def _moved(flight: Flight, homes: Sequence[Home], roles: str, size: float) -> dict[str, Tensor]:
    """How the first output of every module moves with noise behind these projections."""
    children = [home.children[role] for home in homes for role in roles]
    return moves(flight, [home.name for home in homes], [(child, _noisy(part, size)) for child, part in children])


def moves(flight: Flight, modules: Iterable[str], hooks: Iterable[tuple[str, Callable[..., Any]]]) -> dict[str, Tensor]:
    """How the first output of every module moves with these hooks; its own numbers are passed on."""
    by_name = dict(flight.model.named_modules())
    found = {name: torch.empty(0) for name in modules}
    handles = [by_name[child].register_forward_hook(hook) for child, hook in hooks]
    for name in found:
        kept = flight.tape.entries[name, 0].outputs[0]
        handles.append(by_name[name].register_forward_hook(compared(name, kept, found)))
    try:
        run(flight.batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _noisy(columns: slice, size: float) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):
            return None
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output)
        changed = output.clone()
        changed[..., columns] += noise[..., columns] * output.float().std().clamp(min=1e-3).to(output) * size
        return changed

    return hook


def compared(name: str, kept: Tensor, found: dict[str, Tensor]) -> Callable[..., Any]:
    """A hook that notes how a module's first output moved, and passes `kept` on."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        given = tensors(output)
        if given and given[0].shape == kept.shape:
            found[name] = (given[0] - kept).double().nan_to_num()
        if isinstance(output, Tensor):
            return kept
        return (kept, *output[1:]) if isinstance(output, tuple) and output and isinstance(output[0], Tensor) else None

    return hook

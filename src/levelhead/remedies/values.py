"""Whether the rows of queries or keys are rows of the values, too: scaled, they would scale the output in silence.

A watch has no values. So rows are free only where the values have a source of their own: another projection, or other
outputs of the same one. If none is known, the keys count as values, and the queries take the factor alone, which is
exact as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from levelhead.remedies.projections import RanProjection, Source, Unknown, outputs
from levelhead.watching import effective_scale


def also_values(
    module: nn.Module, ran: Sequence[RanProjection], of_q: Source | Unknown, of_k: Iterable[Source | Unknown]
) -> frozenset[str]:
    """Which of "q" and "k" may have rows that the values have, too."""
    roles = {"q": [of_q], "k": list(of_k)}
    known = {role: [x for x in each if isinstance(x, Source)] for role, each in roles.items()}
    weights = {id(_weight(x.module)) for each in known.values() for x in each}
    held = [(name, child) for name, child in module.named_modules(remove_duplicate=False) if outputs(child) is not None]
    of_v = [child for name, child in held if effective_scale.role(name) == "v"]
    if of_v:
        return _tied(known, of_v)
    if any(_has_more(x, known) for each in known.values() for x in each):
        return frozenset()
    others = [one for one in ran if id(_weight(one.module)) not in weights]
    named = all(effective_scale.role(name) for name, child in held if id(_weight(child)) in weights)
    free = [one for one in others if not named or "v" in (effective_scale.role(one.name) or "")]
    if free or not known["k"]:
        return frozenset()
    keys = [(id(_weight(x.module)), set(x.rows.flatten().tolist())) for x in known["k"]]
    overlap = any(
        id(_weight(x.module)) == key and rows & set(x.rows.flatten().tolist()) for x in known["q"] for key, rows in keys
    )
    return frozenset("qk" if overlap else "k")


def _weight(module: nn.Module) -> object:
    return module._parameters.get("weight")


def _tied(known: dict[str, list[Source]], of_v: Iterable[nn.Module]) -> frozenset[str]:
    """The roles whose weights are the values'."""
    held = {id(_weight(x)) for x in of_v}
    return frozenset(role for role, each in known.items() for x in each if id(_weight(x.module)) in held)


def _has_more(one: Source, known: dict[str, list[Source]]) -> bool:
    """Whether its projection has outputs that are neither queries nor keys."""
    same = [x.columns.flatten() for each in known.values() for x in each if x.module is one.module]
    weight = one.module._parameters[one.weight]
    return weight is not None and len(torch.unique(torch.cat(same))) < weight.shape[one.dim]

"""Products of q and k: every column of a head counts by itself. With a wrong letter of an einsum the columns are added
up first, and logits are a product of two sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from levelhead.preflight_checks.calls import SeenCall
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.projections import Home, homes_of, largest, moves
from levelhead.preflight_checks.result import finding

NAME, KIND = "columns of q and k", "only the sum of q counts"
_CHANGED = "one column of the queries, then its neighbour"
_NEAR = 1e-3


def check(flight: Flight, calls: Sequence[SeenCall]) -> None:
    """Adds the same number to two columns of a head, one at a time: the outputs must differ."""
    known = {f.module for f in flight.findings}
    homes = [home for home in homes_of(flight, calls) if home.name not in known and _given(flight, home)]
    if not homes:
        return flight.unknown(NAME, _CHANGED, "no module with projections of q, k and v")
    first, second = (_moves(flight, homes, column) for column in (0, 1))
    judged = [home.name for home in homes if largest(first[home.name]) and largest(second[home.name])]
    alike = [name for name in judged if largest(first[name] - second[name]) < _NEAR * largest(first[name])]
    if not judged:
        return flight.unknown(NAME, _CHANGED, "no output moved")
    if not alike:
        return flight.passed(NAME, _CHANGED, f"outputs differ in {len(judged)} of {len(homes)} modules")
    why = "Two columns of the queries have the same effect: columns are added up before they meet the keys. The logits "
    why += "are a product of two sums, most often by two letters of an einsum that must be one."
    advice = "Write einsum('bqhd,bkhd->bhqk', q, k), with the same last letter."
    return flight.failed(NAME, _CHANGED, "both did the same", *(finding(KIND, "error", n, why, advice) for n in alike))


def _given(flight: Flight, home: Home) -> bool:
    """Whether there are outputs to compare."""
    return bool(flight.tape.entries[home.name, 0].outputs)


def _moves(flight: Flight, homes: Sequence[Home], column: int) -> dict[str, Tensor]:
    hooks = [(home.children["q"][0], _raised((home.children["q"][1].start or 0) + column)) for home in homes]
    return moves(flight, [home.name for home in homes], hooks)


def _raised(column: int) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or output.shape[-1] <= column:
            return None
        changed = output.clone()
        changed[..., column] += 3 * output.float().std().clamp(min=0.1).to(output)
        return changed

    return hook

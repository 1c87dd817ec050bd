"""Learned sinks: a module that has a logit for them must use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from levelhead.preflight_checks.calls import SeenCall
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.passes import same, taped
from levelhead.preflight_checks.result import finding

_NAMES = ("sinks", "attn_sinks", "attention_sinks", "sink_logits")  # own: a parameter for them is there to be used


def check(flight: Flight, calls: Sequence[SeenCall]) -> None:
    """Adds 2 to all of them, one module at a time; its output must move."""
    name, changed = "sinks", "the learned logits of sinks"
    modules = dict(flight.model.named_modules())
    held = {module: sinks for call in calls for module, sinks in _sinks(call, modules)}
    wrong = [module for module, sinks in held.items() if not _moves(flight, module, sinks)]
    if not held:
        return flight.unknown(name, changed, "no module has a parameter for them")
    if wrong:
        why = "The module has a learned logit for a sink in every head, and it changes nothing: the softmax is formed "
        why += "without it."
        advice = "Append the sinks to the logits before the softmax, and leave their weights out behind it."
        found = [finding("sinks missing", "warning", module, why, advice) for module in wrong]
        return flight.failed(name, changed, f"in {len(wrong)} modules nothing moved", *found)
    return flight.passed(name, changed, f"in force in {len(held)} modules")


def _sinks(call: SeenCall, modules: dict[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Of the module of a call, or of the one around it."""
    for module in (call.module, call.module.rpartition(".")[0]):
        parameters = modules[module]._parameters.items() if module in modules else ()
        for name, x in parameters:
            if name in _NAMES and x is not None and x.numel() == call.heads:
                yield module, x


def _moves(flight: Flight, module: str, sinks: Tensor) -> bool:
    kept = sinks.detach().clone()
    try:
        sinks.detach().add_(2.0)
        after = taped(flight.batch)
    finally:
        sinks.detach().copy_(kept)
    old, new = (tape.entries.get((module, 0)) for tape in (flight.tape, after))
    if old is None or new is None or not old.outputs:
        return True
    return not all(same(a, b) for a, b in zip(old.outputs, new.outputs, strict=False))

"""Cross-attention: a decoder's causal mask does not belong over the keys of another sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from levelhead.preflight_checks.calls import SeenCall, seen_calls
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.passes import same
from levelhead.preflight_checks.result import finding

NAME, KIND = "cross-attention", "causal mask in cross-attention"
LOOKED = "which keys of another sequence each query sees"


def check(flight: Flight, calls: Sequence[SeenCall]) -> None:
    """Looks for causal masks over keys that stand still when the decoder's tokens change."""
    stream, crossed = flight.batch.stream(), [n for n, seen in enumerate(calls) if seen.call.crossed]
    if not crossed or stream is None or len(flight.batch.streams()) < 2:
        return flight.unknown(NAME, LOOKED, "no second sequence is attended to")
    suspects = [n for n in crossed if _is_causal(calls[n])]
    if not suspects:
        return flight.passed(NAME, LOOKED, f"no causal mask in {len(crossed)} calls")
    chosen = torch.ones(flight.batch.sizes(stream), dtype=torch.bool)
    after = seen_calls(flight.batch.changed(stream, chosen))[1]
    still = [n for n in suspects if len(after) == len(calls) and same(calls[n].k, after[n].k)]
    wrong = [calls[n].module for n in still if not same(calls[n].q, after[n].q)]
    if not wrong:
        return flight.unknown(NAME, LOOKED, "a causal mask over keys that change with the queries' own tokens")
    why = "Query t of the decoder sees keys 0 … t of another sequence: its causal mask is applied in the "
    why += "cross-attention, too, and the end of the source is hidden from the first tokens."
    advice = "Give the cross-attention the padding mask of the source only."
    found = [finding(KIND, "warning", module, why, advice) for module in dict.fromkeys(wrong)]
    return flight.failed(NAME, LOOKED, f"causal in {len(found)} modules", *found)


def _is_causal(seen: SeenCall) -> bool:
    shown = seen.shown() if min(seen.queries, seen.keys) > 3 else None
    return shown is not None and torch.equal(shown, torch.ones_like(shown).tril())

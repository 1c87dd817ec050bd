"""The same pass again, and a look at its numbers: nothing random in evaluation mode, and no NaN."""

from __future__ import annotations

import torch

from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.operators import called
from levelhead.preflight_checks.passes import Places, same, taped
from levelhead.preflight_checks.result import finding


def same_twice(flight: Flight) -> None:
    """Two passes in evaluation mode with other random numbers."""
    name, changed = "dropout off in eval", "the same batch twice, other random numbers"
    again = taped(flight.batch, seed=1)
    for key, old in flight.tape.entries.items():
        new = again.entries.get(key)
        if new is None or all(same(a, b) for a, b in zip(old.outputs, new.outputs, strict=False)):
            continue
        if not all(same(a, b) for a, b in zip(old.inputs, new.inputs, strict=False)):
            continue
        module, size = key[0], _differs(old.outputs, new.outputs)
        why = "Two passes in evaluation mode differ: something random runs there, most often dropout whose p is passed "
        why += "to a function (F.dropout, dropout_p=) without looking at self.training."
        advice = "Write p if self.training else 0.0, or use nn.Dropout and call model.eval()."
        ran = called(flight.batch)
        if ran is not None and (ran.sorts or not ran.drops):
            what = f"outputs of {module} moved by {size:.2g}: it draws numbers, and not as dropout does"
            return flight.unknown(name, changed, what)
        found = finding("dropout in eval", "warning", module, why, advice, change=size)
        return flight.failed(name, changed, f"outputs moved by {size:.2g}", found)
    return flight.passed(name, changed, "every module gave the same bits")


def _differs(old: list[torch.Tensor], new: list[torch.Tensor]) -> float:
    pairs = [(a, b) for a, b in zip(old, new, strict=False) if a.shape == b.shape]
    return max((float((a.double() - b.double()).nan_to_num().abs().max()) for a, b in pairs), default=0.0)


def finite(flight: Flight) -> None:
    """Looks for NaN in what modules give for real tokens; of padded ones it may be NaN."""
    name, looked = "finite outputs", "what every module gives"
    stream, padded = flight.batch.stream(), flight.batch.padding_mask() is not None
    places: Places = lambda x: x  # noqa: E731
    if stream is not None and padded:
        looked = "what every module gives for real tokens"
        places = flight.grid(stream).at(flight.batch.unpadded(stream))
    for (module, _), entry in flight.tape.entries.items():
        whole = padded and module == ""  # what the model gives has no place for NaN, pooled or not
        bad = [x for x in entry.outputs if _nan(x, places, unplaced=whole)]
        if bad and not any(_nan(x, places) for x in entry.inputs):
            why = "NaN comes out of this module, and none went in: a row whose keys are all hidden by -inf (padding at "
            why += "the beginning does this to a causal model), a softmax along a wrong axis, or a product beyond its "
            why += "type."
            share = float(bad[0].isnan().double().mean())
            advice = "Fill hidden logits with torch.finfo(dtype).min, or let every query see itself."
            found = finding("NaN in outputs", "error", module, why, advice, share=share)
            return flight.failed(name, looked, f"NaN in {share:.0%} of an output", found)
    return flight.passed(name, looked, "no NaN")


def _nan(x: torch.Tensor, places: Places, *, unplaced: bool = False) -> bool:
    chosen = x if unplaced and places(x) is None else places(x)
    return chosen is not None and bool(chosen.isnan().any())

"""A sentence through one head of a model: whom each token attends to, divided and not.

Without a text the recorded sentence is shown; with one, `levelhead.explanation` reads it with a
model of this machine, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from levelhead.lab import recorded
from levelhead.lab.figure import Axis, Chart, Fact, Figure, Gauge, Series, Source, snippet
from levelhead.lab.measure import Setting
from levelhead.lab.settings import refused

NEEDS: tuple[str, ...] = ()
CLAIMS = ("C5", "C15")
LOOKS = 24  # heads listed that look hardest

Told = Mapping[str, Any]


def figure(
    setting: Setting,
    *,
    text: str | None = None,
    model: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    token: str | int | None = None,
) -> Figure:
    given = {"text": text, "model": model, "layer": layer, "head": head, "token": token}
    asked = {name: value for name, value in given.items() if value is not None}
    if text is None and asked:
        raise refused(next(iter(asked)), "a text to read", "none")
    told: Told = recorded.load("sentence") if text is None else _read(text, asked)
    source: Source = "recorded" if text is None else "live"
    words = [f"{i} {token}" for i, token in enumerate(told["tokens"])]  # a word may come twice
    return Figure(
        "sentence",
        f"“{told['text']}”",
        (
            _heat("Weights, divided as the model does", words, told["weights"], source),
            _heat("Weights, undivided", words, told["unscaled"], source),
        ),
        snippet("sentence", **asked),
        facts=tuple(_facts(told, source)),
        gauges=tuple(
            Gauge(label, gauge["level"], gauge["bubble"], gauge["normalised_entropy"], source)
            for label, gauge in (("divided", told["gauge"]), ("undivided", told["unscaled_gauge"]))
            if gauge["normalised_entropy"] is not None
        ),
        note=" ".join((told["note"], *told["counts"])),
        recorded=recorded.source(told["about"]) if text is None else "",
        extra=_extra(told),
    )


def _read(text: str, asked: Mapping[str, Any]) -> Told:
    """What `explain_text` says, as JSON has it; the recorded sentence has the same form."""
    options = {name: value for name, value in asked.items() if name != "text"}
    told: Told = import_module("levelhead.explanation").explain_text(text, **options).to_json()
    return told


def _extra(told: Told) -> dict[str, Any]:
    """What the page draws itself: a token to begin with, the weights of a head, its steps."""
    token = told["token"]
    same = ("text", "model", "tokens", "layers", "heads", "layer", "head", "steps")
    return {name: told[name] for name in same} | {
        "token": len(told["tokens"]) - 1 if token is None else token,
        "weights": _short(told["weights"]),
        "unscaled": _short(told["unscaled"]),
        "it": told["it"][:LOOKS],
        "block": True,
    }


def _short(weights: Any) -> list[list[float]]:
    return [[float(f"{x:.3g}") for x in line] for line in weights]


def _heat(title: str, words: Sequence[str], weights: Any, source: Source) -> Chart:
    largest = np.max(np.asarray(weights, np.float64))
    about = f"{len(words)} × {len(words)} weights, rows sum to 1, the largest is {largest:.3g}"
    heat = Series("weights", source, "heat", words, words, z=_short(weights))
    return Chart(title, Axis("token attended to"), Axis("token that attends"), (heat,), about)


def _facts(told: Told, source: Source) -> list[Fact]:
    facts = [
        Fact("tokens", len(told["tokens"]), source),
        Fact("model", told["model"], source),
        Fact("layer and head", f"{told['layer']}, {told['head']}", source),
    ]
    for label, name in (("divided", "weights"), ("undivided", "unscaled")):
        largest = float(np.max(told[name], axis=-1).mean())
        facts.append(Fact(f"mean largest weight, {label}", largest, source))
    return facts

"""A sentence through one head of a model: whom each token attends to, divided and not.

Without a text the recorded sentence is shown; with one, `levelhead.explanation` reads it with a model
of this machine, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from levelhead.lab import recorded
from levelhead.lab.experiment import Setting, python, wrong
from levelhead.lab.figure import Axis, Chart, Fact, Figure, Gauge, Series, Source

DEPENDS: tuple[str, ...] = ()
LOOKS = 24  # heads listed that look hardest

Told = Mapping[str, Any]


def figure(
    setting: Setting, *, text: str | None = None, model: str | None = None,
    layer: int | None = None, head: int | None = None, token: str | int | None = None,
) -> Figure:  # fmt: skip
    given = {"text": text, "model": model, "layer": layer, "head": head, "token": token}
    asked = {name: value for name, value in given.items() if value is not None}
    if text is None and asked:
        raise wrong(next(iter(asked)), "a text to read", "none")
    told = recorded.load("sentence") if text is None else _read(**asked)
    source: Source = "recorded" if text is None else "live"
    words = [f"{i} {token}" for i, token in enumerate(told["tokens"])]
    return Figure(
        "sentence",
        f"“{told['text']}”",
        (
            _heat("Weights, divided as the model does", words, told["weights"], source),
            _heat("Weights, undivided", words, told["unscaled"], source),
        ),
        python("sentence", **asked),
        facts=tuple(_facts(told, source)),
        gauges=tuple(
            Gauge(label, one["level"], one["bubble"], one["normalised_entropy"], source)
            for label, name in (("divided", "gauge"), ("undivided", "unscaled_gauge"))
            if (one := told.get(name)) and one["normalised_entropy"] is not None
        ),
        note=told.get("note", ""),
        recorded=recorded.source(told) if text is None else "",
        extra={name: told[name] for name in _EXTRA} | {"block": True},
    )


_EXTRA = (
    "text", "model", "tokens", "layers", "heads", "layer", "head", "token", "weights", "unscaled",
    "steps", "it",
)  # fmt: skip


def _read(text: str, **asked: Any) -> dict[str, Any]:
    return told_of(import_module("levelhead.explanation.text").explain_text(text, **asked))


def told_of(found: Any) -> dict[str, Any]:
    """What the figure shows of a `TextExplanation`; the recorded sentence is made of it, too."""
    one = found.explanation.head(found.head)
    return {
        "text": found.sentence,
        "model": found.model,
        "tokens": list(found.tokens),
        "layers": found.layers,
        "heads": found.heads,
        "layer": found.layer,
        "head": found.head,
        "token": found.token if found.token is not None else len(found.tokens) - 1,
        "weights": _short(found.weights),
        "unscaled": _short(found.unscaled),
        "steps": [step.to_json() for step in found.steps],
        "it": found.it[:LOOKS],
        "gauge": one.gauge.to_json(),
        "unscaled_gauge": one.unscaled_gauge.to_json(),
        "note": " ".join(f"{words}." for words in (*found.notes, found.why) if words),
    }


def _short(weights: Any) -> list[list[float]]:
    return [[float(f"{x:.3g}") for x in line] for line in np.asarray(weights)]


def _heat(title: str, words: Sequence[str], weights: Any, source: Source) -> Chart:
    z = np.array(weights, np.float64)
    about = f"{len(words)} × {len(words)} weights, rows sum to 1, the largest is {z.max():.3g}"
    heat = Series("weights", source, "heat", words, words, z=z)
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

"""A sentence through one head of a model: which tokens each token attends to, divided and undivided.

Without a text the recorded sentence is shown; with one, `levelhead.explanation` reads it with a
model of this machine, which takes seconds.
"""

from __future__ import annotations

import re
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
_MARK = re.compile(r"\[[A-Z]+\d*\]|<.+>")  # [CLS], </s>, <|endoftext|>
LOOKS = 24  # heads listed that look hardest

Sentence = Mapping[str, Any]


def figure(
    setting: Setting,
    *,
    text: str | None = None,
    model: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    token: str | int | None = None,
) -> Figure:
    options = {"text": text, "model": model, "layer": layer, "head": head, "token": token}
    chosen = {name: value for name, value in options.items() if value is not None}
    if text is None and chosen:
        raise refused(next(iter(chosen)), "a text to read", "none")
    sentence: Sentence = recorded.load("sentence") if text is None else _read(text, chosen)
    source: Source = "recorded" if text is None else "live"
    words = [f"{i} {token}" for i, token in enumerate(sentence["tokens"])]  # a word may come twice
    return Figure(
        "sentence",
        f"“{sentence['text']}”",
        (
            _heat("Weights, divided as the model does", words, sentence["weights"], source),
            _heat("Weights, undivided", words, sentence["unscaled"], source),
        ),
        snippet("sentence", **chosen),
        facts=tuple(_facts(sentence, source)),
        gauges=tuple(
            Gauge(label, gauge["level"], gauge["bubble"], gauge["normalised_entropy"], source)
            for label, gauge in (("divided", sentence["gauge"]), ("undivided", sentence["unscaled_gauge"]))
            if gauge["normalised_entropy"] is not None
        ),
        note=" ".join((sentence["note"], *sentence["counts"])),
        recorded=recorded.source(sentence["about"]) if text is None else "",
        extra=_extra(sentence),
    )


def _read(text: str, chosen: Mapping[str, Any]) -> Sentence:
    """The JSON of `explain_text`; the recorded sentence has the same form."""
    options = {name: value for name, value in chosen.items() if name != "text"}
    sentence: Sentence = import_module("levelhead.explanation").explain_text(text, **options).to_json()
    return sentence


def _extra(sentence: Sentence) -> dict[str, Any]:
    """What the page draws itself: a token to begin with, the weights of a head, its steps."""
    token = sentence["token"]
    same = ("text", "model", "tokens", "layers", "heads", "layer", "head", "steps")
    return {name: sentence[name] for name in same} | {
        "token": _last_word(sentence["tokens"]) if token is None else token,
        "weights": _short(sentence["weights"]),
        "unscaled": _short(sentence["unscaled"]),
        "it": sentence["it"][:LOOKS],
        "block": True,
    }


def _last_word(tokens: Sequence[str]) -> int:
    """The last token with a letter or a digit that is no mark of the tokenizer, such as [SEP]: in a model that reads
    left to right, it is the one that sees the other words."""
    words = [i for i, token in enumerate(tokens) if any(map(str.isalnum, token)) and not _MARK.fullmatch(token)]
    return words[-1] if words else len(tokens) - 1


def _short(weights: Any) -> list[list[float]]:
    return [[float(f"{x:.3g}") for x in line] for line in weights]


def _heat(title: str, words: Sequence[str], weights: Any, source: Source) -> Chart:
    largest = np.max(np.asarray(weights, np.float64))
    about = f"{len(words)} × {len(words)} weights, rows sum to 1, the largest is {largest:.3g}"
    heat = Series("weights", source, "heat", words, words, z=_short(weights), shades=(0.0, 1.0))
    return Chart(title, Axis("token attended to"), Axis("token that attends"), (heat,), about)


def _facts(sentence: Sentence, source: Source) -> list[Fact]:
    facts = [
        Fact("tokens", len(sentence["tokens"]), source),
        Fact("model", sentence["model"], source),
        Fact("layer and head", f"{sentence['layer']}, {sentence['head']}", source),
    ]
    for label, name in (("divided", "weights"), ("undivided", "unscaled")):
        largest = float(np.max(sentence[name], axis=-1).mean())
        facts.append(Fact(f"mean largest weight, {label}", largest, source))
    return facts

"""`explain_text`: a sentence through a model, one head of it step by step.

Chooses the model and the head where nobody did, and says so. The models are those that have a name
(`levelhead.models`) and "random", which needs none; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from levelhead import models
from levelhead.errors import LevelheadTypeError, LevelheadValueError, expected
from levelhead.explanation import capture, random_layer
from levelhead.explanation.arrays import Explanation, explain
from levelhead.explanation.forward_pass import ForwardPass
from levelhead.explanation.head_report import HeadReport
from levelhead.explanation.head_steps import Array, Gauge, Step
from levelhead.explanation.renderable import Renderable
from levelhead.explanation.terminal_table import cut
from levelhead.explanation.token_attention import Look, TokenAttention, attended
from levelhead.explanation.tokens import printable, quoted

__all__ = ["CHARACTERS", "TextExplanation", "explain_text"]

CHARACTERS = 2000  # of a sentence at most
_TITLE = 240  # columns of it that a title shows
NEEDED = ("torch", "transformers", "safetensors")  # to open a real model


@dataclass(frozen=True, eq=False, repr=False)
class TextExplanation(Renderable):
    """A sentence through a model: the steps of one head, and where every head looks.

    Print it for the steps; in a notebook it draws itself.
    """

    sentence: str
    reading: ForwardPass
    layer: int
    head: int
    why: str  # why this head
    token: int | None  # whose attention is asked for
    notes: tuple[str, ...]
    explanation: Explanation  # of all heads of the layer
    gauges: tuple[tuple[Gauge, ...], ...]  # by layer and head
    attended: TokenAttention | None  # where every head looks from the token

    @property
    def model(self) -> str:
        return self.reading.model

    @property
    def tokens(self) -> tuple[str, ...]:
        return self.reading.tokens.names

    @property
    def layers(self) -> int:
        return len(self.reading.calls)

    @property
    def heads(self) -> int:
        return self.reading.heads

    @property
    def weights(self) -> Array:
        """(T, S) of the chosen head."""
        return self.explanation.head(self.head).weights

    @property
    def unscaled(self) -> Array:
        """(T, S) of the chosen head, without the scale."""
        return self.explanation.head(self.head).unscaled

    @property
    def steps(self) -> list[Step]:
        """All steps with their shapes, from the input to what becomes of the output."""
        story = self.story()
        return [*story.inputs, *story.head.steps, *story.after]

    @property
    def it(self) -> list[dict[str, Any]]:
        """Where every head looks from the token: layer, head, to, weight; most first."""
        return [] if self.attended is None else self.attended.to_json()

    def story(self, head: int | None = None) -> HeadReport:
        """What is told of the chosen head, or of another one of its layer."""
        h = self.head if head is None else head
        one = self.explanation.head(h)
        sizes = f"layer {self.layer}, head {h}"
        return HeadReport(
            title=cut(printable(" ".join(self.sentence.split())), _TITLE),
            head=one,
            about=f"{self.model}, {self.reading.about}. Shown: {sizes} (counted from 0), d_k = {one.q.shape[1]}",
            notes=(*self.notes, self.why) if h == self.head else self.notes,
            before=self.reading.before,
            after=self.reading.after,
            token=self.token,
            attended=self.attended,
        )

    @property
    def note(self) -> str:
        """What is to be known about the model and the head, in sentences."""
        return " ".join(f"{x[0].upper()}{x[1:]}." for x in (*self.notes, self.why) if x)

    def to_json(self) -> dict[str, Any]:
        """All of the chosen head; of the others their gauges and where they look."""
        return {
            "text": self.sentence,
            "model": self.model,
            "model_is": self.reading.about,
            "note": self.note,
            "tokens": list(self.tokens),
            "special": list(self.reading.tokens.special),
            "layers": self.layers,
            "heads": self.heads,
            "layer": self.layer,
            "head": self.head,
            "token": self.token,
            **self.explanation.head(self.head).to_json(),
            "steps": [step.to_json() for step in self.steps],
            "it": self.it,
            "counts": [] if self.attended is None else list(self.attended.sentences()),
            "gauges": [[gauge.to_json() for gauge in layer] for layer in self.gauges],
        }


def explain_text(
    sentence: str,
    *,
    model: str | models.Opened | None = None,
    layer: int | None = None,
    head: int | None = None,
    token: str | int | None = None,
) -> TextExplanation:
    """A sentence through a model: five steps with real numbers, scaled beside unscaled.

    Args:
        sentence: up to 2,000 characters and 256 tokens.
        model: "minilm", "smollm2", "random", or what `models.open` gave; None: minilm if it is
            installed, else random, and `notes` says so.
        layer: counted from 0; None: chosen, and `why` says how.
        head: likewise.
        token: a word of the sentence (its last occurrence) or a position: where does it look?

    >>> explain_text("Love Apple phones", model="random").weights.shape
    (3, 3)
    """
    _check(sentence)
    for name, number in (("layer", layer), ("head", head)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            wanted = "a whole number"
            raise LevelheadTypeError(expected(name, wanted, repr(number), "Count from 0"))
    found, notes = _model(model)
    read = random_layer.read(sentence) if found == random_layer.NAME else _read(found, sentence)
    _check_range("layer", layer, len(read.calls))
    _check_range("head", head, read.heads)
    at, note = (None, "") if token is None else read.tokens.find(token)
    looks = None if at is None else _attended(read, at)
    gauges = tuple(call.gauges() for call in read.calls)
    at_layer, at_head, why = _choose(read, layer, head, looks, gauges)
    call = read.calls[at_layer]
    names = [f"layer {at_layer}, head {h}" for h in range(read.heads)]
    return TextExplanation(
        sentence=sentence,
        reading=read,
        layer=at_layer,
        head=at_head,
        why=why,
        token=at,
        notes=tuple(filter(None, (*notes, *read.notes, note))),
        gauges=gauges,
        attended=looks,
        explanation=explain(
            call.q, call.k, call.v, scale=call.scale, labels=read.tokens.names, names=names, **call.options
        ),
    )


def _attended(read: ForwardPass, token: int) -> TokenAttention:
    layers = ((x.weights(), x.unscaled()) for x in read.calls)
    return attended(token, read.tokens, layers, ordered=read.ordered)


# ---- which model ------------------------------------------------------------


def _model(asked: str | models.Opened | None) -> tuple[str | models.Opened, tuple[str, ...]]:
    """The model to use, and what is to be said about the choice."""
    if asked is None:
        missing = list(_missing("minilm"))
        if not missing:
            return "minilm", ("no model was named: minilm is used",)
        return random_layer.NAME, (
            "no model was named and minilm is not installed: random weights are used "
            f"(for minilm: {', then '.join(missing)})",
        )
    if isinstance(asked, models.Opened) or asked == random_layer.NAME or asked in models.available():
        return asked, ()
    names = ", ".join((*models.available(), random_layer.NAME))
    given = repr(asked) if len(repr(asked)) <= 60 else "something else"
    raise LevelheadValueError(expected("model", f"one of {names}", given, "Check the name"))


def _missing(name: str) -> Iterator[str]:
    """What stands between this machine and a model."""
    known = models.available()[name]
    if any(find_spec(package) is None for package in NEEDED):
        yield 'pip install "levelhead[torch,models]"'
    if known.path is None:
        yield known.command


def _read(model: str | models.Opened, sentence: str) -> ForwardPass:
    return capture.read(models.open(model) if isinstance(model, str) else model, sentence)


# ---- which head -------------------------------------------------------------


def _choose(
    read: ForwardPass,
    layer: int | None,
    head: int | None,
    looks: TokenAttention | None,
    gauges: tuple[tuple[Gauge, ...], ...],
) -> tuple[int, int, str]:
    """Layer, head, and why."""
    if layer is not None and head is not None:
        return layer, head, ""
    places = [
        (i, h)
        for i in (range(len(read.calls)) if layer is None else (layer,))
        for h in (range(read.heads) if head is None else (head,))
    ]
    among = f"of {len(places)} heads" if len(places) > 1 else "the only one"
    if read.model == random_layer.NAME and looks is None:
        return *places[0], f"head {places[0][1]} is shown: random heads are alike"
    best = next((x for x in (looks.looks if looks else ()) if (x.layer, x.head) in places), None)
    if looks and best and best.word is not None:
        said = f"most weight to {looks.others} ({looks.named(best.word)}, {best.word_weight:.2f})"
        why = f"{among}, in this one {quoted(looks.name)} gives {said}"
        return best.layer, best.head, f"{why}; {_company(read, best, looks)}"
    level = next((place for place in places if gauges[place[0]][place[1]].level == "level"), None)
    if level is None:
        return *places[0], f"{among}, the first is shown: none is level"
    return *level, f"{among}, this is the first that is level"


def _company(read: ForwardPass, look: Look, looks: TokenAttention) -> str:
    """How many tokens look there in the same head: it may not be about this one at all."""
    to = look.word
    most = read.calls[look.layer].weights()[look.head].argmax(-1)
    n = int((most == to).sum())
    return f"{n} of {len(read.tokens)} tokens look there most" if to is not None else ""


# ---- what cannot be explained -----------------------------------------------


def _check(sentence: object) -> None:
    if not isinstance(sentence, str):
        given = type(sentence).__name__
        raise LevelheadTypeError(expected("sentence", "text", given, "Give a str"))
    if len(sentence) > CHARACTERS:
        given, advice = f"{len(sentence)}", "Give one sentence of it"
        wanted = f"at most {CHARACTERS} characters"
        raise LevelheadValueError(expected("sentence", wanted, given, advice))
    if any("\ud800" <= c <= "\udfff" for c in sentence):  # bytes that are no UTF-8 come like this
        advice = "Check the encoding of your terminal"
        raise LevelheadValueError(expected("sentence", "Unicode", "half a character", advice))
    if not any(c.isalnum() for c in sentence):
        given = quoted(sentence) if sentence.strip() else "nothing"
        raise LevelheadValueError(expected("sentence", "words", given, "Write a few words"))


def _check_range(name: str, number: int | None, end: int) -> None:
    if number is not None and not 0 <= number < end:
        wanted = f"a number from 0 to {end - 1}" if end > 1 else "0, the only one"
        raise LevelheadValueError(expected(name, wanted, number, f"The model has {end}"))

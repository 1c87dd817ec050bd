"""`explain_text`: a sentence through a model, one head of it step by step.

Chooses the model and the head where the caller did not, and adds a note about the choice. The models are those of
`levelhead.models` and "random", which needs none; nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from levelhead import models
from levelhead.errors import bad_type, bad_value
from levelhead.explanation import capture, random_layer
from levelhead.explanation.arrays import Explanation, explain
from levelhead.explanation.forward_pass import ForwardPass
from levelhead.explanation.head_report import HeadReport
from levelhead.explanation.head_steps import Array, Gauge, Step
from levelhead.explanation.renderable import Renderable
from levelhead.explanation.terminal_table import cut
from levelhead.explanation.token_attention import TokenAttention, attended
from levelhead.explanation.tokens import printable, quoted

CHARACTERS = 2000  # of a sentence at most
_TITLE = 240  # columns of it that a title shows


@dataclass(frozen=True, eq=False, repr=False)
class TextExplanation(Renderable):
    """A sentence through a model: the steps of one head, and where every head looks.

    Print it for the steps; a notebook draws them.
    """

    sentence: str
    reading: ForwardPass
    layer: int
    head: int
    why: str  # why this head
    token: int | None  # whose row is shown for every head
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
        """All steps with their shapes, from the input to what follows the output."""
        story = self.story()
        return [*story.inputs, *story.head.steps, *story.after]

    @property
    def it(self) -> list[dict[str, Any]]:
        """Where every head looks from the token: layer, head, to, weight; the largest first."""
        return [] if self.attended is None else self.attended.to_json()

    def story(self, head: int | None = None) -> HeadReport:
        """What is shown of the chosen head, or of another one of its layer."""
        h = self.head if head is None else head
        shown = self.explanation.head(h)
        which = f"layer {self.layer}, head {h} (counted from 0), d_k = {shown.q.shape[1]}"
        return HeadReport(
            title=cut(printable(" ".join(self.sentence.split())), _TITLE),
            head=shown,
            about=f"{self.model}, {self.reading.about}. Shown: {which}",
            notes=(*self.notes, self.why) if h == self.head else self.notes,
            before=self.reading.before,
            after=self.reading.after,
            token=self.token,
            attended=self.attended,
        )

    @property
    def note(self) -> str:
        """The notes about the model and the choice of head, as sentences."""
        return " ".join(f"{x[0].upper()}{x[1:]}." for x in (*self.notes, self.why) if x)

    def to_json(self) -> dict[str, Any]:
        """The chosen head in full; of the others their gauges and their largest weights."""
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
        model: "minilm", "smollm2", "random", or the result of `models.open`; None: minilm if it is installed, else
            random, with a note in `notes`.
        layer: counted from 0; None: chosen, with the reason in `why`.
        head: likewise.
        token: a word of the sentence (its last occurrence) or a position: where does it look?

    >>> explain_text("Love Apple phones", model="random").weights.shape
    (3, 3)
    """
    _check(sentence)
    for name, number in (("layer", layer), ("head", head)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise bad_type(name, "a whole number", repr(number), "Count from 0")
    source, notes = _model(model)
    if source == random_layer.NAME:
        reading = random_layer.read(sentence)
    else:
        reading = capture.read(models.open(source) if isinstance(source, str) else source, sentence)
    _check_range("layer", layer, len(reading.calls))
    _check_range("head", head, reading.heads)
    position, note = (None, "") if token is None else reading.tokens.find(token)
    looks: TokenAttention | None = None
    if position is not None:
        layers = ((x.weights(), x.unscaled().weights()) for x in reading.calls)
        looks = attended(position, reading.tokens, layers, ordered=reading.ordered)
    gauges = tuple(call.gauges() for call in reading.calls)
    layer, head, why = _choose(reading, layer, head, looks, gauges)
    call = reading.calls[layer]
    names = [f"layer {layer}, head {h}" for h in range(reading.heads)]
    return TextExplanation(
        sentence=sentence,
        reading=reading,
        layer=layer,
        head=head,
        why=why,
        token=position,
        notes=tuple(filter(None, (*notes, *reading.notes, note))),
        gauges=gauges,
        attended=looks,
        explanation=explain(
            call.q, call.k, call.v, scale=call.scale, labels=reading.tokens.names, names=names, **call.options
        ),
    )


# ---- which model ------------------------------------------------------------


def _model(model: str | models.Opened | None) -> tuple[str | models.Opened, tuple[str, ...]]:
    """The model to use, and a note where it was chosen here."""
    if model is None:
        missing = models.missing_commands("minilm")
        if not missing:
            return "minilm", ("no model was named: minilm is used",)
        return random_layer.NAME, (
            "no model was named and minilm is not installed: random weights are used "
            f"(for minilm: {', then '.join(missing)})",
        )
    if isinstance(model, models.Opened) or model == random_layer.NAME or model in models.available():
        return model, ()
    names = ", ".join((*models.available(), random_layer.NAME))
    given = repr(model) if len(repr(model)) <= 60 else "something else"
    raise bad_value("model", f"one of {names}", given, "Check the name")


# ---- which head -------------------------------------------------------------


def _choose(
    reading: ForwardPass,
    layer: int | None,
    head: int | None,
    looks: TokenAttention | None,
    gauges: tuple[tuple[Gauge, ...], ...],
) -> tuple[int, int, str]:
    """Layer, head, and why."""
    if layer is not None and head is not None:
        return layer, head, ""
    candidates = [
        (i, h)
        for i in (range(len(reading.calls)) if layer is None else (layer,))
        for h in (range(reading.heads) if head is None else (head,))
    ]
    among = f"of {len(candidates)} heads" if len(candidates) > 1 else "the only one"
    if reading.model == random_layer.NAME and looks is None:
        return *candidates[0], f"head {candidates[0][1]} is shown: random heads are alike"
    best = next((x for x in (looks.looks if looks else ()) if (x.layer, x.head) in candidates), None)
    if looks and best and best.word is not None:
        target = f"{looks.others} ({looks.named(best.word)}, {best.word_weight:.2f})"
        # Where most tokens attend to the same key, the head may not be about this token at all.
        largest = reading.calls[best.layer].weights()[best.head].argmax(-1)
        alike = f"{int((largest == best.word).sum())} of {len(reading.tokens)} tokens look there most"
        why = f"{among}, in this one {quoted(looks.name)} gives most weight to {target}; {alike}"
        return best.layer, best.head, why
    level = next(((i, h) for i, h in candidates if gauges[i][h].level == "level"), None)
    if level is None:
        return *candidates[0], f"{among}, the first is shown: none is level"
    return *level, f"{among}, this is the first that is level"


# ---- errors -----------------------------------------------------------------


def _check(sentence: object) -> None:
    if not isinstance(sentence, str):
        raise bad_type("sentence", "text", type(sentence).__name__, "Give a str")
    if len(sentence) > CHARACTERS:
        raise bad_value("sentence", f"at most {CHARACTERS} characters", len(sentence), "Give one sentence of it")
    if any("\ud800" <= c <= "\udfff" for c in sentence):  # how Python passes arguments that are not UTF-8
        raise bad_value("sentence", "Unicode", "half a character", "Check the encoding of your terminal")
    if not any(c.isalnum() for c in sentence):
        given = quoted(sentence) if sentence.strip() else "nothing"
        raise bad_value("sentence", "words", given, "Write a few words")


def _check_range(name: str, number: int | None, end: int) -> None:
    if number is not None and not 0 <= number < end:
        wanted = f"a number from 0 to {end - 1}" if end > 1 else "0, the only one"
        raise bad_value(name, wanted, number, f"The model has {end}")

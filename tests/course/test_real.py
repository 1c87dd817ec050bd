"""The last chapter: its two records speak of the same head, in the words that the chapter uses."""

from __future__ import annotations

import math

import numpy as np
import pytest

from levelhead.course.chapters.real import D_K, data, numbers
from levelhead.course.results import claim
from levelhead.diagnosis import symptoms, wrong_scale

RULES = (wrong_scale.check, *symptoms.OF_A_RECORD, *symptoms.OF_A_RUN)


def test_the_saturated_head_of_the_sentence_is_the_one_of_the_claim() -> None:
    found = claim("C11a")["details"]
    cells = {
        (layer, head): one["divided"] for layer, heads in enumerate(data()["layers"]) for head, one in enumerate(heads)
    }
    saturated = [place for place, cell in cells.items() if cell["gauge"]["level"] == "saturated"]
    assert saturated == [(found["layer"], found["head"])]
    assert found["offset"] == -1  # "the token just before"
    row = cells[found["layer"], found["head"]]["row"]
    assert row.index(max(row)) == data()["query"] - 1


def test_the_words_list_all_that_the_check_warns_of() -> None:
    """A new rule that can warn needs new words in this chapter, and perhaps in the one on attacks."""
    named = {"wrong_scale", "not_finite", "fp16_overflow", "softcap_saturated", "dead_rows", "idle_norms"}
    while_training = {"logit_growth", "not_learning"}
    notes = {"flat_heads", "sink_heads", "not_seen", "by_hand"}
    rules = {rule.__module__.rsplit(".", 1)[1] if rule.__name__ == "check" else rule.__name__ for rule in RULES}
    assert rules == named | while_training | notes
    assert numbers()["texts"].value == numbers()["passages"].value + 1  # all were read, one to choose the head


def test_all_pairs_of_heads_differ() -> None:
    assert set(claim("C15")["measured"]["pairs that differ"]) == {1.0}  # "which is all of them"


def test_the_first_head_that_is_drawn_is_the_one_of_the_text() -> None:
    layer, head = data()["first"]
    for name, one in data()["layers"][layer][head].items():
        assert data()["tokens"][one["row"].index(max(one["row"]))] == "dog"
        assert numbers()[f"top_{name}"].value == max(one["row"])


def test_every_row_is_one_of_weights_and_the_undivided_one_its_power() -> None:
    """The derivation's formula, over all heads: what was recorded without the division is what it says."""
    for one in (one for heads in data()["layers"] for one in heads):
        divided, undivided = (np.array(one[name]["row"]) for name in ("divided", "undivided"))
        power = divided ** math.sqrt(D_K)
        assert divided.sum() == pytest.approx(1, abs=1e-5)
        np.testing.assert_allclose(undivided, power / power.sum(), atol=1e-5)

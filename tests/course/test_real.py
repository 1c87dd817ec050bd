"""The last chapter: its two records speak of the same head, in the words that the chapter uses."""

from __future__ import annotations

from levelhead.course.chapters.real import data
from levelhead.course.results import claim


def test_the_saturated_head_of_the_sentence_is_the_one_of_the_claim() -> None:
    found = claim("C11a")["details"]
    cells = {(layer, head): cell for layer, heads in enumerate(data()["layers"]) for head, cell in enumerate(heads)}
    assert [place for place, cell in cells.items() if cell["level"] == "saturated"] == [(found["layer"], found["head"])]
    assert found["offset"] == -1  # "the token just before"
    tokens, at = data()["tokens"], data()["query"]
    assert cells[found["layer"], found["head"]]["to"] == tokens[at - 1]


def test_all_pairs_of_heads_differ() -> None:
    assert set(claim("C15")["measured"]["pairs that differ"]) == {1.0}  # "which is all of them"


def test_the_head_that_is_drawn_is_in_the_table() -> None:
    layer, head = data()["first"]
    cell = data()["layers"][layer][head]
    assert cell["to"] == "dog"
    assert (cell["weight"], cell["undivided"]) == (max(data()["rows"]["divided"]), max(data()["rows"]["undivided"]))

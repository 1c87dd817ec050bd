"""Chapter 11: a sentence through a trained model, all of its heads, and then a model of the reader's own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from levelhead.course.chapter import Chapter
from levelhead.course.numbers import Number, recorded, theory
from levelhead.course.results import claim, claim_number
from levelhead.lab import recorded as records

D_K = 32  # of the model's heads
SURE = 0.99  # a weight that is almost all
MODEL, MARK = "all-MiniLM-L6-v2", "[CLS]"
_WEIGHTS = {"divided": "weight", "undivided": "unscaled_weight"}


@cache
def _sentence() -> dict[str, Any]:
    found: dict[str, Any] = records.load("sentence")
    return found


def _where() -> str:
    return f"{MODEL}, {_sentence()['about']['date']}"


def _rows() -> dict[str, list[float]]:
    """Weights of "it" in the head that is drawn, by divisor."""
    found = _sentence()
    return {name: found[key][found["token"]] for name, key in (("divided", "weights"), ("undivided", "unscaled"))}


def numbers() -> Mapping[str, Number]:
    found, rows = _sentence(), _rows()
    where = _where()
    looks, layers, heads = found["it"], found["layers"], found["heads"]
    chosen = Counter(found["tokens"][one["key"]] for one in looks)
    levels = Counter(gauge["level"] for layer in found["gauges"] for gauge in layer)
    saturated, apart = claim("C11a"), claim("C15")
    columns = np.argmax(found["weights"], axis=-1).tolist()
    weights = {name: [one[key] for one in looks] for name, key in _WEIGHTS.items()}

    def count(n: int) -> Number:
        return recorded(n, where)

    return {
        "layers": count(layers),
        "heads": count(heads),
        "all": count(layers * heads),
        "d_k": theory(D_K, "chosen"),
        "divisor": theory(math.sqrt(D_K), "√32", 3),
        "tokens": count(len(found["tokens"])),
        "to_mark": count(chosen[MARK]),
        "to_dog": count(chosen["dog"]),
        "to_ball": count(chosen["ball"]),
        "to_fast": count(chosen["fast"]),
        "layer": count(found["layer"]),
        "head": count(found["head"]),
        "top_divided": recorded(max(rows["divided"]), where, 3),  # as at its bar
        "top_undivided": recorded(max(rows["undivided"]), where),
        "left_divided": recorded(1 - sum(p * p for p in rows["divided"]), where),
        "left_undivided": recorded(1 - sum(p * p for p in rows["undivided"]), where, 1),
        **{f"ratio_{name}": recorded(_ratio(row), where, 3) for name, row in rows.items()},
        "also_dog": count(Counter(columns)[found["tokens"].index("dog")]),
        "same": count(sum(one["to"] == one["unscaled_to"] for one in looks)),
        "bound": theory(SURE, "chosen"),
        **{f"mean_{name}": recorded(sum(all) / len(all), where) for name, all in weights.items()},
        **{f"sure_{name}": count(sum(p >= SURE for p in all)) for name, all in weights.items()},
        **{f"are_{name}": count(levels[name]) for name in ("level", "sharp", "saturated")},
        "sharp_layer": claim_number("C11a", saturated["details"]["layer"]),
        "sharp_head": claim_number("C11a", saturated["details"]["head"]),
        "texts": theory(saturated["params"]["texts"], "C11a"),
        "passages": theory(saturated["params"]["texts"] - 1, "C11a"),
        "one_hot": _number("C11a", "rows near one-hot", 3),
        "before": _number("C11a", "of those at one place", 3),
        "complaints": claim_number("C11a", saturated["measured"]["complaints"]),
        "pairs": claim_number("C15", min(apart["measured"]["pairs that differ"])),
        "near": claim_number("C15", min(apart["measured"]["distance"])),
        "far": claim_number("C15", max(apart["measured"]["distance"])),
        "self": claim_number("C15", max(apart["details"]["same head, other context"])),
        "farthest": theory(math.log(2), "ln 2"),
    }


def _ratio(row: list[float]) -> float:
    """The largest weight over the second."""
    second, first = sorted(row)[-2:]
    return first / second


def _number(id: str, name: str, digits: int) -> Number:
    found = claim(id)
    return claim_number(id, found["measured"][name], digits, stderr=found["stderr"][name])


def data() -> Any:
    found = _sentence()
    return {
        "where": _where(),
        "tokens": found["tokens"],
        "special": found["special"],
        "query": found["token"],
        "first": [found["layer"], found["head"]],
        "layers": [[_head(layer, head) for head in range(found["heads"])] for layer in range(found["layers"])],
    }


def _head(layer: int, head: int) -> dict[str, Any]:
    """A head by divisor: its level on the sentence, and the weights of "it"."""
    found = _sentence()
    return {
        divisor: {
            "row": found[rows][layer][head],
            "gauge": {name: found[gauges][layer][head][name] for name in ("level", "bubble", "normalised_entropy")},
        }
        for divisor, rows, gauges in (("divided", "rows", "gauges"), ("undivided", "unscaled_rows", "unscaled_gauges"))
    }


CHAPTER = Chapter(
    "real", options=("dog", "ball", "fast", "mark"), answer="mark", claims=("C11a", "C15"), numbers=numbers, data=data
)

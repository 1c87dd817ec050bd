"""The numbers of the cards: those that their chapter shows, and a few more from its claims and formulas.

A number that a chapter shows is not made again here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from levelhead.course.chapters import CHAPTERS, attack, by_hand, rivals, root, saturation, softmax, walk
from levelhead.course.numbers import Number, recorded, theory
from levelhead.course.results import claim, claim_number, curve, measured

Numbers = Mapping[str, Number]

_SHOWN = {chapter.id: chapter.numbers for chapter in CHAPTERS}
CAPPED = (100, 120)  # two scores far above the softcap


def numbers(chapter: str) -> Numbers:
    """All that a card of this chapter can show."""
    return {**_SHOWN[chapter](), **(MORE[chapter]() if chapter in MORE else {})}


def _by_hand() -> Numbers:
    refuted, words, shown = claim("C1a"), len(by_hand.WORDS), walk.numbers()
    return {
        "scores": theory(words**2, "3²"),
        "products": theory(words**2 * by_hand.D_K, "3² · 64"),
        "compared": shown["values_compared"],
        "changed_by_v": shown["values_changed"],
        "changed_by_k": measured("C1a", "logits changed by a wider K"),
        "of_k": recorded(refuted["theory"]["logits changed by a wider K"], "C1a"),
        "widths": recorded(len(refuted["params"]["widths"]), "C1a"),
    }


def _softmax() -> Numbers:
    (first, second), *_ = softmax.ROWS
    return {"part": theory(first / (first + second), "7 / (7 + 3)")}


def _walk() -> Numbers:
    found, error = claim("C1")["details"], claim("C1")["details"]["log_error"]["normal"]
    at = found["d_k"].index(walk.D_K)
    variance = found["variance"]["normal"][at]
    return {
        "variance": theory(walk.D_K, "d_k"),
        "variance_measured": claim_number("C1", variance, 3, stderr=variance * error[at]),
        "samples": recorded(claim("C1")["params"]["samples"], "C1"),
        "slope_uniform": measured("C1", "slope", "uniform", 5),
        "slope_laplace": measured("C1", "slope", "laplace", 4),
        "a": recorded(int(claim("C3")["params"]["a"][-1]), "C3"),
    }


def _root() -> Numbers:
    keys, entropies = claim("C11")["params"]["keys"], claim("C11")["measured"]["entropy"]
    return {
        "model_law": theory(1 / math.sqrt(root.MODELS["small"].heads), "1/√8"),
        "lowest": claim_number("C11", min(entropies), 3),
        "highest": claim_number("C11", max(entropies), 3),
        "uniform": theory(math.log(keys), f"ln {keys}", 3),
    }


def _saturation() -> Numbers:
    widths = claim("C5")["params"]["d_k"]
    return {
        "top": curve("C5", "top1", saturation.D_K),
        "top_widest": curve("C5", "top1", widths[-1]),
        "top_divided": root.numbers()["level_top"],
    }


def _training() -> Numbers:
    loss = "held-out loss at equal training loss, "
    low, high = claim("C16")["details"]["intervals"][f"{loss}2048 windows of text"]
    return {
        "apart": measured("C16", f"{loss}1024 sequences"),
        "apart_text": measured("C16", f"{loss}2048 windows of text"),
        "text_low": claim_number("C16", low, 1),
        "text_high": claim_number("C16", high, 1),
    }


def _overflow() -> Numbers:
    half = claim("C8")["details"]["half of the rows overflow at d_k"]
    return {"at_half": claim_number("C8", half["float16"]), "at_bfloat": claim_number("C8", half["bfloat16"])}


def _rivals() -> Numbers:
    return {
        "variance_narrow": measured("C13", "score variance", 0),
        "variance_wide": measured("C13", "score variance", -1),
        "norm": measured("C13a", "‖v‖₁"),
    }


def _attack() -> Numbers:
    far, farther = CAPPED
    capped = [attack.CAP * math.tanh(score / attack.CAP) for score in CAPPED]
    return {
        "exponent": measured("C9a", "exponent", "1/sqrt(d_k)", 3),
        "far": theory(far, "chosen"),
        "farther": theory(farther, "chosen"),
        "gap": theory(farther - far, "120 − 100"),
        "gap_capped": theory(capped[1] - capped[0], "30 tanh(120/30) − 30 tanh(100/30)"),
        "bound": theory(math.isqrt(attack.D_K), "√64"),
    }


def _online() -> Numbers:
    return {"exponent_without": rivals.numbers()["power_plain"], "time": measured("C14", "time: 1/sqrt(d_k) over none")}


def _real() -> Numbers:
    return {"untrained": claim_number("C15", max(claim("C15")["details"]["untrained"]))}


MORE: Mapping[str, Callable[[], Numbers]] = {
    "by_hand": _by_hand,
    "softmax": _softmax,
    "walk": _walk,
    "root": _root,
    "saturation": _saturation,
    "training": _training,
    "overflow": _overflow,
    "rivals": _rivals,
    "attack": _attack,
    "online": _online,
    "real": _real,
}

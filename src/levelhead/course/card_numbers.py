"""The numbers of the cards, by chapter: those that the chapter shows, and more from its claims and formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from levelhead.course.chapters import hook, online, overflow, saturation, softmax, training
from levelhead.course.numbers import Number, recorded, theory
from levelhead.course.results import claim, claim_number, curve, measured

Numbers = Mapping[str, Number]

D_K, WIDE = 64, 1024
TOKENS, MODEL, HEADS = 3, 512, 8  # "Love Apple phones", and the first transformer
GPT_MODEL, GPT_HEADS = 12288, 96  # GPT-3
CAP, CAPPED = 30, (100, 120)  # a softcap, and two scores far above it


def _by_hand() -> Numbers:
    refuted = claim("C1a")
    return {
        "tokens": theory(TOKENS, "chosen"),
        "d": theory(MODEL, "chosen"),
        "d_k": theory(D_K, "chosen"),
        "divisor": theory(math.isqrt(D_K), "√64"),
        "scores": theory(TOKENS**2, "3²"),
        "products": theory(TOKENS**2 * D_K, "3² · 64"),
        "compared": claim_number("C1a", refuted["details"]["compared"]),
        "changed_by_v": measured("C1a", "logits changed by V"),
        "changed_by_k": measured("C1a", "logits changed by a wider K"),
        "of_k": recorded(refuted["theory"]["logits changed by a wider K"], "C1a"),
        "widths": recorded(len(refuted["params"]["widths"]), "C1a"),
    }


def _softmax() -> Numbers:
    (first, second), *_ = softmax.ROWS
    return {**softmax.numbers(), "part": theory(first / (first + second), "7 / (7 + 3)")}


def _walk() -> Numbers:
    one, error = claim("C1")["details"], claim("C1")["details"]["log_error"]["normal"]
    at = one["d_k"].index(D_K)
    variance = one["variance"]["normal"][at]
    scaled = claim("C3")
    largest = len(scaled["params"]["a"]) - 1
    return {
        "d_k": theory(D_K, "chosen"),
        "variance": theory(D_K, "d_k"),
        "variance_measured": claim_number("C1", variance, 3, stderr=variance * error[at]),
        "spread": theory(math.isqrt(D_K), "√64"),
        "samples": recorded(claim("C1")["params"]["samples"], "C1"),
        "slope": measured("C1", "slope", "normal", 4),
        "slope_uniform": measured("C1", "slope", "uniform", 5),
        "slope_laplace": measured("C1", "slope", "laplace", 4),
        "widest": recorded(claim("C1")["params"]["d_k"][-1], "C1"),
        "a": recorded(int(scaled["params"]["a"][largest]), "C3"),
        "restored": measured("C3", "Var of the scaled q·k, over a", largest, 3),
        "by_dimension": measured("C2", "factor due to", "dimension"),
        "by_size": measured("C2", "factor due to", "size"),
    }


def _root() -> Numbers:
    keys = claim("C11")["params"]["keys"]
    widths = claim("C9")["params"]["d_k"]
    entropies = claim("C11")["measured"]["entropy"]
    one, heads = GPT_MODEL // GPT_HEADS, claim("C10")["details"]["heads"]
    return {
        "d_k": theory(D_K, "chosen"),
        "d": theory(MODEL, "chosen"),
        "heads": theory(HEADS, "chosen"),
        "divisor": theory(math.isqrt(D_K), "√64"),
        "root": curve("C11", "std", D_K, 4),
        "width": curve("C9", "std", D_K, 3),
        "flatness": measured("C9", "H/ln n", widths.index(D_K)),
        "model": curve("C10", "std", HEADS),
        "model_law": theory(1 / math.sqrt(HEADS), "1/√8"),
        "gpt_d": theory(GPT_MODEL, "chosen"),
        "gpt_heads": theory(GPT_HEADS, "chosen"),
        "gpt_d_k": theory(one, "12288 / 96"),
        "gpt_root": theory(math.sqrt(one), "√128", 3),
        "gpt_model": theory(math.sqrt(GPT_MODEL), "√12288", 3),
        "gpt_spread": measured("C10", "logit std", heads.index(float(GPT_HEADS)), 3),
        "keys": recorded(keys, "C11"),
        "narrow": recorded(claim("C11")["params"]["d_k"][0], "C11"),
        "wide": recorded(claim("C11")["params"]["d_k"][-1], "C11"),
        "lowest": claim_number("C11", min(entropies), 3),
        "highest": claim_number("C11", max(entropies), 3),
        "uniform": theory(math.log(keys), f"ln {keys}", 3),
    }


def _saturation() -> Numbers:
    widths = claim("C5")["params"]["d_k"]
    more = {"top": curve("C5", "top1", D_K), "top_widest": curve("C5", "top1", widths[-1])}
    return {**saturation.numbers(), **more, "top_divided": curve("C11", "top1", D_K)}


def _training() -> Numbers:
    loss = "held-out loss at equal training loss, "
    low, high = claim("C16")["details"]["intervals"][f"{loss}2048 windows of text"]
    return {
        **training.numbers(),
        "apart": measured("C16", f"{loss}1024 sequences"),
        "apart_text": measured("C16", f"{loss}2048 windows of text"),
        "text_low": claim_number("C16", low, 1),
        "text_high": claim_number("C16", high, 1),
    }


def _overflow() -> Numbers:
    half = claim("C8")["details"]["half of the rows overflow at d_k"]
    return {
        **overflow.numbers(),
        "at_half": claim_number("C8", half["float16"]),
        "at_bfloat": claim_number("C8", half["bfloat16"]),
    }


def _rivals() -> Numbers:
    found = claim("C13")["params"]
    time, variance = "time of additive over dot product", "score variance"
    return {
        "narrow": recorded(found["d_k"][0], "C13"),
        "wide": recorded(found["d_k"][-1], "C13"),
        "variance_narrow": measured("C13", variance, 0),
        "variance_wide": measured("C13", variance, -1),
        "short": recorded(found["lengths"][0], "C13"),
        "long": recorded(found["lengths"][-1], "C13"),
        "time_short": measured("C13", time, 0),
        "time_long": measured("C13", time, -1),
        "norm": measured("C13a", "‖v‖₁"),
        "growth": recorded(claim("C13a")["params"]["growths"][-1], "C13a"),
        "top_first": measured("C13a", "top1", 0),
        "top_grown": measured("C13a", "top1", -1),
        "d_k": theory(D_K, "chosen"),
        "divisor": theory(math.isqrt(D_K), "√64"),
        "cosine": theory(1 / math.sqrt(D_K), "1/√64", 3),
    }


def _attack() -> Numbers:
    found = claim("C9a")["params"]
    at, first = found["d_k"].index(WIDE), found["d_k"].index(D_K)
    root, width = "1/sqrt(d_k)", "1/d_k"
    logits = {rule: claim("C9a")["measured"]["mean logit"][rule] for rule in (root, width)}
    capped = [CAP * math.tanh(score / CAP) for score in CAPPED]
    return {
        "rho": recorded(found["correlation"], "C9a"),
        "d_k": theory(D_K, "chosen"),
        "wide": theory(WIDE, "chosen"),
        "logit": claim_number("C9a", logits[root][first]),
        "logit_wide": claim_number("C9a", logits[root][at]),
        "exponent": measured("C9a", "exponent", root, 3),
        "muup": claim_number("C9a", logits[width][first]),
        "muup_wide": claim_number("C9a", logits[width][at]),
        "cap": theory(CAP, "chosen"),
        "score": theory(CAPPED[0], "chosen"),
        "score_above": theory(CAPPED[1], "chosen"),
        "gap": theory(CAPPED[1] - CAPPED[0], "120 − 100"),
        "gap_capped": theory(capped[1] - capped[0], "30 tanh(120/30) − 30 tanh(100/30)"),
        "bound": theory(math.isqrt(D_K), "√64"),
    }


def _online() -> Numbers:
    return {
        **online.numbers(),
        "exponent_without": measured("C14", "exponent: none", digits=4),
        "time": measured("C14", "time: 1/sqrt(d_k) over none"),
    }


def _real() -> Numbers:
    found, heads = claim("C11a"), claim("C15")
    return {
        "rows": measured("C11a", "rows near one-hot", digits=3),
        "place": measured("C11a", "of those at one place"),
        "complaints": measured("C11a", "complaints"),
        "layer": recorded(found["details"]["layer"], "C11a"),
        "head": recorded(found["details"]["head"], "C11a"),
        "nearest": claim_number("C15", min(heads["measured"]["distance"])),
        "farthest": claim_number("C15", max(heads["measured"]["distance"])),
        "most": theory(math.log(2), "ln 2"),
        "untrained": claim_number("C15", max(heads["details"]["untrained"])),
    }


NUMBERS: Mapping[str, Callable[[], Numbers]] = {
    "hook": hook.numbers,
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

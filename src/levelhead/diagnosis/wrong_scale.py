"""Compares the scale that a module used with the one it should use.

The effective scale counts, from the outputs of the projections to the logits: the place of the multiplication does not
matter then, and a scale applied twice shows. The spread of logits is not used (Xavier's initialisation alone halves
it). Each head is judged by itself. What is right is 1/√d_k, or the number that a model's configuration gives;
architectures that differ on purpose are in `shipped_scales`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from levelhead.call import scaling
from levelhead.checks import short_repr
from levelhead.diagnosis.findings import Finding, Severity, link, number, worst_heads
from levelhead.diagnosis.shipped_scales import SHIPPED
from levelhead.diagnosis.thresholds import (
    SCALE_CONFIGURED,
    SCALE_EXACT,
    SCALE_FAR,
    SCALE_INITIAL,
    SCALE_ROUNDED,
    SCALE_TOLERANCE,
)
from levelhead.errors import bad_type, bad_value
from levelhead.runs.record import Facts, Record, Run

WRONG, UNUSUAL = "wrong scale", "unusual scale"
RIGHT = "1/sqrt(d_k)"
_TIMES_ROOT, _QUARTER, _PART, _KV_HEADS = "sqrt(d_k)", "d_k^(-1/4)", "1/sqrt(part)", "1/sqrt(d/kv heads)"
_NOT_ONE_NUMBER = ("cosine", "log-n")  # they differ by row: there is no one scale to compare with

_LOOKS_LIKE = {
    "none": "no scale at all",
    "1/d_k": "1/d_k, or 1/√d_k applied twice",
    "1/sqrt(d)": "1/√d of the whole model's width d, not of one head's",
    _TIMES_ROOT: "multiplying by √d_k instead of dividing",
    _QUARTER: "1/d_k^¼, half of the scale, on q or on k and not on both",
    _PART: "1/√d of one part of a head (with or without positions), not of both together",
    _KV_HEADS: "1/√ of a width computed with the number of key/value heads, not of query heads",
}
_TOO_LARGE = (
    "Logits come out too large, so the softmax starts near one-hot: few of its weights can still move, and training "
    "is slower and rougher without failing."
)
_TOO_SMALL = (
    "Logits come out too small, so the softmax starts near uniform: every head averages until q and k have grown to "
    "make up for it."
)
_REMEDY = {
    "none": "Multiply by head_dim ** -0.5, or leave scale=None in scaled_dot_product_attention.",
    "1/d_k": "If q is scaled before the call, pass scale=1.0; scaled_dot_product_attention scales "
    'by default. If muP is meant, pass expected_scale="1/d_k".',
    "1/sqrt(d)": "Take the root of head_dim = dim // heads, not of dim.",
    _TIMES_ROOT: "Divide by head_dim ** 0.5 or multiply by head_dim ** -0.5; not both signs.",
    _QUARTER: "Multiply q and k by head_dim ** -0.25 each, or one of them by head_dim ** -0.5.",
    _PART: "Take the root of the whole width of a query: both parts together.",
    _KV_HEADS: "Take the root of head_dim = dim // heads, with the number of query heads.",
}


def checked(argument: str, given: object) -> float | str | None:
    """An expected scale: None, a number above zero or the name of a rule."""
    what = "a number above 0 or one of " + ", ".join(f'"{name}"' for name in scaling.RULES)
    if given is None or (isinstance(given, str) and given in scaling.RULES):
        return given
    if isinstance(given, str):
        raise bad_value(argument, what, repr(given), "Check the spelling")
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise bad_type(argument, what, short_repr(given), "Pass the scale itself")
    if not 0 < given < math.inf:
        raise bad_value(argument, what, given, "Pass the scale itself")
    return float(given)


def check(run: Run, wanted: float | str | None) -> Iterator[Finding]:
    """One finding per module and scale that it used on the way: branches may differ."""
    if wanted in _NOT_ONE_NUMBER:
        return
    reported = set()
    for snapshot in reversed(run.snapshots):
        for record in snapshot.records:
            for finding in _compared(record, wanted):
                if (finding.module, finding.head, finding.why) not in reported:
                    reported.add((finding.module, finding.head, finding.why))
                    yield finding


def looks_like(
    effective: float, *, heads: int, d_k: int, width: int | None = None, within: float = SCALE_TOLERANCE
) -> list[str]:
    """The rules a scale agrees with; the right one alone if it does with that."""
    right, root = 1.0 / math.sqrt(d_k), math.sqrt(d_k)
    if _same(effective, right):
        return [RIGHT]
    widths = {heads * d_k, width or heads * d_k}
    candidates = {
        "none": [1.0],
        "1/d_k": [1.0 / d_k],
        "1/sqrt(d)": [1.0 / math.sqrt(d) for d in sorted(widths)],
        _TIMES_ROOT: [root],
    }
    return [name for name, xs in candidates.items() if any(_same(effective, x, within) for x in xs)]


def _rarer(effective: float, heads: int, facts: Facts, within: float = SCALE_EXACT) -> list[str]:
    """Mistakes whose numbers are close to scales that are meant: only an exact agreement counts."""
    d_k, groups = facts.d_k, max(facts.kv_heads, 1)
    candidates = {
        _QUARTER: [d_k**-0.25],
        _PART: [1.0 / math.sqrt(width) for width in facts.head_parts],
        _KV_HEADS: [1.0 / math.sqrt(d) for d in (heads * d_k / groups, groups * d_k) if groups < heads],
    }
    return [name for name, xs in candidates.items() if any(_same(effective, x, within) for x in xs)]


def _same(a: float, b: float, within: float = SCALE_TOLERANCE) -> bool:
    return a > 0 and b > 0 and abs(math.log(a / b)) <= math.log(within)


def _by_rule(rule: str, heads: int, d_k: int) -> float:
    return float(scaling.resolve(scaling.rule(rule), heads=heads, d_k=d_k).factor[0])


def _compared(record: Record, wanted: float | str | None) -> Iterator[Finding]:
    """One finding for all heads of which the same is to be said."""
    facts = record.facts
    if facts.scale_reading != "projections" or facts.d_k <= 0 or facts.effective_scale is None:
        return
    heads = len(record.tally)
    scales = facts.effective_scales if len(facts.effective_scales) == heads else (facts.effective_scale,) * heads
    alike: dict[tuple[str, str], list[tuple[int, Finding]]] = {}
    for head, scale in enumerate(scales):
        finding = _judged(record, scale, wanted) if math.isfinite(scale) else None
        if finding is not None:
            alike.setdefault((finding.kind, finding.why), []).append((head, finding))
    for same in alike.values():
        worst = max((finding for _, finding in same), key=lambda f: abs(math.log(max(f.evidence["ratio"], 1e-30))))
        several = None if len(same) == heads else worst_heads([head for head, _ in same])
        yield replace(worst, head=several)


def _judged(record: Record, scale: float, wanted: float | str | None) -> Finding | None:
    """What is to be said of a head with this scale, and of which call."""
    found, call = _said(record, scale, wanted), record.facts.scale_call
    if found is None or not call:
        return found
    why = f"{found.why} Calls of this module have different scales; this is that of call {call} of a pass."
    return replace(found, why=why, evidence={**found.evidence, "call": float(call)})


def _said(record: Record, scale: float, wanted: float | str | None) -> Finding | None:
    facts, heads = record.facts, len(record.tally)
    right = 1.0 / math.sqrt(facts.d_k)
    like = looks_like(scale, heads=heads, d_k=facts.d_k, width=facts.model_width)
    evidence = {"effective_scale": scale, "right_scale": right, "ratio": scale / right}
    evidence |= {"d_k": float(facts.d_k), "heads": float(heads)}
    if wanted is not None:
        return _against(record, wanted, like, evidence)
    if facts.configured_scale is not None:
        return _configured(record, facts.configured_scale, like, evidence)
    ships = SHIPPED.get(facts.architecture or "")
    if ships and ships.rule is None and like != [RIGHT]:  # a run without the number
        return _finding(WRONG, "note", record, evidence, f"Not 1/√d_k, but meant: {ships.why}.", _NOTHING)
    if ships and ships.rule is not None and ships.rule in like:
        return _finding(WRONG, "note", record, evidence, f"Not 1/√d_k, but meant: {ships.why}.", _NOTHING)
    if like == [RIGHT]:
        if ships is None or ships.rule is None or _same(scale, _by_rule(ships.rule, heads, facts.d_k)):
            return None  # with one head, 1/√d is the same number
        why = f"This is 1/√d_k, but {ships.why}: its published weights need the scale {ships.rule}."
        return _finding(
            WRONG, "warning", record, evidence, why, "Use the scale that the architecture was trained with."
        )
    if facts.learned_scale:
        return _learned(record, scale, evidence)
    like = like or _rarer(scale, heads, facts)
    if not like:
        return _unusual(record, evidence)
    why = f"This looks like {', or like '.join(_LOOKS_LIKE[name] for name in like)}. "
    why += _TOO_LARGE if scale > right else _TOO_SMALL
    return _finding(WRONG, "warning", record, evidence, why, " ".join(_REMEDY[name] for name in like))


def _learned(record: Record, scale: float, evidence: dict[str, float]) -> Finding:
    """Of a scale that is a parameter: its start counts, and where training took it only if that is beyond both no
    scale at all and 1/d_k."""
    facts, heads, right = record.facts, len(record.tally), evidence["right_scale"]
    start = looks_like(scale, heads=heads, d_k=facts.d_k, width=facts.model_width, within=SCALE_INITIAL)
    start = start or _rarer(scale, heads, facts, SCALE_INITIAL)
    said = f"It is a learned parameter ({facts.learned_scale}), "
    if start:
        why = f"This looks like {', or like '.join(_LOOKS_LIKE[name] for name in start)}. {said}and starts there. "
        why += _TOO_LARGE if scale > right else _TOO_SMALL
        return _finding(WRONG, "warning", record, evidence, why, _INITIAL_ADVICE)
    if _same(evidence["ratio"], 1.0, max(math.sqrt(facts.d_k), SCALE_FAR**2)):
        return _finding(UNUSUAL, "note", record, evidence, f"{said}and training may move it.", _NOTHING)
    why = f"{said}and further from 1/√d_k than the usual mistakes are. " + (_TOO_LARGE if scale > right else _TOO_SMALL)
    return _finding(UNUSUAL, "warning", record, evidence, why, _LEARNED_ADVICE)


def _configured(record: Record, right: float, like: list[str], evidence: dict[str, float]) -> Finding | None:
    """The finding if the model's configuration gives the right scale."""
    scale, by = evidence["effective_scale"], record.facts.configured_by
    evidence = evidence | {"configured": right}
    if _same(scale, right, SCALE_CONFIGURED):
        if like == [RIGHT]:
            return None
        return _finding(WRONG, "note", record, evidence, f"Not 1/√d_k, but meant: {by}.", _NOTHING)
    named = [name for name in like if name != RIGHT]
    looks = f" It looks like {', or like '.join(_LOOKS_LIKE[name] for name in named)}." if named else ""
    why = f"The configuration gives {number(right)} ({by}), and {number(scale)} is in force.{looks}"
    return _finding(WRONG, "warning", record, evidence, why, _CONFIGURED_ADVICE)


def _unusual(record: Record, evidence: dict[str, float]) -> Finding:
    """A number that no rule explains."""
    ratio = evidence["ratio"]
    if _same(ratio, 1.0, SCALE_FAR / SCALE_ROUNDED):  # a factor of exactly 2 is measured as a little less, too
        return _finding(UNUSUAL, "note", record, evidence, _UNUSUAL_WHY, _UNUSUAL_ADVICE)
    if ratio <= 0:
        times = "zero or negative"
    else:
        times = f"{number(ratio)} times 1/√d_k" if ratio > 1 else f"1/√d_k divided by {number(1 / ratio)}"
    why = f"The scale is {times}, and no rule gives this number: a temperature, or a second factor. "
    why += _TOO_LARGE if ratio > 1 else _TOO_SMALL
    return _finding(UNUSUAL, "warning", record, evidence, why, _UNUSUAL_ADVICE)


_CONFIGURED_ADVICE = (
    "Look for the factor that is missing or applied twice, or correct the configuration; "
    "pass expected_scale if the model is meant to differ from it."
)
_INITIAL_ADVICE = "Initialise it so that the scale is head_dim ** -0.5 at the start."
_LEARNED_ADVICE = "Bound it, for example by a clamp, or leave it out of weight decay; look at its learning rate."
_NOTHING = "Nothing, unless this surprises you."
_UNUSUAL_WHY = (
    "The scale is not 1/√d_k, nor any mistake known by its number. Long-context variants do this "
    "on purpose: YaRN multiplies q and k by 0.1 ln(s) + 1 each, others by a temperature."
)
_UNUSUAL_ADVICE = "If it is meant, pass it as expected_scale; if not, look for a second factor."


def _against(record: Record, wanted: float | str, like: list[str], evidence: dict[str, float]) -> Finding | None:
    """The finding if the user has passed the right scale."""
    heads, d_k = len(record.tally), record.facts.d_k
    wished = wanted
    if isinstance(wished, str):
        wished = _by_rule(wished, heads, d_k)
    agrees = _same(evidence["effective_scale"], wished)
    evidence = evidence | {"expected": wished}
    if not agrees and wanted not in like:  # for 1/√d, any of the widths will do
        why = "The scale is not the one that expected_scale says is right."
        advice = "Look for a scale that is applied twice or not at all, or correct expected_scale."
        return _finding(WRONG, "warning", record, evidence, why, advice)
    if like == [RIGHT]:
        return None
    why = "Not 1/√d_k, but meant: it is the scale that expected_scale says is right."
    return _finding(WRONG, "note", record, evidence, why, _NOTHING)


def _finding(
    kind: str, severity: Severity, record: Record, evidence: dict[str, float], why: str, advice: str
) -> Finding:
    return Finding(kind, severity, record.module, None, evidence, why, advice, link(kind))

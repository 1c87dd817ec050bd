"""Compares the scale that a module used with the one it should use.

The effective scale counts, from the outputs of the projections to the logits: the place of the multiplication does not
matter then, and a scale applied twice shows. The spread of logits is not used (Xavier's initialisation alone halves
it). Architectures that differ on purpose are in `shipped_scales`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from levelhead.call import scaling
from levelhead.checks import told
from levelhead.diagnosis.findings import Finding, Severity, link
from levelhead.diagnosis.shipped_scales import SHIPPED
from levelhead.diagnosis.thresholds import SCALE_TOLERANCE
from levelhead.errors import bad_type, bad_value
from levelhead.runs.record import Record, Run

WRONG, UNUSUAL = "wrong scale", "unusual scale"
RIGHT = "1/sqrt(d_k)"
_TIMES_ROOT = "sqrt(d_k)"
_NOT_ONE_NUMBER = ("cosine", "log-n")  # they differ by row: there is no one scale to compare with

_LOOKS_LIKE = {
    "none": "no scale at all",
    "1/d_k": "1/d_k, or 1/√d_k applied twice",
    "1/sqrt(d)": "1/√d of the whole model's width d, not of one head's",
    _TIMES_ROOT: "multiplying by √d_k instead of dividing",
}
_TOO_LARGE = (
    "Logits come out too large, so the softmax starts near one-hot: values still learn, q and k hardly do, and "
    "training is slower and rougher without failing."
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
}


def checked(argument: str, given: object) -> float | str | None:
    """An expected scale: None, a number above zero or the name of a rule."""
    what = "a number above 0 or one of " + ", ".join(f'"{name}"' for name in scaling.RULES)
    if given is None or (isinstance(given, str) and given in scaling.RULES):
        return given
    if isinstance(given, str):
        raise bad_value(argument, what, repr(given), "Check the spelling")
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise bad_type(argument, what, told(given), "Pass the scale itself")
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
            finding = _compared(record, wanted)
            if finding and (finding.module, finding.why) not in reported:
                reported.add((finding.module, finding.why))
                yield finding


def looks_like(effective: float, *, heads: int, d_k: int, width: int | None = None) -> list[str]:
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
    return [name for name, xs in candidates.items() if any(_same(effective, x) for x in xs)]


def _same(a: float, b: float) -> bool:
    return a > 0 and b > 0 and abs(math.log(a / b)) <= math.log(SCALE_TOLERANCE)


def _compared(record: Record, wanted: float | str | None) -> Finding | None:
    facts, scale = record.facts, record.facts.effective_scale
    known = facts.scale_reading == "projections" and facts.d_k > 0
    if not known or scale is None or not math.isfinite(scale):
        return None
    heads = len(record.tally)
    right = 1.0 / math.sqrt(facts.d_k)
    like = looks_like(scale, heads=heads, d_k=facts.d_k, width=facts.model_width)
    evidence = {"effective_scale": scale, "right_scale": right, "ratio": scale / right}
    evidence |= {"d_k": float(facts.d_k), "heads": float(heads)}
    if wanted is not None:
        return _against(record, wanted, like, evidence)
    if like == [RIGHT]:
        return None
    ships = SHIPPED.get(facts.architecture or "")
    if ships and (ships.rule is None or ships.rule in like):
        return _finding(WRONG, "note", record, evidence, f"Not 1/√d_k, but meant: {ships.why}.", _NOTHING)
    if not like:
        return _finding(UNUSUAL, "note", record, evidence, _UNUSUAL_WHY, _UNUSUAL_ADVICE)
    why = f"This looks like {', or like '.join(_LOOKS_LIKE[name] for name in like)}. "
    why += _TOO_LARGE if scale > right else _TOO_SMALL
    return _finding(WRONG, "warning", record, evidence, why, " ".join(_REMEDY[name] for name in like))


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
        wished = float(scaling.resolve(scaling.rule(wished), heads=heads, d_k=d_k).factor[0])
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

"""What the options of a call do to its scores, in a few words."""

from __future__ import annotations

import math

from levelhead.call.options import CHANGES, KINDS, NUMBER, Scoring


def scale_words(scoring: Scoring, head: int, d_k: int) -> str:
    """What the scale does to the scores of a head: "÷ √64"."""
    factor = float(scoring.scale[head])
    if scoring.cosine:
        return f"as cosines, × {factor:.4g}"
    after = " × ln n, n the keys a row sees" if scoring.log_n else ""
    if factor == 1:
        return "as they are" + after
    divisors = {f"÷ √{d_k}": math.sqrt(d_k), f"÷ {d_k}": d_k}
    # A model's float32 scale is 1/√d_k to seven digits only.
    matching = (words for words, divisor in divisors.items() if math.isclose(factor * divisor, 1, rel_tol=1e-6))
    return next(matching, f"× {factor:.4g}") + after


def changes(scoring: Scoring) -> tuple[str, ...]:
    """What happens to a logit between scale and softmax: "causal", "sinks"; a number's name with its value."""
    names = [name for name, (applies, _) in CHANGES.items() if applies(scoring)]
    return tuple(f"{name} {getattr(scoring, name)}" if KINDS.get(name) == NUMBER else name for name in names)


def meaning(change: str) -> str:
    """A change in a few more words."""
    return CHANGES[change.split()[0]][1]

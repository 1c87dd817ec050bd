"""What the options of a call do to its scores, in a few words."""

from __future__ import annotations

import math
from collections.abc import Callable

from levelhead.call.options import Scoring


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


def _binary(scored: Scoring) -> bool:
    return scored.mask is not None and scored.mask.dtype == bool


# Each change of a logit between scale and softmax, in order: whether a call has it, and its meaning.
_CHANGES: dict[str, tuple[Callable[[Scoring], bool], str]] = {
    "softcap": (lambda s: s.softcap is not None, "c · tanh(s / c) bounds them"),
    "bias": (lambda s: s.mask is not None and not _binary(s), "a bias is added"),
    "ALiBi": (lambda s: s.alibi is not None, "a slope times the distance is subtracted"),
    "mask": (_binary, "masked keys are hidden"),
    "causal": (lambda s: s.causal, "later keys are hidden"),
    "window": (lambda s: s.left is not None or s.right is not None, "keys outside the window are hidden"),
    "lengths": (lambda s: s.key_lengths is not None, "keys beyond the length are hidden"),
    "queries": (lambda s: s.query_lengths is not None, "queries beyond the length see nothing"),
    "segments": (lambda s: s.key_segments is not None, "keys of other segments are hidden"),
    "sinks": (lambda s: s.sinks is not None, "a sink will join the softmax"),
}


def changes(scored: Scoring) -> tuple[str, ...]:
    """What happens to a logit between scale and softmax: "softcap 30.0", "causal"."""
    names = [name for name, (applies, _) in _CHANGES.items() if applies(scored)]
    return tuple(f"softcap {scored.softcap}" if name == "softcap" else name for name in names)


def meaning(change: str) -> str:
    """A change in a few more words."""
    return _CHANGES[change.split()[0]][1]

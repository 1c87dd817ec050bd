"""What the options of a call do to its scores, in a few words."""

from __future__ import annotations

import math

from levelhead.call.scaling import Scale
from levelhead.call.scoring import Scoring

__all__ = ["changes", "meaning", "scale_words"]


def scale_words(scale: Scale, head: int, d_k: int) -> str:
    """What the scale does to the scores of a head: "÷ √64"."""
    factor = float(scale.factor[head])
    if scale.cosine:
        return f"as cosines, × {factor:.4g}"
    after = " × ln n, n the keys a row sees" if scale.log_n else ""
    if factor == 1:
        return "as they are" + after
    known = {f"÷ √{d_k}": math.sqrt(d_k), f"÷ {d_k}": d_k}
    # A float32 scale of a model is 1/√d_k to seven digits.
    same = (words for words, by in known.items() if math.isclose(factor * by, 1, rel_tol=1e-6))
    return next(same, f"× {factor:.4g}") + after


def changes(scored: Scoring) -> tuple[str, ...]:
    """What happens to a logit between scale and softmax, in the order in which it does."""
    hides = scored.mask is not None and scored.mask.dtype == bool
    said = {
        f"softcap {scored.softcap}": scored.softcap is not None,
        "bias": scored.mask is not None and not hides,
        "ALiBi": scored.alibi is not None,
        "mask": hides,
        "causal": scored.causal,
        "window": scored.left is not None or scored.right is not None,
        "lengths": scored.key_lengths is not None,
        "segments": scored.key_segments is not None,
        "sinks": scored.sinks is not None,
    }
    return tuple(words for words, so in said.items() if so)


_MEANINGS = {
    "softcap": "c · tanh(s / c) bounds them",
    "bias": "a bias is added",
    "ALiBi": "a slope times the distance is subtracted",
    "mask": "masked keys are hidden",
    "causal": "later keys are hidden",
    "window": "keys outside the window are hidden",
    "lengths": "keys beyond the length are hidden",
    "segments": "keys of other segments are hidden",
    "sinks": "a sink will join the softmax",
}


def meaning(change: str) -> str:
    """A change in a few more words."""
    return _MEANINGS[change.split()[0]]

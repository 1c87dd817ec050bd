"""Attention step by step, for people: `explain` takes arrays, `explain_text` a sentence.

Every number comes from the core; every step is kept, which the fused kernel never does. It is for
a few hundred tokens at most, to be read: `levelhead.observe` sums up long sequences.
"""

from __future__ import annotations

from levelhead.explanation.arrays import Explanation, explain
from levelhead.explanation.text import TextExplanation, explain_text

__all__ = ["Explanation", "TextExplanation", "explain", "explain_text"]

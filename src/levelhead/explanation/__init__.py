"""Attention step by step, for readers: `explain` takes arrays, `explain_text` a sentence.

Every number comes from the core. Unlike the fused kernel, it keeps every step, so it is limited to a few hundred
tokens; `levelhead.observe` summarises long sequences.
"""

from __future__ import annotations

from levelhead.explanation.arrays import Explanation, explain
from levelhead.explanation.text import TextExplanation, explain_text

__all__ = ["Explanation", "TextExplanation", "explain", "explain_text"]

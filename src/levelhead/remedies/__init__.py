"""Remedies: what brings attention back to level, and proves that it does.

`qk_norm`, `softcap` and `rescale` hold until they are undone; `QKClip` is called after each step of the optimiser. Each
has `verify(batch)`, which looks at what reaches the softmax.
"""

from __future__ import annotations

from levelhead.extras import command, missing

if _error := missing("levelhead.remedies", "torch", install=command("watch")):
    raise _error

from levelhead.remedies.clip import QKClip
from levelhead.remedies.clipped import Clipped
from levelhead.remedies.logits import rescale, softcap
from levelhead.remedies.norm import qk_norm
from levelhead.remedies.remedy import NotInForceError, Verified

__all__ = ["Clipped", "NotInForceError", "QKClip", "Verified", "qk_norm", "rescale", "softcap"]

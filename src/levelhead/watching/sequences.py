"""Whether a call's queries and keys are of one sequence, where there are as many of both.

Then a key that is padding says that the query at its place is padding, too. Two sequences of one length must not be
taken for one: real queries would be left out. What the projections of queries and keys read tells; where that was not
seen (compiled graphs, one layer for both) the module's name does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from levelhead.watching.effective_scale import Ran, role
from levelhead.watching.module_stack import Frame

# Names of modules whose keys come from another sequence, in transformers, diffusers and torch.
_CROSS = ("cross", "encdec", "encoder_attn", "enc_attn", "attn2", "multihead_attn")


def crossed(frame: Frame, fed: Sequence[Ran]) -> bool:
    """Whether keys come from another sequence; `fed`: what ran before the call."""
    name = frame.watched.name.lower()
    if any(word in part for part in name.split(".") for word in _CROSS):
        return True
    q, k = (next((one for one in reversed(fed) if letter in (role(one.name) or "")), None) for letter in "qk")
    if q is None and len(frame.inputs) > 1 and isinstance(frame.watched.module, nn.MultiheadAttention):
        q, k = frame.inputs[:2]
    return q is not None and k is not None and _differ(q.read, k.read)


def _differ(a: Tensor | int | None, b: Tensor | int | None) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return not torch.equal(a.nan_to_num(), b.nan_to_num())
    return isinstance(a, int) and isinstance(b, int) and a != b


def appended(module: nn.Module) -> int:
    """How many keys a module adds behind those of its input."""
    if not isinstance(module, nn.MultiheadAttention):
        return 0
    return int(module.bias_k is not None) + int(module.add_zero_attn)

"""The rule by which an additive mask hides a key."""

from __future__ import annotations

import torch
from torch import Tensor


def hides(mask: Tensor) -> Tensor:
    """Where an additive mask hides a key. Models write the lowest number of a type instead of -inf, and masks are made
    in one type, added up and cast to another: half of the lowest number hides, too."""
    return mask <= torch.finfo(mask.dtype).min / 2

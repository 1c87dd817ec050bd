"""The rule by which a mask of numbers hides a key."""

from __future__ import annotations

import torch

__all__ = ["hides_to"]


def hides_to(dtype: torch.dtype) -> float:
    """The number up to which a mask's entries hide their key. Models write the lowest number of a type instead of −inf;
    half of it counts too, because masks are made in one dtype, added up and cast to another."""
    return torch.finfo(dtype).min / 2

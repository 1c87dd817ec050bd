"""Whether a call's queries and keys are of one sequence, where there are as many of both.

Then a key that is padding says that the query at its place is padding, too. Two sequences of one length must not be
taken for one: real queries would be left out. Nor one for two: padding would count. The module's name tells; else what
the projections of queries and keys read. That is one sequence where it goes back, through the layers that ran (norms
of their own, MLA's narrow projections), to one tensor, or where it is alike token by token (positions or dropout on one
side). Where what they read was not seen (compiled graphs), or differs in width, it is taken for one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from levelhead.watching.effective_scale import Ran, Read, is_by_definition, role
from levelhead.watching.module_stack import Frame

# Names of modules whose keys come from another sequence, in transformers, diffusers and torch.
_CROSS = ("cross", "encdec", "encoder_attn", "enc_attn", "attn2", "multihead_attn")
# Cosine of the angle between tokens at the same place, the middle token taken off: 1/√2 for x and x + positions of the
# same size, 1/2 for different tokens with the same positions.
_ALIKE = 0.6
_LAYERS = 8  # one after another, between a sequence and its queries


def crossed(frame: Frame, fed: Sequence[Ran]) -> bool | Tensor:
    """Whether keys come from another sequence; `fed`: what ran before the call. A tensor on a device, which the host
    does not wait for."""
    name, module = frame.watched.name.lower(), frame.watched.module
    if any(word in part for part in name.split(".") for word in _CROSS):
        return True
    places = (len(fed), len(fed))
    q, k = frame.given or (None, None)
    if frame.given is None and not is_by_definition(module):
        places = _last("q", fed), _last("k", fed)
        q, k = (None if n < 0 else fed[n].read for n in places)
    if q is None or k is None or (q.tensor() is k.tensor() is not None):
        return False
    if _origins(q, places[0], fed) & _origins(k, places[1], fed):
        return False
    if q.rows is None or k.rows is None or q.rows.shape[1] != k.rows.shape[1] or q.rows.device != k.rows.device:
        return False
    if q.rows.device.type == "cpu":
        return not torch.equal(q.rows, k.rows) and bool(_apart(q.rows, k.rows))
    return _apart(q.rows, k.rows)


def _last(letter: str, fed: Sequence[Ran]) -> int:
    """Which layer that ran is the projection of queries or keys; -1: none."""
    return next((n for n in reversed(range(len(fed))) if letter in (role(fed[n].name) or "")), -1)


def _origins(read: Read, place: int, fed: Sequence[Ran]) -> set[int]:
    """The tensor that was read at a place, and what the layers that computed it read; by `id`, those that still live:
    others may have left their memory to the next."""
    found = set()
    for _ in range(_LAYERS):
        tensor = read.tensor()
        found |= set() if tensor is None else {id(tensor)}
        wrote = (n for n in reversed(range(place)) if fed[n].wrote[0] <= read.at < fed[n].wrote[1])
        place = next(wrote, -1)
        before = None if place < 0 else fed[place].read
        if before is None:
            break
        read = before
    return found


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """Whether rows at the same place are no more alike than others; tokens that are all the same say nothing."""
    a, b = (x.float().nan_to_num() for x in (a, b))
    a, b = (x - x.median(0).values for x in (a, b))
    cosines = (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()
    return cosines.nanmedian() < _ALIKE


def appended(module: torch.nn.Module) -> int:
    """How many keys a module adds behind those of its input."""
    if not isinstance(module, torch.nn.MultiheadAttention):
        return 0
    return int(module.bias_k is not None) + int(module.add_zero_attn)

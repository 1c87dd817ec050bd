"""Whether a call's queries and keys are of one sequence, where there are as many of both.

Then a key that is padding says that the query at its place is padding, too. Two sequences of one length must not be
taken for one: real queries would be left out. Nor one for two: padding would count. The module's name tells; else what
the projections of queries and keys read. That is one sequence where it goes back, through the layers that ran (norms
of their own, MLA's narrow projections, copies in a cache), to one tensor, or where it is alike token by token
(positions or dropout on one side). Tensors behind narrow projections have bases of their own: of these, what the
projections read is compared. Where what they read was not seen (compiled graphs), it is taken for one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from levelhead.watching import sampled, sliding_caches
from levelhead.watching.effective_scale import Ran, Read, is_by_definition, role
from levelhead.watching.measure import Call, may_be_padded
from levelhead.watching.module_stack import Frame

# Names of modules whose keys come from another sequence, in transformers, diffusers and torch.
_CROSS = ("cross", "encdec", "encoder_attn", "enc_attn", "attn2", "multihead_attn")
# Cosine of the angle between tokens at the same place, the middle token taken off: 1/√2 for x and x + positions of the
# same size, 1/2 for different tokens with the same positions.
_ALIKE = 0.6
_LAYERS = 8  # one after another, between a sequence and its queries
NOT_KNOWN = (
    "whether queries and keys are of one sequence is not known: taken for one, the query at the place of a key that is "
    "hidden from all does not count"
)


def placed(frame: Frame, call: Call, fed: Sequence[Ran]) -> Call:
    """A call with what is known of its sequences; `fed`: what ran before it."""
    found = call.crossed or crossed(frame, fed)
    call = replace(
        call, crossed=False if found is None else found, appended=call.appended or appended(frame.watched.module)
    )
    if found is None and may_be_padded(call):
        frame.watched.not_observed[NOT_KNOWN] = None
    if call.crossed is True:
        return call
    gone = sliding_caches.gone(frame, call.q.shape[2], call.k.shape[2])
    if gone is None:
        frame.watched.not_observed[sliding_caches.NOT_KNOWN] = None
    return replace(call, gone=gone or 0)


def crossed(frame: Frame, fed: Sequence[Ran]) -> bool | Tensor | None:
    """Whether keys come from another sequence; None: not known. `fed`: what ran before the call. A tensor on a device,
    which the host does not wait for."""
    name, module = frame.watched.name.lower(), frame.watched.module
    if any(word in part for part in name.split(".") for word in _CROSS):
        return True
    places = (len(fed), len(fed))
    q, k = frame.given or (None, None)
    if frame.given is None and not is_by_definition(module):
        places = _last("q", fed), _last("k", fed)
        q, k = (None if n < 0 else fed[n].read for n in places)
    if q is None or k is None or (q.tensor() is k.tensor() is not None) or q.rows is None or k.rows is None:
        return False
    of_q, of_k = (_steps(read, place, fed) for read, place in zip((q, k), places, strict=True))
    same: Tensor | None = None  # they are one sequence if this is true
    for one, other in _common(of_q, of_k):
        given = [x for x in (one.given, other.given) if x is not None]
        if not given:
            return False
        both = torch.stack(given).all()
        same = both if same is None else same | both
    a: Tensor | None = q.rows
    b: Tensor | None = k.rows
    if any(step.narrowed for step in (*of_q, *of_k)):  # else both are in one basis, if they are of one width
        a, b = _rows(_widest(of_q)), _rows(_widest(of_k))
    found: Tensor | None = None
    if a is not None and b is not None and a.shape[1] == b.shape[1] and a.device == b.device:
        found = _apart(a, b)
    if found is None or _may_be_latents(frame, (of_q, of_k), fed):
        return None if same is None else False
    if found.device.type == "cpu":
        return not torch.equal(q.rows, k.rows) and bool(found)
    return found if same is None else found & ~same


def _last(letter: str, fed: Sequence[Ran]) -> int:
    """Which layer that ran is the projection of queries or keys; -1: none."""
    return next((n for n in reversed(range(len(fed))) if letter in (role(fed[n].name) or "")), -1)


class _Step(NamedTuple):
    """What a layer read, on the way from a projection back to its sequence."""

    read: Read
    place: int  # of the layer
    given: Tensor | None = None  # only if this is true, on a device; None: for certain
    narrowed: bool = False  # behind it, a projection put out fewer columns than it read


def _steps(read: Read, place: int, fed: Sequence[Ran]) -> list[_Step]:
    steps = [_Step(read, place)]
    for step in steps:
        if len(steps) > _LAYERS:
            break
        for n, given in _wrote(step, fed):
            before = fed[n].read
            if before is not None:
                narrowed = step.narrowed or _narrows(fed[n])
                steps.append(_Step(before, n, given if step.given is None else step.given, narrowed))
    return steps


def _wrote(step: _Step, fed: Sequence[Ran]) -> Iterator[tuple[int, Tensor | None]]:
    """The layer that put out what was read there: the same numbers, as a cache copies them, or the same memory."""
    before, read = range(step.place - 1, -1, -1), step.read.rows
    if read is not None and step.given is None:
        width = read.shape[1]
        for n in before:
            rows = fed[n].rows
            if rows.device != read.device or rows.dtype != read.dtype or rows.shape[1] < width:
                continue
            copied = torch.stack([(part == read).all() for part in (rows[:, :width], rows[:, -width:])]).any()
            if read.device.type != "cpu":
                yield n, copied
            elif copied:
                yield n, None
                return
    last = next((n for n in before if fed[n].wrote[0] <= step.read.at < fed[n].wrote[1]), None)
    if last is not None:
        yield last, None


def _narrows(layer: Ran) -> bool:
    return not layer.norm and layer.reads is not None and layer.rows.shape[1] < layer.reads


def _common(a: Sequence[_Step], b: Sequence[_Step]) -> Iterator[tuple[_Step, _Step]]:
    """Steps of both that read the same tensor, of those that still live: others may have left their memory to the
    next."""
    for one in a:
        tensor = one.read.tensor()
        yield from ((one, other) for other in b if tensor is not None and other.read.tensor() is tensor)


def _widest(steps: Sequence[_Step]) -> _Step:
    """The first behind a narrow projection, if there is one."""
    certain = [step for step in steps if step.given is None]
    return next((step for step in certain if step.narrowed == certain[-1].narrowed), certain[0])


def _rows(step: _Step) -> Tensor | None:
    tensor = step.read.tensor() if step.read.rows is None else None
    return step.read.rows if tensor is None else sampled.rows(tensor)


def _may_be_latents(frame: Frame, ways: Sequence[Sequence[_Step]], fed: Sequence[Ran]) -> bool:
    """Whether queries and keys may both be computed from one tensor by narrow projections, with operators in between
    that were not seen."""
    if any(len(steps) > 1 for steps in ways):
        return False
    possible, own = [], {id(one) for one in frame.ran}
    for (step,) in ways:
        rows = step.read.rows
        width = 0 if rows is None else rows.shape[1]
        narrow = (one for one in fed[: step.place] if id(one) in own and role(one.name) is None and _narrows(one))
        tensors = (one.read.tensor() for one in narrow if one.read is not None and one.rows.shape[1] >= width)
        possible.append([tensor for tensor in tensors if tensor is not None])
    return all(possible) and all(_may_be_one(a, b) for a in possible[0] for b in possible[1])


def _may_be_one(a: Tensor, b: Tensor) -> bool:
    if a is b or a.device.type != "cpu" or a.device != b.device or a.shape[-1] != b.shape[-1]:
        return True
    return not bool(_apart(sampled.rows(a), sampled.rows(b)))


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

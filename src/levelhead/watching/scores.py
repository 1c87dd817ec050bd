"""Scores on their way from a product of queries and keys to its softmax: what each operator does with them.

Views move their axes, multiplications change their factor, masks hide entries: constants that were filled in are
remembered exactly. An operator without a rule here leaves scores whose axes and factor are no longer known. Nothing is
measured here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from levelhead.torch.masks import hides
from levelhead.watching import merged_axes, score_axes
from levelhead.watching.merged_axes import Merged
from levelhead.watching.score_axes import Origin

Factor: TypeAlias = float | Tensor | None  # None: not one number; a tensor is read when the step is

# Operators without a rule that scores may pass; after more of them, a softmax is hardly theirs.
_UNKNOWN_OPERATORS = 6
# A constant filled in below the largest visible logit by this much has a weight under 2^-24: it hides.
_HIDDEN_BELOW = 24 * math.log(2)

# exp(-88) is below the smallest normal float32.
_NO_WEIGHT = 88.0


@dataclass(frozen=True)
class Scores:
    """Scores that are `factor` times left · right, and what was added or hidden since."""

    left: Tensor  # (N, T, D)
    right: Tensor  # (N, D, S)
    factor: Factor
    axes: Tensor | None  # the stand-in of `score_axes`; None: an operator without a rule came
    hidden: Tensor | None = None  # where a mask hides, in the shape of the scores
    filled: Tensor | None = None  # where a constant was filled in, or a mask of constants added
    capped: bool = False
    softcap: float | None = None
    before: Tensor | None = None  # the scores before their largest was subtracted
    shift: Tensor | None = None  # what was subtracted: their largest, their mean …, which no softmax notices
    log_over: int | None = None  # these are logarithms of weights, over this axis
    sink: Sink | None = None
    unknown: int = 0  # operators without a rule so far
    last: Origin | None = None  # of the last axis, where `axes` is None
    activated: bool = False  # went through a ReLU or a power
    merged: tuple[Merged, ...] = ()  # where `axes` is None: axes with keys of several queries
    was: Tensor | None = None  # where `axes` is None: the last that were known
    moved: bool = False  # since `was`, axes were joined, divided, added or removed
    learned: Origin | None = None  # the factor, if it is one, that is computed from parameters alone

    def alike(self, other: Scores) -> bool:
        """Whether both have factors of the same shape, the same axes and the same cap."""
        a, b = self.axes, other.axes
        if a is None or b is None or self.sink is not None or other.sink is not None:
            return False
        if self.shift is not None or other.shift is not None:
            return False
        known = a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset() == 0
        same = self.left.shape == other.left.shape and self.right.shape == other.right.shape
        return known and same and self.softcap == other.softcap

    def is_of_product(self, other: Scores) -> bool:
        """Whether both are of the same product, under the same cap."""
        return self.left is other.left and self.right is other.right and self.softcap == other.softcap

    def facts(self, hidden: Tensor | None) -> dict[str, Any]:
        """What a record says of logits of which `hidden` are hidden; None: nothing."""
        return {"softcap": self.softcap, "masked": hidden is not None or None}

    def hides(self, scores: Tensor, keys: int) -> Tensor | None:
        """Which entries are hidden: masks say so, or a constant stands for -inf."""
        hidden = self.hidden
        if self.filled is None:
            return hidden
        shut = self.filled if hidden is None else self.filled | hidden
        top = scores.masked_fill(shut, -math.inf).amax(keys, keepdim=True).clamp(min=0.0)
        low = self.filled & (scores < top - _HIDDEN_BELOW)
        return low if hidden is None else low | hidden

    def lost(self, last: Origin | None = None, *, moved: bool = True) -> Scores | None:
        """After an operator without a rule; `last`: the origin of the last axis, if that is known; `moved`: axes may be
        others than before."""
        if self.unknown >= _UNKNOWN_OPERATORS or self.shift is not None:  # a shift could not be undone any more
            return None
        nothing: dict[str, Any] = dict.fromkeys(("factor", "axes", "hidden", "filled", "before", "log_over", "sink"))
        was = self.was if self.axes is None else self.axes
        kept = replace(self, **nothing, unknown=self.unknown + 1, last=last, activated=False)
        return replace(kept, was=was, moved=moved or self.moved)

    def unshifted(self, x: Tensor, axis: int) -> Tensor:
        """The scores x before what is constant along `axis`, that of the softmax, was subtracted from them."""
        return self.source(x) if self.shift_is_constant(x.dim(), axis) else x

    def source(self, x: Tensor) -> Tensor:
        """The scores x before anything was subtracted from them."""
        if self.shift is None or self.before is not None:
            return x if self.before is None else self.before
        return x.detach().to(torch.promote_types(x.dtype, torch.float32)) + self.shift

    def shift_is_constant(self, dims: int, axis: int) -> bool:
        """Whether what was subtracted is the same along this axis of the scores."""
        own = -1 if self.shift is None else axis - dims + self.shift.dim()
        return self.shift is None or own < 0 or self.shift.shape[own] == 1 or self.shift.stride(own) == 0

    def origin(self, axis: int) -> Origin | None:
        """Where an axis comes from; None: not known, or from nowhere."""
        if self.axes is None:
            return self.last if axis == -1 else None
        return score_axes.origin(self.axes, axis)


@dataclass(frozen=True)
class Sink:
    """A column that was put beside the scores of the keys."""

    axis: int
    first: int  # where the keys begin
    keys: int
    column: Tensor  # one entry along `axis`


def product(left: Tensor, right: Tensor, factor: float, shape: torch.Size, learned: Origin | None) -> Scores:
    """Scores fresh from their product, (N, T, D) · (N, D, S), or one with fewer dimensions."""
    vector = right.dim() == 1
    a = left.detach() if left.dim() == 3 else left.detach()[None]
    b = right.detach()
    b = b[None, :, None] if vector else b if b.dim() == 3 else b[None]
    axes = score_axes.stand_in(a.shape[0], a.shape[1], b.shape[2])
    axes = None if axes is None else axes.view(shape) if not vector else axes[0, :, 0]
    return Scores(a, b, factor, axes, learned=learned)


# ---- rules


# Other shapes of the same entries.
_VIEW_NAMES = (
    "view _unsafe_view reshape _reshape_alias expand permute transpose unsqueeze squeeze select t slice alias detach "
    "split split_with_sizes unbind unsafe_split unsafe_chunk view_copy permute_copy"
)
VIEWS = set(_VIEW_NAMES.split())
# The same entries, or others in their place.
_SAME_NAMES = (
    "clone _to_copy contiguous lift_fresh copy_ nan_to_num nan_to_num_ clamp clamp_ clamp_min clamp_max clamp_min_ "
    "clamp_max_ maximum minimum native_dropout bernoulli_ relu relu_ threshold"
)
SAME = set(_SAME_NAMES.split())
_KEEPS_LAST = {
    "view",
    "_unsafe_view",
    "reshape",
    "_reshape_alias",
    "expand",
    "unsqueeze",
    "alias",
    "detach",
    "view_copy",
}
MOVING = {"roll", "flip"}  # the same entries in other places
_ACTIVATING = {"relu", "relu_", "clamp_min", "threshold", "pow", "square", "gelu", "silu", "softplus", "elu"}
ADDING = {"add": 1, "add_": 1, "sub": -1, "sub_": -1, "rsub": -1}
SCALING = {"mul": False, "mul_": False, "div": True, "div_": True}  # and whether it divides
FILLING = {"masked_fill", "masked_fill_", "where", "index_put_", "index_put"}


def after(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], known: list[Any], out: Any) -> Any:
    """The scores in `out`, as `Scores`, a list of them, or None; `known`: those among the arguments, None elsewhere."""
    place = _main(known)
    scores: Scores = known[place]
    if name in VIEWS:
        return _viewed(func, name, args, kwargs, scores, out)
    if isinstance(out, list | tuple):  # such as topk
        return [_as_it_is(scores, x) if isinstance(x, Tensor) and x.is_floating_point() else None for x in out]
    if not isinstance(out, Tensor) or not out.is_floating_point():
        return None
    if name == "copy_" and place == 0:  # overwritten
        return None
    if name in MOVING:
        return _moved(func, args, kwargs, scores)
    if name in SAME:
        new = _broadcast(scores, out.shape)
        return replace(new, activated=True) if new is not None and name in _ACTIVATING else new
    if name in _ACTIVATING and scores.axes is not None and scores.axes.shape == out.shape:
        return replace(scores, factor=None, before=None, shift=None, log_over=None, activated=True)
    if name in ADDING:
        return _added(name, args, kwargs, scores, place, out)
    if name in SCALING:
        return _scaled(name, args, scores, place, out)
    if name in FILLING:
        return _filled(name, args, scores, place, out)
    if name in ("tanh", "tanh_"):
        return replace(scores, capped=True, before=None, shift=None)  # a cap of what is left is no shift
    if name in ("neg", "neg_"):
        shift = None if scores.shift is None else -scores.shift
        return replace(scores, factor=_times(scores.factor, -1.0, out.shape), before=None, shift=shift, log_over=None)
    if name in ("constant_pad_nd", "convolution") and scores.axes is not None and scores.axes.shape == out.shape:
        return replace(scores, factor=None)
    return _as_it_is(scores, out)


def _as_it_is(scores: Scores, out: Tensor) -> Scores | None:
    """After an operator without a rule; with as many axes, they are the same, perhaps with other entries."""
    was = scores.was if scores.axes is None else scores.axes
    return scores.lost(moved=was is None or was.dim() != out.dim())


def _main(known: list[Any]) -> int:
    """Which of several scores that are added up, say, has queries and keys as its factors.

    Scores of relative positions may have positions as the batch of their product: keys of their own for every query, or
    the same for the whole batch, and more than the queries among their rows.
    """
    places = [n for n, x in enumerate(known) if x is not None]

    def rank(n: int) -> tuple[int, ...]:
        axes = known[n].axes
        if axes is None:
            return (1,)
        origins = [score_axes.origin(axes, axis) for axis in range(axes.dim())]
        before_last = origins[-2] if len(origins) > 1 else None
        return 0, origins.count("left"), int(before_last == "batch"), -origins.count("batch")

    return min(places, key=rank)


def _moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], scores: Scores) -> Scores:
    """The scores in other places, with what is hidden of them."""
    parts = {name: getattr(scores, name) for name in ("hidden", "filled", "shift")}
    shape = args[0].shape
    parts = {name: None if x is None else func(x.expand(shape), *args[1:], **kwargs) for name, x in parts.items()}
    factor = None if isinstance(scores.factor, Tensor) and scores.factor.dim() else scores.factor
    return replace(scores, factor=factor, before=None, log_over=None, **parts)


def _viewed(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], scores: Scores, out: Any) -> Any:
    if scores.axes is None or scores.sink is not None:
        several = isinstance(out, list | tuple)
        same = name in _KEEPS_LAST and isinstance(out, Tensor) and out.dim() and out.shape[-1] == args[0].shape[-1]
        still = scores.sink is None and scores.shift is None
        kept = replace(scores, last=scores.last if same else None) if still else scores.lost()
        if kept is None or kept.was is None or kept.moved:
            return [kept] * len(out) if several else kept
        was = _moved_along(func, args, kwargs, kept.was)
        each = was if isinstance(was, list | tuple) else [was] * (len(out) if several else 1)
        found = [replace(kept, was=x, moved=True) if x is None else replace(kept, was=x) for x in each]
        return found if several else found[0]

    def moved(x: Any) -> Any:
        try:
            return func(x, *args[1:], **kwargs)
        except RuntimeError:  # memory in another order
            return func(x.contiguous(), *args[1:], **kwargs)

    try:
        axes = func(scores.axes, *args[1:], **kwargs)
    except RuntimeError:  # axes of different origin became one
        axis = max((axis for axis, n in enumerate(args[0].shape) if n > 1), default=0)  # the last with several entries
        same = isinstance(out, Tensor) and out.dim() and out.shape[-1] == args[0].shape[axis]
        left = scores.lost(scores.origin(axis) if same else None)
        merged = merged_axes.of_several_queries(scores.axes, scores.left, scores.right, out.shape)
        return None if left is None else replace(left, merged=merged)
    shape = scores.axes.shape
    parts = {name: getattr(scores, name) for name in ("hidden", "filled", "factor", "shift")}
    parts = {name: moved(x.expand(shape)) if isinstance(x, Tensor) and x.dim() else x for name, x in parts.items()}
    if isinstance(axes, Tensor):
        return replace(scores, axes=axes, before=None, log_over=None, **parts)
    each = [{name: x[n] if isinstance(x, list | tuple) else x for name, x in parts.items()} for n in range(len(axes))]
    return [replace(scores, axes=x, before=None, log_over=None, **own) for x, own in zip(axes, each, strict=True)]


def _moved_along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], was: Tensor) -> Any:
    """The view of a stand-in, with the sizes that the scores have by now; None: axes of different origin became one."""
    here = torch.empty_strided(args[0].shape, was.stride(), dtype=torch.uint8, device="meta")
    try:
        return func(here, *args[1:], **kwargs)
    except RuntimeError:
        return None


def _broadcast(scores: Scores, shape: torch.Size) -> Scores | None:
    """The scores in a result of this shape."""
    if scores.axes is None or scores.axes.shape == shape:
        return scores
    if scores.sink is not None and scores.axes.dim() == len(shape):
        return scores
    try:
        axes = scores.axes.expand(shape)
    except RuntimeError:
        return scores.lost()
    hidden, filled, shift = (
        None if x is None else x.expand(shape) for x in (scores.hidden, scores.filled, scores.shift)
    )
    return replace(scores, axes=axes, before=None, hidden=hidden, filled=filled, shift=shift)


def _added(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], scores: Scores, place: int, out: Tensor
) -> Scores | None:
    sign, alpha = ADDING[name], kwargs.get("alpha", args[2] if len(args) > 2 else 1)
    if name == "rsub":  # the second minus the first
        args, place, sign = (args[1], args[0]), 1 - place, -1
    of_first, of_second = 1.0, float(sign * alpha)
    own, others = (of_first, of_second) if place == 0 else (of_second, of_first)
    new = _broadcast(scores, out.shape)
    if new is None:
        return None
    new = replace(
        new, factor=_times(new.factor, own, out.shape) if own != 1.0 else new.factor, before=None, log_over=None
    )
    if new.shift is not None and own != 1.0:
        new = replace(new, shift=new.shift * own)
    other = args[1 - place]
    if isinstance(other, Tensor) and other.dim() and other.is_floating_point() and new.axes is not None:
        if name.endswith("_") and place:  # the mask itself became the scores
            return new
        return hidden_by(new, other if others == 1.0 else other * others, out.shape)
    return new


def hidden_by(scores: Scores, addend: Tensor, shape: torch.Size) -> Scores:
    """The scores after this was added to them. A mask has zeros and numbers that leave no weight, and none between."""
    addend = addend.detach()
    negative = addend < 0
    if bool((torch.where(negative, addend <= -_NO_WEIGHT, addend == 0)).all()):
        where = negative.expand(shape)
        return replace(scores, filled=where if scores.filled is None else scores.filled | where)
    hidden = hides(addend).expand(shape)
    return replace(scores, hidden=hidden if scores.hidden is None else scores.hidden | hidden)


def _scaled(name: str, args: tuple[Any, ...], scores: Scores, place: int, out: Tensor) -> Scores | None:
    new = _broadcast(scores, out.shape)
    if new is None:
        return None
    new = replace(new, before=None, log_over=None)
    other, divides = args[1 - place], SCALING[name]
    if divides and place:  # something divided by scores
        return new.lost()
    number = _number(other)
    if number is None and not divides and _shows(other):
        return new  # a mask of zeros and ones: what it hides, another operator says
    if number is None:
        number = other
    if new.shift is not None:
        by = number.detach() if isinstance(number, Tensor) else number
        new = replace(new, shift=new.shift / by if divides else new.shift * by)
    if not isinstance(number, Tensor) and number == 0:
        return replace(new, factor=0.0 if not divides else math.nan)
    factor = _times(new.factor, 1 / number if divides else number, out.shape)
    cap = new.softcap
    if new.capped and cap is None and isinstance(number, float):
        cap = 1 / number if divides else number
    return replace(new, factor=factor, softcap=cap)


def _shows(x: Any) -> bool:
    """Whether it is a mask of zeros and ones."""
    if not isinstance(x, Tensor) or x.requires_grad or x.is_complex():
        return False
    return x.dtype is torch.bool or bool(((x == 0) | (x == 1)).all())


def _filled(name: str, args: tuple[Any, ...], scores: Scores, place: int, out: Tensor) -> Scores | None:
    where: Any = None
    value: Any = args[2] if len(args) > 2 else None
    if name == "where":
        where, value = (~args[0], args[2]) if place == 1 else (args[0], args[1])
    elif name.startswith("index_put"):
        picked = args[1]
        whole = len(picked) == 1 and isinstance(picked[0], Tensor) and picked[0].shape == out.shape
        where = picked[0] if whole and picked[0].dtype is torch.bool else None
    elif place == 0:
        where = args[1]
    new = _broadcast(scores, out.shape)
    if new is None or new.axes is None or where is None:
        return new
    new = replace(new, before=None, log_over=None)
    if isinstance(value, Tensor) and value.dim() and value.numel() > 1:
        return hidden_by(new, torch.where(where, value, 0.0), out.shape) if name == "where" else new
    where = where.expand(out.shape)
    return replace(new, filled=where if new.filled is None else new.filled | where)


def _number(x: Any) -> float | Tensor | None:
    if isinstance(x, Tensor):
        return x.detach().reshape(()) if x.numel() == 1 else None
    return float(x) if isinstance(x, int | float) else None


def scaled(scores: Scores, number: float, shape: torch.Size) -> Scores:
    """The scores times a number, which is applied to `before`, too."""
    return replace(scores, factor=_times(scores.factor, number, shape), log_over=None)


def _times(factor: Factor, number: float | Tensor, shape: torch.Size) -> Factor:
    if factor is None:
        return None
    if isinstance(number, Tensor):
        number = number.detach()
        if number.is_complex() or (number.dim() and number.numel() == shape.numel()):
            return None  # a number of its own for every score
    return factor * number

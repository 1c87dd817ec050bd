"""Weights on their way from a softmax by hand to the values, and a softmax that is itself written by hand.

Weights that meet values in a product are attention; whether the product sums over the axis of the softmax shows if that
is the right one. `exp(x) / exp(x).sum()`, with the largest of x subtracted or not, is a softmax, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from levelhead.watching.layer_columns import Columns
from levelhead.watching.module_stack import Frame
from levelhead.watching.scores import FILLING, SAME, VIEWS, Scores
from levelhead.watching.tensor_table import TensorTable

# The same weights, other numbers: dropout, masks, a second normalisation.
_KEEPING_NAMES = "add add_ sub sub_ mul mul_ div div_ where masked_fill masked_fill_ tril triu pow"
_KEEPING = SAME | set(_KEEPING_NAMES.split())
_ROW_SUMS = {"amax": "max", "max": "max", "logsumexp": "logsumexp", "sum": "sum", "mean": "mean"}
# What reads weights and is no use of them as weights.
_LOOKING_NAMES = (
    "argmax argmin max min amax amin sum mean topk sort log nll_loss_forward multinomial isnan isfinite any all eq ne "
    "lt gt le ge std var _local_scalar_dense equal item logsumexp zeros_like ones_like empty_like "
    "new_zeros new_empty full_like bernoulli rand_like cumsum"
)
_LOOKING = set(_LOOKING_NAMES.split())

_APPLYING = {"convolution", "dot", "index_add", "index_add_", "scatter_add", "scatter_add_", "_sparse_mm"}
_SEGMENTS = {"index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"}
_PICKING = {"index", "index_select", "gather"}
SEGMENTS = "segments"
MINUS = "minus"  # the negative of a number per row
_SMALL = 1e-3
MASKED = "weights are multiplied by a mask after the softmax: the statistics are those before it"


class Pending:
    """A softmax, which counts once its weights meet values."""

    def __init__(
        self,
        frame: Frame,
        enter: Callable[..., None],
        again: Callable[[Tensor], Callable[..., None]] | None,
        *,
        gates: bool = False,
    ) -> None:
        """`enter` counts it, with further facts. `again` measures it with more entries hidden; None: its logits are
        not measured, and counting it is naming it. `gates`: multiplied with entries of the same shape, it is a gate."""
        self.gates = gates
        self.frame, self.done = frame, False
        self.with_it: list[Pending] = []  # softmaxes whose weights were added to these
        self.named = again is None
        # Of a softmax over learned keys: whether a tensor is computed from parameters alone, as those keys are.
        self.learned: Callable[[Tensor], bool] | None = None
        self.mixes = False  # with such keys, it mixed tensors of every query's own
        self._enter: Callable[..., None] | None = enter
        self._again = again

    def commit(self, axis: str | None) -> None:
        """The weights met values; `axis`: what the softmax was over, if that is known."""
        if self._enter is not None:
            enter, self._enter, self._again, self.done = self._enter, None, None, True
            enter(softmax_axis=axis)
            for other in self.with_it:
                other.commit(axis)

    def hide(self, shut: Tensor) -> None:
        """A mask set these weights to zero, and the others were divided by their sum: as if the mask came before."""
        if self._again is not None:
            self._enter = self._again(shut)


@dataclass(frozen=True)
class Weights:
    """Weights, and which of their axes the softmax was over."""

    pending: Pending
    axes: Tensor | None  # a stand-in: only the axis of the softmax has a stride. None: not known any more
    shut: Tensor | None = None  # where a mask set them to zero
    masked: bool = False  # a mask did, and they were not divided by their sum since
    met: bool = False  # values of the same shape, and not yet summed up
    mixed: bool = False  # those were every query's own, as the outputs of experts are

    def commit(self, axis: str | None, *, mixed: bool = False) -> None:
        """They met values; `mixed`: see `mixes`."""
        if mixed:
            self.pending.mixes = True
            return
        if self.masked and not self.pending.named and not self.pending.done:
            self.pending.frame.watched.not_observed[MASKED] = None
        self.pending.commit(axis)

    def mixes(self, x: Tensor, values: Tensor) -> bool:
        """Whether these weights x route every query to values of its own, under keys that all share and that are
        learned: a mixture of experts is no attention. Such values may be what goes into the experts, alike for all."""
        learned = self.pending.learned
        if learned is None or self.axes is None or values.dim() < x.dim() or learned(values):
            return False
        own = values.shape[values.dim() - x.dim() :]
        return all(n == 1 or m > 1 or self._moves(axis) for axis, (n, m) in enumerate(zip(x.shape, own, strict=True)))

    def over_keys(self, axis: int) -> bool | None:
        """Whether an axis is that of the softmax; None: not known."""
        if self.axes is None or axis >= self.axes.dim() or not any(self._moves(d) for d in range(self.axes.dim())):
            return None
        return self._moves(axis)

    def _moves(self, axis: int) -> bool:
        assert self.axes is not None
        return self.axes.stride(axis) != 0 and self.axes.shape[axis] > 1


@dataclass(frozen=True)
class Exponentials:
    """exp of scores."""

    source: Tensor | None  # the scores, before their largest was subtracted
    scores: Scores | None  # None: of something else, with these columns
    whole: bool = True  # in the shape of the scores
    columns: Columns | None = None
    version: int | None = None  # of the source: later, it may be overwritten

    @property
    def overwritten(self) -> bool:
        """Whether the scores are not what they were."""
        return self.source is not None and self.version != version(self.source)


@dataclass(frozen=True)
class Reduced:
    """A number per row: the largest, the sum …"""

    kind: str
    source: Tensor
    axis: int | None


class Normalised(NamedTuple):
    """Exponentials divided by their sum: a softmax."""

    source: Tensor | None
    scores: Scores | None
    axis: int | None  # None: over segments, as edges of a graph have
    columns: Columns | None
    overwritten: bool


class Reduction(NamedTuple):
    values: Tensor
    meaning: Reduced


def version(x: Tensor) -> int | None:
    """How often x was changed in place; None: that is not counted."""
    return None if x.is_inference() else x._version


def of_softmax(pending: Pending, shape: torch.Size, axis: int) -> Weights:
    """Weights fresh from the softmax."""
    strides = [int(d == axis) for d in range(len(shape))]
    return Weights(pending, torch.empty_strided(shape, strides, dtype=torch.uint8, device="meta"))


def reduction(name: str, args: tuple[Any, ...], out: Any) -> Reduction | None:
    """If this operator reduces rows."""
    kind, x = _ROW_SUMS.get(name), args[0]
    if kind is None or not isinstance(x, Tensor):
        return None
    dims = args[1] if len(args) > 1 else None
    dims = [dims] if isinstance(dims, int) else dims
    axis = dims[0] % x.dim() if isinstance(dims, list | tuple) and len(dims) == 1 else None
    values = out[0] if isinstance(out, list | tuple) else out
    return Reduction(values, Reduced(kind, x, axis))


def shifted(name: str, args: tuple[Any, ...], known: Sequence[Any], later: TensorTable[Any]) -> Scores | None:
    """Scores minus their largest, their mean, their first, or the logarithm of the sum of their exponentials."""
    x, less = args[0], args[1]
    scores: Scores | None = known[0]
    reduced = later.get(less) if isinstance(less, Tensor) else None
    if scores is None or not isinstance(less, Tensor):
        return None
    adds = name.startswith("add")
    if isinstance(reduced, Reduced):
        if reduced.kind in ("sum", SEGMENTS) or adds != (reduced.kind == MINUS):
            return None
    elif adds or known[1] is None or less.numel() == x.numel():  # a part of the scores, as their median is
        return None
    over = None
    if isinstance(reduced, Reduced) and reduced.kind == "logsumexp" and reduced.source is x:
        over = reduced.axis
    shift = -less.detach() if adds else less.detach()
    shift = shift if scores.shift is None else scores.shift + shift
    before = None if name.endswith("_") else x if scores.before is None else scores.before
    return replace(scores, before=before, shift=shift, log_over=over)


def after(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], later: TensorTable[Any], out: Any
) -> Any:
    """What an operator's result is: weights, exponentials, a number per row, a whole softmax, or None."""
    if name in ("cat", "stack"):
        return _joined(name, args, [found for x in args[0] if (found := later.get(x)) is not None], out)
    inputs = [later.get(x) if isinstance(x, Tensor) else None for x in args[:4]]
    first = next(x for x in inputs if x is not None)
    if isinstance(first, Exponentials) and name in _SEGMENTS and isinstance(out, Tensor):
        return Reduced(SEGMENTS, out, None)
    if isinstance(inputs[0], Exponentials):
        return _of_exponentials(name, args, inputs, out)
    if name == "sum" and isinstance(first, Weights) and first.shut is not None and isinstance(out, Tensor):
        summed = reduction(name, args, out)
        return None if summed is None else summed.meaning
    if isinstance(first, Reduced):
        if name == "neg":
            return replace(first, kind=MINUS)
        kept = name in VIEWS | SAME | FILLING | _PICKING | {"reciprocal"}
        kept = kept or (name in ("add", "add_") and _is_small(args[1]))
        return first if kept and isinstance(out, Tensor) else None
    if not isinstance(first, Weights):
        return None
    if name in VIEWS:
        return _viewed(func, args, kwargs, first, out)
    if name == "sum" and first.met and (summed := reduction(name, args, out)) is not None:
        over = None if summed.meaning.axis is None else first.over_keys(summed.meaning.axis)
        if summed.meaning.axis is not None and over is not False:
            first.commit("keys" if over else None, mixed=first.mixed)
        return None
    if name in _LOOKING:
        return None
    values = out[0] if isinstance(out, tuple | list) and out else out
    if name in _KEEPING or name == "native_dropout":
        place = inputs.index(first)
        if first.pending.gates and name in ("mul", "mul_") and not _is_dropout(args[1 - place]):
            grows = isinstance(values, Tensor) and values.numel() > args[place].numel()
            return first.commit(None) if grows else None
        first.pending.with_it += [x.pending for x in inputs if isinstance(x, Weights) and x is not first]
        if name.startswith("div") and place == 0 and isinstance(args[1], Tensor) and args[1].numel() > 1:
            if first.shut is not None and _is_sum(inputs[1], first):
                first.pending.hide(first.shut)
                return replace(first, shut=None, masked=False)
            return replace(first, axes=None)  # normalised once more, over an axis of their own (slot attention)
        if isinstance(values, Tensor) and values.shape == args[place].shape:
            first = _masked(name, args, place, first, values)
            if name in ("mul", "mul_") and not _is_dropout(args[1 - place]):
                first = replace(first, met=True, mixed=first.mixes(values, args[1 - place]))
            return [first] + [None] * (len(out) - 1) if isinstance(out, tuple | list) else first
        if isinstance(values, Tensor) and values.numel() == args[place].numel():
            return replace(first, axes=None)
    grows = isinstance(values, Tensor) and values.numel() > args[0].numel()
    if name in ("mul", "mul_") and first.mixes(args[inputs.index(first)], args[1 - inputs.index(first)]):
        return first.commit(None, mixed=True)
    if not first.pending.named or name in _APPLYING or (name == "mul" and grows):
        first.commit(None)  # an operator that makes something else of the weights
    return None


def _joined(name: str, args: tuple[Any, ...], parts: list[Any], out: Tensor) -> Weights | Exponentials | None:
    """Weights of several softmaxes beside each other, such as those of heads in a loop: they count together."""
    weights = [x for x in parts if isinstance(x, Weights)]
    if not weights:
        raised = next((x for x in parts if isinstance(x, Exponentials)), None)
        return None if raised is None else replace(raised, whole=False)
    first = weights[0]
    first.pending.with_it += [x.pending for x in weights if x.pending is not first.pending]
    axes = None
    if first.axes is not None:
        strides = list(first.axes.stride())
        if name == "stack":
            strides.insert((args[1] if len(args) > 1 else 0) % out.dim(), 0)
        axes = torch.empty_strided(out.shape, strides, dtype=torch.uint8, device="meta")
    return replace(first, axes=axes, shut=None)


def beside(others: Any, weights: Weights) -> Weights:
    """Weights in a part of a buffer, with those that were written into it before: they count together."""
    if not isinstance(others, Weights):
        return replace(weights, axes=None, shut=None)
    if weights.pending is not others.pending:
        others.pending.with_it.append(weights.pending)
    return others


def _masked(name: str, args: tuple[Any, ...], place: int, weights: Weights, values: Tensor) -> Weights:
    """The weights, with what a mask of zeros and ones set to zero."""
    shut: Any = None
    if name in ("mul", "mul_"):
        mask = args[1 - place]
        if isinstance(mask, Tensor) and mask.numel() > 1 and bool(((mask == 0) | (mask == 1)).all()):
            shut = mask == 0
    elif name in ("masked_fill", "masked_fill_") and _is_zero(args[2]):
        shut = args[1]
    elif name in ("tril", "triu"):
        shut = values == 0
    over = next((axis for axis in range(values.dim()) if weights.over_keys(axis)), None)
    if shut is None or over is None:
        return weights
    shut = shut.expand(values.shape)
    if not bool((shut.any(over) & ~shut.all(over)).any()):  # whole rows at most
        return weights
    return replace(weights, shut=shut if weights.shut is None else weights.shut | shut, masked=True)


def _is_dropout(x: Any) -> bool:
    """Whether it is zero or one number everywhere, as masks and dropout are."""
    return not isinstance(x, Tensor) or x.numel() < 2 or bool(((x == 0) | (x == x.max())).all())


def _is_sum(reduced: Any, weights: Weights) -> bool:
    """Whether it is the sum of these weights over the axis of the softmax."""
    if not isinstance(reduced, Reduced) or reduced.kind != "sum" or reduced.axis is None:
        return False
    return bool(weights.over_keys(reduced.axis))


def _of_exponentials(name: str, args: tuple[Any, ...], inputs: list[Any], out: Any) -> Any:
    mine = inputs[0]
    if reduced := reduction(name, args, out):
        return reduced.meaning if isinstance(out, Tensor) else None
    other: Any = inputs[1] if len(inputs) > 1 and mine.whole else None
    divided = isinstance(other, Reduced) and name in ("div", "div_", "mul", "mul_") and other.kind == "sum"
    if divided and other.source is args[0] and other.axis is not None:
        return Normalised(mine.source, mine.scores, other.axis, mine.columns, mine.overwritten)
    if isinstance(other, Reduced) and name in ("div", "div_") and other.kind == SEGMENTS:
        return Normalised(None, None, None, None, False)
    if name in SAME or name in VIEWS:
        if not isinstance(out, Tensor):
            return None
        return mine if out.shape == args[0].shape else replace(mine, whole=False)
    if not mine.whole:
        return mine if isinstance(out, Tensor) and out.shape == args[0].shape and out.is_floating_point() else None
    if name in ("masked_fill", "masked_fill_") and _is_zero(args[2]):
        return _shut(mine, args[1])
    if name in ("mul", "mul_") and isinstance(args[1], Tensor) and args[1].shape == args[0].shape:
        return _shut(mine, args[1] == 0)
    # Divided by more than their sum, say: no softmax, but weights all the same.
    same = isinstance(out, Tensor) and out.shape == args[0].shape
    return replace(mine, whole=False) if same and name in ("mul", "mul_", "div", "div_") else None


def _is_small(x: Any) -> bool:
    """Whether it only keeps a sum from being zero."""
    return isinstance(x, int | float) and abs(x) <= _SMALL


def _is_zero(x: Any) -> bool:
    return isinstance(x, Tensor) or x == 0


def _shut(mine: Exponentials, where: Tensor) -> Exponentials:
    """The exponentials after a mask set some to zero."""
    if mine.source is None or mine.scores is None:
        return mine
    shut = where.expand(mine.source.shape)
    hidden = mine.scores.hidden
    return replace(mine, scores=replace(mine.scores, hidden=shut if hidden is None else hidden | shut))


def _viewed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], weights: Weights, out: Any) -> Any:
    several = isinstance(out, list | tuple)
    if weights.axes is None:
        return [weights] * len(out) if several else weights
    try:
        axes = func(weights.axes, *args[1:], **kwargs)
    except RuntimeError:
        return replace(weights, axes=None)
    return [replace(weights, axes=x, shut=None) for x in axes] if several else replace(weights, axes=axes, shut=None)

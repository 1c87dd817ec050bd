"""`deep=True`: softmax attention written by hand, observed below the level of Python functions.

A dispatch mode follows products of two activations (`scores`) to their softmax; there the logits are measured as they
are. They count as attention when the weights meet values (`hand_weights`). A product with a parameter is a projection,
which is stored; a softmax over one is a classifier, which is ignored. Compiled parts stay compiled, and are not
followed. `following` says while which passes the mode is active.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from levelhead.watching import (
    compiler_graphs,
    effective_scale,
    fused_operators,
    hand_softmax,
    hand_weights,
    layer_columns,
    opaque_operators,
    scores,
    scores_joined,
)
from levelhead.watching.filled_buffers import Buffers
from levelhead.watching.hand_softmax import PATH as PATH
from levelhead.watching.hand_weights import Exponentials, Pending, Reduced, Weights
from levelhead.watching.intercept_known import not_described
from levelhead.watching.layer_columns import Columns
from levelhead.watching.measure import plain
from levelhead.watching.module_stack import Frame, Recorder, current
from levelhead.watching.observe_call import cannot_be_read
from levelhead.watching.parameters import Parameters
from levelhead.watching.score_axes import Origin
from levelhead.watching.scores import VIEWS, Scores
from levelhead.watching.tensor_table import TensorTable
from levelhead.watching.undisturbed import undisturbed

PATHS = (PATH, fused_operators.PATH)  # seen in passes that are followed only
_SOFTMAX = {"_softmax", "_safe_softmax", "softmax", "_log_softmax", "log_softmax"}
_UNREADABLE = {"_sparse_softmax", "_sparse_log_softmax"}
_EXPONENTIALS = {"exp", "exp_", "exp2", "exp2_"}
_PRODUCTS = {"bmm": 0, "mm": 0, "mv": 0, "baddbmm": 1, "addmm": 1, "addmv": 1}  # and which argument is the left one
SIGMOID = "a sigmoid over a product of queries and keys, which is not measured: there is no softmax"
IN_PIECES = "a softmax in pieces (exp of a product meets values before it is divided by its sum), which is not measured"
NO_PRODUCT = (
    "a softmax whose weights are applied and whose logits are no product of two activations that was followed "
    "(additive scores, distances, a learned query …), which is not measured"
)
IN_SEGMENTS = "a softmax over segments (exp, and sums that are scattered), which is not measured"
OVERWRITTEN = "a softmax whose logits are overwritten by its result, which cannot be measured"
NO_SOFTMAX = "weights that are an activation of a product of queries and keys (ReLU …), which are not measured"
MIXTURE = (
    "a softmax over learned keys whose weights mix tensors of every query's own (a mixture of experts): not counted as "
    "attention"
)
NO_VALUES = "a softmax over a product of two activations whose weights meet no values: not counted as attention"


class Deep(TorchDispatchMode):
    """Follows products of activations while the watched model runs."""

    supports_higher_order_operators = True  # such as flex_attention: they run as they are

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled parts stay compiled, and keep their bits."""
        return True

    def __init__(self, watch: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch
        self._scores: TensorTable[Any] = TensorTable()  # tensor -> Scores
        self._later: TensorTable[Any] = TensorTable()  # tensor -> Weights, Exponentials or Reduced
        self._logarithms: TensorTable[Any] = TensorTable()  # log_softmax of no scores -> its axis, and columns
        self._columns: TensorTable[Any] = TensorTable()  # tensor -> Columns
        self._columns_of_both: TensorTable[Any] = TensorTable()  # product entry by entry -> Columns
        self._buffers = Buffers()
        self._parameters = Parameters(watch.model)
        self._compiled = opaque_operators.CompiledProducts()
        self._numbers: dict[Any, Tensor] = {}  # numbers that were read, as the largest score, and what they were
        self._pending: list[Pending] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        frame = current()
        # A model of another watch may run inside this one: its calls are for that watch.
        if frame is None or frame.watch is not self._watch or frame.busy or not isinstance(func, OpOverload):
            return func(*args, **(kwargs or {}))
        if compiler_graphs.running() or not self._watch.wanted():
            return func(*args, **(kwargs or {}))
        if torch.is_inference_mode_enabled():  # where operators that consist of others come as a whole
            with self:
                out = func.decompose(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        out = func(*args, **(kwargs or {}))
        frame.busy = True  # what follows is not followed
        try:
            with undisturbed():
                self._see(frame, func, func.overloadpacket.__name__, args, kwargs or {}, out)
        except Exception:
            # The model goes on whatever an operator of its own does to this.
            frame.watched.not_observed[f"{func} could not be followed"] = None
        finally:
            frame.busy = False
        return out

    def close(self) -> None:
        """Names what did not become attention."""
        for pending in self._pending:
            if not pending.done:
                pending.frame.watched.not_observed[MIXTURE if pending.mixes else NO_VALUES] = None

    def _see(self, frame: Frame, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if name in _SOFTMAX or name in _UNREADABLE or name == "_masked_softmax":
            self._softmax_operator(frame, name, args, out)
            return
        if (opaque := opaque_operators.attends(func, args, kwargs, out, frame.watched.module)) is not None:
            frame.watched.not_observed[not_described(opaque)] = None
            return
        if name == "_local_scalar_dense" and (args[0] in self._later or args[0] in self._scores):
            self._numbers[out] = args[0]
        if not _readable(out):
            return
        if (call := fused_operators.described(name, args, kwargs)) is not None:
            if not cannot_be_read(frame, call.q, call.k):
                frame.watch.record_call(frame, fused_operators.PATH, call)
            return
        joins = name in scores_joined.NAMES
        inputs = args[0] if joins else args[:4]
        tensors = [x for x in (inputs if joins else args) if isinstance(x, Tensor)]
        if not all(map(plain, tensors)):
            return
        self._parameters.pass_on(name, tensors, out)
        if name in _PRODUCTS:
            self._product(frame, func, name, args, kwargs, out)
            return
        self._buffers.follow(name, args, out)
        known = [self._known(x) for x in inputs]
        if any(x is not None for x in known):
            self._of_scores(frame, func, name, args, kwargs, known, out)
        elif name in _EXPONENTIALS and out is not args[0] and args[0].is_floating_point():
            if (log := self._logarithms.get(args[0])) is not None:
                self._softmax(frame, args[0], None, log[0], log[1], out)
            else:
                self._later[out] = Exponentials(None, None, columns=self._columns.get(args[0]))
        else:
            self._of_columns(func, name, args, kwargs, inputs, out)
        if any(isinstance(x, Tensor) and x in self._later for x in inputs):
            self._of_weights(frame, func, name, args, kwargs, out)

    def _known(self, x: Any) -> Scores | None:
        """The scores in a tensor, or in the one that it is a view of."""
        if not isinstance(x, Tensor):
            return None
        found: Scores | None = self._scores.get(x)
        if found is None and (whole := self._buffers.whole(x)) is not None:
            found = self._scores.get(whole)
            return None if found is None else found.lost()
        return found

    def _of_scores(
        self,
        frame: Frame,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: list[Any],
        out: Any,
    ) -> None:
        if name in ("sigmoid", "sigmoid_"):
            gate = _naming(frame, SIGMOID, gates=True)
            self._later[out] = hand_weights.of_softmax(gate, out.shape, out.dim() - 1)
            return
        if reduced := hand_weights.reduction(name, args, out):
            self._later[reduced.values] = reduced.meaning
            if name != "mean":  # over heads, it is scores
                return
        if name in _EXPONENTIALS:
            self._exponentials(frame, name, args[0], known[0], out)
            return
        if name in ("sub", "sub_", "add", "add_") and "alpha" not in kwargs:
            less = hand_weights.shifted(name, self._with_numbers(args), known, self._later)
            if less is not None:
                self._keep(name, out, less)
                return
        if name in scores_joined.NAMES:
            found: Any = scores_joined.after(name, args, known, out)
        else:
            found = scores.after(func, name, args, kwargs, known, out)
        for x, each in zip(out, found, strict=True) if isinstance(found, list) else ((out, found),):
            self._keep(name, x, each)

    def _with_numbers(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments in which a number that was read is the tensor that it was."""
        return tuple(self._numbers.get(x, x) if isinstance(x, float) else x for x in args)

    def _keep(self, name: str, x: Any, found: Scores | None) -> None:
        if not isinstance(x, Tensor):
            return
        if found is None:
            self._scores.drop(x)
            return
        self._scores[x] = found
        whole = None if name in VIEWS else self._buffers.whole(x)
        if whole is not None and (part := found.lost()) is not None:  # a part of it was written
            self._scores[whole] = part

    def _of_columns(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Any, out: Any
    ) -> None:
        if name == "convolution" and self._parameters.of(args[1]) is not None:
            self._columns[out] = layer_columns.of_product(out.shape, 1 if out.dim() > 2 else 0)
            return
        if name == "embedding":
            self._columns[out] = layer_columns.of_product(out.shape, -1)
            return
        known: list[Any] = [self._columns.get(x) if isinstance(x, Tensor) else None for x in inputs]
        if not any(x is not None for x in known):
            return
        if (both := layer_columns.in_both(name, known, args, out)) is not None:
            self._columns_of_both[out] = both
        if name == "sum" and (both := self._columns_of_both.get(args[0])) is not None:
            found: Any = layer_columns.summed(both, known[0], args, out)
        else:
            found = layer_columns.after(func, name, args, kwargs, known, out)
        for x, each in zip(out, found, strict=True) if isinstance(found, list) else ((out, found),):
            if each is not None and isinstance(x, Tensor):
                self._columns[x] = each

    # ---- products

    def _product(
        self, frame: Frame, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
    ) -> None:
        first = _PRODUCTS[name]
        a, b = args[first], args[first + 1]
        for x, axis, other in ((a, a.dim() - 1, b), (b, max(b.dim() - 2, 0), a)):
            if (later := self._later.get(x)) is not None and self._meets(frame, later, x, axis, other, out):
                return
        tracked, other, axis = (self._known(a), b, -1)
        if tracked is None:
            tracked, other, axis = (self._known(b), a, max(b.dim() - 2, 0) - b.dim())
        if self._parameters.of(b) is not None or (tracked is not None and self._parameters.of(other) is not None):
            self._projected(frame, a, b, tracked, axis, out)
            return
        if tracked is not None and tracked.activated and tracked.axes is not None:
            frame.watched.not_observed[NO_SOFTMAX] = None
        if name in ("bmm", "baddbmm") and self._compiled.is_second(frame, func, a, out):
            frame.watched.not_observed[opaque_operators.IN_FUNCTION] = None
        found = scores.product(a, b, float(kwargs.get("alpha", 1)), out.shape, self._learned_factor(a, b))
        if first and kwargs.get("beta", 1) and args[0].dim() and found.axes is not None:
            found = scores.hidden_by(found, args[0], out.shape)
        self._keep(name, out, found)

    def _learned_factor(self, a: Tensor, b: Tensor) -> Origin | None:
        left, right = self._parameters.learned(a), self._parameters.learned(b)
        return None if left == right else "left" if left else "right"

    def _projected(self, frame: Frame, a: Tensor, b: Tensor, tracked: Scores | None, axis: int, out: Tensor) -> None:
        """A product with a parameter: heads of scores that are mixed, or a layer."""
        if tracked is not None and tracked.origin(axis) == "batch" and (mixed := tracked.lost()) is not None:
            self._scores[out] = mixed
            return
        parameter = self._parameters.of(b)
        if out.dim() > 1:
            self._columns[out] = layer_columns.of_product(out.shape, -1 if parameter is not None else -2)
        if parameter is not None and parameter[1] is frame.watched.module:  # else its own hook stores it
            frame.ran.append(effective_scale.columns(parameter[0], None, a.shape[-1], out))

    def _meets(self, frame: Frame, later: Any, x: Tensor, axis: int, other: Tensor, out: Tensor) -> bool:
        """Whether a product of weights x was understood."""
        if isinstance(later, Weights):
            over_keys = later.over_keys(axis)
            with_parameter = self._parameters.of(other) is not None
            if with_parameter and later.pending.named:
                return False
            if out.dim() > 1:
                self._columns[out] = layer_columns.of_product(out.shape, -1)
            if with_parameter and not over_keys:
                self._later[out] = replace(later, axes=None)  # heads that are mixed
            elif not with_parameter:  # else a router or a memory: parameters are no values of tokens
                alone = x.dim() > 1 and x.numel() == x.shape[:-2].numel() * x.shape[axis]  # one query for these values
                kind = "keys" if over_keys else None if over_keys is None else "queries"
                later.commit(kind, mixed=bool(over_keys) and alone and later.mixes(x, other))
            return True
        if isinstance(later, Exponentials) and later.scores is not None:
            frame.watched.not_observed[IN_PIECES] = None
            return True
        return False

    # ---- softmaxes

    def _softmax_operator(self, frame: Frame, name: str, args: tuple[Any, ...], out: Any) -> None:
        x = args[0]
        if cannot_be_read(frame, x) or name in _UNREADABLE:
            return
        known = self._known(x)
        if not x.dim() or not x.is_floating_point():
            return
        axis = args[2] if name == "_masked_softmax" and len(args) > 2 else args[1] if name in _SOFTMAX else -1
        axis = (-1 if axis is None else axis) % x.dim()
        if isinstance(out, Tensor) and out.data_ptr() == x.data_ptr():  # softmax(x, out=x)
            if known is not None:
                frame.watched.not_observed[OVERWRITTEN] = None
            return
        if name == "_masked_softmax" and known is not None:
            hidden = _masked(x, args[1], args[3] if len(args) > 3 else None)
            known = replace(known, hidden=hidden if known.hidden is None else known.hidden | hidden)
        logits = x if known is None else known.unshifted(x, axis)
        if "log" not in name:
            self._softmax(frame, logits, known, axis, self._columns.get(x), out)
        elif known is not None:
            shift = logits.detach().logsumexp(axis, keepdim=True)
            self._scores[out] = replace(known, before=logits, shift=shift, log_over=axis)
        else:
            self._logarithms[out] = (axis, self._columns.get(x))

    def _exponentials(self, frame: Frame, name: str, x: Tensor, known: Scores, out: Tensor) -> None:
        if out is x and known.before is None:
            frame.watched.not_observed[OVERWRITTEN] = None
            return
        source = known.source(x)
        if name.startswith("exp2"):
            source, known = source.detach() * math.log(2), scores.scaled(known, math.log(2), out.shape)
        if known.log_over is not None:
            self._softmax(frame, source, known, known.log_over, None, out)
        else:
            self._later[out] = Exponentials(source, known, version=hand_weights.version(source))

    def _of_weights(
        self, frame: Frame, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        later = hand_weights.after(func, name, args, kwargs, self._later, out)
        if isinstance(later, hand_weights.Normalised):
            source = out if later.source is None else later.source
            if later.overwritten:
                frame.watched.not_observed[OVERWRITTEN] = None
            elif later.axis is None:
                self._later[out] = hand_weights.of_softmax(_naming(frame, IN_SEGMENTS), out.shape, 0)
            else:
                followed = later.scores is not None and later.scores.shift_is_constant(out.dim(), later.axis)
                self._softmax(frame, source, later.scores if followed else None, later.axis, later.columns, out)
        elif isinstance(later, list):
            for x, each in zip(out, later, strict=True):
                self._later[x] = each
        elif isinstance(later, Weights | Exponentials | Reduced) and isinstance(out, Tensor):
            self._later[out] = later
            whole = None if name in VIEWS else self._buffers.whole(out)
            if whole is not None and isinstance(later, Weights):  # weights of one head, say, among those of all
                self._later[whole] = hand_weights.beside(self._later.get(whole), later)

    def _softmax(
        self, frame: Frame, x: Tensor, known: Scores | None, axis: int, columns: Columns | None, weights: Tensor
    ) -> None:
        """A softmax over `axis` of x, which counts once the weights meet values: measured if x has scores. If not, it
        is named, unless it is over a layer's columns, as that of a classifier or a router is."""
        if not x.numel():
            return
        if known is not None and x.dim() > 1:
            pending = hand_softmax.measured(frame, x, known, axis)
            if known.learned is not None and known.origin(axis) == known.learned:
                pending.learned = self._parameters.learned
            self._pending.append(pending)
        elif x.shape[axis] == 1 or (columns is not None and columns[axis]) or self._parameters.of(x) is not None:
            return
        else:
            pending = _naming(frame, NO_PRODUCT)
        self._later[weights] = hand_weights.of_softmax(pending, weights.shape, axis)


def _naming(frame: Frame, reason: str, *, gates: bool = False) -> Pending:
    """A softmax that is not measured: the coverage says so once its weights meet values."""
    return Pending(frame, lambda **_: frame.watched.not_observed.setdefault(reason), None, gates=gates)


def _masked(x: Tensor, mask: Tensor, kind: int | None) -> Tensor:
    """What the mask of a `_masked_softmax` hides: per query and key (kind 0), per sequence and key (1), or all."""
    if kind == 1 and mask.shape != x.shape:
        mask = mask.reshape(mask.shape[0], *(1,) * (x.dim() - 2), mask.shape[-1])
    return mask.bool().expand(x.shape)


def _readable(out: Any) -> bool:
    several = out if isinstance(out, list | tuple) else (out,)
    tensors = [x for x in several if isinstance(x, Tensor)]
    return bool(tensors) and all(map(plain, tensors))

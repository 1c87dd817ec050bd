"""`deep=True`: softmax attention written by hand, observed below the level of Python functions.

A dispatch mode follows products of two activations (`scores`) to their softmax; there the logits are measured as they
are. They count as attention when the weights meet values (`hand_weights`). A product with a parameter is a projection,
which is stored; a softmax over one is a classifier, which is ignored. Compiled parts stay compiled, and are not
followed. The mode is active only while an observed step runs.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.weak import WeakIdKeyDictionary

from levelhead.watching import effective_scale, fused_operators, hand_weights, scores
from levelhead.watching.hand_weights import Exponentials, Pending, Reduced, Weights
from levelhead.watching.legacy_constructors import LEGACY_CONSTRUCTORS
from levelhead.watching.measure import from_scores, plain
from levelhead.watching.module_stack import ATTRIBUTE, Frame, Product, Recorder, current, depth, heads_around
from levelhead.watching.observe_call import cannot_be_read
from levelhead.watching.parameters import Parameters
from levelhead.watching.sampled import heads_first
from levelhead.watching.scores import Scores

PATH = "softmax by hand"
PATHS = (PATH, fused_operators.PATH)  # seen in passes that are followed only
_SOFTMAX = {"_softmax", "_safe_softmax", "softmax", "_log_softmax", "log_softmax"}
_UNREADABLE = {"_sparse_softmax", "_sparse_log_softmax", "_masked_softmax"}
_PRODUCTS = {"bmm": 0, "mm": 0, "mv": 0, "baddbmm": 1, "addmm": 1}  # and which argument is the left one
SIGMOID = "a sigmoid over a product of queries and keys, which is not measured: there is no softmax"
IN_PIECES = "a softmax in pieces (exp of a product meets values before it is divided by its sum), which is not measured"
NO_VALUES = "a softmax over a product of two activations whose weights meet no values: not counted as attention"


class Deep(TorchDispatchMode):
    """Follows products of activations while the watched model runs."""

    supports_higher_order_operators = True  # such as flex_attention: they run as they are

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled parts stay compiled, and keep their bits."""
        return True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._scores: Any = WeakIdKeyDictionary()  # tensor -> Scores
        self._later: Any = WeakIdKeyDictionary()  # tensor -> Weights, Exponentials or Reduced
        self._parameters = Parameters(model)
        self._pending: list[Pending] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        frame = current()
        if frame is None or frame.busy or not isinstance(func, OpOverload) or not frame.watch.wanted():
            return func(*args, **(kwargs or {}))
        if torch.is_inference_mode_enabled():  # where operators that consist of others come as a whole
            with self:
                out = func.decompose(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        out = func(*args, **(kwargs or {}))
        frame.busy = True  # what follows is not followed
        try:
            self._see(frame, func, func.overloadpacket.__name__, args, kwargs or {}, out)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            # The model goes on whatever an operator of its own does to this.
            frame.watched.not_observed[f"{func} could not be followed: {error}".splitlines()[0]] = None
        finally:
            frame.busy = False
        return out

    def close(self) -> None:
        """Names what did not become attention."""
        for pending in self._pending:
            if not pending.done:
                pending.frame.watched.not_observed[NO_VALUES] = None

    def _see(self, frame: Frame, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if name in _SOFTMAX or name in _UNREADABLE:
            self._softmax_operator(frame, name, args, out)
            return
        if not _readable(out):
            return
        if (call := fused_operators.described(name, args, kwargs)) is not None:
            if not cannot_be_read(frame, call.q, call.k):
                frame.watch.record_call(frame, fused_operators.PATH, call)
            return
        tensors = [x for x in (args[0] if name == "cat" else args) if isinstance(x, Tensor)]
        if not all(map(plain, tensors)):
            return
        self._parameters.pass_on(name, tensors, out)
        if name in _PRODUCTS:
            self._product(frame, name, args, kwargs, out)
            return
        inputs = args[0] if name == "cat" else args[:3]
        known = [self._scores.get(x) if isinstance(x, Tensor) else None for x in inputs]
        if any(x is not None for x in known):
            self._of_scores(frame, func, name, args, kwargs, known, out)
        if any(isinstance(x, Tensor) and x in self._later for x in inputs):
            self._of_weights(frame, func, name, args, kwargs, out)

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
            frame.watched.not_observed[SIGMOID] = None
            return
        if reduced := hand_weights.reduction(name, args, out):
            self._later[reduced.values] = reduced.told
            return
        if name in ("exp", "exp_"):
            self._exponentials(frame, args[0], out)
            return
        if name == "sub" and (less := hand_weights.shifted(args, self._scores, self._later)) is not None:
            self._scores[out] = less
            return
        found = scores.after(func, name, args, kwargs, known, out)
        for x, each in zip(out, found, strict=True) if isinstance(found, list) else ((out, found),):
            if each is not None and isinstance(x, Tensor):
                self._scores[x] = each

    # ---- products

    def _product(self, frame: Frame, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        first = _PRODUCTS[name]
        a, b = args[first], args[first + 1]
        for x, axis, other in ((a, a.dim() - 1, b), (b, max(b.dim() - 2, 0), a)):
            if (later := self._later.get(x)) is not None and self._meets(frame, later, axis, other, out):
                return
        tracked = self._scores.get(a) or self._scores.get(b)
        parameter = self._parameters.of(b)
        if parameter is not None or (tracked is not None and self._parameters.of(a) is not None):
            if tracked is not None and (mixed := tracked.lost()) is not None:  # heads that are mixed
                self._scores[out] = mixed
            elif parameter is not None and parameter[1] is frame.watched.module:  # else its own hook stores it
                frame.ran.append(effective_scale.columns(parameter[0], None, a.shape[-1], out))
            return
        found = scores.product(a, b, float(kwargs.get("alpha", 1)), out.shape)
        if first and kwargs.get("beta", 1) and args[0].dim() and found.axes is not None:
            found = scores.hidden_by(found, args[0], out.shape)
        self._scores[out] = found

    def _meets(self, frame: Frame, later: Any, axis: int, other: Tensor, out: Tensor) -> bool:
        """Whether a product of weights was understood."""
        if isinstance(later, Weights):
            over_keys = later.over_keys(axis)
            if self._parameters.of(other) is not None and not over_keys:
                self._later[out] = replace(later, axes=None)  # heads that are mixed
            else:
                later.pending.commit("keys" if over_keys else None if over_keys is None else "queries")
            return True
        if isinstance(later, Exponentials):
            frame.watched.not_observed[IN_PIECES] = None
            return True
        return False

    # ---- softmaxes

    def _softmax_operator(self, frame: Frame, name: str, args: tuple[Any, ...], out: Any) -> None:
        x = args[0]
        if cannot_be_read(frame, x) or name in _UNREADABLE:
            return
        known = self._scores.get(x)
        if known is None or not x.dim():
            return
        axis = args[1] % x.dim()
        if "log" in name:
            self._scores[out] = replace(known, before=x, log_over=axis)
        else:
            self._softmax(frame, x, known, axis, out)

    def _exponentials(self, frame: Frame, x: Tensor, out: Tensor) -> None:
        known: Scores = self._scores[x]
        source = x if known.before is None else known.before
        if known.log_over is not None:
            self._softmax(frame, source, known, known.log_over, out)
        elif out is not x:
            self._later[out] = Exponentials(source, known)

    def _of_weights(
        self, frame: Frame, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        later = hand_weights.after(func, name, args, kwargs, self._later, out)
        if isinstance(later, hand_weights.Normalised):
            self._softmax(frame, later.source, later.scores, later.axis, out)
        elif isinstance(later, list):
            for x, each in zip(out, later, strict=True):
                self._later[x] = each
        elif isinstance(later, Weights | Exponentials | Reduced) and isinstance(out, Tensor):
            self._later[out] = later

    def _softmax(self, frame: Frame, x: Tensor, known: Scores, axis: int, weights: Tensor) -> None:
        """Measures the logits x of a softmax over `axis`; they count once the weights meet values."""
        if x.dim() < 2 or not x.numel() or not known.plausible(x.shape, axis):
            return
        x = x.detach()
        hidden = known.hides(x, axis)
        x = x if hidden is None else x.masked_fill(hidden, -torch.inf)
        sink = known.sink if known.sink is not None and known.sink.axis == axis else None
        x = x if sink is None else x.narrow(axis, sink.first, sink.keys)
        facts = known.facts(hidden)
        arranged = known.arranged(x.shape, axis, heads_around(frame, several=x.dim() > 3))
        if arranged is None:  # over heads or a batch
            logits, facts["softmax_axis"] = x.movedim(axis, -1).reshape(1, 1, -1, x.shape[axis]), "batch"
            product = _some_factors(known, 1)
        else:
            if arranged.split > 1 and known.axes is not None:
                q, _ = arranged.factors(known.axes, known.left, known.right)
                arranged = replace(arranged, heads_first=heads_first(q, frame.ran))
            logits = arranged.scores(x)
            product = _factors(known, arranged, logits, x.shape)
        call = from_scores(logits)
        if sink is not None and arranged is not None:
            column = arranged.scores(sink.column.expand(*x.shape[:axis], 1, *x.shape[axis + 1 :]))[..., 0]
            if bool((column == column[:1, :, :1]).all()):
                call = replace(call, scoring=call.scoring._replace(sinks=column[0, :, 0].to(call.q.dtype)))
        enter = frame.watch.measure_call(frame, PATH, call, product)
        pending = Pending(frame, lambda later: enter(**{k: v for k, v in (later | facts).items() if v is not None}))
        self._pending.append(pending)
        self._later[weights] = hand_weights.of_softmax(pending, weights.shape, axis)


def _factors(known: Scores, arranged: Any, logits: Tensor, shape: torch.Size) -> Product:
    """What these logits are the product of."""
    if known.axes is None:
        return _some_factors(known, logits.shape[1])
    q, k = arranged.factors(known.axes, known.left, known.right)
    factor = known.factor
    if isinstance(factor, Tensor) and factor.dim():
        each = arranged.scores(factor.expand(shape))
        heads = each[0, :, 0, 0]
        factor = heads if bool((each == heads[:, None, None]).all()) else None
    return Product(_real(q), _real(k), factor)


def _real(x: Tensor) -> Tensor:
    """Complex numbers as pairs, which have the same squares."""
    return torch.view_as_real(x.resolve_conj()).flatten(-2) if x.is_complex() else x


def _some_factors(known: Scores, heads: int) -> Product:
    """All rows of the factors for every head, where it is not known which belong to it."""
    flat = (_real(x.reshape(1, 1, -1, known.left.shape[2])) for x in (known.left, known.right.mT))
    q, k = (x.expand(1, heads, -1, -1) for x in flat)
    return Product(q, k, None)


def _readable(out: Any) -> bool:
    several = out if isinstance(out, list | tuple) else (out,)
    tensors = [x for x in several if isinstance(x, Tensor)]
    return bool(tensors) and all(map(plain, tensors))


# ---- active while the model runs


class _Running(threading.local):
    def __init__(self) -> None:
        self.modes: dict[int, Deep] = {}  # by id of the watch


_running = _Running()


def begin(module: nn.Module, args: Any) -> None:
    """A forward pre-hook, after that of `module_stack`: of the model, or of a part that is called by itself."""
    watched = getattr(module, ATTRIBUTE, None)
    if torch.compiler.is_compiling() or watched is None or watched.module is not module:
        return
    if depth(watched.watch) > 1:
        return
    end(watched.watch)  # after Ctrl-C no hook ran, and an old mode remains
    if watched.watch.follows() and watched.watch.wanted():
        mode = _running.modes[id(watched.watch)] = Deep(watched.watch.model)
        LEGACY_CONSTRUCTORS.hold()
        mode.__enter__()  # type: ignore[no-untyped-call]


def leave(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook, after that of `module_stack`; called after exceptions, too."""
    watched = getattr(module, ATTRIBUTE, None)
    if torch.compiler.is_compiling() or watched is None or watched.module is not module or depth(watched.watch):
        return
    end(watched.watch)
    if output is not None:
        watched.watch.end_forward()


def end(watch: Recorder) -> None:
    """Removes the mode, if it is still active."""
    mode = _running.modes.pop(id(watch), None)
    if mode is None:
        return
    LEGACY_CONSTRUCTORS.release()
    mode.close()
    if _get_current_dispatch_mode() is mode:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

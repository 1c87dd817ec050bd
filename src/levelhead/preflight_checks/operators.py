"""What the operators of a pass show: random numbers, the axes of softmaxes, a softmax of a softmax, dropped logits, and
logits in a narrow type.

A dispatch mode follows products and softmaxes through operators that keep what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.inputs import Batch
from levelhead.preflight_checks.passes import run
from levelhead.preflight_checks.result import finding

_DROPPING = {"native_dropout", "bernoulli", "bernoulli_", "rand", "rand_like", "dropout", "_fused_dropout"}
_SOFTMAX = {"_softmax", "_safe_softmax", "softmax"}
_PRODUCTS = {"bmm", "baddbmm"}
_WEIGHTS, _LOGITS, _DROPPED, _NOISE = "weights", "logits", "dropped logits", "noise"
_NARROW = "logits in float16"
_FAINT = 1e-3  # own: a mask of 0 and 1 that is added is read from the logits
_VIEWS = {
    "view",
    "_unsafe_view",
    "reshape",
    "expand",
    "transpose",
    "permute",
    "t",
    "clone",
    "_to_copy",
    "detach",
    "slice",
}
_SCALED = {"mul", "mul_", "div", "div_"}
_MASKED = {"masked_fill", "masked_fill_", "where", "add", "add_", "sub", "tanh"}


@dataclass
class Called:
    """What was called."""

    drops: bool = False  # numbers are drawn as dropout draws them
    sorts: bool = False  # drawn numbers are sorted: a random choice of tokens
    other_axis: bool = False  # a softmax of three or more dimensions runs along another than the last
    widths: set[int] = field(default_factory=set)  # of softmaxes: how many numbers sum to 1
    heads: dict[str, int] = field(default_factory=dict)  # by module: the second size of a softmax of (B, H, T, S)
    twice: str | None = None  # the module that forms a softmax of weights
    dropped: str | None = None  # the module that drops logits
    faint: str | None = None  # the module that adds a triangle of a number too small to hide anything to logits
    narrowed: str | None = None  # the module that casts logits from float32 to float16


class _Mode(TorchDispatchMode):
    def __init__(self, called: Called, running: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called, self.running = called, running
        self.kinds: Any = WeakIdKeyDictionary()  # tensor -> what it holds

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        out = func(*args, **(kwargs or {}))
        self.called.drops |= name in _DROPPING
        self.called.sorts |= name in ("sort", "argsort", "topk") and self.kinds.get(args[0]) == _NOISE
        first = next((x for x in args if isinstance(x, Tensor)), None)
        if name in _SOFTMAX and args[0].dim() > 2:
            self.called.widths.add(args[0].shape[args[1]])
            self.called.other_axis |= args[1] not in (-1, args[0].dim() - 1)
            here, kind = self.running[-1] if self.running else "", self.kinds.get(first)
            if args[0].dim() == 4:
                self.called.heads[here] = args[0].shape[1]
            if kind == _WEIGHTS:
                self.called.twice = self.called.twice or here
            if kind == _DROPPED:
                self.called.dropped = self.called.dropped or here
            if kind == _NARROW:
                self.called.narrowed = self.called.narrowed or here
        if name in ("add", "add_"):
            both = [x for x in args[:2] if isinstance(x, Tensor)]
            added = [x for x in both if self.kinds.get(x) is None]
            if len(both) == 2 and len(added) == 1 and _LOGITS in map(self.kinds.get, both) and _is_faint(added[0]):
                self.called.faint = self.called.faint or (self.running[-1] if self.running else "")
        if isinstance(out, Tensor) and (kind := self._kind(name, args, first)) is not None:
            cast = kind == _LOGITS and first is not None and (first.dtype, out.dtype) == (torch.float32, torch.float16)
            self.kinds[out] = _NARROW if cast else kind
        return out

    def _kind(self, name: str, args: tuple[Any, ...], first: Tensor | None) -> str | None:
        if name in _SOFTMAX:
            return _WEIGHTS if args[0].dim() > 2 else None
        if name in _PRODUCTS:
            return _LOGITS
        if name in ("bernoulli", "bernoulli_", "rand", "rand_like"):
            return _NOISE
        kinds = {self.kinds.get(x) for x in args[:3] if isinstance(x, Tensor)} - {None}
        if name in _SCALED and kinds == {_LOGITS, _NOISE}:
            return _DROPPED
        mine = None if first is None else self.kinds.get(first)
        if name in _VIEWS or name in _SCALED:
            return mine if kinds <= {mine, _NOISE} else None
        return mine if name in _MASKED and mine in (_LOGITS, _DROPPED, _NARROW) else None


def _is_faint(x: Tensor) -> bool:
    """Whether one number stands above the diagonal of a square and zero elsewhere, and is next to nothing."""
    if x.dim() < 2 or not x.is_floating_point() or x.shape[-1] != x.shape[-2] or x.shape[-1] < 3:
        return False
    number = float(x.flatten(0, -3)[0, 0, 1]) if x.dim() > 2 else float(x[0, 1])
    return 0 < abs(number) < _FAINT and torch.equal(x, torch.full_like(x, number).triu(1))


def called(batch: Batch, *, training: bool = False) -> Called | None:
    """Of one pass; None: the model does not run under a mode that looks at operators."""
    found, running, handles = Called(), [], []

    def begins(name: str) -> Callable[..., None]:
        return lambda *_: running.append(name)

    for name, module in batch.model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            handles.append(module.register_forward_pre_hook(begins(name)))
            handles.append(module.register_forward_hook(lambda *_: running.pop() and None))
    modes = [(module, module.training) for module in batch.model.modules()]
    try:
        for module in batch.model.modules() if training else ():
            train(module)
        with _Mode(found, running):
            run(batch)
    except Exception:
        return None
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode
    return found


def train(module: nn.Module) -> None:
    """Training mode, as far as it is dropout: norms over the batch would write into their statistics."""
    module.training = not isinstance(module, nn.modules.batchnorm._NormBase)


def check(flight: Flight) -> None:
    """One softmax, of logits that nothing dropped."""
    name, looked = "one softmax", "the operators of a pass in training mode"
    seen = called(flight.batch, training=True) or called(flight.batch)
    found = []
    if seen is not None and seen.twice is not None:
        why = "A softmax runs over the result of another: weights between 0 and 1 become nearly uniform, and hidden "
        why += "keys get a share again."
        advice = "Apply one softmax to the masked logits."
        found.append(finding("softmax twice", "error", seen.twice, why, advice))
    if seen is not None and seen.faint is not None:
        why = "A causal mask is added to the logits with a number next to zero (1e-9 where -1e9 was meant): it hides "
        why += "nothing."
        advice = "Fill later logits with -inf, or torch.finfo(dtype).min."
        found.append(finding("mask without effect", "error", seen.faint, why, advice))
    if seen is not None and seen.dropped is not None:
        why = "In training, dropout sets logits to zero before the softmax: a dropped logit is not a hidden key, it "
        why += "gets the weight of an average one, and the others grow by 1/(1 - p)."
        advice = "Apply dropout to the weights, behind the softmax."
        found.append(finding("dropout on logits", "warning", seen.dropped, why, advice))
    if seen is not None and seen.narrowed is not None and not _half(flight.model):
        why = "Logits are formed in float32 and cast to float16 before the softmax: products overflow at 65,504, where "
        why += "the softmax gives NaN, and a logit of 30 is rounded to 1/64."
        advice = "Leave logits in float32 up to the softmax; cast the weights."
        found.append(finding("fp16 product", "warning", seen.narrowed, why, advice))
    if found:
        return flight.failed(name, looked, ", ".join(one.kind for one in found), *found)
    if seen is None:
        return flight.unknown(name, looked, "the model does not run where operators are looked at")
    return flight.passed(name, looked, "no softmax of a softmax, no dropped logits, none cast to float16")


def _half(model: nn.Module) -> bool:
    """Whether float16 is the model's type, or autocast chooses it."""
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return autocast or any(x.dtype is torch.float16 for x in model.parameters())

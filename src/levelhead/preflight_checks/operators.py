"""Which operators of interest a pass calls: random ones, and softmaxes by their axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from levelhead.preflight_checks.inputs import Batch
from levelhead.preflight_checks.passes import run

_DROPPING = {"native_dropout", "bernoulli", "bernoulli_", "rand", "rand_like", "dropout", "_fused_dropout"}
_SOFTMAX = {"_softmax", "_safe_softmax", "softmax"}


@dataclass
class Called:
    """What was called."""

    drops: bool = False  # numbers are drawn as dropout draws them
    other_axis: bool = False  # a softmax of three or more dimensions runs along another than the last


class _Mode(TorchDispatchMode):
    def __init__(self, called: Called) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called = called

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.called.drops |= name in _DROPPING
        if name in _SOFTMAX and args[0].dim() > 2:
            self.called.other_axis |= args[1] not in (-1, args[0].dim() - 1)
        return func(*args, **(kwargs or {}))


def called(batch: Batch) -> Called | None:
    """Of one pass; None: the model does not run under a mode that looks at operators."""
    found = Called()
    try:
        with _Mode(found):
            run(batch)
    except Exception:
        return None
    return found

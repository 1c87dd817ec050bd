"""A block in which modes and transformations of the user do not act: what a watch computes is neither seen nor changed
by them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes


def undisturbed() -> AbstractContextManager[None]:
    """No mode of functions or of dispatch acts in the block, and no transformation of torch.func."""
    modes = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
    return _alone() if modes or torch._C._are_functorch_transforms_active() else nullcontext()


@contextmanager
def _alone() -> Iterator[None]:
    above = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]  # type: ignore[no-untyped-call]
    try:
        # A transformation wraps what is computed in it: the numbers of the result could not be read. Where there is
        # none, this must stay able to map a mask's function.
        transformed = torch._C._are_functorch_transforms_active()
        with torch._C._DisableFuncTorch() if transformed else nullcontext(), _disable_current_modes():
            yield
    finally:
        for mode in reversed(above):
            _push_mode(mode)  # type: ignore[no-untyped-call]

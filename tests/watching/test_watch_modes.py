"""Modes of the user see the model as it is, and nothing of what a watch computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import levelhead as lh
from watched import HEADS, WIDTH, batch, by_hand, one_thread, sdpa, stack

__all__ = ["one_thread"]  # a fixture


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Torchs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x)[0] + self.attn(x, x, x, need_weights=False)[0]


MODELS = {"sdpa": lambda: stack(sdpa()), "by hand": lambda: stack(by_hand()), "torch": Torchs}


@pytest.mark.parametrize("kind", [Functions, Operators])
@pytest.mark.parametrize("name", MODELS)
def test_a_mode_sees_the_model_and_nothing_else(name: str, kind: type[Any]) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()

    def run() -> None:
        model(batch()).sum().backward()
        model.zero_grad()

    run()
    with kind() as plain:
        run()
    with kind() as around, lh.watch(model, gradients=True) as w:
        run()
        assert w.last.records
    with lh.watch(model, gradients=True) as w, kind() as inside:
        run()
    assert w.last.records
    assert around.names == plain.names and inside.names == plain.names


def test_a_default_device_does_not_reach_the_watch() -> None:
    model, x = stack(sdpa()), batch()
    with torch.device("meta"), lh.watch(model) as w:
        model(x)
    assert all(record.heads.rows.all() for record in w.last.records)

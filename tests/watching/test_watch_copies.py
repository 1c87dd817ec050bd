"""Copies of a watched model have nothing of the watch, and the original stays watched."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import levelhead as lh
from watched import WIDTH, batch, one_thread, outcome, same

__all__ = ["one_thread"]  # a fixture


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.function = nn.Linear(WIDTH, WIDTH), functional.scaled_dot_product_attention

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.to_q(x), x, x)


class Own(Holds):
    """Describes its state itself."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.to_q(x) @ x.transpose(-2, -1), -1) @ x + functional.scaled_dot_product_attention(
            x, x, x
        )


def _saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"levelhead" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


def _pickled(model: nn.Module) -> Any:
    content = pickle.dumps(model)
    assert b"levelhead" not in content
    return pickle.loads(content)


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "pickle": _pickled,
    "save": _saved,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


def noted(module: nn.Module, args: Any, output: Any) -> None:
    """A hook of somebody else."""


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("kind", [Holds, Own])
def test_a_copy_has_nothing_of_the_watch(name: str, kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind())
    model[0].register_forward_hook(noted, always_call=True)
    plain = outcome(model, lambda: model(batch()))
    with lh.watch(model) as w:
        copied = COPIES[name](model)
        parts = list(copied.modules()) if name != "copy" else [copied]
        for part in parts:
            hooks = (part._forward_hooks, part._forward_pre_hooks, part._forward_hooks_always_called)
            theirs = [noted] if isinstance(part, kind) else []
            assert list(hooks[0].values()) == theirs and not hooks[1] and len(hooks[2]) == len(theirs)
            assert not [name for name in vars(part) if "levelhead" in name]
        if name != "copy":
            assert copied[0].function is lh.torch.sdpa.ORIGINAL
            same(plain, outcome(copied, lambda: copied(batch())))
            assert not w.last.records
        same(plain, outcome(model, lambda: model(batch())))
    assert [record.module for record in w.last.records] == ["0"]
    assert "__reduce_ex__" not in vars(nn.Module)


def test_a_watched_model_can_be_scripted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Plain(), nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, 0.0, batch_first=True))
    wanted = model(batch())
    with lh.watch(model) as w:
        scripted: Any = torch.jit.script(model)
        torch.testing.assert_close(scripted(batch()), wanted)
        assert not w.last.records
        model(batch())
    assert {"0", "1.self_attn"} <= {line.module for line in w.coverage() if line.seen}
    assert not hasattr(torch.jit.script, "__wrapped__")

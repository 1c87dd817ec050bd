"""Modules whose code is not Python that is called: graphs that were exported, and TorchScript.

A graph calls the operator `aten.scaled_dot_product_attention`, or the function where torch defines it; no wrapper
replaces these. While such a module runs, a mode sends the call through torch's function, where it is observed.
TorchScript runs outside of Python: it is named, unless a pass that is followed sees its operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_OPERATOR = torch.ops.aten.scaled_dot_product_attention
TARGETS = (_OPERATOR, _OPERATOR.default, torch._C._nn.scaled_dot_product_attention)


class Operators(TorchFunctionMode):
    """Sends the operator's calls through torch's function, which is the same operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TARGETS:
            return functional.scaled_dot_product_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def calls_operator(module: nn.Module) -> bool:
    """Whether it runs a graph that calls the operator."""
    graph = getattr(module, "graph", None)
    if not isinstance(graph, fx.Graph):
        return False
    return any(node.target in TARGETS for node in graph.nodes)


def attending_script(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost TorchScript modules of a model that attend, by their name or their graph."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, torch.jit.ScriptModule) and not inside and _attends(module):
            found.append((name, module))
    return found


def _attends(module: Any) -> bool:
    if any(word in str(getattr(module, "original_name", "")).lower() for word in ("attention", "attn")):
        return True
    try:
        text = str(module.inlined_graph)
    except (AttributeError, RuntimeError):  # without a forward
        return False
    return "aten::scaled_dot_product_attention" in text or "aten::softmax" in text

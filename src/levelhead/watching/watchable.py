"""Which modules of a model may be watched, and what their names, classes and attributes say about them."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import getattr_static

import torch
from torch import nn

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")
_DISTRIBUTORS = ("torch.", "deepspeed.", "accelerate.")  # libraries whose wrappers hold the model as "module"
_HEADS = ("num_heads", "n_heads", "nheads", "heads", "n_head", "num_attention_heads", "nhead", "num_head", "h", "head")


def sounds_like_attention(module: nn.Module) -> bool:
    """Whether the name of its class, or of a base class, contains attention or attn."""
    return any(word in base.__name__.lower() for base in type(module).__mro__[:-1] for word in ("attention", "attn"))


def number_of_heads(module: nn.Module) -> int | None:
    """The number of heads, from the module's attributes."""
    numbers = (getattr_static(module, name, None) for name in _HEADS)  # a model's own __getattr__ may warn
    return next((n for n in numbers if isinstance(n, int) and n > 0), None)


def clean(name: str) -> str:
    """A module's name without the wrappers of compile, FSDP and checkpointing."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS[:-1])


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, without wrappers that compile or distribute it."""
    if isinstance(model, torch.jit.ScriptModule):
        return model
    for name in _WRAPPERS:
        inner = model._modules.get(name)
        known = name != "module" or type(model).__module__.startswith(_DISTRIBUTORS)
        if inner is not None and known and len(model._modules) == 1:
            return unwrapped(inner)
    return model


def frame_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model, and modules in it that may contain an attention call: all but simple ones."""
    for name, module in model.named_modules():
        torchs = type(module).__module__.startswith("torch.nn.modules")
        simple = not module._modules and (torchs or _is_one_weight(module))
        if not (simple and name) and not isinstance(module, torch.jit.ScriptModule):
            yield name, module


def _is_one_weight(module: nn.Module) -> bool:
    """Whether it is a projection or a norm outside torch, such as transformers' Conv1D."""
    names = set(module._parameters.keys())  # a list in a scripted module
    return "weight" in names and names <= {"weight", "bias"} and not sounds_like_attention(module)

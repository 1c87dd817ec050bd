"""levelhead in PyTorch: differentiable, drop-in, and as modules.

Importing this imports torch; `import levelhead` does not.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from levelhead.extras import command, missing

if _error := missing("levelhead.torch", "torch", install=command("torch")):
    raise _error

from levelhead.multihead import KeyValueCache
from levelhead.torch import flops as flops
from levelhead.torch.nn import MultiHeadAttention
from levelhead.torch.observed import observed_attention
from levelhead.torch.sdpa import patch, scaled_dot_product_attention

if TYPE_CHECKING:
    from levelhead.torch import huggingface

__all__ = ["KeyValueCache", "MultiHeadAttention", "huggingface", "observed_attention", "patch"]
__all__ += ["scaled_dot_product_attention"]


def __getattr__(name: str) -> ModuleType:
    if name == "huggingface":  # found at first use
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

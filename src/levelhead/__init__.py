"""levelhead: exact scaled dot-product attention on CPUs that can tell whether a head is level.

The public names, nothing else. Importing this loads NumPy and nothing heavier.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from levelhead import errors

try:
    from levelhead import _core as _core
except ImportError as error:
    if error.name == "numpy":
        raise errors.bad_import("levelhead", "the package numpy", "none", "Run: pip install numpy") from error
    raise errors.no_core(error) from error

from levelhead import front_ends, old_paths, stats
from levelhead._version import __version__
from levelhead.additive import additive_attention
from levelhead.attention import attention, observe
from levelhead.call import options as scoring
from levelhead.call import scaling
from levelhead.errors import LevelheadError
from levelhead.gradients import attention_backward
from levelhead.info import info
from levelhead.multihead import KeyValueCache, MultiHeadAttention
from levelhead.observation import Observation, merge

if TYPE_CHECKING:
    from levelhead import distributed, jax, lab, models, onnx, reference, remedies, sinks, testing, torch
    from levelhead.diagnosis.diagnose import diagnose
    from levelhead.explanation import explain, explain_text
    from levelhead.preflight_checks.preflight import preflight
    from levelhead.watching.watch import watch

    health: Any  # a namespace of old import paths

__all__ = [
    "KeyValueCache",
    "LevelheadError",
    "MultiHeadAttention",
    "Observation",
    "__version__",
    "additive_attention",
    "attention",
    "attention_backward",
    "diagnose",
    "distributed",
    "explain",
    "explain_text",
    "health",
    "info",
    "jax",
    "lab",
    "merge",
    "models",
    "observe",
    "onnx",
    "preflight",
    "reference",
    "remedies",
    "scaling",
    "scoring",
    "sinks",
    "stats",
    "testing",
    "torch",
    "watch",
]

# Imported at first use, so that importing levelhead stays light.
_ON_DEMAND = (
    "distributed",
    "health",
    "jax",
    "lab",
    "models",
    "onnx",
    "reference",
    "remedies",
    "sinks",
    "testing",
    "torch",
)


_FUNCTIONS = {  # and where each lives
    "diagnose": "diagnosis.diagnose",
    "explain": "explanation",
    "explain_text": "explanation",
    "preflight": "preflight_checks.preflight",
    "watch": "watching.watch",
}


old_paths.install()
front_ends.register("torch", "attention", lambda: import_module("levelhead.torch.autograd"))
front_ends.register("torch", "additive", lambda: import_module("levelhead.torch.additive"))
front_ends.register("torch", "row states", lambda: import_module("levelhead.watching.row_states"))
front_ends.register("notebook", "html", lambda: import_module("levelhead.show.notebook"))


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND or f"{__name__}.{name}" in old_paths.NEW_PATHS:
        return import_module(f"{__name__}.{name}")
    if name in _FUNCTIONS:
        return getattr(import_module(f"{__name__}.{_FUNCTIONS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_DEMAND, *_FUNCTIONS})

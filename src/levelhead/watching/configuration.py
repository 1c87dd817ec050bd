"""What the configuration of a watched model says about one of its modules.

Modules of Hugging Face models have it themselves, or a module around them has.
"""

from __future__ import annotations

from typing import Any

from levelhead.diagnosis import shipped_scales
from levelhead.diagnosis.shipped_scales import Configured
from levelhead.watching.module_stack import WatchedModule


def architecture(watched: WatchedModule) -> str | None:
    """Hugging Face's word for the architecture, from the module's own configuration or class."""
    module = watched.module
    name = getattr(getattr(module, "config", None), "model_type", None)
    if isinstance(name, str):
        return name
    parts = type(module).__module__.split(".")
    return parts[2] if parts[:2] == ["transformers", "models"] and len(parts) > 2 else None


def right_scale(watched: WatchedModule, d_k: int) -> Configured:
    """The right scale by the configuration, if that says anything about it."""
    config = _nearest(watched)
    layer = getattr(watched.module, "layer_idx", None)
    if not isinstance(layer, int):
        layer = next((int(part) for part in watched.name.split(".") if part.isdigit()), 0)
    kinds = getattr(config, "layer_types", None)
    kind = getattr(watched.module, "layer_type", None)
    if kind is None and isinstance(kinds, list | tuple) and 0 <= layer < len(kinds):
        kind = kinds[layer]
    return shipped_scales.configured(config, architecture(watched), d_k, layer, kind)


def _nearest(watched: WatchedModule) -> Any:
    """The configuration of the module, or of the nearest module around it."""
    own = getattr(watched.module, "config", None)
    if own is not None or not type(watched.module).__module__.startswith("transformers."):
        return own
    module, config = watched.watch.model, getattr(watched.watch.model, "config", None)
    for part in watched.name.split("."):
        inner = getattr(module, part, None)
        if inner is None:
            break
        module, config = inner, getattr(inner, "config", None) or config
    return config

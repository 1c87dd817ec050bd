"""Hugging Face models on levelhead: `use(model)` serves their attention until it is undone.

transformers is imported when `use` is called.
"""

from __future__ import annotations

from levelhead.torch.huggingface.serving import use

__all__ = ["use"]

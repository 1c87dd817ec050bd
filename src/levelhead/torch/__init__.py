"""levelhead in PyTorch: differentiable, drop-in, and as modules.

Importing this imports torch; `import levelhead` does not.
"""

from __future__ import annotations

from levelhead.torch.nn import KeyValueCache, MultiHeadAttention
from levelhead.torch.sdpa import patch, scaled_dot_product_attention

__all__ = ["KeyValueCache", "MultiHeadAttention", "patch", "scaled_dot_product_attention"]

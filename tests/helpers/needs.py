"""What tests need that is not everywhere, and is left out by name."""

from __future__ import annotations

import pytest

from levelhead.extras import installed

LEFT_OUT = pytest.StashKey[dict[str, str]]()  # what, and for want of what

# What `levelhead.jax` stands on, and a build that found jaxlib.
_NEEDED = ("jax", "flax", "equinox", "keras", "levelhead._jax_ffi")
NO_JAX = " and ".join(name for name in _NEEDED if not installed(name))

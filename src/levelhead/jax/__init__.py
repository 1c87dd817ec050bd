"""levelhead in JAX: attention and its statistics under jit, grad, vmap and shard_map.

Importing this imports jax; `import levelhead` does not.
"""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from levelhead.errors import bad_import
from levelhead.extras import JAX_PYTHON, command, installed, missing
from levelhead.info import is_pure

if sys.version_info < JAX_PYTHON:  # no release of jax that can be installed here would do
    _WANTED = "Python {}.{} or later, as jax 0.10 does".format(*JAX_PYTHON)
    raise bad_import("levelhead.jax", _WANTED, platform.python_version(), "Use another interpreter")
if _error := missing("levelhead.jax", "jax", install=command("jax")):
    raise _error
if tuple(map(int, metadata.version("jax").split(".")[:2])) < (0, 10):
    raise bad_import("levelhead.jax", "jax 0.10 or later", metadata.version("jax"), f"Run: {command('jax')}")
if not installed("levelhead._jax_ffi") and not is_pure():
    _ADVICE = "With jax installed, pip install --no-build-isolation --force-reinstall --no-deps levelhead"
    raise bad_import("levelhead.jax", "a build with jaxlib's headers", "one without", _ADVICE)

from levelhead.jax.drop_in import dot_product_attention
from levelhead.jax.front import attention, observe
from levelhead.jax.observation import Observation
from levelhead.jax.seen import Seen, run
from levelhead.jax.watched import flax_attention, sown, watch

__all__ = ["Observation", "Seen", "attention", "dot_product_attention", "flax_attention", "observe", "run", "sown"]
__all__ += ["watch"]

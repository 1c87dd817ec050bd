"""The core as custom calls of XLA, for `levelhead.jax.operators` to register."""

from typing import Any

api: tuple[int, int]  # of XLA's headers at the build
attend: Any  # a capsule, as attend_backward
attend_backward: Any

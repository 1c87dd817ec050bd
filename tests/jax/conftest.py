"""These tests are left out, by name, where JAX is missing or levelhead was built without it. For Python 3.10 there is
no JAX that they could run with, in CI neither."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from needs import LEFT_OUT, NO_JAX


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    required = os.environ.get("CI") == "true" and sys.version_info >= (3, 11)
    if not NO_JAX or required or not collection_path.name.startswith("test_"):
        return None
    config.stash[LEFT_OUT]["levelhead.jax"] = NO_JAX
    return True

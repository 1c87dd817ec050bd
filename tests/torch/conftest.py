"""What tests of PyTorch's side share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def alone() -> Iterator[None]:
    """The same numbers every time; one thread, since thousands of tiny calls gain nothing from more."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

"""LEVELHEAD_OBSERVE: a value without effect is named."""

from __future__ import annotations

import pytest

import levelhead as lh
from levelhead.device.choice import VARIABLE


@pytest.mark.parametrize("value", ["core", "cuda", "triton"])
def test_a_value_without_effect_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert any(line.startswith(f"{VARIABLE}={value}: ignored") for line in lh.info().off)
    assert lh.info().watched["cpu"].startswith("core")


def test_plain_torch_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "torch")
    assert lh.info().watched["cpu"] == f"torch ({VARIABLE}=torch is set)"

"""LEVELHEAD_OBSERVE: a value without effect is named. A Triton that is absent or broken leaves plain torch."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import levelhead as lh
from levelhead.device import choice
from levelhead.device.attempt import attempted
from levelhead.device.choice import VARIABLE


@pytest.mark.parametrize("value", ["core", "cuda", "triton"])
def test_a_value_without_effect_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert any(line.startswith(f"{VARIABLE}={value}: ignored") for line in lh.info().off)
    assert lh.info().watched["cpu"].startswith("core")


class _Refusing:
    """A finder that knows of no Triton."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(name)


@pytest.mark.parametrize("way", ["a finder raises", "a module without a spec", "None in its place"])
def test_a_triton_that_cannot_be_found_is_not_installed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if way == "a finder raises":
        monkeypatch.delitem(sys.modules, "triton", raising=False)
        monkeypatch.setattr(sys, "meta_path", [_Refusing(), *sys.meta_path])
    else:
        monkeypatch.setitem(sys.modules, "triton", ModuleType("triton") if "spec" in way else None)
    assert lh.info().watched["cuda"] == "torch (triton is not installed)"


def test_a_folder_of_a_package_s_name_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder_of_mine").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not choice.installed("folder_of_mine") and choice.installed("torch")


def test_plain_torch_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "torch")
    assert lh.info().watched["cpu"] == f"torch ({VARIABLE}=torch is set)"


def test_devices_without_a_kernel_are_named() -> None:
    assert lh.info().watched["mps"] == "torch (no kernel for mps)"


def test_a_triton_that_cannot_be_imported_leaves_the_watch_to_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("libcuda not found")

    monkeypatch.setattr(choice, "_failures", [])
    monkeypatch.setattr(choice, "installed", lambda package: True)
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.warns(UserWarning, match="by plain torch, which is slower, .*OSError: libcuda not found"):
        assert attempted(broken, torch.zeros(1, 2, 5, 16)) is None
    assert choice.choice("cuda") == ("torch", "the Triton kernel failed: OSError: libcuda not found")

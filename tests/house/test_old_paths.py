"""Import paths of version 0.1 give the modules of today: the same objects, however the import is spelled."""

from __future__ import annotations

import importlib
import json
import pickle
import subprocess
import sys

import pytest
import torch

import levelhead as lh
from levelhead import old_paths

# In a process of its own: which module an import finds depends on what was imported before.
EVERY_PATH = """
import importlib, json, pkgutil, sys

import levelhead
from levelhead.old_paths import NEW_PATHS

below = {}
for old, new in NEW_PATHS.items():
    if search := getattr(importlib.import_module(new), "__path__", None):
        below |= {f"{old}.{x.name}": f"{new}.{x.name}" for x in pkgutil.iter_modules(search)}
paths = {**below, **NEW_PATHS}

def plain(old):
    scope = {}
    exec(f"import {old} as module", scope)
    return scope["module"]

def from_package(old):
    scope, (package, _, name) = {}, old.rpartition(".")
    exec(f"from {package} import {name} as module", scope)
    return scope["module"]

wrong = []
for spelled in (importlib.import_module, plain, from_package):
    for old in [name for name in sys.modules if name == "levelhead.health" or name in paths]:
        del sys.modules[old]
    vars(levelhead).pop("health", None)
    for old, new in paths.items():
        module, today = spelled(old), importlib.import_module(new)
        if module is not today or module.__spec__.name != new or sys.modules.get(old, today) is not today:
            wrong.append([spelled.__name__, old, module.__name__])
print(json.dumps([len(below), wrong]))
"""


def test_every_old_path_gives_the_module_of_today() -> None:
    done = subprocess.run([sys.executable, "-c", EVERY_PATH], capture_output=True, text=True, check=True, timeout=280)
    below, wrong = json.loads(done.stdout)
    assert below >= 10  # the files of remedies/ and sinks/
    assert wrong == []


def test_classes_keep_their_identity_for_except_and_pickle() -> None:
    old = importlib.import_module("levelhead.health.remedies.remedy")
    with pytest.raises(old.NotInForceError):
        raise lh.remedies.NotInForceError("x")
    assert pickle.loads(b"clevelhead.health.remedies.clip\nClipped\n.") is lh.remedies.Clipped


def test_a_submodule_that_never_was_is_an_import_error() -> None:
    for name in ("levelhead.health.sinks.nothing", "levelhead.health.nothing", "levelhead.nothing"):
        with pytest.raises(ModuleNotFoundError, match=name):
            importlib.import_module(name)


def test_old_modules_are_attributes_of_the_package() -> None:
    for old in old_paths.NEW_PATHS:
        package, _, name = old.rpartition(".")
        if package == "levelhead":
            assert getattr(lh, name) is importlib.import_module(old)


def test_names_that_left_their_module_are_still_found_there() -> None:
    for module, names in old_paths.NEW_NAMES.items():
        for name, (home, new) in names.items():
            assert getattr(importlib.import_module(module), name) is getattr(importlib.import_module(home), new)
    report = importlib.import_module("levelhead.health.report")
    with lh.watch(torch.nn.Linear(1, 1)) as w:
        assert "\n".join(report.lines(w.run(), width=90)).startswith("Linear: no attention")
    assert lh.scoring.Scale is lh.scaling.Scale and lh.scoring.ScaleLike is lh.scaling.ScaleLike

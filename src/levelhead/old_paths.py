"""Import paths of version 0.1 that users may have written, and where each module lives now.

`import levelhead` puts one finder at the front of `sys.meta_path`. It answers for the names below and their submodules
only, with the module at its new path: the same object under a second name, so classes keep their identity. It is the
first finder because an aliased package has a `__path__`: the finder of files would load its submodules a second time.
No warning is raised; both paths stay valid.
`levelhead.health` itself is a namespace without code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast

# Modules of `levelhead.health` that kept their name, by the room they moved to; then those that changed it.
_MOVED = {
    "diagnosis": "compare diagnose findings symptoms thresholds",
    "runs": "counterfactual metrics record tally",
    "show": "view",
    "watching": "amend coverage doctor intercept measure ranks watch",
}
_RENAMED = {
    "deep": "watching.by_hand",
    "growth": "diagnosis.logit_growth",
    "ledger": "watching.step_tallies",
    "observed": "runs.run_from_observation",
    "operator": "watching.compiled",
    "page": "show.html",
    "places": "watching.module_stack",
    "reading": "watching.effective_scale",
    "remedies": "remedies",
    "report": "show.text",
    "scale": "diagnosis.wrong_scale",
    "shipped": "diagnosis.shipped_scales",
    "sinks": "sinks",
    "transformers_calls": "watching.functions.transformers",
    "sinks.needs": "extras",
    "sinks.training": "sinks.trainer",
    "vial": "show.gauge_svg",
}
_RENAMED |= {f"sinks.{name}": f"runs.{name}" for name in ("files", "jsonl", "parquet", "sessions")}
_RENAMED |= {name: f"{room}.{name}" for room, names in _MOVED.items() for name in names.split()}
_CALL = ("arrays", "dropout", "scaling", "segments", "shapes")

NEW_PATHS = {f"levelhead.health.{old}": f"levelhead.{new}" for old, new in _RENAMED.items()}
NEW_PATHS |= {f"levelhead.{name}": f"levelhead.call.{name}" for name in _CALL}
NEW_PATHS["levelhead.scoring"] = "levelhead.call.options"
NEW_PATHS["levelhead.explanation.head"] = "levelhead.explanation.head_steps"  # saved explanations name it
NEW_PATHS["levelhead.torch.ops"] = "levelhead.torch.operators"

# Names that moved out of their module: the old module and name, the new ones.
NEW_NAMES = {
    "levelhead.health.report": {"colour_wanted": ("levelhead.terminal", "colour_wanted")},
    "levelhead.health.view": {
        "title": ("levelhead.words", "module_title"),
        "verdict": ("levelhead.diagnosis.findings", "counted"),
    },
}


def new_path(old: str) -> str | None:
    """Where the module of an old path is now; submodules of an aliased package move with it."""
    package, _, name = old.rpartition(".")
    if old in NEW_PATHS:
        return NEW_PATHS[old]
    if package not in NEW_PATHS:
        return None
    new = f"{NEW_PATHS[package]}.{name}"
    return new if find_spec(new) is not None else None


class _OldPaths:
    """Finds a module by its old path, and loads nothing but the module at the new one.

    It is finder and loader by its methods: `importlib.abc` takes longer to import than levelhead.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "levelhead.health":
            return ModuleSpec(fullname, cast(Any, self))
        new = new_path(fullname)
        return None if new is None else ModuleSpec(fullname, cast(Any, self), loader_state=new)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name == "levelhead.health":
            return _namespace(spec.name)
        module = import_module(spec.loader_state)
        for name, (home, new) in NEW_NAMES.get(spec.name, {}).items():
            setattr(module, name, getattr(import_module(home), new))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The import system has put the old path's spec into the module; it keeps its own."""
        spec = module.__spec__
        if spec is not None and spec.name != "levelhead.health":
            module.__spec__ = spec.loader_state


def _namespace(name: str) -> ModuleType:
    namespace = ModuleType(name, "Old import paths of attention health; see `levelhead.old_paths`.")
    namespace.__path__ = []  # it has submodules

    def find(attribute: str) -> ModuleType:
        if f"{name}.{attribute}" in NEW_PATHS:
            return import_module(f"{name}.{attribute}")
        raise AttributeError(f"module {name!r} has no attribute {attribute!r}")

    vars(namespace)["__getattr__"] = find
    return namespace


def install() -> None:
    """Once per process; a second time does nothing."""
    if not any(isinstance(finder, _OldPaths) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OldPaths())

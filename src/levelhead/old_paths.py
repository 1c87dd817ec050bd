"""Import paths of version 0.1 that users may have written, and where each module lives now.

`import levelhead` appends one finder to `sys.meta_path`. It answers for the names below only, with the module at its
new path: the same object under a second name, so classes keep their identity. No warning is raised; both paths stay
valid.
`levelhead.health` itself is a namespace without code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_HEALTH = {
    "amend": "watching.amend",
    "compare": "diagnosis.compare",
    "counterfactual": "runs.counterfactual",
    "coverage": "watching.coverage",
    "deep": "watching.by_hand",
    "diagnose": "diagnosis.diagnose",
    "doctor": "watching.doctor",
    "findings": "diagnosis.findings",
    "growth": "diagnosis.logit_growth",
    "intercept": "watching.intercept",
    "ledger": "watching.step_tallies",
    "measure": "watching.measure",
    "metrics": "runs.metrics",
    "observed": "runs.run_from_observation",
    "operator": "watching.compiled",
    "page": "show.html",
    "places": "watching.module_stack",
    "ranks": "watching.ranks",
    "reading": "watching.effective_scale",
    "record": "runs.record",
    "remedies": "remedies",
    "remedies.clip": "remedies.clip",
    "remedies.logits": "remedies.logits",
    "remedies.norm": "remedies.norm",
    "remedies.projections": "remedies.projections",
    "remedies.remedy": "remedies.remedy",
    "report": "show.text",
    "scale": "diagnosis.wrong_scale",
    "shipped": "diagnosis.shipped_scales",
    "sinks": "sinks",
    "sinks.files": "runs.files",
    "sinks.huggingface": "sinks.huggingface",
    "sinks.jsonl": "runs.jsonl",
    "sinks.lightning": "sinks.lightning",
    "sinks.needs": "runs.needs",
    "sinks.parquet": "runs.parquet",
    "sinks.pictures": "sinks.pictures",
    "sinks.sessions": "runs.sessions",
    "sinks.tensorboard": "sinks.tensorboard",
    "sinks.training": "sinks.trainer",
    "sinks.wandb": "sinks.wandb",
    "symptoms": "diagnosis.symptoms",
    "tally": "runs.tally",
    "thresholds": "diagnosis.thresholds",
    "transformers_calls": "watching.transformers_calls",
    "vial": "show.gauge_svg",
    "view": "show.view",
    "watch": "watching.watch",
}
_CALL = ("arrays", "dropout", "scaling", "segments", "shapes")

NEW_PATHS = {f"levelhead.health.{old}": f"levelhead.{new}" for old, new in _HEALTH.items()}
NEW_PATHS |= {f"levelhead.{name}": f"levelhead.call.{name}" for name in _CALL}
NEW_PATHS["levelhead.scoring"] = "levelhead.call.options"


class _OldPaths(MetaPathFinder, Loader):
    """Finds a module by its old path, and loads nothing but the module at the new one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "levelhead.health" or fullname in NEW_PATHS:
            return ModuleSpec(fullname, self)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name == "levelhead.health":
            return _namespace(spec.name)
        module = import_module(NEW_PATHS[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The import system has put the old path's spec into the module; it keeps its own."""
        spec = module.__spec__
        if spec is not None and spec.name in NEW_PATHS:
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
        sys.meta_path.append(_OldPaths())

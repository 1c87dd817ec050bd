"""Against an earlier checkpoint: a scale that was folded into the weights of q and k since, and is applied again.

The earlier state is a model, a file or directory of weights, or a run that was recorded of it. Weights are compared by
their norms. A run holds none: there the sizes of q and k at the calls are compared, which also depend on the batch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from levelhead import models
from levelhead.checks import short_repr
from levelhead.diagnosis.findings import Finding
from levelhead.diagnosis.wrong_scale import UNUSUAL, WRONG
from levelhead.errors import LevelheadError, bad_type, bad_value
from levelhead.extras import command, need
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.result import finding
from levelhead.runs import files
from levelhead.runs.record import Run
from levelhead.watching import effective_scale, watchable

_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_INSIDE = ("state_dict", "model_state_dict", "model")  # where checkpoints of training loops hold the weights
_WRAPPERS = ("module.", "_orig_mod.")
_WEIGHTS_NEAR, _RUN_NEAR = 1.1, 1.4  # own: factors; another batch changes the sizes of q and k by some ten percent


@dataclass(frozen=True)
class Earlier:
    """The earlier state."""

    sizes: Mapping[str, float]  # by module: |q| · |k| of its weights, or at its calls
    of_calls: bool
    near: float


def read(given: Any) -> Earlier:
    """A model, a run, or a path to one of them."""
    if isinstance(given, str | os.PathLike):
        given = _opened(Path(given))
    if isinstance(given, nn.Module):
        named = watchable.unwrapped(given).named_modules()
        weights = ((name, getattr(module, "weight", None)) for name, module in named)
        return Earlier(_products(weights), False, _WEIGHTS_NEAR)
    if isinstance(given, Run):
        return Earlier(_of_calls(given), True, _RUN_NEAR)
    if isinstance(given, Mapping):
        return Earlier(_products(_named(given)), False, _WEIGHTS_NEAR)
    wanted = "a torch.nn.Module, a Run, or a path to a checkpoint or a recorded run"
    raise bad_type("against", wanted, short_repr(given), "Give the earlier model itself, or where it is")


def _opened(path: Path) -> Any:
    wanted, advice = "a checkpoint or a recorded run", "Give safetensors, a state_dict, a model's directory or a run"
    if not path.exists():
        raise bad_value("against", wanted, f"{str(path)!r}, which does not exist", advice)
    try:
        if path.suffix == ".safetensors":
            return need("against", "safetensors.torch", install=command("watch")).load_file(path)
        if path.suffix in _WEIGHTS:
            _check_unpickler(path)
            content = torch.load(path, map_location="cpu", weights_only=True)
            inside = [content[name] for name in _INSIDE if isinstance(content, Mapping) and name in content]
            return next((x for x in inside if isinstance(x, Mapping)), content)
        if path.suffix == ".gguf" or (path / "config.json").exists():
            return models.open(path).model
        return files.read(path)
    except LevelheadError:
        raise
    except Exception as error:
        given = f"{str(path)!r}, which cannot be read: {type(error).__name__}: {error}"[:300]
        raise bad_value("against", wanted, given, advice) from error


def _check_unpickler(path: Path) -> None:
    """A file of torch.save is a pickle. Before 2.10 a prepared one runs code in spite of weights_only (CVE-2025-32434,
    CVE-2026-24747)."""
    if torch.__version__ < "2.10":  # compares versions, not letters
        wanted = f"PyTorch 2.10 or newer, to read the pickle {path.name} safely"
        advice = "Save the weights as safetensors where you trust them"
        raise bad_value("against", wanted, f"PyTorch {torch.__version__}", advice)


def _named(state: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Modules and weights of a state_dict."""
    for key, x in state.items():
        for wrapper in _WRAPPERS:
            key = key.removeprefix(wrapper)
        if key.endswith(".weight"):
            yield key.removesuffix(".weight"), x


# ---- sizes


def _products(weights: Iterable[tuple[str, Any]]) -> dict[str, float]:
    found: dict[str, dict[str, Tensor]] = {}
    for name, weight in weights:
        role = effective_scale.role(name)
        if role in ("q", "k", "qkv") and isinstance(weight, Tensor) and weight.dim() == 2:
            found.setdefault(name.rpartition(".")[0], {})[role] = weight.detach()
    sizes = {}
    for module, by_role in found.items():
        q, k, joint = (by_role.get(role) for role in ("q", "k", "qkv"))
        if joint is not None:
            q, k, _ = torch.chunk(joint if joint.shape[0] >= joint.shape[1] else joint.mT, 3)
        if q is not None and k is not None:
            sizes[module] = float(q.double().norm() * k.double().norm())
    return sizes


def _of_calls(run: Run) -> dict[str, float]:
    return {r.module: float(r.heads.q_rms.mean() * r.heads.k_rms.mean()) for r in run.latest}


# ---- the check


def against(flight: Flight, earlier: Earlier, run: Run, found: list[Finding]) -> list[Finding]:
    """Compares the sizes of q and k with those of the earlier state; returns the findings that remain."""
    name = "against"
    changed = "q and k at the calls, compared with the run" if earlier.of_calls else "the weights of q and k, compared"
    named = ((name, getattr(module, "weight", None)) for name, module in flight.model.named_modules())
    now = _of_calls(run) if earlier.of_calls else _products(named)
    wrong, same = [], 0
    for record in run.latest:
        before, after = earlier.sizes.get(record.module, 0.0), now.get(record.module, 0.0)
        if not (before > 0 and after > 0):
            continue
        ratio, root = after / before, math.sqrt(record.facts.d_k)
        scale = record.facts.scale or 1 / root
        folded = next((r for r in (1 / root, root) if _near(ratio, r, earlier.near)), None)
        if folded is None:
            same += 1
            continue
        if _near(scale * root, 1 / folded, _WEIGHTS_NEAR):  # the call makes up for it
            found = [f for f in found if not (f.kind in (WRONG, UNUSUAL) and f.module == record.module)]
            same += 1
            continue
        of = "Queries and keys at the call" if earlier.of_calls else "The weights of q and k"
        why = f"{of} together are √d_k times another size than before, and the call still scales: the scale is folded "
        why += "into the weights and applied again."
        advice = "Undo the factor in the weights, or pass scale=1.0 to the attention function."
        folds = finding("scale folded into weights", "warning", record.module, why, advice, ratio=ratio, scale=scale)
        wrong.append(folds)
    if wrong:
        flight.failed(name, changed, f"in {len(wrong)} modules", *wrong)
    elif same:
        flight.passed(name, changed, f"{same} modules have no scale in their weights that was not there")
    else:
        flight.unknown(name, changed, "no q and k of modules with the same names")
    return found


def _near(a: float, b: float, within: float) -> bool:
    return abs(math.log(max(a, 1e-30) / b)) < math.log(within)

"""Does `watch` see every freshly initialised Hugging Face model, and does `diagnose` stay silent about all of them?

For every architecture of the zoo that runs: watched as it is loaded, with eager attention, and with deep=True. Written
down are the warnings and errors, the modules that attended unseen, and whether the output kept its bits.

    python bench/huggingface_watch.py FILE ZOO
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import levelhead as lh
from huggingface_zoo import SECONDS, Specimen, limited, specimen, sweep_zoo

VARIANTS: dict[str, dict[str, Any]] = {"loaded": {}, "eager": {"implementation": "eager"}, "deep": {"deep": True}}


def examine(name: str, recipe: dict[str, Any]) -> dict[str, Any]:
    """What a watch says about an architecture, by variant."""
    found: dict[str, Any] = {}
    for variant, options in VARIANTS.items():
        options = dict(options)
        try:
            with limited(2 * SECONDS):
                built = specimen(name, recipe, options.pop("implementation", None))
                found[variant] = watched(built, **options)
        except Exception as error:
            found[variant] = {"error": f"{type(error).__name__}: {error}"[:600]}
    return found


def watched(built: Specimen, **options: Any) -> dict[str, Any]:
    with torch.no_grad():
        before = built.run()
        with lh.watch(built.model, **options) as watch:
            after = built.run()
    run = watch.run()
    lines = [line for line in run.coverage if not line.seen and "did not run" not in line.how]
    found = {
        "modules": len(run.latest),
        "findings": [],
        "unseen": sorted({f"{line.kind}: {line.how}" for line in lines}),
        "same": same(before, after),
    }
    if run.latest:
        judged = lh.diagnose(run)
        found["findings"] = [str(x)[:400] for x in judged if x.severity in ("error", "warning")]
    return found


def same(a: Any, b: Any) -> bool:
    """Whether two outputs have the same bits."""
    pairs = list(zip(tensors(a), tensors(b), strict=True))
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)


def tensors(x: Any) -> list[Tensor]:
    """Every tensor inside an output, in order."""
    if isinstance(x, Tensor):
        return [x]
    if hasattr(x, "to_tuple"):
        x = x.to_tuple()
    if isinstance(x, dict):
        x = list(x.values())
    return [tensor for inner in x for tensor in tensors(inner)] if isinstance(x, (list, tuple)) else []


if __name__ == "__main__":
    sweep_zoo(__file__, examine)

"""Does `lh.preflight` stay silent about freshly initialised Hugging Face models?

For every architecture of the zoo that runs: warnings and errors, and the verdict of every check.

    python bench/huggingface_preflight.py FILE ZOO
"""

from __future__ import annotations

from typing import Any

import levelhead as lh
from huggingface_zoo import SECONDS, limited, specimen, sweep_zoo


def examine(name: str, recipe: dict[str, Any]) -> dict[str, Any]:
    """What a pre-flight says about an architecture."""
    with limited(6 * SECONDS):
        built = specimen(name, recipe)
        result = lh.preflight(built.model, dict(built.inputs))
    found = [str(x)[:400] for x in result.findings if x.severity != "note"]
    return {"findings": found, "checks": {check.name: check.verdict for check in result.checks}}


if __name__ == "__main__":
    sweep_zoo(__file__, examine)

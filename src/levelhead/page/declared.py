"""What the lab declares about its figures, as a JavaScript module that the page imports.

Parameters, what each panel needs, and the claims with their verdicts: each is declared once, in `levelhead.lab`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from levelhead.lab import figures
from levelhead.lab.parameters import PARAMETERS, POWER

DECLARED = "declared.js"


def declared() -> bytes:
    """The module's text."""
    constants: dict[str, Any] = {
        "PARAMETERS": {
            name: {"kind": type(parameter).__name__.lower(), **asdict(parameter)}
            for name, parameter in PARAMETERS.items()
        },
        "NEEDS": {id: figures.NEEDS[id] for id in figures.PANELS},
        "CLAIMS": figures.claims(),
        "POWER": POWER,
        "OLD_SCALES": figures.OLD_SCALES,
    }
    lines = (f"export const {name} = {json.dumps(value, ensure_ascii=False)};" for name, value in constants.items())
    return "\n".join(("// Made by levelhead.page.declared: what the lab declares.", *lines, "")).encode()

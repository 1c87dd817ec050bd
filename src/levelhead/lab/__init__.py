"""The lab: every claim about √d_k as an experiment, and the figures of the page.

>>> import levelhead as lh
>>> [claim.id for claim in lh.lab.claims()][:3]
['C1', 'C1a', 'C2']
>>> next(lh.lab.run("C4")).verdict
'confirmed'
"""

from __future__ import annotations

from typing import Any

# Two functions share their names with modules. The modules are loaded first: a module binds its name in the package
# only when it is first imported, so the functions keep theirs.
from levelhead.lab import claims as _folder_of_claims  # noqa: F401
from levelhead.lab.claim import Claim
from levelhead.lab.figure import Figure
from levelhead.lab.registry import claims
from levelhead.lab.result import Result
from levelhead.lab.runner import run

__all__ = ["Claim", "Figure", "Result", "claims", "figure", "run"]


def figure(id: str, **choices: Any) -> Figure:
    """A panel of the page by its id, or a claim's recorded result, as in `figure("C5")`: see `lab.figures`."""
    from levelhead.lab import figures

    return figures.figure(id, **choices)

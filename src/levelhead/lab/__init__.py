"""The lab: every claim about √d_k as an experiment, and the figures of the page.

>>> import levelhead as lh
>>> [claim.id for claim in lh.lab.claims()][:3]
['C1', 'C1a', 'C2']
>>> next(lh.lab.run("C4")).verdict
'confirmed'
"""

from __future__ import annotations

from typing import Any

# Two functions share their names with modules. These are loaded first: what a name is bound to
# afterwards stays, as a module takes its name in the package only when it is first imported.
from levelhead.lab import claims as _folder_of_claims  # noqa: F401
from levelhead.lab.claim import Claim
from levelhead.lab.figure import Figure
from levelhead.lab.registry import claims
from levelhead.lab.result import Result
from levelhead.lab.runner import run

__all__ = ["Claim", "Figure", "Result", "claims", "figure", "run"]


def figure(id: str, **choices: Any) -> Figure:
    """A figure of the page; `levelhead.lab.figures` says which there are and what they take."""
    from levelhead.lab import figures

    return figures.figure(id, **choices)

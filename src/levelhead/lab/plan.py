"""What a training of the lab depends on (`Plan`), and what is kept of it (`Curves`).

Numbers only: neither needs torch, so that recorded trainings can be read and judged without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from levelhead.call.scaling import rule
from levelhead.errors import bad_value
from levelhead.lab import tasks

MATRICES = ("q", "k", "v")  # W_Q, W_K, W_V
OPTIMISERS = ("adam", "sgd")
_LEAST = {"examples": 1, "d_k": 1, "depth": 1, "seed": 0, "steps": 0, "every": 1}


@dataclass(frozen=True)
class Plan:
    """The same plan gives the same curves."""

    task: str  # of levelhead.lab.tasks
    examples: int  # sequences to learn from
    rule: str  # of levelhead.call.scaling
    d_k: int
    depth: int
    seed: int
    steps: int
    every: int  # steps between marks
    rate: float
    optimiser: str = "adam"

    def __post_init__(self) -> None:
        rule(self.rule)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            self._require(is_whole and value >= least, name, f"a whole number of at least {least}")
        self._require(isinstance(self.rate, float) and 0 < self.rate < math.inf, "rate", "a positive float")
        for name, choices in (("task", tuple(tasks.TASKS)), ("optimiser", OPTIMISERS)):
            self._require(getattr(self, name) in choices, name, f"one of {', '.join(choices)}")

    def _require(self, condition: bool, name: str, wanted: str) -> None:
        if not condition:
            raise bad_value(name, wanted, repr(getattr(self, name)), "Change the training's plan")


@dataclass(frozen=True)
class Curves:
    """What a training was like, at marks `every` steps apart, from step 0 to the last.

    Loss and gradients of training are means over the steps since the mark before (at step 0: that step alone).
    Everything else is of the weights at the mark, before they are updated.
    """

    step: list[int]
    loss: list[float]  # of the batches, in nats
    held_out: list[float]  # loss on sequences that are never learnt from
    gradient: dict[str, list[float]]  # "q", "k", "v": ‖dL/dW‖ over all layers
    moved: dict[str, list[float]]  # "q", "k", "v": ‖W − W₀‖ / ‖W₀‖ over all layers
    keys: list[float]  # whose logits the gradient reaches, effectively, in a row
    reached: list[float]  # share of all logits that it reaches, effectively
    entropy: list[list[list[float]]]  # H/ln n by mark, layer and head, on held-out sequences

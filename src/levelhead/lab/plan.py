"""What a training of the lab depends on (`Plan`), and what is kept of it (`Curves`).

Numbers only: neither needs torch, so that recorded trainings can be read and judged without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from levelhead.call.scaling import rule
from levelhead.errors import LevelheadValueError, expected
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
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise _wrong(name, f"a whole number of at least {least}", value)
        if not isinstance(self.rate, float) or not 0 < self.rate < math.inf:
            raise _wrong("rate", "a positive float", self.rate)
        for name, choices in (("task", tuple(tasks.TASKS)), ("optimiser", OPTIMISERS)):
            if getattr(self, name) not in choices:
                raise _wrong(name, f"one of {', '.join(choices)}", getattr(self, name))


@dataclass(frozen=True)
class Curves:
    """What a training was like, at marks `every` steps apart, from step 0 to the last.

    Loss and gradients of training are means over the steps since the mark before (at step 0: that
    step alone). Everything else is of the weights at the mark, before they are updated.
    """

    step: list[int]
    loss: list[float]  # of the batches, in nats
    held_out: list[float]  # loss on sequences that are never learnt from
    gradient: dict[str, list[float]]  # "q", "k", "v": ‖dL/dW‖ over all layers
    moved: dict[str, list[float]]  # "q", "k", "v": ‖W − W₀‖ / ‖W₀‖ over all layers
    keys: list[float]  # whose logits the gradient reaches, effectively, in a row
    reached: list[float]  # share of all logits that it reaches, effectively
    entropy: list[list[list[float]]]  # H/ln n by mark, layer and head, on held-out sequences


def _wrong(name: str, wanted: str, given: object) -> LevelheadValueError:
    return LevelheadValueError(expected(name, wanted, repr(given), "Change the training's plan"))

"""One training of the lab's small transformer, and what is kept of it: `train(plan)` gives `Curves`.

A training is a function of its plan: the same plan gives the same curves. Between two scale rules
nothing differs but the number that multiplies q·k: weights, sequences, their order and the optimiser
are the same. Gradients are not clipped and rates are not warmed up, since both would hide what is to
be seen. It caches nothing and judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from levelhead.errors import LevelheadValueError, expected
from levelhead.lab import tasks
from levelhead.lab.claim import UndecidedError
from levelhead.scaling import rule

if TYPE_CHECKING:
    from torch import Tensor

    from levelhead.lab.transformer import Transformer

__all__ = ["MATRICES", "OPTIMISERS", "Curves", "Plan", "require_torch", "train"]

MATRICES = ("q", "k", "v")
OPTIMISERS = ("adam", "sgd")
BETAS, MOMENTUM = (0.9, 0.95), 0.9  # of Adam; of SGD
TOKENS = 512  # in a batch


@dataclass(frozen=True)
class Plan:
    """Everything a training depends on."""

    task: str  # of levelhead.lab.tasks
    rule: str  # of levelhead.scaling
    d_k: int
    depth: int
    seed: int
    steps: int
    every: int  # steps between marks
    rate: float
    optimiser: str = "adam"

    def __post_init__(self) -> None:
        rule(self.rule)
        for name, least in (("d_k", 1), ("depth", 1), ("seed", 0), ("steps", 0), ("every", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise _wrong(name, f"a whole number of at least {least}", value)
        if not isinstance(self.rate, float) or not 0 < self.rate < float("inf"):
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


def train(plan: Plan) -> Curves:
    """On one thread, leaving torch's global state as it was."""
    torch = require_torch()
    from levelhead.lab.transformer import Transformer

    task = tasks.make(plan.task, plan.seed)
    with _alone(torch, plan.seed):
        model = Transformer(task, rule=plan.rule, d_k=plan.d_k, depth=plan.depth)
        return _Training(plan, task, model).curves()


class _Training:
    """A model on its way, and the marks so far."""

    def __init__(self, plan: Plan, task: tasks.Task, model: Transformer) -> None:
        import torch

        self.plan, self.model = plan, model
        self.learnt, self.held_out = _tensors(task.learnt), _tensors(task.held_out)
        self.batch = max(TOKENS // task.learnt.tokens.shape[1], 1)
        self.chance = np.random.default_rng([plan.seed, 1])
        weights = model.parameters()
        self.optimiser = (
            torch.optim.Adam(weights, plan.rate, betas=BETAS)
            if plan.optimiser == "adam"
            else torch.optim.SGD(weights, plan.rate, momentum=MOMENTUM)
        )
        self.begin = {name: self.matrices(name).clone() for name in MATRICES}

    def curves(self) -> Curves:
        marks, since = [], []
        for step in range(self.plan.steps + 1):
            marked = step % self.plan.every == 0 or step == self.plan.steps
            state = self.state() if marked else {}
            since.append(self.update(probe=marked))
            if marked:
                means = {name: float(np.mean([x[name] for x in since])) for name in since[0]}
                marks.append({"step": step, **state, **means, **self.logit_gradient()})
                since = []
        column = {name: [mark[name] for mark in marks] for name in marks[0]}
        for kind in ("gradient", "moved"):
            column[kind] = {name: column.pop(f"{kind} {name}") for name in MATRICES}  # type: ignore[assignment]
        return Curves(**column)

    def update(self, *, probe: bool) -> dict[str, float]:
        """One step; with a probe in every layer, the gradient of the logits stays readable."""
        import torch

        from levelhead.lab.transformer import HEADS

        tokens, answers = self.learnt
        which = torch.from_numpy(self.chance.integers(len(tokens), size=self.batch))
        T = tokens.shape[1]
        for block in self.model.blocks:
            zeros = torch.zeros(self.batch, HEADS, T, T, requires_grad=True)
            block.probe = zeros if probe else None
        loss = self.model.loss(tokens[which], answers[which])
        self.optimiser.zero_grad()
        loss.backward()
        gradients = {
            f"gradient {name}": float(self.matrices(name, gradient=True).norm())
            for name in MATRICES
        }
        self.optimiser.step()
        return {"loss": loss.item(), **gradients}

    def state(self) -> dict[str, Any]:
        """Of the weights as they are."""
        import torch

        with torch.no_grad():
            held_out = float(self.model.loss(*self.held_out, observe=True))
        moved = {
            f"moved {name}": float((self.matrices(name) - begin).norm() / begin.norm())
            for name, begin in self.begin.items()
        }
        seen = [block.seen.heads.normalised_entropy.mean(0) for block in self.model.blocks]
        return {"held_out": held_out, **moved, "entropy": [heads.tolist() for heads in seen]}

    def matrices(self, name: str, *, gradient: bool = False) -> Tensor:
        """W_Q, W_K or W_V of all layers, or their gradients, stacked."""
        import torch

        weights = [getattr(block, name).weight for block in self.model.blocks]
        return torch.stack([w.grad if gradient else w.detach() for w in weights])

    def logit_gradient(self) -> dict[str, float]:
        probes = [block.probe.grad.numpy() for block in self.model.blocks]
        keys, reached = zip(*map(spread, probes), strict=True)
        return {"keys": float(np.mean(keys)), "reached": float(np.mean(reached))}


def spread(gradient: Any) -> tuple[float, float]:
    """How many keys of a row, and which share of all logits, a gradient (B, H, T, T) reaches.

    Effectively: (Σ|g|)² / Σg² is n for n equal numbers and 1 for a single one. Rows of which
    nothing is asked count for neither, nor does a row's future.
    """
    g = np.abs(np.asarray(gradient, np.float64))
    sums, squares = g.sum(-1), (g**2).sum(-1)
    rows = squares > 0
    if not rows.any():
        return 0.0, 0.0
    keys = float((sums[rows] ** 2 / squares[rows]).mean())
    visible = np.broadcast_to(np.arange(1, g.shape[-1] + 1), rows.shape)[rows].sum()
    return keys, float(sums[rows].sum() ** 2 / squares[rows].sum() / visible)


def _tensors(examples: tasks.Examples) -> tuple[Tensor, Tensor]:
    import torch

    return torch.from_numpy(examples.tokens), torch.from_numpy(examples.answers)


def require_torch() -> Any:
    """torch, or the reason why nothing can be decided."""
    try:
        import torch
    except ImportError:
        message = 'training needs PyTorch: pip install "levelhead[torch]"'
        raise UndecidedError(message) from None
    return torch


@contextmanager
def _alone(torch: Any, seed: int) -> Iterator[None]:
    """One thread and a seeded generator; as before, afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model is slower on more
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _wrong(name: str, wanted: str, given: object) -> LevelheadValueError:
    return LevelheadValueError(expected(name, wanted, repr(given), "Change the training's plan"))

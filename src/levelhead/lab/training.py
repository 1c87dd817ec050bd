"""One training of the lab's small transformer: a `Plan` in, its `Curves` out. Needs torch.

Between two scale rules nothing differs but the number that multiplies q·k: weights, sequences, their order and the
optimiser are the same. Gradients are not clipped and rates are not warmed up: both would hide the effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from levelhead.lab import tasks
from levelhead.lab.plan import MATRICES, Curves, Plan
from levelhead.lab.transformer import HEADS, Transformer

BETAS, MOMENTUM = (0.9, 0.95), 0.9  # of Adam; of SGD
TOKENS = 512  # in a batch


def train(plan: Plan) -> Curves:
    """On one thread, leaving torch's global state as it was."""
    task = tasks.make(plan.task, plan.seed, plan.examples)
    with _alone(plan.seed):
        model = Transformer(task, rule=plan.rule, d_k=plan.d_k, depth=plan.depth)
        return _Training(plan, task, model).curves()


class _Training:
    def __init__(self, plan: Plan, task: tasks.Task, model: Transformer) -> None:
        self.plan, self.model = plan, model
        self.learnt, self.held_out = _tensors(task.learnt), _tensors(task.held_out)
        self.order = np.random.default_rng([plan.seed, 1])
        self.optimiser: torch.optim.Optimizer = (
            torch.optim.Adam(model.parameters(), plan.rate, betas=BETAS)
            if plan.optimiser == "adam"
            else torch.optim.SGD(model.parameters(), plan.rate, momentum=MOMENTUM)
        )
        self.begin = {name: self.weights(name).clone() for name in MATRICES}

    def curves(self) -> Curves:
        marks: list[dict[str, Any]] = []
        since: list[dict[str, float]] = []
        for step in range(self.plan.steps + 1):
            marked = step % self.plan.every == 0 or step == self.plan.steps
            state = self.state() if marked else {}
            probes = self.probes() if marked else None
            since.append(self.update(probes))
            if probes is not None:
                means = {name: float(np.mean([x[name] for x in since])) for name in since[0]}
                marks.append({"step": step, **state, **means, **_reach(probes)})
                since = []
        column: dict[str, Any] = {name: [mark[name] for mark in marks] for name in marks[0]}
        for kind in ("gradient", "moved"):
            column[kind] = {name: column.pop(f"{kind} {name}") for name in MATRICES}
        return Curves(**column)

    def update(self, probes: list[Tensor] | None) -> dict[str, float]:
        """One step on a batch: its loss, and the norms of its gradients."""
        tokens, answers = self.learnt
        which = torch.from_numpy(self.order.integers(len(tokens), size=self.batch))
        self.optimiser.zero_grad()
        loss = self.model.loss(tokens[which], answers[which], probes)
        loss.backward()  # type: ignore[no-untyped-call]
        norms = {f"gradient {name}": float(self.gradients(name).norm()) for name in MATRICES}
        self.optimiser.step()
        return {"loss": loss.item(), **norms}

    def state(self) -> dict[str, Any]:
        """Of the weights as they are."""
        held_out, entropy = self.model.observed(*self.held_out)
        state: dict[str, Any] = {"held_out": held_out, "entropy": entropy}
        for name, begin in self.begin.items():
            state[f"moved {name}"] = float((self.weights(name) - begin).norm() / begin.norm())
        return state

    @property
    def batch(self) -> int:
        return max(TOKENS // self.learnt[0].shape[1], 1)

    def probes(self) -> list[Tensor]:
        """Zeros to add to the logits of every layer."""
        T = self.learnt[0].shape[1]
        return [torch.zeros(self.batch, HEADS, T, T, requires_grad=True) for _ in self.model.blocks]

    def weights(self, name: str) -> Tensor:
        """W_Q, W_K or W_V of all layers."""
        return torch.stack([getattr(block, name).weight.detach() for block in self.model.blocks])

    def gradients(self, name: str) -> Tensor:
        return torch.stack([getattr(block, name).weight.grad for block in self.model.blocks])


def _reach(probes: list[Tensor]) -> dict[str, float]:
    """Means over layers of what the gradient of the logits reaches."""
    each = [spread(probe.grad.numpy()) for probe in probes if probe.grad is not None]
    keys, reached = np.mean(each, axis=0).tolist()
    return {"keys": keys, "reached": reached}


def spread(gradient: NDArray[Any]) -> tuple[float, float]:
    """How many keys of a row, and which share of all logits, a gradient (B, H, T, T) reaches.

    Effectively: (Σ|g|)² / Σg² is n for n equal numbers and 1 for a single one. Rows count by their share of the
    gradient, so that those which get nothing but rounding do not.
    """
    g = np.abs(gradient.astype(np.float64))
    B, H, T, _ = g.shape
    sums, squares = g.sum(-1), (g**2).sum(-1)
    rows = squares > 0
    if not rows.any():
        return 0.0, 0.0
    keys = float(np.average(sums[rows] ** 2 / squares[rows], weights=sums[rows]))
    visible = B * H * T * (T + 1) // 2
    return keys, float(sums.sum() ** 2 / squares.sum() / visible)


def _tensors(examples: tasks.Examples) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(examples.tokens), torch.from_numpy(examples.answers)


@contextmanager
def _alone(seed: int) -> Iterator[None]:
    """One thread and a seeded generator; as before, afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model is slower on more
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)

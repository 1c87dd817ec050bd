"""The lab's small transformer: pre-norm, causal, every attention levelhead's, under one scale rule.

q and k start with entries of variance 1, which is what √d_k is derived from. The width of values
does not follow d_k, so that d_k changes the logits and nothing else. Needs torch; knows no training.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

import levelhead as lh
from levelhead.lab.tasks import Task

if TYPE_CHECKING:
    from levelhead.observation import Observation

__all__ = ["HEADS", "WIDTH", "Block", "Transformer"]

WIDTH, HEADS, WIDER = 64, 2, 4  # of the residual stream; in each layer; the MLP's factor


class Block(nn.Module):
    """Attention, then an MLP, each added to what came in."""

    def __init__(self, rule: str, d_k: int, depth: int) -> None:
        super().__init__()
        self.rule = rule
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.q, self.k = (nn.Linear(WIDTH, HEADS * d_k, bias=False) for _ in range(2))
        self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, WIDER * WIDTH), nn.Linear(WIDER * WIDTH, WIDTH)
        for layer in (self.q, self.k, self.v, self.o, self.up, self.down):
            nn.init.normal_(layer.weight, std=1 / math.sqrt(layer.in_features))
        with torch.no_grad():  # what all layers add together has the size of what one would
            self.o.weight /= math.sqrt(2 * depth)
            self.down.weight /= math.sqrt(2 * depth)
        self.probe: Tensor | None = None  # zeros added to the logits: their gradient is read there
        self.seen: Observation | None = None  # of the last pass with `observe`

    def forward(self, x: Tensor, observe: bool) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (
            project(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        if observe:
            self.seen = lh.observe(q, k, v, scale=self.rule, causal=True, threads=1)
            found: Tensor = self.seen.output
        else:
            found = lh.attention(
                q, k, v, scale=self.rule, causal=True, mask=self.probe, threads=1
            )
        x = x + self.o(found.transpose(1, 2).flatten(2))
        added: Tensor = self.down(functional.gelu(self.up(self.norms[1](x))))
        return x + added


class Transformer(nn.Module):
    """Tokens (B, T, C) to logits of answers (B, T, classes)."""

    def __init__(self, task: Task, *, rule: str, d_k: int, depth: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(n, WIDTH) for n in task.vocabulary)
        self.blocks = nn.ModuleList(Block(rule, d_k, depth) for _ in range(depth))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, task.classes)

    def forward(self, tokens: Tensor, *, observe: bool = False) -> Tensor:
        x = torch.stack([each(tokens[..., i]) for i, each in enumerate(self.embeddings)]).sum(0)
        for block in self.blocks:
            x = block(x, observe)
        found: Tensor = self.out(self.norm(x))
        return found

    def loss(self, tokens: Tensor, answers: Tensor, *, observe: bool = False) -> Tensor:
        """Mean cross entropy of what is asked, in nats."""
        logits = self(tokens, observe=observe)
        return functional.cross_entropy(logits.flatten(0, 1), answers.flatten())

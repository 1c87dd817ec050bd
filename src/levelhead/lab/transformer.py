"""The lab's small transformer: pre-norm, causal, every attention levelhead's, under one scale rule.

q and k start with entries of variance 1, which is what √d_k is derived from. The width of values does not follow d_k,
so that d_k changes the logits and nothing else. Needs torch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from levelhead.attention import attention, observe
from levelhead.lab.tasks import Task

WIDTH, HEADS, WIDER = 64, 2, 4  # of the residual stream; in each layer; the MLP's factor


class TransformerBlock(nn.Module):
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

    def forward(self, x: Tensor, probe: Tensor | None) -> Tensor:
        """A probe is added to the logits, (B, H, T, T): zeros whose gradient is theirs."""
        q, k, v = self.qkv(x)
        attended = attention(q, k, v, scale=self.rule, causal=True, mask=probe, threads=1)
        return self._rest(x, attended)

    def observed(self, x: Tensor) -> tuple[Tensor, list[float]]:
        """The same, with H/ln n of every head."""
        q, k, v = self.qkv(x)
        observation = observe(q, k, v, scale=self.rule, causal=True, threads=1)
        entropy: list[float] = observation.heads.normalised_entropy.mean(0).tolist()
        return self._rest(x, observation.output), entropy

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.norms[0](x)
        projected = (layer(y) for layer in (self.q, self.k, self.v))
        return tuple(z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in projected)

    def _rest(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        added: Tensor = self.down(functional.gelu(self.up(self.norms[1](x))))
        return x + added


class Transformer(nn.Module):
    """Tokens (B, T, C) to logits of answers (B, T, classes)."""

    def __init__(self, task: Task, *, rule: str, d_k: int, depth: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(n, WIDTH) for n in task.vocabulary)
        self.blocks = [TransformerBlock(rule, d_k, depth) for _ in range(depth)]
        self.layers = nn.ModuleList(self.blocks)  # registers them with torch
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, task.classes)

    def loss(self, tokens: Tensor, answers: Tensor, probes: list[Tensor] | None = None) -> Tensor:
        """Mean cross entropy of what is asked, in nats; with a probe for every layer, or none."""
        x = self._embedded(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, probes[i] if probes else None)
        return self._cost(x, answers)

    @torch.no_grad()
    def observed(self, tokens: Tensor, answers: Tensor) -> tuple[float, list[list[float]]]:
        """The loss, and H/ln n by layer and head."""
        x, entropies = self._embedded(tokens), []
        for block in self.blocks:
            x, entropy = block.observed(x)
            entropies.append(entropy)
        return float(self._cost(x, answers)), entropies

    def _embedded(self, tokens: Tensor) -> Tensor:
        return torch.stack([each(tokens[..., i]) for i, each in enumerate(self.embeddings)]).sum(0)

    def _cost(self, x: Tensor, answers: Tensor) -> Tensor:
        logits = self.out(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), answers.flatten())

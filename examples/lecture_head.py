"""A small GPT as many first write it: attention by hand in a class `Head`, its scale from the wrong width.

Two lines around the training loop name the bug in every head:  python examples/lecture_head.py
"""

import torch
from torch import nn
from torch.nn import functional

import levelhead as lh

WIDTH, HEADS, TOKENS, LETTERS = 48, 6, 32, 65


class Head(nn.Module):
    """One head of causal self-attention."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, size, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(TOKENS, TOKENS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, T, C = x.shape
        q, k = self.query(x), self.key(x)
        wei = q @ k.transpose(-2, -1) * C**-0.5  # C is the width of the model, not of this head
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        return functional.softmax(wei, dim=-1) @ self.value(x)


class Block(nn.Module):
    """Heads side by side, then a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(WIDTH // HEADS) for _ in range(HEADS))
        self.ffwd = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.ln1(x)
        x = x + torch.cat([head(y) for head in self.heads], dim=-1)
        return x + self.ffwd(self.ln2(x))


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(LETTERS, WIDTH), Block(), Block(), nn.Linear(WIDTH, LETTERS))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with lh.watch(model) as w:
    for _ in range(5):
        ids = torch.randint(LETTERS, (4, TOKENS + 1))
        loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print(lh.diagnose(w))

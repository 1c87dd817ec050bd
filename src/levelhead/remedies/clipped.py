"""What a step of QK-clip did, and the line that says it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Clipped:
    """What a step did: (module, head) -> γ, the factor of its logits; empty: nothing. The same on every rank."""

    heads: dict[tuple[str, int], float]
    largest: float  # logit that was seen, of all heads; -inf: no pass was observed
    inexact: dict[str, str] = field(default_factory=dict)  # modules whose logits γ does not bring to τ, and why
    left: dict[tuple[str, int], str] = field(default_factory=dict)  # heads above τ that were not clipped, and why
    idle: tuple[int, ...] = ()  # ranks that observed no pass since the last step
    undone: tuple[str, ...] = ()  # modules whose last clip was overwritten

    def __len__(self) -> int:
        return len(self.heads)

    def __str__(self) -> str:
        said = f"largest logit {self.largest:.4g}" if self.largest > -math.inf else "no pass was observed"
        counted = f"{len(self)} heads clipped"
        if self.heads:
            said = f"the strongest by {min(self.heads.values()):.4g}; {said}"
        for name, why in self.inexact.items():
            said += f"; not exact in {name or 'the model'!r}: {why}"
        if self.left:
            said += f"; {len(self.left)} heads above the bound left: {next(iter(self.left.values()))}"
        if self.undone:
            said += f"; overwritten since the last clip: {', '.join(self.undone)}"
        if self.idle and self.largest > -math.inf:
            said += f"; no pass on rank {', '.join(map(str, self.idle))}"
        return f"{counted}, {said}"

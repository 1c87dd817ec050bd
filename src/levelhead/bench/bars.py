"""The bars: what a cell must reach to count as met, and the project's table of them.

Data only: `judge` decides with it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bar:
    """What a cell must reach: the ratio or the share of the FMA peak, never below the floor."""

    ratio: float = 1.1  # fastest peer's time / ours
    peak: float | None = None  # ... or this share of the measured FMA peak
    floor: float = 1.1  # which no share of the peak excuses
    bandwidth: float | None = None  # and this share of the measured memory bandwidth
    against: str | None = None  # one peer instead of the fastest
    without: str | None = None  # a peer that is compared with, but not what the ratio was set for
    set_for: str | None = None  # the only one it was set for; the others are compared with too

    def __str__(self) -> str:
        if self.ratio < 1:
            return f"at most {1 / self.ratio - 1:+.0%}"
        text = f"≥ {self.ratio:.3g}×"
        if self.against or self.set_for:
            text += f" {self.against or self.set_for}"
        if self.without:
            text += f" ({self.without} aside)"
        if self.peak:
            text += f" or ≥ {self.peak:.0%} of peak (≥ {self.floor:.3g}×)"
        if self.bandwidth:
            text += f" and ≥ {self.bandwidth:.0%} of bandwidth"
        return text


# The project's table of numbers to hold, row by row.
DENSE = {64: Bar(1.25, peak=0.85, floor=1.0), 128: Bar(1.25, peak=0.87, floor=1.0)}  # by width
CAUSAL = Bar(1.25)
SHORT = Bar(1.3)
PAIRS = Bar(1.5, peak=1.5, floor=1.0)  # of bfloat16: 75 % of their own peak, which is twice that of FMAs
HALF_CAUSAL = Bar(1.5)
TINY = Bar(1.1, against="PyTorch")
DECODE = Bar(3.0, bandwidth=0.92)
READ_ONCE = Bar(bandwidth=0.92)  # other decoding that memory bounds
WINDOW = Bar(8.0, without="FlexAttention")  # set for those that cannot skip what is hidden
MASKED = Bar(1.25)
# At most 8 % over the call without them. Stated for d 64; a wider head has more work per logit to hide them behind, so
# it is held to the same.
STATISTICS = Bar(1 / 1.08, floor=1 / 1.08)
TRAINING = {"dense": Bar(1.4, peak=0.80, floor=1.0), "causal": Bar(1.4)}
TRAINING_ONE_HEAD = Bar(1.7)
JAX = Bar(4.0, against="JAX")
ADDITIVE = Bar(10.0, set_for="PyTorch")  # the plain formulation, which stores (T, S, A)
MODEL = Bar(1.0, floor=1.0)  # most of its time is spent elsewhere: not slower
LONG_MODEL = Bar(1.1)
FLOOR = Bar()  # every cell without a row of its own

"""Which numbers of an additive mask hide a key, in Triton: a pass over the mask for each step of `torch.masks.hiding`.

A launch first ends the step before it, from what its programs found, then goes over the mask with the new floor. Every
program ends that step for itself, so nothing waits and nothing is read by the host. Triton reads annotations, so only
constants have one.
"""

from __future__ import annotations

import triton
import triton.language as tl

NONE = tl.constexpr(float("-inf"))
MOST = tl.constexpr(float("inf"))


@triton.jit
def hiding_kernel(
    values, reach, before, after, found_before, found, n, programs,
    FLOOR: tl.constexpr, UNDERFLOW: tl.constexpr, MOST_PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step: reads the step before it, (hiding, floor, done) and (3, programs), and writes its own; `before` None:
    there is none; `found` None: it only ends the one before. Numbers around the floor: the largest and the smallest
    above it, the largest at or below it."""
    program = tl.program_id(0)
    best = tl.full((), NONE, tl.float64)
    floor = tl.full((), FLOOR, tl.float64)
    done = tl.full((), 0.0, tl.float64)
    if before is not None:
        best, floor, done = tl.load(before), tl.load(before + 1), tl.load(before + 2)
        at = tl.arange(0, MOST_PROGRAMS)
        there = at < programs
        tops = tl.load(found_before + at, mask=there, other=NONE)
        lows = tl.load(found_before + programs + at, mask=there, other=MOST)
        top, low = tl.max(tops, 0).to(tl.float64), tl.min(lows, 0).to(tl.float64)
        below = tl.max(tl.load(found_before + 2 * programs + at, mask=there, other=NONE), 0).to(tl.float64)
        low = tl.where(top == NONE, 0.0, low)  # without a number above: zeros, as a mask that hides nothing has them
        top = tl.where(top == NONE, 0.0, top)
        gap = low - below
        wide = (gap >= top - low) & (gap >= UNDERFLOW + 2.0 * tl.load(reach)) & (below > NONE)
        best = tl.where(wide & (done == 0.0), below, best)
        done = tl.where(wide | (below == NONE), 1.0, done)
        floor = tl.where(done != 0.0, floor, 2.0 * below)
    if program == 0:
        tl.store(after, best)
        tl.store(after + 1, floor)
        tl.store(after + 2, done)
    if found is not None:
        edge = floor.to(tl.float32).to(values.dtype.element_ty).to(tl.float32)  # in the mask's type, as torch compares
        none = tl.zeros((BLOCK,), tl.float32)
        top, low, below = none + NONE, none + MOST, none + NONE
        for start in range(tl.cast(program, tl.int64) * BLOCK, n, tl.cast(programs, tl.int64) * BLOCK):
            place = start + tl.arange(0, BLOCK)
            inside = place < n
            x = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
            above = inside & (x > edge)
            top = tl.maximum(top, tl.where(above & (x < MOST), x, NONE))
            low = tl.minimum(low, tl.where(above, x, MOST))
            below = tl.maximum(below, tl.where(inside & (x <= edge), x, NONE))
        tl.store(found + program, tl.max(top, 0))
        tl.store(found + programs + program, tl.min(low, 0))
        tl.store(found + 2 * programs + program, tl.max(below, 0))

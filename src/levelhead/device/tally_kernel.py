"""From states of rows to the tally of each head, in Triton: one launch where plain torch makes two hundred small ones.

The formulas are those of `stats.rows` and `runs.tally.of_rows`, the columns those of `runs.tally`; a test compares
them. A program has one head of one batch row. Triton reads annotations, so only constants have one.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
NONE = tl.constexpr(float("-inf"))
MOST = tl.constexpr(float("inf"))
FAR = tl.constexpr(2147483647)
COLUMNS = tl.constexpr(35)  # of `runs.tally`
PLAIN = tl.constexpr(17)  # sums over rows; then come eight that other code fills
MINIMA, MAXIMA, PLACES = tl.constexpr(25), tl.constexpr(28), tl.constexpr(32)


@triton.jit
def kept(x, some):
    return tl.where(some, x, 0.0)


@triton.jit
def tally_kernel(
    sums, counts, sinks, used, places, tallies, B, H, R, SATURATED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Writes `tallies` (B, H, COLUMNS) of states (B, H, R, ...), a column after another. sinks (H,), used (B, R) bool,
    places (B, R); None: no sinks, all rows count, row i is at place i."""
    head, b = tl.program_id(0) % H, tl.program_id(0) // H  # one axis: a second one ends at 65535
    plane = (b.to(tl.int64) * 0 + B) * H * R
    base = (b.to(tl.int64) * H + head) * R
    zero = tl.zeros((BLOCK,), tl.float32)
    rows, lone, empty, wrong_rows, several_rows, saturated = zero, zero, zero, zero, zero, zero
    s_mean, s_var, s_max, s_lse, s_entropy, s_top1, s_p2 = zero, zero, zero, zero, zero, zero, zero
    s_first, s_sink, s_normal, s_keys = zero, zero, zero, zero
    min_logit, min_lse, min_entropy = zero + MOST, zero + MOST, zero + MOST
    max_logit, max_lse, max_entropy, max_top1 = zero + NONE, zero + NONE, zero + NONE, zero + NONE
    best = tl.zeros((BLOCK,), tl.int32) + FAR
    z = zero + NONE
    if sinks is not None:
        z = zero + tl.load(sinks + head).to(tl.float32)
    for start in range(0, R, BLOCK):
        r = start + tl.arange(0, BLOCK)
        there = r < R
        x = sums + base + r
        m = tl.load(x, mask=there, other=NONE) * LN_2
        l = tl.load(x + plane, mask=there, other=0.0)  # noqa: E741
        h = tl.load(x + 2 * plane, mask=there, other=0.0) * LN_2
        e2 = tl.load(x + 3 * plane, mask=there, other=0.0)
        mean = tl.load(x + 4 * plane, mask=there, other=0.0) * LN_2
        m2 = tl.load(x + 5 * plane, mask=there, other=0.0) * (LN_2 * LN_2)
        low = tl.load(x + 6 * plane, mask=there, other=MOST) * LN_2
        first = tl.load(x + 7 * plane, mask=there, other=NONE) * LN_2
        count = tl.load(counts + base + r, mask=there, other=0).to(tl.float32)
        exists = there
        if used is not None:
            exists = there & (tl.load(used + b.to(tl.int64) * R + r, mask=there, other=0) != 0)
        sink = tl.where(exists, z, NONE)
        wrong = (l != l) & exists
        real = (l == l) & exists
        some, several = real & (count > 0), real & (count > 1)
        # As in stats.rows: the sink joins as one more key.
        top = tl.maximum(tl.where(some, m, NONE), sink)
        top = tl.where(top == NONE, 0.0, top)
        keys, weight = tl.exp(m - top), tl.exp(sink - top)
        total = keys * l + weight
        whole = tl.where(total > 0.0, total, 1.0)
        spread = tl.where(keys == 0.0, 0.0, keys * (h + (m - top) * l))
        spread += tl.where(weight == 0.0, 0.0, weight * (sink - top))
        lse = top + tl.log(whole)
        entropy = tl.maximum(tl.log(whole) - spread / whole, 0.0)
        top1 = keys / whole
        p2 = tl.minimum((keys * keys * e2 + weight * weight) / whole / whole, 1.0)
        outcomes = tl.maximum(count, 2.0) + (weight > 0.0).to(tl.float32)
        rows += some.to(tl.float32)
        lone += (real & (count < 2)).to(tl.float32)
        empty += (real & (count == 0)).to(tl.float32)
        wrong_rows += wrong.to(tl.float32)
        several_rows += several.to(tl.float32)
        saturated += (several & (top1 >= SATURATED)).to(tl.float32)
        s_mean += kept(mean, some)
        s_var += kept(m2 / tl.maximum(count, 1.0), some)
        s_max += kept(m, some)
        s_lse += kept(lse, some)
        s_entropy += kept(entropy, some)
        s_top1 += kept(top1, some)
        s_p2 += kept(p2, some)
        s_first += kept(tl.exp(first - top) / whole, some)
        s_sink += kept(weight / whole, some)
        s_normal += kept(entropy / tl.log(outcomes), several)
        s_keys += kept(tl.exp(entropy), several)
        min_logit = tl.minimum(min_logit, tl.where(some, low, MOST))
        min_lse = tl.minimum(min_lse, tl.where(some, lse, MOST))
        min_entropy = tl.minimum(min_entropy, tl.where(some, entropy, MOST))
        max_lse = tl.maximum(max_lse, tl.where(some, lse, NONE))
        max_entropy = tl.maximum(max_entropy, tl.where(some, entropy, NONE))
        max_top1 = tl.maximum(max_top1, tl.where(some, top1, NONE))
        higher = some & ((m > max_logit) | (best == FAR))
        best = tl.where(higher, r, best)
        max_logit = tl.where(higher, m, max_logit)
    out = tallies + (b.to(tl.int64) * H + head) * COLUMNS
    tl.store(out, tl.sum(rows, 0))
    tl.store(out + 1, tl.sum(lone, 0))
    tl.store(out + 2, tl.sum(empty, 0))
    tl.store(out + 3, tl.sum(wrong_rows, 0))
    tl.store(out + 4, tl.sum(s_mean, 0))
    tl.store(out + 5, tl.sum(s_var, 0))
    tl.store(out + 6, tl.sum(s_max, 0))
    tl.store(out + 7, tl.sum(s_lse, 0))
    tl.store(out + 8, tl.sum(s_entropy, 0))
    tl.store(out + 9, tl.sum(s_top1, 0))
    tl.store(out + 10, tl.sum(s_p2, 0))
    tl.store(out + 11, tl.sum(s_first, 0))
    tl.store(out + 12, tl.sum(s_sink, 0))
    tl.store(out + 13, tl.sum(several_rows, 0))
    tl.store(out + 14, tl.sum(saturated, 0))
    tl.store(out + 15, tl.sum(s_normal, 0))
    tl.store(out + 16, tl.sum(s_keys, 0))
    for column in tl.static_range(PLAIN, MINIMA):
        tl.store(out + column, 0.0)
    tl.store(out + MINIMA, tl.min(min_logit, 0))
    tl.store(out + MINIMA + 1, tl.min(min_lse, 0))
    tl.store(out + MINIMA + 2, tl.min(min_entropy, 0))
    highest = tl.max(max_logit, 0)
    tl.store(out + MAXIMA, highest)
    tl.store(out + MAXIMA + 1, tl.max(max_lse, 0))
    tl.store(out + MAXIMA + 2, tl.max(max_entropy, 0))
    tl.store(out + MAXIMA + 3, tl.max(max_top1, 0))
    at = tl.min(tl.where(max_logit == highest, best, FAR), 0)
    found = at < FAR
    row = tl.where(found, at, 0)
    key = tl.load(counts + plane + base + row, mask=found, other=-1).to(tl.float32)
    place = row
    if places is not None:
        place = tl.load(places + b.to(tl.int64) * R + row).to(tl.int32)
    tl.store(out + PLACES, tl.where(found, b, -1).to(tl.float32))
    tl.store(out + PLACES + 1, tl.where(found, place, -1).to(tl.float32))
    tl.store(out + PLACES + 2, key)

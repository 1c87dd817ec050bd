"""The observing kernel in Triton: from q and k to the state of every query row, in one pass without values.

A program has a block of query rows and walks over tiles of keys. A tile's products become logits in units of ln 2, the
logits a state of their own (maximum, sums, counts, as in core/state.h), and `joined` adds it to the rows' state: the
same merge joins tiles here and key ranges in `join_kernel`. Tiles that no row of the block sees are not loaded. No
atomics: every program writes rows of its own. Arguments that are None are compiled away. `launch` calls this file.
Triton reads annotations, so only constants have one.
"""

from __future__ import annotations

import triton
import triton.language as tl

NONE = tl.constexpr(float("-inf"))
MOST = tl.constexpr(float("inf"))
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32: a visible logit is never -inf
FAR = tl.constexpr(2147483647)


# ---- the state of a row, and the merge law


@triton.jit
def nothing(rows: tl.constexpr):
    """No key yet: max, l, h, e2, mean, m2, min, count, argmax."""
    zero = tl.zeros((rows,), tl.float32)
    none = tl.zeros((rows,), tl.int32)
    return zero + NONE, zero, zero, zero, zero, zero, zero + MOST, none, none - 1


@triton.jit
def joined(a, b):
    """The state of a's keys followed by b's; an empty side weighs nothing, and -inf - -inf is never formed."""
    m_a, l_a, h_a, e_a, mean_a, m2_a, low_a, n_a, at_a = a
    m_b, l_b, h_b, e_b, mean_b, m2_b, low_b, n_b, at_b = b
    m = tl.maximum(m_a, m_b)
    top = tl.where(m == NONE, 0.0, m)
    w_a, w_b = tl.exp2(m_a - top), tl.exp2(m_b - top)
    moved_a = tl.where(w_a == 0.0, 0.0, w_a * (h_a + (m_a - top) * l_a))
    moved_b = tl.where(w_b == 0.0, 0.0, w_b * (h_b + (m_b - top) * l_b))
    n = n_a + n_b
    part = n_b.to(tl.float32) / tl.maximum(n, 1).to(tl.float32)  # Chan, Golub, LeVeque 1979
    gap = tl.where((n_a == 0) | (n_b == 0), 0.0, mean_b - mean_a)
    mean = tl.where(n_a == 0, mean_b, mean_a + gap * part)
    m2 = m2_a + m2_b + gap * gap * part * n_a.to(tl.float32)
    at = tl.where(m_b > m_a, at_b, at_a)
    l = l_a * w_a + l_b * w_b  # noqa: E741
    e = e_a * w_a * w_a + e_b * w_b * w_b
    return m, l, moved_a + moved_b, e, mean, m2, tl.minimum(low_a, low_b), n, at


@triton.jit
def without(state, first, lost):
    """The state and the first logits, or no key yet where it is lost."""
    m, l, h, e, mean, m2, low, n, at = state  # noqa: E741
    m, l, h = tl.where(lost, NONE, m), tl.where(lost, 0.0, l), tl.where(lost, 0.0, h)  # noqa: E741
    e, mean, m2 = tl.where(lost, 0.0, e), tl.where(lost, 0.0, mean), tl.where(lost, 0.0, m2)
    low, n, at = tl.where(lost, MOST, low), tl.where(lost, 0, n), tl.where(lost, -1, at)
    return (m, l, h, e, mean, m2, low, n, at), tl.where(lost, NONE, first)


@triton.jit
def stored(state, first, sums, counts, at, plane, there):
    """Writes rows to columns of `plane` numbers each. A visible NaN, or +inf, leaves no number of its row but the
    first logit and the count."""
    m, l, h, e, mean, m2, low, n, key = state  # noqa: E741
    wrong = l != l
    tl.store(sums + at, tl.where(wrong, l, m), mask=there)
    tl.store(sums + plane + at, l, mask=there)
    tl.store(sums + 2 * plane + at, tl.where(wrong, l, h), mask=there)
    tl.store(sums + 3 * plane + at, tl.where(wrong, l, e), mask=there)
    tl.store(sums + 4 * plane + at, tl.where(wrong, l, mean), mask=there)
    tl.store(sums + 5 * plane + at, tl.where(wrong, l, m2), mask=there)
    tl.store(sums + 6 * plane + at, tl.where(wrong, l, low), mask=there)
    tl.store(sums + 7 * plane + at, first, mask=there)
    tl.store(counts + at, n.to(tl.int64), mask=there)
    tl.store(counts + plane + at, tl.where(wrong, -1, key).to(tl.int64), mask=there)


@triton.jit
def join_kernel(part_sums, part_counts, sums, counts, rows, parts, BLOCK: tl.constexpr):
    """Joins the states of `parts` key ranges, in their order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < rows
    rows = tl.cast(rows, tl.int64)  # times 8 and parts, it may exceed 32 bits
    state = nothing(BLOCK)
    first = tl.zeros((BLOCK,), tl.float32) + NONE
    for part in range(parts):
        x, c = part_sums + part * 8 * rows + at, part_counts + part * 2 * rows + at
        m, l = tl.load(x, mask=there, other=NONE), tl.load(x + rows, mask=there, other=0.0)  # noqa: E741
        h, e = tl.load(x + 2 * rows, mask=there, other=0.0), tl.load(x + 3 * rows, mask=there, other=0.0)
        mean, m2 = tl.load(x + 4 * rows, mask=there, other=0.0), tl.load(x + 5 * rows, mask=there, other=0.0)
        low, here = tl.load(x + 6 * rows, mask=there, other=MOST), tl.load(x + 7 * rows, mask=there, other=NONE)
        n, key = tl.load(c, mask=there, other=0).to(tl.int32), tl.load(c + rows, mask=there, other=-1).to(tl.int32)
        state = joined(state, (m, l, h, e, mean, m2, low, n, key))
        first = tl.where(here == NONE, first, here)
    stored(state, first, sums, counts, at, rows, there)


# ---- a tile


@triton.jit
def summed(s, seen, key, HIDE: tl.constexpr, WILD: tl.constexpr):
    """The state of a tile's logits s (rows, keys), and their distances from its maximum. HIDE: only those that are seen
    count. WILD: some may lie near the lowest number, so that squares of distances overflow."""
    if HIDE:
        m = tl.max(tl.where(seen, s, NONE), 1)
        n = tl.sum(seen.to(tl.int32), 1)
    else:
        m = tl.max(s, 1)
        n = tl.zeros((s.shape[0],), tl.int32) + s.shape[1]
    top = tl.where(m == NONE, 0.0, m)
    d = s - top[:, None]
    if HIDE:
        d = tl.where(seen, d, NONE)
    at = tl.min(tl.where(d == 0.0, key[None, :], FAR), 1)
    e = tl.exp2(d)
    l = tl.sum(e, 1)  # noqa: E741
    e2 = tl.sum(e * e, 1)
    if HIDE:
        low = tl.min(tl.where(seen, d, MOST), 1)
        d = tl.where(seen, d, 0.0)
    else:
        low = tl.min(d, 1)
    h = tl.sum(e * d, 1)
    share = 1.0 / tl.maximum(n, 1).to(tl.float32)
    if WILD:
        off = tl.sum(d * share[:, None], 1)
        away = tl.where(seen, d - off[:, None], 0.0)
        m2 = tl.sum(away * away, 1)
    else:  # in a tile of n keys (max - mean)² is at most (n - 1) variances (Samuelson 1968): little is cancelled
        off = tl.sum(d, 1) * share
        square = tl.sum(d * d, 1)
        m2 = tl.where(square < MOST, tl.maximum(square - off * off * n.to(tl.float32), 0.0), square)
    return (m, l, h, e2, top + off, m2, top + low, n, at), d


@triton.jit
def tanh(x):
    """By exp2, and by its series near 0, where that would cancel; a relative error of about 2e-7."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    far = (1.0 - e) / (1.0 + e)
    y = x * x
    near = x * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0.0, -far, far))


@triton.jit
def more_products(
    found, piece, block, q_rows, there, tile, left, stride_qd, stride_ks, stride_kd,
    D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, EDGE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Adds what the widths from `piece` to piece + BD contribute to the products."""
    n, d = tl.arange(0, BN), piece + tl.arange(0, BD)
    at = tile + n[None, :] * stride_ks + d[:, None] * stride_kd
    if EDGE:
        keys = tl.load(at, mask=(n[None, :] < left) & (d[:, None] < D), other=0.0)
    elif D % BD != 0:
        keys = tl.load(at, mask=d[:, None] < D, other=0.0)
    else:
        keys = tl.load(at)
    if D > BD:
        inside = there[:, None] & (d[None, :] < D)
        block = tl.load(q_rows[:, None] + d[None, :] * stride_qd, mask=inside, other=0.0)
    if WIDEN:  # the interpreter would multiply the bits of bfloat16
        return tl.dot(block.to(tl.float32), keys.to(tl.float32), found)
    return tl.dot(block, keys, found, input_precision="ieee")


@triton.jit
def products(
    block, q_rows, there, tile, left, stride_qd, stride_ks, stride_kd,
    D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, EDGE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """q kᵀ of a block of rows and a tile that has `left` keys; widths above BD in pieces, each loaded here."""
    found = tl.zeros((there.shape[0], BN), tl.float32)
    if D <= 2 * BD:
        for piece in tl.static_range(0, D, BD):
            found = more_products(
                found, piece, block, q_rows, there, tile, left, stride_qd, stride_ks, stride_kd, D, BN, BD, EDGE, WIDEN
            )
    else:
        for piece in range(0, D, BD):
            found = more_products(
                found, piece, block, q_rows, there, tile, left, stride_qd, stride_ks, stride_kd, D, BN, BD, EDGE, WIDEN
            )
    return found


@triton.jit
def walked(
    state, first, low, high,  # the tiles
    block, q_rows, there, begin, end, position, factor, slope,
    first_key, first_low, first_high, segment, segment_low, segment_high,
    k_head, key_segments, mask_rows, hiding, cap, S,
    stride_qd, stride_ks, stride_kd, stride_ms,
    D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, EDGE: tl.constexpr, ADDS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The rows' state after the keys from `low` to `high`, and their first logits. EDGE: some rows do not see all."""
    n = tl.arange(0, BN)
    hide: tl.constexpr = EDGE or key_segments is not None or mask_rows is not None
    for start in range(low, high, BN):
        key = start + n
        seen = (key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None])
        wanted = True
        if key_segments is not None:
            ids = tl.load(key_segments + key, mask=key < S, other=0)
            inside = (ids >= segment_low) & (ids <= segment_high) & (key < S)
            wanted = tl.max(inside.to(tl.int32), 0) > 0
            seen = seen & (segment[:, None] == ids[None, :])
        bias = 0.0
        if mask_rows is not None:
            at = mask_rows[:, None] + key.to(tl.int64)[None, :] * stride_ms
            value = tl.load(at, mask=seen, other=0)
            if ADDS:
                bias = value.to(tl.float32)
                seen = seen & ((bias <= hiding) == 0)
            else:
                seen = seen & (value != 0)
            wanted = tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0
        if wanted:
            tile = k_head + tl.cast(start, tl.int64) * stride_ks
            s = products(block, q_rows, there, tile, S - start, stride_qd, stride_ks, stride_kd, D, BN, BD, hide, WIDEN)
            s = s * factor[:, None]
            if cap is not None:
                s = tanh(s) * (cap * LOG2_E)
            elif hide:  # a product of -inf is no key, as in the core; the caller looks for it where nothing is hidden
                seen = seen & (s != NONE)
            if slope is not None:
                away = (position - start).to(tl.float32)
                s = s - slope[:, None] * tl.abs(away[:, None] - n.to(tl.float32)[None, :])
            if ADDS:
                s = s + bias * LOG2_E
                s = tl.where(s == NONE, LOWEST, s)
            of_tile, d = summed(s, seen, key, hide, ADDS)
            state = joined(state, of_tile)
            if (start <= first_high) & (start + BN > first_low):
                hit = key[None, :] == first_key[:, None]
                if hide:
                    hit = hit & seen
                found = of_tile[0] + tl.sum(tl.where(hit, d, 0.0), 1)
                first = tl.where(tl.max(hit.to(tl.int32), 1) > 0, found, first)
    return state, first


# ---- the pass


@triton.jit(do_not_specialize=["R", "S", "span", "left", "right"])
def observe_kernel(
    q, k, sums, counts, scale, cap, alibi, mask, hiding,
    key_lengths, query_lengths, query_segments, key_segments, query_start,
    row_factors, rows, first_keys, left, right,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kg, stride_ks, stride_kd,
    stride_mb, stride_mh, stride_mt, stride_ms,
    B, H, R, S, T, span,
    GROUP: tl.constexpr, PACK: tl.constexpr, CAUSAL: tl.constexpr, ADDS: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The states of R rows of every head, over `span` keys per program.

    PACK: so many heads that share keys lie in the rows one after another. `rows` (B, R): places of the rows in q;
    None: all T. scale, alibi (H,); lengths, query_start (B,); segments (B, T), (B, S); row_factors, first_keys (B, R).
    """
    blocks = tl.cdiv(PACK * R, BM)
    packs = H // PACK
    program = tl.program_id(0)
    m = program % blocks
    program = program // blocks
    pack = program % packs
    program = program // packs
    b = (program % B).to(tl.int64)
    part = (program // B).to(tl.int64)

    # The rows.
    r = m * BM + tl.arange(0, BM)
    there = r < PACK * R
    head = pack * PACK + r // R
    row = r % R
    if PACK == 1:
        head, row = pack + tl.zeros((BM,), tl.int32), r
    head, row = tl.where(there, head, 0), tl.where(there, row, 0)
    place = row.to(tl.int64)
    if rows is not None:
        place = tl.load(rows + b * R + row, mask=there, other=0).to(tl.int64)
    position = place
    if query_start is not None:
        position = place + tl.load(query_start + b)

    # What they see by position: keys from begin to end.
    begin = position * 0
    end = begin + S
    if left is not None:
        begin = tl.minimum(tl.maximum(position - left, 0), S)
    if right is not None:
        end = tl.minimum(end, position + right + 1)
    if CAUSAL:
        end = tl.minimum(end, position + 1)
    if key_lengths is not None:
        end = tl.minimum(end, tl.load(key_lengths + b))
    if query_lengths is not None:
        end = tl.where(place < tl.load(query_lengths + b), end, 0)
    begin, end = begin.to(tl.int32), tl.maximum(end, 0).to(tl.int32)
    some = there & (end > begin)
    k_low = part.to(tl.int32) * span
    low = tl.maximum(tl.min(tl.where(some, begin, FAR), 0), k_low)
    high = tl.minimum(tl.max(tl.where(some, end, 0), 0), tl.minimum(k_low + span, S))
    low = tl.minimum(low, S) // BN * BN
    # Keys from common_low to common_high are seen by every row: tiles of BF keys, which need nothing to hide with.
    common_low = tl.cdiv(tl.maximum(tl.max(tl.where(there, begin, 0), 0), low), BN) * BN
    common_low = tl.minimum(common_low, tl.maximum(high, low))
    common = tl.minimum(tl.min(tl.where(there, end, FAR), 0), high) - common_low
    common_high = common_low + tl.maximum(common, 0) // BF * BF

    # What they multiply, and what is added.
    factor = tl.load(scale + head)
    if row_factors is not None:
        factor = factor * tl.load(row_factors + b * R + row, mask=there, other=0.0)
    factor = factor / cap if cap is not None else factor * LOG2_E
    factor = factor.to(tl.float32)
    slope = None
    if alibi is not None:
        slope = (tl.load(alibi + head) * LOG2_E).to(tl.float32)
    mask_rows = None
    below = None
    if mask is not None:
        mask_rows = mask + b * stride_mb + head.to(tl.int64) * stride_mh + place * stride_mt
    if ADDS:
        below = tl.load(hiding).to(tl.float32)
    ids, segment, segment_low, segment_high = None, None, None, None
    if key_segments is not None:
        ids = key_segments + b * S
        segment = tl.load(query_segments + b * T + place, mask=there, other=0)
        segment_low = tl.min(tl.where(there, segment, 9223372036854775807), 0)
        segment_high = tl.max(tl.where(there, segment, -9223372036854775807), 0)
    first_key = tl.zeros((BM,), tl.int32)
    if first_keys is not None:
        first_key = tl.load(first_keys + b * R + row, mask=there, other=-1).to(tl.int32)
    first_low = tl.min(tl.where(there & (first_key >= 0), first_key, FAR), 0)
    first_high = tl.max(tl.where(there, first_key, -1), 0)

    q_rows = q + b * stride_qb + head.to(tl.int64) * stride_qh + place * stride_qt
    k_head = k + b * stride_kb + (pack * PACK // GROUP).to(tl.int64) * stride_kg
    block = None
    if D <= BD:
        d = tl.arange(0, BD)
        block = tl.load(q_rows[:, None] + d[None, :] * stride_qd, mask=there[:, None] & (d[None, :] < D), other=0.0)

    state = nothing(BM)
    first = tl.zeros((BM,), tl.float32) + NONE
    if key_segments is not None or mask is not None:
        state, first = walked(
            state, first, low, high, block, q_rows, there, begin, end, position, factor, slope, first_key, first_low,
            first_high, segment, segment_low, segment_high, k_head, ids, mask_rows, below, cap, S, stride_qd,
            stride_ks, stride_kd, stride_ms, D, BN, BD, True, ADDS, WIDEN,
        )  # fmt: skip
    else:
        if left is not None:
            state, first = walked(
                state, first, low, common_low, block, q_rows, there, begin, end, position, factor, slope, first_key,
                first_low, first_high, None, None, None, k_head, None, None, None, cap, S, stride_qd, stride_ks,
                stride_kd, stride_ms, D, BN, BD, True, False, WIDEN,
            )  # fmt: skip
        state, first = walked(
            state, first, common_low, common_high, block, q_rows, there, begin, end, position, factor, slope,
            first_key, first_low, first_high, None, None, None, k_head, None, None, None, cap, S, stride_qd, stride_ks,
            stride_kd, stride_ms, D, BF, BD, False, False, WIDEN,
        )  # fmt: skip
        # A logit of -inf hides its key, which the walk above does not look for: then all are walked again, with care.
        lost = tl.max(((state[6] == NONE) | (state[1] != state[1])).to(tl.int32), 0) > 0
        common_high = tl.where(lost, low, common_high)
        state, first = without(state, first, lost)
        state, first = walked(
            state, first, common_high, high, block, q_rows, there, begin, end, position, factor, slope, first_key,
            first_low, first_high, None, None, None, k_head, None, None, None, cap, S, stride_qd, stride_ks, stride_kd,
            stride_ms, D, BN, BD, True, False, WIDEN,
        )  # fmt: skip
    plane = (b * 0 + B) * H * R
    at = (b * H + head) * R + row
    stored(state, first, sums + part * 8 * plane, counts + part * 2 * plane, at, plane, there)

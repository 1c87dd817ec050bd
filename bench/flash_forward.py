"""A plain FlashAttention forward pass in Triton, as the tutorials write it: what `device_kernel.py` compares with.

Dense or causal, one head width, no options. It is compiled, never run here.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def walked(
    acc, m, l, block, low, high, k_head, v_head, row, stride_s, scale,  # noqa: E741
    D: tl.constexpr, BN: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    d, n = tl.arange(0, D), tl.arange(0, BN)
    for start in range(low, high, BN):
        at = tl.cast(start, tl.int64) * stride_s
        keys = tl.load(k_head + at + n[None, :] * stride_s + d[:, None])
        s = tl.dot(block, keys) * scale
        if EDGE:
            s = tl.where((start + n)[None, :] <= row[:, None], s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        alpha = tl.exp2(m - top)
        l = l * alpha + tl.sum(p, 1)  # noqa: E741
        values = tl.load(v_head + at + n[:, None] * stride_s + d[None, :])
        acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None])
        m = top
    return acc, m, l


@triton.jit
def flash_kernel(
    q, k, v, out, logsumexp, scale, stride_qb, stride_qh, stride_qt, stride_kb, stride_kg, stride_ks, H, T, S,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    first, head = tl.program_id(0) * BM, tl.program_id(1)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    row, d = first + tl.arange(0, BM), tl.arange(0, D)
    here = row.to(tl.int64)[:, None] * stride_qt + d[None, :]
    block = tl.load(q + b * stride_qb + h * stride_qh + here, mask=row[:, None] < T, other=0.0)
    k_head = k + b * stride_kb + (h // GROUP) * stride_kg
    v_head = v + b * stride_kb + (h // GROUP) * stride_kg
    m = tl.zeros((BM,), tl.float32) - float("inf")
    l = tl.zeros((BM,), tl.float32)  # noqa: E741
    acc = tl.zeros((BM, D), tl.float32)
    full = first // BN * BN if CAUSAL else S
    state = walked(acc, m, l, block, 0, full, k_head, v_head, row, stride_ks, scale, D, BN, False)
    if CAUSAL:
        acc, m, l = state  # noqa: E741
        state = walked(acc, m, l, block, full, first + BM, k_head, v_head, row, stride_ks, scale, D, BN, True)
    acc, m, l = state  # noqa: E741
    result = (acc / l[:, None]).to(q.dtype.element_ty)
    tl.store(out + b * stride_qb + h * stride_qh + here, result, mask=row[:, None] < T)
    tl.store(logsumexp + head.to(tl.int64) * T + row, m + tl.log2(l), mask=row < T)

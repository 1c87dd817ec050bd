"""Attention functions of other libraries, called directly: outputs and gradients keep their bits, and the statistics
are those of what was computed. flash_attn, xformers and TransformerEngine are stand-ins with their signatures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kernel_stubs as stubs
import levelhead as lh
from kernel_stubs import positional
from watched import one_thread
from watched_truth import agrees, truth

__all__ = ["one_thread"]  # a fixture

B, T, S, H, G, D = 2, 6, 9, 4, 2, 8
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
CU, CU_K = torch.tensor([0, 2, 6], dtype=torch.int32), torch.tensor([0, 4, 9], dtype=torch.int32)


@pytest.fixture(autouse=True)
def libraries() -> Iterator[None]:
    with stubs.installed():
        yield


class Core(nn.Module):
    """Calls a function on q, k and v as they are: the part of a model that attends, without projections."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, *qkv: Tensor) -> Tensor:
        return self.attend(*qkv)


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [(2 * torch.randn(shape, generator=generator)).requires_grad_() for shape in shapes]


def watched(attend: Callable[..., Tensor], *qkv: Tensor, **options: Any) -> Any:
    """The record of the one call, and that nothing changed."""
    model = nn.Sequential(Core(attend))[0]

    def run() -> list[Tensor]:
        for x in qkv:
            x.grad = None
        out = model(*(x.clone() for x in qkv))
        if out.requires_grad:
            out.square().sum().backward()
        return [out.detach(), *(x.grad.clone() for x in qkv if x.grad is not None)]

    alone = run()
    with lh.watch(model, **options) as w:
        seen = run()
        w.step()
    assert all(map(torch.equal, alone, seen))
    assert [line.seen for line in w.coverage()] == [True], w.coverage()
    return w.last.records[0]


def heads_first(*xs: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) if x.dim() == 4 else x.transpose(0, 1)[None] for x in xs]


def blocks(cu_q: Tensor, cu_k: Tensor, **options: Any) -> Tensor:
    """What a packed call adds to the logits, (1, 1 or H, T, S)."""
    bias = torch.full((H, int(cu_q[-1]), int(cu_k[-1])), -math.inf)
    for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        bias[:, a:b, c:d] = positional(int(b - a), int(d - c), **options)
    return bias[None]


# ---- flash_attn

FLASH: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # as passed; by position; others
    "plain": ({}, {"causal": False}, {}),
    "causal": ({"causal": True}, {"causal": True}, {}),
    "window": ({"window_size": (2, 1)}, {"causal": False, "window": (2, 1)}, {}),
    "causal window": ({"causal": True, "window_size": (2, -1)}, {"causal": True, "window": (2, -1)}, {}),
    "soft cap": ({"softcap": 3.0, "softmax_scale": 0.7}, {"causal": False}, {"softcap": 3.0, "scale": 0.7}),
    "ALiBi": ({"causal": True, "alibi_slopes": SLOPES}, {"causal": True, "slopes": SLOPES}, {}),
}


@pytest.mark.parametrize("name", FLASH)
def test_flash_attention_2(name: str) -> None:
    passed, position, others = FLASH[name]
    q, k, v = tensors((B, T, H, D), (B, S, G, D), (B, S, G, D))

    def attend(*qkv: Tensor) -> Tensor:
        from flash_attn import flash_attn_func

        return flash_attn_func(*qkv, **passed)

    record = watched(attend, q, k, v)
    agrees(record, truth(*heads_first(q, k), positional(T, S, **position)[None], **others))
    assert record.facts.how == "flash_attn.flash_attn_func"
    assert record.facts.scale == pytest.approx(others.get("scale", 1 / math.sqrt(D)))


@pytest.mark.parametrize("keys", ["the same", "others"])
@pytest.mark.parametrize("name", FLASH)
def test_flash_attention_2_packed(name: str, keys: str) -> None:
    passed, position, others = FLASH[name]
    cu_k = CU if keys == "the same" else CU_K
    n = int(cu_k[-1])
    q, k, v = tensors((6, H, D), (n, G, D), (n, G, D))

    def attend(*qkv: Tensor) -> Tensor:
        from flash_attn.flash_attn_interface import flash_attn_varlen_func

        return flash_attn_varlen_func(*qkv, CU, cu_k, 4, 5, **passed)

    record = watched(attend, q, k, v)
    agrees(record, truth(*heads_first(q, k), blocks(CU, cu_k, **position), **others), places=False)


def test_flash_attention_2_with_several_tensors_in_one() -> None:
    from flash_attn import flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_qkvpacked_func

    (qkv,) = tensors((B, T, 3, H, D))
    record = watched(lambda x: flash_attn_qkvpacked_func(x, causal=True), qkv, gradients=True)
    agrees(record, truth(*heads_first(*qkv.unbind(2)[:2]), positional(T, T, True)[None]))
    wanted = qkv.grad.unbind(2)[0].square().sum((0, 1, 3)).sqrt()
    torch.testing.assert_close(torch.tensor(record.heads.dq_norm).float(), wanted, rtol=1e-4, atol=1e-4)
    q, kv = tensors((B, T, H, D), (B, S, 2, G, D))
    record = watched(flash_attn_kvpacked_func, q, kv)
    agrees(record, truth(*heads_first(q, kv.unbind(2)[0])))
    (flat,) = tensors((6, 3, H, D))
    record = watched(lambda x: flash_attn_varlen_qkvpacked_func(x, CU, 4, causal=True), flat)
    bias = blocks(CU, CU, causal=True)
    assert record.heads.max_logit == pytest.approx(truth(*heads_first(*flat.unbind(1)[:2]), bias).max_logit, rel=1e-4)


def test_flash_attention_2_against_a_cache() -> None:
    from flash_attn import flash_attn_with_kvcache

    n = torch.tensor([3, 5], dtype=torch.int32)
    q, new, cache = (x.detach() for x in tensors((B, 2, H, D), (B, 2, G, D), (B, S, G, D)))

    def attend(q: Tensor, new: Tensor, cache: Tensor) -> Tensor:
        return flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=n, causal=True)

    record = watched(attend, q, new, cache)
    for b, m in enumerate(n.tolist()):
        cache[b, m : m + 2] = new[b]
    bias = torch.full((B, 1, 2, S), -math.inf)
    for b, m in enumerate(n.tolist()):
        bias[b, 0, :, : m + 2] = positional(2, m + 2, True)[0]
    agrees(record, truth(*heads_first(q, cache), bias))


def test_flash_attention_3_and_what_it_adds() -> None:
    from flash_attn_interface import flash_attn_func

    q, k, v = tensors((B, T, H, D), (B, S, G, D), (B, S, G, D))
    record = watched(lambda *qkv: flash_attn_func(*qkv, causal=True, window_size=(2, 0)), q, k, v)
    agrees(record, truth(*heads_first(q, k), positional(T, S, True, (2, 0))[None]))
    model = Core(lambda *qkv: flash_attn_func(*qkv, attention_chunk=4))
    with lh.watch(model, deep=False) as w:  # the real one shows nothing of its inside, the stand-in would
        model(q, k, v)
    (line,) = w.coverage()
    assert not line.seen
    assert "flash_attn_func with attention_chunk is not described" in line.how
    assert "describe=" in line.how


# ---- xformers

BIASES: dict[str, tuple[Callable[[], Any], tuple[int, int]]] = {
    "none": (lambda: None, (T, S)),
    "tensor": (lambda: torch.randn(B, H, T, S, generator=torch.Generator().manual_seed(1)), (T, S)),
    "triangular": (stubs.LowerTriangularMask, (T, S)),
    "bottom right": (stubs.LowerTriangularFromBottomRightMask, (T, S)),
    "local": (lambda: stubs.LocalAttentionFromBottomRightMask(2, 1), (T, S)),
    "blocks": (lambda: stubs.BlockDiagonalMask.from_seqlens([2, 4]), (6, 6)),
    "causal blocks": (lambda: stubs.BlockDiagonalCausalMask.from_seqlens([2, 4]), (6, 6)),
    "other blocks of keys": (lambda: stubs.BlockDiagonalCausalMask.from_seqlens([2, 4], [4, 5]), (6, 9)),
    "bottom right blocks": (lambda: stubs.BlockDiagonalCausalFromBottomRightMask.from_seqlens([2, 4], [4, 5]), (6, 9)),
}


@pytest.mark.parametrize("name", BIASES)
def test_xformers(name: str) -> None:
    import xformers.ops as xops

    make, (n, m) = BIASES[name]
    bias = make()
    rows = 1 if "blocks" in name else B
    q, k, v = tensors((rows, n, H, D), (rows, m, H, D), (rows, m, H, D))
    record = watched(lambda *qkv: xops.memory_efficient_attention(*qkv, attn_bias=bias, scale=0.4), q, k, v)
    added = bias if bias is None or isinstance(bias, Tensor) else bias.materialize((n, m))[None, None]
    agrees(record, truth(*heads_first(q, k), added, scale=0.4), places=False)


def test_xformers_layouts_and_masks_of_other_classes() -> None:
    import xformers.ops as xops

    q, k, v = tensors((B, T, D), (B, S, D), (B, S, D))
    agrees(watched(xops.memory_efficient_attention, q, k, v), truth(q[:, None], k[:, None]))
    q, k, v = tensors((B, T, 2, 2, D), (B, S, 2, 2, D), (B, S, 2, 2, D))
    flat = heads_first(q.flatten(2, 3), k.flatten(2, 3))
    agrees(watched(xops.memory_efficient_attention, q, k, v), truth(*flat))

    class Own:
        def materialize(self, shape: Any, dtype: Any = torch.float32, device: Any = "cpu") -> Tensor:
            return positional(*shape[-2:], True)[0]

    q, k, v = tensors((B, T, H, D), (B, S, H, D), (B, S, H, D))
    record = watched(lambda *qkv: xops.memory_efficient_attention(*qkv, Own()), q, k, v)
    agrees(record, truth(*heads_first(q, k), positional(T, S, True)[None]))


# ---- TransformerEngine

TE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sbhd, causal": ({}, {"causal": True, "bottom_right": False}),
    "bshd, no mask": ({"qkv_format": "bshd", "attn_mask_type": "no_mask"}, {"causal": False}),
    "bottom right": ({"attn_mask_type": "causal_bottom_right"}, {"causal": True}),
    "window": (
        {"attn_mask_type": "causal", "window_size": (2, 0), "softmax_scale": 0.3},
        {"causal": True, "window": (2, 0), "bottom_right": False},
    ),
}


@pytest.mark.parametrize("name", TE)
def test_transformer_engine(name: str) -> None:
    from transformer_engine.pytorch import DotProductAttention

    passed, position = TE[name]
    core = DotProductAttention(H, D, G, **passed)
    layout = passed.get("qkv_format", "sbhd")
    q, k, v = tensors((B, T, H, D), (B, S, G, D), (B, S, G, D))

    def attend(*qkv: Tensor) -> Tensor:
        return core(*(x.transpose(0, 1) if layout == "sbhd" else x for x in qkv))

    model = nn.Sequential(core)
    alone = attend(q, k, v)
    with lh.watch(model) as w:
        seen = attend(q, k, v)
        w.step()
    assert torch.equal(alone, seen)
    wanted = truth(*heads_first(q, k), positional(T, S, **position)[None], scale=passed.get("softmax_scale"))
    agrees(w.last["0"], wanted)
    assert w.last["0"].facts.how == "transformer_engine.DotProductAttention"


def test_transformer_engine_with_padding_and_packing() -> None:
    from transformer_engine.pytorch import DotProductAttention

    core = DotProductAttention(H, D, attn_mask_type="padding_causal", qkv_format="bshd")
    q, k, v = tensors((B, T, H, D), (B, T, H, D), (B, T, H, D))
    n = torch.tensor([4, 6])
    hidden = torch.arange(T) >= n[:, None]
    bias = positional(T, T, True)[None].masked_fill(hidden[:, None, None], -math.inf)
    with lh.watch(nn.Sequential(core)) as w:
        core(q, k, v, attention_mask=hidden[:, None, None])
        w.step()
        agrees(w.last["0"], truth(*heads_first(q, k), bias, ~hidden))
        flat = [x[0] for x in (q, k, v)]
        core(*flat, qkv_format="thd", cu_seqlens_q=CU, cu_seqlens_kv=CU)
        w.step()
    wanted = truth(*heads_first(*flat[:2]), blocks(CU, CU, causal=True))
    assert w.last["0"].heads.max_logit == pytest.approx(wanted.max_logit, rel=1e-4)

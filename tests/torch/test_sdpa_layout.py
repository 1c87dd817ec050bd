"""The output of the drop-in lies in memory as PyTorch's does: `out.transpose(1, 2).view(B, T, C)` works in both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from levelhead import _core
from levelhead.torch import patch
from levelhead.torch.sdpa import ORIGINAL

B, H, T, D = 2, 4, 5, 8


def tokens_first(heads: int = H, width: int = D, tokens: int = T) -> Tensor:
    """As models make them: (B, T, H, D), seen as (B, H, T, D)."""
    return torch.randn(B, tokens, heads, width).transpose(1, 2)


# Queries, keys and values in memory, by name. What PyTorch's fused kernel does not take is contiguous there.
LAYOUTS: dict[str, Callable[[], tuple[Tensor, Tensor, Tensor]]] = {
    "contiguous": lambda: (torch.randn(B, H, T, D), tokens_first(), tokens_first()),
    "tokens first": lambda: (tokens_first(), tokens_first(), tokens_first()),
    "only queries tokens first": lambda: (tokens_first(), torch.randn(B, H, 7, D), torch.randn(B, H, 7, D)),
    "one projection": lambda: tuple(x.transpose(1, 2) for x in torch.randn(B, T, 3, H, D).unbind(2)),
    "batch second": lambda: tuple(torch.randn(T, B, H, D).permute(1, 2, 0, 3) for _ in range(3)),
    "heads first": lambda: tuple(torch.randn(H, B, T, D).transpose(0, 1) for _ in range(3)),
    "rows of a larger tensor": lambda: (torch.randn(9, H, T + 3, D)[:B, :, 2:-1], tokens_first(), tokens_first()),
    "one row of a larger tensor": lambda: tuple(tokens_first()[:1] for _ in range(3)),
    "one token": lambda: (tokens_first(tokens=1), tokens_first(), tokens_first()),
    "one batch row for all": lambda: (tokens_first()[:1].expand(B, H, T, D), tokens_first(), tokens_first()),
    "one head for all": lambda: (tokens_first(1).expand(B, H, T, D), tokens_first(), tokens_first()),
    "one query for all": lambda: (torch.randn(B, H, 1, D).expand(B, H, T, D), tokens_first(), tokens_first()),
    "groups": lambda: (tokens_first(), tokens_first(2), tokens_first(2)),
    "values of another width": lambda: (tokens_first(), tokens_first(), tokens_first(width=3)),
    "queries by columns": lambda: (torch.randn(B, H, D, T).mT, tokens_first(), tokens_first()),
    "keys by columns": lambda: (tokens_first(), torch.randn(B, H, D, T).mT, tokens_first()),
    "rank 3": lambda: tuple(torch.randn(T, H, D).transpose(0, 1) for _ in range(3)),
    "rank 5": lambda: tuple(torch.randn(3, B, T, H, D).transpose(2, 3) for _ in range(3)),
    "batches that broadcast": lambda: (tokens_first(), tokens_first()[:1], tokens_first()[:1]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.ones(T, T).tril().bool()},
    "padding": {"attn_mask": torch.ones(B, 1, 1, T)},
    "a mask per head": {"attn_mask": torch.ones(H, T, T)},
    "a learned bias": {"attn_mask": torch.zeros(T, T, requires_grad=True)},
    "dropout": {"dropout_p": 0.25},
    "all dropped": {"dropout_p": 1.0},
}


def assert_strides_of_torch(q: Tensor, k: Tensor, v: Tensor, wrap: Any = lambda call: call, **options: Any) -> Tensor:
    """Returns our output."""
    groups = {"enable_gqa": True} if q.shape[-3] != k.shape[-3] else {}
    want = wrap(lambda *x: F.scaled_dot_product_attention(*x, **options, **groups))(q, k, v)
    with patch():
        found = wrap(lambda *x: F.scaled_dot_product_attention(*x, **options, **groups))(q, k, v)
    assert found.stride() == want.stride()
    if not options.get("dropout_p"):
        rounded = dict(rtol=0.016, atol=2.0**-9) if want.dtype is torch.bfloat16 else {}  # torch rounds its weights
        torch.testing.assert_close(found, want, **rounded)
    return found


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_every_layout(layout: str, requires_grad: bool) -> None:
    q, k, v = (x.requires_grad_(requires_grad) for x in LAYOUTS[layout]())
    assert_strides_of_torch(q, k, v)
    with sdpa_kernel(SDPBackend.MATH):
        assert assert_strides_of_torch(q, k, v).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
def test_strides_with_every_option(option: str, requires_grad: bool, dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype).requires_grad_(requires_grad) for x in LAYOUTS["tokens first"]())
    out = ORIGINAL(q, k, v, **OPTIONS[option])
    with patch():
        assert F.scaled_dot_product_attention(q, k, v, **OPTIONS[option]).stride() == out.stride()


def test_strides_under_autocast_and_of_tensors_without_memory() -> None:
    q, k, v = LAYOUTS["one projection"]()
    with torch.autocast("cpu", torch.bfloat16):
        assert assert_strides_of_torch(q, k, v).dtype is torch.bfloat16
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        assert ORIGINAL(*fake).stride() == (T * H * D, D, H * D, 1)
        with patch():
            assert F.scaled_dot_product_attention(*fake).stride() == (T * H * D, D, H * D, 1)
    meta = [x.to("meta") for x in (q, k, v)]
    with patch():
        assert F.scaled_dot_product_attention(*meta).stride() == ORIGINAL(*meta).stride()


@pytest.mark.parametrize(("layout", "dynamic"), [("tokens first", False), ("one projection", True)])
def test_strides_in_compiled_code(layout: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    q, k, v = (x.requires_grad_() for x in LAYOUTS[layout]())
    compiled = {"backend": "aot_eager", "fullgraph": True, "dynamic": dynamic}
    out = assert_strides_of_torch(q, k, v, lambda call: torch.compile(call, **compiled), is_causal=True)
    out.sum().backward()
    torch._dynamo.reset()


@pytest.mark.parametrize("size", [1, 200])  # the fast call serves results up to a megabyte
def test_the_code_of_a_usual_model_runs(size: int) -> None:
    x = torch.randn(2, size, 3 * 768)
    q, k, v = (part.view(2, size, 12, 64).transpose(1, 2) for part in x.split(768, -1))
    with patch():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).view(2, size, 768)
    want = ORIGINAL(q, k, v, is_causal=True).transpose(1, 2).view(2, size, 768)
    torch.testing.assert_close(out, want)


def test_both_ways_to_the_core_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = LAYOUTS["one projection"]()
    with patch():
        short = F.scaled_dot_product_attention(q, k, v)
        monkeypatch.setattr(_core, "fast_attention", lambda *given: None)
        long = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(short, long)
    assert short.stride() == long.stride() == (T * H * D, D, H * D, 1)

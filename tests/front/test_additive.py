"""Additive attention against its plain formulation, in NumPy and, with gradients, in PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import levelhead as lh
from levelhead import _core
from support import isa  # noqa: F401


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    w_q: torch.Tensor,
    w_k: torch.Tensor,
    w_v: torch.Tensor,
    hidden: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The plain formula, with its (T, S, A) array."""
    inner = torch.tanh((q @ w_q.mT)[..., :, None, :] + (k @ w_k.mT)[..., None, :, :])
    s = inner @ w_v + (0.0 if mask is None else mask)
    s = s if hidden is None else s.masked_fill(hidden, -torch.inf)
    return s.softmax(-1) @ v


def arrays(
    *lead: int,
    T: int = 30,
    S: int = 70,
    A: int = 20,
    dtype: torch.dtype = torch.float64,
    size: float = 1.0,
    grad: bool = False,
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(*lead, T, 8), (*lead, S, 6), (*lead, S, 5), (A, 8), (A, 6), (A,)]
    found = [torch.randn(shape, dtype=dtype) for shape in shapes]
    found[0] *= size
    return [x.requires_grad_(grad) for x in found]


@pytest.mark.parametrize("size", [1.0, 300.0])  # 300: most heads are flat
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_numpy(isa: str, lead: tuple[int, ...], size: float) -> None:  # noqa: F811
    given = arrays(*lead, size=size)
    found = lh.additive_attention(*(x.numpy() for x in given))
    np.testing.assert_allclose(found, plain(*given).numpy(), rtol=1e-11, atol=1e-12)
    single = [x.float() for x in given]
    found = lh.additive_attention(*(x.numpy() for x in single))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, plain(*given).numpy(), rtol=1e-4, atol=3e-6 * size)
    assert _core.info()["isa"] == isa


@pytest.mark.parametrize("T", [1, 3, 300])
def test_lengths(isa: str, T: int) -> None:  # noqa: F811
    given = arrays(2, T=T, S=600)
    found = lh.additive_attention(*(x.numpy() for x in given))
    np.testing.assert_allclose(found, plain(*given).numpy(), rtol=1e-11, atol=1e-12)


def test_masks() -> None:
    given = arrays(2, 3)
    seen = torch.rand(30, 70) < 0.7
    want = plain(*given, hidden=~seen)
    torch.testing.assert_close(lh.additive_attention(*given, mask=seen), want)
    lengths = torch.tensor([40, 70])
    hidden = torch.arange(70) >= lengths[:, None, None, None]
    found = lh.additive_attention(*given, key_lengths=lengths)
    torch.testing.assert_close(found, plain(*given, hidden=hidden))
    causal = torch.arange(70) > torch.arange(30)[:, None] + 40
    torch.testing.assert_close(lh.additive_attention(*given, causal=True), plain(*given, hidden=causal))


@pytest.mark.parametrize("size", [1.0, 300.0])
@pytest.mark.parametrize("sizes", [{"T": 5, "S": 7, "A": 3}, {"T": 110, "S": 300, "A": 33}])
def test_gradients(isa: str, sizes: dict[str, int], size: float) -> None:  # noqa: F811
    given = arrays(2, 2, grad=False, size=size, **sizes)
    given = [x.requires_grad_() for x in given]
    dout = torch.randn(2, 2, sizes["T"], 5, dtype=torch.float64)
    want = torch.autograd.grad(plain(*given), given, dout)
    found = torch.autograd.grad(lh.additive_attention(*given), given, dout)
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-10)


def test_bits_do_not_depend_on_threads() -> None:
    given = [x.requires_grad_() for x in arrays(2, T=150, S=400, dtype=torch.float32)]
    results = []
    for threads in (1, 2, 5):
        out = lh.additive_attention(*given, threads=threads)
        results.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_hidden_values_touch_nothing(isa: str) -> None:  # noqa: F811
    given = arrays(2, dtype=torch.float32)
    seen = torch.ones(30, 70, dtype=torch.bool)
    seen[:, 9] = False
    clean = [x.clone().requires_grad_() for x in given]
    dirty = [x.clone() for x in given]
    dirty[1][:, 9], dirty[2][:, 9] = torch.inf, torch.nan
    dirty = [x.requires_grad_() for x in dirty]
    outs = [lh.additive_attention(*x, mask=seen) for x in (clean, dirty)]
    assert torch.equal(*outs)
    a = torch.autograd.grad(outs[0].sum(), clean[:1])
    b = torch.autograd.grad(outs[1].sum(), dirty[:1])
    assert torch.equal(a[0], b[0])


@pytest.mark.parametrize(
    ("index", "shape", "says"),
    [
        (3, (20, 7), r"w_q: expected shape \(20, 8\)"),
        (4, (19, 6), r"w_k: expected shape \(20, 6\)"),
        (5, (20, 1), "w_v: expected one dimension"),
    ],
)
def test_mistakes(index: int, shape: tuple[int, ...], says: str) -> None:
    given: list[Any] = arrays(2)
    given[index] = torch.ones(shape, dtype=torch.float64)
    with pytest.raises(lh.LevelheadError, match=says):
        lh.additive_attention(*given)
    with pytest.raises(lh.LevelheadError, match=says):
        lh.additive_attention(*(x.numpy() for x in given))


@pytest.mark.parametrize("hides", ["query_lengths", "key_lengths", "mask"])
def test_nothing_of_what_is_hidden_reaches_the_weights(hides: str) -> None:
    q, k, v, *weights = arrays(2, 2, dtype=torch.float64)
    T, S = q.shape[-2], k.shape[-2]
    lengths = torch.tensor([9, 20])
    beyond = torch.arange(T if hides == "query_lengths" else S) >= lengths[:, None]
    options: dict[str, Any] = {hides: ~beyond[:, None, None] if hides == "mask" else lengths}
    spoiled = [0] if hides == "query_lengths" else [1, 2]
    gradients = []
    for wild in (0.0, torch.nan):
        given = [x.clone().requires_grad_() for x in weights]
        qkv = [x.masked_fill(beyond[:, None, :, None], wild) if i in spoiled else x for i, x in enumerate((q, k, v))]
        out = lh.additive_attention(*qkv, *given, **options)
        gradients.append(torch.autograd.grad(out.square().sum(), given))
    for clean, dirty in zip(*gradients, strict=True):
        assert torch.isfinite(dirty).all() and torch.equal(clean, dirty)


def test_the_gradient_of_a_mask(isa: str) -> None:  # noqa: F811
    """That of a float mask, which is broadcast; 0 where all keys share it, in a half type, too."""
    given = arrays(2, dtype=torch.float64)
    mask = torch.randn(30, 70, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(lh.additive_attention(*given, mask=mask).square().sum(), mask)
    (wanted,) = torch.autograd.grad(plain(*given, mask=mask).square().sum(), mask)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
    half = [x.to(torch.bfloat16) for x in given]
    shared = torch.zeros(30, 1, dtype=torch.bfloat16, requires_grad=True)
    out = lh.additive_attention(*half, mask=shared)
    (zero,) = torch.autograd.grad(out.float().square().sum(), shared)
    assert zero.shape == shared.shape and zero.abs().max() < 1e-5

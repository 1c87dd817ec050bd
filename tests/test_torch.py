"""PyTorch: the drop-in held to the original's results, gradients to differences, and the operator
to what compile, autocast, vmap and checkpointing expect of one."""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import levelhead as lh
from levelhead.torch import patch, scaled_dot_product_attention
from levelhead.torch.ops import Options, attend

ORIGINAL = F.scaled_dot_product_attention
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 1)},
    "bool mask": {"mask": torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) < 0.7},
    "bias": {"mask": torch.randn(2, 4, 5, 7, dtype=torch.float64)},
    "shared bias": {"mask": torch.randn(4, 1, 7, dtype=torch.float64)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": True},
    "sinks": {"sinks": torch.randn(4, dtype=torch.float64)},
    "dropout": {"dropout": 0.3, "seed": 11},
    "cosine": {"scale": "cosine"},
    "scale": {"scale": torch.rand(4, dtype=torch.float64) + 0.2},
    "lengths": {"key_lengths": torch.tensor([5, 7])},
    "segments": {"segments": (torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 0, 0, 1, 1, 1, 1]))},
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def tensors(
    *lead: int, T: int = 5, S: int = 7, D: int = 4, E: int = 3, G: int | None = None,
    dtype: torch.dtype = torch.float64, grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kv = lead if G is None else (*lead[:-1], G)
    q, k, v = (
        torch.randn(*shape, dtype=dtype) for shape in ((*lead, T, D), (*kv, S, D), (*kv, S, E))
    )
    return q.requires_grad_(grad), k.requires_grad_(grad), v.requires_grad_(grad)


# ---- gradients


def learned(options: dict[str, Any]) -> dict[str, Tensor]:
    """Those options that have a gradient, as leaves of their own."""
    found = {name: options[name] for name in ("mask", "sinks", "scale") if name in options}
    return {
        name: x.clone().requires_grad_()
        for name, x in found.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }


def differences(options: dict[str, Any], call: Any) -> bool:
    q, k, v = tensors(2, 4, G=2)
    extra = learned(options)

    def run(*given: Tensor) -> Any:
        return call(*given[:3], **(options | dict(zip(extra, given[3:], strict=True))))

    return bool(torch.autograd.gradcheck(run, (q, k, v, *extra.values())))


@pytest.mark.parametrize("feature", FEATURES)
def test_attention_is_differentiable(feature: str) -> None:
    assert differences(FEATURES[feature], lh.attention)


PAIRS = [
    (a, b)
    for a, b in itertools.combinations(list(FEATURES)[1:], 2)
    if not FEATURES[a].keys() & FEATURES[b].keys()
]


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_pairs_are_differentiable(a: str, b: str) -> None:
    assert differences(FEATURES[a] | FEATURES[b], lh.attention)


@pytest.mark.parametrize("feature", ["plain", "causal", "sinks", "bias"])
def test_observe_is_differentiable(feature: str) -> None:
    def both(*given: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        seen = lh.observe(*given, **options)
        return seen.output, seen.logsumexp

    assert differences(FEATURES[feature], both)


def test_logsumexp_without_values_is_differentiable() -> None:
    q, k, _ = tensors(2, 2)
    assert torch.autograd.gradcheck(lambda q, k: lh.observe(q, k).logsumexp, (q, k))


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3))[1:])
def test_every_subset_of_requires_grad(needs: tuple[bool, ...]) -> None:
    plain = tensors(2, 4, grad=False)
    want = torch.autograd.grad(
        lh.attention(*(x.requires_grad_() for x in plain)).square().sum(), plain
    )
    given = [x.detach().requires_grad_(need) for x, need in zip(plain, needs, strict=True)]
    lh.attention(*given).square().sum().backward()
    for x, need, gradient in zip(given, needs, want, strict=True):
        assert (x.grad is not None) == need
        assert not need or torch.equal(x.grad, gradient)


def test_the_statistics_are_those_of_observe_without_gradients() -> None:
    q, k, v = tensors(2, 4)
    learning = lh.observe(q, k, v, causal=True)
    plain = lh.observe(q.detach(), k.detach(), v.detach(), causal=True)
    assert (learning.rows.entropy == plain.rows.entropy).all()
    assert torch.equal(learning.output, plain.output)
    assert torch.allclose(learning.logsumexp, plain.logsumexp, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_as_exact_as_pytorchs(dtype: torch.dtype, causal: bool) -> None:
    """RMS at most 1.05 and maximum at most 1.25 times PyTorch's own error, over three seeds."""
    ours, theirs = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        q, k, v = tensors(1, 8, T=256, S=256, D=64, E=64, dtype=dtype)
        dout = torch.randn(1, 8, 256, 64, dtype=dtype)
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        truth = torch.autograd.grad(ORIGINAL(*wide, is_causal=causal), wide, dout.double())
        for call, errors in ((scaled_dot_product_attention, ours), (ORIGINAL, theirs)):
            found = torch.autograd.grad(call(q, k, v, is_causal=causal), (q, k, v), dout)
            errors.append([x.double() - y for x, y in zip(found, truth, strict=True)])
    for name, mine, its in zip(
        "qkv", zip(*ours, strict=True), zip(*theirs, strict=True), strict=True
    ):
        a, b = torch.stack(mine), torch.stack(its)
        assert a.square().mean().sqrt() <= 1.05 * b.square().mean().sqrt(), name
        assert a.abs().max() <= 1.25 * b.abs().max(), name


# ---- the drop-in

SHAPES = {
    "one head": ((5, 8), (7, 8), (7, 6)),
    "heads": ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
    "batch": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)),
    "more": ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8)),
    "broadcast": ((2, 3, 5, 8), (1, 3, 7, 8), (2, 1, 7, 8)),
    "square": ((2, 3, 33, 16), (2, 3, 33, 16), (2, 3, 33, 16)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float", "scale"])
def test_the_original_s_results(shape: str, dtype: torch.dtype, kind: str) -> None:
    q, k, v = (torch.randn(sizes, dtype=dtype) for sizes in SHAPES[shape])
    T, S = q.shape[-2], k.shape[-2]
    options: dict[str, Any] = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.rand(T, S) < 0.7},
        "float": {"attn_mask": torch.randn(T, S, dtype=dtype)},
        "scale": {"scale": 0.3},
    }[kind]
    found = scaled_dot_product_attention(q, k, v, **options)
    want = ORIGINAL(q.double(), k.double(), v.double(), **_double(options))
    assert found.dtype is dtype
    assert found.shape == want.shape
    near = {torch.bfloat16: 1e-2, torch.float16: 1e-3}.get(dtype)  # weights are rounded, too
    close = {} if near is None else {"atol": near, "rtol": 2 * near}
    torch.testing.assert_close(found, want.to(dtype), equal_nan=True, **close)
    learning = scaled_dot_product_attention(q.requires_grad_(), k, v, **options)
    torch.testing.assert_close(learning, found)


def _double(options: dict[str, Any]) -> dict[str, Any]:
    mask = options.get("attn_mask")
    wide = mask is not None and mask.is_floating_point()
    return options | ({"attn_mask": mask.double()} if wide else {})


def test_grouped_queries() -> None:
    q, k, v = tensors(2, 6, G=2, grad=False)
    found = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(found, ORIGINAL(q, k, v, enable_gqa=True))
    with pytest.raises(RuntimeError, match="enable_gqa"):
        scaled_dot_product_attention(q, k, v)


def test_a_mask_and_causal_mean_both() -> None:
    q, k, v = tensors(2, 3, T=6, S=6, grad=False)
    mask = torch.rand(6, 6) < 0.7
    both = ORIGINAL(q, k, v, attn_mask=mask & torch.ones(6, 6, dtype=torch.bool).tril())
    found = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True)
    torch.testing.assert_close(found, both)


def test_dropout_keeps_its_share_and_is_pytorchs_to_repeat() -> None:
    q, k = torch.zeros(1, 1, 64, 8), torch.zeros(1, 1, 512, 8)
    v = torch.eye(512)[None, None]
    torch.manual_seed(3)
    a = scaled_dot_product_attention(q, k, v, dropout_p=0.25)
    torch.manual_seed(3)
    b = scaled_dot_product_attention(q, k, v, dropout_p=0.25)
    c = scaled_dot_product_attention(q, k, v, dropout_p=0.25)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    kept = a[0, 0] > 0
    assert abs(float(kept.double().mean()) - 0.75) < 0.02
    torch.testing.assert_close(a[0, 0][kept], torch.full((int(kept.sum()),), 1 / 512 / 0.75))
    assert not scaled_dot_product_attention(q, k, v, dropout_p=1.0).any()


def test_checkpointing_replays_dropout() -> None:
    q, k, v = tensors(2, 3)
    torch.manual_seed(5)
    plain = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    want = torch.autograd.grad(plain.square().sum(), (q, k, v))
    torch.manual_seed(5)
    again = checkpoint(
        lambda *x: scaled_dot_product_attention(*x, dropout_p=0.5), q, k, v, use_reentrant=False
    )
    found = torch.autograd.grad(again.square().sum(), (q, k, v))
    assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


def test_rows_that_see_nothing_are_zero() -> None:
    q, k, v = tensors(2, 3)
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert not out[:, :, 2].any()
    out.sum().backward()
    assert q.grad is not None
    assert torch.isfinite(q.grad).all()


# ---- what PyTorch expects of an operator


@pytest.mark.parametrize("feature", ["plain", "bias", "sinks", "lengths"])
def test_opcheck(feature: str) -> None:
    q, k, v = tensors(2, 4, G=2)
    scale = torch.full((4,), 0.5, dtype=torch.float64)
    options = Options(scale=scale, **FEATURES[feature])
    torch.library.opcheck(torch.ops.levelhead.attend.default, (q, k, v, *options))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_whole(backend: str) -> None:
    torch.compiler.reset()
    q, k, v = tensors(2, 4, dtype=torch.float32)
    mask = torch.randn(5, 7)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = scaled_dot_product_attention(q * 2, k, v, attn_mask=mask, dropout_p=0.1)
        return (out + 1).square().sum()

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    torch.manual_seed(1)
    want = torch.autograd.grad(step(q, k, v), (q, k, v))
    torch.manual_seed(1)
    found = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    if backend == "aot_eager":  # inductor draws its random numbers in another way
        for x, y in zip(found, want, strict=True):
            torch.testing.assert_close(x, y)
    assert all(torch.isfinite(x).all() for x in found)


def test_autocast() -> None:
    q, k, v = tensors(2, 3, dtype=torch.float32, grad=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = scaled_dot_product_attention(q, k, v)
        want = ORIGINAL(q, k, v)
    assert found.dtype is want.dtype is torch.bfloat16
    torch.testing.assert_close(found, want, atol=1e-2, rtol=2e-2)


def test_vmap() -> None:
    q, k, v = tensors(6, 2, 3, grad=False)
    mask = torch.rand(6, 5, 7) < 0.8
    want = torch.stack(
        [scaled_dot_product_attention(*x, attn_mask=m) for *x, m in zip(q, k, v, mask, strict=True)]
    )
    mapped = torch.vmap(lambda q, k, v, m: scaled_dot_product_attention(q, k, v, attn_mask=m))
    torch.testing.assert_close(mapped(q, k, v, mask), want)
    shared = torch.vmap(scaled_dot_product_attention, in_dims=(0, None, None))
    each = torch.stack([scaled_dot_product_attention(x, k[0], v[0]) for x in q])
    torch.testing.assert_close(shared(q, k[0], v[0]), each)


def test_a_second_derivative_is_refused() -> None:
    q, k, v = tensors(1, 2)
    (first,) = torch.autograd.grad(lh.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(first.sum(), q)


def test_any_strides() -> None:
    q, k, v = tensors(2, 3, grad=False)
    want = scaled_dot_product_attention(q, k, v)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(scaled_dot_product_attention(*turned), want)
    learning = [x.clone().requires_grad_() for x in turned]
    assert torch.equal(scaled_dot_product_attention(*learning), want)


# ---- patch


def test_patch_swaps_and_restores() -> None:
    importer = types.ModuleType("importer")
    importer.sdpa = ORIGINAL  # type: ignore[attr-defined]
    sys.modules["importer"] = importer
    try:
        with patch():
            assert F.scaled_dot_product_attention is scaled_dot_product_attention
            assert importer.sdpa is scaled_dot_product_attention
            with patch():
                pass
            assert F.scaled_dot_product_attention is scaled_dot_product_attention
        assert F.scaled_dot_product_attention is ORIGINAL
        assert importer.sdpa is ORIGINAL
        with pytest.raises(KeyError), patch():
            raise KeyError
        assert F.scaled_dot_product_attention is ORIGINAL
        holding = patch()
        assert F.scaled_dot_product_attention is scaled_dot_product_attention
        holding.undo()
        holding.undo()
        assert F.scaled_dot_product_attention is ORIGINAL
    finally:
        del sys.modules["importer"]


def test_a_patched_encoder_gives_the_same() -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 9, 32)
    want = layer(x)
    with patch():
        found = layer(x)
    assert not torch.equal(found, want)  # it did run elsewhere
    torch.testing.assert_close(found, want)


# ---- mistakes

ONES = torch.ones(2, 3, 4)


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        ((ONES, ONES.double(), ONES), {}, "one dtype of"),
        ((ONES.int(), ONES.int(), ONES.int()), {}, "one dtype of"),
        ((ONES[0, 0], ONES, ONES), {}, "at least 2 dimensions"),
        ((ONES, ONES[..., :2], ONES), {}, "key as wide as query"),
        ((ONES, ONES, ONES[:, :2]), {}, "as many values as keys"),
        ((ONES, torch.ones(5, 3, 4), torch.ones(5, 3, 4)), {}, "broadcast"),
        ((ONES, ONES, ONES), {"attn_mask": torch.ones(2, 2)}, "broadcasts to"),
        ((ONES, ONES, ONES), {"attn_mask": torch.ones(3, 3).long()}, "attn_mask: expected bool"),
        ((ONES, ONES, ONES), {"dropout_p": 1.5}, "a probability"),
        ((ONES.to_sparse(), ONES, ONES), {}, "a dense tensor"),
        ((torch.nested.nested_tensor([ONES, ONES]),) * 3, {}, "a dense tensor"),
    ],
)
def test_mistakes_are_runtime_errors(given: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(RuntimeError, match=says) as caught:
        scaled_dot_product_attention(*given, **options)
    assert isinstance(caught.value, lh.LevelheadError)


def test_the_logsumexp_of_the_operator() -> None:
    q, k, v = tensors(2, 3, grad=False)
    _, found = attend(q, k, v, Options(scale=torch.full((3,), 0.5, dtype=torch.float64)))
    torch.testing.assert_close(found, (q @ k.mT * 0.5).logsumexp(-1))

"""Gradients in PyTorch: every feature and every pair against finite differences, every subset of inputs that require a
gradient, second derivatives, and precision against PyTorch's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import levelhead as lh
from levelhead.torch import scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("alone")

ORIGINAL = F.scaled_dot_product_attention
B, H, G, T, S, D, E = 2, 4, 2, 3, 5, 2, 3


def bias(*sizes: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(len(sizes))
    return {"mask": torch.randn(sizes, dtype=torch.float64, generator=generator)}


FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "bool mask": {"mask": torch.rand(T, S, generator=torch.Generator().manual_seed(0)) < 0.7},
    "bias": bias(B, H, T, S),
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": True},
    "sinks": {"sinks": torch.linspace(-1, 1, H, dtype=torch.float64)},
    "dropout": {"dropout": 0.3, "seed": 11},
    "cosine": {"scale": "cosine"},
    "log-n": {"scale": "log-n"},
    "scale": {"scale": torch.tensor(0.7, dtype=torch.float64)},
    "scales": {"scale": torch.linspace(0.2, 1.2, H, dtype=torch.float64)},
    "lengths": {"key_lengths": torch.tensor([3, 5])},
    "query lengths": {"query_lengths": torch.tensor([3, 1])},
    "segments": {"segments": (torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1, 1, 1]))},
    "query_start": {"query_start": torch.tensor([1, 0]), "causal": True},
}
SHARED = [(1, 1), (1, S), (T, 1), (T, S), (S,), (), (1, T, S), (H, 1, 1), (H, T, S), (1, H, 1, S)]
SHARED += [(B, 1, 1, S), (B, 1, T, S), (B, H, 1, 1), (B, H, T, 1), (1, 1, 1, 1)]
PAIRS = [
    (a, b) for a, b in itertools.combinations(FEATURES, 2) if not FEATURES[a].keys() & FEATURES[b].keys() - {"causal"}
]


def problem() -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((B, H, T, D), (B, G, S, D), (B, G, S, E))
    q, k, v = (torch.randn(sizes, dtype=torch.float64, requires_grad=True) for sizes in shapes)
    return q, k, v


def learned(options: dict[str, Any]) -> dict[str, Tensor]:
    """The options that have a gradient, as separate leaves."""
    found = {name: options[name] for name in ("mask", "sinks", "scale") if name in options}
    return {
        name: x.clone().requires_grad_() for name, x in found.items() if isinstance(x, Tensor) and x.is_floating_point()
    }


def differences(check: Any, options: dict[str, Any], call: Any, **how: Any) -> bool:
    extra = learned(options)

    def run(*given: Tensor) -> Any:
        return call(*given[:3], **(options | dict(zip(extra, given[3:], strict=True))))

    return bool(check(run, (*problem(), *extra.values()), **how))


def output_and_logsumexp(*given: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Output and logsumexp, except in rows without visible keys, whose logsumexp is -inf and has no differences."""
    seen = lh.observe(*given, **options)
    return seen.output, seen.logsumexp.masked_fill(seen.logsumexp == -torch.inf, 0.0)


# ---- against differences


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature(feature: str) -> None:
    assert differences(gradcheck, FEATURES[feature], lh.attention)


@pytest.mark.parametrize("feature", FEATURES)
def test_output_and_logsumexp_of_every_feature(feature: str) -> None:
    assert differences(gradcheck, FEATURES[feature], output_and_logsumexp)


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_every_pair(a: str, b: str) -> None:
    options = FEATURES[a] | FEATURES[b]
    assert differences(gradcheck, options, output_and_logsumexp, fast_mode=True)


@pytest.mark.parametrize("sizes", SHARED, ids=str)
def test_a_bias_of_every_shape(sizes: tuple[int, ...]) -> None:
    assert differences(gradcheck, bias(*sizes), lh.attention)


def test_a_bias_that_hides() -> None:
    """-inf in a bias hides, with gradient 0 there; rows without visible keys have gradient 0, too."""
    q, k, v = problem()
    mask = torch.zeros(T, S, dtype=torch.float64)
    mask[0, 1], mask[2] = -torch.inf, -torch.inf
    mask.requires_grad_()
    seen = lh.observe(q, k, v, mask=mask)
    loss = seen.output.square().sum() + seen.logsumexp[..., :2].sum()
    dq, _, _, dmask = torch.autograd.grad(loss, (q, k, v, mask))
    assert not dq[:, :, 2].any()
    assert not dmask[2].any()
    assert dmask[0, 1] == 0
    assert dmask[0, 0] != 0


def test_logsumexp_without_values() -> None:
    q, k, _ = problem()
    assert gradcheck(lambda q, k: lh.observe(q, k).logsumexp, (q, k))


def test_one_head_without_its_axis() -> None:
    q, k, v = (x[0, 0].detach().requires_grad_() for x in problem())
    mask = bias(T, S)["mask"].requires_grad_()
    assert gradcheck(lambda q, k, v, m: lh.attention(q, k, v, mask=m), (q, k, v, mask))


DROP_IN: dict[str, dict[str, Any]] = {
    "plain": {},
    "is_causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool": {"attn_mask": FEATURES["bool mask"]["mask"]},
    "float": {"attn_mask": bias(T, S)["mask"]},
    "dropout": {"dropout_p": 0.4},
    "float, is_causal": {"attn_mask": bias(H, 1, S)["mask"], "is_causal": True},
    "bool, dropout": {"attn_mask": FEATURES["bool mask"]["mask"], "dropout_p": 0.4},
    "all": {"attn_mask": bias(B, 1, T, S)["mask"], "is_causal": True, "dropout_p": 0.4, "scale": 2},
}


@pytest.mark.parametrize("shared", ["groups", "broadcast"])
@pytest.mark.parametrize("case", DROP_IN)
def test_the_drop_in(case: str, shared: str) -> None:
    options = dict(DROP_IN[case])
    mask = options.pop("attn_mask", None)
    learns = mask is not None and mask.is_floating_point()
    q, k, v = problem()
    if shared == "broadcast":
        k, v = (x[:1, :1].detach().requires_grad_() for x in (k, v))

    def run(q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        torch.manual_seed(3)  # dropout's seed
        attn_mask = given[0] if given else mask
        return scaled_dot_product_attention(q, k, v, attn_mask, enable_gqa=shared == "groups", **options)

    extra = (mask.clone().requires_grad_(),) if learns else ()
    assert gradcheck(run, (q, k, v, *extra))


# ---- what learns, and what does not


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=6))[1:], ids=str)
def test_every_subset_learns(needs: tuple[bool, ...]) -> None:
    names = ("q", "k", "v", "mask", "sinks", "scale")
    whole = dict(zip("qkv", problem(), strict=True))
    whole |= learned(FEATURES["bias"] | FEATURES["sinks"] | FEATURES["scales"])
    want = torch.autograd.grad(lh.attention(**whole).square().sum(), [whole[n] for n in names])
    given = {n: whole[n].detach().requires_grad_(need) for n, need in zip(names, needs, strict=True)}
    lh.attention(**given).square().sum().backward()
    for name, need, gradient in zip(names, needs, want, strict=True):
        found = given[name].grad
        assert (found is not None) == need
        assert not need or torch.equal(found, gradient), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_have_the_dtype_of_what_learns(dtype: torch.dtype) -> None:
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in problem())
    mask = torch.randn(T, S, requires_grad=True)
    sinks = torch.zeros(H, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(0.5, requires_grad=True)
    lh.attention(q, k, v, mask=mask, sinks=sinks, scale=scale).sum().backward()
    for x in (q, k, v, mask, sinks, scale):
        assert x.grad is not None
        assert (x.grad.dtype, x.grad.shape) == (x.dtype, x.shape)


def test_what_comes_back_may_have_any_strides() -> None:
    q, k, v = problem()
    out = lh.attention(q, k, v)
    dout = torch.randn(E, T, H, B, dtype=torch.float64)
    want = torch.autograd.grad(out, (q, k, v), dout.permute(3, 2, 1, 0).contiguous(), True)
    found = torch.autograd.grad(out, (q, k, v), dout.permute(3, 2, 1, 0), True)
    assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))
    ones = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), True)
    spread = torch.autograd.grad(out, (q, k, v), torch.ones((), dtype=torch.float64).expand_as(out))
    assert all(torch.equal(x, y) for x, y in zip(spread, ones, strict=True))


def test_what_changed_since_is_noticed() -> None:
    q, k, v = problem()
    doubled = k * 2
    out = lh.attention(q, doubled, v)
    doubled.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_statistics_are_those_of_observe_without_gradients() -> None:
    q, k, v = problem()
    learning = lh.observe(q, k, v, causal=True)
    plain = lh.observe(q.detach(), k.detach(), v.detach(), causal=True)
    assert (learning.rows.entropy == plain.rows.entropy).all()
    assert torch.equal(learning.output, plain.output)
    assert torch.allclose(learning.logsumexp, plain.logsumexp, rtol=0, atol=1e-14)


def test_an_option_that_learns_asks_for_tensors() -> None:
    q, k, v = (x.detach().numpy() for x in problem())
    with pytest.raises(lh.LevelheadError, match="expected torch tensors, .* got ndarray"):
        lh.attention(q, k, v, sinks=torch.zeros(H, requires_grad=True))


# ---- second derivatives


@pytest.mark.parametrize("feature", FEATURES)
def test_second_derivatives(feature: str) -> None:
    assert differences(gradgradcheck, FEATURES[feature], output_and_logsumexp, fast_mode=True)


def test_third_derivatives() -> None:
    q, k, v = problem()

    def penalty(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        loss = scaled_dot_product_attention(q, k, v, enable_gqa=True).square().sum()
        (gradient,) = torch.autograd.grad(loss, q, create_graph=True)
        return gradient.square().sum()

    assert gradgradcheck(penalty, (q, k, v), fast_mode=True)


def test_second_derivatives_of_half_types() -> None:
    q, k, v = (x.detach().to(torch.bfloat16).requires_grad_() for x in problem())
    loss = lh.attention(q, k, v, mask=torch.randn(T, S, requires_grad=True)).sum()
    (gradient,) = torch.autograd.grad(loss, q, create_graph=True)
    (found,) = torch.autograd.grad(gradient.sum(), k)
    assert found.dtype is torch.bfloat16
    assert torch.isfinite(found).all()


QUERIES, KEYS = torch.arange(5) >= torch.tensor([[2], [5]]), torch.arange(7) >= torch.tensor([[3], [7]])
HIDING: dict[str, dict[str, Any]] = {
    "q": dict(query_lengths=[2, 5]),
    "dout": dict(query_lengths=[2, 5]),
    "k": dict(key_lengths=[3, 7]),
    "v": dict(mask=~KEYS[:, None, None]),
}
SPOILED = {"k": KEYS, "v": KEYS}


def _second(name: str, wild: float, hide: bool = True, **options: Any) -> list[Tensor]:
    """Second derivatives of a call in which hidden rows of one input hold `wild`."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": 5, "k": 7, "v": 7, "dout": 5}
    x = {name: torch.randn(2, 2, n, 4, dtype=torch.float64, generator=generator) for name, n in sizes.items()}
    x[name] = x[name].masked_fill(SPOILED.get(name, QUERIES)[:, None, :, None], wild)
    q, k, v, dout = (tensor.requires_grad_() for tensor in x.values())
    out = lh.attention(q, k, v, **options, **(HIDING[name] if hide else {}))
    first = torch.autograd.grad(out, (q, k, v), dout, create_graph=True)
    loss = torch.stack([part.square().sum() for part in first]).sum()
    return list(torch.autograd.grad(loss, (q, k, v, dout)))


@pytest.mark.parametrize(
    "options", [{}, {"scale": "cosine"}, {"sinks": torch.ones(2)}], ids=["plain", "cosine", "sinks"]
)
@pytest.mark.parametrize("name", HIDING)
def test_nothing_hidden_reaches_second_derivatives(name: str, options: dict[str, Any]) -> None:
    clean, dirty = (_second(name, wild, **options) for wild in (1.0, torch.nan))
    for a, b in zip(clean, dirty, strict=True):
        assert torch.isfinite(b).all() and torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    for x in _second(name, torch.nan, hide=False, **options)[:3]:
        assert x[0].isnan().any()  # what is visible is not hidden


@pytest.mark.parametrize("name", ["k", "v"])
def test_nothing_hidden_reaches_forward_mode(name: str) -> None:
    x = {name: torch.randn(2, 2, n, 4, dtype=torch.float64) for name, n in (("q", 5), ("k", 7), ("v", 7))}
    results = []
    for wild in (1.0, torch.nan):
        qkv = tuple((x | {name: x[name].masked_fill(KEYS[:, None, :, None], wild)}).values())
        call = partial(scaled_dot_product_attention, attn_mask=~KEYS[:, None, None])
        results.append(torch.func.jvp(call, qkv, tuple(map(torch.ones_like, qkv))))
    for a, b in zip(*results, strict=True):
        assert torch.isfinite(b).all() and torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", [torch.sum, lambda out: out.square().sum()])
@pytest.mark.parametrize("learned", [False, True])
def test_a_second_derivative_of_additive_attention_is_refused(loss: Any, learned: bool) -> None:
    q, k, v = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(3))
    w = torch.randn(5, 4, requires_grad=learned)
    out = lh.additive_attention(q, k, v, w, w, torch.randn(5))
    with pytest.raises(lh.LevelheadError, match="create_graph"):
        torch.autograd.grad(loss(out), q, create_graph=True)
    torch.autograd.grad(loss(out), q)


def test_an_empty_batch_has_gradients_of_zero() -> None:
    q, k = torch.randn(0, 4, 5, 8, requires_grad=True), torch.randn(0, 2, 3, 8)
    sinks, scale = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    for _ in range(50):
        torch.full((64,), 7.0, dtype=torch.float64)  # memory that a gradient without a value would show
        out = lh.attention(q, k, k, sinks=sinks, scale=scale)
        assert isinstance(out, torch.Tensor)
        assert not any(x.any() for x in torch.autograd.grad(out.sum(), (sinks, scale)))


# ---- precision

CELLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, dict[str, Any]]] = {
    # q and k before their width, width of values, options; the mask's sizes stand for a mask
    "d 64": ((1, 4, 192, 64), (1, 4, 192, 64), 64, {}),
    "d 64, causal": ((1, 4, 192, 64), (1, 4, 192, 64), 64, {"is_causal": True}),
    "d 128": ((1, 4, 192, 128), (1, 4, 192, 128), 128, {}),
    "d 128, causal": ((1, 4, 192, 128), (1, 4, 192, 128), 128, {"is_causal": True}),
    "one head": ((1, 1, 512, 64), (1, 1, 512, 64), 64, {"is_causal": True}),
    "wider values": ((1, 4, 192, 64), (1, 4, 192, 64), 96, {}),
    "longer keys": ((1, 4, 96, 64), (1, 4, 384, 64), 64, {}),
    "groups": ((1, 8, 160, 64), (1, 2, 160, 64), 64, {"enable_gqa": True}),
    "groups, causal": ((1, 8, 160, 64), (1, 2, 160, 64), 64, {"enable_gqa": True, "is_causal": True}),
    "bool mask": ((1, 4, 192, 64), (1, 4, 192, 64), 64, {"bool": (192, 192)}),
    "padding": ((2, 2, 192, 64), (2, 2, 192, 64), 64, {"bool": (2, 1, 1, 192)}),
    "bias": ((1, 4, 160, 64), (1, 4, 160, 64), 64, {"bias": (1, 4, 160, 160)}),
    "learned bias": ((1, 4, 160, 64), (1, 4, 160, 64), 64, {"learned": (1, 4, 160, 160)}),
    "shared learned bias": ((2, 4, 160, 64), (2, 4, 160, 64), 64, {"learned": (160, 160)}),
}
# Times PyTorch's own error: RMS, maximum. A bias that requires a gradient makes PyTorch use its unfused
# path, which keeps every weight in float32; here the gradient starts from the rounded output.
FUSED, LEARNED = (1.05, 1.25), (1.1, 2.5)


def cell(name: str, dtype: torch.dtype, seed: int) -> tuple[list[Tensor], dict[str, Any], Tensor]:
    q_sizes, k_sizes, E, given = CELLS[name]
    torch.manual_seed(seed)
    shapes = (q_sizes, k_sizes, (*k_sizes[:-1], E))
    tensors = [torch.randn(sizes, dtype=dtype, requires_grad=True) for sizes in shapes]
    options = dict(given)
    if "bool" in options:
        mask = torch.rand(options.pop("bool")) < 0.7
        mask[..., 0] = True
        options["attn_mask"] = mask
    if "bias" in options:
        options["attn_mask"] = torch.randn(options.pop("bias"), dtype=dtype)
    if "learned" in options:
        tensors.append(torch.randn(options.pop("learned"), dtype=dtype, requires_grad=True))
    return tensors, options, torch.randn(*q_sizes[:-1], E, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CELLS)
def test_gradients_are_as_exact_as_pytorchs(name: str, dtype: torch.dtype) -> None:
    """RMS at most 1.05 and maximum at most 1.25 times PyTorch's own error, over three seeds."""
    rms, largest = LEARNED if "learned" in name else FUSED
    ours: list[tuple[Tensor, ...]] = []
    theirs: list[tuple[Tensor, ...]] = []
    for seed in range(3):
        tensors, options, dout = cell(name, dtype, seed)
        wide = [x.detach().double().requires_grad_() for x in tensors]
        mask = options.get("attn_mask")
        exact = options | ({} if mask is None else {"attn_mask": _wide(mask)})
        truth = gradients(ORIGINAL, wide, dout.double(), exact)
        for call, errors in ((scaled_dot_product_attention, ours), (ORIGINAL, theirs)):
            found = gradients(call, tensors, dout, options)
            errors.append(tuple(x.double() - y for x, y in zip(found, truth, strict=True)))
    for i, (mine, its) in enumerate(zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)):
        a, b = torch.stack(mine), torch.stack(its)
        assert a.square().mean().sqrt() <= rms * b.square().mean().sqrt(), "qkvm"[i]
        assert a.abs().max() <= largest * b.abs().max(), "qkvm"[i]


def gradients(call: Any, given: list[Tensor], dout: Tensor, options: dict[str, Any]) -> Any:
    learned_mask = {"attn_mask": given[3]} if len(given) > 3 else {}
    return torch.autograd.grad(call(*given[:3], **(options | learned_mask)), given, dout)


def _wide(mask: Tensor) -> Tensor:
    return mask.double() if mask.is_floating_point() else mask


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_a_bias_that_is_constant_along_keys_has_no_gradient(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 4, 64, 16, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(3))
    bias = torch.zeros(4, 64, 1, requires_grad=True)
    lh.attention(q, k, v, mask=bias).float().square().sum().backward()
    assert bias.grad is not None and bias.grad.abs().max() < 1e-4


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_without_a_seed_drops_the_same_weights_under_checkpointing(reentrant: bool) -> None:
    """A recomputed pass would else drop others, and the gradients belong to no forward pass."""
    q = torch.randn(1, 2, 16, 8, requires_grad=True)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return lh.attention(x, x, x, dropout=0.5)

    found = []
    for run in (attend, lambda x: checkpoint(attend, x, use_reentrant=reentrant)):
        torch.manual_seed(1)
        q.grad, out = None, run(q)
        out.square().sum().backward()
        found.append((out, q.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    torch.manual_seed(2)
    assert not torch.equal(attend(q), found[0][0])


@pytest.mark.parametrize("call", [lh.attention, lh.observe])
def test_an_option_without_gradients_is_not_learned_in_vain(call: Callable[..., Any]) -> None:
    q, slopes = torch.ones(2, 3, 4, requires_grad=True), torch.ones(2, requires_grad=True)
    with pytest.raises(lh.LevelheadError, match=r"alibi: expected a tensor that needs no gradient"):
        call(q, q, q, alibi=slopes)
    call(q, q, q, alibi=slopes.detach())

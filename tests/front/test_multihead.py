"""Multi-head attention: PyTorch's module, ours and NumPy's give the same from the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import levelhead as lh
from levelhead.torch import KeyValueCache, MultiHeadAttention

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "grouped": {"kv_heads": 2},
    "wide heads": {"head_dim": 12, "kv_heads": 1},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "cosine": {"scale": "cosine"},
    "softcap": {"softcap": 2.0},
    "normalised": {"qk_norm": True},
    "sinks": {"sinks": True},
    "rotary": {"rotary": 10000.0, "causal": True},
    "all": {
        "kv_heads": 2,
        "causal": True,
        "softcap": 3.0,
        "qk_norm": True,
        "sinks": True,
        "rotary": 500.0,
        "window": (4, None),
    },
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def made(**options: Any) -> MultiHeadAttention:
    module = MultiHeadAttention(32, 4, dtype=torch.float64, **options)
    with torch.no_grad():
        for x in module.parameters():
            x.add_(torch.randn_like(x) * 0.1)
    return module


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 20, "vdim": 24}, {"bias": False}])
def test_from_torch_gives_the_same(batch_first: bool, sizes: dict[str, Any]) -> None:
    theirs = nn.MultiheadAttention(32, 4, batch_first=batch_first, dtype=torch.float64, **sizes)
    ours = MultiHeadAttention.from_torch(theirs)
    query = torch.randn(5, 7, 32, dtype=torch.float64, requires_grad=True)
    key = torch.randn(5, 7, sizes.get("kdim", 32), dtype=torch.float64, requires_grad=True)
    value = torch.randn(5, 7, sizes.get("vdim", 32), dtype=torch.float64, requires_grad=True)
    want, _ = theirs(query, key, value, need_weights=False)
    found = ours(query, key, value)
    torch.testing.assert_close(found, want)
    inputs = (query, key, value)
    gradients = torch.autograd.grad(want.square().sum(), (*inputs, *theirs.parameters()))
    own = (*inputs, ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight, ours.out_proj.weight)
    mine = torch.autograd.grad(found.square().sum(), own)
    for x, y in zip(mine[:3], gradients[:3], strict=True):
        torch.testing.assert_close(x, y)
    named = dict(zip([n for n, _ in theirs.named_parameters()], gradients[3:], strict=True))
    if "in_proj_weight" in named:
        torch.testing.assert_close(torch.cat(mine[3:6]), named["in_proj_weight"])
    else:
        for x, name in zip(mine[3:6], "qkv", strict=True):
            torch.testing.assert_close(x, named[f"{name}_proj_weight"])
    torch.testing.assert_close(mine[6], named["out_proj.weight"])


def test_what_from_torch_cannot_take_is_said() -> None:
    with pytest.raises(lh.LevelheadError, match="bias_k"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(8, 2, add_bias_kv=True))


@pytest.mark.parametrize("kind", KINDS)
def test_numpy_gives_the_same(kind: str) -> None:
    module = made(**KINDS[kind])
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    with torch.no_grad():
        want = module(x)
    found = module.to_numpy()(x.numpy())
    np.testing.assert_allclose(found, want.numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].get("causal")])
def test_step_by_step_gives_the_same(kind: str) -> None:
    module = made(**KINDS[kind])
    plain = module.to_numpy()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    with torch.no_grad():
        whole = module(x)
        cache, other = KeyValueCache(), lh.KeyValueCache()
        for part in (x[:, :4], x[:, 4:5], x[:, 5:]):
            begin = cache.length
            step = module(part, cache=cache)
            torch.testing.assert_close(step, whole[:, begin : cache.length])
            np.testing.assert_allclose(plain(part.numpy(), cache=other), step.numpy(), atol=1e-12)
    assert cache.length == other.length == 9


@pytest.mark.parametrize("kind", KINDS)
def test_learns_through_every_option(kind: str) -> None:
    module = made(**KINDS[kind])
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    names = [name for name, _ in module.named_parameters()]

    def run(*weights: torch.Tensor) -> Any:
        return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,))

    loss = run(*module.parameters()).square().sum()
    found = torch.autograd.grad(loss, list(module.parameters()))
    for name, gradient, weight in zip(names, found, module.parameters(), strict=True):
        step = torch.randn_like(weight) * 1e-6

        def moved(sign: int, name: str = name, step: torch.Tensor = step) -> torch.Tensor:
            given = [w + sign * step if n == name else w for n, w in module.named_parameters()]
            return run(*given).square().sum()

        with torch.no_grad():
            across = (moved(1) - moved(-1)) / 2
        torch.testing.assert_close((gradient * step).sum(), across, rtol=1e-5, atol=1e-11)


def test_dropout_only_while_training() -> None:
    module = made(dropout=0.5)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


def test_masks_and_lengths() -> None:
    module = made()
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    with torch.no_grad():
        short = module(x[:, :4])
        lengths = module(x, key_lengths=torch.tensor([4, 4]))[:, :4]
        mask = module(x, mask=torch.arange(6) < 4)[:, :4]
    torch.testing.assert_close(lengths, short)
    torch.testing.assert_close(mask, short)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"embed_dim": 30, "num_heads": 4}, "embed_dim: expected a multiple"),
        ({"embed_dim": 32, "num_heads": 4, "kv_heads": 3}, "kv_heads: expected a divisor"),
        ({"embed_dim": 12, "num_heads": 4, "rotary": 1e4}, "head_dim: expected an even number"),
    ],
)
def test_mistakes(given: dict[str, Any], says: str) -> None:
    with pytest.raises(lh.LevelheadError, match=says):
        MultiHeadAttention(**given)


def test_mistakes_in_numpy() -> None:
    weights = {f"{x}_proj.weight": np.ones((8, 8)) for x in ("q", "k", "v", "out")}
    with pytest.raises(lh.LevelheadError, match="a multiple of 3 rows"):
        lh.MultiHeadAttention(weights, heads=3)
    del weights["v_proj.weight"]
    with pytest.raises(lh.LevelheadError, match=r"v_proj\.weight"):
        lh.MultiHeadAttention(weights, heads=2)


# ---- tokens beyond the lengths

LENGTHS = [2, 5]
BEYOND = torch.arange(5) >= torch.tensor(LENGTHS)[:, None]  # (2, 5)


@pytest.mark.parametrize("kind", ["plain", "normalised", "cosine", "all"])
def test_queries_beyond_the_length_are_zero_and_give_no_gradient(kind: str) -> None:
    module = made(**KINDS[kind])
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    wild = x.masked_fill(BEYOND[..., None], torch.nan)
    whole, part = module(x), module(wild, x, x, query_lengths=LENGTHS)
    assert torch.equal(part[~BEYOND], whole[~BEYOND])
    assert not part[BEYOND].any()
    same = module.to_numpy()(wild.numpy(), x.numpy(), x.numpy(), query_lengths=LENGTHS)
    np.testing.assert_allclose(same, part.detach().numpy(), atol=1e-12)
    assert not same[BEYOND.numpy()].any()

    dout = torch.randn_like(part)
    wanted = torch.autograd.grad(whole, list(module.parameters()), dout.masked_fill(BEYOND[..., None], 0.0))
    gradients = torch.autograd.grad(part, list(module.parameters()), dout.masked_fill(BEYOND[..., None], torch.nan))
    for (name, _), a, b in zip(module.named_parameters(), gradients, wanted, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12), name


def test_nothing_of_a_key_beyond_the_length_reaches_the_weights() -> None:
    module = made()
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    wild = x.masked_fill(BEYOND[..., None], torch.nan)
    results = [module(x, keys, keys, key_lengths=torch.tensor(LENGTHS)) for keys in (x, wild)]
    assert torch.equal(*results)
    clean, dirty = (torch.autograd.grad(y.square().sum(), list(module.parameters())) for y in results)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(clean, dirty, strict=True))


def test_tokens_first_and_wrong_lengths() -> None:
    module = made(batch_first=False)
    x = torch.randn(5, 2, 32, dtype=torch.float64)
    assert not module(x, query_lengths=LENGTHS).transpose(0, 1)[BEYOND].any()
    for wrong in ([2, 6], [1, 2, 3], [0.5, 1.0]):
        with pytest.raises(lh.LevelheadError, match="query_lengths: expected"):
            module(x, query_lengths=wrong)


def test_compiled_modules_take_lengths_and_break_no_graph_without_them() -> None:
    module, x = made(), torch.randn(2, 5, 32, dtype=torch.float64)
    compiled = torch.compile(module, backend="eager")
    for options in ({"query_lengths": torch.tensor(LENGTHS)}, {"key_lengths": LENGTHS}, {}):
        assert torch.equal(compiled(x, **options), module(x, **options))
    assert torch._dynamo.explain(module)(x).graph_break_count == 1  # that of attention itself

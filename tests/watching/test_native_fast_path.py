"""torch's native fast path under a watch: the same bits, zeros in padded places too, and the same statistics as without
it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import levelhead as lh
from levelhead.runs.record import Record
from levelhead.watching.native_fast_path import NUMBERS, PATH

WIDTH, HEADS, TOKENS = 16, 4, 6
pytestmark = pytest.mark.filterwarnings("ignore")  # nested tensors are a prototype


def encoder(*, nested: bool = True, norm_first: bool = False) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()


def tokens() -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def padding(side: str | None) -> Tensor | None:
    hidden = torch.zeros(2, TOKENS, dtype=torch.bool)
    hidden[0, 4:] = True
    return None if side is None else hidden if side == "right" else hidden.flip(1)


def without_fast_path(model: nn.Module, *args: Tensor, **options: Tensor | None) -> tuple[Record, ...]:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with lh.watch(model) as w:
            model(*args, **options)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    return w.last.records


@pytest.mark.parametrize("deep", [None, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize(("nested", "norm_first"), [(True, False), (False, False), (False, True)])
@torch.no_grad()
def test_an_encoder_keeps_its_bits_and_is_measured(
    nested: bool, norm_first: bool, side: str | None, causal: bool, deep: bool | None
) -> None:
    model, x = encoder(nested=nested, norm_first=norm_first), tokens()
    mask = torch.ones(TOKENS, TOKENS).triu(1).bool() if causal else None
    options = {"src_key_padding_mask": padding(side), "mask": mask}
    alone = model(x, **options)
    with lh.watch(model, deep=deep) as w:
        watched = model(x, **options)
    assert torch.equal(torch.nan_to_num(alone, 9.0), torch.nan_to_num(watched, 9.0))
    assert {line.how for line in w.coverage()} == {PATH} and {line.note for line in w.coverage()} == {""}
    slow = without_fast_path(model, x, **options)
    for a, b in zip(w.last.records[:1], slow[:1], strict=True):  # later layers differ in padded places
        assert a.module == b.module == "layers.0.self_attn"
        np.testing.assert_array_equal(a.heads.rows, b.heads.rows)
        for name in ("max_logit", "min_logit", "mean_entropy", "mean_first", "var_logit"):
            np.testing.assert_allclose(getattr(a.heads, name), getattr(b.heads, name), rtol=1e-4, atol=1e-6)
    assert torch.equal(torch.nan_to_num(model(x, **options), 9.0), torch.nan_to_num(alone, 9.0))  # nothing is left


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("side", [None, "left", "right"])
@torch.no_grad()
def test_multihead_attention_keeps_its_bits_and_is_measured(side: str | None, need_weights: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval(), tokens()
    options = {"key_padding_mask": padding(side), "need_weights": need_weights}
    alone = model(x, x, x, **options)
    with lh.watch(model) as w:
        watched = model(x, x, x, **options)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    (a,), (b,) = w.last.records, without_fast_path(model, x, x, x, **options)
    assert a.facts.how == PATH != b.facts.how
    np.testing.assert_array_equal(a.heads.rows, b.heads.rows)
    np.testing.assert_allclose(a.heads.mean_entropy, b.heads.mean_entropy, rtol=1e-4)


@torch.no_grad()
def test_hooks_of_others_still_switch_the_layers_path_off() -> None:
    model, x, seen = encoder(), tokens(), []
    model.layers[0].linear1.register_forward_hook(lambda *args: seen.append(1))
    alone = model(x)
    with lh.watch(model) as w:
        assert torch.equal(model(x), alone)
    assert len(seen) == 2 and len(w.last.records) == 2


@torch.no_grad()
def test_a_mask_of_numbers_is_what_torch_makes_of_it_and_is_named() -> None:
    model, x = encoder(), tokens()
    mask = torch.zeros(TOKENS, TOKENS)
    mask[:, 2] = -0.5  # a bias, which the fast path takes for hidden
    with lh.watch(model) as w:
        assert torch.equal(model(x, mask=mask), model(x, mask=mask != 0))
        biased = w.run().snapshots[0].records[0]
    assert biased.heads.mean_entropy.max() <= np.log(TOKENS - 1)
    assert NUMBERS in w.coverage()[0].note


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(("bias_kv", "zero"), [(True, False), (False, True), (True, True)])
def test_padding_beside_keys_that_the_module_adds(bias_kv: bool, zero: bool, need_weights: bool) -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_bias_kv=bias_kv, add_zero_attn=zero)
    x, hidden = tokens(), padding("left")
    assert hidden is not None
    with lh.watch(model) as w:
        model(x, x, x, key_padding_mask=hidden, need_weights=need_weights)
    q, k, _ = nn.functional.linear(x, model.in_proj_weight, model.in_proj_bias).double().chunk(3, -1)
    k = torch.cat([k, model.bias_k.double().expand(2, 1, -1)], 1) if bias_kv else k
    k = torch.cat([k, torch.zeros(2, 1, WIDTH).double()], 1) if zero else k
    q, k = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (q, k))
    mask = nn.functional.pad(~hidden, (0, k.shape[2] - TOKENS), value=True)
    p = (q @ k.mT / (WIDTH // HEADS) ** 0.5).masked_fill(~mask[:, None, None], -np.inf).softmax(-1)
    entropy = -torch.xlogy(p, p).sum(-1) / mask.sum(-1).double().log()[:, None, None]
    first = torch.stack([each[..., int(seen.int().argmax())] for each, seen in zip(p, mask, strict=True)])
    heads, rows = w.last.records[0].heads, ~hidden
    assert heads.rows[0] == rows.sum()
    for found, truth in ((heads.normalised_entropy, entropy), (heads.mean_first, first)):
        wanted = [truth[:, h][rows].mean().item() for h in range(HEADS)]
        np.testing.assert_allclose(found, wanted, rtol=1e-5)

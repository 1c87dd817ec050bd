"""Causal softmax attention of (B, H, T, D), written by hand in the ways that people write it.

All compute the same as `functional.scaled_dot_product_attention(q, k, v, is_causal=True)`. Holds no test.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from watched import hidden

Spelling = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
SPELLINGS: dict[str, Spelling] = {}


def spelled(f: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    SPELLINGS[f.__name__.replace("_", " ")] = lambda module, q, k, v: f(q, k, v)
    return f


def _scale(q: Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1])


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) * _scale(q)


def _masked(scores: Tensor, value: float = -math.inf) -> Tensor:
    return scores.masked_fill(hidden(scores.shape[-1]), value)


# ---- masks


def _filled_with(value: float) -> Spelling:
    return lambda module, q, k, v: _masked(_scores(q, k), value).softmax(-1) @ v


for number in (-1e9, -1e4, -1e3, torch.finfo(torch.float32).min):
    SPELLINGS[f"filled with {number:.1e}"] = _filled_with(number)


@spelled
def filled_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k)
    scores.masked_fill_(hidden(q.shape[2]), -1e9)
    return scores.softmax(-1) @ v


@spelled
def filled_before_the_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (_masked(q @ k.mT, -1e9) * _scale(q)).softmax(-1) @ v


@spelled
def where_with_a_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shown = ~hidden(q.shape[2])
    return torch.where(shown, _scores(q, k), -1e9).softmax(-1) @ v


@spelled
def where_with_a_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shown = ~hidden(q.shape[2])
    return torch.where(shown, _scores(q, k), torch.tensor(-1e4)).softmax(-1) @ v


@spelled
def where_turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.where(hidden(q.shape[2]), torch.tensor(-1e4), _scores(q, k)).softmax(-1) @ v


@spelled
def ones_minus_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[2], q.shape[2]).tril()
    return (_scores(q, k) + (1.0 - mask) * -10000.0).softmax(-1) @ v


@spelled
def minus_a_large_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[2], q.shape[2]).tril()
    return (_scores(q, k) - 1e9 * (1 - mask)).softmax(-1) @ v


@spelled
def times_mask_plus_a_large_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(1, 1, q.shape[2], q.shape[2]).tril()
    return (_scores(q, k) * mask + -1e4 * (1 - mask)).softmax(-1) @ v


@spelled
def tril_is_zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tril = torch.tril(torch.ones(q.shape[2], q.shape[2]))
    return _scores(q, k).masked_fill(tril == 0, float("-inf")).softmax(-1) @ v


@spelled
def assigned_by_index(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k)
    scores[hidden(q.shape[2]).expand_as(scores)] = -1e9
    return scores.softmax(-1) @ v


@spelled
def baddbmm_with_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    B, H, T, _ = q.shape
    mask = torch.zeros(T, T).masked_fill(hidden(T), -1e9).expand(B * H, T, T)
    scores = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).mT, beta=1.0, alpha=_scale(q))
    return scores.softmax(-1).unflatten(0, (B, H)) @ v


# ---- products and axes


@spelled
def einsum_heads_third(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q * _scale(q), k)
    return torch.einsum("bhqk,bkhd->bhqd", _masked(scores).softmax(-1), v)


@spelled
def einsum_heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bqkh", q, k) * _scale(q)
    scores = scores.masked_fill(hidden(q.shape[1])[..., None], -1e9)
    return torch.einsum("bqkh,bkhd->bhqd", scores.softmax(2), v)


@spelled
def einsum_heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->hbqk", q, k) * _scale(q)
    return torch.einsum("hbqk,bhkd->bhqd", _masked(scores).softmax(dim=-1), v)


@spelled
def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = k @ q.mT * _scale(q)
    weights = scores.masked_fill(hidden(q.shape[2]).mT, -1e9).softmax(dim=-2)
    return weights.mT @ v


@spelled
def heads_in_the_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
    weights = torch.softmax(_masked(torch.bmm(flat[0], flat[1].transpose(1, 2)) * _scale(q)), dim=2)
    return torch.bmm(weights, flat[2]).view_as(q)


@spelled
def tokens_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
    scores = torch.einsum("ibhd,jbhd->ijbh", q, k) * _scale(q)
    scores = scores.masked_fill(hidden(q.shape[0])[:, :, None, None], -1e9)
    return torch.einsum("ijbh,jbhd->bhid", torch.softmax(scores, dim=1), v)


@spelled
def five_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.unflatten(1, (2, -1)) for x in (q, k, v))
    return (_masked(_scores(q, k)).softmax(-1) @ v).flatten(1, 2)


@spelled
def five_dimensions_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.unflatten(1, (2, -1)) for x in (q, k, v))
    scores = torch.einsum("bgrtd,bgrsd->bgrts", q, k) * _scale(q)
    return torch.einsum("bgrts,bgrsd->bgrtd", _masked(scores).softmax(-1), v).flatten(1, 2)


# ---- scales and softmaxes


@spelled
def softmax_in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.softmax(_masked(_scores(q, k)), dim=-1, dtype=torch.float32).to(q.dtype) @ v


@spelled
def log_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _masked(_scores(q, k)).log_softmax(-1).exp() @ v


@spelled
def exp_and_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.exp(_masked(_scores(q, k)))
    return weights / weights.sum(-1, keepdim=True) @ v


@spelled
def exp_and_sum_stable(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _masked(_scores(q, k), -1e9)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / (weights.sum(-1, keepdim=True) + 1e-30) @ v


@spelled
def exp_and_max_tuple(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _masked(_scores(q, k))
    weights = torch.exp(scores - scores.max(dim=-1, keepdim=True)[0].detach())
    return (weights / weights.sum(dim=-1, keepdim=True)) @ v


@spelled
def exp_times_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k)
    weights = scores.exp() * (~hidden(q.shape[2])).float().expand_as(scores)
    return weights / weights.sum(-1, keepdim=True) @ v


@spelled
def minus_logsumexp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _masked(_scores(q, k))
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


@spelled
def divided_by_a_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _masked(q @ k.mT / torch.sqrt(torch.tensor(q.shape[-1]))).softmax(-1) @ v


@spelled
def scaled_per_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = torch.full((q.shape[1], 1, 1), _scale(q))
    return _masked(q @ k.mT * scale).softmax(-1) @ v


@spelled
def dropped_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.dropout(_masked(_scores(q, k)).softmax(-1), 0.0, training=True) @ v


@spelled
def weights_times_values_summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = _masked(_scores(q, k)).softmax(-1)
    return (weights[..., None] * v[:, :, None]).sum(-2)


@spelled
def weights_returned_too(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = _masked(_scores(q, k)).softmax(-1)
    weights.mean(1).argmax(-1)
    return weights @ v

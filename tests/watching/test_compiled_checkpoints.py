"""Activation checkpoints inside compiled graphs, as large trainings have them: each block wrapped, then compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional

import levelhead as lh

WIDTH, HEADS, D = 16, 2, 8
SETTING = "skip_fwd_side_effects_in_bwd_under_checkpoint"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, D)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def _trained(watched: bool, backend: str) -> tuple[list[Tensor], lh.Watch | None]:
    """Outputs and gradients of two steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(checkpoint_wrapper(Block(), preserve_rng_state=False) for _ in range(2)))
    for block in model:
        block.compile(fullgraph=True, backend=backend)
    watch = lh.watch(model) if watched else None
    found = []
    for seed in range(2):
        y = model(torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(seed)))
        y.square().mean().backward()
        found += [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        if watch is not None:
            watch.step()
    if watch is not None:
        watch.detach()
    return found, watch


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_bits_counts_and_scale_are_right(backend: str) -> None:
    plain, _ = _trained(False, backend)
    watched, watch = _trained(True, backend)
    assert all(map(torch.equal, plain, watched)) and len(plain) == len(watched)
    assert watch is not None
    assert [(x.how, x.calls, x.note) for x in watch.coverage()] == [("sdpa", 2, "")] * 2
    assert [record.facts.scale for record in watch.last.records] == pytest.approx([D**-0.5] * 2)


def test_the_compilers_setting_is_put_back() -> None:
    before = getattr(torch._dynamo.config, SETTING)
    with lh.watch(Block()):
        assert getattr(torch._dynamo.config, SETTING)
    assert getattr(torch._dynamo.config, SETTING) is before is False

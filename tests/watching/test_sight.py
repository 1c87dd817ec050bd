"""A watch on a model that calls `levelhead.torch.observed_attention`: on a CPU, and on the path of other devices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import levelhead as lh


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> tuple[Tensor, lh.Observation]:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return lh.torch.observed_attention(q, k, v, causal=True, window=(3, None), scale=0.5)


@pytest.mark.parametrize(("way", "compiled"), [("core", False), ("core", True), ("elsewhere", False)])
def test_the_call_is_observed_once_and_as_it_was(way: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "elsewhere":
        monkeypatch.setenv("LEVELHEAD_OBSERVE", "torch")
    torch._dynamo.reset()  # a graph keeps the path that it was traced for
    torch.manual_seed(0)
    model = nn.Sequential(Block())
    x = torch.randn(2, 8, 32)
    plain, seen = model(x)
    with lh.watch(model) as watch:
        out, observation = (torch.compile(model, backend="aot_eager") if compiled else model)(x)
    assert torch.equal(out, plain)
    assert observation.path == ("core" if way == "core" else "sdpa with a formed mask + torch")
    (module,) = watch.coverage()
    assert (module.how, module.calls) == ("observed_attention", 1)
    (record,) = watch.last.records
    assert record.heads.rows.tolist() == [2 * 8] * 2
    for number in ("max_logit", "mean_entropy", "var_logit"):
        heads = getattr(seen.heads, number)
        want = heads.max(0) if number == "max_logit" else heads.mean(0)
        assert getattr(record.heads, number).tolist() == pytest.approx(want.tolist(), rel=1e-4)


def test_patch_leaves_the_kernel_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEVELHEAD_OBSERVE", "torch")
    q = torch.randn(2, 2, 8, 32)
    want = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    with lh.torch.patch():
        out, _ = lh.torch.observed_attention(q, q, q)
    assert torch.equal(out, want)

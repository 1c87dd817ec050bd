"""Weights that are computed in every pass, and passes inside torch.func: the model runs as it does unwatched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.utils import parametrizations

import levelhead as lh

X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))


class Convolved(nn.Module):
    """Self-attention over 1x1 convolutions, as in SAGAN."""

    def __init__(self, normed: Any = None) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Conv1d(16, 16, 1) for _ in range(3))
        for projection in (self.q_proj, self.k_proj):
            if normed is not None:
                normed(projection)

    def forward(self, x: Tensor) -> Tensor:
        each = (f(x.mT).unflatten(1, (2, 8)).mT for f in (self.q_proj, self.k_proj, self.v_proj))
        return nn.functional.scaled_dot_product_attention(*each).transpose(1, 2).flatten(2)


def trained(model: nn.Module) -> list[Tensor]:
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimiser.zero_grad()
        model(X).square().mean().backward()
        optimiser.step()
    return [x.detach() for x in model.state_dict().values()]


@pytest.mark.parametrize(
    "normed", [parametrizations.spectral_norm, nn.utils.spectral_norm, parametrizations.weight_norm]
)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_weight_that_is_computed_is_not_computed_once_more(normed: Any, gradients: bool) -> None:
    """spectral_norm changes its vectors whenever the weight is computed."""
    torch.manual_seed(1)
    alone = trained(Convolved(normed))
    torch.manual_seed(1)
    model = Convolved(normed)
    with lh.watch(model, gradients=gradients) as w:
        watched = trained(model)
    assert all(map(torch.equal, alone, watched))
    (line,) = w.coverage()
    assert line.calls == 2
    assert ("the gradient of q_proj's weight is not read" in line.note) == gradients
    assert "v_proj" not in line.note
    assert w.last.records[0].facts.effective_scale == pytest.approx(8**-0.5)
    assert set(w.last.records[0].weights) == ({"v"} if gradients else set())


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.num_heads = nn.Linear(16, 48), 2

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return (q @ k.mT / 8**0.5).softmax(-1) @ v


def test_a_step_that_ends_inside_a_transformation_is_read() -> None:
    torch.manual_seed(2)
    model = ByHand()
    weights = dict(model.named_parameters())
    with torch.no_grad(), lh.watch(model) as plain:
        model(X)

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, weights, (x[None],)).square().mean()

    with lh.watch(model, deep=True) as w:
        vmap(grad(loss), in_dims=(None, 0))(weights, X)
        jacrev(lambda x: functional_call(model, weights, (x,)).sum())(X)
        model(X)
    first, *_, last = w.run().snapshots
    (wanted,) = plain.last.records
    for snapshot in (first, last):
        (record,) = snapshot.records
        assert record.tally == pytest.approx(wanted.tally, rel=1e-4, abs=1e-4, nan_ok=True)


@pytest.mark.parametrize("deep", [None, False])
def test_what_is_read_inside_a_transformation_is_said_exactly(deep: bool | None) -> None:
    torch.manual_seed(2)
    model = Convolved()
    weights = dict(model.named_parameters())
    with lh.watch(model) as plain:
        model(X)
    with lh.watch(model, deep=deep) as w:
        grad(lambda p: functional_call(model, p, (X,)).square().mean())(weights)
    (line,) = w.coverage()
    if deep is False:
        assert not line.seen and "whose numbers cannot be read" in line.how
        return
    assert line.seen and "measured below it" in line.note and "cannot be read" not in line.note
    assert w.last.records[0].heads.mean_entropy == pytest.approx(plain.last.records[0].heads.mean_entropy)
    assert w.last.records[0].facts.effective_scale is None

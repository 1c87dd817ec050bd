"""QK-clip of multi-head latent attention, against the published recipe written out here."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

import levelhead as lh
from levelhead.remedies import QKClip
from tiny_models import HEADS, LATENT, deepseek

NOPE, ROPE, V = LATENT.values()


def ids() -> Tensor:
    return torch.randint(1, 60, (2, 10), generator=torch.Generator().manual_seed(1))


def largest(model: nn.Module, batch: Tensor) -> np.ndarray:
    with torch.no_grad(), lh.watch(model) as w:
        model(batch)
    return w.last.records[0].heads.max_logit


def recipe(q_b: Tensor, kv_b: Tensor, gammas: list[float]) -> tuple[Tensor, Tensor]:
    """MuonClip's lines for MLA, head by head: q^C and k^C by √γ, q^R by γ, the shared k^R untouched."""
    q_b, kv_b = q_b.clone(), kv_b.clone()
    for head, gamma in enumerate(gammas):
        if gamma < 1:
            begin = head * (NOPE + ROPE)
            q_b[begin : begin + NOPE] *= math.sqrt(gamma)
            q_b[begin + NOPE : begin + NOPE + ROPE] *= gamma
            begin = head * (NOPE + V)
            kv_b[begin : begin + NOPE] *= math.sqrt(gamma)
    return q_b, kv_b


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 0.5}
KINDS: dict[str, dict[str, Any]] = {
    "as it ships": {},
    "without interleaving": {"rope_interleave": False},
    "without latent queries": {"q_lora_rank": None},
    "positions scaled": {"rope_parameters": {**YARN, "original_max_position_embeddings": 16}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_deepseek_is_clipped_by_the_published_recipe(kind: str) -> None:
    model = deepseek(grown=20.0, **KINDS[kind])
    batch = ids()
    before = largest(model, batch)
    tau = float(np.sort(before)[1:3].mean())  # two heads above, two below
    attention = model.model.layers[0].self_attn
    of_q = attention.q_proj if attention.q_proj is not None else attention.q_b_proj
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    q_b, kv_b = recipe(of_q.weight.detach(), attention.kv_b_proj.weight.detach(), [min(1.0, tau / s) for s in before])
    with QKClip(model, tau) as clip:
        model(batch)
        assert len(clip()) == 2
    torch.testing.assert_close(of_q.weight.detach(), q_b, rtol=1e-6, atol=0)
    torch.testing.assert_close(attention.kv_b_proj.weight.detach(), kv_b, rtol=1e-6, atol=0)
    changed = {name for name, x in model.state_dict().items() if not torch.equal(x, weights[name])}
    assert len(changed) == 2 and not any("kv_a" in name or "layernorm" in name for name in changed)
    after = largest(model, batch)
    np.testing.assert_allclose(after, np.minimum(before, tau), rtol=1e-4)


class TwoProjections(nn.Module):
    """MLA as the paper writes it: q^C and q^R by matrices of their own, positions first in a head."""

    def __init__(self) -> None:
        super().__init__()
        self.w_qc, self.w_qr = nn.Linear(32, HEADS * NOPE), nn.Linear(32, HEADS * ROPE)
        self.w_vk, self.w_kr = nn.Linear(32, HEADS * (V + NOPE)), nn.Linear(32, ROPE)

    def forward(self, x: Tensor) -> Tensor:
        qc, qr = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.w_qc, self.w_qr))
        v, kc = self.w_vk(x).unflatten(-1, (HEADS, -1)).transpose(1, 2).split([V, NOPE], -1)
        kr = self.w_kr(x).unsqueeze(1).expand(-1, HEADS, -1, -1)
        q, k = torch.cat([qr, qc], -1), torch.cat([kr, kc], -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def test_parts_of_two_projections_in_any_order() -> None:
    torch.manual_seed(0)
    model = TwoProjections()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20.0)
    batch = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(1))
    before = largest(model, batch)
    tau = float(before.min()) / 2
    old = {name: x.clone() for name, x in model.state_dict().items()}
    with QKClip(model, tau) as clip:
        model(batch)
        gammas = torch.tensor([gamma for _, gamma in sorted(clip().heads.items())], dtype=torch.float32)
    roots = gammas.sqrt()
    for kind in ("weight", "bias"):
        now = model.state_dict()
        each = {name: old[f"{name}.{kind}"].unflatten(0, (HEADS, -1)) for name in ("w_qc", "w_qr", "w_vk")}
        shape = (HEADS, *[1] * (each["w_qc"].dim() - 1))
        each["w_qc"] = each["w_qc"] * roots.reshape(shape)
        each["w_qr"] = each["w_qr"] * gammas.reshape(shape)
        each["w_vk"] = torch.cat([each["w_vk"][:, :V], each["w_vk"][:, V:] * roots.reshape(shape)], 1)
        for name, wanted in each.items():
            torch.testing.assert_close(now[f"{name}.{kind}"], wanted.flatten(0, 1), rtol=1e-6, atol=1e-7)
        assert torch.equal(now[f"w_kr.{kind}"], old[f"w_kr.{kind}"])
    np.testing.assert_allclose(largest(model, batch), tau, rtol=1e-4)

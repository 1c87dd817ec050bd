"""Modules that attend several times in one pass: a record for each place in the code, loops added up, and a wrong scale
found in any of the calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import levelhead as lh
from levelhead.runs import files

WIDTH, HEADS = 32, 4
RIGHT = (WIDTH // HEADS) ** -0.5


class Attention(nn.Module):
    """`attend(module, x, y)` gives heads (B, H, T, D)."""

    def __init__(self, attend: object, scales: tuple[float, ...] = ()) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.num_heads, self.attend, self.scales = HEADS, attend, scales

    def heads(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.o(self.attend(self, x, y).transpose(1, 2).flatten(2))


def both(module: Attention, x: Tensor, y: Tensor) -> Tensor:
    """To itself, and to another sequence."""
    q = module.heads(module.q, x)
    (k, v), (k2, v2) = ([module.heads(f, z) for f in (module.k, module.v)] for z in (x, y))
    own = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=module.scales[0])
    return own + functional.scaled_dot_product_attention(q, k2, v2, scale=module.scales[1])


def loop(module: Attention, x: Tensor, y: Tensor) -> Tensor:
    q, k, v = (module.heads(f, x) for f in (module.q, module.k, module.v))
    out = torch.zeros_like(q)
    for scale in module.scales:
        out = out + functional.scaled_dot_product_attention(q * (scale / RIGHT), k, v)
    return out


def model(attend: object, *scales: float) -> Attention:
    torch.manual_seed(0)
    return Attention(attend, scales)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 12, WIDTH), torch.randn(2, 9, WIDTH)


class Named(nn.Module):
    def __init__(self, attn: nn.Module, runs: int = 1) -> None:
        super().__init__()
        self.attn, self.runs = attn, runs

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(self.runs):
            x = self.attn(x, y)
        return x


def test_each_place_has_a_record_with_the_numbers_of_its_calls() -> None:
    watched = Named(model(both, RIGHT, RIGHT))
    with lh.watch(watched) as w:
        watched(*batch())
    own, cross = (w.last[name] for name in ("attn", "attn (call 2)"))
    attn, (x, y) = watched.attn, batch()
    for record, z, causal in ((own, x, True), (cross, y, False)):
        q, k = (attn.heads(f, one).detach().double().numpy() for f, one in ((attn.q, x), (attn.k, z)))
        truth = lh.observe(q, k, causal=causal).heads
        np.testing.assert_allclose(record.heads.max_logit, truth.max_logit.max(0), rtol=1e-5)
        np.testing.assert_allclose(record.heads.mean_entropy, truth.mean_entropy.mean(0), rtol=1e-5)
        assert record.facts.causal == causal
    assert w.coverage()[0].note == ""


@pytest.mark.parametrize(("scales", "wrong"), [((1.0, RIGHT), "attn"), ((RIGHT, 1.0), "attn (call 2)")])
def test_a_wrong_scale_at_one_place_is_found_there(scales: tuple[float, float], wrong: str) -> None:
    watched = Named(model(both, *scales))
    with lh.watch(watched) as w:
        watched(*batch())
    (finding,) = lh.diagnose(w).of("wrong scale", "warning")
    assert finding.module == wrong


def test_gradients_are_counted_with_their_place() -> None:
    watched = Named(model(both, RIGHT, RIGHT))
    with lh.watch(watched, gradients=True) as w:
        watched(*batch()).square().sum().backward()
    own, cross = (w.last[name].heads for name in ("attn", "attn (call 2)"))
    assert np.isfinite(own.dk_norm).all()
    assert not np.allclose(own.dk_norm, cross.dk_norm)


@pytest.mark.parametrize(("scales", "call"), [((1.0, RIGHT, RIGHT), 1), ((RIGHT, RIGHT, 1.0), 3)])
def test_calls_in_a_loop_are_added_up_and_a_wrong_scale_in_one_of_them_is_found(
    scales: tuple[float, ...], call: int, tmp_path: Path
) -> None:
    watched = Named(model(loop, *scales))
    with lh.watch(watched) as w:
        watched(*batch())
    (record,) = w.last.records
    assert record.heads.rows[0] == 3 * 2 * 12
    assert "up to 3 calls in one pass" in w.coverage()[0].note
    w.save(tmp_path / "run.json")
    for what in (w, tmp_path / "run.json"):
        (finding,) = lh.diagnose(what).of("wrong scale", "warning")
        assert finding.evidence["call"] == call
        assert f"call {call} of a pass" in finding.why


def test_a_module_that_runs_several_times_in_a_pass_is_added_up_and_named() -> None:
    watched = Named(model(loop, RIGHT), runs=5)
    with lh.watch(watched) as w:
        watched(*batch())
        watched(*batch())
    assert w.last["attn"].heads.rows[0] == 5 * 2 * 12
    assert "up to 5 calls in one pass" in w.coverage()[0].note
    assert not lh.diagnose(w).of("wrong scale")


def test_micro_batches_are_passes_of_their_own() -> None:
    watched = Named(model(loop, RIGHT))
    with lh.watch(watched) as w:
        for _ in range(2):
            for _ in range(3):
                watched(*batch())
            w.step()
    assert w.run().snapshots[-1]["attn"].heads.rows[0] == 3 * 2 * 12
    assert w.coverage()[0].note == ""


def test_branches_share_a_record() -> None:
    def attend(module: Attention, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (module.heads(f, x) for f in (module.q, module.k, module.v))
        if module.training:
            return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return functional.scaled_dot_product_attention(q, k, v)

    watched = Named(model(attend))
    with lh.watch(watched) as w:
        watched(*batch())
        watched.eval()(*batch())
    assert [[record.module for record in snapshot.records] for snapshot in w.run().snapshots] == [["attn"], ["attn"]]


def test_a_run_without_such_calls_is_written_as_before(tmp_path: Path) -> None:
    watched = Named(model(loop, RIGHT))
    with lh.watch(watched) as w:
        watched(*batch())
    w.save(tmp_path / "run.json")
    assert "scale_call" not in (tmp_path / "run.json").read_text()
    assert files.read(tmp_path / "run.json").latest[0].facts == w.last["attn"].facts

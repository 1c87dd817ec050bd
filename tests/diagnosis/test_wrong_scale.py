"""Wrong scales are found at initialisation, from one forward pass; right ones are left alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import levelhead as lh
from levelhead.diagnosis import wrong_scale
from levelhead.diagnosis.findings import Finding
from levelhead.runs import tally
from levelhead.runs.record import Facts, Record, Run, Snapshot
from tiny_models import MODELS
from watched import one_thread
from wrong_scale import BUGS, D_K, PLACES, PROJECTIONS, WIDTH, Placed, ReallmForge447

__all__ = ["one_thread"]  # a fixture


def findings(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[lh.health.watch.Watch, list[Finding]]:
    with torch.no_grad(), lh.watch(model, deep=True) as w:
        model(*args, **kwargs)
    assert w.last.records and all(line.seen for line in w.coverage())
    return w, list(lh.diagnose(w))


def tokens() -> torch.Tensor:
    return torch.randn(2, 24, WIDTH, generator=torch.Generator().manual_seed(1))


def of_scale(found: list[Finding]) -> list[Finding]:
    return [finding for finding in found if "scale" in finding.kind]


@pytest.mark.parametrize("name", BUGS)
def test_public_mistakes_are_found(name: str) -> None:
    kind, looks = BUGS[name]
    torch.manual_seed(0)
    w, found = findings(kind(), tokens())
    wrong = of_scale(found)
    assert {(f.kind, f.severity) for f in wrong} == {("wrong scale", "warning")}
    assert {f.module for f in wrong} == {record.module for record in w.last.records}
    assert all(looks in f.why for f in wrong)


@pytest.mark.parametrize("name", BUGS)
def test_their_corrections_are_not(name: str) -> None:
    torch.manual_seed(0)
    w, found = findings(BUGS[name][0](right=True), tokens())
    assert of_scale(found) == []
    for record in w.last.records:
        assert record.facts.effective_scale == pytest.approx(D_K**-0.5, rel=1e-5)


def test_of_two_branches_only_the_wrong_one_is_found() -> None:
    torch.manual_seed(0)
    _, by_hand = findings(ReallmForge447(flash=False), tokens())
    assert of_scale(by_hand) == []


@pytest.mark.parametrize("place", PLACES)
def test_equivalent_placements_are_right(place: str) -> None:
    torch.manual_seed(0)
    w, found = findings(Placed(place), tokens())
    assert of_scale(found) == []
    assert w.last.records[0].facts.effective_scale == pytest.approx(D_K**-0.5, rel=1e-5)


@pytest.mark.parametrize("projections", PROJECTIONS)
def test_the_scale_is_read_from_projections_of_every_kind(projections: str) -> None:
    torch.manual_seed(0)
    for place, wanted in (("on q", D_K**-0.5), ("after", D_K**-0.5), ("after, missing", 1.0)):
        w, found = findings(Placed(place, projections), tokens())
        facts = w.last.records[0].facts
        assert (facts.scale_reading, facts.model_width) == ("projections", WIDTH)
        assert facts.effective_scale == pytest.approx(wanted, rel=1e-5)
        assert bool(of_scale(found)) is (wanted == 1.0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_fresh_models_have_no_warning(name: str, implementation: str) -> None:
    tiny = MODELS[name]
    if implementation not in tiny.implementations:
        implementation = "eager"
    _, found = findings(tiny.make(implementation), **tiny.inputs())
    assert [f for f in found if f.severity != "note"] == []


def test_a_fresh_encoder_of_torchs_own_has_no_warning() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
    _, found = findings(nn.TransformerEncoder(layer, 2).eval(), tokens())
    assert [f for f in found if f.severity != "note"] == []


@pytest.mark.parametrize(
    ("ratio", "severity"),
    [(1.9999999999999998, "warning"), (2.0, "warning"), (1.993, "warning"), (1.95, "note"), (0.5, "warning")],
)
def test_a_number_that_no_rule_gives_is_a_warning_from_a_factor_of_2_on(ratio: float, severity: str) -> None:
    scale = ratio / math.sqrt(8)
    facts = Facts("Attention", "sdpa", 8, 6, 9, 9, "float32", scale, effective_scale=scale, scale_reading="projections")
    run = Run("", (Snapshot(0, (Record("a", facts, tally.nothing(6)),)),))
    (found,) = wrong_scale.check(run, None)
    assert (found.kind, found.severity) == ("unusual scale", severity)

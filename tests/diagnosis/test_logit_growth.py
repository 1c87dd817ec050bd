"""Trainings that diverged through their logits, replayed: `diagnose` warned in time, every time.

bench/logit_growth.py trained and recorded them; nothing is trained here but for a few steps that
show the script to fit the library. What docs/health.md says of them is held to the file.
"""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import levelhead as lh
from levelhead.diagnosis import logit_growth, thresholds
from levelhead.diagnosis.findings import Finding
from levelhead.runs.record import Run
from support import script

ROOT = Path(__file__).resolve().parents[2]
RESULT: dict[str, Any] = json.loads((ROOT / "bench/results/logit-growth.json").read_text())
SUMMARY = RESULT["summary"]
BENCH = script(ROOT, "logit_growth")


def trained(variant: str, rate: float = SUMMARY["rate"]) -> list[dict[str, Any]]:
    return [x for x in RESULT["runs"] if (x["rate"], x["variant"]) == (rate, variant)]


def growing(run: Run) -> list[Finding]:
    return [f for f in lh.diagnose(run) if f.kind == logit_growth.KIND]


PLAIN, NORMED, CLIPPED = (trained(variant) for variant in BENCH.VARIANTS)
DIVERGED = [x for x in PLAIN if x["diverged"] is not None]


def by_name(one: dict[str, Any]) -> str:
    return f"{one['variant']}-{one['rate']:g}-{one['seed']}"


def test_five_seeds_of_each_and_nothing_forced() -> None:
    for runs in (PLAIN, NORMED, CLIPPED):
        assert [x["seed"] for x in runs] == list(BENCH.SEEDS)
    assert len(BENCH.SEEDS) == 5 and len(DIVERGED) >= 4
    assert SUMMARY["forced"] is False


def test_the_search_stopped_at_the_least_rate_that_diverges() -> None:
    rates = list(dict.fromkeys(x["rate"] for x in RESULT["runs"]))
    assert rates == sorted(rates) and rates[-1] == SUMMARY["rate"]
    ends = [sum(x["diverged"] is not None for x in trained("plain", rate)) for rate in rates]
    assert ends[-1] >= BENCH.ENOUGH > max(ends[:-1])


@pytest.mark.parametrize("one", RESULT["runs"], ids=by_name)
def test_every_mark_follows_from_what_was_recorded(one: dict[str, Any]) -> None:
    losses = one["losses"]
    assert len(losses) == RESULT["steps"] // RESULT["every"] == len(one["largest"])
    assert one["diverged"] == BENCH.diverged(losses)
    assert one["suffers"] == BENCH.suffers(losses)
    smooth = BENCH.smoothed(losses)
    assert one["final"] == pytest.approx(smooth[-1], rel=1e-3)
    assert one["largest_logit"] == max(one["largest"])
    found = logit_growth.first_alarm(BENCH.unpacked(one["watched"]))
    kept = one["alarm"] and (one["alarm"]["step"], one["alarm"]["module"], one["alarm"]["head"])
    assert found == kept


@pytest.mark.parametrize("one", DIVERGED, ids=by_name)
def test_the_alarm_comes_before_the_loss_suffers(one: dict[str, Any]) -> None:
    alarm = logit_growth.first_alarm(BENCH.unpacked(one["watched"]))
    assert alarm is not None
    assert alarm[0] < one["suffers"] <= one["diverged"]
    assert one["lead"] == one["diverged"] - alarm[0] > 0
    assert SUMMARY["leads"][DIVERGED.index(one)] == one["lead"]
    assert one["alarm"]["at"] < thresholds.DETERIORATES


@pytest.mark.parametrize("one", DIVERGED, ids=by_name)
def test_replayed_step_by_step_diagnose_says_nothing_and_then_warns(one: dict[str, Any]) -> None:
    """As the training went: of every prefix, exactly what was known by then."""
    run, at = BENCH.unpacked(one["watched"]), one["alarm"]["step"]
    for n in range(1, 1 + [s.step for s in run.snapshots].index(at)):
        assert growing(replace(run, snapshots=run.snapshots[:n])) == []
    first = growing(replace(run, snapshots=run.snapshots[: n + 1]))
    assert [f.severity for f in first] == ["warning"] * len(first) != []
    assert first[0].module == one["alarm"]["module"]
    assert first[0].evidence["step_at_1e3"] > at
    assert "error" in {f.severity for f in growing(run)}  # by the time of the divergence


@pytest.mark.parametrize("one", [*NORMED, *CLIPPED], ids=by_name)
def test_with_a_remedy_the_same_seed_neither_diverges_nor_alarms(one: dict[str, Any]) -> None:
    plain = next(x for x in PLAIN if x["seed"] == one["seed"])
    assert one["diverged"] is None and one["final"] < plain["final"] / 4
    run = BENCH.unpacked(one["watched"])
    assert logit_growth.first_alarm(run) is None and growing(run) == []


def test_a_rate_that_trains_well_never_alarms() -> None:
    least = min(x["rate"] for x in RESULT["runs"])
    for one in trained("plain", least):
        assert logit_growth.first_alarm(BENCH.unpacked(one["watched"])) is None and one["final"] < 0.1


# ---- the page, the picture, the script


def test_the_summary_follows_from_the_runs() -> None:
    assert BENCH.summary(SUMMARY["rate"], RESULT["runs"]) == SUMMARY
    tables = {"seeds": BENCH.seeds_table(SUMMARY["rate"], RESULT["runs"]), "rates": BENCH.rates_table(RESULT["runs"])}
    assert tables == RESULT["tables"]


def test_the_page_says_what_the_file_says(root: Path) -> None:
    """Its tables are held by test_kernel_page; here the sentence between them."""
    page = (root / "docs" / "health.md").read_text()
    early = page[page.index("# How early?") :]
    leads, strict = SUMMARY["leads"], SUMMARY["leads_to_suffering"]
    ends = SUMMARY["diverged"]
    for sentence in (
        f"{ends['plain']} of 5 seeds diverge",
        f"{min(leads)} to {max(leads)} steps before (median {SUMMARY['median_lead']:g})",
        f"{min(strict)} to {max(strict)} steps before",
        f"learning rate {SUMMARY['rate']:g}",
        f"QK-clip (τ = {BENCH.TAU:g})",
    ):
        assert sentence in early, sentence


def test_the_picture_is_that_of_the_file(root: Path, tmp_path: Path) -> None:
    for path in script(root, "growth_plot").plot(RESULT, tmp_path):
        committed = root / "docs" / "plots" / path.name
        assert path.read_text() == committed.read_text(), "python bench/growth_plot.py"
        dots = ET.fromstring(path.read_text()).findall("{http://www.w3.org/2000/svg}circle")
        alarms = sum(SUMMARY["alarmed"].values())
        assert len(dots) == 2 * alarms + 1  # on both curves, and the legend's


@pytest.mark.parametrize("variant", BENCH.VARIANTS)
def test_the_script_trains(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps: the statistics come in the form that the file has, and survive it."""
    monkeypatch.setattr(BENCH, "STEPS", 30)
    losses, run = BENCH.train(0.003, variant, 0)
    assert len(losses) == 30 and all(map(math.isfinite, losses))
    assert [s.step for s in run.snapshots] == list(range(0, 30, BENCH.EVERY))
    again = BENCH.unpacked(BENCH.packed(run, whole=True))
    for mine, theirs in zip(run.snapshots, again.snapshots, strict=True):
        for a, b in zip(mine.records, theirs.records, strict=True):
            assert (a.module, a.facts.kind) == (b.module, b.facts.kind)
            np.testing.assert_allclose(a.tally, b.tally, rtol=1e-3)
    one = BENCH.judged(0.003, variant, 0, losses, run)
    assert one["alarm"] is None and one["diverged"] is None


def test_divergence_is_for_good() -> None:
    chance = BENCH.CHANCE
    learnt = [chance] * 10 + [0.1] * 20
    assert BENCH.diverged([*learnt, *[chance] * 10, *[0.1] * 10]) is None  # it came back
    assert BENCH.diverged([chance] * 40) is None  # it never learnt
    assert BENCH.diverged([*learnt, *[chance] * 20]) == (30 + 1) * BENCH.EVERY  # two of four
    assert BENCH.diverged([*learnt, *[None] * 20]) == 30 * BENCH.EVERY  # NaN

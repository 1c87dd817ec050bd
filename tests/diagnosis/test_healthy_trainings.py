"""Healthy trainings raise no alarm: the recorded hundred, and one of each optimiser trained here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import script

ROOT = Path(__file__).resolve().parents[2]
RESULT: dict[str, Any] = json.loads((ROOT / "bench/results/healthy-trainings.json").read_text())
BENCH = script(ROOT, "healthy_trainings")


def test_the_file_has_a_hundred_and_no_false_alarm() -> None:
    assert RESULT["summary"] == BENCH.summary(RESULT["runs"])
    found = RESULT["summary"]
    assert found["healthy"] >= 100 and found["steps"] >= 300 and found["false_alarms"] == 0
    assert len(found["tasks"]) >= 3 and len(found["optimisers"]) >= 3 and found["above_30"] >= 20
    assert {tuple(one[name] for name in BENCH.Plan._fields) for one in RESULT["runs"]} == set(BENCH.plans())


def test_the_page_says_what_happened_out_of_sample() -> None:
    fresh = json.loads((ROOT / "bench/results/healthy-fresh.json").read_text())
    found = fresh["summary"]
    assert found == BENCH.summary(fresh["runs"]) and found["false_alarms"] == 0
    assert [tuple(one[name] for name in BENCH.Plan._fields) for one in fresh["runs"]] == BENCH.fresh_plans(30)
    assert not {one["seed"] for one in fresh["runs"]} & {one["seed"] for one in RESULT["runs"]}
    words = f"in {found['healthy']} healthy trainings, {found['above_30']} of which reach logits above 30"
    assert words in (ROOT / "docs" / "health.md").read_text()


@pytest.mark.parametrize("optimiser", BENCH.RATES)
def test_one_of_each_trains_without_alarm(optimiser: str) -> None:
    plan = BENCH.Plan("reverse", optimiser, BENCH.RATES[optimiser][0], 3.0, 7)
    one = BENCH.train(plan, 200)
    assert one["loss"][2] < one["loss"][0] and one["first_alarm"] is None and one["findings"] == []


def test_the_page_says_what_the_file_says() -> None:
    page, found = (ROOT / "docs" / "health.md").read_text(), RESULT["summary"]
    edge = found["edge"]
    for words in (
        f"{found['healthy']} healthy trainings",
        f"{found['above_30']} of them reach logits above 30, {found['above_100']} above 100",
        f"{edge['false_alarms']} of {edge['healthy']} trainings",
    ):
        assert words in page, words

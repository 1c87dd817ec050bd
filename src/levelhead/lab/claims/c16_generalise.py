"""C16: whether attention without scaling commits too early and generalises worse."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from levelhead.lab import grid
from levelhead.lab.claim import Claim, Outcome, Params, Tell, Verdict
from levelhead.lab.plan import Curves, Plan
from levelhead.lab.seeds import Estimate, Training, by_seed, estimate, outcome, reaches, where
from levelhead.lab.training_cache import forget, trained

LEARNT = 0.5  # nats: how far training losses are followed
_NAMES = {"retrieval": "sequences", "text": "windows of text"}


def wanted(params: Params, seed: int) -> list[Plan]:
    plans = grid.plans(params, seed)
    return plans + grid.with_few(grid.core(plans))


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    return judge(trained(wanted(params, seed), tell))


def judge(runs: Sequence[Training]) -> Outcome:
    """The verdict on trainings, wherever they come from."""
    widest = where(runs, d_k=max(run.plan.d_k for run in runs))
    cases = {f"{x.plan.examples} {_NAMES[x.plan.task]}": x.plan for x in widest}
    worse, best, early = (
        {case: estimate([*by_seed(_alike(widest, plan), differ).values()]) for case, plan in cases.items()}
        for differ in (_gap, _best, _early)
    )
    named = {f"held-out loss at equal training loss, {case}": x for case, x in worse.items()}
    named |= {f"best held-out loss, {case}": x for case, x in best.items()}
    named |= {f"H/ln n at a tenth of the steps, {case}": x for case, x in early.items()}
    theory = "held-out losses above 0 and entropies below 0 if the claim holds"
    return outcome(named, verdict([*worse.values()]), theory)


def _alike(runs: Sequence[Training], plan: Plan) -> list[Training]:
    return where(runs, task=plan.task, examples=plan.examples)


def verdict(worse: Sequence[Estimate]) -> Verdict:
    above, below = [x.low > 0 for x in worse], [x.high < 0 for x in worse]
    if all(above):
        return "confirmed"
    if all(below):
        return "refuted"
    return "caveat" if any(above) else "undecided"


def _gap(run: Training, twin: Training) -> float:
    """Held-out losses where both have learnt as much: at the lowest training loss both reach."""
    level = max(LEARNT, *(float(np.nanmin(x.curves.loss)) for x in (run, twin)))
    return held_out_at(run.curves, level) - held_out_at(twin.curves, level)


def held_out_at(curves: Curves, level: float) -> float:
    """The held-out loss when the training loss first falls to a level."""
    step = reaches(curves, level)
    return math.nan if step is None else float(np.interp(step, curves.step, curves.held_out))


def _best(run: Training, twin: Training) -> float:
    return float(np.nanmin(run.curves.held_out) - np.nanmin(twin.curves.held_out))


def _early(run: Training, twin: Training) -> float:
    """How much surer of itself attention is at first: mean H/ln n of all heads."""
    mark = max(len(run.curves.step) // 10, 1)
    return float(np.mean(run.curves.entropy[mark]) - np.mean(twin.curves.entropy[mark]))


CLAIM = Claim(
    id="C16",
    claim="Over-confident, unscaled attention commits too early and generalises worse.",
    derivation="""\
Near one-hot attention reads one token, chosen by the random start. The value path learns from that
token all the same (C7a), so the training loss can fall by recalling sequences rather than by
looking things up. What is recalled does not help with sequences that were held out. Whether this
happens is not a matter of algebra: it has to be measured, at the same training loss, since a model
that learns more slowly has a smaller gap for that reason alone.""",
    criterion=f"""\
At the largest d_k, with plenty to learn from and with little: held-out loss without scaling minus
that with 1/√d_k, both at the same training loss: {LEARNT} nats, or the lowest that both reach; mean
over depths, 95 % interval from the seeds. Confirmed if it is above 0 in every case, refuted if
below 0 in every case, caveat if above 0 in some cases and not in all, undecided otherwise. The
best held-out losses and the entropy at a tenth of the steps are reported beside it.""",
    expected="caveat",
    quick=grid.QUICK,
    full=grid.FULL,
    experiment=experiment,
    forget=forget,
)

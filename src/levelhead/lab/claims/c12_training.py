"""C12: how fast a transformer learns without scaling, by width and by depth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from levelhead.lab import grid
from levelhead.lab.claim import Claim, Outcome, Params, Plot, Tell, Verdict
from levelhead.lab.plan import Plan
from levelhead.lab.seeds import Estimate, Training, by_seed, curve_of, estimate, outcome, ratio, reaches, where
from levelhead.lab.training_cache import forget, trained

# Training losses to be reached: well past what the frequencies of answers give away.
BOUNDS: Mapping[str, float] = MappingProxyType({"retrieval": 1.0, "text": 2.6})


def wanted(params: Params, seed: int) -> list[Plan]:
    plans = grid.plans(params, seed)
    return plans + grid.at_rates(grid.core(plans), params["rate_factors"])


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    return judge(trained(wanted(params, seed), tell))


def judge(runs: Sequence[Training]) -> Outcome:
    """The verdict on trainings, wherever they come from."""
    usual = [run for run in runs if grid.plain(run.plan)]
    widths, depths = (sorted({getattr(x.plan, n) for x in usual}) for n in ("d_k", "depth"))
    widest = where(usual, d_k=widths[-1])
    slower, best, deeper = ratio(widest, steps), best_rates(runs), growth(widest, depths)
    named = {f"steps, d_k {d_k}": ratio(where(usual, d_k=d_k), steps) for d_k in widths}
    for name in ("task", "depth"):
        for x in dict.fromkeys(getattr(run.plan, name) for run in widest):
            named[f"steps, {name} {x}"] = ratio(where(widest, **{name: x}), steps)
    named["steps, best rates"] = best
    if deeper is not None:
        named["steps, deepest over shallowest"] = deeper
    named["rises of held-out loss, nats"] = estimate([*by_seed(widest, _bumps).values()])
    return outcome(
        named,
        verdict([slower, best], deeper),
        theory="steps above 1, and more so with depth, if the claim holds; rises above 0",
        by_width=curve_of({d_k: named[f"steps, d_k {d_k}"] for d_k in widths}),
        by_depth=curve_of({depth: named[f"steps, depth {depth}"] for depth in depths}),
        missed={rule: _missed(where(widest, rule=rule)) for rule in (grid.NONE, grid.ROOT)},
    )


def verdict(slower: Sequence[Estimate], deeper: Estimate | None) -> Verdict:
    if all(x.low > 1 for x in slower):
        return "confirmed" if deeper is None or deeper.low > 1 else "caveat"
    return "refuted" if all(x.high < 1 for x in slower) else "undecided"


def steps(run: Training) -> float:
    """To the loss that is to be reached; all there were, if it never is."""
    reached = reaches(run.curves, BOUNDS[run.plan.task])
    return float(run.plan.steps) if reached is None else reached


def growth(runs: Sequence[Training], depths: Sequence[int]) -> Estimate | None:
    """By what the ratio of steps is larger in the deepest model than in the shallowest."""
    if len(depths) < 2:
        return None
    deep, flat = (by_seed(where(runs, depth=n), _logs) for n in (depths[-1], depths[0]))
    return estimate([deep[seed] - flat[seed] for seed in deep]).exp()


def best_rates(runs: Sequence[Training]) -> Estimate:
    """The ratio of steps with each rule at the learning rate that suits it best."""
    core = {run.plan: run for run in runs}
    tried = [core[plan] for plan in grid.core(list(core))]
    logs: dict[int, list[float]] = {}
    for task in {run.plan.task for run in runs}:
        none, root = (_best(where(tried, task=task, rule=rule)) for rule in (grid.NONE, grid.ROOT))
        for seed, steps_none in none.items():
            logs.setdefault(seed, []).append(math.log(steps_none / root[seed]))
    return estimate([float(np.mean(each)) for each in logs.values()]).exp()


def _best(runs: Sequence[Training]) -> dict[int, float]:
    """Steps by seed, at the rate with the fewest."""
    by_rate: dict[float, dict[int, float]] = {}
    for run in runs:
        by_rate.setdefault(run.plan.rate, {})[run.plan.seed] = steps(run)
    return min(by_rate.values(), key=lambda steps_by_seed: sum(steps_by_seed.values()))


def _logs(run: Training, twin: Training) -> float:
    return math.log(steps(run) / steps(twin))


def _bumps(run: Training, twin: Training) -> float:
    """How much more the held-out loss goes up on its way, in all."""
    ups = (np.fmax(np.diff(x.curves.held_out), 0).sum() for x in (run, twin))
    return float(next(ups) - next(ups))


def _missed(runs: Sequence[Training]) -> int:
    """Runs that never reach their loss."""
    return sum(reaches(run.curves, BOUNDS[run.plan.task]) is None for run in runs)


CLAIM = Claim(
    id="C12",
    claim="Without scaling, training is slower, unstable or falls apart; more so in deeper models.",
    derivation="""\
Logits of standard deviation √d_k make p nearly one-hot from the start, on a key chosen by chance.
Rows that are saturated on the wrong key pass hardly any gradient to W_Q and W_K (C6), the others
one that is √d_k larger (C7a): training has to undo a bet before it can learn. Every layer adds such
bets, so depth could make it worse; a residual stream that goes around them could prevent it.""",
    criterion="""\
Steps to a training loss (retrieval 1.0 nats, text 2.6) without scaling over those with 1/√d_k, at
the largest d_k, a run that never gets there counting with all its steps; 95 % intervals from the
seeds. Slower if the interval is above 1, at the usual learning rate and with each rule at the best
of its rates (quick knows one). Confirmed if slower and if the ratio in the deepest model is above
that in the shallowest, with its interval; caveat if slower at every depth alike; refuted if faster;
else undecided. Quick knows one depth, so its verdict is on speed alone. The claim says "or": being
slower is enough. Whether training is unstable (held-out losses that rise) or falls apart (losses
that are never reached) is reported beside it.""",
    expected="confirmed",
    quick={**grid.QUICK, "rate_factors": []},
    full={**grid.FULL, "rate_factors": [0.3, 3.0]},
    experiment=experiment,
    forget=forget,
    plots=(
        Plot(
            "Steps to the same loss, by width",
            "d_k",
            "undivided over divided by √d_k",
            {"measured": ("details", "by_width")},
            log="x",
        ),
        Plot(
            "Steps to the same loss, by depth",
            "layers",
            "undivided over divided by √d_k",
            {"measured": ("details", "by_depth")},
            log="x",
        ),
    ),
)

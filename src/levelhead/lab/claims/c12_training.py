"""C12: how fast a transformer learns without scaling, by width and by depth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from levelhead.lab import grid
from levelhead.lab.claim import Claim, Outcome, Params, Tell, Verdict
from levelhead.lab.curves import Estimate, Run, by_seed, estimate, ratio, reaches, where
from levelhead.lab.trained import trained

# Training losses to be reached: well past what the frequencies of answers give away.
BOUNDS: Mapping[str, float] = MappingProxyType({"retrieval": 1.0, "text": 2.6})


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    plans = grid.plans(params, seed)
    others = grid.at_rates(grid.core(plans), params["rate_factors"])
    return judge(trained([*plans, *others], tell))


def judge(runs: Sequence[Run]) -> Outcome:
    """The verdict on trainings, wherever they come from."""
    usual = [run for run in runs if grid.plain(run.plan)]
    widths, depths = (sorted({getattr(x.plan, n) for x in usual}) for n in ("d_k", "depth"))
    widest = where(usual, d_k=widths[-1])
    slower = {f"d_k {d_k}": ratio(where(usual, d_k=d_k), steps) for d_k in widths}
    slower |= {f"depth {n}": ratio(where(widest, depth=n), steps) for n in depths[1:]}
    slower |= {"best rates": best_rates(_at_all_rates(runs))}
    deeper = growth(widest, depths)
    named = slower | ({} if deeper is None else {"deepest over shallowest": deeper})
    unreached = {x: _unreached(where(widest, rule=x)) for x in (grid.NONE, grid.ROOT)}
    return Outcome(
        theory="above 1, and growing with depth, if the claim holds",
        measured={name: x.value for name, x in named.items()} | {"never reached": unreached},
        stderr={name: x.stderr for name, x in named.items()},
        verdict=verdict([slower[f"d_k {widths[-1]}"], slower["best rates"]], deeper),
        details={"intervals": {name: x.json() for name, x in named.items()}},
    )


def verdict(slower: Sequence[Estimate], deeper: Estimate | None) -> Verdict:
    if all(x.low > 1 for x in slower):
        return "confirmed" if deeper is not None and deeper.low > 1 else "caveat"
    return "refuted" if all(x.high < 1 for x in slower) else "undecided"


def steps(run: Run) -> float:
    """To the loss that is to be reached; all there were, if it never is."""
    reached = reaches(run.curves, BOUNDS[run.plan.task])
    return float(run.plan.steps) if reached is None else reached


def growth(runs: Sequence[Run], depths: Sequence[int]) -> Estimate | None:
    """By what the ratio of steps is larger in the deepest model than in the shallowest."""
    if len(depths) < 2:
        return None
    deep, flat = (by_seed(where(runs, depth=n), _logs) for n in (depths[-1], depths[0]))
    return estimate([deep[seed] - flat[seed] for seed in deep]).exp()


def _at_all_rates(runs: Sequence[Run]) -> list[Run]:
    core = {
        replace(plan, rate=1.0) for plan in grid.core([x.plan for x in runs if grid.plain(x.plan)])
    }
    return [run for run in runs if replace(run.plan, rate=1.0) in core]


def best_rates(runs: Sequence[Run]) -> Estimate:
    """The ratio of steps with each rule at the learning rate that suits it best."""
    logs: dict[int, list[float]] = {}
    for task in {run.plan.task for run in runs}:
        none, root = (_best(where(runs, task=task, rule=rule)) for rule in (grid.NONE, grid.ROOT))
        for seed, steps_none in none.items():
            logs.setdefault(seed, []).append(math.log(steps_none / root[seed]))
    return estimate([float(np.mean(each)) for each in logs.values()]).exp()


def _best(runs: Sequence[Run]) -> dict[int, float]:
    """Steps by seed, at the rate with the fewest."""
    by_rate: dict[float, dict[int, float]] = {}
    for run in runs:
        by_rate.setdefault(run.plan.rate, {})[run.plan.seed] = steps(run)
    return min(by_rate.values(), key=lambda found: sum(found.values()))


def _logs(run: Run, twin: Run) -> float:
    return math.log(steps(run) / steps(twin))


def _unreached(runs: Sequence[Run]) -> str:
    missed = sum(reaches(run.curves, BOUNDS[run.plan.task]) is None for run in runs)
    return f"{missed} of {len(runs)}"


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
of its rates (quick knows one rate). Confirmed if slower, and if the ratio in the deepest model over
that in the shallowest is above 1 with its interval; caveat if slower and it is not, or if there is
one depth (quick); refuted if faster; else undecided.""",
    expected="caveat",
    quick={**grid.QUICK, "rate_factors": []},
    full={**grid.FULL, "rate_factors": [0.3, 3.0]},
    experiment=experiment,
)

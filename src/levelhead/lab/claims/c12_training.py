"""C12: how fast a transformer learns without scaling, by width and by depth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from levelhead.lab import grid
from levelhead.lab.claim import Claim, Outcome, Params, Tell, Verdict
from levelhead.lab.curves import Estimate, Run, by_seed, estimate, ratio, reaches, where
from levelhead.lab.trained import trained

# Training losses to be reached: well past what the frequencies of answers give away.
BOUNDS: Mapping[str, float] = MappingProxyType({"retrieval": 1.0, "text": 2.5})


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    plans = grid.plans(params, seed)
    first = [x for x in plans if (x.task, x.depth) == (params["tasks"][0], params["depths"][0])]
    others = [x for factor in params["other rates"] for x in grid.paced(first, factor)]
    return judge(trained([*plans, *others], tell))


def judge(runs: Sequence[Run]) -> Outcome:
    """The verdict on trainings, wherever they come from."""
    adam = where(runs, optimiser="adam")
    usual = [run for run in adam if run.plan.rate == grid.RATES[run.plan.task, "adam"]]
    widths, depths = (sorted({getattr(x.plan, n) for x in usual}) for n in ("d_k", "depth"))
    widest = where(usual, d_k=widths[-1])
    slower = {f"d_k {d_k}": ratio(where(usual, d_k=d_k), steps) for d_k in widths}
    slower |= {f"depth {n}": ratio(where(widest, depth=n), steps) for n in depths[1:]}
    slower |= {"best rates": best_rates(where(adam, d_k=widths[-1], depth=depths[0]))}
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


def best_rates(runs: Sequence[Run]) -> Estimate:
    """The ratio of steps with each rule at the learning rate that suits it best."""
    task = runs[0].plan.task
    best = []
    for rule in (grid.NONE, grid.ROOT):
        some = where(runs, task=task, rule=rule)
        rates = {run.plan.rate for run in some}
        each = [{x.plan.seed: math.log(steps(x)) for x in where(some, rate=r)} for r in rates]
        best.append(min(each, key=lambda logs: float(np.mean(list(logs.values())))))
    return estimate([best[0][seed] - best[1][seed] for seed in best[0]]).exp()


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
one that is √d_k larger (C7a): training has to undo a bet before it can learn. Every layer adds
such bets, so depth could make it worse; a residual stream that goes around them could prevent it.""",
    criterion="""\
Steps to a training loss (retrieval 1.0 nats, text 2.5) without scaling over those with 1/√d_k, at
the largest d_k, a run that never gets there counting with all its steps; 95 % intervals from the
seeds. Slower if the interval is above 1, at the usual learning rate and with each rule at the best
of its rates (quick knows one rate). Confirmed if slower, and if the ratio in the deepest model over
that in the shallowest is above 1 with its interval; caveat if slower and it is not, or if there is
one depth (quick); refuted if faster; else undecided.""",
    expected="caveat",
    quick={**grid.QUICK, "other rates": []},
    full={**grid.FULL, "other rates": [0.3, 3.0]},
    experiment=experiment,
)

"""C7a, the honest half of C7: at first the gradient of W_Q is larger, and W_V learns all along."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from levelhead.lab import grid
from levelhead.lab.claim import Claim, Outcome, Params, Plot, Tell, Verdict
from levelhead.lab.measure import Setting, batches, gather, statistics
from levelhead.lab.plan import Plan
from levelhead.lab.seeds import Estimate, Training, curve_of, estimate, geometric_mean, learning, outcome, ratio, where
from levelhead.lab.training_cache import forget, trained

LEARNT, HALF = 0.5, 0.5  # as in C7
JACOBIANS = (1, 4, 16, 64, 256, 1024)  # the d_k at which they are measured
HEADS, ROWS, KEYS = 32, 4, 32  # of random attention, whose Jacobians are measured


def wanted(params: Params, seed: int) -> list[Plan]:
    begins = {
        "tasks": params["tasks"][:1],
        "depths": [min(params["depths"])],
        "rules": [grid.NONE, grid.ROOT],
        "d_k": params["widths"],
        "seeds": params["begins"],
    }
    first = [replace(plan, steps=0) for plan in grid.plans({**params, **begins}, seed)]
    return grid.plans(params, seed) + first


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    return judge(trained(wanted(params, seed), tell))


def judge(runs: Sequence[Training]) -> Outcome:
    """The verdict on trainings, wherever they come from, and on random rows with their seeds."""
    begins, learnt = where(runs, steps=0), [run for run in runs if run.plan.steps > 0]
    norms = jacobian(sorted({run.plan.seed for run in begins}))
    first = {
        d_k: ratio(where(begins, d_k=d_k), lambda run: run.curves.gradient["q"][0])
        for d_k in sorted({run.plan.d_k for run in begins})
    }
    widest = where(learnt, d_k=max(run.plan.d_k for run in learnt))
    values = {
        "gradient of W_V": ratio(widest, _value_gradient),
        "movement of W_V": ratio(widest, lambda run: run.curves.moved["v"][-1]),
    }
    named = {f"gradient of W_Q at step 0, d_k {d_k}": x for d_k, x in first.items()}
    named |= {f"Jacobian, d_k {d_k}": x for d_k, x in norms.items()} | values
    theory: dict[str, Any] = {f"gradient of W_Q at step 0, d_k {d}": math.sqrt(d) for d in first}
    theory |= {"Jacobian": "rises, then falls", "W_V": f"above {HALF}"}
    return outcome(
        named,
        verdict(first, norms, [*values.values()]),
        theory,
        first=curve_of(first),
        most={"x": list(first), "y": [math.sqrt(d_k) for d_k in first]},
        jacobian=curve_of(norms),
    )


def verdict(first: dict[int, Estimate], norms: dict[int, Estimate], values: Sequence[Estimate]) -> Verdict:
    """Three parts: confirmed if all hold, refuted if one fails, else undecided."""
    larger = [x.low > 1 and x.low <= math.sqrt(d_k) for d_k, x in first.items()]
    smaller = [x.high < 1 or x.low > math.sqrt(d_k) for d_k, x in first.items()]
    ordered = [norms[d_k] for d_k in sorted(norms)]
    end, inside = max(ordered[0], ordered[-1], key=lambda x: x.value), ordered[1:-1]
    peaked = any(x.low > end.high for x in inside)
    monotone = all(x.high < end.low for x in inside)
    lives, dies = [x.low > HALF for x in values], [x.high < HALF for x in values]
    if all(larger) and peaked and all(lives):
        return "confirmed"
    return "refuted" if any(smaller) or monotone or any(dies) else "undecided"


def jacobian(seeds: Sequence[int]) -> dict[int, Estimate]:
    """Mean ‖diag(p) − p pᵀ‖ of unscaled rows of random q and k, by d_k."""

    def mean(d_k: int, seed: int) -> float:
        drawn = batches(Setting(d_k=d_k, keys=KEYS, seed=seed), HEADS, ROWS)
        return float(gather(statistics(q, k, grid.NONE) for q, k in drawn)["jacobian"].mean())

    return {d_k: estimate([mean(d_k, seed) for seed in seeds]) for d_k in JACOBIANS}


def _value_gradient(run: Training) -> float:
    return geometric_mean(run.curves.gradient["v"][learning(run.curves, LEARNT)])


CLAIM = Claim(
    id="C7a",
    claim="At step 0 the unscaled gradient of W_Q is larger, not smaller; the mean norm of the "
    "softmax Jacobian is not monotone in d_k; and W_V keeps learning.",
    derivation="""\
dL/dW_Q = scale · Σ (J g) k xᵀ. Without scaling the first factor is √d_k larger, and J shrinks only
with the rows that saturate: the ratio is √d_k, less what saturation takes.
J = diag(p) − p pᵀ is small for uniform p (‖J‖ ≈ 1/√n) and 0 for one-hot p, and larger in between.
dL/dv_j = p_j g does not pass through J: W_V has its gradient whatever p is.""",
    criterion=f"""\
Confirmed if all of these hold, with 95 % intervals from the seeds: ‖dL/dW_Q‖ at step 0 is larger
without scaling at every d_k, by at most √d_k; the mean ‖J‖ over random rows of {KEYS} keys is
larger at some d_k than at the smallest and the largest; at the largest d_k the gradient of W_V,
while the loss is above {LEARNT} nats, and how far W_V moves are above {HALF} of what they are with
1/√d_k. Refuted if one of them is the other way round beyond its interval; else undecided.""",
    expected="confirmed",
    quick={**grid.QUICK, "widths": [4, 16, 64, 256, 1024], "begins": 8},
    full=grid.FULL,
    experiment=experiment,
    forget=forget,
    plots=(
        Plot(
            "Gradient of W_Q at step 0, undivided over divided by √d_k",
            "d_k",
            "ratio of norms",
            {"measured": ("details", "first")},
            theory={"at most: √d_k": ("details", "most")},
            log="xy",
        ),
        Plot("Mean ‖J‖_F, undivided", "d_k", "mean ‖J‖_F", {"undivided": ("details", "jacobian")}, log="x"),
    ),
)

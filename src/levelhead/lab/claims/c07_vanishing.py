"""C7: without scaling, gradients are said to vanish, and W_Q and W_K to stand still."""

from __future__ import annotations

from collections.abc import Sequence

from levelhead.lab import grid
from levelhead.lab.claim import Claim, Outcome, Params, Tell, Verdict
from levelhead.lab.plan import Curves, Plan
from levelhead.lab.seeds import Estimate, Training, geometric_mean, learning, outcome, ratio, where
from levelhead.lab.training_cache import forget, trained

HALF = 0.5  # what counts as vanishing, as few, as hardly moving
LEARNT = 0.5  # nats: below, a gradient is small because little is left to learn


def wanted(params: Params, seed: int) -> list[Plan]:
    plans = grid.plans(params, seed)
    return plans + grid.with_sgd(grid.core(plans))


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    return judge(trained(wanted(params, seed), tell))


def judge(runs: Sequence[Training]) -> Outcome:
    """The verdict on trainings, wherever they come from."""
    widest = where(runs, d_k=max(run.plan.d_k for run in runs))
    adam = [run for run in widest if grid.plain(run.plan)]
    sgd = where(widest, optimiser="sgd")
    parts = {
        "gradient of W_Q": ratio(adam, lambda run: _gradient(run.curves, "q")),
        "gradient of W_K": ratio(adam, lambda run: _gradient(run.curves, "k")),
        "logits reached": ratio(adam, _reached),
        "movement of W_Q": ratio(sgd, lambda run: run.curves.moved["q"][-1]),
        "movement of W_K": ratio(sgd, lambda run: run.curves.moved["k"][-1]),
    }
    shown = {**parts, "keys reached in a row": ratio(adam, _keys)}
    return outcome(shown, verdict([*parts.values()]), f"all below {HALF} if the claim holds")


def verdict(parts: Sequence[Estimate]) -> Verdict:
    holds = [part.high < HALF for part in parts]
    fails = [part.low > HALF for part in parts]
    if any(holds) and any(fails):
        return "caveat"
    if all(holds) or all(fails):
        return "confirmed" if all(holds) else "refuted"
    return "undecided"


def _gradient(curves: Curves, name: str) -> float:
    return geometric_mean(curves.gradient[name][learning(curves, LEARNT)])


def _reached(run: Training) -> float:
    return geometric_mean(run.curves.reached[learning(run.curves, LEARNT)])


def _keys(run: Training) -> float:
    return geometric_mean(run.curves.keys[learning(run.curves, LEARNT)])


CLAIM = Claim(
    id="C7",
    claim="Without scaling the softmax saturates, so gradients vanish, only few weights are "
    "updated, and W_Q and W_K barely move.",
    derivation="""\
dL/ds = J g with J = diag(p) − p pᵀ, which goes to 0 as p goes to one-hot. But
dL/dW_Q = scale · Σ (dL/ds) k xᵀ: without scaling it is also √d_k times larger than with it.
Which of the two wins is a matter of how many rows are saturated, not of principle.""",
    criterion=f"""\
Trainings without scaling over the same with 1/√d_k, at the largest d_k, ratios with a 95 % interval
from the seeds: norms of dL/dW_Q and dL/dW_K while the loss is above {LEARNT} nats; the share of the
logits that the gradient reaches, (Σ|g|)²/(n Σg²), in the same steps; how far W_Q and W_K move under
SGD, whose steps are as large as the gradient (Adam's are not). A part holds if its interval is
below {HALF}, and fails if it is above. All hold: confirmed; all fail: refuted; some hold and some
fail: caveat; else undecided.""",
    expected="caveat",
    quick=grid.QUICK,
    full=grid.FULL,
    experiment=experiment,
    forget=forget,
)

"""Does `diagnose` stay silent while a training goes well?

Small transformers learn three tasks (to look values up, to continue a text, to write a sequence backwards) with three
optimisers (SGD with momentum, AdamW, Muon) at several rates, some with large q and k weights from the start, so that
logits pass 30 in good health. A watch looks at every fourth step. After each observation the run so far is judged as a
watch would have judged it then, and the whole run at the end by every rule. A training counts as healthy if its loss
fell and stayed low; any warning or error in one is a false alarm.

    python bench/healthy_trainings.py [--json FILE] [--fresh N]

FILE is written after every training, and continued if it is there. The bounds of the rules were chosen with these
trainings in view. `--fresh N` makes N others: seeds that were never used, a task that was not among them (to write a
sequence in order), and rate and gain drawn at random. Nothing may be chosen by their results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import levelhead as lh
from about import machine, versions
from levelhead.diagnosis import logit_growth
from levelhead.lab import tasks
from logit_growth import WIDTH, Block, short

STEPS, EVERY, BATCH = 300, 4, 8
EXAMPLES = 1024
LENGTH, LETTERS = 12, 16  # of a sequence that is written backwards
SMOOTH = 20  # steps over which a loss is averaged
HIGH = 30.0  # logits from here on are above the ordinary


class Plan(NamedTuple):
    """One training; a gain multiplies the q and k weights at the start."""

    task: str
    optimiser: str
    rate: float
    gain: float
    seed: int


RATES = {"sgd": (0.1, 0.2), "adamw": (0.001, 0.004), "muon": (0.01, 0.02)}
# Where these two are on the edge: logits rise tenfold in some forty steps, and some stop at 150 only. Nothing in the
# curve tells that from the start of a divergence, so these are counted apart.
EDGE = {"sgd": 0.3, "muon": 0.03}
TASKS = ("retrieval", "text", "reverse")
GAINS = (1.0, 3.0, 5.0)
SEEDS = (0, 1)


def plans() -> list[Plan]:
    """All of them, a seed after the other; those on the edge last."""
    usual = [
        Plan(task, optimiser, rate, gain, seed)
        for seed, gain, task, (optimiser, rates) in itertools.product(SEEDS, GAINS, TASKS, RATES.items())
        for rate in rates
    ]
    return usual + [
        Plan(task, name, rate, 1.0, seed) for seed in SEEDS for task in TASKS for name, rate in EDGE.items()
    ]


FRESH_TASK = "sort"
FRESH_SEED = 1000


def fresh_plans(count: int) -> list[Plan]:
    """Trainings that no bound was chosen with: every second one of the new task, optimisers in turn; rates are drawn
    between the usual ones, gains between the smallest and the largest."""
    chance = np.random.default_rng(FRESH_SEED)
    made = []
    for n in range(count):
        optimiser, (low, high) = list(RATES.items())[n % len(RATES)]
        task = FRESH_TASK if n % 2 else TASKS[n // 2 % len(TASKS)]
        rate, gain = np.exp(chance.uniform(np.log([low, GAINS[0]]), np.log([high, GAINS[-1]])))
        made.append(Plan(task, optimiser, short(rate), short(gain), FRESH_SEED + n))
    return made


def on_the_edge(one: dict[str, Any]) -> bool:
    return one["rate"] == EDGE.get(one["optimiser"])


# ---- what is learnt, by what, with what


def examples(task: str, seed: int) -> tuple[tuple[int, ...], int, Tensor, Tensor]:
    """Sizes of the vocabularies, classes, tokens (N, T, C), answers (N, T)."""
    if task in ("reverse", FRESH_TASK):
        chance = np.random.default_rng(seed)
        letters = chance.integers(LETTERS, size=(EXAMPLES, LENGTH))
        both = np.concatenate([letters, np.full_like(letters, LETTERS)], 1)
        places = np.broadcast_to(np.arange(2 * LENGTH), both.shape)
        written = letters[:, ::-1] if task == "reverse" else np.sort(letters, 1)
        answers = np.concatenate([np.full_like(letters, tasks.NO_ANSWER), written], 1)
        return (LETTERS + 1, 2 * LENGTH), LETTERS, torch.tensor(np.stack([both, places], -1)), torch.tensor(answers)
    made = tasks.make(task, seed, EXAMPLES)
    return made.vocabulary, made.classes, torch.tensor(made.learnt.tokens), torch.tensor(made.learnt.answers)


class Model(nn.Module):
    """Embeddings, two layers, logits of answers."""

    def __init__(self, vocabulary: Sequence[int], classes: int, gain: float) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(n, WIDTH) for n in vocabulary)
        self.layers = nn.Sequential(Block(), Block())
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes)
        with torch.no_grad():
            for block in self.layers:
                block.attention.q_proj.weight *= gain
                block.attention.k_proj.weight *= gain

    def forward(self, tokens: Tensor) -> Tensor:
        x = sum(each(tokens[..., i]) for i, each in enumerate(self.embeddings))
        return self.out(self.norm(self.layers(x)))


class Muon:
    """Momentum made orthogonal, for matrices inside the layers; AdamW for the rest."""

    def __init__(self, model: Model, rate: float) -> None:
        self.matrices = [p for p in model.layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in self.matrices}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        self.rate, self.adamw = rate, torch.optim.AdamW(rest, 0.003, betas=(0.9, 0.95), weight_decay=0.01)
        self.momenta = [torch.zeros_like(p) for p in self.matrices]

    @torch.no_grad()
    def step(self) -> None:
        self.adamw.step()
        for weight, momentum in zip(self.matrices, self.momenta, strict=True):
            momentum.mul_(0.95).add_(weight.grad)
            size = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
            weight.sub_(orthogonal(weight.grad + 0.95 * momentum), alpha=self.rate * size)


def orthogonal(x: Tensor) -> Tensor:
    """About the nearest orthogonal matrix: five steps of Newton and Schulz with Muon's coefficients."""
    turned = x.shape[0] > x.shape[1]
    x = (x.mT if turned else x) / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if turned else x


OPTIMISERS: dict[str, Callable[[Model, float], Any]] = {
    "sgd": lambda model, rate: torch.optim.SGD(model.parameters(), rate, momentum=0.9),
    "adamw": lambda model, rate: torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.01),
    "muon": Muon,
}


def train(plan: Plan, steps: int = STEPS) -> dict[str, Any]:
    """The training as the file keeps it."""
    torch.manual_seed(plan.seed)
    vocabulary, classes, tokens, answers = examples(plan.task, plan.seed)
    model = Model(vocabulary, classes, plan.gain)
    optimiser = OPTIMISERS[plan.optimiser](model, plan.rate)
    losses: list[float] = []
    with lh.watch(model, every=EVERY, history=STEPS) as w:
        for _ in range(steps):
            which = torch.randint(len(tokens), (BATCH,))
            loss = functional.cross_entropy(model(tokens[which]).flatten(0, 1), answers[which].flatten())
            model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            w.step()
            losses.append(float(loss.detach()))
    run = w.run()
    found = [f for f in lh.diagnose(run) if f.severity != "note"]
    largest = max(float(np.nanmax(curve.values)) for curve in logit_growth.curves(run).values())
    begin, end = (statistics.fmean(part) for part in (losses[:5], losses[-SMOOTH:]))
    best = min(statistics.fmean(losses[t : t + SMOOTH]) for t in range(0, steps - SMOOTH + 1, SMOOTH // 2))
    return {
        **plan._asdict(),
        "loss": [short(begin), short(best), short(end)],
        "healthy": end <= 0.9 * begin and end <= best + 0.1 * (begin - best),
        "largest_logit": short(largest),
        "first_alarm": logit_growth.first_alarm(run),
        "findings": [[f.severity, f.kind, f.where] for f in found],
    }


# ---- all of them, and in words


def summary(done: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the documentation says of it."""
    healthy = [one for one in done if one["healthy"] and not on_the_edge(one)]
    edge = [one for one in done if one["healthy"] and on_the_edge(one)]
    return {
        "trainings": sum(not on_the_edge(one) for one in done),
        "healthy": len(healthy),
        "steps": STEPS,
        "tasks": sorted({one["task"] for one in healthy}),
        "optimisers": sorted({one["optimiser"] for one in healthy}),
        "above_30": sum(one["largest_logit"] > HIGH for one in healthy),
        "above_100": sum(one["largest_logit"] > 100 for one in healthy),
        "false_alarms": sum(map(alarmed, healthy)),
        "largest_logit": max((one["largest_logit"] for one in healthy), default=None),
        "edge": {"healthy": len(edge), "false_alarms": sum(map(alarmed, edge))},
    }


def alarmed(one: dict[str, Any]) -> bool:
    return bool(one["first_alarm"] or one["findings"])


def about(fresh: int) -> dict[str, Any]:
    return {
        **machine(threads=1),
        "versions": versions(),
        "command": f"python bench/healthy_trainings.py {f'--fresh {fresh} ' * bool(fresh)}--json FILE",
        "method": f"2 layers, 4 heads, width {WIDTH}; batches of {BATCH}, {STEPS} steps, gradients clipped to 1; "
        f"every {EVERY}th step watched, and judged after each",
        "healthy": "the loss ends at 0.9 of where it began or below, and within a tenth of its fall from its best",
    }


def written(file: Path | None, done: Sequence[dict[str, Any]], fresh: int) -> None:
    if file is not None:
        whole = {"about": about(fresh), "summary": summary(done), "runs": list(done)}
        text = json.dumps(whole, allow_nan=False, separators=(",", ":"))
        file.write_text(text.replace('{"task"', '\n{"task"') + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="whether healthy trainings raise an alarm")
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--fresh", metavar="N", type=int, default=0, help="so many trainings that are not in the list")
    given = parser.parse_args()
    file = given.json
    torch.set_num_threads(1)  # so small a model is slower on more
    done = json.loads(file.read_text())["runs"] if file is not None and file.exists() else []
    known, begin = {tuple(one[name] for name in Plan._fields) for one in done}, time.monotonic()
    for plan in fresh_plans(given.fresh) if given.fresh else plans():
        if tuple(plan) in known:
            continue
        done.append(one := train(plan))
        print(f"{time.monotonic() - begin:5.0f} s  {plan}  {list(one.values())[5:]}", file=sys.stderr, flush=True)
        written(file, done, given.fresh)
    print(json.dumps(summary(done), indent=2))


if __name__ == "__main__":
    main()

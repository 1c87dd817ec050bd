"""How early does `diagnose` see that attention logits will break a training?

A small transformer learns to look values up: 8 pairs of key and value, then 8 keys whose values are wanted. Not to
attend costs ln 32; so a softmax that is stuck at the wrong key shows in the loss. AdamW at rates half a decade apart,
five seeds each, finds the least rate at which training diverges by itself; nothing forces the logits to grow. There the
same seeds train again with QK-norm, and with QK-clip, and nothing else changed. The first alarm is what a watch would
have raised on the way, from the steps so far: see `levelhead.diagnosis.logit_growth`.

    python bench/logit_growth.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import levelhead as lh
from about import machine, versions
from levelhead.diagnosis import logit_growth
from levelhead.remedies import QKClip, qk_norm
from levelhead.runs import tally
from levelhead.runs.record import Facts, Record, Run, Snapshot

RATES = (0.003, 0.01, 0.03, 0.1)
SEEDS = range(5, 10)  # the first five were looked at while the rule for alarms was made
ENOUGH = 4  # seeds of five
STEPS, WARM_UP = 800, 300
BATCH, PAIRS, KEYS, VALUES = 16, 8, 64, 32
WIDTH, HEADS, LAYERS = 64, 4, 2
TAU = 30.0
EVERY = 5  # steps between observations
CHANCE = math.log(VALUES)
SMOOTH = 4  # of which a loss is smoothed over: 20 steps
VARIANTS = ("plain", "QK-norm", "QK-clip")
DIGITS = 4  # that are kept
FOR_GROWTH = ("rows", "max_logit", "min_logit")  # what of a tally it is judged by
BEYOND = 50  # steps past divergence to which whole tallies are kept


# ---- the model and what it learns


class Attention(nn.Module):
    """Causal self-attention, as many write it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Lookup(nn.Module):
    """Reads (B, T, 2) keys and values, `VALUES` where one is wanted; gives logits of values."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Embedding(KEYS, WIDTH), nn.Embedding(VALUES + 1, WIDTH)
        self.layers = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VALUES)

    def forward(self, pairs: Tensor) -> Tensor:
        x = self.keys(pairs[..., 0]) + self.values(pairs[..., 1])
        return self.out(self.norm(self.layers(x)))


def batch(chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """(B, 2·PAIRS, 2) pairs and questions, and (B, PAIRS) answers."""
    keys = torch.rand(BATCH, KEYS, generator=chance).argsort(1)[:, :PAIRS]
    values = torch.randint(0, VALUES, (BATCH, PAIRS), generator=chance)
    asked = torch.randint(0, PAIRS, (BATCH, PAIRS), generator=chance)
    told = torch.stack([keys, values], -1)
    questions = torch.stack([keys.gather(1, asked), torch.full_like(asked, VALUES)], -1)
    return torch.cat([told, questions], 1), values.gather(1, asked)


def train(rate: float, variant: str, seed: int) -> tuple[list[float], Run]:
    """The loss of every step, and what a watch saw of every `EVERY`th."""
    torch.manual_seed(seed)
    chance = torch.Generator().manual_seed(1000 + seed)
    model = Lookup()
    if variant == "QK-norm":
        qk_norm(model, batch(torch.Generator().manual_seed(0))[0])
    parameters = list(model.parameters())
    optimiser = torch.optim.AdamW(parameters, rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda t: min(1.0, (t + 1) / WARM_UP))
    losses: list[float] = []
    seen: list[Snapshot] = []
    # QK-clip reads the maxima of the step it follows, so its watch looks at each.
    with lh.watch(model, every=1 if variant == "QK-clip" else EVERY, sinks=[seen.append]) as watch:
        clip = QKClip(watch, tau=TAU) if variant == "QK-clip" else None
        for _ in range(STEPS):
            pairs, answers = batch(chance)
            logits = model(pairs)[:, PAIRS:]
            loss = functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            if clip is not None:
                clip.step()
            schedule.step()
            watch.step()
            losses.append(float(loss.detach()))
    return losses, Run("Lookup", tuple(s for s in seen if s.step % EVERY == 0))


# ---- what became of it


def thinned(losses: Sequence[float]) -> list[float | None]:
    """Means of `EVERY` steps each."""
    parts = (losses[t : t + EVERY] for t in range(0, len(losses), EVERY))
    return [short(statistics.fmean(part)) for part in parts]


def smoothed(losses: Sequence[float | None]) -> list[float]:
    """Of thinned losses, means of the last `SMOOTH` up to each; NaN is the worst there is."""
    kept = [math.inf if loss is None else loss for loss in losses]
    return [statistics.fmean(kept[max(0, i + 1 - SMOOTH) : i + 1]) for i in range(len(kept))]


def left_for_good(losses: Sequence[float | None], bound: float) -> int | None:
    """The step from which the smoothed loss stays above a bound that it had been below."""
    below = [i for i, loss in enumerate(smoothed(losses)) if loss < bound]
    return (below[-1] + 1) * EVERY if below and below[-1] + 1 < len(losses) else None


def diverged(losses: Sequence[float | None]) -> int | None:
    """When half of what not attending costs was passed for good: what was learnt is lost."""
    return left_for_good(losses, CHANCE / 2)


def suffers(losses: Sequence[float | None]) -> int | None:
    """When a tenth of the way from the best loss to chance was: the stricter mark."""
    best = min(smoothed(losses)[SMOOTH - 1 :])
    return left_for_good(losses, best + 0.1 * (CHANCE - best))


def judged(rate: float, variant: str, seed: int, each: Sequence[float], run: Run) -> dict[str, Any]:
    """A training as the file keeps it; its alarm is that of the numbers that are kept."""
    losses = thinned(each)
    watched = packed(run)
    kept = unpacked(watched)
    alarm, end = logit_growth.first_alarm(kept), diverged(losses)
    curves = [np.nanmax(curve.values, axis=1) for curve in logit_growth.curves(kept).values()]
    largest: list[float] = np.max(curves, axis=0).tolist()
    level = None if alarm is None else largest[watched["steps"].index(alarm[0])]
    return {
        "rate": rate,
        "variant": variant,
        "seed": seed,
        "best": short(min(smoothed(losses)[SMOOTH - 1 :])),
        "final": short(smoothed(losses)[-1]),
        "largest_logit": max(largest),
        "alarm": alarm and {"step": alarm[0], "module": alarm[1], "head": alarm[2], "at": level},
        "suffers": suffers(losses),
        "diverged": end,
        "lead": end - alarm[0] if alarm and end is not None else None,
        "losses": losses,
        "largest": largest,
        "watched": watched,
    }


# ---- statistics, small enough to commit


def short(x: Any) -> Any:
    """A number to so many digits, NaN and infinity as null; words as they are."""
    if not isinstance(x, float):
        return x
    return float(f"{x:.{DIGITS}g}") if math.isfinite(x) else None


def packed(run: Run, *, whole: bool = False) -> dict[str, Any]:
    """What was watched, column by column and rounded; what never changes is written once.

    All of it, or as much as the growth of logits is judged by.
    """
    found: dict[str, list[Record]] = {}
    for snapshot in run.snapshots:
        for each in snapshot.records:
            found.setdefault(each.module, []).append(each)
    modules = {}
    for name, records in found.items():
        rows = np.stack([each.tally for each in records])  # (N, H, columns)
        columns = {
            column: _once([[short(x) for x in heads] for heads in rows[..., i].tolist()])
            for i, column in enumerate(tally.COLUMNS)
            if whole or column in FOR_GROWTH
        }
        modules[name] = {"facts": asdict(records[0].facts), "tally": columns}
    return {"steps": [snapshot.step for snapshot in run.snapshots], "modules": modules}


def _once(rows: list[list[Any]]) -> list[Any]:
    return rows[0] if all(row == rows[0] for row in rows) else rows


def unpacked(watched: dict[str, Any]) -> Run:
    """The run again; columns that were left out are those of no call."""
    steps = watched["steps"]
    modules = {}
    for name, module in watched["modules"].items():
        facts = {key: tuple(x) if isinstance(x, list) else x for key, x in module["facts"].items()}
        rows = np.tile(np.asarray(tally.NOTHING), (len(steps), HEADS, 1))
        for column, values in module["tally"].items():
            rows[..., tally.INDEX[column]] = np.array(values, np.float64)
        modules[name] = (Facts(**facts), rows)
    return Run(
        "Lookup",
        tuple(
            Snapshot(step, tuple(Record(name, f, rows[i]) for name, (f, rows) in modules.items()))
            for i, step in enumerate(steps)
        ),
    )


# ---- all of them


def said(one: dict[str, Any], begin: float) -> None:
    """A line for whoever waits."""
    alarm, end = one["alarm"], one["diverged"]
    print(
        f"{time.monotonic() - begin:5.0f} s  rate {one['rate']:<5g} seed {one['seed']} "
        f"{one['variant']:<7}  loss {one['final']:<7g} largest logit {one['largest_logit']:<8g} "
        f"alarm {alarm['step'] if alarm else '-':<4} diverged {'-' if end is None else end}",
        file=sys.stderr,
        flush=True,
    )


def trainings() -> tuple[float, list[dict[str, Any]]]:
    """The rate that was found, and every training on the way and there."""
    begin, done = time.monotonic(), []

    def one(rate: float, variant: str, seed: int) -> bool:
        losses, run = train(rate, variant, seed)
        found = judged(rate, variant, seed, losses, run)
        if found["diverged"] is not None:
            near = [s for s in run.snapshots if s.step <= found["diverged"] + BEYOND]
            found["watched"] = packed(Run(run.model, tuple(near)), whole=True)
        said(found, begin)
        done.append(found)
        return found["diverged"] is not None

    for rate in RATES:
        if sum([one(rate, "plain", seed) for seed in SEEDS]) >= ENOUGH:
            break
    else:
        raise SystemExit("no rate diverges often enough: go higher, or force q and k to grow")
    for variant in VARIANTS[1:]:
        for seed in SEEDS:
            one(rate, variant, seed)
    return rate, done


# ---- in words


def summary(rate: float, done: list[dict[str, Any]]) -> dict[str, Any]:
    """What the documentation says of it."""
    at = {v: [x for x in done if (x["rate"], x["variant"]) == (rate, v)] for v in VARIANTS}
    early = [x for x in at["plain"] if x["lead"] is not None]
    return {
        "rate": rate,
        "forced": False,  # nothing makes q and k grow but training itself
        "seeds": len(SEEDS),
        "diverged": {v: sum(x["diverged"] is not None for x in runs) for v, runs in at.items()},
        "alarmed": {v: sum(x["alarm"] is not None for x in runs) for v, runs in at.items()},
        "leads": [x["lead"] for x in early],
        "median_lead": statistics.median([x["lead"] for x in early]),
        "leads_to_suffering": [x["suffers"] - x["alarm"]["step"] for x in early],
        "logits_at_alarm": [x["alarm"]["at"] for x in early],
        "final": {v: [x["final"] for x in runs] for v, runs in at.items()},
    }


def seeds_table(rate: float, done: list[dict[str, Any]]) -> list[str]:
    """Every seed at the rate that was found."""
    of = {(x["variant"], x["seed"]): x for x in done if x["rate"] == rate}
    lines = [
        "| seed | first alarm | largest logit then | loss suffers | diverges | lead "
        "| final loss | with QK-norm | with QK-clip |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for seed in SEEDS:
        x = of["plain", seed]
        alarm = x["alarm"] or {"step": None, "at": math.nan}
        marks = (alarm["step"], f"{alarm['at']:.0f}", x["suffers"], x["diverged"], x["lead"])
        finals = (f"{of[variant, seed]['final']:.2f}" for variant in VARIANTS)
        words = ("-" if mark is None else str(mark) for mark in marks)
        lines.append(f"| {seed} | {' | '.join((*words, *finals))} |")
    return lines


def rates_table(done: list[dict[str, Any]]) -> list[str]:
    """The search."""
    lines = [
        "| rate | diverged | alarms | final loss, median | largest logit, least to most |",
        "|---|---|---|---|---|",
    ]
    for rate in dict.fromkeys(x["rate"] for x in done):
        runs = [x for x in done if (x["rate"], x["variant"]) == (rate, "plain")]
        ends, alarms = (sum(x[name] is not None for x in runs) for name in ("diverged", "alarm"))
        logits = sorted(x["largest_logit"] for x in runs)
        lines.append(
            f"| {rate:g} | {ends} of {len(runs)} | {alarms} of {len(runs)} "
            f"| {statistics.median(x['final'] for x in runs):.3f} "
            f"| {logits[0]:,.0f} to {logits[-1]:,.0f} |"
        )
    return lines


def about() -> dict[str, Any]:
    return {
        **machine(threads=1),
        "versions": versions(),
        "command": "python bench/logit_growth.py --json FILE",
        "method": f"{LAYERS} layers, {HEADS} heads, width {WIDTH}; AdamW(0.9, 0.95), gradients "
        f"clipped to 1, warm-up of {WARM_UP} steps, {STEPS} in all; QK-clip at {TAU:g}",
        "diverged": "the loss, a mean of 20 steps, passes ln(32)/2 for good, having been below",
        "suffers": "it passes for good a tenth of the way from its best to ln 32",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="how early logit growth is seen")
    parser.add_argument("--json", metavar="FILE", type=Path)
    file = parser.parse_args().json
    torch.set_num_threads(1)  # so small a model is slower on more
    rate, done = trainings()
    tables = {"seeds": seeds_table(rate, done), "rates": rates_table(done)}
    print("\n".join([*tables["rates"], "", *tables["seeds"]]))
    if file:
        steps = {"every": EVERY, "steps": STEPS, "chance": CHANCE}
        whole = {"about": about(), **steps, "summary": summary(rate, done), "tables": tables}
        text = json.dumps({**whole, "runs": done}, allow_nan=False, separators=(",", ":"))
        file.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

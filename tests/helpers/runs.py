"""Runs made up for tests: real statistics of random heads, of any number, shape and scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import levelhead as lh
from levelhead.runs import tally
from levelhead.runs.record import Facts, Record, Run, Seen, Snapshot
from levelhead.runs.tally import Floats

FACTS = dict(
    kind="SelfAttention",
    how="sdpa",
    d_k=16,
    kv_heads=4,
    queries=24,
    keys=24,
    dtype="float32",
    scale=0.25,
    effective_scale=0.25,
    scale_reading="projections",
    model_width=64,
)


def tally_of(q: Any, k: Any, **options: Any) -> Floats:
    """The tally one observed call leaves: q (H, T, D), k (G, S, D)."""
    rows = lh.observe(q, k, **options).rows
    found = tally.nothing(q.shape[0])
    some, several = rows.count > 0, rows.count > 1
    nats = np.log(np.maximum(rows.count, 2))
    sums: dict[str, Any] = dict(
        rows=some,
        lone_rows=~several,
        empty_rows=~some,
        nan_rows=np.zeros_like(some),
        mean=rows.mean,
        var=rows.var,
        max=rows.max,
        logsumexp=rows.logsumexp,
        entropy=rows.entropy,
        top1=rows.top1,
        sum_p2=rows.sum_p2,
        first=rows.first,
        sink=rows.sink,
        several=several,
        saturated=several & (rows.top1 >= 0.99),
        normalised_entropy=several * rows.entropy / nats,
        effective_keys=several * np.exp(rows.entropy),
    )
    for name, values in sums.items():
        found[:, tally.INDEX[name]] = np.where(some | (name == "empty_rows"), values, 0).sum(-1)
    for name in ("q", "k"):
        x = {"q": q, "k": np.repeat(k, q.shape[0] // k.shape[0], 0)}[name]
        found[:, tally.INDEX[f"{name}_squares"]] = (x**2).sum((-1, -2))
        found[:, tally.INDEX[f"{name}_count"]] = x[0].size
    found[:, tally.INDEX["min_logit"]] = rows.min.min(-1)
    found[:, tally.INDEX["max_logit"]] = rows.max.max(-1)
    for name in ("logsumexp", "entropy"):
        found[:, tally.INDEX[f"min_{name}"]] = getattr(rows, name).min(-1)
        found[:, tally.INDEX[f"max_{name}"]] = getattr(rows, name).max(-1)
    found[:, tally.INDEX["max_top1"]] = rows.top1.max(-1)
    top = rows.max.argmax(-1)
    found[:, tally.INDEX["max_batch"]] = 0
    found[:, tally.INDEX["max_query"]] = top
    found[:, tally.INDEX["max_key"]] = np.take_along_axis(rows.argmax, top[:, None], -1)[:, 0]
    return found


def record(
    module: str,
    sizes: Sequence[float] = (0.1, 1.0, 4.0, 40.0),
    *,
    counterfactual: bool = False,
    gradients: bool = False,
    seed: int = 0,
    **facts: Any,
) -> Record:
    """A module with one head per size; the size is the spread of its logits."""
    random = np.random.default_rng(seed)
    H = len(sizes)
    q, k = random.standard_normal((2, H, 24, 16))
    q *= np.asarray(sizes)[:, None, None]
    found = tally_of(q, k)
    if gradients:
        for i, name in enumerate(("dq_squares", "dk_squares", "dv_squares", "gradients")):
            found[:, tally.INDEX[name]] = 1.0 if name == "gradients" else 10.0 ** (-i)
    tried: Mapping[str, Floats] = {rule: tally_of(q, k, scale=rule) for rule in ("none", "1/sqrt(d_k)", "1/d_k")}
    known: dict[str, Any] = FACTS | {"kv_heads": H} | facts
    weights = {"q_proj": 0.25, "k_proj": 1e-9} if gradients else {}
    return Record(module, Facts(**known), found, tried if counterfactual else {}, weights)


def run(*records: Record, model: str = "Made up", **rest: Any) -> Run:
    """One step of these modules, all of them seen."""
    seen = tuple(Seen(r.module, r.facts.kind, True, r.facts.how, 1) for r in records)
    return Run(model, (Snapshot(0, records),), **({"coverage": seen} | rest))

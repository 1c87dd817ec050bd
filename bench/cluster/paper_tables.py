"""The tables of docs/scaling.md that no machine here could measure: the model and the simulation, at thousands of hosts
and millions of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cluster import simulate
from cluster.load import FORWARD, flops, load
from cluster.scaling_model import Machine
from cluster.tables import Result, machine
from cluster.winners import Paper, tokens_to_hide, winner
from cluster.winners_plot import LINKS
from levelhead.bench.report import seconds
from levelhead.cluster.traffic import STATISTICS

PLACES = tuple((tokens, world) for tokens in (2**16, 2**20, 2**24) for world in (8, 64, 1024, 4096))
STRAGGLING = (2**20, 256)  # tokens and hosts of the simulation


def paper(result: Result) -> list[str]:
    """The winner and its seconds, by place and link."""
    core, hosts = machine(result), Paper()
    head = " | ".join(f"{gbit:g} Gbit/s" for gbit in LINKS)
    lines = [f"| tokens | hosts | {head} |", f"|---|---|{'---|' * len(LINKS)}"]
    for tokens, world in PLACES:
        found = [winner(hosts, core, tokens, world, gbit) for gbit in LINKS]
        told = [f"{x.plan}, {_long(x.seconds)}: {x.why}" if x.every else x.why for x in found]
        lines.append(f"| {tokens:,} | {world:,} | {' | '.join(told)} |")
    return lines


def _long(taken: float) -> str:
    """Seconds, minutes or hours."""
    if taken < 120:
        return seconds(taken)
    return f"{taken / 60:.0f} min" if taken < 7200 else f"{taken / 3600:.1f} h"


def hide(result: Result) -> list[str]:
    """From how many tokens per host the ring hides its wire; up to how many rows decode pays."""
    core, hosts = machine(result), Paper()
    per_row = hosts.heads * (4 * hosts.width + STATISTICS)
    lines = ["| link | tokens per host from which a ring hides its blocks |", "|---|---|"]
    lines += [f"| {gbit:g} Gbit/s | {tokens_to_hide(hosts, core, gbit):,.0f} |" for gbit in LINKS]
    share = hosts.problem(1).kv * hosts.size / per_row
    return [*lines, f"| any: decode moves less up to | {share:.2f} rows per token of a shard |"]


def stragglers(result: Result) -> list[str]:
    """Simulated forward passes, as multiples of the even ones."""
    core, hosts = machine(result), Paper()
    ring_even, gather_even = _simulated(core, hosts, None, 0.0)
    lines = ["| hosts | ring | all-gather |", "|---|---|---|"]
    lines.append(f"| all even | {seconds(ring_even)} | {seconds(gather_even)} |")
    for words, factor, spread in (
        ("one 1.5 times as slow", 1.5, 0.0),
        ("one 3 times as slow", 3.0, 0.0),
        ("every step of every host off by 10%", None, 0.1),
        ("every step of every host off by 30%", None, 0.3),
    ):
        ring, gather = _simulated(core, hosts, factor, spread)
        lines.append(f"| {words} | × {ring / ring_even:.2f} | × {gather / gather_even:.2f} |")
    return lines


def _simulated(core: Machine, hosts: Paper, factor: float | None, spread: float) -> tuple[float, float]:
    """Seconds of a ring and of an all-gather on 10 Gbit/s."""
    tokens, world = STRAGGLING
    problem, host, link = hosts.problem(tokens), hosts.host(core), hosts.link(10.0)
    pairs = load(problem, "zigzag", world).busiest
    speed = simulate.jitter((world, world), spread)
    if factor is not None:
        speed *= simulate.straggler(world, factor)[:, None]
    compute: Any = flops(problem, pairs, FORWARD)[None] * speed
    wire = tokens / world * problem.kv * problem.size / link.bandwidth + link.latency
    ring = simulate.ring(np.asarray(compute * host.blocks), wire)
    gather = simulate.all_gather(np.asarray(compute.sum(1) * host.forward), wire)
    return ring.total, gather.total


TABLES: dict[str, Callable[[Result], list[str]]] = {"paper": paper, "hide": hide, "stragglers": stragglers}

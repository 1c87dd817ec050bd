"""The benchmark from beginning to end: every case and every peer, into one dictionary.

`--json` writes that dictionary: machine, versions, method, raw samples, verdicts. `cell` measures one case, `judge`
compares its numbers with its bar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from levelhead import _core
from levelhead.bench import inputs, judge, peers
from levelhead.bench.cases import Case
from levelhead.bench.cell import Effort, measured
from levelhead.bench.limits import checked_threads, limits
from levelhead.info import info, measured_here

SEEDS = 3

METHOD = (
    "Round-robin bursts: 50 ms idle, 2 warm-ups, 10 timed calls, next implementation; several rounds. Calls over 0.3 s "
    "are warmed once and timed less often; calls under 0.2 ms are timed in batches; whoever is over 3 times slower "
    "than the fastest peer gets one short burst. Ratio: fastest peer's time / ours, by minimum and by median. Work "
    f"counts visible (query, key) pairs only. Error: against float64 on up to {inputs.ROWS} query rows of every head. "
    "Memory: peak resident size during one call in a fresh process, minus what was there before and the result. "
    "Training: one forward and one backward pass, seven products of visible pairs; gradients are compared whole. "
    "Models: one forward pass of random tokens, compared with the same model in float64."
)

# Bursts of 0.3 s instead of 3: enough for an overview, too little to publish.
QUICK = Effort(rounds=2, seeds=1, memory=False, left_out=("FlexAttention", "PyTorch compiled"), long=0.03)
FULL = Effort(rounds=3, seeds=SEEDS, memory=True)


def bench(
    cases: Sequence[Case],
    *,
    threads: int | None = None,
    effort: Effort = FULL,
    tell: Callable[[str, str], None] = lambda case, doing: None,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Measures the cases; `tell` is called with (case, current step), `save` with the result so far."""
    count = checked_threads(threads, _core.default_threads(), "Leave --threads out to use them all")
    measured_peers = [peer for peer in peers.implementations() if peer is not peers.OURS_OFF]
    with ExitStack() as stack:
        stack.enter_context(peers.on_cpus(count))
        teams = {peer.name: peer.missing() or stack.enter_context(peer.session(count)) for peer in measured_peers}
        tell("limits", "FMA peak and memory bandwidth")
        result = _header(count, teams, measured_peers) | dict(
            effort=asdict(effort) | dict(left_out=list(effort.left_out)),
            limits=asdict(limits(count, effort.least, effort.array)),
        )
        result["cells"] = cells = []
        for case in cases:
            cell = measured(case, count, effort, partial(tell, case.name))
            cell["verdict"] = judge.verdict(cell, result["limits"])
            cells.append(cell)
            result["summary"] = judge.summary(cells)
            save(result)
    return result


def _header(threads: int, teams: dict[str, str], measured_peers: list[peers.Implementation]) -> dict[str, Any]:
    header = measured_here()
    header["machine"]["available"] = list(info().available)
    for peer in measured_peers:
        header["versions"] |= peer.versions()
    if find_spec("transformers"):  # its models are run with both attentions
        header["versions"]["transformers"] = metadata.version("transformers")
    return header | dict(threads=threads, threads_set_by=teams, method=METHOD)

"""One step of all ranks together: everything is gathered once, and each rank decides the same.

Called at log time or in a watch's `step()`, never while a model runs. Tallies of ranks that watch the same heads add up
(data and context parallelism); ranks with heads of their own are put side by side (tensor parallelism); ranks with
layers of their own keep them apart (pipeline parallelism). A rank of the same model without a pass of some or all
layers adds nothing there. Equal names on ranks with different parameters are no replicas: that is refused, on every
rank, rather than joined. No rank waits for another that has raised: all have the same facts first.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import nn

from levelhead.errors import bad_value, expected
from levelhead.runs import sessions, tally
from levelhead.runs.record import Facts, Record, Snapshot
from levelhead.torch.operators import LevelheadRuntimeError

HEADS, PARTS = ("same", "split"), ("replicas", "pipeline")
_SAMPLED = 64  # numbers of each parameter that a fingerprint reads


@dataclass(frozen=True)
class Failure:
    """A sink's error, which waits until every rank raises it."""

    words: str
    error: Exception | None  # None: another rank's

    def throw(self) -> None:
        advice = "Mend what the sink writes to; every rank stops here, so that none waits for another"
        given = expected("sinks", "all to take every step", self.words, advice)
        raise LevelheadRuntimeError(given) from self.error


@dataclass(frozen=True)
class Given:
    """What one rank brings."""

    snapshot: Snapshot
    heads: str
    parts: str | None
    fingerprint: float | None
    structure: int | None = None  # equal for models whose modules have equal names
    every: int | None = None  # of a watch that gathers by itself: which steps; the same on every rank, as is the step
    resumed: int = 0  # steps that it has from a file; the same on every rank
    failed: str = ""  # what a sink of this rank raised since the last step

    @property
    def layout(self) -> dict[str, tuple[int, int]]:
        return {record.module: (len(record.tally), record.facts.d_k) for record in self.snapshot.records}


def gathered(
    snapshot: Snapshot,
    group: Any = None,
    *,
    heads: str = "same",
    parts: str | None = None,
    fingerprint: float | None = None,
    structure: int | None = None,
) -> Snapshot:
    """The snapshots of all ranks of a group as one, in the order of the ranks; the same on every rank.

    A rank that recorded nothing in this step must still call; it adds nothing.

    Args:
        heads: "same": every rank's rows of the same heads add up. "split": each rank has heads of its own, as many as
            the others.
        parts: "replicas": every rank has the whole model. "pipeline": each has layers of its own, whose names get the
            rank in front. None: found out by names and fingerprints, and refused where that is not possible.
        fingerprint: of this rank's parameters, from `fingerprint`; None: not known.
        structure: of this rank's model, from `structure`: layers of one model may have no pass on some ranks.
    """
    return joined(_exchanged(Given(snapshot, heads, parts, fingerprint, structure), group))


def _exchanged(own: Given, group: Any = None) -> list[Given]:
    """What every rank of a group brings, on every rank."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        _check(own.heads, own.parts)
        advice = "Call init_process_group first; in one process, read w.last"
        raise bad_value("group", "torch.distributed to be running", "no process group", advice)
    everything: list[Any] = [None] * dist.get_world_size(group)
    with waited_for(f"every rank in the gathering of step {own.snapshot.step}"):
        dist.all_gather_object(everything, own, group=group)
    for given in everything:  # not before: a rank that raises alone leaves the others waiting
        _check(given.heads, given.parts)
    return everything


def asked_anywhere(asked: Sequence[str], step: int) -> list[str]:
    """What findings of any rank ask of the trainer after a step; every rank calls it, and gets the same words."""
    import torch.distributed as dist

    everything: list[Any] = [None] * dist.get_world_size()
    with waited_for(f"every rank to say what its findings ask after step {step}"):
        dist.all_gather_object(everything, list(asked))
    return sorted(set().union(*everything))


@contextmanager
def waited_for(wanted: str) -> Iterator[None]:
    """Around a collective: an error that names what the other ranks did not come to."""
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        given = f"on rank {torch.distributed.get_rank()}, which waited: {reason}"
        advice = "Another rank has ended, raised an error, or runs fewer steps: see its own output"
        raise LevelheadRuntimeError(expected("ranks", wanted, given, advice)) from error


def _check(heads: str, parts: str | None) -> None:
    if heads not in HEADS:
        raise bad_value("heads", "'same' or 'split'", repr(heads), "Pass split where heads are spread over ranks")
    check_parts(parts)


def check_parts(parts: str | None) -> None:
    """How ranks relate, as `gather` and QK-clip take it."""
    if parts is not None and parts not in PARTS:
        raise bad_value("parts", "'replicas', 'pipeline' or None", repr(parts), "Pass pipeline for stages")


def checked(gather: Any) -> bool | str:
    """The option of a watch: whether, and how, its steps are gathered."""
    if isinstance(gather, bool) or gather in ("split", *PARTS):
        chosen: bool | str = gather
        return chosen
    advice = "Pass True to find out whether ranks are replicas; split where each has heads of its own"
    raise bad_value("gather", "True, False, 'replicas', 'pipeline' or 'split'", repr(gather), advice)


class Gathering:
    """Every step of a watch becomes that of all ranks; with one process, it stays as it is."""

    def __init__(self, gather: bool | str, every: int) -> None:
        self._every = every
        self._structure: int | None = None  # read once: walking all modules in every step would cost
        self.failure: Failure | None = None  # a sink's, of any rank, that came with the latest step
        self.met = False  # whether ranks ever met: a first step that some would not measure must be noticed
        self._heads = "split" if gather == "split" else "same"
        self._parts = str(gather) if gather in PARTS else None
        rank = sessions.rank()
        self.active = rank is not None and gather is not False
        self.first = not self.active or rank == 0  # who writes

    def __call__(
        self, snapshot: Snapshot | None, step: int, model: nn.Module, resumed: int, failure: Failure | None
    ) -> Snapshot | None:
        """Every rank calls it, also one that recorded nothing; None: no rank recorded anything."""
        if not self.active:
            return snapshot
        self.met = True
        known = fingerprint(model) if self._parts is None else None
        own = Snapshot(step, ()) if snapshot is None else snapshot
        if self._structure is None:
            self._structure = structure(model)
        facts: dict[str, Any] = {"structure": self._structure, "every": self._every, "resumed": resumed}
        facts["failed"] = failure.words if failure else ""
        everything = _exchanged(Given(own, self._heads, self._parts, known, **facts))
        failed = next((given.failed for given in everything if given.failed), "")
        self.failure = failure or (Failure(failed, None) if failed else None)
        whole = joined(everything)
        if whole.records and self._parts is None:  # found out; reading all parameters again would cost a wait for each
            self._parts = "replicas"
        return whole if whole.records else None


def fingerprint(model: nn.Module) -> float | None:
    """A number that replicas of a model share and stages of one do not; None where ranks hold shards."""
    total = 0.0
    for place, parameter in enumerate(model.parameters(), 1):
        plain = type(parameter.data) is torch.Tensor and parameter.device.type != "meta"
        if not plain or type(model).__name__ == "FullyShardedDataParallel":
            return None
        total += place * float(parameter.detach().flatten()[:_SAMPLED].double().sum())
    return total if total == total else None


def structure(model: nn.Module) -> int:
    """A number that models share whose modules have the same names."""
    return zlib.crc32("\n".join(name for name, _ in model.named_modules()).encode())


def joined(ranks: Sequence[Given]) -> Snapshot:
    """What `gathered` returns, from what every rank brought."""
    if len({(given.heads, given.parts) for given in ranks}) > 1:
        given = ", ".join(f"heads={g.heads!r} parts={g.parts!r} on rank {rank}" for rank, g in enumerate(ranks))
        raise bad_value("ranks", "the same options everywhere", given, "Call gather alike on every rank")
    if len({given.every for given in ranks}) > 1:
        given = ", ".join(f"{g.every} on rank {rank}" for rank, g in enumerate(ranks))
        raise bad_value("every", "the same on every rank of a watch that gathers", given, "Measure the same steps")
    if ranks[0].every is not None and len({(given.snapshot.step, given.resumed) for given in ranks}) > 1:
        given = ", ".join(f"step {g.snapshot.step} after {g.resumed} on rank {rank}" for rank, g in enumerate(ranks))
        advice = "Give every rank the file that rank 0 wrote, and the same start_at"
        raise bad_value("resume", "the same step after as many resumed ones on every rank", given, advice)
    heads, parts = ranks[0].heads, ranks[0].parts
    step = next((given.snapshot.step for given in ranks if given.snapshot.records), ranks[0].snapshot.step)
    if parts == "pipeline":
        staged = (_named(given.snapshot, f"stage{rank}.") for rank, given in enumerate(ranks))
        return Snapshot(step, tuple(record for records in staged for record in records))
    working = [(rank, given) for rank, given in enumerate(ranks) if given.snapshot.records]
    if heads == "split":
        return Snapshot(step, _side_by_side(ranks, working))
    layouts = [given.layout for _, given in working]
    names = [set(layout) for layout in layouts]
    apart = sum(map(len, names)) == len(set().union(*names))
    if not apart:
        _check_replicas(working, parts)
    # The rank with most layers first: it has the order of the model.
    snapshots = sorted((given.snapshot for _, given in working), key=lambda x: -len(x.records))
    return reduce(Snapshot.merged, snapshots, Snapshot(step, ()))


def _check_replicas(working: list[tuple[int, Given]], parts: str | None) -> None:
    """Ranks that share a name must be of one model, with layers of one size, and hold the same parameters."""
    alike = {given.structure for _, given in working}
    _check_layouts(working, some_idle=len(alike) == 1 and None not in alike)
    known = {given.fingerprint for _, given in working if given.fingerprint is not None}
    if parts is None and len(known) > 1:
        module = next(iter(working[0][1].layout))
        given = f"{module!r} and others by the same name, with different parameters"
        advice = "Pass parts='pipeline' if ranks are stages, parts='replicas' if they are copies that drifted apart"
        raise bad_value("ranks", "copies of one model", given, advice)


def _check_layouts(working: list[tuple[int, Given]], *, some_idle: bool) -> None:
    """An error that names the first module that is not the same everywhere. `some_idle`: it may be absent."""
    for module in dict.fromkeys(name for _, given in working for name in given.layout):
        sizes = {rank: given.layout.get(module) for rank, given in working}
        if len({size for size in sizes.values() if size is not None or not some_idle}) > 1:
            words = (
                f"nothing on rank {rank}" if size is None else f"{size[0]} heads of width {size[1]} on rank {rank}"
                for rank, size in sizes.items()
            )
            advice = "Watch the same model with the same options on every rank; for stages pass parts='pipeline'"
            raise bad_value("ranks", "the same modules everywhere", f"in {module!r} {', '.join(words)}", advice)


def _named(snapshot: Snapshot, prefix: str) -> tuple[Record, ...]:
    return tuple(replace(record, module=f"{prefix}{record.module}") for record in snapshot.records)


def _side_by_side(ranks: Sequence[Given], working: list[tuple[int, Given]]) -> tuple[Record, ...]:
    if not working:
        return ()
    if len(working) < len(ranks):
        idle = sorted(set(range(len(ranks))) - {rank for rank, _ in working})
        given = f"none on rank {', '.join(map(str, idle))}"
        raise bad_value("ranks", "heads of every rank", given, "Run the model on every rank before gather")
    _check_layouts(working, some_idle=False)
    return tuple(
        _wide([given.snapshot.records[i] for _, given in working]) for i in range(len(working[0][1].snapshot.records))
    )


def _wide(records: list[Record]) -> Record:
    """One record with the heads of all."""
    first = records[0]
    shared = set(first.counterfactual).intersection(*(record.counterfactual for record in records))
    # 1/√d was computed from the width that one rank sees, not the model's.
    rules = {
        rule: np.concatenate([record.counterfactual[rule] for record in records])
        for rule in first.counterfactual
        if rule in shared and (rule != "1/sqrt(d)" or len(records) == 1)
    }
    facts = reduce(Facts.with_rows_of, (record.facts for record in records))
    facts = replace(facts, kv_heads=first.facts.kv_heads * len(records))
    if first.facts.effective_scales:
        facts = replace(facts, effective_scales=tuple(x for record in records for x in record.facts.effective_scales))
    rows: tally.Floats = np.concatenate([record.tally for record in records])
    return replace(first, tally=rows, counterfactual=rules, facts=facts)

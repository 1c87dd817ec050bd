"""Several processes that train one model: each watches its own part, and `gather` adds up."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import levelhead as lh
from levelhead.distributed import Split
from levelhead.runs import tally
from levelhead.runs.record import Record, Snapshot
from levelhead.watching.ranks import Given, fingerprint, gathered, joined
from ranks import Ranks
from watched import BATCH, TOKENS, Attend, batch, sdpa, stack

WORLD = 2


@pytest.fixture
def two() -> Iterator[Ranks]:
    """A group of its own for each test."""
    ranks = Ranks(WORLD)
    yield ranks
    ranks.close()


def tidily(rank: int, watched: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """What a rank saw. Models are gone before their group is: a wrapper of PyTorch's that outlives it now and then
    aborts the process as it exits."""
    try:
        return watched(rank, *given)
    finally:
        gc.collect()


def alike_or_not(rank: int, differ: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = stack(sdpa(is_causal=True), depth=1 + (rank if differ else 1))
    wrapped = model if differ else DistributedDataParallel(model)
    with lh.watch(wrapped, counterfactual=True) as w:
        wrapped(batch(seed=rank)).sum().backward()
        found["own"] = w.last
        try:
            found["together"] = w.gather()
        except lh.LevelheadError as error:
            found["error"] = str(error)
        if not differ:
            with lh.watch(stack(sdpa(), depth=2)) as idle:
                if rank == 0:
                    idle.model(batch())
                found["one idle"] = idle.gather()
                found["none split"] = said(idle.gather, heads="split")
            stage = stack(sdpa(), depth=1)
            with torch.no_grad():
                stage.blocks[0].attn.q_proj.weight += rank  # the same names and sizes, other layers
            with lh.watch(stage) as w:
                stage(batch())
                found["collision"] = said(w.gather)
                found["other options"] = said(w.gather, parts=("pipeline", "replicas")[rank])
                found["stages"] = w.gather(parts="pipeline")
                found["own stage"] = w.last
                found["bad on one"] = said(w.gather, heads=("same", "both")[rank])
            found["live"] = live(rank)
    return found | uneven(rank) if differ else found


def uneven(rank: int) -> dict[str, Any]:
    """One model, whose second layer has no pass on rank 0; then a rank that measures other steps."""
    found: dict[str, Any] = {}
    model = stack(sdpa(), depth=2)
    if rank == 0:
        model.blocks[1].forward = lambda x: x
    with lh.watch(model, gather=True) as w:
        model(batch())
        w.step()
        found["skipping"] = w.last
    with lh.watch(model, gather="split") as w:
        model(batch())
        found["skipping split"] = said(w.step)
    with lh.watch(model, gather=True, every=2 + rank) as w:
        model(batch())
        found["every"] = said(w.step)
    return found


def resumed_by_one(rank: int, file: str) -> dict[str, Any]:
    """Rank 0 wrote a file; then it alone has it. It would not measure the first step, the other would."""
    model, every = stack(sdpa(), depth=1), 2
    with lh.watch(model, gather=True, sinks=[lh.sinks.JSONL(file)]) as w:
        for _ in range(3):
            model(batch())
            w.step()
    resume = file if rank == 0 else f"{file}.elsewhere"
    found = {}
    with lh.watch(model, gather=True, resume=resume, every=every) as w:
        found["steps"] = said(w.step)
    with lh.watch(model, gather=True, resume=resume, every=every) as w:
        found["start"] = said(partial(w.start_at, 3))
    with lh.watch(model, gather=True, resume=file, every=every) as w:
        w.start_at(3)
        for _ in range(3):
            model(batch())
            w.step()
        found["all have it"] = [snapshot.step for snapshot in w.run().snapshots]
    return found


class Full:
    """A sink whose disk is full from one step on."""

    def __init__(self, step: int, log: bool = False) -> None:
        self.step, self.has_log, self.taken = step, log, list[int]()

    def __call__(self, snapshot: Snapshot) -> None:
        if not self.has_log and snapshot.step == self.step:
            raise OSError(28, "No space left on device")
        self.taken.append(snapshot.step)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        if self.has_log and step == self.step:
            raise OSError(28, "No space left on device")


def with_a_full_disk(rank: int, log: bool, every: int, last: int, raises: bool = False) -> dict[str, Any]:
    """Steps until one raises, and the step after it; rank 0 has what the sinks took."""
    model, disk, other = stack(sdpa(scale=1.0), depth=1), Full(0 if raises else 2, log), list[Snapshot]()
    found: dict[str, Any] = {"errors": {}, "end": ""}
    on_finding = [lambda finding: (_ for _ in ()).throw(KeyError(str(finding)))] if raises else None
    sinks, steps = [disk, other.append], range(last + 1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            with lh.watch(model, gather=True, every=every, sinks=sinks, on_finding=on_finding) as w:
                for step in steps:
                    model(batch(seed=rank))
                    began = time.perf_counter()
                    try:
                        w.step(loss=1.0)
                    except lh.LevelheadError as error:
                        found["errors"][step] = str(error)
                        found["cause"] = repr(error.__cause__)
                    found["seconds"] = time.perf_counter() - began
        except (KeyError, lh.LevelheadError) as error:
            found["end"] = f"{type(error).__name__}: {error}"
    found["warned"] = [str(x.message) for x in warned if "a sink failed" in str(x.message)]
    return found | {"taken": disk.taken, "other": [snapshot.step for snapshot in other]}


def mail_server_is_down(rank: int) -> dict[str, Any]:
    """A function of a finding raises on rank 0 alone, which catches it."""
    model, kept = stack(sdpa(scale=1.0), depth=1), list[Snapshot]()

    def mail(finding: Any) -> None:
        if rank == 0:
            raise OSError("mail server")

    found: dict[str, Any] = {"errors": []}
    with lh.watch(model, gather=True, on_finding=mail, sinks=[kept.append]) as w:
        for step in range(3):
            model(batch(seed=rank))
            try:
                w.step(loss=1.0)
            except OSError:
                found["errors"].append(step)
    steps = [(s.step, int(s.records[0].heads.rows[0])) for s in w.run().snapshots]
    return found | {"steps": steps, "kept": [s.step for s in kept]}


def live(rank: int) -> dict[str, Any]:
    """A watch that gathers in every step: rank 1 runs no pass in the first, and nobody in the last."""
    model, told, sunk = stack(sdpa(scale=1.0), depth=1), [], []
    options: dict[str, Any] = {"on_finding": [told.append, "warn"], "sinks": [sunk.append]}
    with lh.watch(model, gather=True, **options) as w, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(3):
            if step == 1 or (step == 0 and rank == 0):
                model(batch(seed=rank))
            w.step(loss=1.0)
    kept = [(s.step, int(s.records[0].heads.rows[0])) for s in w.run().snapshots]
    words = [str(x.message) for x in warned if "levelhead" in str(x.message)]
    with lh.watch(model, gather="pipeline") as w:
        model(batch())
        w.step()
    stages = [record.module for record in w.last.records]
    return {"told": told, "sunk": len(sunk), "kept": kept, "warned": words, "stages": stages}


def said(gather: Callable[..., Any], **options: Any) -> str:
    """The error that a rank raises: all of them do, and none waits."""
    try:
        return f"no error: {gather(**options)}"
    except lh.LevelheadError as error:
        return str(error)


def test_ranks_add_up_to_what_one_process_would_have_seen(two: Ranks) -> None:
    first, second = two.run(tidily, alike_or_not, False)
    assert [r.module for r in first["own"].records] == ["blocks.0.attn", "blocks.1.attn"]
    merged: Snapshot = first["own"].merged(second["own"])
    for found in (first["together"], second["together"]):
        for record in found.records:
            np.testing.assert_array_equal(record.tally, merged[record.module].tally)
            assert (record.heads.rows == WORLD * BATCH * TOKENS).all()
            for rule, wanted in merged[record.module].counterfactual.items():
                np.testing.assert_array_equal(record.counterfactual[rule], wanted)
    model = stack(sdpa(is_causal=True))
    with lh.watch(model) as w:
        model(torch.cat([batch(seed=rank) for rank in range(WORLD)]))
    for record in w.last.records:
        given = first["together"][record.module].heads
        for name in ("max_logit", "mean_entropy", "mean_logsumexp", "gradient", "saturated"):
            wanted = getattr(record.heads, name)
            np.testing.assert_allclose(getattr(given, name), wanted, rtol=1e-5, atol=1e-6)
    assert [x["live"]["sunk"] for x in (first, second)] == [2, 0]
    assert [len(x["live"]["warned"]) for x in (first, second)] == [1, 0]
    assert first["live"]["warned"][0].startswith("levelhead on rank 0: warning: wrong scale")
    assert (first["one idle"].records[0].heads.rows == BATCH * TOKENS).all()
    assert (second["one idle"].records[0].heads.rows == BATCH * TOKENS).all()
    for found in (first, second):
        assert "heads of every rank, got none on rank 1" in found["none split"]
        assert "blocks.0.attn" in found["collision"] and "parts='pipeline'" in found["collision"]
        assert "the same options everywhere" in found["other options"]
        assert "heads: expected 'same' or 'split', got 'both'" in found["bad on one"]
        assert found["live"]["told"] == first["live"]["told"] != []  # a rank that stops does not stop alone
        assert found["live"]["kept"] == [(0, BATCH * TOKENS), (1, WORLD * BATCH * TOKENS)]
        assert found["live"]["stages"] == ["stage0.blocks.0.attn", "stage1.blocks.0.attn"]
        assert [r.module for r in found["stages"].records] == ["stage0.blocks.0.attn", "stage1.blocks.0.attn"]
        for stage, record in zip((first, second), found["stages"].records, strict=True):
            np.testing.assert_array_equal(record.tally, stage["own stage"].records[0].tally)


def test_ranks_with_different_models_are_refused_on_every_rank(two: Ranks) -> None:
    for found in two.run(tidily, alike_or_not, True):
        wanted = "the same modules everywhere, got in 'blocks.1.attn' nothing on rank 0, 4 heads of width"
        assert wanted in found["error"] and found["error"].startswith("ranks: ")
        assert "every: expected the same" in found["every"] and "got 2 on rank 0, 3 on rank 1" in found["every"]
        assert [r.module for r in found["skipping"].records] == ["blocks.0.attn", "blocks.1.attn"]
        assert [int(r.heads.rows[0]) // (BATCH * TOKENS) for r in found["skipping"].records] == [2, 1]
        assert "in 'blocks.1.attn' nothing on rank 0" in found["skipping split"]


def test_a_history_that_some_ranks_lack_is_refused_on_every_rank(two: Ranks, tmp_path: Path) -> None:
    for found in two.run(tidily, resumed_by_one, str(tmp_path / "run.jsonl")):
        for way in ("steps", "start"):
            assert "resume: expected the same step after as many resumed ones on every rank" in found[way]
            assert "got step 3 after 3 on rank 0, step 0 after 0 on rank 1" in found[way]
        assert found["all have it"] == [0, 1, 2, 4]


@pytest.fixture
def impatient() -> Iterator[Ranks]:
    ranks = Ranks(WORLD, timeout=20.0)
    yield ranks
    ranks.close()


FULL = "on rank 0 OSError of Full in step 2: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("log", "every", "raised_in"),
    [(False, 1, 3), (True, 1, 2), (False, 2, 4)],
    ids=["a snapshot", "a number", "every second step"],
)
def test_a_sink_that_fails_on_one_rank_ends_all(impatient: Ranks, log: bool, every: int, raised_in: int) -> None:
    """In the next step that is gathered, and none waits. Who goes on after it has equal steps on all ranks, and the
    other sinks have every one."""
    first, second = impatient.run(tidily, with_a_full_disk, log, every, raised_in + every)
    for found in (first, second):
        assert list(found["errors"]) == [raised_in] and found["seconds"] < 10 and found["end"] == ""
        assert found["errors"][raised_in].startswith(f"sinks: expected all to take every step, got {FULL}. ")
    assert "OSError(28" in first["cause"] and second["cause"] == "None"
    assert len(first["warned"]) == 1 and FULL in first["warned"][0] and second["warned"] == []
    assert first["other"] == list(range(0, raised_in + every + 1, every))
    assert second["other"] == second["taken"] == []


def test_a_sink_that_fails_in_the_last_step_is_raised_by_its_rank(impatient: Ranks) -> None:
    first, second = impatient.run(tidily, with_a_full_disk, False, 1, 2)
    assert first["errors"] == second["errors"] == {} and FULL in first["end"] and second["end"] == ""
    for rank, found in enumerate(impatient.run(tidily, with_a_full_disk, False, 1, 2, True)):
        assert found["end"].startswith("KeyError: ")  # all ranks raise it; the sink's is not to hide it
        assert len(found["warned"]) == (rank == 0)


def test_a_function_that_raises_on_one_rank_and_is_caught_harms_none(impatient: Ranks) -> None:
    first, second = impatient.run(tidily, mail_server_is_down)
    assert first["errors"] == [0] and second["errors"] == []
    assert first["steps"] == second["steps"] == [(step, WORLD * BATCH * TOKENS) for step in range(3)]
    assert first["kept"] == [0, 1, 2] and second["kept"] == []


def test_a_rank_that_waits_for_one_that_has_ended_names_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    answers = {"is_initialized": True, "get_world_size": 2, "get_rank": 0}
    for name, answer in answers.items():
        monkeypatch.setattr(dist, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(dist, "all_gather_object", closed)
    wanted = "in the gathering of step 3, got on rank 0, .*Connection closed by peer. Another rank has ended"
    with pytest.raises(lh.LevelheadError, match=wanted):
        gathered(Snapshot(3, ()))


# ---- one model over ranks, by its tokens or by its heads


LONG = 37  # tokens of one sequence; need not divide


def in_each_way(rank: int) -> dict[str, Any]:
    """The same model over two ranks, in each way; and what `gather` makes of it."""
    found: dict[str, Any] = {}
    split = Split.zigzag(LONG, WORLD)
    for plan in ("all-gather", "ring", "ulysses"):
        model = stack(by_tokens(plan, split), kv_heads=2)
        with lh.watch(model, counterfactual=True, gradients=True) as w:
            model(split.shard(batch(tokens=LONG), rank)).square().sum().backward()
            found[plan] = w.gather()
    # One layer: a rank's gradient of the layer below would have its own keys' part only.
    model = stack(by_tokens("decode", split), depth=1, kv_heads=2)
    with lh.watch(model, gradients=True) as w:
        model(batch(tokens=LONG)).square().sum().backward()
        found["decode"] = w.gather()
    model = stack(by_heads(rank))
    with lh.watch(model, counterfactual=True) as w:
        model(batch(tokens=LONG))
        found["heads"] = w.gather(heads="split")
    return found


def by_tokens(plan: str, split: Split) -> Attend:
    """Attention over all tokens, of which each rank has some; in decode, some keys."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if plan == "decode":
            k, v = (split.shard(x, dist.get_rank()) for x in (k, v))
        return lh.distributed.attention(q, k, v, plan=plan, split=split, causal=True)

    return attend


def by_heads(rank: int) -> Attend:
    """Each rank computes half of the heads."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mine = (x.chunk(WORLD, 1)[rank] for x in (q, k, v))
        own = functional.scaled_dot_product_attention(*mine, is_causal=True)
        parts = [torch.empty_like(own) for _ in range(WORLD)]
        dist.all_gather(parts, own.detach().contiguous())
        return torch.cat(parts, 1)

    return attend


def in_one_process(*, learns: bool, **options: Any) -> Snapshot:
    model = stack(sdpa(is_causal=True, enable_gqa=True), **options)
    with lh.watch(model, counterfactual=True, gradients=learns) as w:
        model(batch(tokens=LONG)).square().sum().backward()
    return w.last


def test_tokens_and_heads_over_ranks_report_the_heads_of_one_process(two: Ranks) -> None:
    by_rank = two.run(tidily, in_each_way)
    learning = in_one_process(learns=True, kv_heads=2)
    others = {"decode": in_one_process(learns=True, depth=1, kv_heads=2)}
    others["heads"] = in_one_process(learns=False)
    for found in by_rank:
        for way, given in found.items():
            one = others.get(way, learning)
            assert [r.module for r in given.records] == [r.module for r in one.records]
            for record in given.records:
                alike(record, one[record.module], way)


def alike(given: Record, one: Record, way: str) -> None:
    """The same statistics of the same heads, wherever their rows were."""
    for name, wanted in asdict(one.heads).items():
        value = getattr(given.heads, name)
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5, err_msg=f"{way}: {name}")
    for rule, found in given.counterfactual.items():
        entropies = [tally.read(x).mean_entropy for x in (found, one.counterfactual[rule])]
        np.testing.assert_allclose(*entropies, rtol=1e-4, atol=1e-5)
    # A rank with some of the heads does not have the model's width, which 1/√d needs.
    unknown = {"heads": {"1/sqrt(d)"}, "decode": set(one.counterfactual)}.get(way, set())
    assert set(given.counterfactual) == set(one.counterfactual) - unknown
    for name in ("queries", "keys", "kv_heads", "d_k", "causal"):
        assert getattr(given.facts, name) == getattr(one.facts, name), (way, name)


def test_heads_are_the_same_or_split() -> None:
    model = stack(sdpa())
    with lh.watch(model) as w:
        model(batch())
    with pytest.raises(lh.LevelheadError, match="'same' or 'split'"):
        w.gather(heads="both")


def test_stages_with_names_of_their_own_are_put_together() -> None:
    model = stack(sdpa())
    with lh.watch(model) as w:
        model(batch())
    first, second = (Given(Snapshot(3, (record,)), "same", None, None) for record in w.last.records)
    assert [r.module for r in joined([first, second]).records] == ["blocks.0.attn", "blocks.1.attn"]
    assert joined([Given(Snapshot(3, ()), "same", None, 1.0)] * 2) == Snapshot(3, ())
    alike = [Given(w.last, "same", None, x) for x in (1.0, 1.0)]
    assert (joined(alike).records[0].heads.rows == 2 * BATCH * TOKENS).all()
    drifted = [Given(w.last, "same", "replicas", x) for x in (1.0, 2.0)]
    assert (joined(drifted).records[0].heads.rows == 2 * BATCH * TOKENS).all()
    assert fingerprint(model) == fingerprint(stack(sdpa())) != fingerprint(stack(sdpa(), depth=1))


@pytest.mark.parametrize("kind", [lh.sinks.JSONL, partial(lh.sinks.Parquet, flush_every=2)])
def test_a_file_of_two_ranks_reads_back_by_step(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack(sdpa(), depth=1)
    sinks = []
    for rank in range(2):
        monkeypatch.setattr("levelhead.runs.sessions.rank", lambda rank=rank: rank)
        sinks.append(kind(tmp_path / "run.jsonl"))
    with lh.watch(model) as w:
        model(batch())
    for step in range(3):
        for rank in (1, 0):
            sinks[rank](Snapshot(step, w.last.records))
            sinks[rank].log(step, {"loss": 1.0 + rank})
    for sink in sinks:
        getattr(sink, "flush", lambda: None)()  # lines of JSON are there at once
    run = lh.sinks.read(tmp_path / "run.jsonl")
    assert [snapshot.step for snapshot in run.snapshots] == [0, 1, 2]
    assert all((s.records[0].heads.rows == 2 * BATCH * TOKENS).all() for s in run.snapshots)
    assert run.logged["loss"] == ((0, 1.0), (1, 1.0), (2, 1.0)) and "2 ranks" in run.notes[0]
    pruned = Snapshot(3, (Record("blocks.0.attn", w.last.records[0].facts, tally.nothing(2)),))
    sinks[1](pruned)
    sinks[1].close()
    with pytest.raises(lh.LevelheadError, match="the same modules on every rank of a file"):
        lh.sinks.read(tmp_path / "run.jsonl")


def test_merging_with_nothing_changes_nothing() -> None:
    model = stack(sdpa())
    with lh.watch(model) as w:
        model(batch())
    (own, _) = w.last.records
    nothing = tally.nothing(len(own.tally))
    np.testing.assert_array_equal(tally.merge(own.tally, nothing), own.tally)
    np.testing.assert_array_equal(tally.merge(nothing, own.tally), own.tally)


def test_without_a_group_there_is_a_clear_error() -> None:
    model = stack(sdpa())
    with lh.watch(model) as w:
        model(batch())
    with pytest.raises(lh.LevelheadError, match="torch.distributed"):
        w.gather()

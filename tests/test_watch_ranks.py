"""Several processes that train one model: each watches its own part, and `gather` adds up."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.nn.parallel import DistributedDataParallel

import levelhead as lh
from levelhead.health import tally
from levelhead.health.record import Snapshot
from watched import BATCH, TOKENS, batch, sdpa, stack

WORLD = 2


def work(rank: int, directory: str, differ: bool) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{directory}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD)
    found: dict[str, Any] = {}
    try:
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
    finally:
        dist.destroy_process_group()
    Path(directory, f"{rank}.pickle").write_bytes(pickle.dumps(found))


def run(directory: Path, *, differ: bool) -> list[dict[str, Any]]:
    processes.spawn(work, (str(directory), differ), nprocs=WORLD)
    return [pickle.loads(Path(directory, f"{r}.pickle").read_bytes()) for r in range(WORLD)]


def test_ranks_add_up_to_what_one_process_would_have_seen(tmp_path: Path) -> None:
    first, second = run(tmp_path, differ=False)
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
    assert (first["one idle"].records[0].heads.rows == BATCH * TOKENS).all()
    assert second["one idle"].records == ()


def test_ranks_with_different_models_are_refused_on_every_rank(tmp_path: Path) -> None:
    for found in run(tmp_path, differ=True):
        assert found["error"].startswith("ranks: expected the same modules everywhere, got 4 heads")


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

"""Limits: the error does not grow with the number of shards, the ring's memory does not grow with the other shards, the
number of messages is logarithmic in the number of ranks. Also `Split`, `Trace` and groups of some ranks.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import levelhead as lh
from levelhead import reference
from levelhead.cluster.traffic import rounds
from levelhead.distributed import Split, Trace, local
from levelhead.distributed.wire import Wire
from ranks import Ranks
from sharded import group_of, numpy
from support import check_output, magnitude

SHARDS = (1, 2, 3, 4, 5, 8, 11, 16)


# ---- error


def folded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, split: Split) -> torch.Tensor:
    """The output from the states of all shards, joined in rank order."""
    scale = torch.full((q.shape[0],), q.shape[-1] ** -0.5, dtype=torch.float64)
    rows = local.QueryRows(q, ((0, q.shape[-2], 1),), scale, {})
    whole = None
    for rank, runs in enumerate(split.runs):
        block = local.KeyBlock(split.shard(k, rank), split.shard(v, rank), runs)
        seen = local.observe(rows, block)
        whole = seen if whole is None else local.join(whole, seen)
    assert whole is not None
    assert (whole.counts[..., 0] == split.n).all()
    return local.read(whole, rows, None, rows.q.dtype)[0]


def calls(rows: local.QueryRows, block: local.KeyBlock) -> tuple[dict[str, torch.Tensor], int]:
    """The results of a block, forward and backward, and the number of kernel calls."""
    trace = Trace()
    out, logsumexp = local.read(local.observe(rows, block, trace), rows, None, rows.q.dtype)
    found = {name: torch.empty_like(x) for name, x in (("q", rows.q), ("k", block.k), ("v", block.v))}
    found |= {"scale": torch.empty(2, dtype=torch.float64), "sinks": torch.empty(2).double()}
    result = local.OutputGradients(out, logsumexp, torch.ones_like(out), torch.ones_like(logsumexp))
    local.differentiate(rows, block, result, found, trace)
    return found | {"out": out, "logsumexp": logsumexp}, len(trace.events)


def test_a_block_run_by_run_is_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 600, 32, generator=draw, dtype=torch.float64) for _ in range(3))
    runs = Split.zigzag(1200, 2).runs[1]
    scale, sinks = torch.full((2,), 0.2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    rows = local.QueryRows(q, runs, scale, {"causal": True}, sinks=sinks)
    block = local.KeyBlock(k, v, Split.zigzag(1200, 2).runs[0])
    apart, several = calls(rows, block)
    monkeypatch.setattr(local, "LONG", 10**6)
    whole, once = calls(rows, block)
    assert (several, once) == (4, 2)
    for name, x in whole.items():
        np.testing.assert_allclose(apart[name], x, rtol=1e-11, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_error_does_not_grow_with_the_number_of_shards(kind: str, dtype: str) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, n, 64, generator=draw, dtype=torch.float64).to(getattr(torch, dtype)) for n in (40, 2000, 2000)
    )
    truth = reference.observe(*(numpy(x) for x in (q, k, v)))
    errors = []
    for shards in SHARDS:
        out = numpy(folded(q, k, v, getattr(Split, kind)(2000, shards)))
        check_output(out, truth.output, magnitude(numpy(v)), M=magnitude(truth.rows.max))
        errors.append(np.sqrt(np.mean((out.astype(np.float64) - truth.output) ** 2)))
    assert max(errors) <= 1.5 * errors[0], dict(zip(SHARDS, errors, strict=True))


def test_a_shared_maximum_has_the_lowest_position() -> None:
    """Equal logits in every shard, in any order of shards."""
    q, k = torch.ones(1, 3, 4), torch.ones(1, 12, 4)
    scale = torch.ones(1, dtype=torch.float64)
    rows = local.QueryRows(q, ((0, 3, 1),), scale, {})
    split = Split((((4, 4, 1),), ((0, 2, 1), (8, 4, 1)), ((2, 2, 1),)))
    states = [
        local.observe(rows, local.KeyBlock(split.shard(k, r), split.shard(k, r), split.runs[r])) for r in range(3)
    ]
    whole = local.join(local.join(states[0], states[1]), states[2])
    assert (whole.counts == [[12, 0]]).all()


# ---- memory


def peak(rank: int, plan: str, n: int) -> tuple[int, int]:
    """Bytes that a call needed beyond those in use before, and those of a shard."""
    world = dist.get_world_size()
    split = Split.contiguous(n, world)
    k, v = (torch.zeros(1, split.lengths[rank], 64) for _ in range(2))
    q = torch.zeros(1, 32, 64)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now the memory in use
    before = _held("VmRSS")
    lh.distributed.attention(q, k, v, plan=plan, split=(None, split))
    return _held("VmHWM") - before, 2 * k.numel() * 4


def _held(what: str) -> int:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_memory_of_the_ring_is_that_of_a_few_shards() -> None:
    """Two buffers and one block packed by the kernel: three shards, and little else. All-gather, which has all keys at
    once, shows that the measurement works."""
    n, spare = 131_072, 4 << 20
    needed: dict[int, int] = {}
    for world in (2, 4):
        ranks = Ranks(world)
        try:
            for plan in ("ring", "all-gather"):
                ranks.run(peak, plan, 4096)  # memory that is allocated once
                found = ranks.run(peak, plan, n)
                most, shard = max(x for x, _ in found), found[0][1]
                if plan == "ring":
                    assert most <= 3.5 * shard + spare
                    needed[world] = most
                else:
                    assert most >= world * shard
        finally:
            ranks.close()
    assert needed[4] <= 0.5 * needed[2] + spare


# ---- splits


KINDS = st.sampled_from(["contiguous", "zigzag", "striped", "balanced", "blocks"])


@given(KINDS, st.integers(0, 60), st.integers(1, 9), st.integers(2, 7))
def test_a_split_is_undone(kind: str, n: int, world: int, block: int) -> None:
    split = Split.striped(n, world, block) if kind == "blocks" else getattr(Split, kind)(n, world)
    held = np.concatenate([split.positions(rank) for rank in range(world)])
    assert sorted(held.tolist()) == list(range(n))
    assert split.lengths == tuple(len(split.positions(rank)) for rank in range(world))
    for x in (torch.arange(2 * n).reshape(2, n), np.arange(2 * n).reshape(2, n)):
        parts = [split.shard(x, rank, -1) for rank in range(world)]
        for rank, part in enumerate(parts):
            assert part[0].tolist() == split.positions(rank).tolist()
        assert (split.unshard(parts, -1) == x).all()


def test_zigzag_and_stripes_balance_a_causal_mask() -> None:
    n, world = 1000, 4

    def work(split: Split) -> Any:
        return np.array([(split.positions(rank) + 1).sum() for rank in range(world)])

    for split in (Split.zigzag(n, world), Split.striped(n, world), Split.balanced(n, world)):
        assert work(split).max() <= 1.01 * work(split).min()
    assert work(Split.contiguous(n, world)).max() > 6 * work(Split.contiguous(n, world)).min()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Split((((0, 2, 1),), ((3, 2, 1),))), "got no rank with 2"),
        (lambda: Split((((0, 3, 1),), ((2, 1, 1),))), r"position 2 on ranks \[0, 1\]"),
        (lambda: Split((((2, 2, 1), (0, 2, 1)),)), "positions rise"),
        (lambda: Split((((0, 2, 0),),)), "positions rise"),
        (lambda: Split((((0, -1, 1),),)), "positions rise"),
        (lambda: Split(((1, 2),)), "runs"),  # type: ignore[arg-type]
        (lambda: Split.contiguous(-1, 2), "n: expected"),
        (lambda: Split.zigzag(4, 0), "world: expected"),
        (lambda: Split.striped(4, 2, 0), "block: expected"),
        (lambda: Split.contiguous(4, 2).shard(torch.ones(5, 1), 0), "x: expected 4 tokens"),
        (lambda: Split.contiguous(4, 2).unshard([torch.ones(4, 1)]), "parts: expected"),
    ],
)
def test_splits_that_are_none(make: Any, message: str) -> None:
    with pytest.raises(lh.LevelheadError, match=message):
        make()


# ---- without ranks


def test_without_a_group_there_is_a_clear_error() -> None:
    x = torch.ones(1, 2, 3)
    with pytest.raises(lh.LevelheadError, match="init_process_group"):
        lh.distributed.attention(x, x, x)


def traced(rank: int, plan: str) -> tuple[int, int, set[str], set[str]]:
    draw = torch.Generator().manual_seed(rank)
    q, k, v = (torch.randn(2, 64, 8, generator=draw) for _ in range(3))
    q = torch.ones(2, 5, 8) if plan == "decode" else q
    trace = Trace()
    lh.distributed.attention(q, k, v, plan=plan, trace=trace)
    assert all(event.begin <= event.end for event in trace.events)
    assert trace.seconds("compute") > 0
    kinds = {event.kind for event in trace.events}
    return trace.sent, trace.received, kinds, {event.what for event in trace.events}


def test_a_trace_counts_bytes_and_times() -> None:
    ranks = Ranks(2)
    shard = 2 * 2 * 64 * 8 * 4  # keys and values
    moved = {"all-gather": shard, "ring": shard, "ulysses": shard, "decode": 2 * 5 * (8 + 8) * 4}
    try:
        for plan, least in moved.items():
            for sent, received, kinds, what in ranks.run(traced, plan):
                assert kinds == {"compute", "transfer", "wait"}
                assert sent == received
                assert least <= sent <= 1.6 * least + 2000  # `agree` needs a few hundred bytes
                assert any("agreeing" in each for each in what)
    finally:
        ranks.close()


def heard(rank: int) -> list[tuple[list[list[int]], int]]:
    """What this rank receives in a group of every size, and in how many messages."""
    found = []
    for world in range(1, dist.get_world_size() + 1):
        group = group_of(world)
        if rank < world:
            wire, posts = Wire(group, None, None), dist.batch_isend_irecv
            with mock.patch.object(dist, "batch_isend_irecv", side_effect=posts) as counted:
                told = wire.hear(torch.tensor([rank, -(rank**2)]), "the test")
            found.append(([x.tolist() for x in told], counted.call_count))
    return found


SOME = (1, 3, 4)  # of five ranks: within the group they have other numbers


def among_some(rank: int) -> tuple[list[int], list[torch.Tensor]] | None:
    """What ranks receive in a group without rank 0, and the gradients of a ring there."""
    group = dist.new_group(SOME)
    if rank not in SOME:
        return None
    told = Wire(group, None, None).hear(torch.tensor([rank]), "the test")
    draw = torch.Generator().manual_seed(0)
    split, place = Split.zigzag(50, len(SOME)), SOME.index(rank)
    whole = [torch.randn(2, 50, 8, generator=draw) for _ in range(3)]
    parts = [split.shard(x, place).clone().requires_grad_() for x in whole]
    lh.distributed.attention(*parts, group=group, plan="ring", split=split).square().sum().backward()
    alone = [x.requires_grad_() for x in whole]
    lh.attention(*alone).square().sum().backward()
    gaps = [part.grad - split.shard(x.grad, place) for part, x in zip(parts, alone, strict=True)]
    return [int(x) for x in told], gaps


def test_a_group_of_some_ranks_talks_among_itself() -> None:
    ranks = Ranks(5)
    try:
        found = ranks.run(among_some)
    finally:
        ranks.close()
    assert [rank for rank, each in enumerate(found) if each is not None] == list(SOME)
    for told, gaps in (found[rank] for rank in SOME):
        assert told == list(SOME)
        assert all(gap.abs().max() < 1e-5 for gap in gaps)


def test_everybody_hears_everybody_in_a_logarithm_of_messages() -> None:
    ranks = Ranks(5)
    try:
        for rank, found in enumerate(ranks.run(heard)):
            for world, (told, messages) in enumerate(found, start=rank + 1):
                assert told == [[other, -(other**2)] for other in range(world)]
                assert messages == math.ceil(math.log2(world)) == rounds(world)
    finally:
        ranks.close()

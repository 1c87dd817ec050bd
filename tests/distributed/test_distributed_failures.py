"""Failures: a mistake on one rank is an error on every rank that names it, and a rank that dies is an error on the
others; a new group works afterwards. No case may hang or return a wrong result.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import levelhead as lh
from levelhead.distributed import Split, gathered, local
from ranks import Failure, Ranks, free_port, meet
from sharded import PLANS, Case, alone, compute, numpy, together

WORLD, N = 3, 30
PATIENCE = 6.0  # seconds; the time limit of calls in which a rank dies


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(WORLD)
    yield made
    made.close()


def mistaken(rank: int, plan: str, mistake: str) -> Any:
    """A call in which rank 1 does something else than the others."""
    wrong = rank == 1
    split = Split.contiguous(N, WORLD)
    draw = torch.Generator().manual_seed(0)
    everything = [torch.randn(2, heads, N, 8, generator=draw) for heads in (6, 3, 3)]
    if mistake == "width" and wrong:
        everything = [x[..., :4] for x in everything]
    if mistake == "dtype" and wrong:
        everything = [x.double() for x in everything]
    if mistake == "batch" and wrong:
        everything = [x[:1] for x in everything]
    q, k, v = (split.shard(x, rank).clone() for x in everything)
    q = everything[0].clone() if plan == "decode" else q
    options: dict[str, Any] = {"plan": plan, "split": split, "causal": True}
    starts = {"missing shard": (0, 9, 20), "given twice": (0, 0, 20), "wrong order": (0, 20, 20)}
    if mistake in starts:
        options["split"] = (None, [(starts[mistake][rank], 10, 1)])
    options |= {
        "scale": {"scale": 0.3 if wrong else 0.25},
        "causal": {"causal": not wrong},
        "window": {"window": (3 + wrong, None)},
        "seed": {"dropout": 0.1, "seed": 3 + wrong},
        "sinks": {"sinks": torch.full((6,), float(wrong))},
        "alibi": {"alibi": True} if wrong else {},
        "plan": {"plan": ("ring" if plan != "ring" else "all-gather") if wrong else plan},
        "split": {"split": (None, Split.zigzag(N, WORLD) if wrong else split)},
        "swapped": {"split": (None, Split((split.runs[1], split.runs[0], split.runs[2])) if wrong else split)},
        "mask": {"mask": torch.ones(q.shape[-2], N, dtype=torch.bool)} if wrong else {},
        "key_lengths": {"key_lengths": [N, 4 + wrong]},
        "softcap": {"softcap": -1.0 if wrong else 2.0},
        "threads": {"threads": 0} if wrong else {},
    }.get(mistake, {})
    if mistake == "short shard" and wrong:
        k, v = k[..., :-1, :], v[..., :-1, :]
    if mistake == "gradients" and wrong:
        k.requires_grad_()
    call = lh.distributed.observe if mistake == "function" and wrong else lh.distributed.attention
    found = call(q, k, v, **options)
    return found if isinstance(found, torch.Tensor) else found.output


# The error on the other ranks; rank 1 may raise another one where only it knows the cause.
MISTAKES = {
    "width": "width of keys: expected the same on every rank, got 8 on ranks [0, 2], 4 on ranks",
    "dtype": "dtype: expected the same on every rank, got one on ranks [0, 2], another on ranks [1",
    "batch": "batch: expected the same on every rank",
    "scale": "scale: expected the same on every rank, got one on ranks [0, 2], another on ranks [1",
    "causal": "causal: expected the same on every rank",
    "window": "window: expected the same on every rank",
    "seed": "seed: expected the same on every rank",
    "sinks": "sinks: expected the same on every rank",
    "alibi": "alibi: expected the same on every rank",
    "plan": "plan: expected the same on every rank, got one on ranks [0, 2], another on ranks [1]",
    "split": "split: expected the same on every rank",
    "swapped": "split: expected the same on every rank",
    "mask": "mask: expected the same on every rank",
    "key_lengths": "key_lengths: expected the same on every rank",
    "gradients": "requires_grad: expected the same on every rank",
    "function": "step: expected the same on every rank",
    "softcap": "arguments: expected no complaint on any rank, got an error on ranks [1]",
    "threads": "arguments: expected no complaint on any rank, got an error on ranks [1]",
    "short shard": "split: expected 10 keys on rank 1, as the split says, got 9",
    "missing shard": "split: expected every position 0 … 29 on one rank",
    "given twice": "got position 0 on ranks [0, 1]",
    "wrong order": "got no rank with 10",
}


# One value, as two ranks may write it.
SPELLINGS: dict[str, list[Any]] = {
    "integers": [torch.tensor([8, 5]), torch.tensor([8, 5], dtype=torch.int32), np.array([8, 5], np.uint8)],
    "sequences": [[8, 5], (8, 5), np.array([8, 5])],
    "one for all": [[8, 8], 8, torch.tensor(8)],
}


def spelled(rank: int, name: str, values: list[Any]) -> torch.Tensor:
    x = torch.ones(2, 2, 4, 8)
    return lh.distributed.attention(x, x, x, **{name: values[rank]})


@pytest.mark.parametrize("name", ["key_lengths", "query_lengths", "query_start"])
def test_ranks_agree_on_equal_values_whatever_their_spelling(ranks: Ranks, name: str) -> None:
    for values in SPELLINGS.values():
        assert all(isinstance(x, torch.Tensor) for x in ranks.run(spelled, name, values))
    assert all(isinstance(x, torch.Tensor) for x in ranks.run(spelled, "seed", [3, np.int64(3), torch.tensor(3)]))
    (first, *_) = ranks.failures(spelled, name, [[8, 5], [8, 4], [8, 5]])
    assert f"{name}: expected the same on every rank" in first.message
    wrong = ranks.failures(spelled, name, [[8, 5], [1.5, 2.5], [8, 5]])  # refused before any message
    assert f"{name}: expected integers" in wrong[1].message and "error on ranks [1]" in wrong[0].message


@pytest.mark.parametrize("plan", PLANS)
def test_a_mistake_is_an_error_on_every_rank(ranks: Ranks, plan: str) -> None:
    for mistake, message in MISTAKES.items():
        found = ranks.failures(mistaken, plan, mistake)
        for rank, failure in enumerate(found):
            assert "LevelheadError" in failure.kinds, failure.trace
            alone_knows = rank == 1 and mistake in ("softcap", "threads")
            assert (mistake if alone_knows else message) in failure.message, (mistake, failure)
    whole = ranks.run(mistaken, plan, "none")  # and the group is still in step
    assert all(torch.isfinite(x).all() for x in whole)


def test_a_missing_shard_names_the_position(ranks: Ranks) -> None:
    for failure in ranks.failures(mistaken, "ring", "missing shard"):
        assert "got position 9 on ranks [0, 1]" in failure.message


def unlike(rank: int, what: str) -> None:
    """Plan decode, where rank 2 has other queries, or another loss."""
    split = Split.contiguous(N, WORLD)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 8, generator=draw) for n in (2, N, N))
    q = q + (what == "queries" and rank == 2)
    k, v = (split.shard(x, rank).clone().requires_grad_() for x in (k, v))
    out = lh.distributed.attention(q.requires_grad_(), k, v, plan="decode", split=(None, split))
    (out * (2.0 if what == "loss" and rank == 2 else 1.0)).sum().backward()


def test_what_decode_expects_to_be_the_same_is_checked(ranks: Ranks) -> None:
    for what, message in (("queries", "q: expected"), ("loss", "the gradient: expected")):
        for failure in ranks.failures(unlike, what):
            assert message in failure.message
            assert "another on rank 2 than on rank 0" in failure.message
    assert ranks.run(unlike, "nothing") == [None] * WORLD


def uneven(rank: int, H: int, G: int) -> None:
    q, k = (torch.ones(heads, 4, 8) for heads in (H, G))
    lh.distributed.attention(q, k, k, plan="ulysses")


def test_heads_that_do_not_divide(ranks: Ranks) -> None:
    for H, G, named in ((4, 4, "q: "), (6, 2, "k: ")):
        for failure in ranks.failures(uneven, H, G):
            assert failure.message.startswith(named)
            assert f"{H if named == 'q: ' else G} heads" in failure.message
            assert "3 ranks" in failure.message


# ---- keys that went missing inside: a bug, or memory gone wrong


def broken(rank: int, plan: str) -> None:
    """Rank 1 loses the first key of a block on the way to the kernel."""
    module, name = (local, "observe") if plan in ("ring", "decode") else (gathered, "attend")
    right = getattr(module, name)

    def lossy(*given: Any, **more: Any) -> Any:
        blocks = [i for i, x in enumerate(given) if isinstance(x, local.KeyBlock)]
        changed = list(given)
        block = changed[blocks[0]]
        (start, length, stride), *rest = block.runs
        runs = ((start + stride, length - 1, stride), *rest)
        changed[blocks[0]] = local.KeyBlock(block.k[..., 1:, :], block.v[..., 1:, :], runs)
        return right(*changed, **more)

    if rank == 1:
        setattr(module, name, lossy)
    try:
        mistaken(rank, plan, "none")
    finally:
        setattr(module, name, right)


@pytest.mark.parametrize("plan", PLANS)
def test_keys_that_rows_did_not_see_are_noticed(ranks: Ranks, plan: str) -> None:
    found = ranks.failures(broken, plan)
    assert all(failure.message.startswith("keys seen: ") for failure in found)
    told = [failure.message for failure in found if "instead of" in failure.message]
    assert len(told) == (WORLD if plan == "decode" else 1)
    assert all(torch.isfinite(x).all() for x in ranks.run(mistaken, plan, "none"))


def overflowing(rank: int, plan: str) -> Any:
    """Logits beyond float32: hidden in one process, and here."""
    split = Split.contiguous(N, WORLD)
    q, k = (torch.full((3, N, 4), x) for x in (1e30, -1e30))
    k[:, ::2] = 0.0
    mine = [split.shard(x, rank) for x in (q, k, k)]
    mine[0] = q if plan == "decode" else mine[0]
    seen = lh.distributed.observe(*mine, plan=plan, split=split)
    return seen.rows.count, lh.observe(q, k, k).rows.count


@pytest.mark.parametrize("plan", PLANS)
def test_overflow_is_no_missing_key(ranks: Ranks, plan: str) -> None:
    for given, whole in ranks.run(overflowing, plan):
        assert (given == N // 2).all()
        assert (whole == N // 2).all()


# ---- ranks that die


def dying(rank: int, plan: str, phase: str, victim: int) -> None:
    """A call in whose middle one rank is killed: at its second block, or at its only one."""
    case = Case(plan, "causal", "zigzag", dist.get_world_size(), 120)
    name = {"backward": "differentiate", "forward": "observe"}[phase]
    module: ModuleType = local
    if phase == "forward" and plan in ("all-gather", "ulysses"):
        module, name = gathered, "attend"
    right, calls = getattr(module, name), [0]

    def deadly(*given: Any, **more: Any) -> Any:
        calls[0] += 1
        if rank == victim and calls[0] == (2 if plan == "ring" else 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return right(*given, **more)

    setattr(module, name, deadly)
    try:
        arrays, options = case.part(rank)
        more = {"plan": plan, "split": case.splits, "timeout": PATIENCE}
        compute(arrays, options, lh.distributed, **more)
    finally:
        setattr(module, name, right)


def regroup(rank: int, world: int, port: int) -> Any:
    """The remaining ranks form a new group and compute."""
    dist.destroy_process_group()
    meet(rank, world, port)
    case = Case("ring", "causal", "zigzag", world, 50)
    arrays, options = case.part(rank)
    return compute(arrays, options, lh.distributed, plan="ring", split=case.splits)


@pytest.mark.parametrize("plans", [("ring", "all-gather"), ("decode", "ulysses")], ids="+".join)
def test_a_rank_that_dies_is_an_error_for_the_others_and_a_new_group_works(plans: tuple[str, str]) -> None:
    """Five ranks, of which the last is killed four times: twice in the forward pass, twice in the backward pass."""
    ranks = Ranks(5)
    try:
        for plan in plans:
            for phase in ("forward", "backward"):
                victim = ranks.world - 1
                ranks.tell(dying, plan, phase, victim)
                for rank in range(victim):
                    failure = ranks.hear(rank)
                    assert isinstance(failure, Failure), (plan, phase, rank)
                    assert "LostRankError" in failure.kinds, failure.trace
                    assert "LevelheadError" in failure.kinds
                ranks.processes[victim].join(10)
                assert ranks.processes[victim].exitcode == -signal.SIGKILL
                ranks.drop_last()
                port = free_port()
                case = Case("ring", "causal", "zigzag", ranks.world, 50)
                found = together(case, ranks.run(regroup, ranks.world, port))
                one = alone(case)
                np.testing.assert_allclose(numpy(found.out), numpy(one.out), atol=1e-5)
    finally:
        ranks.close()


def late(rank: int, timeout: float) -> None:
    """Rank 1 does not call; the others stop waiting at their time limit."""
    if rank != 1:
        x = torch.ones(1, 4, 8)
        lh.distributed.attention(x, x, x, timeout=timeout)


@pytest.mark.parametrize("world", [2, 5])
def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_told(world: int) -> None:
    ranks = Ranks(world, timeout=600.0)
    try:
        begin = time.monotonic()
        ranks.tell(late, 1.5)
        for rank in {*range(world)} - {1}:
            failure = ranks.hear(rank)
            assert isinstance(failure, Failure)
            assert "LostRankError" in failure.kinds
            others = [other for other in range(world) if other != rank]
            assert f"ranks {others} to take part in agreeing on call 1" in failure.message
        assert time.monotonic() - begin < 60.0  # not the group's own 600
    finally:
        ranks.close()

"""A sequence over several ranks gives the results of one process: every plan, every option, every split, 1 to 4 ranks.
One set of processes serves the whole file.

Where the kernel processes the same tiles, the bits must be the same; elsewhere results must be within the bounds of the
kernel itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import clipped_ranks
import levelhead as lh
from levelhead.distributed import Split
from ranks import Ranks
from sharded import FEATURES, PLANS, SPLITS, Case, Found, alone, numpy, split_of, together, work
from sharded_truth import check, check_gradients
from support import same_bits

WORLDS = (1, 2, 3, 4)
SAME_TILES = ("all-gather", "ulysses")
FEW = 16  # rows; shards with fewer are tiled in another way and have other bits


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(max(WORLDS))
    yield made
    made.close()


def found_by(ranks: Ranks, cases: list[Case]) -> list[Found]:
    """The assembled results of each case, from all ranks."""
    by_rank = ranks.run(work, cases)
    return [together(case, [found[i] for found in by_rank[: case.world]]) for i, case in enumerate(cases)]


def check_bits(case: Case, found: Found) -> None:
    """Bit for bit the results of one process."""
    one = alone(case)
    same_bits(numpy(found.out), numpy(one.out))
    same_bits(numpy(found.plain), numpy(one.out))
    same_bits(numpy(found.logsumexp), numpy(one.logsumexp))
    for name in type(one.rows).__dataclass_fields__:
        same_bits(getattr(found.rows, name), getattr(one.rows, name))
    # All-gather sums the ranks' parts for keys and values; and which keys a row of dq skips depends on the rows
    # in its tile.
    for name in ("q", "k", "v") if case.plan == "ulysses" else ():
        same_bits(numpy(found.gradients[name]), numpy(one.gradients[name]))


def same_tiles(case: Case) -> bool:
    few = any(0 < n <= FEW for n in case.splits[0].lengths)
    return case.plan == "ulysses" or (case.plan == "all-gather" and not few)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("world", WORLDS)
def test_every_option(ranks: Ranks, world: int, plan: str) -> None:
    """Each feature on two splits, of which one has ragged and empty shards."""
    splits = {feature: SPLITS[i % 4] for i, feature in enumerate(FEATURES)}
    cases = [Case(plan, feature, splits[feature], world) for feature in FEATURES]
    cases += [Case(plan, feature, "ragged", world) for feature in FEATURES]
    checked = 0
    for case, found in zip(cases, found_by(ranks, cases), strict=True):
        try:
            check(case, found)
            if same_tiles(case):
                check_bits(case, found)
                checked += 1
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
    assert (checked > 0) == (plan in SAME_TILES)


@pytest.mark.parametrize("plan", PLANS)
def test_every_split(ranks: Ranks, plan: str) -> None:
    features = ("causal", "alibi", "bias", "log-n", "dropout")
    cases = [Case(plan, feature, split, world) for feature in features for split in SPLITS for world in (2, 3)]
    for case, found in zip(cases, found_by(ranks, cases), strict=True):
        check(case, found)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_every_dtype(ranks: Ranks, dtype: str) -> None:
    features = ("causal", "log-n", "row-bias")
    cases = [Case(plan, feature, "zigzag", 3, dtype=dtype) for plan in PLANS for feature in features]
    for case, found in zip(cases, found_by(ranks, cases), strict=True):
        assert found.out.dtype is getattr(torch, dtype)
        assert all(found.gradients[x].dtype is found.out.dtype for x in "qkv")
        check(case, found)


def test_rows_of_the_lowest_numbers_are_uniform(ranks: Ranks) -> None:
    """Their logsumexp has lost the number of keys. The second case has runs long enough to be computed one by one."""
    cases = [Case(plan, "lowest", "zigzag", 2, n) for plan in PLANS for n in (83, 530)]
    for case, found in zip(cases, found_by(ranks, cases), strict=True):
        check_gradients(case, found)


@pytest.mark.parametrize("plan", PLANS)
def test_few_tokens_for_many_ranks(ranks: Ranks, plan: str) -> None:
    """Fewer tokens than ranks, one token, and none at all."""
    cases = [Case(plan, "causal", "contiguous", 4, n) for n in (3, 1, 0)]
    cases += [Case(plan, "sinks", "zigzag", 4, n) for n in (3, 1, 0)]
    for case, found in zip(cases, found_by(ranks, cases), strict=True):
        check(case, found)


@pytest.mark.parametrize("plan", PLANS)
def test_bits_repeat(ranks: Ranks, plan: str) -> None:
    """The same call again has the same bits: every sum has a fixed order."""
    case = Case(plan, "causal", "striped", 4)
    first, second = found_by(ranks, [case, case])
    same_bits(numpy(first.out), numpy(second.out))
    for name, x in first.gradients.items():
        same_bits(numpy(x), numpy(second.gradients[name]))


def regather(rank: int, kind: str, dim: int) -> torch.Tensor:
    """Shards, assembled again."""
    split = split_of(kind, 23, max(WORLDS))
    x = torch.arange(2 * 23 * 3).reshape(2, 23, 3).movedim(1, dim)
    return lh.distributed.gather(split.shard(x, rank, dim), split, dim=dim)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "blocks", "ragged"])
def test_gather_undoes_a_split(ranks: Ranks, kind: str, dim: int) -> None:
    whole = torch.arange(2 * 23 * 3).reshape(2, 23, 3).movedim(1, dim)
    for found in ranks.run(regather, kind, dim):
        assert torch.equal(found, whole)


def flat(rank: int) -> tuple[tuple[int, ...], bool]:
    """One head without its axis, and statistics without values."""
    q, k, v = (torch.randn(n, 8, generator=torch.Generator().manual_seed(n)) for n in (5, 40, 40))
    split = Split.zigzag(40, max(WORLDS))
    mine = [split.shard(x, rank) for x in (k, v)]
    seen = lh.distributed.observe(q, *mine, plan="decode", split=(None, split))
    only = lh.distributed.observe(q, mine[0], plan="decode", split=(None, split))
    whole = lh.observe(q, k, v)
    torch.testing.assert_close(seen.output, whole.output)
    np.testing.assert_allclose(only.rows.entropy, whole.rows.entropy, rtol=1e-5)
    with pytest.raises(lh.LevelheadError, match="statistics only"):
        _ = only.output
    return tuple(seen.output.shape), bool((seen.rows.count == 40).all())


def test_one_head_without_its_axis(ranks: Ranks) -> None:
    assert ranks.run(flat) == [((5, 8), True)] * max(WORLDS)


def test_a_clip_over_both_dimensions_of_a_mesh(ranks: Ranks) -> None:
    """FSDP2 over tensor parallelism writes what one process does; here, since it takes four ranks."""
    wanted, wanted_said = clipped_ranks.alone()
    for found, said in ranks.run(clipped_ranks.both_ways):
        clipped_ranks.same(found, wanted)
        clipped_ranks.same_clips(said, wanted_said)

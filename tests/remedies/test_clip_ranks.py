"""QK-clip over two ranks: shards, replicas, stages and ranks without a pass clip what one process would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import levelhead as lh
from clipped_ranks import (
    HEADS,
    PROJECTIONS,
    TAU,
    WIDTH,
    Attention,
    ByHand,
    Grouped,
    Joint,
    alone,
    batch,
    by_hand,
    compared,
    fsdp,
    keys_on_every_rank,
    latent,
    made,
    mesh,
    same,
    same_clips,
    sharded,
    split,
    tensor_parallel,
    trained,
    weights,
)
from levelhead.remedies import QKClip, qk_norm
from levelhead.remedies.agreed import Processes
from ranks import Ranks

# ---- what ranks do; each returns its weights, and what its clips said


def replicas(rank: int) -> Any:
    model = made()
    wrapped = nn.parallel.DistributedDataParallel(model)
    said = trained(model, [[batch(rank)]] * 2, wrapped=wrapped)
    return weights(model), compared(said)


def one_without_a_pass(rank: int) -> Any:
    model = made()
    found = []
    with QKClip(model, TAU) as clip:
        for _ in range(2):
            if rank == 0:
                model(batch(1))
            found.append(clip())
        found.append(clip())  # nobody
    return weights(model), compared(found), [str(x) for x in found]


def stages(rank: int, parts: str | None, seed: int) -> Any:
    """Equal names, other layers: on rank 1 logits are large."""
    model = made(seed=seed * rank)
    with torch.no_grad():
        before = weights(model)
        for parameter in model.parameters():
            parameter.mul_(1.0 if rank else 0.2)
    low = weights(model)
    with QKClip(model, TAU, parts=parts) as clip:
        model(batch(1))
        if seed == 0:  # equal until the first update
            with torch.no_grad():
                model[0].q_proj.weight += rank * 1e-3
        said = clip()
    return low, weights(model), compared([said]), before


def pipelined(rank: int) -> Any:
    """A stage of torch's pipelining: its first pass learns shapes, over memory that nothing was written to."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(0)
    stage = nn.ModuleList([Attention(), Attention()])[rank]
    schedule = ScheduleGPipe(PipelineStage(stage, rank, 2, torch.device("cpu")), 2, loss_fn=lambda out, _: out.sum())
    passes: list[bool] = []
    stage.register_forward_pre_hook(lambda module, given: passes.append(bool(given[0].isnan().any())))
    torch.use_deterministic_algorithms(True)  # fills such memory with NaN
    try:
        with lh.watch(stage, rows=None, gradients=True) as watch, QKClip(watch, 100.0, parts="pipeline") as clip:
            x = batch(0).float()
            schedule.step(x) if rank == 0 else schedule.step(target=x, losses=[])
            said = clip()
            steps = len(watch.run().snapshots)
    finally:
        torch.use_deterministic_algorithms(False)
    return passes, said.largest, steps


def prepared_by_a_batch(rank: int) -> Any:
    """What kinds of weights an optimiser would get after `batch=`, and after a check."""
    model = made()
    sharded(model, list(model)[:1], mesh(2))  # the root has the second block itself
    with QKClip(model, 1e3, batch=batch(rank)) as clip:
        kinds = {type(x).__name__ for x in model.parameters()}
        clip.verify(batch(rank))
        return kinds | {type(x).__name__ for x in model.parameters()}


def normed_over_heads(rank: int) -> Any:
    """`qk_norm` before a tensor parallel plan that has the gains, and in one process."""
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    found = []
    for plan in (False, True):
        model = made(layers=1)
        qk_norm(model, batch(0))
        if plan:
            split(model, mesh(2), PROJECTIONS, "out")
            norms = {name: SequenceParallel(sequence_dim=2) for name in ("q_norm", "k_norm")}
            parallelize_module(model[0], mesh(2), norms)
        found.append(model(batch(0)).detach().numpy())
    return found


def refused(rank: int, what: str) -> str:
    """Every rank raises, and none waits for another."""
    try:
        if what == "stages":
            stages(rank, None, 1)
        elif what == "norm on one":
            model = made()
            if rank:
                qk_norm(model, batch(0))
            with QKClip(model, TAU) as clip:
                model(batch(0))
                clip()
        elif what == "nan on one":
            model = made()
            with QKClip(model, TAU) as clip:
                model(batch(0) * (float("nan") if rank else 1.0))
                clip()
        elif what == "frozen on one":
            model = made()
            model[0].q_proj.requires_grad_(rank == 0)
            with QKClip(model, TAU) as clip:
                model(batch(0))
                clip()
        elif what == "nothing ran":
            with QKClip(made(), TAU) as clip:
                clip()
        elif what == "other bound":
            model = made()
            with QKClip(model, TAU) as clip:
                model(batch(0))
                clip()
                clip.tau += rank
                clip()
        elif what == "copied keys beside frozen queries":
            by_hand(rank, ByHand([[0, 1, 2], [3]], [[0], [0]], untrained="q_proj"))
        elif what == "copied keys beside computed queries":
            by_hand(rank, ByHand([[0, 1, 2], [3]], [[0], [0]], computed="q_proj"))
        elif what == "other options":
            model = made()
            with QKClip(model, TAU, parts=("pipeline", "replicas")[rank]) as clip:
                model(batch(0))
                clip()
        else:
            norm_where_it_is_not_reduced(rank, what)
    except lh.LevelheadError as error:
        return str(error)
    return "no error"


def norm_where_it_is_not_reduced(rank: int, what: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = made(layers=1)
    if what == "norm inside DDP":
        wrapped = nn.parallel.DistributedDataParallel(model)
        qk_norm(model, batch(0))
        del wrapped
    elif what == "norm of DDP":
        qk_norm(nn.parallel.DistributedDataParallel(model), batch(0))
    elif what == "gains beside heads over ranks":
        with qk_norm(model, batch(0)):
            split(model, mesh(2), PROJECTIONS, "out")
            torch.optim.AdamW(model.parameters()).step()
    elif what == "heads over ranks without the gains":
        qk_norm(model, batch(0))
        split(model, mesh(2), PROJECTIONS, "out")
        model(batch(0))
    elif what == "norm of FSDP2":
        qk_norm(fully_shard(model, mesh=mesh(2)), batch(0))


# ---- against one process


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("way", ["fsdp", "fsdp joint", "tensor parallel", "replicas"])
def test_ranks_clip_as_one_process_does(two: Ranks, way: str) -> None:
    kind = Joint if way == "fsdp joint" else Attention
    wanted, wanted_said = alone(kind)
    told: dict[str, tuple[Any, ...]] = {
        "fsdp": (fsdp, Attention),
        "fsdp joint": (fsdp, Joint),
        "tensor parallel": (tensor_parallel,),
        "replicas": (replicas,),
    }
    for found, said in two.run(*told[way]):
        same(found, wanted)
        same_clips(said, wanted_said)


@pytest.mark.parametrize("way", ["fsdp", "tensor parallel"])
def test_latent_attention_over_ranks(two: Ranks, way: str) -> None:
    wanted, wanted_said = latent(None)
    for found, said in two.run(latent, way):
        same(found, wanted)
        same_clips(said, wanted_said)


def test_keys_that_heads_of_several_ranks_share_keep_their_bits() -> None:
    model = made(Grouped, layers=1)
    with torch.no_grad(), QKClip(model, TAU) as clip:
        model(batch(0))
        wanted_said = compared([clip()])
    wanted, factors = weights(model), sorted(x for _, x in wanted_said[0][0])
    four = Ranks(4)
    try:
        for way in ("DTensor", "copies"):
            for found, said in four.run(keys_on_every_rank, way):
                same(found, wanted)
                same_clips(said, wanted_said)
        for rank, (found, said) in enumerate(four.run(keys_on_every_rank, "stages")):
            mine = slice(rank * WIDTH // HEADS, (rank + 1) * WIDTH // HEADS)
            np.testing.assert_allclose(found["0.q_proj.weight"], wanted["0.q_proj.weight"][mine], rtol=0, atol=1e-6)
            np.testing.assert_array_equal(found["0.k_proj.weight"], wanted["0.k_proj.weight"])
            np.testing.assert_allclose(said, factors, rtol=1e-5)
        replicated = ByHand([[0, 1, 2], [3]] * 2, [[0], [0]] * 2, without_a_pass=3)
        wanted, _ = by_hand(None, replicated)
        for (found, _), (copy, _) in zip(*[iter(four.run(by_hand, replicated))] * 2, strict=False):
            np.testing.assert_array_equal(found["0.k_proj.weight"], copy["0.k_proj.weight"])
            for heads, each in ((slice(12), found), (slice(12, 16), copy)):
                np.testing.assert_allclose(each["0.q_proj.weight"], wanted["0.q_proj.weight"][heads], rtol=0, atol=1e-6)
    finally:
        four.close()


@pytest.mark.parametrize(
    "split",
    [
        ByHand([[0, 1, 2], [3]], [[0], [0]]),
        ByHand([[0, 1], [2]], [[0], [0]]),
        ByHand([[0], [1, 2, 3]], [[0], [0]]),
        ByHand([[0, 1, 3, 4], [2, 5]], [[0, 1], [0, 1]]),
        ByHand([[0, 1, 2], [3]], [[0, 1], [1]]),
        ByHand([[0], [1, 2, 3]], [[0], [0, 1]]),
        ByHand([[0, 1, 2], [3]], [[0], [0]], without_a_pass=0),
    ],
    ids=str,
)
def test_copies_of_keys_stay_equal_beside_other_numbers_of_heads(two: Ranks, split: ByHand) -> None:
    wanted, wanted_factors = by_hand(None, split)
    assert any(wanted_factors)
    for rank, (found, factors) in enumerate(two.run(by_hand, split)):
        rows = {
            "q_proj": np.concatenate([np.arange(4) + 4 * x for x in split.heads[rank]]),
            "k_proj": np.concatenate([np.arange(4) + 4 * x for x in split.kv_heads[rank]]),
        }
        if split.without_a_pass is None:  # its heads' maxima are not known, then
            right = wanted["0.q_proj.weight"][rows["q_proj"]]
            np.testing.assert_allclose(found["0.q_proj.weight"], right, rtol=0, atol=1e-6)
            for mine, all_heads in zip(factors, wanted_factors, strict=True):
                np.testing.assert_allclose(
                    [mine.get(x, 1) for x in split.heads[rank]], [all_heads.get(x, 1) for x in split.heads[rank]]
                )
        for name in ("weight", "bias"):
            np.testing.assert_array_equal(found[f"0.k_proj.{name}"], wanted[f"0.k_proj.{name}"][rows["k_proj"]])


def test_a_rank_without_a_pass_clips_with_the_others(two: Ranks) -> None:
    (one, said, words), (other, other_said, _) = two.run(one_without_a_pass)
    same(one, other)
    assert said == other_said and said[0][2] == (1,) and said[2][2] == (0, 1)
    assert len(said[0][0]) > 0 and "no pass on rank 1" in words[0]
    assert words[2] == "0 heads clipped, no pass was observed"


@pytest.mark.parametrize("seed", [1, 0])
def test_stages_with_equal_names_are_clipped_apart(two: Ranks, seed: int) -> None:
    (low, first, said, _), (_, second, other_said, before) = two.run(stages, "pipeline", seed)
    same(first, low)  # its logits were small
    assert said == other_said
    heads = [name for name, _ in said[0][0]]
    assert heads and {module.split(".")[0] for module, _ in heads} == {"stage1"}
    changed = {name for name in before if np.abs(second[name] - before[name]).max() > 2e-3}
    assert changed and all("q_proj" in name or "k_proj" in name for name in changed)


def test_a_pass_that_learns_shapes_is_none(two: Ranks) -> None:
    for rank, (empty, largest, steps) in enumerate(two.run(pipelined)):
        assert empty == [rank == 1, False, False]
        assert 0 < largest < 100 and steps == 2


def test_a_batch_beforehand_leaves_shards_as_they_were(two: Ranks) -> None:
    assert two.run(prepared_by_a_batch) == [{"DTensor"}] * 2


def test_a_norm_with_gains_in_the_plan_is_that_of_one_process(two: Ranks) -> None:
    for whole, over_ranks in two.run(normed_over_heads):
        np.testing.assert_allclose(over_ranks, whole, rtol=0, atol=1e-12)


REFUSED = {
    "stages": "one layer by one name",
    "norm on one": "renormalised away",
    "nan on one": "NaN or infinite ones in '0'",
    "frozen on one": "same parameters on every rank (requires_grad)",
    "nothing ran": "attention calls, got none yet",
    "copied keys beside frozen queries": "0.q_proj.weight is frozen",
    "copied keys beside computed queries": "'q_proj' (ParametrizedLinear) has no plain weight",
    "other options": "the same options everywhere",
    "other bound": "tau: expected the same on every rank, got 2 to 3",
    "norm inside DDP": "before DistributedDataParallel",
    "norm of DDP": "before DistributedDataParallel",
    "norm of FSDP2": "before fully_shard",
    "gains beside heads over ranks": "gains that are reduced over ranks",
    "heads over ranks without the gains": "Put q_norm and k_norm into the plan",
}


def test_a_rank_that_waits_for_one_that_has_ended_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    for name, answer in {"is_initialized": True, "get_world_size": 2, "get_rank": 1}.items():
        monkeypatch.setattr(torch.distributed, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda *_: "gloo")
    group = Processes(None)
    for collective, step in (
        ("all_gather_object", lambda: group.gathered(1)),
        ("all_reduce", lambda: group.largest(torch.zeros(1))),
    ):
        monkeypatch.setattr(torch.distributed, collective, closed)
        wanted = "in this step of QK-clip, got on rank 1, .*Connection closed by peer. Another rank has ended"
        with pytest.raises(lh.LevelheadError, match=wanted):
            step()


@pytest.mark.parametrize("what", REFUSED)
def test_every_rank_refuses_and_none_waits(two: Ranks, what: str) -> None:
    for words in two.run(refused, what):
        assert REFUSED[what] in words, words

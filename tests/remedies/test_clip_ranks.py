"""QK-clip over two ranks: shards, replicas, stages and ranks without a pass clip what one process would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

import levelhead as lh
from levelhead.remedies import QKClip, qk_norm
from ranks import Ranks

WIDTH, HEADS, TOKENS, TAU = 16, 4, 6, 2.0


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        split = (p(x).unflatten(-1, (-1, WIDTH // HEADS)) for p in (self.q_proj, self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in split), is_causal=True)
        return x + self.out(out.transpose(1, 2).flatten(2)).clone()


class Joint(Attention):
    """One projection for all, per head: rows of q and k of a head lie in the shards of both ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = self.k_proj = self.v_proj = None
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(out.transpose(1, 2).flatten(2)).clone()


def made(kind: type[nn.Module] = Attention, seed: int = 0, layers: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(*(kind() for _ in range(layers)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    # In float32 the gradient of k's bias, which is 0 but for rounding, would be a whole step of Adam.
    return model.double()


def batch(rank: int) -> Tensor:
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(7 + rank))
    return x.double() * (1 + rank)


def trained(model: nn.Module, batches: list[list[Tensor]], steps: int = 2, wrapped: Any = None, **options: Any) -> Any:
    """Steps of AdamW, each followed by a clip, over micro-batches; what the clips said."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    said = []
    with QKClip(model, TAU, **options) as clip:
        hook = optimiser.register_step_post_hook(lambda *given: said.append(clip(*given)))
        for step in range(steps):
            optimiser.zero_grad()
            for x in batches[step]:
                (wrapped or model)(x).square().mean().div(len(batches[step])).backward()
            optimiser.step()
        hook.remove()
    return said


def weights(model: nn.Module) -> dict[str, np.ndarray]:
    whole = {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in model.named_parameters()}
    return {name.replace("module.", ""): x.detach().double().numpy().copy() for name, x in whole.items()}


def compared(said: list[Any]) -> list[Any]:
    return [(sorted(x.heads.items()), x.largest, x.idle) for x in said]


# ---- what ranks do; each returns its weights, and what its clips said


def fsdp(rank: int, kind: type[nn.Module]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = made(kind), init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    said = trained(model, [[batch(rank)]] * 2)
    return weights(model), compared(said)


def tensor_parallel(rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = made(), init_device_mesh("cpu", (2,))
    plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"out": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh, plan)
    both = torch.cat([batch(0), batch(1)])  # every rank reads all tokens
    said = trained(model, [[both]] * 2)
    return weights(model), compared(said)


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
        elif what == "nothing ran":
            with QKClip(made(), TAU) as clip:
                clip()
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
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = made(layers=1)
    if what == "norm inside DDP":
        wrapped = nn.parallel.DistributedDataParallel(model)
        qk_norm(model, batch(0))
        del wrapped
    elif what == "norm of DDP":
        qk_norm(nn.parallel.DistributedDataParallel(model), batch(0))
    elif what == "norm of FSDP2":
        qk_norm(fully_shard(model, mesh=init_device_mesh("cpu", (2,))), batch(0))


# ---- against one process


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def alone(kind: type[nn.Module] = Attention) -> Any:
    """One process with the batches of both ranks: first as micro-batches, which is also accumulation."""
    model = made(kind)
    said = trained(model, [[batch(0), batch(1)]] * 2)
    return weights(model), compared(said)


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert list(found) == list(wanted)
    for name, x in found.items():
        np.testing.assert_allclose(x, wanted[name], rtol=0, atol=1e-6, err_msg=name)


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
        for (heads, largest, idle), (other_heads, other_largest, _) in zip(said, wanted_said, strict=True):
            assert [name for name, _ in heads] == [name for name, _ in other_heads] != []
            np.testing.assert_allclose([x for _, x in heads], [x for _, x in other_heads], rtol=1e-5)
            assert largest == pytest.approx(other_largest, rel=1e-5) and idle == ()


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


REFUSED = {
    "stages": "one layer by one name",
    "norm on one": "renormalised away",
    "nan on one": "NaN or infinite ones in '0'",
    "nothing ran": "attention calls, got none yet",
    "other options": "the same options everywhere",
    "norm inside DDP": "before DistributedDataParallel",
    "norm of DDP": "before DistributedDataParallel",
    "norm of FSDP2": "before fully_shard",
}


@pytest.mark.parametrize("what", REFUSED)
def test_every_rank_refuses_and_none_waits(two: Ranks, what: str) -> None:
    for words in two.run(refused, what):
        assert REFUSED[what] in words, words

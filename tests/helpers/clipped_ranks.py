"""Models that ranks train with QK-clip, and what one process does with the same batches. Holds no test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

from levelhead.remedies import QKClip
from tiny_models import deepseek, tokens

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


class Grouped(Attention):
    """Heads that share heads of keys."""

    def __init__(self, heads: int = HEADS, kv_heads: int = 1) -> None:
        super().__init__()
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, kv_heads * WIDTH // HEADS) for _ in range(2))
        self.kv_of_heads: list[int] = []  # where they do not divide
        if heads != HEADS:
            self.q_proj, self.out = nn.Linear(WIDTH, heads * WIDTH // HEADS), nn.Linear(heads * WIDTH // HEADS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.kv_of_heads:
            k, v = (x[:, self.kv_of_heads] for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] > k.shape[1])
        return x + self.out(out.transpose(1, 2).flatten(2)).clone()


def made(kind: Callable[[], nn.Module] = Attention, seed: int = 0, layers: int = 2) -> nn.Module:
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


# ---- over ranks


def sharded(model: nn.Module, blocks: Any, mesh: Any) -> nn.Module:
    """FSDP2, block by block."""
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def split(blocks: Any, mesh: Any, columns: tuple[str, ...], rows: str) -> None:
    """Tensor parallelism: heads over ranks."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in blocks:
        parallelize_module(block, mesh, {name: ColwiseParallel() for name in columns} | {rows: RowwiseParallel()})


def mesh(*sizes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "heads")[-len(sizes) :])


PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def fsdp(rank: int, kind: type[nn.Module]) -> Any:
    model = made(kind)
    sharded(model, model, mesh(2))
    said = trained(model, [[batch(rank)]] * 2)
    return weights(model), compared(said)


def tensor_parallel(rank: int) -> Any:
    model = made()
    split(model, mesh(2), PROJECTIONS, "out")
    both = torch.cat([batch(0), batch(1)])  # every rank reads all tokens
    said = trained(model, [[both]] * 2)
    return weights(model), compared(said)


def own_heads(attention: nn.Module, heads: list[int], kv_heads: list[int]) -> None:
    """Leaves these heads alone in an attention module, in tensors of this rank's own."""
    width = WIDTH // HEADS
    q, kv = (torch.tensor([x * width + n for x in each for n in range(width)]) for each in (heads, kv_heads))
    for each, rows in ((attention.q_proj, q), (attention.k_proj, kv), (attention.v_proj, kv)):
        each.weight, each.bias = (nn.Parameter(x.detach()[rows].clone()) for x in (each.weight, each.bias))
    attention.out.weight = nn.Parameter(attention.out.weight.detach()[:, q].clone())


@dataclass(frozen=True)
class ByHand:
    """Tensor parallelism without DTensor: which heads, and which heads of keys, each rank has."""

    heads: list[list[int]]
    kv_heads: list[list[int]]
    without_a_pass: int | None = None  # a rank, in the first step
    untrained: str = ""  # a projection
    computed: str = ""  # one whose weight is computed

    @property
    def total(self) -> tuple[int, int]:
        return tuple(1 + max(x for some in each for x in some) for each in (self.heads, self.kv_heads))


def by_hand(rank: int | None, split: ByHand) -> Any:
    """Two clips, between them the weights grow; `rank` None: one process with all heads. Its weights, and the factors
    by number of the head."""
    model = made(partial(Grouped, *split.total), layers=1)
    heads = list(range(split.total[0]))
    if rank is not None:
        heads, kv_heads = split.heads[rank], split.kv_heads[rank]
        own_heads(model[0], heads, kv_heads)
        if len(heads) % len(kv_heads):
            group = split.total[0] // split.total[1]
            model[0].kv_of_heads = [kv_heads.index(head // group) for head in heads]
    if split.untrained:
        model[0].get_submodule(split.untrained).requires_grad_(False)
    if split.computed:
        nn.utils.parametrizations.weight_norm(model[0].get_submodule(split.computed))
    said = []
    with torch.no_grad(), QKClip(model, TAU, parts=None if rank is None else "pipeline") as clip:
        for step in range(2):
            if step or rank is None or rank != split.without_a_pass:
                model(batch(0))
            said.append(clip())
            for each in (model[0].q_proj, model[0].k_proj):
                each.weight.mul_(1.5)
    own = "" if rank is None else f"stage{rank}."
    factors = [{heads[n]: x for (name, n), x in one.heads.items() if name == f"{own}0"} for one in said]
    return weights(model), factors


def keys_on_every_rank(rank: int, way: str) -> Any:
    """Four ranks with one query head each, and all with the keys that these share."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_module

    model = made(Grouped, layers=1)
    attention = model[0]
    if way == "stages":
        own_heads(attention, [rank], [0])
    else:
        split(model, mesh(4), ("q_proj",), "out")
    if way == "DTensor":
        whole = (
            lambda _, given, at: DTensor.from_local(given[0], at, [Replicate()]),
            lambda _, out, __: out.to_local(),
        )
        for each in (attention.k_proj, attention.v_proj):
            distribute_module(each, mesh(4), None, *whole)
    with torch.no_grad(), QKClip(model, TAU, parts="pipeline" if way == "stages" else None) as clip:
        model(batch(0))
        said = clip()
    found = weights(model)
    if way == "stages":
        return found, sorted(said.heads.values())
    return found, compared([said])


def both_ways(rank: int) -> Any:
    """Four ranks: FSDP2 over what tensor parallelism has split."""
    model, whole = made(), mesh(2, 2)
    split(model, whole["heads"], PROJECTIONS, "out")
    sharded(model, model, whole["replicas"])
    said = trained(model, [[batch(rank // 2)]] * 2)
    return weights(model), compared(said)


def latent(rank: int | None, way: str = "") -> Any:
    """MLA over two ranks, or alone: two clips, between them the weights grow."""
    model = deepseek(grown=20.0).double()
    blocks = model.model.layers
    mine = [tokens(seed=7 + n)["input_ids"] for n in range(2)]
    if way == "fsdp":
        sharded(model, blocks, mesh(2))
        mine = [mine[rank or 0]]
    elif way == "tensor parallel":
        split([block.self_attn for block in blocks], mesh(2), ("q_b_proj", "kv_b_proj"), "o_proj")
    said = []
    with torch.no_grad(), QKClip(model, 2 * TAU) as clip:
        for _ in range(2):
            for ids in mine:
                model(ids)
            said.append(clip())
            for name, parameter in model.named_parameters():
                if "_b_proj" in name:
                    parameter.mul_(1.5)
    return weights(model), compared(said)


# ---- against one process


def alone(kind: type[nn.Module] = Attention) -> Any:
    """One process with the batches of both ranks: first as micro-batches, which is also accumulation."""
    model = made(kind)
    said = trained(model, [[batch(0), batch(1)]] * 2)
    return weights(model), compared(said)


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert list(found) == list(wanted)
    for name, x in found.items():
        np.testing.assert_allclose(x, wanted[name], rtol=0, atol=1e-6, err_msg=name)


def same_clips(said: list[Any], wanted: list[Any]) -> None:
    """The same heads by the same factors, and no rank without a pass."""
    for (heads, largest, idle), (other_heads, other_largest, _) in zip(said, wanted, strict=True):
        assert [name for name, _ in heads] == [name for name, _ in other_heads] != []
        np.testing.assert_allclose([x for _, x in heads], [x for _, x in other_heads], rtol=1e-5)
        np.testing.assert_allclose(largest, other_largest, rtol=1e-5)
        assert idle == ()

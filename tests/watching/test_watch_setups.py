"""Set-ups people train and generate in: outputs and gradients keep their bits, statistics are those of the call.

Parallel plans run on two ranks: DDP, FSDP2, tensor parallel, pipeline. Libraries: PEFT, diffusers, transformers with
every kind of cache that needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import diffusers
import numpy as np
import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import levelhead as lh
from levelhead.runs.record import Snapshot
from ranks import Ranks

D, HEADS = 32, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, D // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        self.computed = q.detach(), k.detach()
        return self.o(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


def blocks(n: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(n)))


def local(x: Tensor) -> Tensor:
    return (x.to_local() if hasattr(x, "to_local") else x).detach().clone()


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and the gradients of one step."""
    model.zero_grad()
    out = model(x)
    out.square().mean().backward()
    return [local(out), *(local(p.grad) for p in model.parameters() if p.grad is not None)]


def agrees(model: nn.Module, snapshot: Snapshot) -> bool:
    """Whether the statistics are those of what the last call really computed."""
    attention = [module for module in model.modules() if isinstance(module, Attention)]
    assert len(attention) == len(snapshot.records) > 0
    for module, record in zip(attention, snapshot.records, strict=True):
        want = lh.observe(*(x.double() for x in module.computed), causal=True).heads
        for name in ("max_logit", "mean_entropy", "var_logit", "mean_top1"):
            per_head = np.asarray(getattr(want, name))
            whole = per_head.max(0) if name == "max_logit" else per_head.mean(0)
            np.testing.assert_allclose(getattr(record.heads, name), whole, rtol=1e-4, atol=1e-5)
    return True


# ---- two ranks


def ddp(rank: int) -> nn.Module:
    return nn.parallel.DistributedDataParallel(blocks())


def fsdp2(rank: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = blocks(), init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(rank: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = blocks(), init_device_mesh("cpu", (2,))
    plan = {name: ColwiseParallel() for name in "qkv"} | {"o": RowwiseParallel()}
    for block in model:
        parallelize_module(block.attn, mesh, plan)
    return model


def compared(rank: int, make: Callable[[int], nn.Module]) -> tuple[bool, bool, list[int]]:
    """Whether bits are kept, statistics agree, and how many heads each module has on this rank."""
    model = make(rank)
    torch.manual_seed(rank if make is not tensor_parallel else 0)
    x = torch.randn(2, 6, D)
    plain = trained(model, x)
    with lh.watch(model, gradients=True) as w:
        watched = trained(model, x)
        same = all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
        assert all(record.facts.scale_reading == "projections" for record in w.last.records)
        return same, agrees(model, w.last), [len(record.tally) for record in w.last.records]


def piped(rank: int) -> tuple[bool, int]:
    """A pipeline of two stages, two micro-batches: whether gradients and losses keep their bits; observed rows."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = blocks(1)

    def step() -> list[Tensor]:
        stage.zero_grad()
        part = PipelineStage(stage, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(part, 2, loss_fn=lambda y, target: (y - target).square().mean())
        torch.manual_seed(1)
        x, losses = torch.randn(4, 6, D), []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x, losses=losses)
        return [*(local(p.grad) for p in stage.parameters()), *(local(loss) for loss in losses)]

    plain = step()
    with lh.watch(stage, gradients=True) as w:
        watched = step()
        w.step()
    same = all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    return same, int(w.run().latest[0].heads.rows[0])


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("make", [ddp, fsdp2, tensor_parallel])
def test_parallel_plans(two: Ranks, make: Callable[[int], nn.Module]) -> None:
    heads = HEADS // 2 if make is tensor_parallel else HEADS
    assert two.run(compared, make) == [(True, True, [heads, heads])] * 2


def test_a_pipeline(two: Ranks) -> None:
    for same, rows in two.run(piped):
        assert same
        assert rows >= 2 * 2 * 6  # two micro-batches of two rows; building a stage may run it once more


# ---- libraries

TINY = {"vocab_size": 64, "hidden_size": D, "intermediate_size": D, "num_attention_heads": HEADS}
TINY |= {"num_key_value_heads": 2, "num_hidden_layers": 2}


def test_adapters_of_peft() -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "k_proj", "v_proj"], r=4, init_lora_weights=False)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)), config)
    ids = torch.randint(0, 64, (2, 9))

    def step() -> list[Tensor]:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return [local(loss), *(local(p.grad) for p in model.parameters() if p.grad is not None)]

    plain = step()
    with lh.watch(model, gradients=True) as w:
        watched = step()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert [round(record.facts.effective_scale or 0.0, 5) for record in w.run().latest] == [round(8**-0.5, 5)] * 2
    assert not [finding for finding in lh.diagnose(w) if finding.severity != "note"]


def test_a_unet_of_diffusers() -> None:
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(32, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    inputs = (torch.randn(1, 4, 8, 8), torch.tensor([3]), torch.randn(1, 5, 16))

    def step() -> list[Tensor]:
        model.zero_grad()
        out = model(*inputs).sample
        out.square().mean().backward()
        return [local(out), *(local(p.grad) for p in model.parameters() if p.grad is not None)]

    plain = step()
    with lh.watch(model) as w:
        watched = step()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert len(w.run().latest) == 8
    assert all(line.seen for line in w.coverage())
    assert not [finding for finding in lh.diagnose(w) if finding.severity != "note"]


GENERATION: dict[str, dict[str, Any]] = {
    "no cache": {"use_cache": False},
    "dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "sliding window": {"cache_implementation": "sliding_window", "disable_compile": True},
    "hybrid": {"cache_implementation": "hybrid", "disable_compile": True},
    "beams": {"num_beams": 3},
    "sampled": {"do_sample": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("kind", GENERATION)
@pytest.mark.parametrize("window", [None, 4])
def test_generation_with_every_cache(kind: str, window: int | None) -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(**TINY, sliding_window=window, pad_token_id=0)
    model = transformers.MistralForCausalLM(config).eval()
    ids = torch.randint(1, 64, (1, 7))

    def generated() -> Tensor:
        torch.manual_seed(1)
        out: Tensor = model.generate(ids, max_new_tokens=5, **GENERATION[kind])
        return out

    plain = generated()
    with lh.watch(model) as w:
        watched = generated()
    assert torch.equal(plain, watched)
    assert len(w.run().latest) == 2
    assert all(line.seen for line in w.coverage())
    assert not [finding for finding in lh.diagnose(w) if finding.severity != "note"]

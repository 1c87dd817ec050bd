"""`use(model)` with output_attentions=True: the weights that eager attention gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface

from huggingface_zoo import specimen
from levelhead.torch.huggingface import use

NAMES = ["llama", "bert", "t5", "whisper", "gemma2", "gpt_oss", "gptj", "falcon", "vit"]


def attentions(out: Any) -> list[Tensor]:
    found = [x for key, values in out.items() if "attentions" in key for x in values]
    assert found and all(isinstance(x, Tensor) for x in found)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_eager_attention(name: str) -> None:
    built = specimen(name, implementation="eager")
    more = {}
    if "input_ids" in built.inputs and name not in ("t5", "whisper"):
        mask = torch.ones_like(built.inputs["input_ids"])
        mask[1, -4:] = 0
        more = {"attention_mask": mask}
    with torch.no_grad():
        wanted = attentions(built.run(output_attentions=True, **more))
        with use(built.model) as used:
            found = attentions(built.run(output_attentions=True, **more))
    assert used.calls == len(found) == len(wanted)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, atol=2e-6, rtol=1e-4)


def test_sdpa_gives_weights_too() -> None:
    eager, sdpa = (specimen("llama", implementation=name) for name in ("eager", "sdpa"))
    wanted = attentions(eager.run(output_attentions=True))
    with use(sdpa.model):
        found = attentions(sdpa.run(output_attentions=True))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gptj"])
def test_weights_have_the_gradients_of_eager_attention(name: str) -> None:
    built = specimen(name, implementation="eager")

    def gradients() -> list[Tensor]:
        built.model.zero_grad()
        found = attentions(built.run(output_attentions=True))
        torch.stack([(x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in found]).sum().backward()
        return [p.grad.clone() for p in built.model.parameters() if p.grad is not None]

    wanted = gradients()
    with use(built.model):
        found = gradients()
    assert len(found) == len(wanted) > 4
    assert max(float(x.abs().max()) for x in wanted) > 1e-4
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-3)


def test_eager_weights_can_be_read_by_any_module() -> None:
    # The projection of Kosmos-2 returns its weights in every call.
    model = specimen("llama", implementation="eager").model
    module = model.model.layers[0].self_attn
    eager = transformers.models.llama.modeling_llama.eager_attention_forward
    q, k = torch.randn(2, 4, 5, 8, requires_grad=True), torch.randn(2, 2, 5, 8)
    _, wanted = eager(module, q, k, k, None, scaling=0.3)
    with use(model):
        _, found = AttentionInterface().get_interface("eager", eager)(module, q, k, k, None, scaling=0.3)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 4, 5))
    torch.testing.assert_close(found.clone(), wanted)
    gradients = [torch.autograd.grad((x[..., 0]).sum(), q)[0] for x in (found, wanted)]
    torch.testing.assert_close(*gradients)


def test_weights_have_the_callers_type() -> None:
    model = specimen("llama", implementation="eager").model.to(torch.bfloat16)
    with torch.no_grad(), use(model):
        found = attentions(model(torch.arange(5, 17)[None], output_attentions=True))
    assert {x.dtype for x in found} == {torch.bfloat16}
    with torch.no_grad(), use(model):  # none unless they are asked for
        assert model(torch.arange(5, 17)[None]).attentions is None

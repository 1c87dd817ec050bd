"""`use(model)` with output_attentions=True: the weights that eager attention gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

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


def test_weights_have_the_callers_type() -> None:
    model = specimen("llama", implementation="eager").model.to(torch.bfloat16)
    with torch.no_grad(), use(model):
        found = attentions(model(torch.arange(5, 17)[None], output_attentions=True))
    assert {x.dtype for x in found} == {torch.bfloat16}
    with torch.no_grad(), use(model):  # none unless they are asked for
        assert model(torch.arange(5, 17)[None]).attentions is None

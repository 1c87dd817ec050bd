"""`lh.preflight`: the bugs it names, the models it leaves alone and as they were, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import levelhead as lh
from attention_bugs import BUGS, Transformer, words
from levelhead.errors import LevelheadError
from levelhead.preflight_checks.result import Preflight
from tiny_models import MODELS
from watched import one_thread  # noqa: F401


def wrong(result: Preflight) -> list[str]:
    found = [f for f in result.findings if f.severity != "note"]
    return [f"{f.kind}: {f.module}: {f.why}" for f in found]


FINE: dict[Any, list[str]] = {}  # by corrected model: several bugs have the same one


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_named_and_its_corrected_twin_has_no_warning(name: str) -> None:
    bug = BUGS[name]
    earlier = {"against": bug.make(False)} if bug.against else {}
    found = wrong(lh.preflight(bug.make(True), bug.batch(), **earlier))
    assert any(bug.says in line for line in found), found
    twin = name if bug.twin is None else bug.twin
    if twin not in FINE:
        FINE[twin] = wrong(lh.preflight(bug.make(False), bug.batch(), **earlier))
    assert FINE[twin] == []


def test_assert_level_fails_with_the_findings_of_the_preflight() -> None:
    model = Transformer("grouped heads in the wrong order", kv_heads=2)
    with pytest.raises(AssertionError, match="repeat_interleave"):
        lh.testing.assert_level(model, words())
    allowed = ["grouped heads in the wrong order"]
    assert lh.testing.assert_level(model, words(), allow=allowed).latest


def test_a_scale_that_the_call_makes_up_for_is_no_finding() -> None:
    folded, earlier = BUGS["scale folded into weights"].make(True), Transformer("right").eval()
    for block in folded.layers:
        block.attn.bug = "no scale"
    assert "wrong scale" in str(wrong(lh.preflight(folded, words())))
    assert wrong(lh.preflight(folded, words(), against=earlier)) == []


@pytest.mark.parametrize("name", MODELS)
def test_a_healthy_model_has_no_warning(name: str) -> None:
    tiny = MODELS[name]
    result = lh.preflight(tiny.make("eager"), tiny.inputs())
    assert wrong(result) == []
    assert all(check.verdict != "failed" for check in result.checks)
    assert result["dropout off in eval"].verdict == result["applied weights"].verdict == "passed"


def test_the_first_wrong_module_is_named() -> None:
    model = Transformer("sees the next token", layers=5, layer=3).eval()
    result = lh.preflight(model, words())
    assert result["causality"].module == result["form of masks"].module == "layers.3.attn"
    assert "layers.3.attn" in str(result)


def test_the_model_is_left_as_it_was() -> None:
    model = Transformer("right")
    model.layers[0].eval()
    model.register_buffer("seen", torch.zeros(1))
    model.register_forward_hook(lambda module, args, output: module.seen.add_(1))
    model.head.weight.grad = torch.ones_like(model.head.weight)
    modes = [module.training for module in model.modules()]
    state = {name: x.clone() for name, x in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    lh.preflight(model, words())
    assert torch.equal(torch.rand(4), expected)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert all(len(module._forward_hooks) == (module is model) for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_causality_is_judged_if_asked_for() -> None:
    model = Transformer("right", causal=False).eval()
    assert lh.preflight(model, words())["causality"].verdict == "not judged"
    assert lh.preflight(model, words(), causal=True)["causality"].module == "layers.0.attn"


def test_a_sequence_first_model_is_no_bug() -> None:
    layer = nn.MultiheadAttention(64, 4)
    x = torch.randn(9, 2, 64)
    assert lh.preflight(layer, (x, x, x))["batch independence"].verdict == "passed"

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.attn(x, x, x, need_weights=False)[0]

    assert wrong(lh.preflight(Own(), x)) == []
    assert wrong(lh.preflight(Own(), x.transpose(0, 1))) != []


@pytest.mark.parametrize(
    ("batch", "says"),
    [("text", "batch: expected tensors"), ({}, "batch: expected tensors"), (torch.zeros(2, 3), "failed")],
)
def test_bad_input_is_one_error(batch: object, says: str) -> None:
    with pytest.raises(LevelheadError, match=says):
        lh.preflight(Transformer("right"), batch)
    with pytest.raises(LevelheadError, match="model: expected"):
        lh.preflight(3, words())  # type: ignore[arg-type]


def test_padded_queries_may_see_anything() -> None:
    """Eager attention gives a query that sees no key equal weights over all keys, later ones too."""
    import transformers

    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, attn_implementation="eager")
    torch.manual_seed(0)
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, :3] = 0
    batch = {"input_ids": torch.randint(3, 60, (3, 12)), "attention_mask": mask}
    result = lh.preflight(transformers.LlamaForCausalLM(config), batch)
    assert [one.kind for one in result.findings if one.severity != "note"] == []
    assert next(check.verdict for check in result.checks if check.name == "causality") == "passed"


class _TakesLossMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer("")

    def forward(self, ids: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(ids)
        return out


def test_a_loss_mask_is_no_padding_mask() -> None:
    torch.manual_seed(0)
    loss_mask = torch.ones(3, 12, dtype=torch.long)
    loss_mask[:, :4] = 0
    batch = {"ids": torch.randint(0, 8, (3, 12)), "loss_mask": loss_mask}
    assert not [one for one in lh.preflight(_TakesLossMask(), batch).findings if one.kind == "padding not masked"]


class _LooksAhead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(8, 16), nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, T = self.embed(ids), ids.shape[1]
        out: torch.Tensor = self.attention(x, x, x, attn_mask=torch.ones(T, T, dtype=torch.bool).triu(2))[0]
        return out


def test_a_look_ahead_is_an_error_unless_it_is_meant() -> None:
    torch.manual_seed(0)
    model, ids = _LooksAhead(), torch.randint(0, 8, (3, 12))
    assert [one.kind for one in lh.preflight(model, ids).findings if one.severity == "error"]
    assert not [one.kind for one in lh.preflight(model, ids, causal=False).findings if one.severity == "error"]

"""The table: every way a model may attend, × seen, attributed, bit-identical.

One row per case, one test per column, so that `pytest -v` prints the table. Seen: the coverage
report names the way, and misses nothing. Attributed: the right module names, the right numbers of
heads, every query row counted once. Bit-identical: outputs, gradients and the random numbers that
come next are those of the unwatched model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import levelhead as lh
from levelhead.runs.record import Run
from levelhead.watching.native_fast_path import PATH as FAST
from tiny_models import MODELS
from tiny_models import TOKENS as MODEL_TOKENS
from watched import (
    BATCH,
    HEADS,
    TOKENS,
    WIDTH,
    batch,
    by_hand,
    hidden,
    one_thread,
    outcome,
    same,
    sdpa,
    sdpa_bound_earlier,
    sdpa_of_three_dimensions,
    stack,
)

__all__ = ["one_thread"]  # a fixture

WEIGHTS = "nn.MultiheadAttention, weights asked for"
HAND = "softmax by hand"


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    make: Callable[[], nn.Module]
    run: Callable[[nn.Module], Any]
    how: str
    modules: tuple[str, ...] = ("blocks.0.attn", "blocks.1.attn")
    heads: int = HEADS
    kv_heads: int | None = None
    rows: int | None = BATCH * TOKENS
    learns: bool = True
    within: float = 0.0  # 0: the same bits
    options: dict[str, Any] = field(default_factory=dict)
    around: Callable[[nn.Module], AbstractContextManager[Any]] = lambda model: nullcontext()


def small(attend: Any, how: str = "sdpa", *, dtype: Any = torch.float32, **rest: Any) -> Case:
    """Two blocks around one way to attend."""
    of_model = {name: rest.pop(name) for name in ("value_width",) if name in rest}
    if "kv_heads" in rest:
        of_model["kv_heads"] = rest["kv_heads"]
    return Case(lambda: stack(attend, dtype=dtype, **of_model), lambda model: model(batch(dtype=dtype)), how, **rest)


def torchs(train: bool, need_weights: bool, learns: bool) -> Case:
    """nn.MultiheadAttention itself."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).train(train)

    fast = not train and not learns
    return Case(
        make,
        lambda model: model(*[batch()] * 3, need_weights=need_weights)[0],
        FAST if fast else WEIGHTS if need_weights else "sdpa",
        modules=("",),
        learns=learns,
    )


def encoder(whole: bool) -> Case:
    def make() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
        return (nn.TransformerEncoder(layer, 2) if whole else layer).eval()

    return Case(
        make,
        lambda model: model(batch()),
        FAST,
        modules=("layers.0.self_attn", "layers.1.self_attn") if whole else ("self_attn",),
        learns=False,
    )


def model(name: str, implementation: str, *, served: bool = False) -> Case:
    """A Hugging Face model; `served`: by levelhead."""
    tiny = MODELS[name]

    def uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
        if served:
            return lh.torch.huggingface.use(model)
        # transformers compiles flex_attention by itself; here it is looked at as it is.
        return torch.compiler.set_stance("force_eager" if "flex" in implementation else "default")

    different = name in ("T5", "Whisper", "ViT")  # lengths differ from module to module
    return Case(
        lambda: tiny.make(implementation),
        lambda model: model(**tiny.inputs()),
        f"huggingface:{implementation}" + (", levelhead" if served else ""),
        modules=tuple(tiny.modules),
        kv_heads=2 if name in _GROUPED else None,
        rows=None if different else int(tiny.inputs().get("attention_mask", torch.ones(2, MODEL_TOKENS)).sum()),
        learns="flex" not in implementation,  # flex has no gradient on a CPU
        around=uncompiled,
    )


_GROUPED = ("Llama", "Mistral", "Qwen3", "Gemma-2", "Gemma-3", "GPT-OSS")


class Levelheads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = lh.torch.MultiHeadAttention(WIDTH, HEADS, kv_heads=2, causal=True, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x)


def levelheads() -> nn.Module:
    torch.manual_seed(0)
    return Levelheads()


class LearnedMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack(self._attend).blocks
        self.bias = nn.Parameter(torch.linspace(-1, 1, TOKENS**2).view(TOKENS, TOKENS))

    def _attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


FLOAT_MASK = torch.zeros(TOKENS, TOKENS).masked_fill(hidden(TOKENS), -torch.inf)
DEEP = {"deep": True}

CASES: dict[str, Case] = {
    "F.sdpa plain": small(sdpa()),
    "F.sdpa causal": small(sdpa(is_causal=True)),
    "F.sdpa bool mask": small(sdpa(attn_mask=~hidden(TOKENS))),
    "F.sdpa float mask": small(sdpa(attn_mask=FLOAT_MASK)),
    "F.sdpa grouped": small(sdpa(enable_gqa=True), kv_heads=2),
    "F.sdpa bfloat16": small(sdpa(is_causal=True), dtype=torch.bfloat16),
    "F.sdpa float64": small(sdpa(is_causal=True), dtype=torch.float64),
    "F.sdpa without gradients": small(sdpa(is_causal=True), learns=False),
    "F.sdpa dropout": small(sdpa(dropout_p=0.3)),
    "F.sdpa d_v ≠ d_k": small(sdpa(), value_width=12),
    "F.sdpa three dimensions": small(sdpa_of_three_dimensions),
    "F.sdpa mask that learns": Case(LearnedMask, lambda model: model(batch()), "sdpa"),
    "F.sdpa bound earlier": small(sdpa_bound_earlier),
    "nn.MHA train": torchs(True, False, True),
    "nn.MHA train, weights": torchs(True, True, True),
    "nn.MHA eval": torchs(False, False, True),
    "nn.MHA eval, weights": torchs(False, True, True),
    "nn.MHA eval, no_grad": torchs(False, False, False),
    "nn.MHA eval, no_grad, weights": torchs(False, True, False),
    "TransformerEncoderLayer eval": encoder(whole=False),
    "TransformerEncoder eval": encoder(whole=True),
    **{
        f"HF {name} {implementation}": model(name, implementation)
        for name, tiny in MODELS.items()
        if name not in ("Mistral", "Gemma-3")  # Llama's and Gemma-2's code
        for implementation in tiny.implementations
    },
    "lh.torch.patch": small(sdpa(is_causal=True), "levelhead", around=lambda m: lh.torch.patch()),
    "lh.torch.MultiHeadAttention": Case(
        levelheads, lambda model: model(batch()), "levelhead", modules=("attn",), kv_heads=2
    ),
    **{
        f"HF {name} {implementation}, use": model(name, implementation, served=True)
        for name, implementation in (("Llama", "eager"), ("Llama", "sdpa"), ("BERT", "sdpa"), ("GPT-OSS", "eager"))
    },
    **{
        f"by hand: {name}": small(by_hand(**how), HAND, options=DEEP)
        for name, how in {
            "matmul": {},
            "einsum": {"product": "einsum"},
            "baddbmm": {"product": "baddbmm"},
            "keys first": {"product": "turned"},
            "torch.softmax": {"softmax": "torch"},
            "F.softmax": {"softmax": "functional"},
            "nn.Softmax": {"softmax": "module"},
            "scale before": {"place": "before"},
            "scale in place": {"place": "in place"},
            "scale on both": {"place": "both"},
            "divided by a tensor": {"place": "divided"},
            "softcap": {"cap": 3.0},
            "additive mask": {"mask": "add"},
        }.items()
    },
}


@functools.cache
def ran(name: str) -> tuple[Run, list[Tensor], list[Tensor]]:
    """The row's run as watched, and its outcomes: unwatched, watched."""
    case = CASES[name]
    model = case.make()
    with case.around(model):
        plain = outcome(model, lambda: case.run(model), learns=case.learns)
        with lh.watch(model, **case.options) as w:
            looked_at = outcome(model, lambda: case.run(model), learns=case.learns)
    return w.run(), plain, looked_at


@pytest.fixture(params=CASES)
def row(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_seen(row: str) -> None:
    case, (run, _, _) = CASES[row], ran(row)
    assert all(line.seen for line in run.coverage)
    assert {line.how for line in run.coverage} == {case.how}
    assert {line.note for line in run.coverage} == {""}


def test_attributed(row: str) -> None:
    case, (run, _, _) = CASES[row], ran(row)
    records = run.last.records
    assert len(run.snapshots) == 1
    assert sorted(record.module for record in records) == sorted(case.modules)
    assert {len(record.tally) for record in records} == {case.heads}
    assert {record.facts.kv_heads for record in records} == {case.kv_heads or case.heads}
    assert {line.calls for line in run.coverage} == {1}
    if case.rows is not None:
        counted = {int(n) for r in records for n in r.heads.rows + r.heads.empty_rows}
        assert counted == {case.rows}


def test_bit_identical(row: str) -> None:
    _, plain, looked_at = ran(row)
    same(plain, looked_at, within=CASES[row].within)


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize(
    ("name", "implementation"),
    [("Llama", "eager"), ("Llama", "sdpa"), ("GPT-2", "sdpa"), ("Gemma-2", "eager"), ("T5", "sdpa")],
)
def test_generated_tokens_are_the_same(name: str, implementation: str, sampling: bool) -> None:
    model, inputs = MODELS[name].make(implementation), MODELS[name].inputs()
    inputs.pop("decoder_input_ids", None)

    def generated() -> list[Tensor]:
        torch.manual_seed(5)
        tokens = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=sampling)
        return [tokens, torch.rand(4)]

    plain = generated()
    with lh.watch(model) as w:
        same(plain, generated())
    assert len(w.run().snapshots) == 6  # a step for every token: the prompt, then one by one
    keys = [s.records[-1].facts.keys for s in w.run().snapshots]
    assert keys == sorted(keys)
    assert all(line.seen for line in w.coverage())
    last = w.last[MODELS[name].modules[0]] if name != "T5" else w.last.records[-1]
    assert (last.heads.rows == len(plain[0])).all()

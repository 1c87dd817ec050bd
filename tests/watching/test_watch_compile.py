"""Watching compiled models: whole graphs, no recompilation after warm-up, the same bits.

Each call inserts an operator into the graph. A graph that was compiled before the watch is compiled
once more, and one that outlives it once more again; in between, nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

import levelhead as lh
from tiny_models import MODELS
from watched import BATCH, HEADS, TOKENS, WIDTH, batch, by_hand, one_thread, outcome, same, sdpa, stack

__all__ = ["one_thread"]  # a fixture

CAUSAL = sdpa(is_causal=True)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=False, fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def counted(model: nn.Module, backend: str) -> tuple[Any, Any]:
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(model, fullgraph=True, backend=counter), counter


@pytest.mark.parametrize("first", ["compiled", "watched"])
def test_one_graph_the_same_bits_and_no_recompilation(first: str) -> None:
    model = stack(CAUSAL)
    compiled, counter = counted(model, "inductor")
    plain = outcome(model, lambda: compiled(batch()))
    if first == "watched":  # as if nothing had been compiled before
        torch._dynamo.reset()
    before = counter.frame_count
    with lh.watch(model) as w:
        looked_at = outcome(model, lambda: compiled(batch()))
        warm = counter.frame_count
        assert warm <= before + 2  # the model, whole, and the hook that counts its forward passes
        for seed in (2, 3, 4):
            outcome(model, lambda seed=seed: compiled(batch(seed=seed)))
        assert counter.frame_count == warm
    same(plain, looked_at)
    run = w.run()
    assert [len(s.records) for s in run.snapshots] == [2, 2, 2, 2]
    for record in run.last.records:
        assert (record.facts.how, len(record.tally)) == ("sdpa", HEADS)
        assert (record.heads.rows == BATCH * TOKENS).all()
    assert [record.module for record in run.last.records] == ["blocks.0.attn", "blocks.1.attn"]
    same(plain, outcome(model, lambda: compiled(batch())))  # and afterwards


@pytest.mark.parametrize(
    ("given", "options"),
    [("model", {}), ("wrapper", {"deep": True}), ("itself", {"every": 2}), ("part", {"gradients": True})],
)
def test_nothing_is_compiled_after_warm_up(given: str, options: dict[str, Any]) -> None:
    """In more steps than the compiler's limit of graphs, in training and evaluation."""
    counter = torch._dynamo.testing.CompileCounter()
    model = stack(CAUSAL)
    how: dict[str, Any] = {"fullgraph": True, "backend": counter}
    run: Any = torch.compile(model, **how) if given in ("model", "wrapper") else model
    if given in ("itself", "part"):
        (model if given == "itself" else model.blocks[1]).compile(**how)
    graphs = []
    with lh.watch(run if given == "wrapper" else model, **options) as w:
        for step in range(12):
            model.train(step % 3 < 2)  # step 2 is the first evaluation
            run(batch(seed=step)).sum().backward()
            graphs.append(counter.frame_count)
    assert graphs[2] <= 4
    assert graphs[3:] == graphs[2:3] * 9
    assert [line.calls for line in w.coverage()] == [12 // options.get("every", 1)] * 2


def test_statistics_are_those_of_the_uncompiled_model() -> None:
    model = stack(CAUSAL)
    with lh.watch(model) as eager:
        model(batch())
    compiled, _ = counted(model, "aot_eager")
    with lh.watch(model) as w:
        compiled(batch())
    for record in w.last.records:
        wanted = eager.last[record.module].heads
        torch.testing.assert_close(record.heads.max_logit, wanted.max_logit, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(record.heads.mean_entropy, wanted.mean_entropy, rtol=1e-6, atol=0)


def test_equal_blocks_compiled_one_by_one_share_one_graph() -> None:
    model = stack(CAUSAL, depth=12)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(fullgraph=True, backend=counter)
    plain = outcome(model, lambda: model(batch()))
    with lh.watch(model) as w:
        looked_at = outcome(model, lambda: model(batch()))
        warm = counter.frame_count
        outcome(model, lambda: model(batch(seed=2)))
        assert counter.frame_count == warm
    same(plain, looked_at)
    assert warm <= 4  # with gradients and without hooks: never one per block
    assert [r.module for r in w.last.records] == [f"blocks.{n}.attn" for n in range(12)]
    assert all((r.heads.rows == BATCH * TOKENS).all() for r in w.last.records)


@pytest.mark.parametrize(
    ("name", "implementation", "served"), [("Llama", "sdpa", False), ("Llama", "eager", False), ("Llama", "sdpa", True)]
)
def test_transformers_models(name: str, implementation: str, served: bool) -> None:
    tiny = MODELS[name]
    model = tiny.make(implementation)
    used = lh.torch.huggingface.use(model) if served else None
    compiled, counter = counted(model, "aot_eager")
    plain = outcome(model, lambda: compiled(**tiny.inputs()))
    with lh.watch(model) as w:
        looked_at = outcome(model, lambda: compiled(**tiny.inputs()))
        warm = counter.frame_count
        compiled(**tiny.inputs())
        assert counter.frame_count == warm
    if used is not None:
        used.undo()
    same(plain, looked_at)
    how = f"huggingface:{implementation}" + (", levelhead" if served else "")
    assert {(r.module, r.facts.how) for r in w.last.records} == {(m, how) for m in tiny.modules}
    assert all(line.seen for line in w.coverage())


class Weighted(nn.Module):
    """torch's own module with need_weights=True."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=True)[0]


@pytest.mark.parametrize("how", ["patched", "weights", "encoder"])
def test_levelhead_and_torchs_modules_in_a_graph(how: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, batch_first=True, dropout=0.0)
    model = {"patched": lambda: stack(CAUSAL), "weights": Weighted, "encoder": lambda: layer}[how]()
    patched = lh.torch.patch() if how == "patched" else None
    try:
        compiled, _ = counted(model, "aot_eager")
        plain = outcome(model, lambda: compiled(batch()))
        with lh.watch(model) as w:
            looked_at = outcome(model, lambda: compiled(batch()))
    finally:
        if patched is not None:
            patched.undo()
    same(plain, looked_at)
    assert w.last.records
    assert all((r.heads.rows == BATCH * TOKENS).all() for r in w.last.records)
    assert all(line.seen and line.calls == 1 for line in w.coverage())


def test_a_watch_on_the_compiled_wrapper_has_the_models_own_names() -> None:
    model = stack(CAUSAL)
    compiled, _ = counted(model, "aot_eager")
    with lh.watch(compiled) as w:
        compiled(batch())
    assert [r.module for r in w.last.records] == ["blocks.0.attn", "blocks.1.attn"]
    model = stack(CAUSAL)
    model.blocks[0] = torch.compile(model.blocks[0], fullgraph=True, backend="aot_eager")
    with lh.watch(model) as w:
        model(batch())
    assert [r.module for r in w.last.records] == ["blocks.0.attn", "blocks.1.attn"]


def test_a_softmax_by_hand_in_a_graph_is_not_seen_and_the_coverage_says_so() -> None:
    model = stack(by_hand())
    compiled, _ = counted(model, "aot_eager")
    plain = outcome(model, lambda: compiled(batch()))
    with lh.watch(model, deep=True) as w:
        same(plain, outcome(model, lambda: compiled(batch())))
    assert [line.module for line in w.coverage()] == ["blocks.0.attn", "blocks.1.attn"]
    assert all(not line.seen and "compiled graph" in line.how for line in w.coverage())


def test_a_graph_that_was_compiled_before_the_watch_is_named() -> None:
    model = stack(by_hand())
    compiled, _ = counted(model, "eager")
    compiled(batch())
    with lh.watch(compiled) as w:
        compiled(batch())
    assert [line.module for line in w.coverage()] == ["blocks.0.attn", "blocks.1.attn"]
    assert all(not line.seen and "compiled" in line.how for line in w.coverage())


class _Operator(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("exported", [False, True])
def test_an_operator_that_is_called_itself_in_a_graph_is_named(exported: bool) -> None:
    x = torch.randn(2, HEADS, TOKENS, 4)
    part: nn.Module = torch.export.export(_Operator(), (x,)).module() if exported else _Operator()
    model = nn.Sequential(part, nn.Identity())
    with lh.watch(model) as w:
        torch.compile(model, backend="eager")(x)
    (line,) = w.coverage()
    assert (line.module, line.seen) == ("0", False)
    assert "in a compiled graph, which is not read" in line.how
    with lh.watch(model) as w:
        model(x)
    (line,) = w.coverage()
    assert (line.module, line.seen, line.note) == ("0", True, "")


class _CallsLevelhead(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_heads = torch.nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.to_heads(x).unflatten(-1, (2, 8)).transpose(1, 2)
        out: Tensor = lh.attention(q, q, q)
        return out


def test_levelheads_own_function_between_graphs_is_named() -> None:
    model, x = _CallsLevelhead(), torch.randn(2, 5, 16)
    with torch.no_grad(), lh.watch(model) as w:
        torch.compile(model, backend="eager")(x)
    (line,) = w.coverage()
    assert not line.seen
    assert "runs between compiled graphs" in line.how


class _Mixer(nn.Module):
    """Attends, but no name says so."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        return self.attend(q, k, v).transpose(1, 2).flatten(2)


class _Apart(_Mixer):
    @torch._dynamo.disable
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v


class _FunctionApart(_Mixer):
    @torch._dynamo.disable
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)


@pytest.mark.parametrize(
    ("kind", "blocks", "line"),
    [
        (_Mixer, False, "a softmax by hand in a compiled graph"),
        (_Mixer, True, "a softmax by hand in a compiled graph"),
        (_Apart, False, "code between compiled graphs"),
        (_Apart, True, "softmax by hand"),
        (_FunctionApart, False, "sdpa"),
        (_FunctionApart, True, "sdpa"),
    ],
)
def test_every_attention_in_and_between_graphs_is_described_or_named(kind: Any, blocks: bool, line: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(), kind())
    plain = outcome(model, lambda: model(batch()))
    whole: Any = model if blocks else torch.compile(model, backend="aot_eager")
    for block in model if blocks else ():
        block.compile(backend="aot_eager")
    with lh.watch(model) as w:
        for _ in range(2):
            same(plain, outcome(model, lambda: whole(batch())))
    lines = [each for each in w.coverage() if each.module]
    assert [each.module for each in lines] == ["0", "1"]
    assert all(line in each.how for each in lines)
    if all(each.seen for each in lines):
        assert [record.module for record in w.last.records] == ["0", "1"]
        for record in w.last.records:
            assert (record.heads.rows == BATCH * TOKENS).all()
            assert record.facts.effective_scale == pytest.approx(1.0)

"""`patch` beside what else PyTorch does with its attention function: compile and its caches, scripts, exports, nested
tensors, and the fast path of `nn.MultiheadAttention`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import levelhead as lh
from levelhead.torch import patch
from levelhead.torch.multihead_forward import MULTIHEAD
from levelhead.torch.operators import observing
from levelhead.torch.sdpa import ORIGINAL


def _runs_levelhead(call: Any, *args: Any) -> bool:
    with observing() as passes:
        call(*args)
    return bool(passes)


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 5, 16)


@pytest.fixture
def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---- compile


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("training", [True, False])
def test_a_model_compiled_before_or_while_patched_follows_the_patch(
    layer: nn.Module, x: Tensor, training: bool
) -> None:
    layer.train(training)
    before = torch.compile(layer, backend="aot_eager")
    assert not _runs_levelhead(before, x)
    with patch():
        assert _runs_levelhead(before, x)
    assert not _runs_levelhead(before, x)
    torch._dynamo.reset()
    while_patched = torch.compile(layer, backend="aot_eager")
    with patch():
        assert _runs_levelhead(while_patched, x)
    assert not _runs_levelhead(while_patched, x)
    with patch():
        assert _runs_levelhead(while_patched, x)


@pytest.mark.usefixtures("fresh")
def test_the_compilers_caches_do_not_mix_both(x: Tensor) -> None:
    """They find entries by the graph: it must say which function attends, also inside `nn.MultiheadAttention`."""
    attention, graphs = nn.MultiheadAttention(16, 2, batch_first=True), []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(str([node.target for node in graph.graph.nodes]))
        return graph.forward

    def compiled() -> Any:
        torch._dynamo.reset()
        return torch.compile(lambda x: attention(x, x, x, need_weights=False)[0], backend=keep)

    compiled()(x)
    with patch():
        compiled()(x)
    plain, patched = graphs
    assert "levelhead" not in plain
    assert "levelhead.attend" in patched
    assert "multi_head_attention_forward" not in patched


def test_the_fast_path_is_off_while_patched_or_watched_in_any_order(x: Tensor) -> None:
    enabled = torch.backends.mha.get_fastpath_enabled
    attention = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    watch = lh.watch(attention)
    held = patch()
    with torch.no_grad():
        attention(x, x, x, need_weights=False)
        assert [record.facts.how for record in watch.last.records] == ["levelhead"]
        watch.detach()
        assert not enabled()
        assert _runs_levelhead(lambda: attention(x, x, x, need_weights=False))
    held.undo()
    held.undo()
    assert enabled()
    assert not _runs_levelhead(lambda: F.scaled_dot_product_attention(x, x, x))
    assert F.multi_head_attention_forward is MULTIHEAD


@pytest.mark.parametrize("patch_goes_first", [True, False])
def test_a_patch_inside_a_watch_is_in_force(x: Tensor, patch_goes_first: bool) -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    watch, held = lh.watch(attention), patch()
    assert _runs_levelhead(lambda: F.scaled_dot_product_attention(x, x, x))
    if patch_goes_first:
        held.undo()
        assert not _runs_levelhead(lambda: F.scaled_dot_product_attention(x, x, x))
        watch.detach()
    else:
        watch.detach()
        assert _runs_levelhead(lambda: F.scaled_dot_product_attention(x, x, x))
        held.undo()
    assert F.scaled_dot_product_attention is ORIGINAL
    assert F.multi_head_attention_forward is MULTIHEAD


# ---- scripts and exports


class _Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.3)


def test_scripting_under_patch_keeps_pytorchs_attention(x: Tensor) -> None:
    heads = x[:, None]
    want = _Attends()(heads)
    with patch():
        scripted = torch.jit.script(_Attends())
        multihead = torch.jit.script(nn.MultiheadAttention(16, 2, batch_first=True))
        assert torch.equal(scripted(heads), want)
    assert torch.equal(torch.jit.script(_Attends())(heads), want)
    assert multihead(x, x, x)[0].shape == x.shape
    torch.jit.script(nn.MultiheadAttention(16, 2, batch_first=True))


class _MaskOfData(nn.Module):
    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        rows = torch.nonzero(keep)[:, 0]  # as many as there are batch rows: known when it runs
        mask = (rows[:, None, None, None] >= 0).expand(-1, 1, 4, 4).tril()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_export_with_a_mask_whose_batch_depends_on_data() -> None:
    x, keep = torch.randn(2, 2, 4, 8), torch.tensor([True, True])
    with patch():
        exported = torch.export.export(_MaskOfData(), (x, keep))
    assert "levelhead" in str(exported.graph)
    torch.testing.assert_close(exported.module()(x, keep), _MaskOfData()(x, keep))
    with pytest.raises(RuntimeError):
        exported.module()(x, torch.tensor([True, False]))


# ---- nested tensors


def _jagged(*lengths: int) -> Tensor:
    rows = [torch.randn(n, 2, 8) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)


@pytest.mark.parametrize("causal", [False, True])
def test_jagged_tensors_are_packed_sequences(causal: bool) -> None:
    leaf = _jagged(3, 6, 1)
    x = leaf.transpose(1, 2)
    with patch():
        out = F.scaled_dot_product_attention(x, x, x, is_causal=causal, scale=0.2)
    assert _runs_levelhead(lambda: lh.torch.scaled_dot_product_attention(x, x, x))
    (found,) = torch.autograd.grad(out.values().square().sum(), leaf)
    rows = [row.detach().requires_grad_() for row in leaf.unbind()]
    for row, mine, gradient in zip(rows, out.unbind(), found.unbind(), strict=True):
        one = row.transpose(0, 1)[None]
        want = F.scaled_dot_product_attention(one, one, one, is_causal=causal, scale=0.2)
        torch.testing.assert_close(mine[None], want)
        (by_row,) = torch.autograd.grad(want.square().sum(), row)
        torch.testing.assert_close(gradient, by_row)


def test_jagged_queries_and_keys_of_other_lengths() -> None:
    q, k = _jagged(3, 6, 1).transpose(1, 2), _jagged(2, 4, 5).transpose(1, 2)
    with patch():
        out = F.scaled_dot_product_attention(q, k, k)
    for mine, a, b in zip(out.unbind(), q.unbind(), k.unbind(), strict=True):
        torch.testing.assert_close(mine[None], F.scaled_dot_product_attention(a[None], b[None], b[None]))
    with patch(), pytest.raises(RuntimeError):  # PyTorch's refusal
        F.scaled_dot_product_attention(q, k, k, is_causal=True)
    with pytest.raises(lh.LevelheadError, match="dense tensor"):
        lh.torch.scaled_dot_product_attention(q, k, k, is_causal=True)


def test_other_nested_tensors_run_on_pytorch_under_patch() -> None:
    x = torch.nested.nested_tensor([torch.randn(2, n, 8) for n in (3, 6)])
    want = F.scaled_dot_product_attention(x, x, x)
    with patch():
        found = F.scaled_dot_product_attention(x, x, x)
    assert all(torch.equal(a, b) for a, b in zip(found.unbind(), want.unbind(), strict=True))


# ---- what counts or rewrites operators


def test_operations_are_counted_as_for_a_fused_kernel_of_pytorch() -> None:
    shapes = [(2, 3, n, 8) for n in (5, 7, 7)]
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    with patch(), FlopCounterMode(display=False) as counter:
        out = F.scaled_dot_product_attention(q, k, v)
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == sdpa_flop_count(*shapes)
    assert counter.get_total_flops() - forward == sdpa_backward_flop_count(out.shape, *shapes)


def test_functionalize_rewrites_a_call_and_its_gradient() -> None:
    q, k, v = torch.randn(3, 2, 3, 5, 8)
    q.requires_grad_()
    wanted = F.scaled_dot_product_attention(q, k, v)
    with patch():
        found = torch.func.functionalize(F.scaled_dot_product_attention)(q, k, v)
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(x.square().sum(), q)[0] for x in (found, wanted)]
    torch.testing.assert_close(*gradients)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("compiled", [False, True])
def test_forward_mode_inside_torch_func_refuses_dropout(compiled: bool) -> None:
    """Compiled, its tangents were 0 in silence; elsewhere it raised an error of torch's."""
    x = torch.randn(1, 2, 5, 8)

    def tangent(x: Tensor) -> Any:
        return torch.func.jvp(lambda q: F.scaled_dot_product_attention(q, x, x, dropout_p=0.5), (x,), (x,))

    with lh.torch.patch(), pytest.raises(lh.LevelheadError, match=r"dropout: expected 0 in forward mode"):
        (torch.compile(tangent, backend="eager") if compiled else tangent)(x)


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
def test_torch_func_inside_a_compiled_graph(transform: str) -> None:
    """jvp had lost the tangents there, in silence."""
    q = torch.randn(2, 2, 5, 4)

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    def call(x: Tensor) -> Tensor:
        if transform == "grad":
            return torch.func.grad(lambda y: attend(y).square().sum())(x)
        return torch.func.jvp(attend, (x,), (x,))[1] if transform == "jvp" else torch.func.vmap(attend)(x)

    with sdpa_kernel(SDPBackend.MATH):  # the others have no tangents
        wanted = call(q)
    with patch():
        found = torch.compile(call, backend="aot_eager", fullgraph=True)(q)
    torch.testing.assert_close(found, wanted)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("each", [False, True], ids=["grad", "vmap of grad"])
def test_torch_func_with_dropout_in_compiled_code_is_torchs(each: bool) -> None:
    """It had failed with an error of torch's: the seed has no number there."""
    q, k, v = (torch.randn(2, 2, 5, 4) for _ in range(3))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).square().sum()

    def call(q: Tensor) -> Tensor:
        gradient = torch.func.grad(loss)
        return torch.func.vmap(gradient, randomness="different")(q, k, v) if each else gradient(q, k, v)

    torch.manual_seed(3)
    wanted = call(q)
    with patch():
        torch.manual_seed(3)
        found = torch.compile(call, backend="eager", fullgraph=True)(q)
    torch.testing.assert_close(found, wanted)

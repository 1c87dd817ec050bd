"""What PyTorch does with an operator besides calling it: opcheck, compile, autocast, checkpoints,
vmap and torch.func, dual tensors, copies of modules."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vmap
from torch.nn import functional as F  # noqa: N812
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import levelhead as lh
from levelhead.call.options import Scoring
from levelhead.torch import MultiHeadAttention, scaled_dot_product_attention

ORIGINAL = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    torch.manual_seed(0)
    torch.compiler.reset()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tensors(*lead: int, T: int = 5, S: int = 7, D: int = 4, grad: bool = True) -> list[Tensor]:
    return [torch.randn(*lead, n, D, requires_grad=grad) for n in (T, S, S)]


# ---- opcheck

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"left": 3, "right": 1},
    "bool mask": {"mask": torch.ones(5, 7).tril() > 0},
    "bias": {"mask": torch.zeros(4, 1, 7, dtype=torch.float64, requires_grad=True)},
    "sinks": {"sinks": torch.zeros(4, dtype=torch.float64, requires_grad=True)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": torch.ones(4, dtype=torch.float64)},
    "lengths": {"key_lengths": torch.tensor([5, 7])},
    "query lengths": {"query_lengths": torch.tensor([5, 2])},
    "starts": {"query_start": torch.tensor([2, -1]), "causal": True},
    "segments": {
        "query_segments": torch.tensor([[0, 0, 1, 1, 1]] * 2),
        "key_segments": torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2),
    },
    "dropout": {"dropout": 0.3, "seed": torch.tensor(7)},
    "cosine": {"cosine": True},
    "log-n": {"log_n": True, "causal": True},
    "threads": {"threads": 1},
}


def call_of(name: str, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    q, k, v = (
        torch.randn(sizes, dtype=dtype, requires_grad=True) for sizes in ((2, 4, 5, 4), (2, 2, 7, 4), (2, 2, 7, 3))
    )
    scale = torch.full((4,), 0.5, dtype=torch.float64, requires_grad=True)
    options = dict(OPTIONS[name])
    threads = options.pop("threads", None)
    return (q, k, v, *Scoring(scale=scale, **options), threads, False)


@pytest.mark.parametrize("name", OPTIONS)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(torch.ops.levelhead.attend.default, call_of(name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_other_dtypes(dtype: torch.dtype) -> None:
    torch.library.opcheck(torch.ops.levelhead.attend.default, call_of("plain", dtype))


def test_opcheck_of_an_output_laid_out_as_the_query() -> None:
    q, _, _, *options, _ = call_of("plain")
    x = torch.randn(2, 5, 4, 4, dtype=q.dtype).transpose(1, 2).requires_grad_()
    torch.library.opcheck(torch.ops.levelhead.attend.default, (x, x, x, *options, True))
    assert torch.ops.levelhead.attend(x, x, x, *options, True)[0].stride() == x.stride()


@pytest.mark.parametrize("name", ["plain", "bias", "sinks", "dropout", "segments"])
@pytest.mark.parametrize("with_logsumexp", [False, True])
def test_opcheck_of_the_gradient(name: str, with_logsumexp: bool) -> None:
    q, k, v, *options = (x.detach() if isinstance(x, Tensor) else x for x in call_of(name))
    out, logsumexp = torch.ops.levelhead.attend(q, k, v, *options)
    dlogsumexp = torch.randn_like(logsumexp) if with_logsumexp else None
    wanted = [True, True, True, True, name == "bias", name == "sinks"]
    given = (torch.randn_like(out), dlogsumexp, q, k, v, out, logsumexp, *options, wanted)
    operator = torch.ops.levelhead.attend_backward.default
    torch.library.opcheck(operator, given)
    learning = (given[0], dlogsumexp, *(x.requires_grad_() for x in (q, k, v)), *given[5:])
    # Without tracing of the second derivative, which an operator with this formula cannot support.
    torch.library.opcheck(operator, learning, test_utils=("test_schema", "test_faketensor"))


# ---- compile


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_whole(backend: str) -> None:
    q, k, v = tensors(2, 4)
    mask = torch.randn(5, 7)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = scaled_dot_product_attention(q * 2, k, v, attn_mask=mask, dropout_p=0.1)
        return (out + 1).square().sum()

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    torch.manual_seed(1)
    want = torch.autograd.grad(step(q, k, v), (q, k, v))
    torch.manual_seed(1)
    found = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    if backend == "aot_eager":  # inductor has another random number generator
        for x, y in zip(found, want, strict=True):
            assert_close(x, y)
    assert all(torch.isfinite(x).all() for x in found)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": 1}])
def test_one_graph_serves_every_length(options: dict[str, Any]) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        given = options | ({"attn_mask": mask} if "attn_mask" in options else {})
        return scaled_dot_product_attention(q, k, v, **given)

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for T in (5, 9, 13, 40):
        q, k, v = tensors(2, 3, T=T, S=T)
        mask = torch.randn(T, T, requires_grad=True)
        for x in (q, k, v):
            torch._dynamo.mark_dynamic(x, 2)
        torch._dynamo.mark_dynamic(mask, 0)
        torch._dynamo.mark_dynamic(mask, 1)
        found = torch.autograd.grad(compiled(q, k, v, mask).square().sum(), (q, k, v))
        want = torch.autograd.grad(run(q, k, v, mask).square().sum(), (q, k, v))
        for x, y in zip(found, want, strict=True):
            assert_close(x, y)
    assert counter.frame_count == 1


def test_compiles_under_autocast() -> None:
    q, k, v = tensors(2, 3)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return scaled_dot_product_attention(q, k, v)

    found = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, run(q, k, v))


WEIGHTS = [torch.randn(6, 4), torch.randn(6, 4), torch.randn(6)]
BREAKING = {
    "attention": lambda q, k, v: lh.attention(q, k, v),
    "attention with options": lambda q, k, v: lh.attention(q, k, v, softcap=3.0, causal=True),
    "observe": lambda q, k, v: lh.observe(q, k, v).output,
    "additive": lambda q, k, v: lh.additive_attention(q, k, v, *WEIGHTS),
}


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("name", BREAKING)
def test_the_rest_breaks_the_graph_and_stays_right(name: str, learns: bool) -> None:
    """`levelhead.attention` reads its arguments' memory: it cannot be traced, only called."""
    given = tensors(2, 3, grad=learns)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (BREAKING[name](q * 2, k, v) + 1).square().sum()

    found, want = torch.compile(step, backend="aot_eager")(*given), step(*given)
    assert_close(found, want)
    if learns:
        pairs = zip(torch.autograd.grad(found, given), torch.autograd.grad(want, given), strict=True)
        for x, y in pairs:
            assert_close(x, y)


@pytest.mark.parametrize("training", [False, True])
def test_a_compiled_module(training: bool) -> None:
    module = MultiHeadAttention(16, 2, kv_heads=1, sinks=True, rotary=1e4, qk_norm=True)
    module.train(training)
    x = torch.randn(2, 5, 16, requires_grad=True)
    found, want = torch.compile(module, backend="aot_eager")(x), module(x)
    assert_close(found, want)
    assert_close(torch.autograd.grad(found.sum(), x), torch.autograd.grad(want.sum(), x))


# ---- autocast, checkpoints


def test_a_module_under_autocast() -> None:
    module = MultiHeadAttention(16, 2, qk_norm=True, sinks=True, rotary=1e4)
    x = torch.randn(2, 5, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x)
    assert out.dtype is torch.bfloat16
    assert_close(out.float(), module(x), atol=3e-2, rtol=3e-2)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in module.parameters())


def test_additive_attention_is_not_rounded_by_autocast() -> None:
    q, k, v = tensors(2, 3)
    want = lh.additive_attention(q, k, v, *WEIGHTS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = lh.additive_attention(q, k, v, *WEIGHTS)
    assert torch.equal(found, want)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_replays_dropout(reentrant: bool) -> None:
    given = tensors(2, 3)

    def run(*given: Tensor) -> Tensor:
        return scaled_dot_product_attention(*given, dropout_p=0.5).square().sum()

    torch.manual_seed(5)
    run(*given).backward()
    want = [x.grad for x in given]
    for x in given:
        x.grad = None
    torch.manual_seed(5)
    checkpoint(run, *given, use_reentrant=reentrant).backward()
    assert all(torch.equal(x.grad, y) for x, y in zip(given, want, strict=True))


# ---- vmap and torch.func


def squares(call: Any, **options: Any) -> Any:
    return lambda q, k, v: call(q, k, v, **options).square().sum()


def test_vmap() -> None:
    q, k, v = tensors(6, 2, 3, grad=False)
    mask = torch.rand(6, 5, 7) < 0.8
    want = torch.stack([scaled_dot_product_attention(*x, attn_mask=m) for *x, m in zip(q, k, v, mask, strict=True)])
    mapped = vmap(lambda q, k, v, m: scaled_dot_product_attention(q, k, v, attn_mask=m))
    assert_close(mapped(q, k, v, mask), want)
    shared = vmap(scaled_dot_product_attention, in_dims=(0, None, None))
    each = torch.stack([scaled_dot_product_attention(x, k[0], v[0]) for x in q])
    assert_close(shared(q, k[0], v[0]), each)
    moved = vmap(scaled_dot_product_attention, in_dims=(1, 2, 0), out_dims=2)
    turned = moved(q.movedim(0, 1), k.movedim(0, 2), v)
    assert_close(turned.movedim(2, 0), scaled_dot_product_attention(q, k, v))


def test_gradients_through_vmap() -> None:
    q, k, v = tensors(2, 3)
    mask = torch.randn(5, 7, requires_grad=True)
    mapped = vmap(lambda *x: scaled_dot_product_attention(*x, attn_mask=mask))(q, k, v)
    found = torch.autograd.grad(mapped.square().sum(), (q, k, v, mask))
    want = torch.autograd.grad(ORIGINAL(q, k, v, attn_mask=mask).square().sum(), (q, k, v, mask))
    for x, y in zip(found, want, strict=True):
        assert_close(x, y)


def test_dropout_under_vmap() -> None:
    """As in PyTorch: an error, the same for every example, or different."""
    one = tensors(3, grad=False)
    q, k, v = (x.expand(4, *x.shape) for x in one)

    def drop(*given: Tensor) -> Tensor:
        return scaled_dot_product_attention(*given, dropout_p=0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        vmap(drop)(q, k, v)
    same = vmap(drop, randomness="same")(q, k, v)
    different = vmap(drop, randomness="different")(q, k, v)
    for i in range(1, 4):
        assert torch.equal(same[0], same[i])
        assert not torch.equal(different[0], different[i])


def test_what_each_example_has_of_its_own() -> None:
    q, k, v = tensors(6, 2, 3, grad=False)
    scale, sinks = torch.rand(6, 3, dtype=torch.float64), torch.randn(6, 3)

    def run(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, sinks: Tensor) -> Any:
        return torch.ops.levelhead.attend(q, k, v, *Scoring(scale=scale, sinks=sinks), None, False)

    found = vmap(run)(q, k, v, scale, sinks)
    for i in range(6):
        for x, y in zip(found, run(q[i], k[i], v[i], scale[i], sinks[i]), strict=True):
            assert torch.equal(x[i], y)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.randn(5, 7)}])
def test_torch_func(options: dict[str, Any]) -> None:
    q, k, v = tensors(2, 3, grad=False)
    ours, theirs = (squares(scaled_dot_product_attention, **options), squares(ORIGINAL, **options))
    wrt = (0, 1, 2)
    for x, y in zip(grad(ours, wrt)(q, k, v), grad(theirs, wrt)(q, k, v), strict=True):
        assert_close(x, y)
    for x, y in zip(vmap(grad(ours, wrt))(q, k, v), vmap(grad(theirs, wrt))(q, k, v), strict=True):
        assert_close(x, y)
    jacobian = jacrev(lambda q: scaled_dot_product_attention(q, k, v, **options))(q)
    assert_close(jacobian, jacrev(lambda q: ORIGINAL(q, k, v, **options))(q))


def test_a_gradient_of_each_example_by_what_they_share() -> None:
    q, k, v = tensors(2, 3, grad=False)
    mask = torch.randn(5, 7)

    def of(call: Any) -> Tensor:
        loss = grad(lambda m, q, k, v: call(q, k, v, attn_mask=m).square().sum())
        return vmap(loss, in_dims=(None, 0, 0, 0))(mask, q, k, v)

    assert_close(of(scaled_dot_product_attention), of(ORIGINAL))


def test_a_hessian() -> None:
    q, k, v = (x.double() for x in tensors(1, 1, T=3, S=3, grad=False))

    def plain(q: Tensor) -> Tensor:
        return (torch.softmax(q @ k.mT / 2, -1) @ v).square().sum()

    def ours(q: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v).square().sum()

    wanted = jacrev(jacrev(plain))(q)
    assert_close(jacrev(jacrev(ours))(q), wanted)
    for vectorize in (False, True):
        assert_close(torch.autograd.functional.hessian(ours, q, vectorize=vectorize), wanted)


CALLS = {
    "drop-in": scaled_dot_product_attention,
    "drop-in, options": lambda *x: scaled_dot_product_attention(*x, attn_mask=torch.ones(5, 7)),
    "attention": lh.attention,
    "attention, options": lambda *x: lh.attention(*x, softcap=3.0),
    "observe": lambda *x: lh.observe(*x).output,
    "additive": lambda *x: lh.additive_attention(*x, *WEIGHTS),
}


NO_FORWARD_MODE = [name for name in CALLS if not name.startswith("drop-in")]


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("name", NO_FORWARD_MODE)
def test_dual_tensors_are_refused(name: str, which: int) -> None:
    given = tensors(2, 3, grad=False)
    with forward_ad.dual_level():
        CALLS[name](*given)  # these are not dual tensors
        given[which] = forward_ad.make_dual(given[which], torch.ones_like(given[which]))
        with pytest.raises(lh.LevelheadError, match="dual tensor"):
            CALLS[name](*given)


# ---- forward mode


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


DERIVATIVES = {
    "jvp": lambda call, q, k, v: jvp(call, (q, k, v), (k[..., :5, :], q[..., :1, :].expand_as(k), v))[1],
    "jacfwd": lambda call, q, k, v: torch.func.jacfwd(call, argnums=1)(q, k, v),
    "hessian": lambda call, q, k, v: torch.func.hessian(lambda q: call(q, k, v).square().sum())(q),
    "reverse over forward": lambda call, q, k, v: grad(lambda q: jvp(lambda v: call(q, k, v), (v,), (v,))[1].sum())(q),
    "vmap of jvp": lambda call, q, k, v: vmap(lambda q, k, v: jvp(lambda q: call(q, k, v), (q,), (q,))[1])(q, k, v),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_forward_mode(name: str) -> None:
    given = [x.double() for x in tensors(1, 2, grad=False)]
    found, want = (DERIVATIVES[name](call, *given) for call in (scaled_dot_product_attention, _plain))
    assert_close(found, want)


def test_dual_tensors_keep_their_tangents_and_plain_ones_their_bits() -> None:
    q, k, v = tensors(2, 3, grad=False)
    want = scaled_dot_product_attention(q, k, v)
    with forward_ad.dual_level():
        assert torch.equal(scaled_dot_product_attention(q, k, v), want)
        found = forward_ad.unpack_dual(scaled_dot_product_attention(forward_ad.make_dual(q, q), k, v))
        plain = forward_ad.unpack_dual(_plain(forward_ad.make_dual(q, q), k, v))
    assert_close(found.primal, want)
    assert_close(found.tangent, plain.tangent)


@pytest.mark.parametrize("name", ["attention", "attention, options", "observe"])
def test_what_cannot_be_transformed_says_what_can(name: str) -> None:
    given = tensors(2, 3, grad=False)
    for call in (vmap(CALLS[name]), grad(lambda *x: CALLS[name](*x).sum())):
        with pytest.raises(lh.LevelheadError, match="Inside torch.func use .*attn_mask"):
            call(*given)


# ---- other modes


def test_inference_mode_and_lazy_negation() -> None:
    q, k, v = tensors(2, 3, grad=False)
    mask = torch.randn(5, 7)
    want = ORIGINAL(q, k, v, attn_mask=mask)
    with torch.inference_mode():
        found = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert found.is_inference()
    assert_close(found.clone(), want)
    negated = [torch._neg_view(-x) for x in (q, k, v, mask)]
    assert all(x.is_neg() for x in negated)
    lazily = scaled_dot_product_attention(*negated[:3], attn_mask=negated[3])
    assert torch.equal(lazily, found)


def test_make_fx_and_symbolic_trace_see_the_call() -> None:
    q, k, v = tensors(2, 3, grad=False)
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda q, k, v: scaled_dot_product_attention(q, k, v))(q, k, v)
    assert "levelhead.attend" in traced.code
    assert_close(traced(q * 2, k, v), ORIGINAL(q * 2, k, v))

    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return scaled_dot_product_attention(q, k, v, scale=0.5)

    symbolic = torch.fx.symbolic_trace(Model())
    assert_close(symbolic(q, k, v), ORIGINAL(q, k, v, scale=0.5))
    exported = torch.export.export(Model(), (q, k, v)).module()
    assert_close(exported(q, k, v), ORIGINAL(q, k, v, scale=0.5))


# ---- modules


def test_copies_of_a_module() -> None:
    options: dict[str, Any] = {"kv_heads": 1, "qk_norm": True, "sinks": True, "rotary": 1e4}
    options |= {"scale": "log-n", "causal": True, "window": (4, None), "softcap": 20.0}
    module = MultiHeadAttention(16, 2, **options)
    nn.init.normal_(module.sinks)
    x = torch.randn(2, 5, 16)
    want = module(x)
    assert torch.equal(copy.deepcopy(module)(x), want)
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), want)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = MultiHeadAttention(16, 2, **options)
    assert not torch.equal(other(x), want)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), want)

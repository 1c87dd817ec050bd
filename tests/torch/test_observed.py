"""`observed_attention`: the core's pass on CPU tensors, and the path of other devices, which LEVELHEAD_OBSERVE=torch
takes here: PyTorch's kernel for the output, states by plain torch. `tests/device/interpreted_sight.py` has Triton.
"""

from __future__ import annotations

import copy
import doctest
import gc
import inspect
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import levelhead as lh
from levelhead import reference
from levelhead.call.options import NAMES
from levelhead.errors import LevelheadError
from levelhead.torch import best_kernel, flex, observed, observed_attention
from levelhead.torch.best_kernel import FLEX, FORMED, SDPA, Wanted, kernel_for
from levelhead.torch.tensor_observation import TensorObservation
from levelhead.torch.tensor_options import described
from support import check_rows

pytestmark = pytest.mark.usefixtures("alone")

B, H, G, T, S, D = 2, 4, 2, 7, 9, 16
IDS = torch.arange(S) // 4
RANDOM = torch.Generator().manual_seed(3)
HOLES = torch.rand(B, 1, T, S, generator=RANDOM) < 0.6
HOLES[0, 0, 2] = False  # a row that sees nothing

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 1)},
    "mask": {"mask": HOLES},
    "bias": {"mask": torch.randn(H, T, S, generator=RANDOM)},
    "causal and mask": {"causal": True, "mask": HOLES[0, 0]},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-1, 1, H)},
    "ALiBi": {"alibi": True},
    "key lengths": {"key_lengths": torch.tensor([4, 9])},
    "query lengths": {"query_lengths": torch.tensor([4, 7])},
    "segments": {"segments": (IDS[-T:], IDS)},
    "query start": {"query_start": torch.tensor([1, 3]), "causal": True},
    "scale": {"scale": -0.2},
    "scale per head": {"scale": torch.linspace(-0.2, 0.4, H)},
    "scale as a tensor": {"scale": torch.tensor(0.3)},
    "dropout": {"dropout": 0.5, "seed": 2**64 - 1},
    "cosine": {"scale": "cosine"},
    "log-n": {"scale": "log-n"},
    "all": {"causal": True, "softcap": 2.0, "alibi": True, "sinks": torch.zeros(H), "segments": (IDS[-T:], IDS)},
}
BEYOND_SDPA = ("softcap", "sinks", "scale per head", "scale as a tensor", "all")  # no gradient for them on a CPU
OF_THE_CORE = ("dropout", "cosine", "log-n")  # refused elsewhere
BY_SDPA = ("plain", "mask", "bias", "scale")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of other devices, on CPU tensors."""
    monkeypatch.setenv("LEVELHEAD_OBSERVE", "torch")


def tensors(grad: bool = False, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    sizes = ((H, T), (G, S), (G, S))
    return [torch.randn(B, heads, n, D, dtype=dtype).requires_grad_(grad) for heads, n in sizes]


def as_numpy(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(as_numpy, x))
    return x.detach().numpy() if isinstance(x, Tensor) else x


def check(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], out: Tensor, seen: Any) -> None:
    """Output and statistics against the definition."""
    truth = reference.observe(*map(as_numpy, (q, k, v)), **{name: as_numpy(x) for name, x in options.items()})
    np.testing.assert_allclose(as_numpy(out), truth.output, atol=2e-6, rtol=2e-5)
    check_rows(seen.rows, truth.rows, M=10.0, sinks=seen.sinks)
    np.testing.assert_allclose(as_numpy(seen.logsumexp), truth.logsumexp, atol=2e-6, rtol=2e-6)
    assert not any(x.requires_grad for x in (seen.sums, seen.counts, seen.logsumexp))


def gradients(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return list(torch.autograd.grad(out, inputs, upstream))


# ---- by the core


@pytest.mark.parametrize("name", OPTIONS)
def test_the_core_gives_both_in_one_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(grad=True)
    passes: list[Any] = []
    forward = lh._core.forward
    monkeypatch.setattr(lh._core, "forward", lambda *a, **how: passes.append(how) or forward(*a, **how))
    out, seen = observed_attention(q, k, v, **OPTIONS[name])
    assert len(passes) == 1
    assert isinstance(seen, lh.Observation)
    assert seen.path == "core"
    check(q, k, v, OPTIONS[name], out, seen)
    want = lh.attention(q, k, v, **OPTIONS[name])
    assert torch.equal(out, want)
    for found, wanted in zip(gradients(out, q, k, v), gradients(want, q, k, v), strict=True):
        assert torch.equal(found, wanted)
    with torch.no_grad():
        assert torch.equal(observed_attention(q, k, v, **OPTIONS[name])[0], out)


def test_the_same_statistics_as_observe() -> None:
    q, k, v = tensors()
    for options in OPTIONS.values():
        _, seen = observed_attention(q, k, v, **options)
        want = lh.observe(q, k, v, **options)
        np.testing.assert_array_equal(seen.state.sums, want.state.sums)
        np.testing.assert_array_equal(seen.state.counts, want.state.counts)
        first, wanted = seen.state.first_keys, want.state.first_keys
        assert (first is None) == (wanted is None)
        assert first is None or np.array_equal(first, wanted)
        assert repr(seen).splitlines()[1:] == repr(want).splitlines()[1:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("path", ["core", "torch"])
def test_sinks_and_lengths_are_those_of_the_call(path: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEVELHEAD_OBSERVE", path)
    q, k, v = tensors()
    sinks, lengths = nn.Parameter(torch.zeros(H, dtype=dtype), requires_grad=path == "core"), torch.tensor([4, 7])
    _, seen = observed_attention(q, k, v, sinks=sinks, query_lengths=lengths)
    plain = lh.observe(q, k, v, sinks=sinks, query_lengths=lengths)
    want = lh.observe(q, k, v, sinks=np.zeros(H), query_lengths=[4, 7])
    with torch.no_grad():
        sinks.fill_(99.0)  # an optimizer's step
        lengths.fill_(1)
    for given in (seen, plain):
        np.testing.assert_allclose(given.rows.logsumexp, want.rows.logsumexp, rtol=1e-5)
        np.testing.assert_array_equal(given.exists, want.exists)
        assert given.rows.sink[0, 0, 0] > 0.01


def test_gradients_reach_a_scale_a_bias_and_sinks_and_twice() -> None:
    learned = {"scale": torch.tensor(0.4), "mask": torch.randn(H, T, S), "sinks": torch.zeros(H)}
    options: dict[str, Any] = {name: x.double().requires_grad_() for name, x in learned.items()}
    q, k, v = tensors(grad=True, dtype=torch.float64)
    inputs = (q, k, v, *options.values())
    out, _ = observed_attention(q, k, v, **options)
    want = lh.attention(q, k, v, **options)
    once = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    wanted = torch.autograd.grad(want.square().sum(), inputs, create_graph=True)
    for a, b in zip(once, wanted, strict=True):
        assert torch.equal(a, b)
    twice, wanted = (torch.autograd.grad(sum(x.square().sum() for x in g), inputs) for g in (once, wanted))
    for a, b in zip(twice, wanted, strict=True):
        assert torch.equal(a, b)


# ---- on another device


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in (*BEYOND_SDPA, *OF_THE_CORE)])
def test_elsewhere_the_kernel_is_pytorchs(name: str, elsewhere: None) -> None:
    q, k, v = tensors(grad=True)
    out, seen = observed_attention(q, k, v, **OPTIONS[name])
    assert seen.path == f"{SDPA if name in BY_SDPA else FORMED} + torch"
    check(q, k, v, OPTIONS[name], out, seen)
    found = gradients(out, q, k, v)
    if name in BY_SDPA:  # untouched
        options = OPTIONS[name]
        how: dict[str, Any] = {"scale": options.get("scale"), "enable_gqa": True}
        want = functional.scaled_dot_product_attention(q, k, v, options.get("mask"), **how)
        assert torch.equal(out, want)
        assert all(map(torch.equal, found, gradients(want, q, k, v)))
    want = lh.attention(q, k, v, **OPTIONS[name], threads=1)
    for x, y in zip(found, gradients(want, q, k, v), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


def test_causality_from_the_first_key_on_is_said_to_the_kernel(elsewhere: None) -> None:
    q, k, v = (x[:, :, :T] for x in tensors())
    out, seen = observed_attention(q, k, v, causal=True)
    assert seen.path == "sdpa + torch"
    assert torch.equal(out, functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    last, seen = observed_attention(q[:, :, -1:], k, v, causal=True)  # it sees every key
    assert seen.path == "sdpa + torch"
    torch.testing.assert_close(last, out[:, :, -1:])


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_functions_of_scores_are_flexs(elsewhere: None) -> None:
    q, k, v = tensors()
    out, seen = observed_attention(q, k, v, **OPTIONS["all"])
    assert seen.path == "flex + torch"
    check(q, k, v, OPTIONS["all"], out, seen)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_says_every_option_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: there flex serves all of them, and has gradients."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    together = {**OPTIONS["all"], "mask": torch.randn(1, 1, T, S), "sinks": torch.zeros(H), "window": (4, 0)}
    together |= {"key_lengths": torch.tensor([9, 5]), "query_lengths": torch.tensor([7, 3])}
    for options in (together, {"scale": torch.linspace(0.1, 0.4, H), "mask": HOLES}):
        given = {n: x.requires_grad_() if n in ("sinks", "scale") else x for n, x in options.items()}
        q, k, v = tensors(grad=True)
        call = described(q, k, v, given, host=True)
        out = flex.by_flex(q, k, v, call, best_kernel.shared(call))
        want = lh.attention(q, k, v, **given)
        torch.testing.assert_close(out, want, atol=2e-6, rtol=2e-5)
        inputs = (q, k, v, *(x for x in given.values() if isinstance(x, Tensor) and x.requires_grad))
        for x, y in zip(gradients(out, *inputs), gradients(want, *inputs), strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_device_describes_calls_as_the_host_does(name: str) -> None:
    q, k, v = tensors()
    options = OPTIONS[name] | {x: y.numpy() for x, y in OPTIONS[name].items() if x in ("sinks", "query_lengths")}
    want = described(q, k, v, OPTIONS[name], host=True)
    for given in (options, OPTIONS[name]):
        found = described(q, k, v, given, host=False)
        assert (found.shape, found.factor, found.start) == (want.shape, want.factor, want.start)
        for x, y in zip(found.scoring, want.scoring, strict=True):
            assert torch.equal(x, y.to(x.dtype).expand_as(x)) if isinstance(x, Tensor) else x == y


@pytest.mark.parametrize(
    ("name", "x"),
    [
        ("mask", torch.zeros(3, 3)),
        ("mask", torch.zeros(T, S, dtype=torch.float64)),
        ("mask", np.zeros((T, S), np.float32)),
        ("key_lengths", torch.ones(B)),
        ("key_lengths", torch.ones(3, dtype=torch.int64)),
        ("key_lengths", [9, 10]),
        ("segments", IDS),
        ("segments", (IDS, IDS, IDS)),
        ("sinks", torch.zeros(3)),
        ("scale", torch.zeros(H, dtype=torch.int64)),
        ("causal", torch.tensor(True)),
    ],
)
def test_a_device_refuses_by_name(name: str, x: Any) -> None:
    with pytest.raises(LevelheadError, match=f"^{name}: "):
        described(*tensors(), {name: x}, host=False)


def test_which_kernel() -> None:
    nothing: frozenset[str] = frozenset()
    window, cap = frozenset({"left"}), frozenset({"softcap"})
    for device in ("cuda", "cpu", "mps", "xpu"):
        assert kernel_for(Wanted(device, nothing, nothing, True)) == SDPA
    assert kernel_for(Wanted("cuda", window, nothing, True)) == FLEX
    assert kernel_for(Wanted("cuda", nothing, cap, True)) == FLEX
    assert kernel_for(Wanted("cuda", window, nothing, True, fits_flex=False)) == FORMED
    assert kernel_for(Wanted("mps", window, nothing, True)) == FORMED
    assert kernel_for(Wanted("mps", window, cap, False)) == FLEX
    assert kernel_for(Wanted("xpu", window, cap, True)) == FLEX
    for refused in (Wanted("mps", window, cap, True), Wanted("cuda", window, cap, True, fits_flex=False)):
        with pytest.raises(LevelheadError, match="^softcap: "):
            kernel_for(refused)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("softcap", {"softcap": 2.0}),
        ("sinks", {"sinks": torch.zeros(H)}),
        ("scale", {"scale": "cosine"}),
        ("scale", {"scale": "log-n"}),
        ("threads", {"threads": 2}),
        ("seed", {"dropout": 0.5, "seed": 1}),
        ("alibi", {"alibi": torch.ones(H, requires_grad=True)}),
    ],
)
def test_what_no_kernel_serves_is_refused_by_name(name: str, options: dict[str, Any], elsewhere: None) -> None:
    with pytest.raises(LevelheadError, match=f"^{name}: "):
        observed_attention(*tensors(grad=True), **options)


# ---- on both


@pytest.mark.parametrize("path", ["core", "sdpa + torch"])
@pytest.mark.parametrize("lead", [(), (H,), (B, 1, H), (3, 0, H), (2, 0)])
def test_any_rank_and_strides(path: str, lead: tuple[int, ...], request: pytest.FixtureRequest) -> None:
    if path != "core":
        request.getfixturevalue("elsewhere")
    q, k, v = (torch.randn(*lead, D, T).mT for _ in range(3))
    out, seen = observed_attention(q, k, v, causal=True)
    assert (out.shape, seen.path) == (q.shape, path)
    check(q, k, v, {"causal": True}, out, seen)


def test_no_key_at_all(elsewhere: None) -> None:
    q, k, v = torch.randn(B, H, T, D), torch.randn(B, G, 0, D), torch.randn(B, G, 0, D)
    out, seen = observed_attention(q, k, v, sinks=torch.zeros(H), softcap=2.0)
    assert not out.any()
    check(q, k, v, {"sinks": np.zeros(H)}, out, seen)


@pytest.mark.parametrize("way", ["core", "elsewhere"])
def test_half_types_autocast_and_checkpointing(way: str, request: pytest.FixtureRequest) -> None:
    if way != "core":
        request.getfixturevalue("elsewhere")
    q, k, v = tensors(grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, seen = observed_attention(q, k.half(), v, mask=torch.zeros(T, S))
    narrow = [x.bfloat16() for x in (q, k.half(), v)]
    want, plain = observed_attention(*narrow, mask=torch.zeros(T, S).bfloat16())
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, want)
    np.testing.assert_array_equal(seen.state.sums, plain.state.sums)
    assert seen.state.sums.dtype == np.float32
    out, seen = checkpoint(lambda *x: observed_attention(*x, dropout=0.5), q, k, v, use_reentrant=False)
    torch.manual_seed(5)
    want, _ = observed_attention(q, k, v, dropout=0.5)
    torch.manual_seed(5)
    out, seen = checkpoint(lambda *x: observed_attention(*x, dropout=0.5), q, k, v, use_reentrant=False)
    assert all(map(torch.equal, gradients(out, q, k, v), gradients(want, q, k, v)))
    assert seen.heads.rows.tolist() == [[T] * H] * B


@pytest.mark.parametrize("way", ["core", "elsewhere"])
def test_an_observation_keeps_no_graph(way: str, request: pytest.FixtureRequest) -> None:
    if way != "core":
        request.getfixturevalue("elsewhere")
    kept = []
    dead: list[Any] = []
    for _ in range(3):
        q, k, v = tensors(grad=True)
        source = q * 1
        out, seen = observed_attention(source, k, v, segments=(IDS[-T:], IDS), query_lengths=torch.tensor([3, 7]))
        out.sum().backward()
        kept.append(seen)
        dead += [weakref.ref(x) for x in (source, out, q)]
        del q, k, v, source, out, seen
    gc.collect()
    assert [x() for x in dead] == [None] * 9
    merged = lh.merge(kept[0], kept[0].identity())
    np.testing.assert_array_equal(merged.rows.entropy, kept[0].rows.entropy)
    again = pickle.loads(pickle.dumps(copy.deepcopy(kept[1])))
    np.testing.assert_array_equal(again.rows.entropy, kept[1].rows.entropy)
    with pytest.raises(LevelheadError, match="output"):
        _ = kept[0].output


@pytest.mark.parametrize("way", ["core", "elsewhere"])
def test_compiles_whole(way: str, request: pytest.FixtureRequest) -> None:
    if way != "core":
        request.getfixturevalue("elsewhere")
    options: dict[str, Any] = {"causal": True, "alibi": True, "segments": (IDS[-T:], IDS), "key_lengths": [9, 4]}

    class Block(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
            sizes = {"scale": q.shape[-1] ** -0.4, "window": (k.shape[-2] // 2, 0)}
            out, seen = observed_attention(q * 2, k, v, **options, **sizes)
            return out + 1, seen

    torch._dynamo.reset()  # a graph keeps the path that it was traced for
    compiled = torch.compile(Block(), fullgraph=True, backend="aot_eager", dynamic=True)
    q, k, v = tensors(grad=True)
    out, seen = compiled(q, k, v)
    want, plain = Block()(q, k, v)
    assert isinstance(seen, TensorObservation)
    assert seen.path == plain.path
    assert torch.equal(out, want)
    np.testing.assert_array_equal(seen.state.sums, plain.state.sums)
    np.testing.assert_array_equal(seen.state.first_keys, plain.state.first_keys)
    assert all(map(torch.equal, gradients(out, q, k, v), gradients(want, q, k, v)))


@pytest.mark.usefixtures("elsewhere")
def test_causal_compiles_for_lengths_that_are_symbols() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: observed_attention(q, q, q, causal=True), fullgraph=True, backend="aot_eager")
    for n in (20, 33, 40):
        q = torch.randn(1, 2, n, D)
        out, seen = compiled(q)
        torch.testing.assert_close(out, lh.attention(q, q, q, causal=True))
        assert seen.path.startswith(SDPA) and seen.rows.count[0, 0].tolist() == list(range(1, n + 1))


def test_one_graph_serves_every_length() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k: observed_attention(q, k, k, causal=True), fullgraph=True, backend=counter)
    for n in (5, 9, 13, 40):
        q, k = torch.randn(2, 3, n, D), torch.randn(2, 3, n + 2, D)
        for x in (q, k):
            torch._dynamo.mark_dynamic(x, 2)
        out, seen = compiled(q, k)
        assert torch.equal(out, lh.attention(q, k, k, causal=True))
        assert seen.rows.count[0, 0, 0] == 3
    assert counter.frame_count == 1


def test_statistics_are_read_outside_of_a_graph() -> None:
    torch._dynamo.reset()
    q, *_ = tensors()

    def total(q: Tensor) -> Tensor:
        return observed_attention(q, q, q)[1].logsumexp.sum() * 2

    with pytest.raises(torch._dynamo.exc.Unsupported, match="return it from what is compiled, and read it there"):
        torch.compile(total, backend="eager", fullgraph=True)(q)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(total, backend="eager")(q), total(q))


def test_opcheck() -> None:
    q, k, v = tensors(grad=True)
    scoring = described(q, k, v, OPTIONS["all"], host=True).scoring
    first = torch.zeros((B, T), dtype=torch.int64)
    torch.library.opcheck(torch.ops.levelhead.attend_observed.default, (q, k, v, *scoring, None, first))
    torch.library.opcheck(torch.ops.levelhead.row_states.default, (q.detach(), k.detach(), *scoring, first, None))


def test_the_example() -> None:
    assert doctest.testmod(observed) == (0, 3)


def test_bad_input_is_one_clear_error() -> None:
    q, k, v = tensors()
    for name, call in {
        "q": lambda: observed_attention(q.numpy(), k, v),
        "k": lambda: observed_attention(q, k.double(), v),
        "v": lambda: observed_attention(q, k, v[:, :, :4]),
        "mask": lambda: observed_attention(q, k, v, mask=torch.zeros(3, 3)),
        "softcap": lambda: observed_attention(q, k, v, softcap=-1.0),
    }.items():
        with pytest.raises(LevelheadError, match=f"^{name}: "):
            call()
    with pytest.raises(TypeError, match="casual"):
        observed_attention(q, k, v, casual=True)
    with pytest.raises(LevelheadError, match=r"vmap or torch\.func"):
        torch.vmap(lambda x: observed_attention(x, x, x)[0])(q)
    assert set(NAMES) <= inspect.signature(observed_attention).parameters.keys()


def test_logits_pinned_at_a_cap_are_found() -> None:
    q = torch.ones(1, 2, 4, 16)
    _, seen = observed_attention(q, 30 * q, q, softcap=5.0)
    assert [one.kind for one in lh.diagnose(seen) if "softcap" in one.kind] == ["softcap saturated"]

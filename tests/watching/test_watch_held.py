"""Attention functions that a model holds, teaches or exports: none is missed in silence, and all are given back."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import levelhead as lh
from watched import one_thread
from watched_truth import agrees, truth

__all__ = ["one_thread"]  # a fixture

ORIGINAL = functional.scaled_dot_product_attention
TABLE = {"sdpa": ORIGINAL}
X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(2))


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


class Part(nn.Module):
    """No name says that it attends."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.num_heads, self.attend = 2, attend

    def forward(self, x: Tensor) -> Tensor:
        q = split(x)
        return self.attend(q, 2 * q, q).transpose(1, 2).flatten(2)


class Slots:
    __slots__ = ("function",)

    def __init__(self) -> None:
        self.function = ORIGINAL

    def __call__(self, *qkv: Tensor) -> Tensor:
        return self.function(*qkv)


class Attribute:
    attend = ORIGINAL
    static = staticmethod(ORIGINAL)


def _closure() -> Callable[..., Tensor]:
    inner = ORIGINAL
    return lambda *qkv: inner(*qkv)


def _default(q: Tensor, k: Tensor, v: Tensor, function: Any = ORIGINAL, *, other: Any = ORIGINAL) -> Tensor:
    return function(q, k, v)


HOLDERS: dict[str, Callable[..., Tensor]] = {
    "attribute": ORIGINAL,
    "dictionary": lambda *qkv: TABLE["sdpa"](*qkv),
    "partial": functools.partial(ORIGINAL, dropout_p=0.0),
    "partial of a partial": functools.partial(functools.partial(ORIGINAL, dropout_p=0.0), is_causal=False),
    "default": _default,
    "closure": _closure(),
    "slots": Slots(),
    "class": lambda *qkv: Attribute().attend(*qkv),
    "static method": lambda *qkv: Attribute.static(*qkv),
    "namespace": functools.partial(lambda space, *qkv: space.f(*qkv), SimpleNamespace(f=ORIGINAL)),
    "tuple": functools.partial(lambda both, *qkv: both[1][0](*qkv), (1, [ORIGINAL])),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_held_functions_are_seen_and_given_back(name: str) -> None:
    model = nn.Sequential(Part(HOLDERS[name]))
    alone = model(X)
    with lh.watch(model) as first, lh.watch(nn.Sequential(Part(HOLDERS[name]))):
        pass
    with lh.watch(model) as w:
        assert torch.equal(model(X), alone)
    assert first.coverage() == ()
    agrees(w.last["0"], truth(split(X), 2 * split(X)))
    assert HOLDERS["attribute"] is TABLE["sdpa"] is Attribute.__dict__["attend"] is Attribute.static is ORIGINAL
    assert HOLDERS["partial"].func is _default.__defaults__[0] is _default.__kwdefaults__["other"] is ORIGINAL


def test_a_held_function_is_seen_in_a_graph_and_pickled_by_name() -> None:
    model = nn.Sequential(Part(ORIGINAL))
    with lh.watch(model) as w:
        torch.compile(model, backend="aot_eager", fullgraph=True)(X)
        assert pickle.loads(pickle.dumps(model[0].attend)) is model[0].attend
    agrees(w.last["0"], truth(split(X), 2 * split(X)))
    assert model[0].attend is ORIGINAL


def test_two_watches_share_what_both_models_hold() -> None:
    a, b = nn.Sequential(Part(HOLDERS["dictionary"])), nn.Sequential(Part(HOLDERS["dictionary"]))
    first, second = lh.watch(a), lh.watch(b)
    first.detach()
    b(X)
    second.detach()
    assert [line.seen for line in second.coverage()] == [True]
    assert TABLE["sdpa"] is ORIGINAL


# ---- torch's other functions


def _near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < 3 + h)


def _tilted(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score * 0.5 + (k - q) * 0.1


COMPILED = torch.compile(flex_attention, backend="eager")


@pytest.mark.parametrize("function", [flex_attention, COMPILED], ids=["eager", "compiled"])
def test_flex_attention_called_directly(function: Any) -> None:
    mask = create_block_mask(_near, 1, 2, 6, 6, device="cpu", BLOCK_SIZE=128)
    model = nn.Sequential(Part(lambda *qkv: function(*qkv, score_mod=_tilted, block_mask=mask, scale=0.6)))
    alone = model(X)
    with lh.watch(model) as w:
        assert torch.equal(model(X), alone)
    i = torch.arange(6)
    h = torch.arange(2)[:, None, None]
    bias = ((i[None, :] - i[:, None]) * 0.1).masked_fill(~_near(i, h, i[:, None], i[None, :]), -torch.inf)
    agrees(w.last["0"], truth(split(X), 2 * split(X), bias[None], scale=0.3))


def test_flex_attention_in_a_graph_is_measured_or_named() -> None:
    mask = create_block_mask(_near, 1, 2, 6, 6, device="cpu", BLOCK_SIZE=128)
    model = nn.Sequential(Part(lambda *qkv: flex_attention(*qkv, block_mask=mask)))
    with lh.watch(model) as w:
        torch.compile(model, backend="eager", fullgraph=True)(X)
    i = torch.arange(6)
    hidden = ~_near(i, torch.arange(2)[:, None, None], i[:, None], i[None, :])
    agrees(w.last["0"], truth(split(X), 2 * split(X), torch.zeros(2, 6, 6).masked_fill(hidden, -torch.inf)[None]))
    model = nn.Sequential(Part(lambda *qkv: flex_attention(*qkv, score_mod=_tilted)))
    with lh.watch(model) as w:
        torch.compile(model, backend="eager", fullgraph=True)(X)
    assert "a score_mod in a compiled graph is not described" in w.coverage()[0].how


# ---- taught


def mine(q: Tensor, k: Tensor, v: Tensor, *, temperature: float) -> Tensor:
    return torch.softmax(q @ k.mT / temperature, -1) @ v


class Mine(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mine(q, k, v, temperature=2.0)


def test_a_function_and_a_class_that_are_taught() -> None:
    def describe(q: Tensor, k: Tensor, v: Tensor, *, temperature: float) -> Any:
        return {"q": q, "k": k, "scale": 1 / temperature, "rows": torch.arange(6).expand(2, -1) > 1}

    model = nn.Sequential(Part(lambda *qkv: mine(*qkv, temperature=2.0)))
    with lh.watch(model, describe={mine: describe}) as w:
        model(X)
    used = torch.arange(6).expand(2, -1) > 1
    agrees(w.last["0"], truth(split(X), 2 * split(X), used=used, scale=0.5))
    model = nn.Sequential(Part(Mine()))
    with lh.watch(model, describe={Mine: lambda module, q, k, v: {"q": q, "k": k, "scale": 0.5}}) as w:
        model(X)
    agrees(w.last["0.attend"], truth(split(X), 2 * split(X), scale=0.5))
    assert "levelhead" not in Mine.forward.__module__


BAD: dict[str, Any] = {
    "too few parameters": lambda q: {"q": q},
    "no mapping": lambda q, k, v, **rest: q,
    "no keys": lambda q, k, v, **rest: {"q": q},
    "three dimensions": lambda q, k, v, **rest: {"q": q[0], "k": k[0]},
    "an unknown option": lambda q, k, v, **rest: {"q": q, "k": k, "temperature": 2.0},
    "a wrong option": lambda q, k, v, **rest: {"q": q, "k": k, "softcap": -1.0},
    "wrong rows": lambda q, k, v, **rest: {"q": q, "k": k, "rows": torch.ones(3)},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_describers_give_one_clear_error(name: str) -> None:
    model = nn.Sequential(Part(lambda *qkv: mine(*qkv, temperature=2.0)))
    with lh.watch(model, describe={mine: BAD[name]}), pytest.raises(lh.LevelheadError, match="expected"):
        model(X)


@pytest.mark.parametrize("describe", [[mine], {"mine": mine}, {mine: 3}, {Mine(): mine}])
def test_bad_descriptions_are_refused_before_anything_runs(describe: Any) -> None:
    with pytest.raises(lh.LevelheadError, match="describe: expected"):
        lh.watch(nn.Sequential(Part(ORIGINAL)), describe=describe)


# ---- modes of users


class Halves(TorchFunctionMode):
    """Changes every product, so a measurement under it would be wrong."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out / 2 if func in (torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.to) else out


class Counts(TorchDispatchMode):
    names: list[str]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("path", [None, True], ids=["core", "plain torch"])
def test_modes_of_users_see_the_model_and_not_the_watch(path: bool | None) -> None:
    model = nn.Sequential(Part(ORIGINAL))
    counts = Counts()
    found = []
    for _ in range(2):
        counts.names = []
        with counts, Halves():
            found.append((model(X), counts.names))
        if not found[1:]:
            w = lh.watch(model, plain_torch=path)
    w.detach()
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    agrees(w.last["0"], truth(split(X), 2 * split(X)))


# ---- exports

EXPORTS: dict[str, Callable[[nn.Module], str]] = {
    "torch.export": lambda model: torch.export.export(model, (X,)).graph_module.code,
    "torch.export, strict": lambda model: torch.export.export(model, (X,), strict=True).graph_module.code,
    "jit.trace": lambda model: str([n.kind() for n in torch.jit.trace(model, X).graph.nodes()]),
    "make_fx": lambda model: torch.fx.experimental.proxy_tensor.make_fx(model)(X).code,
}


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_has_nothing_of_the_watch_in_it(name: str) -> None:
    model = nn.Sequential(Part(ORIGINAL))
    alone = EXPORTS[name](model)
    with lh.watch(model) as w:
        assert EXPORTS[name](model) == alone
        model(X)
    assert [line.seen for line in w.coverage()] == [True]


# ---- code that is no Python


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "operator": lambda *qkv: torch.ops.aten.scaled_dot_product_attention(*qkv),
    "where it is defined": lambda *qkv: torch._C._nn.scaled_dot_product_attention(*qkv),
    "kernel": lambda *qkv: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*qkv)[0],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_kernels_that_no_wrapper_reaches_are_seen_deep_down(name: str) -> None:
    model = nn.Sequential(Part(OPERATORS[name]))
    alone = model(X)
    with lh.watch(model, deep=True) as w:
        assert torch.equal(model(X), alone)
    agrees(w.last["0"], truth(split(X), 2 * split(X)))


@pytest.mark.parametrize("make", [torch.fx.symbolic_trace, lambda model: torch.export.export(model, (X,)).module()])
def test_graphs_are_seen(make: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.ModuleDict({"graph": make(Part(ORIGINAL))})["graph"]
    alone = model(X)
    with lh.watch(model) as w:
        assert torch.equal(model(X), alone)
    agrees(w.last.records[0], truth(split(X), 2 * split(X)))


def test_functions_of_unknown_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("swiftattention")
    exec("def swiftattn(q, k, v): return q\ndef make_attn_mask(n): return n", vars(library))
    monkeypatch.setitem(sys.modules, "swiftattention", library)
    vars(library)["swiftattn"].__module__ = vars(library)["make_attn_mask"].__module__ = "swiftattention"
    model = nn.Sequential(Part(ORIGINAL), Part(library.swiftattn))
    with lh.watch(model, deep=False) as w:
        model(X)
    seen, missed = w.coverage()
    assert (seen.seen, missed.seen, missed.module) == (True, False, "1")
    assert "swiftattention.swiftattn is not described: teach it with lh.watch(model, describe=" in missed.how


def test_torchscript_is_named() -> None:
    model = nn.Sequential(torch.jit.trace(Part(ORIGINAL), X))
    with lh.watch(model, deep=False) as w:
        model(X)
    (line,) = w.coverage()
    assert (line.module, line.seen) == ("0", False)
    assert "is scripted" in line.how


def test_without_torch_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "levelhead.watching.watch")
    with pytest.raises(lh.LevelheadError, match=r'pip install "levelhead\[watch\]"'):
        lh.watch  # noqa: B018

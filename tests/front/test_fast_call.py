"""The fast path for common calls: which calls it serves, that their results, errors and warnings equal those of the
general path exactly, and that it keeps no references. That the numbers are right is tested elsewhere.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import levelhead as lh
from levelhead import _core
from processes import fresh
from support import DTYPES, Array, qkv

torch = importlib.import_module("torch")

MEETING = torch.ones(1, 1)
lh.attention(MEETING, MEETING, MEETING)  # the fast path recognises tensors after the first one


def tensor(x: Array) -> Any:
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def told(call: Callable[[], Any]) -> tuple[Any, ...]:
    """Everything observable of a call: result, error, warnings."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            result = call()
        except Exception as error:
            return type(error), str(error)
    said = [str(warning.message) for warning in heard]
    if isinstance(result, np.ndarray):
        return np.ndarray, result.dtype, result.shape, result.strides, result.tobytes(), said
    facts = (result.dtype, result.shape, result.stride(), result.requires_grad, result.device)
    numbers = result.detach().double().numpy().tobytes()  # exact, also for bfloat16
    return type(result), *facts, result.is_inference(), numbers, said


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Makes a call with and without the fast path and compares both; returns whether the fast path served it."""
    attend = _core.fast_attention

    def compare(call: Callable[[], Any]) -> bool:
        served: list[bool] = []

        def door(*given: Any) -> Any:
            result = attend(*given)
            served.append(result is not None)
            return result

        call_once = told(call)  # warnings that libraries raise only once are raised now
        monkeypatch.setattr(_core, "fast_attention", door)
        short = told(call)
        monkeypatch.setattr(_core, "fast_attention", lambda *given: None)
        long = told(call)
        monkeypatch.setattr(_core, "fast_attention", attend)
        assert short == long
        assert call_once[:-1] == long[:-1]
        return served == [True]

    return compare


# ---- what it serves

SHAPES = {  # leading dimensions, kv heads, T, S, D, E
    "tiny": ((1, 1), None, 8, 8, 16, 16),
    "one head": ((), None, 5, 7, 8, 3),
    "heads": ((3,), None, 5, 7, 8, 3),
    "grouped": ((2, 6), 2, 5, 7, 8, 3),
    "more queries than keys": ((2,), None, 9, 4, 8, 8),
    "one query": ((2, 4), 1, 1, 33, 16, 16),
    "batch of batches": ((2, 3, 2), None, 5, 7, 8, 3),
    "eight axes": ((1, 2, 1, 3, 1, 2), None, 5, 7, 8, 3),
    "many heads": ((300,), None, 2, 3, 1, 1),
    "not tiny": ((2, 4), None, 130, 140, 64, 64),
    "many keys": ((1, 2), None, 3, 3000, 32, 32),
}


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"scale": -0.3}, {"threads": 2}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_plain_calls_go_through(shape: str, dtype: str, options: dict[str, Any], compare: Callable[..., bool]) -> None:
    lead, groups, *sizes = SHAPES[shape]
    given = qkv(lead, *sizes, groups=groups, dtype=dtype)
    tensors = [tensor(x) for x in given]
    assert compare(lambda: lh.attention(*tensors, **options))
    # NumPy has no buffer format for bfloat16
    assert compare(lambda: lh.attention(*given, **options)) == (dtype != "bfloat16")


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "transposed heads": lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2),
    "every other token": lambda x: np.repeat(x, 2, axis=2)[:, :, ::2],
    "columns first": lambda x: np.asfortranarray(x),
    "stride 0": lambda x: np.broadcast_to(x[:1, :1], x.shape),
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "backwards": lambda x: x[::-1, ::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1, ::-1],
    "unpickled": lambda x: pickle.loads(pickle.dumps(x)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_go_through(layout: str, compare: Callable[..., bool]) -> None:
    given = [LAYOUTS[layout](x) for x in qkv((2, 3), 5, 7, 8, 3)]
    assert compare(lambda: lh.attention(*given, causal=True))
    if layout != "backwards":  # torch has no such strides
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns about read-only memory
            tensors = [torch.from_numpy(x) for x in given]
        assert compare(lambda: lh.attention(*tensors, causal=True))


# ---- what it leaves to the long way

X = qkv((2, 3), 5, 7, 8, 3)
NUMPY: dict[str, Callable[[], Any]] = {
    "mixed dtypes": lambda: lh.attention(X[0], X[1].astype("f8"), X[2]),
    "mixed families": lambda: lh.attention(X[0], tensor(X[1]), X[2]),
    "integers": lambda: lh.attention(*(x.astype(int) for x in X)),
    "other byte order": lambda: lh.attention(*(x.astype(">f4") for x in X)),
    "long double": lambda: lh.attention(*(x.astype(np.longdouble) for x in X)),
    "objects": lambda: lh.attention(*(x.astype(object) for x in X)),
    "structured": lambda: lh.attention(*(x.view([("x", "f4")]) for x in X)),
    "a subclass": lambda: lh.attention(*(np.ma.array(x) for x in X)),
    "lists": lambda: lh.attention(*(x.tolist() for x in X)),
    "None": lambda: lh.attention(None, None, None),
    "memoryviews": lambda: lh.attention(*map(memoryview, X)),
    "scalars": lambda: lh.attention(*(np.float32(1),) * 3),
    "rank 1": lambda: lh.attention(*(x[0, 0, 0] for x in X)),
    "ranks differ": lambda: lh.attention(X[0], X[1][0], X[2]),
    "batches differ": lambda: lh.attention(X[0], X[1][:1], X[2]),
    "batch of v": lambda: lh.attention(X[0], X[1], X[2][:1]),
    "heads do not divide": lambda: lh.attention(X[0], X[1][:, :2], X[2][:, :2]),
    "heads of v": lambda: lh.attention(X[0], X[1], X[2][:, :1]),
    "widths differ": lambda: lh.attention(X[0], X[1][..., 1:], X[2]),
    "keys without values": lambda: lh.attention(X[0], X[1], X[2][:, :, 1:]),
    "no queries": lambda: lh.attention(X[0][:, :, :0], *X[1:]),
    "no keys": lambda: lh.attention(X[0], X[1][:, :, :0], X[2][:, :, :0]),
    "no width": lambda: lh.attention(X[0][..., :0], X[1][..., :0], X[2]),
    "no batch": lambda: lh.attention(*(x[:0] for x in X)),
    "nine axes": lambda: lh.attention(*(x[(None,) * 5] for x in X)),
    "no common stride": lambda: lh.attention(*(x[None, :].repeat(3, 0).swapaxes(0, 1) for x in X)),
    "a large result": lambda: lh.attention(*(np.ones((2**9 + 1, 2**9), "f") for _ in X)),
    "too many elements": lambda: lh.attention(*(np.broadcast_to(X[0][:1], (2**40, 2**20, 5, 8)),) * 3),
    "causal=1": lambda: lh.attention(*X, causal=1),
    "causal=None": lambda: lh.attention(*X, causal=None),
    "NumPy's True": lambda: lh.attention(*X, causal=np.True_),
    "scale=1": lambda: lh.attention(*X, scale=1),
    "scale=nan": lambda: lh.attention(*X, scale=float("nan")),
    "scale=inf": lambda: lh.attention(*X, scale=float("inf")),
    "scale=1e39": lambda: lh.attention(*X, scale=1e39),
    "a rule": lambda: lh.attention(*X, scale="1/d_k"),
    "scales": lambda: lh.attention(*X, scale=[1.0, 2.0, 3.0]),
    "threads=0": lambda: lh.attention(*X, threads=0),
    "threads=True": lambda: lh.attention(*X, threads=True),
    "threads=2.0": lambda: lh.attention(*X, threads=2.0),
    "threads=2**70": lambda: lh.attention(*X, threads=2**70),
    "dropout": lambda: lh.attention(*X, dropout=0.5, seed=1),
    "dropout=False": lambda: lh.attention(*X, dropout=False),
    "window": lambda: lh.attention(*X, window=(1, 1)),
    "mask": lambda: lh.attention(*X, mask=np.ones((5, 7), bool)),
    "softcap": lambda: lh.attention(*X, softcap=3.0),
    "sinks": lambda: lh.attention(*X, sinks=[0.0, 1.0, 2.0]),
    "alibi": lambda: lh.attention(*X, alibi=True),
    "key_lengths": lambda: lh.attention(*X, key_lengths=[3, 7]),
    "segments": lambda: lh.attention(*X, segments=(np.zeros(5, int), np.zeros(7, int))),
    "query_start": lambda: lh.attention(*X, query_start=0),
    "out": lambda: lh.attention(*X, out=np.empty((2, 3, 5, 3), "f")),
}


@pytest.mark.parametrize("name", NUMPY)
def test_other_calls_take_the_long_way(name: str, compare: Callable[..., bool]) -> None:
    assert not compare(NUMPY[name])


def in_mode(mode: Any, *given: Any) -> Any:
    with mode:
        return lh.attention(*given)


class Wrapped(torch.Tensor):  # type: ignore[misc]
    pass


T = [tensor(x) for x in X]
OTHER_TENSORS: dict[str, Callable[[], Any]] = {
    "wants gradients": lambda: lh.attention(T[0], T[1].clone().requires_grad_(), T[2]),
    "lazily negated": lambda: lh.attention(torch._neg_view(T[0]), *T[1:]),
    "imaginary part": lambda: lh.attention(T[0].to(torch.complex64).conj().imag, *T[1:]),
    "known to be zero": lambda: lh.attention(torch._efficientzerotensor(T[0].shape), *T[1:]),
    "a parameter": lambda: lh.attention(torch.nn.Parameter(T[0], requires_grad=False), *T[1:]),
    "a subclass": lambda: lh.attention(*(t.as_subclass(Wrapped) for t in T)),
    "no memory": lambda: lh.attention(*(t.to("meta") for t in T)),
    "sparse": lambda: lh.attention(T[0], T[1].to_sparse(), T[2]),
    "sparse rows": lambda: lh.attention(*(t[0, 0].to_sparse_csr() for t in T)),
    "nested": lambda: lh.attention(*(torch.nested.nested_tensor([t[0], t[1]]) for t in T)),
    "quantised": lambda: lh.attention(*(torch.quantize_per_tensor(t, 0.1, 0, torch.qint8) for t in T)),
    "float8": lambda: lh.attention(*(t.to(torch.float8_e4m3fn) for t in T)),
    "complex": lambda: lh.attention(*(t.to(torch.complex64) for t in T)),
    "integers": lambda: lh.attention(*(t.long() for t in T)),
    "vmap": lambda: torch.vmap(lambda t: lh.attention(t, T[1][0], T[2][0]))(T[0]),
    "func.grad": lambda: torch.func.grad(lambda t: lh.attention(t, *T[1:]).sum())(T[0]),
    "func.jvp": lambda: torch.func.jvp(lambda t: lh.attention(t, *T[1:]), (T[0],), (T[0],))[0],
    "functionalised": lambda: lh.attention(torch._to_functional_tensor(T[0]), *T[1:]),
    "traced": lambda: torch.jit.trace(lambda t: lh.attention(t, *T[1:]), T[0], check_trace=False)(T[0]),
    "empty": lambda: lh.attention(T[0][:, :, :0], *T[1:]),
    "out": lambda: lh.attention(*T, out=torch.empty(2, 3, 5, 3)),
}


@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_unusual_tensors_take_the_long_way(name: str, compare: Callable[..., bool]) -> None:
    assert not compare(OTHER_TENSORS[name])


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": lambda: in_mode(torch.no_grad(), T[0].clone().requires_grad_(), *T[1:]),
    "inference": lambda: in_mode(torch.inference_mode(), *T),
    "autocast": lambda: in_mode(torch.autocast("cpu", dtype=torch.bfloat16), *T),
    "another default device": lambda: in_mode(torch.device("meta"), *T),
    "shared memory": lambda: lh.attention(*(t.clone().share_memory_() for t in T)),
    "part of a storage": lambda: lh.attention(torch.stack([T[0]] * 3)[2], *T[1:]),
    "beside vmap": lambda: torch.vmap(lambda t: lh.attention(*T) + t)(torch.ones(2)),
}


@pytest.mark.parametrize("name", MODES)
def test_plain_tensors_go_through_in_any_surroundings(name: str, compare: Callable[..., bool]) -> None:
    assert compare(MODES[name])


def test_a_compiled_function_calls_it() -> None:
    compiled = torch.compile(lambda t: lh.attention(t + 1, *T[1:]) * 2, backend="eager")
    assert torch.equal(compiled(T[0]), lh.attention(T[0] + 1, *T[1:]) * 2)


# ---- threads

LARGE = qkv((8,), 200, 200, 64)


def test_tiny_calls_ask_nobody_for_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: asked.append(1) or 3)
    small, large = [t[:1] for t in T], [tensor(x) for x in LARGE]
    want = lh.attention(*LARGE).tobytes()
    assert _core.fast_attention(*small, None, False, None) is not None
    assert asked == []
    assert lh.attention(*large).numpy().tobytes() == want
    assert asked == [1]
    assert lh.attention(*large, threads=2).numpy().tobytes() == want
    assert asked == [1]


def test_a_failing_count_of_threads_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(torch, "get_num_threads", fail)
    with pytest.raises(ZeroDivisionError):
        lh.attention(*(tensor(x) for x in LARGE))


# ---- memory


def test_nothing_is_kept() -> None:
    fresh("""
import torch
def megabytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

for kind in (np.asarray, torch.from_numpy):
    given = [kind(numbers(4, 40, 64, seed=i)) for i in range(3)]
    wrong = [*given[:2], given[2][:, :-1]]
    def calls(n):
        for _ in range(n):
            lh.attention(*given, causal=True)
            try:
                lh.attention(*wrong)
            except lh.LevelheadError:
                pass
    calls(300)
    counts, nones, before = [*map(sys.getrefcount, given)], sys.getrefcount(None), megabytes()
    calls(3000)  # one result each would be 120 MB
    assert [*map(sys.getrefcount, given)] == counts
    assert sys.getrefcount(None) - nones < 100
    assert megabytes() - before < 4, megabytes() - before
""")


def test_a_tensors_memory_lives_as_long_as_its_last_view() -> None:
    result = lh.attention(*T)
    assert sys.getrefcount(result) == 2
    want, view, array = result.clone(), result[1, 2], result.numpy()
    del result
    others = [lh.attention(*T) for _ in range(100)]  # would reuse memory that was freed too early
    assert torch.equal(view, want[1, 2]) and (array == want.numpy()).all()
    assert len({other.data_ptr() for other in others}) == 100
    assert all(other.data_ptr() % 64 == 0 for other in others)


def test_results_are_ordinary_arrays() -> None:
    array, result = lh.attention(*X), lh.attention(*T)
    assert type(array) is np.ndarray and array.flags.owndata and array.flags.writeable
    assert array.base is None
    result.add_(1).mul_(2)
    assert torch.equal(result, (tensor(array) + 1) * 2)
    assert torch.equal(pickle.loads(pickle.dumps(result)), result)
    leaf = lh.attention(*T).requires_grad_()
    (leaf * leaf).sum().backward()
    assert torch.equal(leaf.grad, 2 * leaf.detach())


# ---- the face


def test_the_signature_is_what_it_was() -> None:
    parameters = inspect.signature(lh.attention).parameters
    assert list(parameters)[:3] == ["q", "k", "v"]
    assert all(p.kind is p.KEYWORD_ONLY for p in [*parameters.values()][3:])
    assert "softmax" in (lh.attention.__doc__ or "")


def test_tensors_are_known_once_met_and_only_where_torch_offers_it() -> None:
    code = """
import torch
from levelhead import _core
x = torch.ones(2, 2)
def served():
    return _core.fast_attention(x, x, x, None, False, None) is not None
if sys.argv[1] == "older":
    del torch.Tensor.__dlpack_c_exchange_api__
print(served())
assert torch.equal(lh.attention(x, x, x), x)
print(served())
assert torch.equal(lh.attention(x, x, x), x)
"""
    assert fresh(code, "newer").split() == ["False", "True"]
    assert fresh(code, "older").split() == ["False", "False"]

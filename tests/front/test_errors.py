"""Bad input to the public functions: every error names the argument, what was expected and what was given, is both a
LevelheadError and the built-in error that a Python user expects, and is raised before any work: the core is not called
and `out` is unchanged.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import levelhead as lh

F = np.float32
Case = tuple[str, dict[str, Any], type[Exception], tuple[str, ...]]


def ones(*shape: int, dtype: Any = F) -> np.ndarray:
    return np.ones(shape, dtype)


def broadcast(*shape: int) -> np.ndarray:
    """An array larger than memory: every stride is 0."""
    return np.broadcast_to(F(1), shape)


GOOD: dict[str, Any] = {"q": ones(2, 4, 5, 8), "k": ones(2, 2, 6, 8), "v": ones(2, 2, 6, 3)}


class Touched(AssertionError):
    """Raised if the core is called."""


@pytest.fixture(autouse=True)
def untouched_core(monkeypatch: pytest.MonkeyPatch) -> None:
    core = importlib.import_module("levelhead._core")
    through_the_door = core.fast_attention

    def forward(*args: object, **kwargs: object) -> None:
        raise Touched

    def attend(*args: object) -> None:
        if through_the_door(*args) is not None:
            raise Touched

    monkeypatch.setattr(core, "forward", forward)
    monkeypatch.setattr(core, "fast_attention", attend)


def test_the_guard_sees_a_good_call() -> None:
    with pytest.raises(Touched):
        lh.attention(**GOOD)
    with pytest.raises(Touched):
        lh.observe(**GOOD)


V, T = ValueError, TypeError
SHAPES: list[Case] = [
    ("rank 0", {"q": ones()}, V, ("q:", "at least 2 dim", "()")),
    ("rank 1", {"q": ones(8)}, V, ("q:", "at least 2 dim", "(8,)")),
    ("rank of k", {"k": ones(2, 6, 8)}, V, ("k:", "4 dim", "(2, 6, 8)")),
    ("rank of v", {"v": ones(6, 3)}, V, ("v:", "4 dim", "(6, 3)")),
    ("batch of k", {"k": ones(3, 2, 6, 8)}, V, ("k:", "(2,)", "(3, 2, 6, 8)")),
    ("batch of v", {"v": ones(1, 2, 6, 3)}, V, ("v:", "(2,)", "(1, 2, 6, 3)")),
    ("heads", {"k": ones(2, 3, 6, 8), "v": ones(2, 3, 6, 3)}, V, ("k:", "4 heads", "3 heads")),
    ("no kv heads", {"k": ones(2, 0, 6, 8), "v": ones(2, 0, 6, 3)}, V, ("k:", "4 heads", "0")),
    ("heads of v", {"v": ones(2, 4, 6, 3)}, V, ("v:", "2 heads", "4 in shape")),
    ("width", {"k": ones(2, 2, 6, 7)}, V, ("k:", "width 8", "7 in shape")),
    ("length", {"v": ones(2, 2, 5, 3)}, V, ("v:", "6 keys", "5 in shape")),
    (
        "logits overflow",
        {"q": broadcast(1, 1, 2**40, 1), "k": broadcast(1, 1, 2**40, 1), "v": broadcast(1, 1, 2**40, 1)},
        V,
        ("q and k", "2**60", str(2**40)),
    ),
    (
        "result overflow",
        {"q": broadcast(1, 1, 2**40, 1), "k": broadcast(1, 1, 1, 1), "v": broadcast(1, 1, 1, 2**40)},
        V,
        ("q and v", "2**60", str(2**40)),
    ),
]
KINDS: list[Case] = [
    (
        f"{name} {dtype}",
        {name: GOOD[name].astype(dtype)},
        T,
        (f"{name}:", "float32, float64, float16 or bfloat16", np.dtype(dtype).name),
    )
    for name in "qkv"
    for dtype in ("int32", "int64", "uint8", "uint16", "bool", "complex64", "longdouble", "O")
]
KINDS += [
    ("list", {"q": [[1.0, 2.0]]}, T, ("q:", "NumPy array", "list")),
    ("int", {"k": 3}, T, ("k:", "NumPy array", "int")),
    ("no v", {"v": None}, T, ("v:", "NumPy array", "NoneType")),
    ("str", {"v": "values"}, T, ("v:", "NumPy array", "str")),
    ("bytes", {"v": b"values"}, T, ("v:", "float32", "uint8")),
    ("NumPy scalar", {"q": F(2)}, V, ("q:", "at least 2 dim", "()")),
    ("mixed 32 and 64", {"k": ones(2, 2, 6, 8, dtype="f8")}, T, ("k:", "float32", "float64")),
    ("mixed 32 and 16", {"v": ones(2, 2, 6, 3, dtype="f2")}, T, ("v:", "float32", "float16")),
    ("byte order", {"q": GOOD["q"].astype(">f4")}, T, ("q:", "native byte order", ">f4")),
    ("masked", {"q": np.ma.ones((2, 4, 5, 8))}, T, ("q:", "plain numpy.ndarray", "MaskedArray")),
    (
        "matrix",
        {"q": ones(5, 8).view(np.matrix), "k": ones(6, 8), "v": ones(6, 3)},
        T,
        ("q:", "plain numpy.ndarray", "matrix"),
    ),
]
NAN, INF = float("nan"), float("inf")
OPTIONS: list[Case] = [
    ("scale nan", {"scale": NAN}, V, ("scale:", "finite", "nan")),
    ("scale inf", {"scale": -INF}, V, ("scale:", "finite", "-inf")),
    ("scale beyond float32", {"scale": 1e300}, V, ("scale:", "finite", "1e+300")),
    ("scale per head nan", {"scale": [1, 1, NAN, 1]}, V, ("scale:", "finite", "nan")),
    ("scale per kv head", {"scale": [1.0, 1.0]}, V, ("scale:", "(4,)", "(2,)")),
    ("scale rule", {"scale": "1/sqrt(dk)"}, V, ("scale:", '"1/sqrt(d_k)"', "1/sqrt(dk)")),
    ("scale bool", {"scale": True}, T, ("scale:", "finite number", "True")),
    ("causal int", {"causal": 1}, T, ("causal:", "True or False", "1")),
    ("causal None", {"causal": None}, T, ("causal:", "True or False", "None")),
    ("window int", {"window": 3}, T, ("window:", "(left, right)", "3")),
    ("window triple", {"window": (1, 2, 3)}, V, ("window:", "(left, right)", "(1, 2, 3)")),
    ("window left", {"window": (-1, 0)}, V, ("window left:", "at least 0", "-1")),
    ("window right", {"window": (0, -2)}, V, ("window right:", "at least 0", "-2")),
    ("window float", {"window": (1.0, 0)}, T, ("window left:", "integer", "1.0")),
    ("mask shape", {"mask": ones(7, dtype=bool)}, V, ("mask:", "(2, 4, 5, 6)", "(7,)")),
    ("mask rank", {"mask": ones(1, 2, 4, 5, 6)}, V, ("mask:", "(2, 4, 5, 6)", "(1, 2, 4, 5, 6)")),
    ("mask int", {"mask": ones(5, 6, dtype=int)}, T, ("mask:", "bool", "int64")),
    ("mask uint16", {"mask": ones(5, 6, dtype="u2")}, T, ("mask:", "bool", "uint16")),
    ("mask wider", {"mask": ones(5, 6, dtype="f8")}, T, ("mask:", "float32", "float64")),
    ("mask list", {"mask": [[True] * 6] * 5}, T, ("mask:", "bool array", "list")),
    ("mask masked", {"mask": np.ma.ones((5, 6), F)}, T, ("mask:", "ndarray", "MaskedArray")),
    ("softcap zero", {"softcap": 0.0}, V, ("softcap:", "above 0", "0.0")),
    ("softcap inf", {"softcap": INF}, V, ("softcap:", "finite", "inf")),
    ("sinks shape", {"sinks": ones(2)}, V, ("sinks:", "(4,)", "(2,)")),
    ("sinks nan", {"sinks": [0, 0, NAN, 0]}, V, ("sinks:", "finite logits or -inf", "nan")),
    ("alibi shape", {"alibi": ones(3)}, V, ("alibi:", "(4,)", "(3,)")),
    ("alibi inf", {"alibi": ones(4) * INF}, V, ("alibi:", "finite", "inf")),
    ("lengths above", {"key_lengths": [6, 7]}, V, ("key_lengths:", "0 to the 6", "7")),
    ("lengths below", {"key_lengths": -1}, V, ("key_lengths:", "from 0", "-1")),
    ("lengths float", {"key_lengths": [1.0, 2.0]}, T, ("key_lengths:", "integers", "[1.0, 2.0]")),
    ("lengths shape", {"key_lengths": [1, 2, 3]}, V, ("key_lengths:", "(2,)", "(3,)")),
    ("query lengths above", {"query_lengths": [3, 6]}, V, ("query_lengths:", "queries of q", "6")),
    ("query lengths below", {"query_lengths": -1}, V, ("query_lengths:", "from 0", "-1")),
    ("segments one", {"segments": np.zeros(6, int)}, V, ("segments", "(query", "6")),
    ("query_start float", {"query_start": 0.5}, T, ("query_start:", "integers", "0.5")),
    ("query_start shape", {"query_start": [0, 0, 0]}, V, ("query_start:", "(2,)", "(3,)")),
    ("dropout one", {"dropout": 1.0}, V, ("dropout:", "0 <= rate < 1", "1.0")),
    ("dropout nan", {"dropout": NAN}, V, ("dropout:", "0 <= rate < 1", "nan")),
    ("seed", {"dropout": 0.1, "seed": -1}, V, ("seed:", "0 <= seed < 2**64", "-1")),
    ("threads zero", {"threads": 0}, V, ("threads:", "at least 1", "0")),
    ("threads float", {"threads": 2.0}, T, ("threads:", "integer", "2.0")),
    ("threads bool", {"threads": True}, T, ("threads:", "integer", "True")),
]


def refuses(call: Callable[[], object], kind: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(lh.LevelheadError) as caught:
        call()
    assert isinstance(caught.value, kind)
    message = str(caught.value)
    name, *rest = words
    assert message.startswith(name)
    for word in ("expected", "got", *rest):
        assert word in message
    assert message.endswith(".")


def by_name(cases: list[Case]) -> Any:
    return pytest.mark.parametrize(
        ("changed", "kind", "words"), [pytest.param(*case[1:], id=case[0]) for case in cases]
    )


@by_name(SHAPES + KINDS + OPTIONS)
def test_attention_refuses(changed: dict[str, Any], kind: type[Exception], words: tuple[str, ...]) -> None:
    refuses(lambda: lh.attention(**{**GOOD, **changed}), kind, words)


@by_name([case for case in SHAPES + KINDS + OPTIONS if case[0] != "no v"])
def test_observe_refuses(changed: dict[str, Any], kind: type[Exception], words: tuple[str, ...]) -> None:
    refuses(lambda: lh.observe(**{**GOOD, **changed}), kind, words)


def read_only() -> np.ndarray:
    out = ones(2, 4, 5, 3)
    out.flags.writeable = False
    return out


OUT: list[Case] = [
    ("shape", {"out": ones(2, 4, 5, 8)}, V, ("out:", "(2, 4, 5, 3)", "(2, 4, 5, 8)")),
    ("dtype", {"out": ones(2, 4, 5, 3, dtype="f8")}, T, ("out:", "float32", "float64")),
    ("list", {"out": [1.0]}, T, ("out:", "NumPy array", "list")),
    ("read-only", {"out": read_only()}, V, ("out:", "writable", "read-only")),
    (
        "broadcast",
        {"out": as_strided(ones(3), (2, 4, 5, 3), (0, 0, 0, 4), writeable=True)},
        V,
        ("out:", "place of its own", "(0, 0, 0, 4)"),
    ),
    (
        "overlaps itself",
        {"out": as_strided(ones(2, 4, 7), (2, 4, 5, 3), (112, 28, 4, 4), writeable=True)},
        V,
        ("out:", "place of its own", "(112, 28, 4, 4)"),
    ),
]


@by_name(OUT)
def test_out_refuses(changed: dict[str, Any], kind: type[Exception], words: tuple[str, ...]) -> None:
    refuses(lambda: lh.attention(**{**GOOD, **changed}), kind, words)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_must_not_share_memory_with_an_input(name: str) -> None:
    arrays = {n: ones(2, 3, 5, 8) for n in "qkv"}
    refuses(lambda: lh.attention(**arrays, out=arrays[name]), V, ("out:", "its own", name))
    shifted = np.ones(arrays[name].size + 3, F)
    arrays[name] = shifted[3:].reshape(2, 3, 5, 8)
    out = shifted[:-3].reshape(2, 3, 5, 8)
    refuses(lambda: lh.attention(**arrays, out=out), V, ("out:", "memory of its own", name))


def test_out_must_not_share_memory_with_the_mask() -> None:
    mask = ones(5, 5)
    q = ones(5, 5)
    refuses(lambda: lh.attention(q, q, q, mask=mask, out=mask), V, ("out:", "its own", "mask"))


def test_out_beside_an_input_in_one_allocation_is_fine() -> None:
    """Interleaved memory without a common byte: the bounds overlap, the elements do not."""
    both = ones(5, 16)
    with pytest.raises(Touched):
        lh.attention(both[:, ::2], ones(6, 8), ones(6, 8), out=both[:, 1::2])


def test_a_refused_call_leaves_out_alone() -> None:
    out = np.full((2, 4, 5, 3), 7, F)
    refuses(lambda: lh.attention(**GOOD, softcap=-1.0, out=out), V, ("softcap:",))
    assert (out == 7).all()


def test_the_remembered_plain_call_does_not_excuse_a_bad_one() -> None:
    """causal=1 equals True and hashes alike; it must not get the result cached for True."""
    with pytest.raises(Touched):
        lh.attention(**GOOD, causal=True)
    refuses(lambda: lh.attention(**GOOD, causal=1), T, ("causal:", "True or False", "1"))


@pytest.mark.parametrize(
    ("good", "bad", "name"),
    [
        ({"softcap": 1.0}, {"softcap": True}, "softcap"),
        ({"window": (1, 0)}, {"window": (True, 0)}, "window left"),
        ({"scale": 1.0}, {"scale": True}, "scale"),
        ({"query_start": 1}, {"query_start": 1.0}, "query_start"),
    ],
)
def test_a_remembered_call_does_not_excuse_equal_options_of_another_type(
    good: dict[str, Any], bad: dict[str, Any], name: str
) -> None:
    with pytest.raises(Touched):
        lh.observe(**GOOD, **good)
    refuses(lambda: lh.observe(**GOOD, **bad), T, (f"{name}:",))


def test_observe_takes_no_out() -> None:
    with pytest.raises(TypeError, match="out"):
        lh.observe(**GOOD, out=ones(2, 4, 5, 3))

"""Array types: inputs are read in place, the output has the type of q, and everything else is an error that names the
argument. That the numbers are right is tested elsewhere; here, that the same memory gives the same bits for every array
type.
"""

from __future__ import annotations

import array
import importlib
import subprocess
import sys
import textwrap
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import levelhead as lh
from levelhead.call import arrays

torch = importlib.import_module("torch")

NUMPY = ["float32", "float64", "float16", "bfloat16"]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def qkv(dtype: str = "float32", shape: tuple[int, ...] = (2, 3)) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    sizes = ((5, 8), (6, 8), (6, 4))
    return [rng.standard_normal((*shape, *size)).astype(dtype_of(dtype)) for size in sizes]


def bits(a: np.ndarray) -> bytes:
    return np.ascontiguousarray(a).tobytes()


def as_torch(a: np.ndarray) -> Any:
    if a.dtype == dtype_of("bfloat16"):
        return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(a)


def torch_bits(t: Any) -> bytes:
    flat = t.contiguous()
    return (flat.view(torch.int16) if t.dtype == torch.bfloat16 else flat).numpy().tobytes()


class Exporter:
    """A minimal DLPack exporter."""

    def __init__(self, data: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self.data = data
        self.device = device

    def __dlpack__(self, **options: Any) -> Any:
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class Standard(Exporter):
    """An exporter that also has an array namespace."""

    class Namespace:
        __name__ = "standard"

        @staticmethod
        def from_dlpack(data: Any) -> Standard:
            return Standard(np.from_dlpack(data))

    def __array_namespace__(self) -> Any:
        return self.Namespace()


# ---- NumPy


@pytest.mark.parametrize("dtype", NUMPY)
def test_numpy_in_numpy_out(dtype: str) -> None:
    q, k, v = qkv(dtype)
    out = lh.attention(q, k, v)
    assert type(out) is np.ndarray
    assert (out.shape, out.dtype) == ((2, 3, 5, 4), dtype_of(dtype))
    assert out.flags.c_contiguous
    assert out.flags.owndata or out.base.flags.owndata


@pytest.mark.parametrize("dtype", NUMPY)
def test_views_are_the_callers_memory(dtype: str) -> None:
    given = qkv(dtype)
    *views, origin = arrays.take(*given)
    assert (origin.family, origin.dtype) == ("numpy", dtype)
    for theirs, ours in zip(given, views, strict=True):
        assert ours.ctypes.data == theirs.ctypes.data
        assert ours.strides == theirs.strides


def strange_views(a: np.ndarray) -> dict[str, np.ndarray]:
    """`a` again, in other memory layouts."""
    wide = np.zeros((*a.shape[:-1], 3 * a.shape[-1]), a.dtype)
    wide[..., ::3] = a
    frozen = a.copy()
    frozen.flags.writeable = False
    return {
        "every third": wide[..., ::3],
        "reversed": a[..., ::-1, ::-1].copy()[..., ::-1, ::-1],
        "transposed": np.swapaxes(np.swapaxes(a, -1, -2).copy(), -1, -2),
        "read-only": frozen,
    }


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("layout", list(strange_views(np.ones((1, 1)))))
def test_any_strides_same_bits_no_copy(dtype: str, layout: str) -> None:
    plain = qkv(dtype)
    strange = [strange_views(a)[layout] for a in plain]
    *views, _ = arrays.take(*strange)
    for theirs, ours in zip(strange, views, strict=True):
        assert np.shares_memory(theirs, ours)
    assert bits(lh.attention(*strange)) == bits(lh.attention(*plain))


def test_stride_zero_in_the_inputs() -> None:
    q, k, v = (np.broadcast_to(a[:1], a.shape) for a in qkv())
    solid = [np.array(a) for a in (q, k, v)]
    assert bits(lh.attention(q, k, v)) == bits(lh.attention(*solid))


def test_misaligned_memory_gives_the_same_bits() -> None:
    plain = qkv()
    odd = []
    for a in plain:
        raw = np.zeros(a.nbytes + 1, np.uint8)
        view = raw[1:].view(np.float32).reshape(a.shape)
        view[...] = a
        assert not view.flags.aligned
        odd.append(view)
    assert bits(lh.attention(*odd)) == bits(lh.attention(*plain))


def test_a_memory_map_is_an_array(tmp_path: Any) -> None:
    plain = qkv()
    for name, a in zip("qkv", plain, strict=True):
        np.save(tmp_path / f"{name}.npy", a)
    mapped = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "qkv"]
    out = lh.attention(*mapped)
    assert type(out) is np.ndarray
    assert bits(out) == bits(lh.attention(*plain))


def test_inputs_stay_as_they_were() -> None:
    given = qkv()
    before = [bits(a) for a in given]
    lh.attention(*given)
    lh.observe(*given)
    assert [bits(a) for a in given] == before


# ---- out=


@pytest.mark.parametrize("dtype", NUMPY)
def test_out_is_written_and_returned(dtype: str) -> None:
    q, k, v = qkv(dtype)
    out = np.zeros((2, 3, 5, 4), dtype_of(dtype))
    assert lh.attention(q, k, v, out=out) is out
    assert bits(out) == bits(lh.attention(q, k, v))


def test_out_may_have_any_layout_of_its_own() -> None:
    q, k, v = qkv()
    wide = np.full((2, 3, 5, 8), 9, np.float32)
    lh.attention(q, k, v, out=wide[..., ::-2])
    assert bits(wide[..., ::-2]) == bits(lh.attention(q, k, v))
    assert (wide[..., ::2] == 9).all()


def test_torch_out_is_written_returned_and_marked() -> None:
    q, k, v = map(as_torch, qkv())
    out = torch.zeros(2, 3, 5, 4)
    version = out._version
    assert lh.attention(q, k, v, out=out) is out
    assert torch.equal(out, lh.attention(q, k, v))
    assert out._version > version


def test_out_of_another_family() -> None:
    given = qkv()
    with pytest.raises(lh.LevelheadError, match=r"^out: expected .*numpy.* got torch"):
        lh.attention(*given, out=torch.zeros(2, 3, 5, 4))
    with pytest.raises(lh.LevelheadError, match=r"^out: expected .*torch.* got numpy"):
        lh.attention(*map(as_torch, given), out=np.zeros((2, 3, 5, 4), np.float32))


def test_torch_out_must_not_be_a_view_of_an_input() -> None:
    q, k, _ = map(as_torch, qkv())
    with pytest.raises(lh.LevelheadError, match=r"^out: expected memory of its own, got .* q"):
        lh.attention(q, k, k, out=q)


# ---- torch


@pytest.mark.parametrize("dtype", NUMPY)
def test_torch_in_torch_out(dtype: str) -> None:
    given = qkv(dtype)
    out = lh.attention(*map(as_torch, given))
    assert type(out) is torch.Tensor
    assert (tuple(out.shape), str(out.dtype)) == ((2, 3, 5, 4), f"torch.{dtype}")
    assert out.is_contiguous()
    assert torch_bits(out) == bits(lh.attention(*given))


@pytest.mark.parametrize("dtype", NUMPY)
def test_tensors_are_read_in_place(dtype: str) -> None:
    given = [as_torch(a).transpose(-3, -2).contiguous().transpose(-3, -2) for a in qkv(dtype)]
    *views, origin = arrays.take(*given)
    assert (origin.family, origin.dtype) == ("torch", dtype)
    for theirs, ours in zip(given, views, strict=True):
        assert ours.ctypes.data == theirs.data_ptr()
    assert torch_bits(lh.attention(*given)) == bits(lh.attention(*qkv(dtype)))


def test_a_lazily_negated_tensor_has_its_own_sign() -> None:
    q, k, v = map(as_torch, qkv())
    lazy = torch.complex(torch.zeros_like(q), -q).conj().imag
    assert lazy.is_neg()
    assert torch.equal(lh.attention(lazy, k, v), lh.attention(q, k, v))
    lazy_out = torch.zeros(2, 3, 5, 4, dtype=torch.complex64).conj().imag
    with pytest.raises(lh.LevelheadError, match=r"^out: .*negative bit"):
        lh.attention(q, k, v, out=lazy_out)


def test_without_gradients_a_learning_tensor_is_an_array() -> None:
    q, k, v = map(as_torch, qkv())
    for i in range(3):
        given = [q, k, v]
        given[i] = given[i].clone().requires_grad_()
        with torch.no_grad():
            assert torch.equal(lh.attention(*given), lh.attention(q, k, v))
    weight = torch.nn.Parameter(q)
    with torch.inference_mode():
        assert torch.equal(lh.attention(weight, k, v), lh.attention(q, k, v))


def test_a_gradient_that_is_not_there_is_refused_with_the_way_out() -> None:
    q, k, v = map(as_torch, qkv())
    slopes = torch.ones(3, requires_grad=True)
    with pytest.raises(lh.LevelheadError, match=r"^alibi: .*no gradient.*alibi\.detach\(\)"):
        lh.attention(q, k, v, alibi=slopes)
    learning = q.clone().requires_grad_()
    with pytest.raises(lh.LevelheadError, match=r"^out: expected None with gradients"):
        lh.attention(learning, k, v, out=torch.empty_like(q))


def test_another_device_is_named() -> None:
    q, k, v = map(as_torch, qkv())
    with pytest.raises(lh.LevelheadError, match=r"^k: expected .* device cpu, got .* device meta"):
        lh.attention(q, k.to("meta"), v)


def test_tensors_without_plain_memory_are_refused() -> None:
    q, k, v = map(as_torch, qkv())
    with pytest.raises(lh.LevelheadError, match=r"^q: .*dense.*torch.sparse_coo"):
        lh.attention(q.to_sparse(), k, v)
    with pytest.raises(lh.LevelheadError, match=r"^v: expected .*float32.* got .*int64"):
        lh.attention(q, k, v.long())
    with pytest.raises(lh.LevelheadError, match=r"^q: expected .*float32.* got .*complex64"):
        lh.attention(q.to(torch.complex64), k, v)

    class Wrapped(torch.Tensor):  # type: ignore[misc]
        pass

    with pytest.raises(lh.LevelheadError, match=r"^q: expected a plain torch.Tensor.*Wrapped"):
        lh.attention(q.as_subclass(Wrapped), k, v)
    with pytest.raises(lh.LevelheadError, match=r"^q: expected a dense tensor"):
        torch.vmap(lambda one: lh.attention(one, k[0], v[0]))(q)


def test_options_may_be_tensors_of_any_dtype_they_take() -> None:
    given = qkv()
    rng = np.random.default_rng(1)
    mask = rng.standard_normal((5, 6)) > 0
    sinks = np.array([0.5, -1.0, 2.0], np.float32)
    lengths = np.array([4, 6])
    ids = (np.array([0, 0, 1, 1, 1]), np.array([0, 0, 0, 1, 1, 1]))
    options = dict(mask=mask, sinks=sinks, scale=sinks, key_lengths=lengths, segments=ids)
    tensors = dict(
        mask=torch.from_numpy(mask),
        sinks=torch.from_numpy(sinks).bfloat16(),
        scale=torch.from_numpy(sinks).bfloat16(),
        key_lengths=torch.from_numpy(lengths),
        segments=tuple(map(torch.from_numpy, ids)),
    )
    want = bits(lh.attention(*given, **options))
    assert bits(lh.attention(*given, **tensors)) == want
    assert torch_bits(lh.attention(*map(as_torch, given), **tensors)) == want


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 2, 3)], ids=str)
def test_options_that_broadcast_reach_the_core_whole(shape: tuple[int, ...]) -> None:
    """Scalars and shared ids become stride-0 views on the way; a mask for (T, D) has no head."""
    given = qkv(shape=shape)
    mask = np.random.default_rng(1).standard_normal((5, 6)) > -1
    ids = (np.array([0, 0, 1, 1, 1]), np.array([0, 0, 0, 1, 1, 1]))
    for options in (
        {"key_lengths": 4, "query_start": 2, "causal": True},
        {"segments": ids, "mask": mask},
        {"mask": mask[:1, ::-1].astype(np.float32), "window": (3, None)},
    ):
        want = lh.reference.attention(*given, **options)
        np.testing.assert_allclose(lh.attention(*given, **options), want, 1e-5, 1e-5)
        np.testing.assert_allclose(lh.observe(*given, **options).output, want, 1e-5, 1e-5)


def test_a_bfloat16_mask_goes_with_bfloat16_arrays_alone() -> None:
    given = qkv("bfloat16")
    mask = np.random.default_rng(1).standard_normal((5, 6)).astype(ml_dtypes.bfloat16)
    want = bits(lh.attention(*given, mask=mask.astype(np.float32)))
    assert bits(lh.attention(*given, mask=mask)) == want
    assert torch_bits(lh.attention(*map(as_torch, given), mask=as_torch(mask))) == want
    with pytest.raises(lh.LevelheadError, match=r"^mask: expected .*bfloat16.* got dtype uint16"):
        lh.attention(*given, mask=mask.view(np.uint16))
    with pytest.raises(lh.LevelheadError, match=r"^mask: expected .*float32, got dtype bfloat16"):
        lh.attention(*qkv(), mask=mask)


def test_threads_follow_torch_for_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    core = importlib.import_module("levelhead._core")
    used = []
    monkeypatch.setattr(core, "fast_attention", lambda *a: None)  # test_door.py tests the same
    monkeypatch.setattr(core, "forward", lambda *a, threads, **o: used.append(threads))
    monkeypatch.setattr(core, "default_threads", lambda: 11)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 13)
    lh.attention(*qkv())
    lh.attention(*map(as_torch, qkv()))
    lh.attention(*qkv(), threads=np.int64(3))
    lh.attention(*qkv(), threads=2**70)  # a larger number means all of them
    assert used[:3] == [11, 13, 3]
    assert used[3] < 2**31


# ---- DLPack, buffers, and the rest


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_dlpack_goes_back_where_it_came_from(dtype: str) -> None:
    given = qkv(dtype)
    want = bits(lh.attention(*given))
    out = lh.attention(*map(Exporter, given))
    assert type(out) is np.ndarray
    assert bits(out) == want
    back = lh.attention(*map(Standard, given))
    assert type(back) is Standard
    assert bits(back.data) == want


def test_dlpack_exporters_may_die_and_be_read_twice() -> None:
    q, k, v = qkv()
    once = Standard(q)
    first = lh.attention(once, Standard(k), Standard(v))
    second = lh.attention(once, Standard(k), Standard(v))
    assert bits(first.data) == bits(second.data)


def test_dlpack_devices_and_failures_are_named() -> None:
    q, k, v = qkv()
    with pytest.raises(lh.LevelheadError, match=r"^q: expected .* cpu, got .*Exporter on .*cuda:1"):
        lh.attention(Exporter(q, (2, 1)), Exporter(k), Exporter(v))
    strange = Exporter(q.astype(ml_dtypes.bfloat16))
    with pytest.raises(lh.LevelheadError, match=r"^q: expected .*NumPy can read, got .*Exporter"):
        lh.attention(strange, Exporter(k), Exporter(v))
    with pytest.raises(lh.LevelheadError, match=r"^v: expected .*float32.* got int64"):
        lh.attention(Exporter(q), Exporter(k), Exporter(v.astype(np.int64)))


def test_buffers_give_numpy() -> None:
    given = qkv()
    out = lh.attention(*map(memoryview, given))
    assert type(out) is np.ndarray
    assert bits(out) == bits(lh.attention(*given))
    assert bits(lh.attention(given[0], memoryview(given[1]), given[2])) == bits(out)
    with pytest.raises(lh.LevelheadError, match=r"^q: expected at least 2 dim.* got shape \(3,\)"):
        lh.attention(array.array("f", [1, 2, 3]), *given[1:])


def test_mixed_families_are_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(lh.LevelheadError, match=r"^k: expected the family of q, numpy, got torch"):
        lh.attention(q, as_torch(k), v)
    with pytest.raises(lh.LevelheadError, match=r"^v: expected the family of q, torch, got numpy"):
        lh.attention(as_torch(q), as_torch(k), v)
    with pytest.raises(lh.LevelheadError, match=r"^k: expected .* standard, got .*Exporter"):
        lh.attention(Standard(q), Exporter(k), Standard(v))


def test_a_jax_tracer_is_refused() -> None:
    tracer = type("Tracer", (), {"__module__": "jax._src.core"})
    inner = type("DynamicJaxprTracer", (tracer,), {"__dlpack__": None})
    with pytest.raises(lh.LevelheadError, match=r"^q: expected .*got a JAX tracer.*levelhead.jax"):
        lh.attention(inner(), *qkv()[1:])


def test_importing_loads_nothing_heavier_than_numpy() -> None:
    script = """
        import sys
        import numpy
        before = set(sys.modules)
        import levelhead
        levelhead.attention(*[numpy.ones((2, 3), numpy.float32)] * 3)
        levelhead.info()
        heavy = {"torch", "onnx", "jax", "ml_dtypes", "asyncio", "levelhead.reference"}
        assert not heavy & (set(sys.modules) - before), heavy & set(sys.modules)
        assert levelhead.reference.attention is not levelhead.attention
        assert set(levelhead.__all__) <= set(dir(levelhead))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_info_reads_as_a_mapping_and_as_text() -> None:
    info = lh.info()
    assert info["version"] == info.version == lh.__version__
    assert set(dict(info)) == set(info)
    assert info.isa in info.available
    assert info.front_ends["torch"] == torch.__version__
    text = str(info)
    for word in (info.version, info.isa, str(info.threads), f"numpy {np.__version__}"):
        assert word in text
    with pytest.raises(KeyError):
        info["colour"]
    with pytest.raises(AttributeError):
        info.version = "2"

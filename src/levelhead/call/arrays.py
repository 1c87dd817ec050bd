"""Array families: how q, k, v come in, and how a result goes back.

Every family is read in place, as a NumPy view of the caller's memory: any strides, read-only memory too. Only torch's
lazily negated views are copied. bfloat16 is passed on as its bits in uint16, because neither the buffer protocol nor
NumPy's DLPack supports it. A family is named after the type of the result, so buffers (``memoryview``) belong to NumPy.

This file computes nothing and converts no dtype: a list, an integer array or a masked array is an error, not an input.
It never imports torch or JAX; it only checks whether the caller already has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from levelhead import _core
from levelhead.call.halves import as_float32
from levelhead.errors import bad_type, bad_value

Array: TypeAlias = NDArray[Any]

UINT16 = np.dtype(np.uint16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)

_FLOATS = "float32, float64, float16 or bfloat16"
_KINDS = f"a NumPy array, a torch CPU tensor, or an object with DLPack or the buffer protocol, of {_FLOATS}"
# DLPack device numbers (dlpack.h, DLDeviceType); the host-memory ones are what a CPU can read.
_DEVICES = {1: "cpu", 2: "cuda", 3: "cuda host", 4: "opencl", 7: "vulkan", 8: "metal", 9: "vpi"}
_DEVICES |= {10: "rocm", 11: "rocm host", 13: "cuda managed", 14: "oneapi", 15: "webgpu"}
_HOST = (1, 3, 11)
# Candidates NumPy may try when two views interleave (under a millisecond); if that decides nothing, we refuse.
_OVERLAP_WORK = 100_000


@dataclass(frozen=True, slots=True)
class Origin:
    """What the caller handed in, which is what the result will be."""

    family: str  # "numpy", "torch", or the name of another array namespace
    dtype: str  # "float32", "float64", "float16" or "bfloat16"
    native: np.dtype[Any]  # NumPy's dtype for it; uint16 where bfloat16 is not NumPy's
    namespace: Any = None  # for other families: what has from_dlpack

    @property
    def storage(self) -> np.dtype[Any]:
        """The dtype of the memory as the core sees it."""
        return UINT16 if self.dtype == "bfloat16" else self.native

    @property
    def wide(self) -> np.dtype[Any]:
        """The dtype states and statistics are kept in."""
        return FLOAT64 if self.dtype == "float64" else FLOAT32

    def give(self, array: Array) -> Any:
        """Hand a fresh array over to the caller's family, without a copy where it allows that."""
        bits = array.dtype == UINT16
        if self.family == "numpy":
            return array.view(self.native) if bits else array
        if self.family == "torch":
            torch = sys.modules["torch"]
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if bits else torch.from_numpy(array)
        return array if self.namespace is None else self.namespace.from_dlpack(array)


_PLAIN = ("float32", "float64", "float16")
_NUMPY = {np.dtype(name): Origin("numpy", name, np.dtype(name)) for name in _PLAIN}
_TORCH = {name: Origin("torch", name, np.dtype(name)) for name in _PLAIN}
_TORCH["bfloat16"] = Origin("torch", "bfloat16", UINT16)
# By torch.dtype, once it has been seen: this file does not import torch.
_BY_TORCH_DTYPE: dict[Any, Origin] = {}


def take(q: Any, k: Any, v: Any) -> tuple[Array, Array, Array, Origin]:
    """Views of q, k, v and where they came from; every refusal names its argument."""
    views = _take_plain(q, k, v)
    if views is None:
        q_view, k_view, origin = take_pair(q, k)
        views = q_view, k_view, alike("v", v, origin), origin
    return views


def _take_plain(q: Any, k: Any, v: Any) -> tuple[Array, Array, Array, Origin] | None:
    """The common call, three plain arrays of one dtype, at the cost of a few lookups; None: anything unusual."""
    kind, torch = type(q), sys.modules.get("torch")
    if kind is np.ndarray:
        origins: dict[Any, Origin] = _NUMPY
    elif torch is not None and kind is torch.Tensor and torch.autograd.forward_ad._current_level < 0:  # none is dual
        origins = _BY_TORCH_DTYPE
    else:
        return None
    if type(k) is not kind or type(v) is not kind or not q.dtype is k.dtype is v.dtype or q.dtype not in origins:
        return None
    if kind is not np.ndarray:
        try:  # torch itself refuses other devices and layouts, gradients and lazy views
            return q.numpy(), k.numpy(), v.numpy(), origins[q.dtype]
        except (TypeError, RuntimeError):
            return None
    return q, k, v, origins[q.dtype]


def take_pair(q: Any, k: Any) -> tuple[Array, Array, Origin]:
    """As `take`, for calls without values."""
    q_view, origin = _floats("q", q)
    return q_view, alike("k", k, origin), origin


def option(name: str, value: Any) -> Any:
    """An array among the options, of any family, as NumPy; `options` checks what is no array."""
    if value is None or isinstance(value, int | float | str | list | np.generic):
        return value
    if isinstance(value, tuple):
        return tuple(option(name, part) for part in value)
    looked = _look(name, value)
    if looked is None:
        return value
    view, origin = looked
    return as_float32(view) if origin.dtype == "bfloat16" else view


def take_mask(mask: Any, origin: Origin) -> Array | None:
    """The mask as it lies in memory, bfloat16 as bits; `options` checks dtype and shape."""
    if mask is None:
        return None
    wanted = f"a bool array, or a float array of dtype {origin.dtype} or float32"
    advice = "Use bool (True = may attend), or cast an additive mask to q's dtype"
    looked = _look("mask", mask)
    if looked is None:
        raise bad_type("mask", wanted, _kind_of(mask), advice)
    view, theirs = looked
    if view.dtype == UINT16 and not theirs.dtype == origin.dtype == "bfloat16":
        raise bad_type("mask", wanted, f"dtype {theirs.dtype}", advice)
    return view


def take_out(out: Any, shape: tuple[int, ...], origin: Origin, inputs: Iterable[tuple[str, Any]]) -> Array:
    """The caller's preallocated result as a writable view, once it is safe to write there."""
    view, theirs = _floats("out", out, in_place=True)
    wanted = f"the result's own kind, {origin.family} {origin.dtype} of shape {shape}"
    given = f"{theirs.family} {theirs.dtype} of shape {view.shape}"
    if view.shape != shape:
        raise bad_value("out", wanted, given, "Allocate it so")
    if (theirs.family, theirs.dtype) != (origin.family, origin.dtype):
        raise bad_type("out", wanted, given, "Allocate it so")
    if not view.flags.writeable:
        raise bad_value("out", "writable memory", f"read-only {given}", "Pass a writable array")
    if _overlaps_itself(view):
        wanted = "memory in which every element has a place of its own"
        given = f"strides {view.strides} for shape {shape}"
        raise bad_value("out", wanted, given, "Pass an array that is no overlapping view")
    for name, array in inputs:
        # NumPy's stubs declare only the two named amounts of work; when it runs out, the answer is yes.
        if isinstance(array, np.ndarray) and np.may_share_memory(view, array, max_work=_OVERLAP_WORK):  # type: ignore[arg-type]
            given = f"memory shared with {name}, or too closely interleaved with it to tell"
            raise bad_value("out", "memory of its own", given, f"Pass an array apart from {name}")
    return view


def mark_written(out: Any, origin: Origin) -> None:
    """Makes autograd count the change of a tensor, since it cannot see a write through its memory."""
    if origin.family == "torch" and not out.is_inference():
        sys.modules["torch"].autograd.graph.increment_version(out)


def stretched(x: Array, shape: tuple[int, ...]) -> Array:
    """x as a writable array of that shape: elements along a broadcast axis share memory."""
    x = x.reshape(x.shape[-len(shape) :])  # q of rank 2 is one head without its axis
    return np.lib.stride_tricks.as_strided(x, shape, np.broadcast_to(x, shape).strides)


def _floats(name: str, x: Any, *, in_place: bool = False) -> tuple[Array, Origin]:
    looked = _look(name, x, in_place=in_place)
    if looked is None:
        raise bad_type(name, _KINDS, _kind_of(x), f"Convert it first, e.g. np.asarray({name})")
    view, origin = looked
    if origin.dtype not in _TORCH:
        advice = f"Convert {name} to a floating dtype first; levelhead never converts on its own"
        raise bad_type(name, f"a dtype of {_FLOATS}", f"{origin.dtype} ({origin.family})", advice)
    return view, origin


def alike(name: str, x: Any, origin: Origin) -> Array:
    """A view of another array of q's family and dtype."""
    view, theirs = _floats(name, x)
    if theirs.family != origin.family:
        raise bad_type(name, f"the family of q, {origin.family}", theirs.family, "Pass q, k and v from one library")
    if theirs.dtype != origin.dtype:
        raise bad_type(name, f"the dtype of q, {origin.dtype}", theirs.dtype, "Convert so that q, k and v agree")
    return view


def _look(name: str, x: Any, *, in_place: bool = False) -> tuple[Array, Origin] | None:
    """View x's memory, of whatever dtype; None when x is not an array at all."""
    torch = sys.modules.get("torch")
    if isinstance(x, np.ndarray):
        return _numpy(name, x)
    if torch is not None and isinstance(x, getattr(torch, "Tensor", ())):
        return _torch(name, x, torch, in_place)
    if any(c.__name__ == "Tracer" and c.__module__.startswith("jax") for c in type(x).__mro__):
        advice = "Inside jit, grad and vmap use levelhead.jax"
        raise bad_type(name, "an array with memory", f"a JAX tracer ({type(x).__name__})", advice)
    if hasattr(type(x), "__dlpack__") and not isinstance(x, np.generic):
        return _dlpack(name, x)
    try:
        buffer = np.asarray(memoryview(x))
    except (TypeError, ValueError, NotImplementedError):
        return None
    return _numpy(name, buffer)


def _numpy(name: str, x: Array) -> tuple[Array, Origin]:
    if type(x) is not np.ndarray and not isinstance(x, np.memmap):
        given = f"{_kind_of(x)}, a subclass with rules of its own"
        raise bad_type(name, "a plain numpy.ndarray", given, f"Pass np.asarray({name}), and what is hidden as mask=")
    x = x.view(np.ndarray)
    dtype = x.dtype
    if not dtype.isnative:
        given = f"{dtype.str}, {dtype.name} in the other byte order"
        raise bad_type(name, "native byte order", given, f"Convert it: {name}.astype({name}.dtype.newbyteorder('='))")
    if dtype.name == "bfloat16" and dtype.itemsize == 2:
        return x.view(UINT16), Origin("numpy", "bfloat16", dtype)
    return x, _NUMPY.get(dtype) or Origin("numpy", dtype.name, dtype)


def _torch(name: str, t: Any, torch: Any, in_place: bool) -> tuple[Array, Origin]:
    _core.register_torch(torch)  # the first one; later plain calls need not come here
    if type(t) not in (torch.Tensor, torch.nn.Parameter):
        traced = "In an exported graph use levelhead.torch.scaled_dot_product_attention or observed_attention"
        advice = traced if type(t).__name__ == "FakeTensor" else "Unwrap it"
        raise bad_type(name, "a plain torch.Tensor", f"the subclass {_kind_of(t)}", advice)
    if not t.is_cpu:
        advice = "A meta tensor has no memory" if t.is_meta else f"Move it: {name}.cpu()"
        raise bad_value(name, "a tensor on device cpu", _tensor(t), advice)
    if t.requires_grad and torch.is_grad_enabled():
        given = "requires_grad=True while gradients are enabled"
        advice = f"There is no gradient by it: pass {name}.detach(), or compute under torch.no_grad()"
        raise bad_value(name, "a tensor that needs no gradient", given, advice)
    forward_ad = torch.autograd.forward_ad
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:
        given = "a dual tensor (jvp, jacfwd, hessian), whose tangent would be lost"
        advice = "Use torch.func.vjp or jacrev; jacrev(jacrev(f)) is a Hessian"
        raise bad_value(name, "a tensor without a tangent", given, advice)
    try:
        plain = t.detach() if t.requires_grad else t
        if plain.is_neg() and not in_place:  # its memory holds the opposite sign
            plain = plain.resolve_neg()
        if t.dtype is torch.bfloat16:
            return plain.view(torch.int16).numpy().view(UINT16), _TORCH["bfloat16"]
        view = plain.numpy()
    except (TypeError, RuntimeError) as error:
        advice = f"torch says: {str(error).splitlines()[0]}"
        if torch._C._functorch.is_functorch_wrapped_tensor(t):
            instead = "levelhead.torch.scaled_dot_product_attention"
            advice = f"Inside torch.func use {instead}; lengths, windows and segments are an attn_mask there"
        raise bad_type(name, f"a dense tensor of {_FLOATS}", _tensor(t), advice) from error
    dtype = _dtype(t)
    if dtype not in _TORCH:
        return view, Origin("torch", dtype, view.dtype)
    origin = _BY_TORCH_DTYPE[t.dtype] = _TORCH[dtype]
    return view, origin


def _dtype(t: Any) -> str:
    return str(t.dtype).removeprefix("torch.")


def _tensor(t: Any) -> str:
    return f"{_dtype(t)} of shape {tuple(t.shape)}, {t.layout} on device {t.device}"


def _dlpack(name: str, x: Any) -> tuple[Array, Origin]:
    kind, index = map(int, x.__dlpack_device__())
    if kind not in _HOST:
        given = f"{_kind_of(x)} on device {_DEVICES.get(kind, kind)}:{index}"
        raise bad_value(name, "memory on device cpu", given, "Copy it to the host first")
    try:
        view = np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        given = f"{_kind_of(x)} of dtype {getattr(x, 'dtype', 'unknown')}"
        raise bad_type(name, "a DLPack exporter NumPy can read", given, f"NumPy says: {error}") from error
    namespace = x.__array_namespace__() if hasattr(x, "__array_namespace__") else None
    if not hasattr(namespace, "from_dlpack"):
        namespace = None
    family = getattr(namespace, "__name__", _kind_of(x))
    return view, Origin(family, view.dtype.name, view.dtype, namespace)


def _overlaps_itself(view: Array) -> bool:
    """Whether two indices may share memory: sorted by stride, each step must clear all inner ones."""
    reach = view.itemsize
    steps = zip(view.strides, view.shape, strict=True)
    for stride, n in sorted((abs(stride), n) for stride, n in steps if n > 1):
        if stride < reach and view.size:
            return True
        reach += stride * (n - 1)
    return False


def _kind_of(x: object) -> str:
    cls = type(x)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"

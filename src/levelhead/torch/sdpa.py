"""`torch.nn.functional.scaled_dot_product_attention` on levelhead: same signature, same meaning.

Dropout's seed comes from PyTorch's generator, so that checkpointing and compile replay it. Beyond PyTorch, unless it is
patched: a mask and `is_causal` together mean both. Jagged nested tensors are served as packed sequences. `patch` puts
it in the original's place.
"""

from __future__ import annotations

import math
import numbers
from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from levelhead import _core
from levelhead.call.dropout import SEEDS
from levelhead.call.options import Scoring
from levelhead.call.scaling import usual
from levelhead.errors import LevelheadError, LevelheadTypeError, bad_type, expected
from levelhead.torch import jagged, multihead_forward
from levelhead.torch.functorch import attend, seed_is_unknown
from levelhead.torch.multihead_forward import FAST_PATH_OFF, MULTIHEAD, TRACED_MULTIHEAD
from levelhead.torch.operators import LevelheadRuntimeError, observed, uniform
from levelhead.torch.swap import Function, Swap, showing

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(query keyᵀ · scale + mask) value, as `torch.nn.functional` defines it.

    Args:
        query: (..., Hq, L, E); key (..., H, S, E); value (..., H, S, Ev).
        attn_mask: bool (True: takes part) or additive, broadcastable to (..., Hq, L, S).
        dropout_p: share of weights dropped, always (there is no training flag here).
        is_causal: key j is hidden from query i when j > i; together with a mask both count (refused under `patch`).
        scale: 1/√E when None.
        enable_gqa: query heads share key/value heads, Hq / H each.

    Returns:
        (..., Hq, L, Ev), differentiable. A query that sees no key gets 0.
    """
    plain = type(dropout_p) is float and type(is_causal) is bool and type(enable_gqa) is bool
    if plain and dropout_p == 0.0 and attn_mask is None:
        result = _fast(query, key, value, is_causal, scale)
        if result is not None:
            return result
    tensors = (query, key, value, attn_mask)
    if any(map(jagged.is_nested, tensors)):
        return _of_nested(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if has_torch_function(tensors):  # subclasses and modes come first, as in PyTorch
        options: Any = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return handle_torch_function(scaled_dot_product_attention, tensors, *tensors, **options)
    if patch.active:
        _refuse_as_torch(tensors, is_causal, enable_gqa)
    return extended(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def extended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | tuple[float, ...] | None = None,
    enable_gqa: bool = False,
    **more: Any,
) -> Tensor:
    """As `scaled_dot_product_attention`; `more` are fields of `Scoring`, and scale may be one per head."""
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise _not_a(name, "a bool", flag)
    dropout_p = _number("dropout_p", dropout_p)
    _check_kind(query, key, value, attn_mask)
    if torch.is_autocast_enabled("cpu"):
        query, key, value = cast_as_torch(query), cast_as_torch(key), cast_as_torch(value)
        attn_mask = None if attn_mask is None else cast_as_torch(attn_mask)
    _check_numbers(query, key, value, attn_mask, dropout_p)
    rank = max(query.dim(), key.dim(), value.dim())
    q, k, v = broadcast(query, key, value, enable_gqa)
    _check_mask_shape(attn_mask, (*q.shape[:-1], k.shape[-2]), rank)
    if 0.0 < dropout_p < 1.0 and seed_is_unknown():
        if more or isinstance(scale, tuple):
            advice = "Compile without dropout, or run torch.func without torch.compile"
            raise _wrong("dropout_p", f"0 with {', '.join(more)} in compiled torch.func", dropout_p, advice)
        return ORIGINAL(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if 0.0 < dropout_p < 1.0:
        more |= {"dropout": dropout_p, "seed": torch.randint(SEEDS, (), dtype=torch.int64, device=q.device)}
    as_query = lays_out_as_query(query, key, value, attn_mask, dropout_p)
    out, _ = attend(q, k, v, Scoring(factors(scale, q), attn_mask, causal=is_causal, **more), as_query=as_query)
    if dropout_p == 1.0:  # nothing is kept
        out = out * 0.0
    for _ in range(out.dim() - rank):
        out = out[0]
    return out


def factors(scale: Any, q: Tensor) -> Tensor:
    """The scale of every head, as `Scoring` holds it: None for 1/√D, a number, or one per head."""
    if isinstance(scale, tuple):
        return torch.tensor(scale, dtype=torch.float64, device=q.device)
    factor = usual(q.shape[-1]) if scale is None else _number("scale", scale)
    return uniform(q.shape[-3], factor, q.device)


def _of_nested(q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, causal: bool, *rest: Any) -> Tensor:
    """A call with nested tensors. What levelhead does not serve is refused; under `patch`, where the caller asked for
    PyTorch's function, that function computes it."""
    if jagged.is_served(q, k, v, mask, causal):
        packing: Any = {"query_segments": jagged.segments(q), "key_segments": jagged.segments(k)}
        one = [jagged.packed(x) for x in (q, k, v)]
        return jagged.unpacked(extended(one[0], one[1], one[2], None, dropout, causal, *rest, **packing), q)
    if patch.active:
        scale, gqa = rest
        result: Tensor = ORIGINAL(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=gqa)
        return result
    return extended(q, k, v, mask, dropout, causal, *rest)  # which refuses


def _fast(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> Tensor | None:
    """Plain eager tensors go straight to the core, as long as both conventions say the same."""
    if torch.compiler.is_compiling() or not (scale is None or type(scale) is float):
        return None
    plain = all(type(x) is Tensor and x.layout is torch.strided and not x.is_nested for x in (q, k, v))
    if not plain or q.dim() < 3 or q.shape[:-2] != k.shape[:-2]:  # to be broadcast, or grouped
        return None
    if is_causal and q.shape[-2] != k.shape[-2]:  # the fast call aligns the last positions
        return None
    if torch.is_autocast_enabled("cpu") or torch._C._len_torch_dispatch_stack():
        return None
    if torch._C._is_torch_function_mode_enabled() or forward_ad._current_level >= 0:
        return None
    if observed():  # the fast call gives no statistics
        return None
    return cast("Tensor | None", _core.fast_attention(q, k, v, scale, is_causal, None, _flash_is_enabled()))


_flash_is_enabled = torch._C._get_flash_sdp_enabled


def lays_out_as_query(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Whether PyTorch's fused kernel would serve the call. Its output has the query's strides, so that
    `out.transpose(1, 2).view(B, T, C)` works; that of the plain formula is contiguous. The rule is PyTorch's own."""
    if not _flash_is_enabled() or q.is_meta or dropout > 0.0 or not q.dim() == k.dim() == v.dim() == 4:
        return False
    if q.shape[-1] != v.shape[-1] or not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[1] != v.shape[1]:
        return False
    if mask is not None and (mask.requires_grad or mask.dim() not in (2, 4)):
        return False
    return 0 not in (q.shape[-2], k.shape[-2]) and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1


def cast_as_torch(x: Tensor, device: str = "cpu") -> Tensor:
    """What autocast makes of it: float64 and what is no float stay."""
    eligible = x.is_floating_point() and x.dtype is not torch.float64
    return x.to(torch.get_autocast_dtype(device)) if eligible else x


# ---- what may come in


class UnservedError(LevelheadRuntimeError, NotImplementedError):
    """A dtype, layout or device that PyTorch's own operator has no kernel for, either."""


class _TooFewAxesError(LevelheadError, IndexError):
    """An axis that PyTorch's own operator looks for is missing."""


def _refuse_as_torch(tensors: tuple[Any, ...], is_causal: bool, enable_gqa: bool) -> None:
    """In the original's place: what PyTorch refuses and levelhead could serve."""
    *qkv, mask = tensors
    if isinstance(mask, Tensor):
        if is_causal is True:
            advice = "Leave one out: PyTorch takes no mask beside is_causal"
            raise _wrong("attn_mask", "None with is_causal=True", f"a mask of shape {tuple(mask.shape)}", advice)
        if mask.dim() < 2:
            shape, advice = tuple(mask.shape), "Write mask[None, :] for one number per key"
            raise _TooFewAxesError(expected("attn_mask", "at least 2 dimensions", shape, advice))
    if enable_gqa is True and any(isinstance(x, Tensor) and x.dim() == 2 for x in qkv):
        shapes = ", ".join(str(tuple(x.shape)) for x in qkv)
        advice = "Leave enable_gqa out, or add an axis of heads"
        raise _TooFewAxesError(expected("query, key, value", "an axis of heads with enable_gqa=True", shapes, advice))


def _not_a(name: str, wanted: str, given: object) -> LevelheadTypeError:
    return bad_type(name, wanted, type(given).__name__, "Convert it, as PyTorch would ask for")


def _wrong(name: str, wanted: str, given: object, advice: str) -> LevelheadRuntimeError:
    return LevelheadRuntimeError(expected(name, wanted, given, advice))


def _wrong_shapes(wanted: str, *tensors: Tensor) -> LevelheadRuntimeError:
    shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
    return _wrong("query, key, value", wanted, shapes, "The sizes are (..., heads, tokens, width)")


def _number(name: str, x: Any) -> float:
    """A float, from whatever PyTorch takes for one; not what has a gradient that would be lost."""
    if isinstance(x, float):
        return x
    if isinstance(x, Tensor):
        single = x.dim() == 0 and not x.requires_grad and not x.is_complex()
    else:
        single = isinstance(x, (int, numbers.Real))
    if not single:
        raise _not_a(name, "a float", x)
    return float(x)


def _check_kind(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    """Dense tensors, in one place that can be read."""
    tensors = {"query": q, "key": k, "value": v} | ({} if mask is None else {"attn_mask": mask})
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise _not_a(name, "a torch.Tensor", x)
        if x.is_nested or x.layout is not torch.strided:
            kind = "a nested tensor" if x.is_nested else str(x.layout)
            raise UnservedError(expected(name, "a dense tensor", kind, "Convert it, or use torch's own attention"))
        if x.device.type not in ("cpu", "meta"):
            raise UnservedError(expected(name, "a tensor on device cpu", x.device, "Move it, or do not patch there"))
        if x.device != q.device:
            raise _wrong(name, f"a tensor on the query's device, {q.device}", x.device, "Move one to the other's")


def _check_numbers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> None:
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _FLOATS:
        wanted = "one dtype of float32, float64, float16 and bfloat16"
        raise UnservedError(expected("query, key, value", wanted, f"{q.dtype}, {k.dtype}, {v.dtype}", "Convert them"))
    if min(q.dim(), k.dim(), v.dim()) < 2:
        raise _wrong_shapes("at least 2 dimensions", q, k, v)
    if mask is not None and mask.dtype not in (torch.bool, q.dtype, torch.float32):
        advice = "Use bool, or cast an additive mask to the query's dtype"
        raise _wrong("attn_mask", f"bool, float32 or {q.dtype}", mask.dtype, advice)
    if not 0.0 <= dropout <= 1.0:
        raise _wrong("dropout_p", "a probability", dropout, "It lies between 0 and 1")


def broadcast(q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The three with the same leading dimensions, rank 4 or more; heads too, unless they group."""
    q, k, v = (x[(None,) * (4 - x.dim())] if x.dim() < 4 else x for x in (q, k, v))
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise _wrong_shapes("key as wide as query, and as many values as keys", q, k, v)
    heads = -3 if gqa else -2
    try:
        lead = torch.broadcast_shapes(*(x.shape[:heads] for x in (q, k, v)))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        wanted = "leading dimensions that broadcast" + ("" if gqa else " (or enable_gqa=True)")
        raise _wrong_shapes(wanted, q, k, v) from error
    q, k, v = (x.expand((*lead, *x.shape[heads:])) for x in (q, k, v))
    H, G, G_v = q.shape[-3], k.shape[-3], v.shape[-3]
    if any(H % n if n else H for n in (G, G_v)):
        raise _wrong_shapes("query heads a multiple of key heads and of value heads", q, k, v)
    if G_v != G:  # rare: both are repeated to the fewest heads that serve either
        common = math.lcm(G, G_v)
        k = k.repeat_interleave(common // G, -3)
        v = v.repeat_interleave(common // G_v, -3)
    return q, k, v


def _check_mask_shape(mask: Tensor | None, shape: tuple[int, ...], rank: int) -> None:
    """A mask of any rank up to that of the logits, which it does not widen."""
    if mask is None:
        return
    sizes = zip(reversed(mask.shape), reversed(shape), strict=False)
    if mask.dim() > rank or not all(_broadcasts(n, full) for n, full in sizes):
        wanted = f"a shape that broadcasts to {tuple(shape[len(shape) - rank :])}"
        raise _wrong("attn_mask", wanted, tuple(mask.shape), "Reshape it")


def _broadcasts(n: Any, full: Any) -> bool:
    """Whether a size fits. One that depends on data, in an export, is checked when the graph runs."""
    if isinstance(n, int) and isinstance(full, int):
        return n in (1, full)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    if not (guard_or_false(n == full) or guard_or_false(n == 1)):
        torch._check(n == full)  # type: ignore[no-untyped-call]
    return True


# ---- in the original's place

ORIGINAL = functional.scaled_dot_product_attention


class patch(AbstractContextManager["patch"]):  # noqa: N801  a verb, used as a call and in `with`
    """Puts levelhead in the place of `F.scaled_dot_product_attention`, wherever that was imported.

    `patch()` alone holds until `.undo()`; as a context manager, until its end. Then every place has
    the original again; a module that is first imported in between keeps what it found.

    `nn.MultiheadAttention` attends through levelhead in evaluation, too: its native fast path is off meanwhile. So
    `nn.TransformerEncoder` leaves numbers at padded positions, as it does in training, where the fast path puts 0.
    Compiled models are compiled again where they attend. Code that `torch.jit.script` compiles keeps PyTorch's
    attention, and so do nested tensors that levelhead does not serve (strided ones, and jagged ones with a mask).
    """

    active: ClassVar[list[patch]] = []

    def __init__(self) -> None:
        instead: dict[Function, Function] = {ORIGINAL: scaled_dot_product_attention, MULTIHEAD: TRACED_MULTIHEAD}
        self._swap = Swap(instead, KEPT, showing(instead))
        self.active.append(self)
        FAST_PATH_OFF.hold()

    def undo(self) -> None:
        """Puts the original back where it was."""
        self._swap.undo()
        if self in self.active:
            self.active.remove(self)
            FAST_PATH_OFF.release()

    def __exit__(self, *error: object) -> None:
        self.undo()


# TorchScript compiles a call of ours as one of PyTorch's operator: it cannot compile our code.
torch.jit._builtins._register_builtin(scaled_dot_product_attention, "aten::scaled_dot_product_attention")

# Where the original itself lives, and where it is kept to be put back.
KEPT = ("torch._C._nn", multihead_forward.__name__, __name__)

"""The drop-in against `torch.nn.functional.scaled_dot_product_attention` itself: its results on a grid of shapes, masks
and dtypes, its signature, and its errors.

Both are called with the same arguments; PyTorch's result is the truth, within PyTorch's tolerances.
"""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.testing import assert_close

import levelhead as lh
from levelhead.torch import patch, scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("alone")

ORIGINAL = F.scaled_dot_product_attention
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def as_pytorch(found: Tensor, want: Tensor) -> None:
    """Same shape, rank, dtype and numbers. PyTorch's tolerances for half types are those of one
    rounding; its own kernels round weights as well, hence an absolute part of the same size."""
    assert found.shape == want.shape
    half = {torch.bfloat16: 1.6e-2, torch.float16: 1e-3}.get(want.dtype)
    close = {} if half is None else {"rtol": half, "atol": half}
    assert_close(found, want, check_stride=False, **close)


# ---- results

# query, key, value; enable_gqa when the name says groups
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "rank 2": ((5, 8), (7, 8), (7, 6)),
    "rank 3": ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
    "rank 4": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)),
    "rank 5": ((2, 1, 3, 5, 8), (2, 1, 3, 7, 8), (2, 1, 3, 7, 8)),
    "square": ((2, 3, 33, 16), (2, 3, 33, 16), (2, 3, 33, 16)),
    "long": ((1, 2, 130, 64), (1, 2, 257, 64), (1, 2, 257, 64)),
    "more queries than keys": ((2, 3, 9, 8), (2, 3, 4, 8), (2, 3, 4, 8)),
    "one query": ((2, 3, 1, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "one key": ((2, 3, 5, 8), (2, 3, 1, 8), (2, 3, 1, 8)),
    "batch broadcast": ((2, 3, 5, 8), (1, 3, 7, 8), (2, 3, 7, 8)),
    "heads broadcast": ((2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    "queries broadcast": ((1, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "keys of higher rank": ((3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "queries of higher rank": ((2, 3, 5, 8), (3, 7, 8), (7, 8)),
    "rank 2 and 3": ((5, 8), (1, 7, 8), (1, 7, 8)),
    "groups": ((2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)),
    "groups, rank 3": ((6, 5, 8), (2, 7, 8), (2, 7, 8)),
    "groups of one": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    "groups of keys and of values": ((2, 6, 5, 8), (2, 2, 7, 8), (2, 3, 7, 8)),
    "groups, batch broadcast": ((2, 6, 5, 8), (1, 2, 7, 8), (2, 2, 7, 8)),
    "no batch": ((0, 3, 5, 8), (0, 3, 7, 8), (0, 3, 7, 8)),
    "no heads": ((2, 0, 5, 8), (2, 0, 7, 8), (2, 0, 7, 8)),
    "no queries": ((2, 3, 0, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "no keys": ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
    "no queries, no keys": ((2, 3, 0, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
    "no width of values": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 0)),
}
# The mask's sizes from batch, heads, T, S; those of rank above the logits' are left out.
MASKS = {
    "(T, S)": lambda B, H, T, S: (T, S),
    "(1, S)": lambda B, H, T, S: (1, S),
    "(T, 1)": lambda B, H, T, S: (T, 1),
    "(1, 1)": lambda B, H, T, S: (1, 1),
    "(1, T, S)": lambda B, H, T, S: (1, T, S),
    "(H, T, S)": lambda B, H, T, S: (H, T, S),
    "(B, 1, 1, S)": lambda B, H, T, S: (B, 1, 1, S),
    "(B, 1, T, S)": lambda B, H, T, S: (B, 1, T, S),
    "(1, H, 1, S)": lambda B, H, T, S: (1, H, 1, S),
    "(B, H, T, S)": lambda B, H, T, S: (B, H, T, S),
    "(B, H, T, 1)": lambda B, H, T, S: (B, H, T, 1),
}


def arrays(shape: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(sizes, dtype=dtype) for sizes in SHAPES[shape])
    return q, k, v


def mask_of(sizes: str, kind: str, shape: str, dtype: torch.dtype) -> Tensor | None:
    """A mask of those sizes, or None where the logits have too few dimensions for it."""
    q, k, _ = SHAPES[shape]
    lead = torch.broadcast_shapes(q[:-3], k[:-3])
    heads = q[-3] if "groups" in shape else max(q[-3:-2] + k[-3:-2], default=1)
    given = MASKS[sizes](lead[-1] if lead else 1, heads, q[-2], k[-2])
    if len(given) > max(len(q), len(k)):
        return None
    if kind == "bool":
        hides = torch.rand(given) < 0.7
        return hides if given[-1] < 2 or given[-2] < 2 else _nobody_is_blind(hides)
    if kind == "-inf":
        hides = torch.rand(given) < 0.7
        seen = hides if given[-1] < 2 else _nobody_is_blind(hides)
        return torch.where(seen, 0.0, -math.inf).to(dtype)
    return torch.randn(given, dtype=torch.float32 if kind == "float32" else dtype)


def _nobody_is_blind(mask: Tensor) -> Tensor:
    mask[..., 0] = True
    return mask


def both(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """The same results, and with gradients on the same again."""
    mask = options.get("attn_mask")
    if q.dtype is torch.float64 and mask is not None and mask.dtype is torch.float32:
        # PyTorch 2.13's fused kernel reads such a mask as if it were float64, and returns garbage.
        want = ORIGINAL(q, k, v, **(options | {"attn_mask": mask.double()}))
    else:
        want = ORIGINAL(q, k, v, **options)
    as_pytorch(scaled_dot_product_attention(q, k, v, **options), want)
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    found = scaled_dot_product_attention(*given, **options)
    assert found.requires_grad
    as_pytorch(found.detach(), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"scale": -0.1}])
def test_results(shape: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    both(*arrays(shape, dtype), enable_gqa="groups" in shape, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bool", "own dtype", "float32", "-inf"])
@pytest.mark.parametrize("sizes", MASKS)
def test_results_with_masks(sizes: str, kind: str, dtype: torch.dtype) -> None:
    served = 0
    for shape in SHAPES.keys() - {"long"}:
        mask = mask_of(sizes, kind, shape, dtype)
        # A mask of one column may hide a whole row, see below.
        if mask is None or (mask.shape[-1] == 1 and kind in ("bool", "-inf")):
            continue
        both(*arrays(shape, dtype), attn_mask=mask, enable_gqa="groups" in shape)
        served += 1
    assert served or "1)" in sizes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("kind", [torch.bool, None])
def test_a_row_that_sees_nothing_is_zero(rank: int, dtype: torch.dtype, kind: torch.dtype | None) -> None:
    """PyTorch agrees in its plain formula; its fused kernel may return NaN there. Ours never does."""
    q, k, v = (torch.randn(2, 3, 5, 8, dtype=dtype) for _ in range(3))
    q, k, v = (x[(0,) * (4 - rank)] for x in (q, k, v))
    seen = torch.ones(5, 5, dtype=torch.bool)
    seen[2] = False
    mask = seen if kind is torch.bool else torch.where(seen, 0.0, -math.inf).to(dtype)
    found = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    want = ORIGINAL(q, k, v, attn_mask=mask).nan_to_num(0.0)
    assert not found[..., 2, :].any()
    as_pytorch(found, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_of_any_layout(dtype: torch.dtype) -> None:
    T, S, D = 6, 6, 8
    packed = torch.randn(2, T, 3, 4, D, dtype=dtype)  # one projection for all, as in models
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    both(q, k, v, is_causal=True)
    wide = torch.randn(2, 4, 2 * T, 2 * D, dtype=dtype)
    both(wide[:, :, ::2, ::2], wide[:, :, 1::2, :D], wide[:, :, :S, D:])
    row = torch.randn(1, 1, 1, D, dtype=dtype)
    both(row.expand(2, 4, T, D), row.expand(2, 4, S, D), v)
    both(q.mT.contiguous().mT, k.mT.contiguous().mT, v.mT.contiguous().mT)
    mask = torch.randn(S, T, dtype=dtype).mT
    both(q, k, v, attn_mask=mask)
    both(q, k, v, attn_mask=torch.randn(T, 1, dtype=dtype).expand(T, S))
    both(q, k, v, attn_mask=(torch.rand(2, 1, T, 2 * S) < 0.9)[..., ::2] | torch.eye(T).bool())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["rank 4", "keys of higher rank", "groups", "no keys"])
def test_gradients(shape: str, dtype: torch.dtype) -> None:
    q, k, v = (x.requires_grad_() for x in arrays(shape, dtype))
    mask = torch.randn(q.shape[-2], k.shape[-2], dtype=dtype, requires_grad=True)
    options = {"attn_mask": mask, "enable_gqa": "groups" in shape}
    want = ORIGINAL(q, k, v, **options)
    dout = torch.randn_like(want)
    found = scaled_dot_product_attention(q, k, v, **options)
    gradients = torch.autograd.grad(found, (q, k, v, mask), dout)
    truths = torch.autograd.grad(want, (q, k, v, mask), dout, materialize_grads=True)
    near = {torch.bfloat16: 5e-2, torch.float16: 8e-3}.get(dtype)  # PyTorch's sums are in half
    for gradient, truth in zip(gradients, truths, strict=True):
        close = {} if near is None else {"rtol": near, "atol": near}
        assert_close(gradient, truth, check_stride=False, **close)


# ---- the signature


def test_the_signature() -> None:
    """That of PyTorch's operator: names, order, defaults, and keyword-only arguments."""
    theirs = torch.ops.aten.scaled_dot_product_attention.default._schema.arguments
    ours = inspect.signature(scaled_dot_product_attention).parameters.values()
    assert [x.name for x in ours] == [x.name for x in theirs]
    for mine, its in zip(ours, theirs, strict=True):
        assert (mine.kind is mine.KEYWORD_ONLY) == its.kwarg_only, mine.name
        assert (mine.default is not mine.empty) == its.has_default_value(), mine.name
        if its.has_default_value():
            assert mine.default == its.default_value, mine.name


# ---- refusals

r = torch.randn
Q, K, V = r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 6)
NESTED = torch.nested.nested_tensor([r(4, 5, 8), r(4, 3, 8)], layout=torch.strided)
MISUSE: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "query of rank 1": ((r(8), r(7, 8), r(7, 8)), {}),
    "all of rank 0": ((r(()), r(()), r(())), {}),
    "widths differ": ((Q, K[..., :4], V), {}),
    "fewer values than keys": ((Q, K, V[..., :3, :]), {}),
    "batches differ": ((r(3, 4, 5, 8), K, V), {}),
    "heads differ": ((Q, K[:, :2], V[:, :2]), {}),
    "groups do not divide": ((Q, K[:, :3], V[:, :3]), {"enable_gqa": True}),
    "more key heads than query heads": ((Q[:, :2], K, V), {"enable_gqa": True}),
    "key of another dtype": ((Q, K.double(), V), {}),
    "value of another dtype": ((Q, K, V.half()), {}),
    "int32": ((Q.int(), K.int(), V.int()), {}),
    "int64": ((Q.long(), K.long(), V.long()), {}),
    "bool": ((Q > 0, K > 0, V > 0), {}),
    "complex": ((Q.cfloat(), K.cfloat(), V.cfloat()), {}),
    "float8": ((Q.to(torch.float8_e4m3fn),) * 3, {}),
    "integer mask": ((Q, K, V), {"attn_mask": torch.ones(5, 7).int()}),
    "wider mask": ((Q, K, V), {"attn_mask": torch.ones(5, 7).double()}),
    "half mask": ((Q, K, V), {"attn_mask": torch.ones(5, 7).half()}),
    "mask too short": ((Q, K, V), {"attn_mask": torch.ones(5, 6)}),
    "bool mask too short": ((Q, K, V), {"attn_mask": torch.ones(4, 7) > 0}),
    "mask widens the batch": ((Q[:1], K[:1], V[:1]), {"attn_mask": r(2, 4, 5, 7)}),
    "mask of higher rank": ((Q[0], K[0], V[0]), {"attn_mask": r(1, 4, 5, 7)}),
    "mask of rank 5": ((Q, K, V), {"attn_mask": r(1, 1, 1, 5, 7)}),
    "mask for one head of rank 3": ((Q[0, 0], K[0, 0], V[0, 0]), {"attn_mask": r(1, 5, 7)}),
    "mask as a list": ((Q, K, V), {"attn_mask": [1.0]}),
    "mask as an array": ((Q, K, V), {"attn_mask": np.ones((5, 7), bool)}),
    "mask False": ((Q, K, V), {"attn_mask": False}),
    "dropout above 1": ((Q, K, V), {"dropout_p": 1.5}),
    "dropout None": ((Q, K, V), {"dropout_p": None}),
    "dropout a word": ((Q, K, V), {"dropout_p": "a"}),
    "dropout learned": ((Q, K, V), {"dropout_p": torch.tensor(0.0, requires_grad=True)}),
    "dropout of rank 1": ((Q, K, V), {"dropout_p": torch.zeros(1)}),
    "causal 1": ((Q, K, V), {"is_causal": 1}),
    "causal None": ((Q, K, V), {"is_causal": None}),
    "causal a tensor": ((Q, K, V), {"is_causal": torch.tensor(True)}),
    "causal of NumPy": ((Q, K, V), {"is_causal": np.bool_(True)}),
    "causal a word": ((Q, K, V), {"is_causal": "yes"}),
    "scale a rule": ((Q, K, V), {"scale": "cosine"}),
    "scale learned": ((Q, K, V), {"scale": torch.tensor(0.3, requires_grad=True)}),
    "scale per head": ((Q, K, V), {"scale": torch.rand(4)}),
    "scale complex": ((Q, K, V), {"scale": 1j}),
    "scale a list": ((Q, K, V), {"scale": [1.0]}),
    "groups 1": ((Q, K, V), {"enable_gqa": 1}),
    "groups None": ((Q, K, V), {"enable_gqa": None}),
    "groups a word": ((Q, K, V), {"enable_gqa": "True"}),
    "query None": ((None, K, V), {}),
    "value None": ((Q, K, None), {}),
    "query a list": (([[1.0]], K, V), {}),
    "query an array": ((Q.numpy(), K, V), {}),
    "all arrays": ((Q.numpy(), K.numpy(), V.numpy()), {}),
    "unknown keyword": ((Q, K, V), {"mask": None}),
    "no value": ((Q, K), {}),
    "scale by position": ((Q, K, V, None, 0.0, False, 0.5), {}),
    "groups by position": ((Q, K, V, None, 0.0, False, None, False), {}),
    "query without memory": ((Q.to("meta"), K, V), {}),
    "key without memory": ((Q, K.to("meta"), V), {}),
    "mask without memory": ((Q, K, V), {"attn_mask": torch.ones(5, 7, device="meta")}),
    "sparse query": ((Q.to_sparse(), K, V), {}),
    "sparse key": ((Q, K.to_sparse(), V), {}),
    "sparse mask": ((Q, K, V), {"attn_mask": torch.ones(5, 7).to_sparse()}),
    "mkldnn": ((Q.to_mkldnn(), K, V), {}),
    "nested key": ((Q, NESTED, NESTED), {}),
}


def refusal(*given: Any, **options: Any) -> Exception:
    """What PyTorch raises, whatever it is."""
    try:
        ORIGINAL(*given, **options)
    except Exception as error:
        return error
    pytest.fail("PyTorch serves this")


@pytest.mark.parametrize("misuse", MISUSE)
def test_what_pytorch_refuses_is_refused(misuse: str) -> None:
    given, options = MISUSE[misuse]
    theirs = refusal(*given, **options)
    with pytest.raises(type(theirs)) as ours:
        scaled_dot_product_attention(*given, **options)
    if not re.search("argument", str(ours.value)):  # Python's own message about the signature
        assert isinstance(ours.value, lh.LevelheadError)
        assert re.search(r"expected .*, got .*\. .*\.", str(ours.value), re.DOTALL)


STRICTER = {
    "nested tensors": ((NESTED, NESTED, NESTED), {}, "a dense tensor"),
    "compressed rows": ((Q[0, 0].to_sparse_csr(), K[0, 0], V[0, 0]), {}, "a dense tensor"),
    "negative dropout": ((Q, K, V), {"dropout_p": -0.1}, "a probability"),
    "dropout NaN": ((Q, K, V), {"dropout_p": math.nan}, "a probability"),
    "no key heads": ((Q, K[:, :0], V[:, :0]), {"enable_gqa": True}, "query heads a multiple"),
}


@pytest.mark.parametrize("case", STRICTER)
def test_what_pytorch_lets_pass_and_we_refuse(case: str) -> None:
    given, options, says = STRICTER[case]
    ORIGINAL(*given, **options)
    with pytest.raises(RuntimeError, match=says):
        scaled_dot_product_attention(*given, **options)


def test_what_pytorch_refuses_and_we_serve() -> None:
    """A mask together with is_causal means both; a mask of rank 1 (which PyTorch takes in some of
    its kernels) broadcasts like others; and one head without its axis is a group of one."""
    mask, row = r(5, 7), r(7)
    hidden = mask.masked_fill(~torch.ones(5, 7).tril().bool(), -math.inf)
    one = (Q[0, 0], K[0, 0], V[0, 0])
    for given, options, same in (
        ((Q, K, V), {"attn_mask": mask, "is_causal": True}, {"attn_mask": hidden}),
        ((Q, K, V), {"attn_mask": row}, {"attn_mask": row[None]}),
        ((Q, K, V), {"attn_mask": row[0]}, {"attn_mask": row[:1].expand(1, 7)}),
        (one, {"enable_gqa": True}, {}),
    ):
        theirs = refusal(*given, **options)
        assert isinstance(theirs, RuntimeError | IndexError)
        with patch(), pytest.raises(type(theirs), match=r"expected .*, got .*\. .*\.") as ours:  # no drop-in otherwise
            F.scaled_dot_product_attention(*given, **options)
        assert isinstance(ours.value, lh.LevelheadError)
        as_pytorch(scaled_dot_product_attention(*given, **options), ORIGINAL(*given, **same))


def test_integers_cannot_learn() -> None:
    """An integer mask that requires a gradient cannot occur: PyTorch does not make one."""
    for dtype in (torch.int64, torch.int32, torch.bool):
        with pytest.raises(RuntimeError, match="floating point"):
            torch.ones(5, 7, dtype=dtype, requires_grad=True)


def test_tensors_without_memory_are_described() -> None:
    given = (Q.to("meta"), K.to("meta"), V.to("meta"))
    found, want = scaled_dot_product_attention(*given), ORIGINAL(*given)
    assert found.is_meta
    assert (found.shape, found.dtype) == (want.shape, want.dtype)


def test_the_default_device_does_not_matter() -> None:
    mask = r(5, 7)
    want = scaled_dot_product_attention(Q, K, V, attn_mask=mask)
    with torch.device("meta"):
        assert torch.equal(scaled_dot_product_attention(Q, K, V, attn_mask=mask), want)
        assert scaled_dot_product_attention(Q, K, V, dropout_p=0.5).device.type == "cpu"


def test_a_subclass_has_the_first_word() -> None:
    class Answering(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func, (kwargs or {})["scale"]

    special = Q.as_subclass(Answering)
    found = scaled_dot_product_attention(special, K, V, scale=0.5)
    assert found == (scaled_dot_product_attention, 0.5)


# ---- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", DTYPES[:2])
@pytest.mark.parametrize("masked", [False, True])
def test_autocast(given: torch.dtype, dtype: torch.dtype, masked: bool) -> None:
    """float64 stays what it is, everything else becomes `dtype`; gradients have their own dtype."""
    q, k, v = (x.to(given).requires_grad_() for x in (Q, K, V))
    mask = r(5, 7, dtype=given, requires_grad=True) if masked else None
    learned = (q, k, v, mask) if masked else (q, k, v)
    results = []
    for call in (scaled_dot_product_attention, ORIGINAL):
        with torch.autocast("cpu", dtype=dtype):
            out = call(q, k, v, attn_mask=mask)
        results.append((out, *torch.autograd.grad(out.sum(), learned)))
    near = 1e-5 if given is torch.float64 else 5e-2
    for found, want in zip(*results, strict=True):
        assert_close(found, want, atol=near, rtol=near, check_stride=False)


def test_autocast_makes_mixed_dtypes_one() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = scaled_dot_product_attention(Q, K.bfloat16(), V, attn_mask=r(5, 7).half())
        want = ORIGINAL(Q, K.bfloat16(), V, attn_mask=r(5, 7).half())
    assert found.dtype is want.dtype is torch.bfloat16

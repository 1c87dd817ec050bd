"""The options of a call on tensors as a `Scoring` of tensors, for devices and for `torch.compile`.

Options that are numbers, words or arrays on the host are checked like everywhere else. Tensors stay tensors: their
shapes and dtypes are checked, their numbers are not, since reading those would wait for the device. Eager CPU tensors
take `autograd.scoring_of`, which checks numbers, too.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from levelhead.call import arrays, options
from levelhead.call.dropout import SEEDS
from levelhead.call.options import BATCH, FLAG, HEADS, INTEGER, NUMBER, RATE, TOKENS, Scoring, Shape, fields, shape_of
from levelhead.call.scaling import Rule, resolve
from levelhead.call.segments import segment_pair
from levelhead.call.shapes import broadcasting, fitting
from levelhead.errors import bad_type
from levelhead.torch.autograd import refuse_gradients, scoring_of, tensors_in

_CONSTANT = fields(FLAG, INTEGER, NUMBER, RATE)
_HEADS, _BATCH, _TOKENS = fields(HEADS), fields(BATCH), fields(TOKENS)
_PLACED = ("causal", "left", "right", "alibi", "log_n", "dropout")  # what depends on the queries' positions
_INTEGER: Any = (int, torch.SymInt)  # a size in torch.export without Dynamo, where it is dynamic


class Described(NamedTuple):
    """A call's options, and what is known of them without reading a tensor."""

    scoring: Scoring
    shape: Shape
    factor: float | None  # the scale of all heads; None: one per head, or a tensor
    start: int | None  # the position of the first query; None: in `scoring.query_start`


def described(q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any], *, host: bool) -> Described:
    """`host`: the tensors are on the CPU, and nothing is traced."""
    if host:
        scoring, shape, _, _ = scoring_of(q, k, v, None, given)  # type: ignore[arg-type]
        scale = given.get("scale")
        factors = None if isinstance(scale, Tensor) else resolve(scale, heads=shape.H, d_k=shape.D).factor.tolist()
    else:
        refuse_gradients(given)
        if torch.compiler.is_compiling():
            given = {name: _as_tensors(name, x) for name, x in given.items()}
        sizes = (tuple(q.shape), tuple(k.shape), tuple(v.shape))
        shape = fitting(*sizes) if torch.compiler.is_compiling() else shape_of(*sizes)
        scoring, factors = _of_tensors(q, shape, given)
    if scoring.dropout:
        seed = given.get("seed")
        if seed is None:  # from PyTorch's generator, which checkpointing and compile replay
            drawn = torch.randint(SEEDS, (), dtype=torch.int64)
        else:
            drawn = torch.full((), seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64)
        scoring = scoring._replace(seed=drawn)
    begin = given.get("query_start")
    start = shape.S - shape.T if begin is None else begin if type(begin) is int else None
    if not scoring.keywords().keys() & set(_PLACED):
        scoring, start = scoring._replace(query_start=None), 0
    factor = None if not factors or len(set(factors)) > 1 else factors[0]
    return Described(scoring, shape, factor, start)


def _of_tensors(q: Tensor, shape: Shape, given: Mapping[str, Any]) -> tuple[Scoring, list[float] | None]:
    """The options, and the scale of each head where it is no tensor."""
    tensors = {name: x for name, x in given.items() if next(iter(tensors_in(x)), None) is not None}
    plain = {name: x for name, x in given.items() if name not in tensors and x is not None}
    if torch.compiler.is_compiling():
        found, factors = _of_constants(q, shape, plain)
    else:
        if "mask" in plain:
            raise bad_type("mask", "a tensor, as q", type(plain["mask"]).__name__, "Convert it with torch.from_numpy")
        views = {name: arrays.option(name, x) for name, x in plain.items()}
        scoring = options.describe(shape, dtype_name=str(q.dtype).removeprefix("torch."), **views)
        found = {name: _moved(x, q) for name, x in scoring._asdict().items() if x is not None}
        factors = scoring.scale.tolist()
    for name, x in tensors.items():
        found |= _checked(name, x, q, shape)
    return Scoring(**(found | {"seed": None})), None if "scale" in tensors else factors


def _of_constants(q: Tensor, shape: Shape, plain: dict[str, Any]) -> tuple[dict[str, Any], list[float]]:
    """The same of plain options in a graph, which has its heads, widths and windows, whatever sizes are dynamic."""
    H, D = operator.index(shape.H), operator.index(shape.D)
    start, scale = plain.pop("query_start", shape.S - shape.T), plain.get("scale")
    if not isinstance(start, _INTEGER):
        raise bad_type("query_start", "an integer, or a tensor of them", type(start).__name__, "Convert it")
    if isinstance(scale, Rule):
        plain["scale"] = (scale.name, scale.width, scale.factor)
    elif isinstance(scale, int | float):  # from sizes, it may have no number yet
        del plain["scale"]
    if isinstance(plain.get("window"), tuple | list):
        plain["window"] = tuple(operator.index(x) if isinstance(x, _INTEGER) else x for x in plain["window"])
    values = _constants(H, D, str(q.dtype), tuple(plain), tuple(plain.values()))
    found: dict[str, Any] = dict(zip(_CONSTANT, values[: len(_CONSTANT)], strict=True))
    for name, x in zip(_HEADS, values[len(_CONSTANT) :], strict=True):
        found[name] = None if x is None else torch.tensor(x, dtype=_real(q), device=q.device)
    factors = list(values[len(_CONSTANT)])
    if isinstance(scale, int | float):
        found["scale"], factors = torch.full((H,), scale, dtype=_real(q), device=q.device), [scale]
    found["query_start"] = torch.full((shape.B,), start, dtype=torch.int64, device=q.device)
    return found, factors


def _as_tensors(name: str, x: Any) -> Any:
    """Arrays and lists of lengths and positions in a graph, where only tensors are traced; numbers made of sizes."""
    if isinstance(x, tuple) and name == "segments":
        return tuple(_as_tensors(name, part) for part in x)
    if isinstance(x, np.ndarray) or (isinstance(x, list) and name in (*_BATCH, "segments")):
        return torch.as_tensor(x)
    if name == "scale" and isinstance(x, torch.SymFloat):
        number: Any = x
        return torch.full((), number, dtype=torch.float64)
    return torch.full((), x) if name.endswith("_lengths") and isinstance(x, _INTEGER) else x


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constants(H: int, D: int, dtype: str, names: tuple[str, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The plain options of a call that is traced, checked: numbers, then one number per head or None."""
    sizes = Shape((), 1, H, 1, T=1, S=1, D=D, E=None, lead=(H,))
    given = dict(zip(names, values, strict=True))
    scale = given.get("scale")
    if isinstance(scale, tuple) and scale and isinstance(scale[0], str):
        given["scale"] = Rule(*scale)
    scoring = options.describe(sizes, dtype_name=dtype.removeprefix("torch."), **given)
    per_head = (None if x is None else tuple(x.tolist()) for x in map(scoring.__getattribute__, _HEADS))
    return (*map(scoring.__getattribute__, _CONSTANT), *per_head)


def _checked(name: str, x: Any, q: Tensor, shape: Shape) -> dict[str, Tensor]:
    """An option that is a tensor, or a pair of them, as fields of `Scoring`."""
    if name == "segments":
        pair = x if isinstance(x, tuple) else (x, x)
        if len(pair) != 2 or (not isinstance(x, tuple) and shape.T != shape.S):
            segment_pair(tuple(pair) if isinstance(x, tuple) else np.zeros(0), shape)  # which refuses
        sizes = ((*(shape.batch or (1,)), n) for n in (shape.T, shape.S))
        ids = (_of_shape(name, part, full, q, False) for part, full in zip(pair, sizes, strict=True))
        return {field: part.reshape(shape.B, -1) for field, part in zip(_TOKENS, ids, strict=True)}
    if not isinstance(x, Tensor):
        raise bad_type(name, "one tensor", type(x).__name__, "Stack its parts")
    if name == "mask":
        full = (*shape.batch, shape.H, shape.T, shape.S)
        if x.dtype not in (torch.bool, q.dtype, torch.float32) or x.device != q.device:
            wanted = f"a bool mask, or a float mask of dtype {q.dtype} or float32, on device {q.device}"
            advice = "Use bool (True = may attend), or cast an additive mask to q's dtype"
            raise bad_type(name, wanted, f"{x.dtype} on device {x.device}", advice)
        _of_shape(name, x, full, q, None)
        return {name: x[0] if x.dim() > max(q.dim(), 2) else x}
    if name in _HEADS:
        return {name: _of_shape(name, x, (shape.H,), q, True)}
    if name in _BATCH:
        return {name: _of_shape(name, x, shape.batch or (1,), q, False).reshape(shape.B)}
    raise bad_type(name, "no tensor", "a tensor", "Pass a number")


def _of_shape(name: str, x: Tensor, full: tuple[int, ...], q: Tensor, floats: bool | None) -> Tensor:
    """The tensor expanded to `full`, of its type and on q's device. floats None: its dtype and place were checked."""
    broadcasting(name, tuple(x.shape), full)
    if floats is None:
        return x
    if x.is_floating_point() != floats or x.dtype is torch.bool or x.is_complex():
        raise bad_type(name, "real numbers" if floats else "integers", x.dtype, "Convert it")
    return x.to(q.device, _real(q) if floats else torch.int64, non_blocking=True).expand(full)


def _moved(x: Any, q: Tensor) -> Any:
    """A field that was described on the host, on q's device."""
    if not isinstance(x, np.ndarray):
        return x
    tensor = torch.from_numpy(np.array(x))
    return tensor.to(q.device, _real(q) if tensor.is_floating_point() else None, non_blocking=True)


def _real(q: Tensor) -> torch.dtype:
    """What numbers per head are held in; Metal has no float64."""
    return torch.float32 if q.device.type == "mps" else torch.float64

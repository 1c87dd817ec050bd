"""`describe=`: what users teach a watch about attention functions of their own.

A describer is called with the arguments of the function. It returns a `Call`, or a mapping with q and k, (B, H, T, D),
options of `levelhead.attention`, and perhaps `rows`, (B, T) bool: the queries that count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.call.options import NAMES, Scoring
from levelhead.errors import LevelheadError, bad_type, bad_value
from levelhead.torch.autograd import scoring_of
from levelhead.watching.measure import Call

Describer = Callable[..., Any]
_ADVICE = "Return {'q': q, 'k': k, ...} with options of lh.attention, q and k as (B, H, T, D)"


def checked(describe: Any) -> dict[Any, Describer]:
    """The argument `describe=` of a watch."""
    wanted, advice = "a mapping from functions to describers", "Pass describe={function: describer}"
    if describe is None:
        return {}
    if not isinstance(describe, Mapping):
        raise bad_type("describe", wanted, type(describe).__name__, advice)
    for function, describer in describe.items():
        if not callable(function) or isinstance(function, nn.Module):
            raise bad_type("describe", wanted, f"the key {function!r:.60}", f"{advice}; a module is given by its class")
        if not callable(describer):
            raise bad_type("describe", wanted, f"{describer!r:.60} for {name_of(function)}", advice)
    return dict(describe)


def name_of(function: Any) -> str:
    """A function's qualified name."""
    inner = function
    while hasattr(inner, "func") and not hasattr(inner, "__qualname__"):  # partials
        inner = inner.func
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    module = getattr(inner, "__module__", None)
    return f"{module}.{name}" if module else str(name)


def call_from(function: Any, describer: Describer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """The call that a describer makes of these arguments."""
    name = f"describe[{name_of(function)}]"
    try:
        said = describer(*args, **kwargs)
    except LevelheadError:
        raise
    except Exception as error:
        given = f"{type(error).__name__}: {error}"
        raise bad_value(name, "a describer that takes the function's arguments", given, _ADVICE) from error
    if isinstance(said, Call):
        return said
    if not isinstance(said, Mapping):
        raise bad_type(name, "a mapping or a Call", type(said).__name__, _ADVICE)
    options = dict(said)
    q, k, rows = options.pop("q", None), options.pop("k", None), options.pop("rows", None)
    options.pop("v", None)
    _check(name, q, k, rows, options)
    return Call(q, k, _scoring(q, k, options), rows=rows)


def _scoring(q: Tensor, k: Tensor, options: Mapping[str, Any]) -> Scoring:
    """The options, checked. The checks read the CPU: shapes of q and k stand for them, options are copied."""
    like_q, like_k = (torch.empty((), dtype=x.dtype).expand(x.shape) for x in (q, k))
    copied: Any = {name: x.detach().cpu() if isinstance(x, Tensor) else x for name, x in options.items()}
    scoring = scoring_of(like_q, like_k, None, None, copied)[0]
    moved: Any = {name: x.to(q.device) for name, x in scoring._asdict().items() if isinstance(x, Tensor)}
    return scoring._replace(**moved)


def _check(name: str, q: Any, k: Any, rows: Any, options: Mapping[str, Any]) -> None:
    for letter, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            given = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise bad_value(name, f"{letter} as a tensor (B, H, T, D)", given, _ADVICE)
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % max(k.shape[1], 1):
        raise bad_value(name, "q and k of one batch and width", f"{tuple(q.shape)} and {tuple(k.shape)}", _ADVICE)
    unknown = [option for option in options if option not in NAMES]
    if unknown:
        raise bad_value(name, "q, k, rows and options of lh.attention", f"the key {unknown[0]!r}", _ADVICE)
    if rows is not None and (not isinstance(rows, Tensor) or rows.shape != (q.shape[0], q.shape[2])):
        raise bad_value(name, "rows as a bool tensor (B, T)", type(rows).__name__, _ADVICE)

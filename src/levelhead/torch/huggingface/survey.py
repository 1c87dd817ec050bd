"""Which modules of a model attend, and how each of them gets at its attention.

Determined from the names that the compiled functions of a module's class use, and from what these names stand for,
before anything runs. A module either gets a function from transformers' attention interface, or calls
`F.scaled_dot_product_attention` itself, or forms its softmax by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from inspect import CO_VARKEYWORDS
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

_SDPA = "scaled_dot_product_attention"
_MULTIHEAD = "multi_head_attention_forward"
_INTERFACE = {"get_interface", "ALL_ATTENTION_FUNCTIONS"}
_LIBRARY = ("torch.", "transformers.modeling_utils", "transformers.generation")
_NAMES = ("attention", "attn")  # a module that normalises by hand attends if it is called so


class Attending(NamedTuple):
    """A module that attends."""

    name: str  # within the model
    module: nn.Module
    interface: bool  # asks transformers' interface for its attention function
    sdpa: bool  # calls torch's function itself
    by_hand: bool  # has a softmax of its own, perhaps beside the others
    asks: bool = True  # asks the interface in each call, as far as its code shows


def attending_modules(model: nn.Module, *, held: bool = False) -> Iterator[Attending]:
    """Every module of the model that attends, in the model's order; `held`: also those that have torch's function as an
    attribute, which no code shows to be called."""
    ways: Callable[[type], tuple[bool, bool, bool]] = cache(_ways)
    asks: Callable[[type], bool] = cache(_asks)
    for name, module in model.named_modules():
        kind = type(module)
        interface, sdpa, by_hand = ways(kind)
        if not interface and not sdpa and not by_hand:
            # nn.Softmax may also be a child, which the class only calls.
            children = any(isinstance(child, nn.Softmax) for child in module.children())
            by_hand = children and _is_called_attention(kind)
            sdpa = held and any(map(_is_sdpa, vars(module).values()))
        if interface or sdpa or by_hand:
            yield Attending(name, module, interface, sdpa, by_hand, asks(kind))


def _ways(kind: type) -> tuple[bool, bool, bool]:
    if issubclass(kind, nn.MultiheadAttention):  # torch's own: its fast path is native code
        return False, False, True
    words = {word for function in _functions(kind) for word in _words(function)}
    interface = bool(words & _INTERFACE)
    sdpa = _SDPA in words or any(_is_sdpa(x) for function in _functions(kind) for x in _held(function))
    own = {word for function in _functions(kind, helpers=False) for word in _words(function)}
    # Helpers of an interface's module are its eager functions: no second way.
    by_hand = (_MULTIHEAD in words or _normalises(own if interface else words)) and _is_called_attention(kind)
    return interface, sdpa, by_hand


def _is_sdpa(x: Any) -> bool:
    """Whether it is torch's function, or a wrapper around it, under whatever name."""
    return isinstance(x, FunctionType | BuiltinFunctionType) and x.__name__ == _SDPA


def _held(function: FunctionType) -> Iterator[Any]:
    """What a function's code may call by a name of its own: of its file, as a default, from around it."""
    yield from (function.__globals__.get(word) for word in _words(function))
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not filled yet
            yield cell.cell_contents


def _asks(kind: type) -> bool:
    return any("get_interface" in _words(function) for function in _functions(kind))


def _normalises(words: set[str]) -> bool:
    return any("softmax" in word.lower() or word == "logsumexp" for word in words)


def _is_called_attention(kind: type) -> bool:
    return any(part in base.__name__.lower() for base in kind.__mro__ for part in _NAMES)


def eager_functions(module: nn.Module) -> Iterator[FunctionType]:
    """The functions of its file that a module may hand to the interface as its default."""
    for function in _functions(type(module)):
        if "module" in function.__code__.co_varnames[:1] and _normalises(_words(function)):
            yield function


def _functions(kind: type, *, helpers: bool = True) -> Iterator[FunctionType]:
    """A class's methods, and the functions of its file that they name, and those these name."""
    bases = [base for base in kind.__mro__ if not base.__module__.startswith(_LIBRARY) and base is not object]
    functions = [function for base in bases for value in vars(base).values() if (function := _plain(value))]
    for function in functions:  # grows as helpers join
        yield function
        for word in _words(function) if helpers else ():
            helper = _plain(function.__globals__.get(word))
            if helper and helper not in functions and helper.__module__ == function.__module__:
                functions.append(helper)


def _plain(value: Any) -> FunctionType | None:
    """The function behind a method or a decorator."""
    value = getattr(value, "__func__", value)  # static and class methods
    while isinstance(value, FunctionType) and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value if isinstance(value, FunctionType) else None


def _words(function: FunctionType) -> set[str]:
    codes: list[CodeType] = [function.__code__]
    for code in codes:  # grows as nested functions join
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {name for code in codes for name in code.co_names}


def options_read(function: Callable[..., Any]) -> frozenset[str]:
    """Names of the options that an attention function may read: its parameters, and the words with which its code may
    look into the rest. It ignores all others."""
    while isinstance(function, partial):  # a wrapper that has the function as its first argument
        function = next((x for x in function.args if callable(x)), function.func)
    plain = _plain(function)
    if plain is None:
        return frozenset()
    code = plain.__code__
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    words = (
        [x for x in code.co_consts if isinstance(x, str) and x.isidentifier()] if code.co_flags & CO_VARKEYWORDS else []
    )
    return frozenset((*named, *words))


# Endings of class names of which the attention is not softmax(q kᵀ · scale + bias) v.
_OTHER_FORMULAS = {
    "AutoformerAttention": "correlates sequences by Fourier transform",
    "EfficientAdditiveAttention": "weighs queries, without a product with keys",
    "GroupViTAssignAttention": "normalises over queries",
    "LSHSelfAttention": "attends within buckets of hashes",
    "LinearSelfAttention": "weighs keys, without a product with queries",
    "LongformerSelfAttention": "attends within overlapping chunks",
    "LEDEncoderSelfAttention": "attends within overlapping chunks",
    "MultiscaleDeformableAttention": "attends to sampled positions",
    "PatchTSMixerGatedAttention": "is a gate",
}


def other_formula(module: nn.Module) -> str | None:
    """What a module computes instead of the usual formula, where this is known."""
    name = type(module).__name__
    return next((what for ending, what in _OTHER_FORMULAS.items() if name.endswith(ending)), None)


# Names in eager functions that compute two products, a softmax, dropout, shared heads, a cap, and a sink as one more
# column or as a factor afterwards. A function with any other name may compute something else.
_ATTENTION_NAMES = (
    "F cat contiguous device dropout dtype expand float float32 functional getattr hasattr head_dim matmul max "
    "maybe_autocast nn num_key_value_groups repeat_kv reshape shape sinks size softmax tanh to torch training "
    "transpose type values"
)
_ATTENTION = set(_ATTENTION_NAMES.split())
_SINK_AFTERWARDS = {"logsumexp", "sigmoid", "sinks", "unsqueeze", "view"}


def understood(function: Callable[..., Any]) -> bool:
    """Whether an eager function is softmax(q kᵀ · scale + mask) v and nothing else."""
    if not isinstance(function, FunctionType):
        return False
    words = _words(function)
    if words >= _SINK_AFTERWARDS:
        words = words - _SINK_AFTERWARDS
    return {"matmul", "softmax"} <= words <= _ATTENTION

"""What type checkers and editors know of the public interface: array in, the same kind of array out."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import levelhead as lh
from levelhead.call import options

SNIPPET = """
import numpy as np
import torch
from numpy.typing import NDArray

import levelhead as lh

a: NDArray[np.float32] = np.ones((2, 3, 4), np.float32)
t: torch.Tensor = torch.ones(2, 3, 4)
reveal_type(lh.attention(a, a, a, causal=True, query_lengths=2))
reveal_type(lh.attention(t, t, t, scale="1/d_k", threads=1))
reveal_type(lh.observe(a, a).heads.max_logit)
reveal_type(lh.observe(t, t, t).output)
reveal_type(lh.attention_backward(a, a, a, a, a, a))
reveal_type(lh.merge(lh.observe(t, t), lh.observe(t, t)))
reveal_type(lh.diagnose(lh.observe(a, a)))
reveal_type(lh.lab.figure("walk"))
reveal_type(lh.explain(a, a, a))
plain: lh.Observation = lh.observe(a, a)
lh.attention(a, a, a, casual=True)
lh.attention(a, a, a, window=3)
lh.additive_attention(t, t, t, t, t, t, softcap=3.0)
lh.MultiHeadAttention({}, 2)(a, causal=True)
lh.torch.MultiHeadAttention(8, 2).forward(t, sinks=t)
lh.explain(a, a, a, dropout=0.5)
"""
REVEALED = [
    "ndarray[tuple[Any, ...], dtype[floating[_typing._nbit_base._32Bit]]]",
    "torch._tensor.Tensor",
    "ndarray[tuple[Any, ...], dtype[float64]]",
    "torch._tensor.Tensor",
    "tuple[ndarray",
    "levelhead.observation.Observation[torch._tensor.Tensor]",
    "levelhead.diagnosis.findings.Findings",
    "levelhead.lab.figure.Figure",
    "levelhead.explanation.arrays.Explanation",
]


def test_a_checker_knows_what_comes_back_and_which_options_there_are(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "snippet.py"
    file.write_text(SNIPPET)
    # With the project's settings and cache, which `make lint` fills: reading torch anew takes minutes.
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False, timeout=280)
    notes = [line for line in done.stdout.splitlines() if "Revealed type" in line]
    assert len(notes) == len(REVEALED), done.stdout + done.stderr
    for note, wanted in zip(notes, REVEALED, strict=True):
        assert wanted in note.replace("numpy.", ""), note
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    refused = ("casual", "window", "softcap", "causal", "sinks", "dropout")
    assert len(errors) == len(refused), done.stdout
    assert all(f'"{name}"' in error for name, error in zip(refused, errors, strict=True)), done.stdout


def test_help_lists_every_option_with_its_default() -> None:
    for function in (lh.attention, lh.observe, lh.attention_backward):
        parameters = inspect.signature(function).parameters
        for name in options.NAMES:
            assert parameters[name].default == options.DEFAULTS[name]
            assert f"{name}: " in (function.__doc__ or "")


def test_the_description_names_every_field_and_option_once() -> None:
    assert set(options.KINDS) == set(options.Scoring._fields)
    assert set(options.Options.__annotations__) == set(options.NAMES)
    tensors = options.fields(options.HEADS, options.MASK, options.BATCH, options.TOKENS, options.SEED)
    assert options.Scoring._fields[: len(tensors)] == tensors  # the operators' order


def public_functions() -> dict[str, Callable[..., Any]]:
    """Every public function and method, also of the public modules, by its name."""
    found: dict[str, Callable[..., Any]] = {}
    for name in lh.__all__:
        public = getattr(lh, name)
        members = [(name, public)]
        if inspect.ismodule(public):
            members = [(f"{name}.{x}", getattr(public, x)) for x in getattr(public, "__all__", [])]
        for path, x in members:
            if inspect.isclass(x) and x.__module__.startswith("levelhead"):
                found |= {f"{path}.{key}": y for key, y in vars(x).items() if inspect.isfunction(y)}
            elif inspect.isfunction(x):
                found[path] = x
    return found


def test_type_hints_of_every_public_function_resolve() -> None:
    functions = public_functions()
    assert {"attention", "explain", "torch.MultiHeadAttention.forward", "distributed.observe"} <= functions.keys()
    for path, function in functions.items():
        if function.__module__.startswith("levelhead"):
            hints = typing.get_type_hints(function)
            assert hints.keys() == function.__annotations__.keys(), path


def test_every_front_end_names_the_options_it_takes_and_speaks_of_no_others() -> None:
    words = lh.additive_attention.__doc__ or ""
    assert "p = S - T + i" in words and "query_start" not in words
    assert set(options.PER_CALL) == {"mask", "key_lengths", "query_lengths", "segments"}
    assert set(options.ADDITIVE) == {"mask", "causal", "key_lengths", "query_lengths"}


def test_every_public_name_is_listed_and_there() -> None:
    assert set(lh.__all__) <= set(dir(lh))
    for name in lh.__all__:
        assert getattr(lh, name) is not None
    assert {"diagnose", "lab", "watch", "explain", "onnx", "remedies", "sinks"} <= set(lh.__all__)

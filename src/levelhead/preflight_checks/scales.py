"""Scales that `diagnose` cannot name, with a name from the model's sizes; logits that QK-norms allow; products in a
narrow type."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from levelhead.diagnosis import thresholds
from levelhead.diagnosis.findings import Finding
from levelhead.diagnosis.wrong_scale import UNUSUAL, WRONG
from levelhead.preflight_checks import settings
from levelhead.preflight_checks.calls import SeenCall
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.projections import around, home
from levelhead.preflight_checks.result import finding
from levelhead.runs.record import Record, Run
from levelhead.watching import effective_scale

_NEAR = 1.03  # own: a factor; sizes that differ by less cannot be told apart
_GAINS = 4.0  # own: gains of q and k, multiplied; some families norm q and k and use no scale


# ---- names for unusual scales


def named(flight: Flight, run: Run, found: Sequence[Finding]) -> list[Finding]:
    """The findings of `diagnose`; an unusual scale that a size of the model explains is a warning."""
    modules = dict(flight.model.named_modules())
    records = {record.module: record for record in run.latest}
    result, wrong = [], []
    for one in found:
        record = records.get(one.module)
        known = one.kind == UNUSUAL and record is not None
        groups = _key_heads(flight, record) if record is not None else []
        better = _named(one, record, modules.get(one.module), groups) if known and record is not None else one
        result.append(better)
        if better.kind in (UNUSUAL, WRONG) and better.severity != "note":
            wrong.append(better)
    judged = [r for r in run.latest if r.facts.effective_scale is not None]
    name, changed = "effective scale", "the factor from projections to logits"
    if wrong:
        flight.failed(name, changed, f"{len(wrong)} findings", wrong[0])
        flight.findings.pop()  # it is among those of `diagnose`
    elif judged:
        flight.passed(name, changed, f"read in {len(judged)} of {len(run.latest)} modules")
    else:
        flight.unknown(name, changed, "it could not be read in any module")
    return result


def _named(one: Finding, record: Record, module: nn.Module | None, groups: Sequence[int]) -> Finding:
    scale, d_k = one.evidence.get("effective_scale", 0.0), record.facts.d_k
    if settings.yarn_explains(module, one.evidence.get("ratio", 1.0)):
        return replace(one, severity="note", why="Not 1/√d_k, but meant: YaRN's factor is set.")
    name = next((words for words, x in _candidates(record, module, groups) if scale > 0 and _same(scale, x)), None)
    if name is None or one.severity != "note":
        return one
    why = f"The scale is {name}, not 1/√d_k with d_k = {d_k}."
    return replace(one, severity="warning", why=why, advice="Take the root of the width of a head's keys.")


def _candidates(record: Record, module: nn.Module | None, groups: Sequence[int]) -> Iterator[tuple[str, float]]:
    """Mistakes by their number, from sizes that only the model knows."""
    facts, H = record.facts, len(record.tally)
    if facts.model_width and H and facts.model_width / H != facts.d_k:
        each = facts.model_width / H
        yield f"1/√{each:g}, the model's width over {H} heads, which is not the width of a head (pruned?)", each**-0.5
    for n in {*_kv_heads(module), *groups}:
        width = H * facts.d_k / n
        yield f"1/√{width:g}, a width computed with the {n} key/value heads, not with the query heads", width**-0.5
    for holder in (module, getattr(module, "config", None)):
        for name, n in vars(holder).items() if holder is not None else ():
            if isinstance(n, int) and not isinstance(n, bool) and n > 1 and n != facts.d_k and "dim" in name:
                yield f"1/√{name} ({n})", n**-0.5


def _kv_heads(module: nn.Module | None) -> list[int]:
    words = ("kv_head", "key_value_head", "n_kv", "kv_groups")
    config = getattr(module, "config", None)
    found = [pair for holder in (module, config) if holder is not None for pair in vars(holder).items()]
    return [n for name, n in found if isinstance(n, int) and n > 0 and any(word in name for word in words)]


def _key_heads(flight: Flight, record: Record) -> list[int]:
    """How many heads the projection of the keys gives, if fewer than there are."""
    k, H = around(record.module, flight.tape).get("k"), len(record.tally)
    widths = [] if k is None else [k.shape[-1]]
    return [w // record.facts.d_k for w in widths if w % record.facts.d_k == 0 and 0 < w < H * record.facts.d_k]


def _same(a: float, b: float) -> bool:
    return abs(math.log(a / b)) <= math.log(_NEAR)


# ---- QK-norm


def norms(flight: Flight, run: Run, calls: Sequence[SeenCall]) -> None:
    """The largest logit that normed q and k can reach: |q| · |k| · scale."""
    name, changed = "QK-norm gains", "the lengths of normed q and k"
    modules = dict(flight.model.named_modules())
    records = {record.module: record for record in run.latest}
    found, seen = [], 0
    for call in calls:
        record = records.get(call.module)
        module = modules[home(call.module, modules)] if call.module in modules else None
        if (
            module is None
            or record is None
            or not call.whole
            or len(effective_scale.qk_norms(module)) < 2
            or record.facts.norms_idle
        ):
            continue
        scale = record.facts.product_scale
        if scale is None:
            continue
        seen += 1
        groups = call.q.shape[1] // call.k.shape[1]
        q, k = (x.double().norm(dim=-1).nan_to_num().amax((0, 2)) for x in (call.q, call.k))
        bound = float((q * k.repeat_interleave(groups)).max()) * abs(scale)
        gains = bound / (abs(scale) * call.q.shape[3])  # 1: norms without gains, at any scale
        if bound >= thresholds.CLIPPED and gains >= _GAINS:
            why = "The gains of the QK-norms let logits reach this number: the norm bounds nothing, the softmax can "
            why += "saturate at any time."
            advice = (
                "Start gains at 1, leave weight decay on for them, or cap them so that |q|·|k|·scale stays below 100."
            )
            found.append(finding("QK-norm gains too large", "warning", call.module, why, advice, reachable_logit=bound))
    if found:
        return flight.failed(name, changed, f"logits can reach {found[0].evidence['reachable_logit']:.3g}", *found)
    if not seen:
        return flight.unknown(name, changed, "no module has norms of q and k whose scale is known")
    return flight.passed(name, changed, f"{seen} modules stay below {thresholds.CLIPPED:g}")


# ---- the type of the product


def half_products(flight: Flight, calls: Sequence[SeenCall]) -> None:
    """Products in float16 of projections in a wider type."""
    name, looked = "type of the product", "the type of q and k at the product, and of their projections"
    found = []
    for call in calls:
        wide = _projected_types(flight, call.module)
        narrow = call.call.ready and call.q.dtype is torch.float16
        if narrow and wide and all(dtype is torch.float32 for dtype in wide):
            why = "q and k are cast to float16 for their product, which is scaled afterwards: it overflows at 65,504, "
            why += "and the softmax then gives NaN."
            advice = "Scale q before the product, or form the logits in float32 or bfloat16."
            found.append(finding("fp16 product", "warning", call.module, why, advice))
    if found:
        return flight.failed(name, looked, "float16 of float32", *found)
    return flight.passed(name, looked, "no product is narrower than its projections")


def _projected_types(flight: Flight, module: str) -> list[torch.dtype]:
    """Types of what the projections of q and k give; those around the module, where it has none of its own."""
    while True:
        prefix = f"{module}." if module else ""
        found = [
            x.dtype
            for (inner, _), entry in flight.tape.entries.items()
            if inner.startswith(prefix) and effective_scale.role(inner) in ("q", "k", "kv", "qkv")
            for x in entry.outputs
        ]
        if found or not module:
            return found
        module = module.rpartition(".")[0]

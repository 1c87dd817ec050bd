"""Scales that `diagnose` cannot name, with a name from the model's sizes; logits that QK-norms allow; weights that hold
a scale which an earlier checkpoint did not hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from levelhead.diagnosis import thresholds
from levelhead.diagnosis.findings import Finding
from levelhead.diagnosis.wrong_scale import UNUSUAL, WRONG
from levelhead.preflight_checks import settings
from levelhead.preflight_checks.calls import SeenCall
from levelhead.preflight_checks.flight import Flight
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
        better = _named(one, record, modules.get(one.module)) if known and record is not None else one
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


def _named(one: Finding, record: Record, module: nn.Module | None) -> Finding:
    scale, d_k = one.evidence.get("effective_scale", 0.0), record.facts.d_k
    if settings.yarn_explains(module, one.evidence.get("ratio", 1.0)):
        return replace(one, severity="note", why="Not 1/√d_k, but meant: YaRN's factor is set.")
    name = next((words for words, x in _candidates(record, module) if scale > 0 and _same(scale, x)), None)
    if name is None or one.severity != "note":
        return one
    why = f"The scale is {name}, not 1/√d_k with d_k = {d_k}."
    return replace(one, severity="warning", why=why, advice="Take the root of the width of a head's keys.")


def _candidates(record: Record, module: nn.Module | None) -> Iterator[tuple[str, float]]:
    """Mistakes by their number, from sizes that only the model knows."""
    facts, H = record.facts, len(record.tally)
    if facts.model_width and H and facts.model_width / H != facts.d_k:
        each = facts.model_width / H
        yield f"1/√{each:g}, the model's width over {H} heads, which is not the width of a head (pruned?)", each**-0.5
    for n in _kv_heads(module):
        width = H * facts.d_k / n
        yield f"1/√{width:g}, a width computed with the {n} key/value heads, not with the query heads", width**-0.5
    for holder in (module, getattr(module, "config", None)):
        for name, n in vars(holder).items() if holder is not None else ():
            if isinstance(n, int) and not isinstance(n, bool) and n > 1 and n != facts.d_k and "dim" in name:
                yield f"1/√{name} ({n})", n**-0.5


def _kv_heads(module: nn.Module | None) -> list[int]:
    words = ("kv_head", "key_value_head", "n_kv", "kv_groups")
    found = vars(module).items() if module is not None else ()
    return [n for name, n in found if isinstance(n, int) and n > 0 and any(word in name for word in words)]


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
        module, record = modules.get(call.module), records.get(call.module)
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
        prefix = f"{call.module}." if call.module else ""
        wide = [
            x.dtype
            for (inner, _), entry in flight.tape.entries.items()
            if inner.startswith(prefix) and effective_scale.role(inner) in ("q", "k", "qkv")
            for x in entry.outputs
        ]
        narrow = call.call.ready and call.q.dtype is torch.float16
        if narrow and wide and all(dtype is torch.float32 for dtype in wide):
            why = "q and k are cast to float16 for their product, which is scaled afterwards: it overflows at 65,504, "
            why += "and the softmax then gives NaN."
            advice = "Scale q before the product, or form the logits in float32 or bfloat16."
            found.append(finding("fp16 product", "warning", call.module, why, advice))
    if found:
        return flight.failed(name, looked, "float16 of float32", *found)
    return flight.passed(name, looked, "no product is narrower than its projections")


# ---- against an earlier checkpoint


def against(flight: Flight, earlier: nn.Module, run: Run, found: list[Finding]) -> list[Finding]:
    """Compares the sizes of q and k weights with those of an earlier checkpoint."""
    name, changed = "against", "the weights of q and k, compared with the earlier checkpoint"
    before, after = _projections(earlier), _projections(flight.model)
    wrong, same = [], 0
    for record in run.latest:
        ratio = _product(after, record.module) / max(_product(before, record.module), 1e-30)
        if ratio <= 0 or record.module not in {name for name, _ in before}:
            continue
        root = math.sqrt(record.facts.d_k)
        scale = record.facts.scale or 1 / root
        folded = next((r for r in (1 / root, root) if _near(ratio, r)), None)
        if folded is None:
            same += 1
            continue
        if _near(scale * root, 1 / folded):  # the call makes up for it
            found = [f for f in found if not (f.kind in (WRONG, UNUSUAL) and f.module == record.module)]
            same += 1
            continue
        why = (
            "The weights of q and k together are √d_k times another size than in the earlier checkpoint, and the call "
        )
        why += "still scales: the scale is folded into the weights and applied again."
        advice = "Undo the factor in the weights, or pass scale=1.0 to the attention function."
        folds = finding("scale folded into weights", "warning", record.module, why, advice, ratio=ratio, scale=scale)
        wrong.append(folds)
    if wrong:
        flight.failed(name, changed, f"in {len(wrong)} modules", *wrong)
    elif same:
        flight.passed(name, changed, f"{same} modules have no scale in their weights that was not there")
    else:
        flight.unknown(name, changed, "no q and k projections of the same names")
    return found


def _near(a: float, b: float) -> bool:
    return abs(math.log(max(a, 1e-30) / b)) < math.log(1.1)


def _projections(model: nn.Module) -> dict[tuple[str, str], Tensor]:
    """(module, role) -> weights of q and k projections."""
    found: dict[tuple[str, str], Tensor] = {}
    for name, module in model.named_modules():
        role, weight = effective_scale.role(name), getattr(module, "weight", None)
        if role in ("q", "k", "qkv") and isinstance(weight, Tensor) and weight.dim() == 2:
            found[name.rpartition(".")[0], role] = weight.detach()
    return found


def _product(weights: Mapping[tuple[str, str], Tensor], module: str) -> float:
    q, k, joint = (weights.get((module, role)) for role in ("q", "k", "qkv"))
    if q is not None and k is not None:
        return float(q.double().norm() * k.double().norm())
    if joint is None:
        return 0.0
    thirds = torch.chunk(joint if joint.shape[0] >= joint.shape[1] else joint.mT, 3)
    return float(thirds[0].double().norm() * thirds[1].double().norm())

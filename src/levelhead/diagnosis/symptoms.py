"""Checks of heads, one function per kind of finding.

Each reads records and yields findings; heads of a module with the same finding are one. Low entropy is no fault: levels
and sinks are notes, and only what stops learning, or breaks numbers, is more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.diagnosis import logit_growth, thresholds
from levelhead.diagnosis.findings import Finding, Severity, link, worst_heads
from levelhead.runs import tally
from levelhead.runs.record import Record, Run


def _finding(
    kind: str, severity: Severity, record: Record, chosen: NDArray[np.bool_], **evidence: Any
) -> Iterator[Finding]:
    """A finding about the chosen heads, if there are any. `evidence`: a number, or one per head, whose largest among
    the chosen counts."""
    heads = [int(head) for head in np.flatnonzero(chosen)]
    if heads:
        numbers = {name: float(np.max(x[chosen]) if np.ndim(x) else x) for name, x in evidence.items()}
        finite = {name: x for name, x in numbers.items() if np.isfinite(x)}
        why, advice = _TEXTS[kind].get(severity) or _TEXTS[kind]["any"]
        yield Finding(kind, severity, record.module, worst_heads(heads), finite, why, advice, link(kind))


def _levels(record: Record, wanted: str) -> NDArray[np.bool_]:
    return np.array([level == wanted for level in record.heads.levels], bool)


# ---- broken numbers


def not_finite(run: Run) -> Iterator[Finding]:
    """Rows with a NaN or +inf logit, in any step; the first one is the place to look at. Of sampled rows also where a
    query that was not sampled is not finite: all are in the sum of q²."""
    seen = set()
    for snapshot in run.snapshots:
        for record in snapshot.records:
            lost = ~np.isfinite(record.tally[:, tally.INDEX["q_squares"]])
            rows = np.maximum(record.heads.nan_rows, lost & record.facts.sampled)
            if record.module in seen or not (rows > 0).any():
                continue
            seen.add(record.module)
            yield from _finding("not finite", "error", record, rows > 0, rows=rows.sum(), first_step=snapshot.step)


def dead_rows(record: Record) -> Iterator[Finding]:
    """Queries that may see no key at all."""
    heads = record.heads
    some, every = heads.empty_rows > 0, heads.rows + heads.nan_rows == 0
    yield from _finding("dead rows", "warning", record, some & every, empty_rows=heads.empty_rows)
    share = heads.empty_rows / np.maximum(heads.rows + heads.empty_rows, 1)
    yield from _finding("dead rows", "note", record, some & ~every, empty_rows=heads.empty_rows, share=share)


def fp16_overflow(record: Record) -> Iterator[Finding]:
    """Logits, or the products before the scale, against the largest float16."""
    facts = record.facts
    size = logit_growth.largest(record)
    product = np.maximum(size, size / abs(facts.product_scale or 1.0))
    worst = np.nan_to_num(product, nan=0.0)
    over, near = worst >= thresholds.FLOAT16_MAX, worst >= thresholds.FLOAT16_NEAR
    graded: dict[Severity, NDArray[np.bool_]] = {"note": over}
    if facts.dtype.rsplit(".", 1)[-1] == "float16":
        graded = {"error": over, "warning": near & ~over}
    for severity, chosen in graded.items():
        yield from _finding("fp16 overflow near", severity, record, chosen, max_logit=size, before_scale=product)


def softcap_saturated(record: Record) -> Iterator[Finding]:
    """Logits that sit at the cap instead of being shaped by it."""
    cap, heads = record.facts.softcap, record.heads
    if not cap:
        return
    typical, most = heads.mean_max, heads.max_logit
    held = np.nan_to_num(typical, nan=-np.inf) >= thresholds.CAP_MEAN * cap
    # Keys at the negative cap are pinned as well. A bias added after the cap takes logits out of it: then unknown.
    inside = np.maximum(most, -heads.min_logit) <= thresholds.CAP_ROUNDED * cap
    squares = np.nan_to_num(heads.mean_logit**2 + heads.var_logit, nan=0.0)
    held |= inside & (squares >= (thresholds.CAP_ALL * cap) ** 2)
    touched = ~held & (most >= thresholds.CAP_MAX * cap)
    yield from _finding("softcap saturated", "warning", record, held, cap=cap, mean_max=typical)
    yield from _finding("softcap saturated", "note", record, touched, cap=cap, max_logit=most)


def idle_norms(record: Record) -> Iterator[Finding]:
    """Norms for q or k that the module has and never calls."""
    facts, kind = record.facts, "QK-norm present but not in force"
    if not facts.norms_idle:
        return
    names = ", ".join(facts.norms_idle)
    why = f"The module owns {names}, which did not run: logits are not bounded as the "
    why += "configuration promises, and checkpoints carry weights that do nothing."
    advice = "Call the norms on q and k after the projections; or remove them."
    evidence = {"norms": float(len(facts.norms_present)), "idle": float(len(facts.norms_idle))}
    yield Finding(kind, "warning", record.module, None, evidence, why, advice, link(kind))


# ---- what heads do


def flat_heads(record: Record) -> Iterator[Finding]:
    """Heads that weigh all keys alike."""
    flat, entropy = _levels(record, "flat"), record.heads.normalised_entropy
    yield from _finding("flat heads", "note", record, flat, heads=flat.sum(), of=len(flat), normalised_entropy=entropy)


def sink_heads(record: Record) -> Iterator[Finding]:
    """Heads that rest on the first key, or on a learned sink."""
    facts, heads = record.facts, record.heads
    maybe_causal = (facts.causal or facts.masked) and facts.queries == facts.keys
    keys = np.full(len(record.tally), facts.keys)
    if maybe_causal and not facts.sampled:
        # Only the first token of a causal document sees a single key: packed documents are shorter than the row.
        documents = np.maximum(heads.lone_rows - heads.empty_rows, 1)
        keys = np.minimum(keys, -(-heads.rows // documents))
    uniform = np.array([_uniform_first(int(n), maybe_causal) for n in keys])
    least = np.maximum(thresholds.SINK, thresholds.SINK_OVER_UNIFORM * uniform)
    first = (heads.mean_first > least) & (keys >= thresholds.SINK_KEYS)
    weight, chosen = np.maximum(heads.mean_first, heads.mean_sink), first | (heads.mean_sink > thresholds.SINK)
    yield from _finding("sink heads", "note", record, chosen, heads=chosen.sum(), of=len(chosen), weight=weight)


def _uniform_first(keys: int, causal: bool) -> float:
    """What equal weights put on the first key, the mean over rows."""
    if keys < 1:
        return 1.0
    return float(np.sum(1.0 / np.arange(1, keys + 1)) / keys) if causal else 1.0 / keys


def not_learning(run: Run) -> Iterator[Finding]:
    """Saturated heads whose q and k get no gradient, in each of the last steps with gradients."""
    steps = [s.records for s in run.snapshots if any(_has_gradients(r) for r in s.records)]
    steps = steps[-thresholds.STEADY :]
    if not steps:
        return
    stuck = [_stuck(records) for records in steps]
    for record in steps[-1]:
        masks = [heads[record.module] for heads in stuck if record.module in heads]
        if not masks or any(len(mask) != len(record.tally) for mask in masks):
            continue
        chosen, kind = np.logical_and.reduce(masks), "saturated and not learning"
        evidence = {name: getattr(record.heads, name) for name in ("dq_norm", "dk_norm", "dv_norm", "saturated")}
        yield from _finding(kind, "warning", record, chosen, **evidence, observations=len(masks))


def _has_gradients(record: Record) -> bool:
    return bool(np.isfinite(record.heads.dq_norm).any())


def _stuck(records: Iterable[Record]) -> dict[str, NDArray[np.bool_]]:
    """Module -> which of its heads are saturated without gradient, in one step."""
    watched = [record for record in records if _has_gradients(record)]
    saturated = {record.module: _levels(record, "saturated") for record in watched}
    typical = {}
    for name in ("dq_norm", "dk_norm"):
        others = np.concatenate([getattr(r.heads, name)[~saturated[r.module]] for r in watched])
        known = others[np.isfinite(others)]
        typical[name] = float(np.median(known)) if len(known) else np.nan
    stuck_heads = {}
    for record in watched:
        heads, stuck = record.heads, saturated[record.module]
        for name, norm in typical.items():
            # If every head is saturated, the values' gradients are the reference: these pass.
            reference = heads.dv_norm if np.isnan(norm) else np.full(len(stuck), norm)
            stuck = stuck & (getattr(heads, name) < thresholds.NO_GRADIENT * reference)
        stuck_heads[record.module] = stuck
    return stuck_heads


# ---- what was not recorded


def not_seen(run: Run) -> Iterator[Finding]:
    """Attention modules of which nothing is known."""
    kind = "not seen"
    for line in run.coverage:
        if not line.seen:
            why = f"Nothing is known of this module: {line.how or 'it was not called'}."
            advice = "Run an input that reaches it; deep=True sees hand-written softmax attention."
            evidence = {"calls": float(line.calls)}
            yield Finding(kind, "note", line.module, None, evidence, why, advice, link(kind))


def by_hand(run: Run) -> Iterator[Finding]:
    """What came of looking for attention by hand, where something was missed."""
    kind = "attention by hand"
    if run.by_hand and run.latest:
        advice = (
            "Nothing, if these are all modules that attend. deep=True follows every observed pass, deep=False none."
        )
        found = {"modules": float(sum("by hand" in line.how for line in run.coverage if line.seen))}
        yield Finding(kind, "note", "", None, found, f"{run.by_hand[0].upper()}{run.by_hand[1:]}.", advice, link(kind))


# kind -> severity -> why it matters, and what to try
_TEXTS: dict[str, dict[str, tuple[str, str]]] = {
    "not finite": {
        "error": (
            "A NaN or infinite logit makes its whole row of the output NaN, and one such row spreads to every weight "
            "in the next backward pass.",
            "Look at the first module named: its input, its q and k weights. In float16, scale before the product, or "
            "keep logits in float32 or bfloat16.",
        )
    },
    "dead rows": {
        "warning": (
            "Not one query of these heads sees a key: the head contributes nothing.",
            "Look at the mask: inverted (True must mean visible), or of another shape than thought.",
        ),
        "note": (
            "Some queries see no key. For padding that is fine: their output is ignored. Kernels differ in what they "
            "return there (zeros, a mean or NaN).",
            "If there is no padding, look at the mask.",
        ),
    },
    "fp16 overflow near": {
        "any": (
            "float16 ends at 65,504: where q·k is kept in it before the scale, as plain matmuls do, the product turns "
            "into inf and the softmax into NaN. Fused kernels keep it in float32.",
            "Scale q before the product, use bfloat16, or compute the logits in float32.",
        )
    },
    "softcap saturated": {
        "warning": (
            "A typical row's largest logit, or nearly every logit, sits at the cap, where tanh is flat: keys there can "
            "no longer be told apart and pass next to no gradient.",
            "Raise the cap, or keep q and k small (QK-norm, a lower learning rate) so that it is rarely needed.",
        ),
        "note": ("Single logits reach the cap. That is what it is for.", "Nothing; watch the mean."),
    },
    "flat heads": {
        "note": (
            "These heads average over all keys. At initialisation, and in some heads of healthy models, that is fine; "
            "heads that stay so are wasted.",
            "If they stay flat late in training, look at the scale (too small?) and at weight decay on q and k, or "
            "prune them.",
        )
    },
    "sink heads": {
        "note": (
            "These heads put their weight on the first key, or on a learned sink, when they have nothing to say. Most "
            "trained models have such heads.",
            "Nothing. Keep the first token when a cache drops old ones; expect large activations there when "
            "quantising.",
        )
    },
    "saturated and not learning": {
        "warning": (
            "The weights of these heads are one-hot, and q and k get hardly any of the gradient that others get: what "
            "they attend to is frozen, right or wrong.",
            "Look at the scale and at logit growth first. QK-norm or QK-Clip bring logits back to where gradients "
            "pass; a head frozen for long may need its q and k initialised anew.",
        )
    },
}

OF_A_RECORD = (dead_rows, fp16_overflow, softcap_saturated, idle_norms, flat_heads, sink_heads)
OF_A_RUN = (not_finite, not_learning, not_seen, by_hand, logit_growth.check)

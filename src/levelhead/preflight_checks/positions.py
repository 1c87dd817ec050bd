"""Relative positions: with the same token everywhere, its product with itself must be the same at every place.

That holds for any positions that q and k share: of a line, of rows and columns of an image, of packed documents. Judged
where the tokens that enter a module are all equal: there positions come from inside the attention (RoPE), and
rotations keep the length of q and k.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from levelhead.diagnosis.findings import Finding
from levelhead.errors import LevelheadError
from levelhead.preflight_checks import rope_pairs
from levelhead.preflight_checks.calls import SeenCall, seen_calls
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.head_scales import projected
from levelhead.preflight_checks.inputs import Batch, Key
from levelhead.preflight_checks.passes import Tape, taped
from levelhead.preflight_checks.places import Grid
from levelhead.preflight_checks.result import finding
from levelhead.watching import effective_scale

_NEAR = 2e-3
_RELATIVE, _STILL = "relative", "no rotation of q and k was seen"
_LONGER = "q and k change with the place, and their lengths too: not as a rotation alone"
_LITTLE = "q and k change little with the place, or at the first places only"
_SAME_ANGLES = "q and k are rotated by the same angles at every place"
_TURNED = 0.1  # own: RoPE turns its fastest pair by a radian for every token


def check(flight: Flight, seen: Sequence[SeenCall]) -> None:
    """The same token at every place. `seen`: the calls with the tokens as they are."""
    name, changed = "relative positions", "the same token at every place"
    stream = flight.batch.stream()
    if stream is None or flight.grid(stream).tokens < 4:
        return flight.unknown(name, changed, "the batch holds no tokens, or too few")
    if any("position" in word for word in flight.batch.names.values()):
        return flight.unknown(name, changed, "the batch brings positions of its own")
    batch = constant(flight.batch, stream)
    try:
        tape, calls = taped(batch), seen_calls(batch)[1]
    except LevelheadError as error:
        return flight.unknown(name, changed, str(error))
    grid = flight.grid(stream)
    judged = [call for call in calls if call.square and call.whole and _constant_inside(call.module, tape, grid)]
    states = {call.module: _judged(call, tape) for call in judged}
    longer = [call for call in seen if states.get(call.module) == _LONGER]
    states |= {call.module: f for call in longer if (f := rope_pairs.check(call, flight.tape)) is not None}
    wrong = [f for f in states.values() if isinstance(f, Finding)]
    relative = [module for module, state in states.items() if state == _RELATIVE]
    if wrong:
        return flight.failed(name, changed, f"in {len(wrong)} modules", *wrong)
    if not relative:
        reasons = sorted({state for state in states.values() if isinstance(state, str)} - {_STILL})
        return flight.unknown(name, changed, "; ".join(reasons) or _STILL)
    return flight.passed(name, changed, f"{len(relative)} modules rotate q and k, both alike")


def constant(batch: Batch, stream: Key) -> Batch:
    """The same ordinary token at every place, none of them padding."""
    x = batch[stream]
    if x.is_floating_point():
        first = x[:1] if batch.sequence_first else x[:, :1]
        return batch.with_({stream: first.expand_as(x).clone()})
    special = batch.special_ids()
    ordinary = next((n for n in x.flatten().tolist() if n not in special), int(x.flatten()[0]))
    changes: dict[Key, Tensor] = {stream: torch.full_like(x, ordinary)}
    mask = batch.padding_mask()
    if mask is not None and batch.names[mask].endswith("attention_mask"):
        changes[mask] = torch.ones_like(batch[mask])
    return batch.with_(changes)


def _constant_inside(module: str, tape: Tape, grid: Grid) -> bool:
    """Whether the tokens that enter the module's projections, the module, or one around it, are all equal."""
    prefix = f"{module}." if module else ""
    for (name, _), entry in tape.entries.items():
        own = name.startswith(prefix) and effective_scale.role(name) in ("q", "qkv") and entry.inputs
        tokens = grid.by_token(entry.inputs[0]) if own else None
        if tokens is not None:
            return _varies(tokens) < _NEAR
    while True:
        ran = tape.entries.get((module, 0))
        for x in ran.inputs if ran is not None and module else ():
            tokens = grid.by_token(x)
            if tokens is not None and grid.rows > 1 and x.dim() == 3:
                return _varies(tokens) < _NEAR
        if not module:
            return False
        module = module.rpartition(".")[0]


def _varies(x: Tensor) -> float:
    """The largest difference from the first token, as a share; tokens are the second dimension."""
    y = x.double().nan_to_num()
    return float((y - y[:, :1]).abs().max()) / max(float(y.abs().max()), 1e-30)


def _judged(call: SeenCall, tape: Tape) -> Finding | str:
    q, k = (x.double().transpose(1, 2) for x in (call.q, call.k))  # (B, T, heads, D)
    lengths = (_varies(x.norm(dim=-1)) for x in (q, k))
    if max(lengths) > _NEAR:
        return _LONGER
    of_q, of_k = _varies(q), _varies(k)
    if not bool(q.any()) or not bool(k.any()):  # a gain that is zero at first
        return _STILL
    if of_q < _NEAR and of_k < _NEAR:
        return _SAME_ANGLES if _turned_alike(call, tape) else _STILL
    late = [_varies(x[:, x.shape[1] // 2 :]) for x in (q, k)]  # a convolution varies at the beginning only
    if max(of_q, of_k) < _TURNED or max(late) < _TURNED:
        return _LITTLE
    if min(of_q, of_k) < _NEAR:
        which, other = ("q", "k") if of_q > of_k else ("k", "q")
        why = f"RoPE turns {which} and leaves {other}: products then depend on the absolute position of one side, and "
        why += "distances mean nothing."
        advice = "Rotate q and k alike, by the same positions."
        return finding(f"RoPE on {which} only", "error", call.module, why, advice, turned=max(of_q, of_k))
    groups = call.q.shape[1] // call.k.shape[1]
    products = call.q.double() @ call.k.double().repeat_interleave(groups, 1).mT
    own = products.diagonal(dim1=-2, dim2=-1)  # of every token with itself: rotations by the same angles cancel
    size = float((own - own[..., :1]).abs().max()) / float(products.abs().max())
    why = "q and k are rotated differently: the product of a token with itself changes from place to place. "
    why += "Their positions, frequencies or the pairing of columns differ."
    if size <= _NEAR:
        size = _offset(call, tape, products)
        if size <= 10 * _NEAR:
            return _RELATIVE
        why = "q and k are rotated differently: a token's product with itself is not that of its projections. The "
        why += "positions of q and k differ by an offset."
    advice = "Rotate q and k by one function with the same positions (the offset of a cache, too)."
    return finding("q and k rotated differently", "error", call.module, why, advice, change=size)


def _turned_alike(call: SeenCall, tape: Tape) -> bool:
    """Whether q is as long as behind its projection, and points elsewhere."""
    both = projected(call, tape)
    if both is None:
        return False
    q, made = call.q.double(), both[0]
    same_length = float((q.norm(dim=-1) / made.norm(dim=-1) - 1).abs().max()) < _NEAR
    return same_length and float((q - made).abs().max()) > _TURNED * float(made.abs().max())


def _offset(call: SeenCall, tape: Tape, products: Tensor) -> float:
    """How far a token's product with itself is from that of its projections, where q and k are only rotated."""
    both = projected(call, tape)
    if both is None:
        return 0.0
    ours = (call.q.double(), call.k.double().repeat_interleave(call.q.shape[1] // call.k.shape[1], 1))
    lengths = [float((a.norm(dim=-1) / b.norm(dim=-1) - 1).abs().max()) for a, b in zip(ours, both, strict=True)]
    if max(lengths) > _NEAR:
        return 0.0
    gap = products.diagonal(dim1=-2, dim2=-1) - (both[0] * both[1]).sum(-1)
    return float(gap.abs().max()) / float(products.abs().max())

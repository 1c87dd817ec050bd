"""Checks of the weights that a module really applies, read by `value_probe`: the axis of the softmax, masks behind it,
heads that mix, groups in the wrong order, rotated values, heads without effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from levelhead.diagnosis.findings import Finding, worst_heads
from levelhead.preflight_checks import query_heads
from levelhead.preflight_checks.calls import SeenCall
from levelhead.preflight_checks.causality import Claim
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.operators import called
from levelhead.preflight_checks.projections import SWAPPED, UNUSED, Owners, groups_finding
from levelhead.preflight_checks.result import finding
from levelhead.preflight_checks.value_probe import Site, heads_out, sites
from levelhead.runs.record import Record, Run

_GROUPS = 6  # key/value heads that are tried at most
_COLUMNS = 6  # keys that are tried at most
_NEAR = 5e-3


@dataclass(frozen=True)
class Applied:
    """What was read at one site."""

    site: Site
    reached: Tensor  # (tried, H) bool: which heads the values of a key/value head reach
    tried: list[int]  # key/value heads
    same: Tensor  # (B, T, H, E): what the heads give when all values of a head are its mark
    columns: dict[int, Tensor]  # key -> (B, T, H, E): when only that key has values

    @property
    def owners(self) -> Owners:
        """Of heads that read one of the tried key/value heads, and no other of them."""
        found = {}
        for h in range(self.site.heads):
            which = [g for n, g in enumerate(self.tried) if bool(self.reached[n, h])]
            if len(which) == 1:
                found[h] = which[0]
        return Owners(found, self.site.heads, self.site.kv_heads)

    def weights(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, H): how much of its head's mark each output holds, and the share that is something else."""
        owners = self.owners
        index = torch.tensor([owners.of.get(h, owners.usual(h)) for h in range(self.site.heads)])
        marks = self.site.marks()[index].double().to(out.device)
        y = out.double().nan_to_num()
        share = (y * marks).sum(-1) / marks.square().sum(-1)
        rest = (y - share[..., None] * marks).norm(dim=-1) / marks.norm(dim=-1)
        return share, rest


def check(flight: Flight, run: Run, calls: Sequence[SeenCall]) -> Claim | None:
    """Reads all sites and judges them; returns why the model should be causal, if the weights say so."""
    wrong = [_over(record.module, axis) for record in run.latest if (axis := wrong_axis(record)) is not None]
    return _check(flight, calls, [*wrong, *_pruned(flight)])


def wrong_axis(record: Record) -> str | None:
    """What the softmax of a module runs over, as its code shows, if that is not the keys."""
    words = {"queries": "queries", "batch": "heads, the batch, or keys and heads together"}
    return words.get(record.facts.softmax_axis or "")


def _check(flight: Flight, calls: Sequence[SeenCall], wrong: list[Finding]) -> Claim | None:
    name, changed = "applied weights", "the values, behind their projections"
    found = sites(flight.batch, flight.tape, calls)
    if not found and not wrong:
        flight.unknown(name, changed, "no module whose value and output projections are known")
        return None
    by_module = {call.module: call for call in calls}
    known = {one.module for one in wrong} | {f.module for f in flight.findings if f.kind in (UNUSED, SWAPPED)}
    claim: Claim | None = None
    doubts: list[str] = []
    verified = 0
    for one in _read(flight, [site for site in found if site.module not in known]):
        here = [*_groups(one), *_mixing(one, by_module.get(one.site.module)), *_idle(one, flight)]
        if not here:
            behind = _behind_softmax(one)
            if behind:
                claim = Claim("its weights behind the diagonal are zero", frozenset({one.site.module}))
            axis = _axis(one)
            if axis and one.site.module not in by_module:  # no call seen: was there such a softmax at all?
                ran = called(flight.batch)
                axis = axis if ran is not None and ran.other_axis else []
            here = behind or _joint(one, flight) or axis or _rotated(one) or _shared(one)
        if not here:
            doubt = _doubt(one, by_module.get(one.site.module))
            doubts += [] if doubt is None else [f"{one.site.module or 'the model itself'}: {doubt}"]
            verified += doubt is None
        wrong += here
    named = {one.module for one in wrong}
    wrong += query_heads.check(flight, [s for s in found if s.module not in known | named and s.kv_heads < s.heads])
    if wrong:
        flight.failed(name, changed, ", ".join(sorted({f.kind for f in wrong})), *wrong)
        return claim
    right = f"{verified} of {len(found)} modules: each head reads its own values, and rows sum to 1 along the keys"
    if verified == len(found):
        flight.passed(name, changed, right)
    else:
        flight.unknown(name, changed, "; ".join([right, *doubts[:2]]))
    return claim


def _doubt(one: Applied, call: SeenCall | None) -> str | None:
    """Why it is not known that each head reads its own values with weights that sum to 1; None: it is known."""
    share, rest = one.weights(one.same)
    near = _NEAR if one.site.dtype in (torch.float32, torch.float64) else 3e-2
    if any(g != one.owners.usual(h) for h, g in one.owners.of.items()):
        return "heads read values of other heads"
    if float(rest.max()) > near:
        return "what its heads give is more than a weighted sum of their values (mixed heads, or a gate)"
    sunk = call is not None and (call.keys > one.site.keys or call.call.scoring.sinks is not None)
    off = torch.where((share == 0) | (sunk & (share < 1)), 0.0, share - 1)  # 0: a query that sees no key
    if float(off.abs().max()) > 4 * near:
        worst = float(share.reshape(-1)[off.abs().argmax()])
        return f"a row of its weights sums to {worst:.3g}, not to 1 (a gate, a sink, or no softmax along the keys)"
    return None


def _read(flight: Flight, found: Sequence[Site]) -> list[Applied]:
    batch, tape = flight.batch, flight.tape
    if not found:
        return []
    by_group: dict[str, list[Tensor]] = {site.module: [] for site in found}
    tried = {site.module: _spread(site.kv_heads, _GROUPS) for site in found}
    for n in range(max(len(groups) for groups in tried.values())):

        def one_head(site: Site, n: int = n) -> Tensor:
            values, groups = site.zeros(), tried[site.module]
            g = groups[min(n, len(groups) - 1)]
            values[:, :, g] = site.marks()[g]
            return values

        for module, out in heads_out(batch, tape, found, one_head).items():
            if n < len(tried[module]):
                by_group[module].append(out.nan_to_num().abs().amax((0, 1, 3)) > 1e-5)
    same = heads_out(batch, tape, found, lambda site: site.zeros() + site.marks())
    keys = {site.module: _spread(site.keys, _COLUMNS) for site in found}
    columns: dict[str, dict[int, Tensor]] = {site.module: {} for site in found}
    for n in range(_COLUMNS):

        def one_key(site: Site, n: int = n) -> Tensor:
            values, tokens = site.zeros(), keys[site.module]
            values[:, tokens[min(n, len(tokens) - 1)]] = site.marks()
            return values

        for module, out in heads_out(batch, tape, found, one_key).items():
            columns[module][keys[module][min(n, len(keys[module]) - 1)]] = out
    return [
        Applied(s, torch.stack(by_group[s.module]), tried[s.module], same[s.module], columns[s.module]) for s in found
    ]


def _spread(n: int, most: int) -> list[int]:
    return sorted({round(x) for x in torch.linspace(0, n - 1, min(n, most)).tolist()})


# ---- judgements


def _groups(one: Applied) -> list[Finding]:
    owners = one.owners
    return [groups_finding(one.site.module, owners, "values")] if owners.wrong and len(owners.of) > 1 else []


def _mixing(one: Applied, call: SeenCall | None) -> list[Finding]:
    several = one.reached.sum(0) > 1
    shown = None if call is None or not call.square else call.shown()
    if not several.any() or shown is None:
        return []
    T = one.site.queries
    reached = {j: out.nan_to_num().abs().amax((0, 2, 3)) > 1e-5 for j, out in one.columns.items()}
    differ = sum(int((reached[j].cpu() != shown[:, j].cpu()).sum()) for j in reached)
    if differ < 0.1 * T * len(reached):
        return []
    why = "A head's values reach other heads, and tokens that its mask does not name: heads and tokens are mixed, most "
    why += "often by a view (B, H, T, D) without a transpose."
    advice = "Split as view(B, T, H, D).transpose(1, 2), and join as transpose(1, 2).reshape(B, T, H * D)."
    return [finding("heads mix tokens", "error", one.site.module, why, advice, places=float(differ))]


def _idle(one: Applied, flight: Flight) -> list[Finding]:
    """Some heads, but not all, that give nothing, or that nothing reads."""
    site, modules = one.site, dict(flight.model.named_modules())
    gives = one.same.nan_to_num().abs().amax((0, 1, 3)) > 0
    made = flight.tape.entries[site.values, 0].outputs[0][..., site.columns.flatten()]
    empty = made.nan_to_num().reshape(-1, *site.columns.shape).abs().amax((0, 2)) == 0
    of = one.owners.of
    gives &= torch.tensor([h not in of or not bool(empty[of[h]]) for h in range(site.heads)], device=gives.device)
    read = torch.ones_like(gives)
    reader = modules[_reader(site, flight)]
    weight = getattr(reader, "weight", None)
    if isinstance(weight, Tensor) and weight.dim() == 2 and site.heads > 1:
        inner = weight.detach().to(gives.device)
        inner = inner.mT if type(reader).__name__ == "Conv1D" else inner
        if inner.shape[1] == site.heads * site.width and inner.is_floating_point():
            read = inner.reshape(inner.shape[0], site.heads, -1).abs().amax((0, 2)) > 0
    return _idle_heads(site.module, gives & read)


def _pruned(flight: Flight) -> Iterator[Finding]:
    """The same of torch's own modules, whose projections are no modules."""
    for name, module in flight.model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and (name, 0) in flight.tape.entries:
            H, E = module.num_heads, module.embed_dim
            used = module.out_proj.weight.detach().reshape(E, H, -1).abs().amax((0, 2)) > 0
            if module.in_proj_weight is not None:
                values = module.in_proj_weight.detach()[2 * E :].reshape(H, -1).abs().amax(1)
                bias = module.in_proj_bias
                values = values if bias is None else values + bias.detach()[2 * E :].reshape(H, -1).abs().amax(1)
                used = used & (values > 0)
            yield from _idle_heads(name, used)


def _idle_heads(module: str, used: Tensor) -> list[Finding]:
    idle = [h for h, is_used in enumerate(used.tolist()) if not is_used]
    if not idle or len(idle) == len(used):
        return []
    why = "These heads change nothing: their outputs are zero, or the output projection has zeros for them. Pruned or "
    why += "masked heads cost time and memory, and get no gradient."
    advice = "Remove them from the projections, or initialise them anew."
    return [finding("heads without effect", "warning", module, why, advice, worst_heads(idle), heads=len(idle))]


def _reader(site: Site, flight: Flight) -> str:
    """The projection that reads the heads; it may be outside of the module, next to it."""
    if site.before:
        return site.reader
    given = flight.tape.entries[site.reader, 0].outputs[0]
    for (name, _), entry in flight.tape.entries.items():
        first = entry.inputs[0] if entry.inputs else given.new_empty(0)
        if name != site.reader and first.shape == given.shape and torch.equal(first, given):
            return name
    return site.reader


def _behind_softmax(one: Applied) -> list[Finding]:
    """Rows that see all keys sum to 1, the others to less: the softmax ran before the mask."""
    share, rest = one.weights(one.same)
    T = one.site.queries
    if one.site.keys != T or T < 3 or float(rest.max()) > _NEAR:
        return []
    sums = share.amax((0, 2)), share.amin((0, 2))
    later = [one.weights(out)[0][:, :j].abs().max() for j, out in one.columns.items() if j > 0]
    zero = all(float(x) < 1e-6 for x in later)
    if not zero or abs(float(sums[1][-1]) - 1) > _NEAR or float(sums[0][0]) > 0.9 or float(sums[0][T // 2]) > 0.99:
        return []
    why = "The rows of the weights do not sum to 1 but where all keys are visible: the mask is applied after the "
    why += "softmax, so hidden keys still take their share of the sum, and later tokens change earlier outputs."
    advice = "Fill hidden logits with -inf before the softmax."
    first = float(sums[0][0])
    return [finding("mask after the softmax", "error", one.site.module, why, advice, first_row_sum=first)]


def _axis(one: Applied) -> list[Finding]:
    share, rest = one.weights(one.same)
    off = (share - 1).abs().max()
    if float(rest.max()) > _NEAR or float(off) < 0.02:
        return []
    columns = torch.stack([one.weights(out)[0] for out in one.columns.values()], -1)  # (B, T, H, keys)
    H = one.site.heads
    B, T = columns.shape[:2]
    grouped = [columns.reshape(B, T, G, H // G, -1) for G in range(2, H) if H % G == 0]
    axes = [(columns, 1, "queries"), (columns, 2, "heads"), (columns, 0, "batch")]
    axes += [(each, axis, "heads of a group, or the groups") for each in grouped for axis in (2, 3)]
    for each, axis, words in axes:
        if each.shape[axis] > 1 and float((each.sum(axis) - 1).abs().max()) < _NEAR:
            worst = float(share.reshape(-1)[(share - 1).abs().argmax()])
            return [_over(one.site.module, words, row_sum=worst)]
    return []


def _shared(one: Applied) -> list[Finding]:
    """Heads with values of their own and the same weights, which differ from key to key."""
    columns = torch.stack([one.weights(out)[0] for out in one.columns.values()], -1)  # (B, T, H, keys)
    if one.site.kv_heads < 2 or columns.shape[-1] < 2 or float(one.weights(one.same)[1].max()) > _NEAR:
        return []
    seen = columns.abs().amin(2, keepdim=True) > 1e-9
    mean = columns.mean(2, keepdim=True)
    low, high = (mean.masked_fill(~seen, fill) for fill in (torch.inf, -torch.inf))
    by_key = (high.amax(-1) - low.amin(-1)).max()
    by_head = (columns - mean).abs().max()
    if float(by_key) < 1e-3 or float(by_head) > 1e-4 * float(by_key):
        return []
    why = "All heads of this module have the same weights, although each has queries, keys and values of its own: the "
    why += "weights or logits are averaged over the heads, or those of one head are taken for all."
    advice = "Multiply each head's weights with its own values; average them for display only."
    return [finding("heads share their weights", "warning", one.site.module, why, advice, heads=one.site.heads)]


def _joint(one: Applied, flight: Flight) -> list[Finding]:
    """One softmax over the keys of all heads. The weights of all heads sum to 1 also behind a gate over the heads: a
    softmax as wide must have run."""
    share, rest = one.weights(one.same)
    H, off = one.site.heads, (share.sum(2) - 1).abs().max()
    if H < 2 or float(rest.max()) > _NEAR or float(off) > _NEAR or float((share - 1).abs().max()) < 0.02:
        return []
    ran = called(flight.batch)
    if ran is None or H * one.site.keys not in ran.widths:
        return []
    return [_over(one.site.module, "keys and heads together", row_sum=float(share.mean()))]


def _over(module: str, words: str, **evidence: float) -> Finding:
    why = f"The weights sum to 1 over the {words}, not over the keys of a query: the softmax runs along the wrong axis."
    advice = "Use softmax(dim=-1) on logits (..., queries, keys)."
    return finding("softmax over the wrong axis", "error", module, why, advice, None, **evidence)


def _rotated(one: Applied) -> list[Finding]:
    """Values of the first token arrive as they are, later ones turned but as long."""
    if 0 not in one.columns or len(one.columns) < 3:
        return []
    first, *others = (one.columns[j] for j in sorted(one.columns))
    share, rest = one.weights(first)
    if float(rest.max()) > _NEAR or float(share.abs().max()) < _NEAR:
        return []
    size = [float(out.nan_to_num().abs().max()) for out in others]
    turned = [float(one.weights(out)[1].max()) / max(x, 1e-9) for out, x in zip(others, size, strict=True)]
    if min(turned) < 0.05:
        return []
    why = "The values of later tokens arrive rotated: RoPE is applied to v as well."
    return [finding("RoPE on values", "warning", one.site.module, why, "Rotate q and k only.", share=max(turned))]

"""The weights that a module really applies, read by replacing its values.

Attention is linear in the values: with values that are zero but for one token, or one head, the input of the output
projection is that column of the weights, whatever code or kernel formed them. Values are replaced behind their
projection; before the output projection the model's own numbers are put back, so that all modules of a model are read
in one pass, each on its own activations. A module whose projections are not found, or that is not linear in its values
(a norm behind the attention), is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from levelhead.preflight_checks.calls import SeenCall
from levelhead.preflight_checks.inputs import Batch
from levelhead.preflight_checks.operators import called
from levelhead.preflight_checks.passes import Tape, run
from levelhead.watching import effective_scale
from levelhead.watching.watchable import number_of_heads, sounds_like_attention

Values: TypeAlias = Callable[["Site"], Tensor]  # (B, S, G, E) for a site
_INSIDE = ("q", "k", "v", "kv", "qkv")


@dataclass(frozen=True)
class Site:
    """An attention module whose values can be replaced."""

    module: str  # of the calls
    values: str  # the projection that makes the values
    reader: str  # the module that reads the outputs of the heads: its first input; or `module`, its output
    before: bool  # whether `reader` reads them, or gives them
    columns: Tensor  # (G, E): the values' columns in the projection's output
    heads: int
    rows: int
    keys: int
    queries: int
    dtype: torch.dtype
    device: torch.device

    @property
    def kv_heads(self) -> int:
        return self.columns.shape[0]

    @property
    def width(self) -> int:
        return self.columns.shape[1]

    def zeros(self) -> Tensor:
        return torch.zeros(self.rows, self.keys, *self.columns.shape, dtype=self.dtype, device=self.device)

    def marks(self) -> Tensor:
        """(G, E): a vector for each head, of the size of values."""
        marks = torch.randn(self.columns.shape, generator=torch.Generator().manual_seed(5))
        return marks.to(self.device, self.dtype)


def sites(batch: Batch, tape: Tape, calls: Sequence[SeenCall]) -> list[Site]:
    """All that can be read; each has been tried with values of zero, and with doubled ones."""
    modules = dict(batch.model.named_modules())
    found: dict[str, Site] = {}
    candidates = [
        site
        for attending in _attending(modules, calls, lambda: _softmax_heads(batch))
        for site in _candidates(*attending, batch, tape, modules)
    ]
    while candidates:
        chosen: dict[str, Site] = {}
        for site in candidates:
            if site.module not in found:
                chosen.setdefault(site.module, site)
        rest = [site for site in candidates if site.module not in found and chosen[site.module] is not site]
        trial = list(chosen.values())
        if not trial:
            break
        empty = heads_out(batch, tape, trial, Site.zeros)
        once = heads_out(batch, tape, trial, _noise)
        twice = heads_out(batch, tape, trial, lambda site: 2 * _noise(site))
        for site in trial:
            if site.module in empty and _is_linear(empty[site.module], once[site.module], twice[site.module]):
                found[site.module] = site
        candidates = rest
    return list(found.values())


def _noise(site: Site) -> Tensor:
    noise = torch.randn(site.zeros().shape, generator=torch.Generator().manual_seed(6))
    return noise.to(site.device, site.dtype)


def _is_linear(empty: Tensor, once: Tensor, twice: Tensor) -> bool:
    size = float(once.nan_to_num().abs().max())
    near = 1e-4 if once.dtype in (torch.float32, torch.float64) else 3e-2
    rest, gap = empty.nan_to_num().abs().max(), (twice - 2 * once).nan_to_num().abs().max()
    return size > 0 and float(rest) < near * size and float(gap) < near * size


def heads_out(batch: Batch, tape: Tape, chosen: Sequence[Site], values: Values) -> dict[str, Tensor]:
    """What the heads give, (B, T, H, E) by module, with these values in every site."""
    modules = dict(batch.model.named_modules())
    out: dict[str, Tensor] = {}
    handles: list[Any] = []
    for site in chosen:
        handles.append(modules[site.values].register_forward_hook(_replace(site, values(site))))
        if site.before:
            kept = tape.entries[site.reader, 0].inputs[0]
            handles.append(modules[site.reader].register_forward_pre_hook(_read_input(site, kept, out)))
        else:
            kept = tape.entries[site.reader, 0].outputs[0]
            handles.append(modules[site.reader].register_forward_hook(_read_output(site, kept, out)))
    try:
        run(batch)
    finally:
        for handle in handles:
            handle.remove()
    return out


def _replace(site: Site, values: Tensor) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):
            return None
        turned = output.dim() == 3 and output.shape[0] == site.keys and site.keys != site.rows
        new = values.transpose(0, 1) if turned else values
        changed = output.clone()
        changed[..., site.columns.flatten()] = new.reshape(*output.shape[:-1], -1).to(output.dtype)
        return changed

    return hook


def _read_input(site: Site, kept: Tensor, out: dict[str, Tensor]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
        if args and args[0].shape == kept.shape:
            out[site.module] = _by_head(site, args[0])
            return (kept.to(args[0].dtype), *args[1:])
        return None

    return hook


def _read_output(site: Site, kept: Tensor, out: dict[str, Tensor]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor):
            return None
        out[site.module] = _by_head(site, first)
        return (kept, *output[1:]) if isinstance(output, tuple) else kept

    return hook


def _by_head(site: Site, x: Tensor) -> Tensor:
    turned = x.dim() == 3 and x.shape[0] == site.queries and site.queries != site.rows
    x = x.transpose(0, 1) if turned else x
    return x.detach().reshape(site.rows, site.queries, site.heads, -1).clone()


# ---- where values are made, and read


def _softmax_heads(batch: Batch) -> dict[str, int]:
    ran = called(batch)
    return {} if ran is None else ran.heads


def _attending(
    modules: dict[str, nn.Module], calls: Sequence[SeenCall], softmaxes: Callable[[], dict[str, int]]
) -> Iterator[tuple[str, int, int]]:
    """Names, heads and keys: of modules whose calls were seen once, and of those that sound like attention and were
    not (no keys). Where a call does not show its heads: minus the width of a head."""
    seen = [call.module for call in calls]
    for call in calls:
        if seen.count(call.module) == 1 and call.whole:
            yield call.module, call.heads, call.keys
        elif seen.count(call.module) == 1:
            yield call.module, number_of_heads(modules[call.module]) or -call.q.shape[3], 0
    for name, module in modules.items():
        around = any(other.startswith(f"{name}.") or name.startswith(f"{other}.") for other in seen)
        roles = {effective_scale.role(child) for child, _ in module.named_children()}
        heads = number_of_heads(module) or (softmaxes().get(name, 1) if {"q", "k", "v"} <= roles else None)
        projects = bool(roles & {"v", "kv", "qkv"})
        if name not in seen and not around and heads and (projects or sounds_like_attention(module)):
            yield name, heads, 0


def _candidates(
    name: str, heads: int, keys: int, batch: Batch, tape: Tape, modules: dict[str, nn.Module]
) -> Iterator[Site]:
    """Pairs of a projection that may make the values and one that may read the heads, likely ones first."""
    rows = batch.rows
    ran = [key[0] for key in tape.entries]
    for home in _homes(name, modules):
        prefix = f"{home}." if home else ""
        inside = [n for n in ran if n.startswith(prefix) and n != home and n[len(prefix) :].count(".") <= 1]
        roles = {n: effective_scale.role(n) for n in inside}
        makers = [n for n in inside if roles[n] in ("v", "kv", "qkv") and ran.count(n) == 1]
        makers = [n for n in makers if not isinstance(modules[n], nn.Conv1d | nn.Conv2d)]  # whose columns are not last
        for maker in makers:
            after = inside[inside.index(maker) + 1 :]
            readers = [(n, True) for n in after if roles[n] not in _INSIDE and n != name and ran.count(n) == 1]
            for reader, before in [*readers[:6], (name, False)]:
                yield from _built(name, heads, keys, rows, tape, maker, reader, before)


def _homes(name: str, modules: dict[str, nn.Module]) -> Iterator[str]:
    """The module, and the ones around it while it has no projections of its own."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name
        if any(isinstance(child, nn.Linear) for child in modules[name].children()):
            return


def _built(
    name: str, heads: int, keys: int, rows: int, tape: Tape, maker: str, reader: str, before: bool
) -> Iterator[Site]:
    made = tape.entries[maker, 0].outputs
    entry = tape.entries.get((reader, 0))
    read = [] if entry is None else entry.inputs if before else entry.outputs
    if not (made and read) or rows < 1:
        return
    F, width = made[0].shape[-1], read[0].shape[-1]
    tokens, queries = (x[0].numel() // (x[0].shape[-1] * rows) for x in (made, read))
    fits = all(x[0].shape[:-1].numel() == n * rows for x, n in ((made, tokens), (read, queries)))
    heads = width // -heads if heads < 0 else heads
    if heads == 1 and tokens and keys % tokens == 0 < keys:  # one softmax over the keys of all heads
        heads = keys // tokens
    if not heads or width % heads or not fits:
        return
    E = width // heads
    for columns in _layouts(effective_scale.role(maker) or "", F, heads, E):
        yield Site(name, maker, reader, before, columns, heads, rows, tokens, queries, made[0].dtype, made[0].device)


def _layouts(role: str, F: int, H: int, E: int) -> Iterator[Tensor]:
    """(G, E): which columns of a projection may be the values."""
    if role == "v":
        if F % E == 0 and H % (F // E) == 0:
            yield torch.arange(F).reshape(-1, E)
        return
    groups = [G for G in range(H, 0, -1) if H % G == 0]
    for G in groups:
        ends = G * E
        if (role == "kv" and 2 * ends == F) or (role == "qkv" and F == (H + 2 * G) * E):
            yield torch.arange(F - ends, F).reshape(G, E)  # side by side
        if F % G == 0 and F // G > E and (role == "kv" or F == (H + 2 * G) * E):
            yield torch.arange(F).reshape(G, -1)[:, -E:]  # each head's values behind its keys

"""Which rows of which parameters take which power of γ, for every head of an attention module.

MHA: rows of q and k take √γ each. Where query heads share keys (GQA), or one of the two is not known, is frozen or is
the source of the values, the rows of the other take the whole of γ. MLA: √γ for the parts of q and k that heads have to
themselves, γ for q's part with positions, nothing for the keys that all heads share (Kimi K2, arXiv:2507.20534).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from levelhead.remedies import shards
from levelhead.remedies.projections import Source, Sources, Unknown

_MASTERS = ("main_param", "_hp_mapping", "ds_id")  # Megatron's and DeepSpeed's marks of a parameter that is a copy


@dataclass(frozen=True, eq=False)
class Share:
    """Rows of one parameter by head, and the power of γ that they take."""

    parameter: str  # its name in the model
    dim: int
    rows: Tensor  # (heads, D), of the whole parameter
    power: float
    role: str = "q"  # or "k": whose rows these are


class RefusedError(Exception):
    """Why rows cannot be written; `frozen`: because they must not change."""

    def __init__(self, why: str, frozen: bool = False) -> None:
        super().__init__(why)
        self.frozen = frozen


def shares(model: nn.Module, sources: Sources, *, keys_stay: bool = False) -> tuple[Share, ...]:
    """Those of a module, or `RefusedError`; `keys_stay`: its keys are not its own."""
    names = {module: name for name, module in model.named_modules()}
    if (parts := sources.parts) is not None:
        q_own, q_shared = _writable(names, parts.q_own, "q"), _writable(names, parts.q_shared, "q")
        k_own = _trained(names, parts.k_own, "k")
        if not (_is_trained(parts.q_own) and _is_trained(parts.q_shared)):
            raise RefusedError(f"{q_own[0].parameter} is frozen", frozen=True)
        if k_own is None or keys_stay or "k" in sources.values:
            return _powers(q_own, 1.0) + _powers(q_shared, 1.0)
        return _powers(q_own, 0.5) + _powers(k_own, 0.5) + _powers(q_shared, 1.0)
    k_is_shared = keys_stay or (isinstance(sources.k, Source) and sources.k.shared(sources.heads))
    given = (("q", sources.q), ("k", sources.k))
    q, k = (None if isinstance(x, Unknown) else _trained(names, x, role) for role, x in given)
    k = None if k_is_shared else k
    taken = [role for role, each in (("q", q), ("k", k)) if each is not None and role in sources.values]
    q, k = (None if role in taken else each for role, each in (("q", q), ("k", k)))
    if q is not None and k is not None:
        return _powers(q, 0.5) + _powers(k, 0.5)
    if q is not None or k is not None:
        return _powers(q or k or (), 1.0)
    if taken:
        raise RefusedError(f"the values come from the rows of {' and '.join(taken)}, and would be scaled with them")
    if isinstance(sources.q, Unknown):
        raise RefusedError(sources.q.why)
    frozen = _writable(names, sources.q, "q")[0].parameter
    raise RefusedError(f"{frozen} is frozen", frozen=True)


def keys(model: nn.Module, sources: Sources) -> tuple[Share, ...]:
    """The rows of every head of keys in their weight, as far as they are known, whether a clip writes there or not."""
    source = sources.k if sources.parts is None else sources.parts.k_own
    names = {module: name for name, module in model.named_modules()}
    try:
        weight = () if isinstance(source, Unknown) else _writable(names, source, "k")[:1]
    except RefusedError:
        return ()
    return tuple(replace(each, rows=torch.unique(each.rows, dim=0)) for each in weight)


def _powers(each: tuple[Share, ...], power: float) -> tuple[Share, ...]:
    return tuple(replace(x, power=power) for x in each)


def _is_trained(source: Source) -> bool:
    parameter = source.module._parameters.get(source.weight)
    return parameter is not None and parameter.requires_grad


def _trained(names: dict[nn.Module, str], source: Source, role: str) -> tuple[Share, ...] | None:
    """Its rows, if they are trained."""
    found = _writable(names, source, role)
    return found if _is_trained(source) else None


def _writable(names: dict[nn.Module, str], source: Source, role: str) -> tuple[Share, ...]:
    """The rows of a source's weight and bias, all of which keep what is written into them."""
    rows = [(source.weight, source.dim, source.rows)]
    if source.bias is not None:
        rows.append((source.bias, 0, source.bias_rows))
    found = []
    for name, dim, each in rows:
        inside = names.get(source.module, "")
        whole = f"{inside}.{name}" if inside else name
        parameter = source.module._parameters.get(name)
        if parameter is None:
            raise RefusedError(f"{whole} is computed from other parameters, and keeps nothing that is written into it")
        refuse_unless_plain(whole, parameter)
        if len(shards.rows_here(parameter, dim)) != shards.local(parameter.detach()).shape[dim]:
            raise RefusedError(f"the rows of {whole} lie over ranks in an unknown order")
        found.append(Share(whole, dim, each, 1.0, role))
    return tuple(found)


def refuse_unless_plain(name: str, parameter: Tensor) -> None:
    """`RefusedError` where a parameter is no plain numbers, or a copy of others."""
    part = shards.local(parameter.detach())
    if type(part) not in (nn.Parameter, Tensor) or not part.dtype.is_floating_point or part.dtype.itemsize < 2:
        raise RefusedError(f"{name} is quantised or computed ({type(parameter).__name__} of {part.dtype})")
    if marks := [mark for mark in _MASTERS if hasattr(parameter, mark)]:
        why = f"{name} is a copy of what its optimiser keeps ({marks[0]}), which would overwrite a clip"
        raise RefusedError(why)


def of_queries(shares: tuple[Share, ...]) -> tuple[Share, ...]:
    """Those where keys belong to further heads, and must stay: queries take the whole of γ."""
    return _powers(tuple(x for x in shares if x.role == "q"), 1.0)


def parameter_of(model: nn.Module, name: str) -> Tensor:
    """A parameter by its name in the model, as it is registered now."""
    module, _, last = name.rpartition(".")
    parameter = model.get_submodule(module)._parameters[last]
    assert parameter is not None
    return parameter


def first_rows(each: tuple[Share, ...], heads: int) -> tuple[int, ...]:
    """A number for every head that is the same on all ranks: its first row."""
    return tuple(each[0].rows[:, 0].tolist()) if each else tuple(range(heads))


def fingerprint(model: nn.Module, names: list[str]) -> tuple[tuple[int, ...], int]:
    """Which ranks hold these parameters together, and a number of their bits on this one."""
    parameters = [parameter_of(model, name) for name in names]
    with torch.no_grad():
        # Beside queries in parts, keys may be whole on every rank.
        holders = max((shards.holders(x) for x in parameters), key=len, default=())
        return holders, shards.fingerprint(parameters)


def key_prints(model: nn.Module, keys: tuple[Share, ...]) -> frozenset[int]:
    """Numbers of the bits of every head's keys, and of the weight that has them, where they are this rank's own: a rank
    with one of these numbers has a copy, whatever else it has."""
    found = set()
    for share in keys:
        parameter = parameter_of(model, share.parameter).detach()
        if not shards.is_sharded(parameter):
            heads = (parameter.index_select(share.dim, rows.to(parameter.device)) for rows in share.rows)
            found |= {shards.fingerprint([x]) for x in (parameter, *heads) if x.any()}
    return frozenset(found)


def prints_of_copies(model: nn.Module, keys: tuple[Share, ...]) -> frozenset[int]:
    """The same of weights by the names that another rank's keys have. Which rows are heads is not known here: every
    block of a head's width may be one."""
    found = frozenset[int]()
    for share in keys:
        try:
            parameter = parameter_of(model, share.parameter)
        except (AttributeError, KeyError, AssertionError):  # another stage's
            continue
        width = share.rows.shape[1]
        if parameter.dim() <= share.dim or parameter.shape[share.dim] < width:
            continue
        blocks = torch.arange(parameter.shape[share.dim]).unfold(0, width, width)
        found |= key_prints(model, (replace(share, rows=blocks),))
    return found

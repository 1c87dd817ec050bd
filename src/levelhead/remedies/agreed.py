"""What ranks agree on before they clip: which heads there are, and who holds the rows of each.

A head is known by its layer and by its rows in the whole parameter, not by its number on a rank: ranks of a tensor
parallel group have different heads under equal numbers. Equal names are one layer where ranks hold one parameter
together (DTensor), or the same bits (replicas); a stage of a pipeline may have a layer of the same name, with other
bits. Every rank raises the same error, after all have the same facts: none waits for another that has raised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from levelhead.errors import bad_value
from levelhead.remedies import rows
from levelhead.remedies.rows import Share
from levelhead.watching.ranks import waited_for

T = TypeVar("T")
NOTHING_RAN = "none yet"
_STEP = "every rank in this step of QK-clip"
LOST = "NaN or infinite ones in "
NO_WAY_BACK = "No factor brings them back: return to an earlier checkpoint"
DIFFERENT = (
    "Pass parts='pipeline' if ranks are stages or hold heads of their own, parts='replicas' if they are copies that"
    " drifted apart, or group= with the copies of this rank's layers"
)


@dataclass(frozen=True, eq=False)
class Described:
    """A layer, as one rank knows it."""

    module: str
    heads: tuple[int, ...]  # the first row of each
    shares: tuple[Share, ...] = ()
    why: str = ""  # nothing can be written
    frozen: bool = False  # and nothing should
    cap: float | None = None  # of its logits
    holders: tuple[int, ...] = ()
    fingerprint: int = 0
    keys: tuple[Share, ...] = ()  # where its keys are, written or not
    key_prints: frozenset[int] = frozenset()  # of these; ranks with the same have copies
    no_queries: str = ""  # why queries cannot take the whole of γ
    frozen_queries: bool = False  # and should not

    @property
    def key(self) -> tuple[Any, ...]:
        """What must not change between two agreements."""
        written = tuple((share.parameter, share.power) for share in self.shares)
        return self.module, self.heads, written, self.why, self.frozen, self.cap


@dataclass(frozen=True, eq=False)
class Rank:
    """What one rank brings."""

    number: int  # of all processes
    parts: str | None
    layers: tuple[Described, ...]
    wrong: str = ""  # why this rank cannot clip at all


@dataclass(eq=False)
class AgreedLayer:
    """A layer that ranks agreed on."""

    label: str  # its name, with the rank in front where others have a layer of that name
    module: str
    members: frozenset[int]  # ranks that hold it
    heads: tuple[int, ...]
    shares: dict[int, list[tuple[Share, int]]]  # by head: rows, and the head's place in them
    why: str
    frozen: bool
    cap: float | None  # of its logits
    parameters: tuple[str, ...] = ()


class Processes:
    """The processes of a group, or this one alone."""

    def __init__(self, group: Any) -> None:
        self.group = group
        dist = torch.distributed
        self.several = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
        self.world = dist.get_world_size(group) if self.several else 1
        self.place = dist.get_rank(group) if self.several else 0
        self.number = dist.get_rank() if self.several else 0

    def gathered(self, each: Any) -> list[Any]:
        """What every rank brings, in order."""
        if not self.several:
            return [each]
        everything: list[Any] = [None] * self.world
        with waited_for(_STEP):
            torch.distributed.all_gather_object(everything, each, group=self.group)
        return everything

    def largest(self, numbers: Tensor) -> list[float]:
        """The largest of every number over all ranks; this is where the CPU waits for the device."""
        if self.several:
            on_gpu = "nccl" in str(torch.distributed.get_backend(self.group))
            numbers = numbers.to("cuda" if on_gpu else "cpu")
            with waited_for(_STEP):
                torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX, self.group)
        found: list[float] = numbers.tolist()
        return found


def agree(group: Processes, model: nn.Module, own: Rank) -> tuple[list[AgreedLayer], dict[str, tuple[int, ...]]]:
    """The layers of all ranks, the same list on every rank; and the heads of this one, by module."""
    ranks: list[Rank] = group.gathered(own)
    wrong = {rank.number: rank.wrong for rank in ranks if rank.wrong}
    if len(wrong) < len(ranks) and all(why.startswith(NOTHING_RAN) for why in wrong.values()):
        wrong = {}  # the others show the layers
    if wrong:
        number, why = next(iter(wrong.items()))
        where = f" (rank {number})" if group.several else ""
        if why.startswith(LOST):
            raise bad_value("logits", "finite numbers", f"{why}{where}", NO_WAY_BACK)
        if why.startswith(NOTHING_RAN):
            advice = "Run the model, in a step that its watch observes, before the first step()"
            if why != NOTHING_RAN:
                advice = "A clip needs calls that a watch observes; coverage() of the watch has every reason"
            raise bad_value("model", "attention calls", f"{why}{where}", advice)
        advice = "Scaled weights would be renormalised away; QK-norm bounds the logits"
        raise bad_value("model", "no QK-norm", f"{why}{where}", advice)
    if len({rank.parts for rank in ranks}) > 1:
        given = ", ".join(f"parts={rank.parts!r} on rank {rank.number}" for rank in ranks)
        raise bad_value("ranks", "the same options everywhere", given, "Make QKClip alike on every rank")
    if group.several:  # a rank that ran no pass has the layer all the same
        own = _with_others(model, own, ranks)
        ranks = group.gathered(own)
    return _joined(ranks, own.parts), {each.module: each.heads for each in own.layers}


def _with_others(model: nn.Module, own: Rank, ranks: Sequence[Rank]) -> Rank:
    """A rank's layers, and those of others that it has under the same names without having run them."""
    known_here = {layer.module: layer for layer in own.layers}
    found, copies = dict(known_here), set[str]()
    others = [layer for rank in ranks for layer in rank.layers]
    for layer in others:
        mine = known_here.get(layer.module)
        if not layer.shares or layer.module in copies or (mine is not None and (mine.shares or mine.frozen)):
            continue
        try:
            holders, bits = rows.fingerprint(model, sorted({share.parameter for share in layer.shares}))
        except (AttributeError, KeyError, AssertionError):  # another stage's
            continue
        if bits == layer.fingerprint:  # this rank's replica: another stage may write other parameters
            copies.add(layer.module)
        elif found.get(layer.module) is not mine:
            continue
        # What this rank could not tell from its own numbers holds for its copy, too. Of a part, heads may be others.
        alike = mine is not None and not holders and len(mine.heads) == len(layer.heads)
        if mine is None or alike:
            known: dict[str, Any] = {"heads": layer.heads if alike else (), "cap": layer.cap}
            known |= {"no_queries": layer.no_queries, "frozen_queries": layer.frozen_queries}
            known |= {"holders": holders, "fingerprint": bits}
            found[layer.module] = Described(layer.module, shares=layer.shares, **known)
    return Rank(own.number, own.parts, tuple(_with_prints(model, each, others) for each in found.values()))


def _with_prints(model: nn.Module, mine: Described, others: Iterable[Described]) -> Described:
    """A layer whose own keys are not known here, with the numbers of what others' keys are called."""
    if mine.keys:
        return mine
    prints = (rows.prints_of_copies(model, each.keys) for each in others if each.module == mine.module)
    return replace(mine, key_prints=frozenset[int]().union(*prints))


def _joined(ranks: Sequence[Rank], parts: str | None) -> list[AgreedLayer]:
    layers: list[AgreedLayer] = []
    by_name: dict[str, list[tuple[int, Described]]] = {}
    for rank in ranks:
        for each in rank.layers:
            by_name.setdefault(each.module, []).append((rank.number, each))
    for name, those in by_name.items():
        prints = {number: one.fingerprint for number, one in those}
        alike: dict[Any, list[tuple[int, Described]]] = {}
        for number, one in those:
            together = tuple(prints.get(other, 0) for other in one.holders) or (one.fingerprint,)
            alike.setdefault(0 if parts == "replicas" else together, []).append((number, one))
        # Before ranks without a pass are left out: they may have copies.
        copied = _on_several(frozenset[int]().union(*(one.key_prints for _, one in some)) for some in alike.values())
        alike = {key: some for key, some in alike.items() if any(one.heads for _, one in some)}
        if len(alike) > 1 and parts is None:
            firsts = [some[0] for some in alike.values()]
            given = f"{name!r} on ranks {', '.join(str(number) for number, _ in firsts)}, with other parameters"
            written = [tuple(share.parameter for share in one.shares) for _, one in firsts]
            if len(set(written)) > 1:
                words = (
                    f"rank {n} {', '.join(names) or one.why}" for (n, one), names in zip(firsts, written, strict=True)
                )
                given = f"{name!r}, where ranks would clip different ones: {'; '.join(words)}"
                advice = "Freeze the same parameters on every rank (requires_grad), or pass parts='pipeline' for stages"
                raise bad_value("ranks", "the same trained projections", given, advice)
            raise bad_value("ranks", "one layer by one name", given, DIFFERENT)
        for some in alike.values():
            label = f"stage{some[0][0]}.{name}" if len(alike) > 1 else name
            layers.append(_layer(_without_shared_keys(some, copied), label))
    return layers


def _on_several(each: Iterable[Collection[T]]) -> set[T]:
    """What occurs in more than one."""
    times = Counter(x for some in each for x in set(some))
    return {x for x, n in times.items() if n > 1}


def _without_shared_keys(members: list[tuple[int, Described]], copied: set[int]) -> list[tuple[int, Described]]:
    """Where heads of several ranks share keys, these stay: a rank with one of the heads took them for that head's."""
    of_heads: dict[int, set[tuple[str, int]]] = {}  # by head: the first row of its keys, in every parameter
    for _, one in members:
        for share in one.shares:
            if share.role == "k" and share.rows.numel():
                for place, head in enumerate(one.heads):
                    of_heads.setdefault(head, set()).add((share.parameter, int(share.rows[place, 0])))
    with_queries = [one for _, one in members if one.heads and any(share.role == "q" for share in one.shares)]
    some = {any(share.role == "k" for share in one.shares) for one in with_queries}
    over_heads = with_queries and (_on_several(of_heads.values()) or len(some) > 1)
    if over_heads or any(copied & one.key_prints for _, one in members):
        return [(number, _of_queries(one)) for number, one in members]
    return members


def _of_queries(one: Described) -> Described:
    """A layer whose keys belong to further heads, and must stay."""
    if not one.no_queries:
        return replace(one, shares=rows.of_queries(one.shares))
    why = f"heads of other ranks share its keys, and {one.no_queries}"
    return replace(one, shares=(), why=why, frozen=one.frozen_queries)


def _layer(members: Sequence[tuple[int, Described]], label: str) -> AgreedLayer:
    first = next(one for _, one in members if one.heads)
    shares: dict[int, list[tuple[Share, int]]] = {}
    for _, one in members:
        for place, head in enumerate(one.heads):
            shares.setdefault(head, [(share, place) for share in one.shares])
    why = next((one.why for _, one in members if one.why), "")
    parameters = tuple(sorted({share.parameter for _, one in members for share in one.shares}))
    frozen, ranks = any(one.frozen for _, one in members), frozenset(number for number, _ in members)
    return AgreedLayer(label, first.module, ranks, tuple(sorted(shares)), shares, why, frozen, first.cap, parameters)

"""The same tokens of a layer's output and of the queries or keys that were made from it.

Of N tokens always the same are taken, so that both can be compared later although neither is kept. A layer may count
tokens over batch and sequence in either order, or without the batch; keys may follow those of a cache, and heads may
lie in the batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.library import Library, register_fake

SAMPLE = 32  # tokens; fewer are repeated, so that a compiled graph has one shape
_FEWEST = 2  # samples that can be compared
HEADS_FIRST = "heads before the batch"
_MOST_AXES = 4  # of batch and sequence, whose orders are tried


class Layer(Protocol):
    """A layer that ran, as `effective_scale.Ran` has it."""

    @property
    def tokens(self) -> int: ...
    @property
    def rows(self) -> Tensor: ...  # (SAMPLE, features)
    @property
    def norm(self) -> bool: ...


class Aligned(NamedTuple):
    """How tokens of a layer and of a call correspond."""

    tokens: int  # of the layer
    order: str
    samples: tuple[int, int] = (0, SAMPLE)  # which of the layer's, if the call has a part of its tokens


Views: TypeAlias = dict[Aligned, Tensor]  # (SAMPLE, heads, D) each


def ids(tokens: int, device: torch.device) -> Tensor:
    """Numbers of the sampled tokens."""
    each = torch.arange(SAMPLE, device=device)
    return each * tokens // SAMPLE if tokens >= SAMPLE else each % max(tokens, 1)


def rows(output: Tensor) -> Tensor:
    """A layer's output (..., F) at the sampled tokens, (SAMPLE, F); a copy: later code may overwrite it."""
    flat = output.detach().reshape(-1, output.shape[-1])
    return flat[ids(flat.shape[0], flat.device)]


def views(x: Tensor, counts: set[int]) -> Views:
    """Queries or keys (B, H, T, D) at the tokens sampled of layers with so many tokens, for every order."""
    B, H, T = x.shape[:3]
    x = x.detach()
    taken: Views = {}

    def each(heads: int) -> Tensor:
        return torch.arange(heads, device=x.device)[:, None]

    for n in counts:
        i = ids(n, x.device)
        if n == B * T:
            taken[Aligned(n, "batch first")] = x[i // T, :, i % T]
            if B > 1 and T > 1:
                taken[Aligned(n, "sequence first")] = x[i % B, :, i // B]
            if B > 1 and H > 1:
                taken[Aligned(n, HEADS_FIRST)] = _unfolded(x, i // T + B * each(H), i % T)
            continue
        if n == T:
            taken[Aligned(n, "no batch")] = x[torch.zeros_like(i), :, i]
        if H == 1 and n > 0 and n % T == 0 and B % (n // T) == 0:
            batch = n // T
            heads = each(B // batch)
            taken[Aligned(n, "heads in the batch")] = _unfolded(x, i // T * len(heads) + heads, i % T)
            taken[Aligned(n, HEADS_FIRST)] = _unfolded(x, i // T + batch * heads, i % T)
        if n % B == 0 and 0 < n < B * T:
            own = n // B
            taken[Aligned(n, "the last keys")] = x[i // own, :, T - own + i % own]
            taken[Aligned(n, "the first keys")] = x[i // own, :, i % own]
        elif n > B * T:  # a part of the tokens, as code has that attends image by image
            skipped = n - B * T
            first = sum(each * n // SAMPLE < B * T for each in range(SAMPLE)) if n >= SAMPLE else 0
            after = sum(each * n // SAMPLE < skipped for each in range(SAMPLE)) if n >= SAMPLE else SAMPLE
            if first >= _FEWEST:
                taken[Aligned(n, "the first tokens", (0, first))] = x[i[:first] // T, :, i[:first] % T]
            if SAMPLE - after >= _FEWEST:
                j = i[after:] - skipped
                taken[Aligned(n, "the last tokens", (after, SAMPLE))] = x[j // T, :, j % T]
    return taken


def _unfolded(x: Tensor, lead: Tensor, t: Tensor) -> Tensor:
    """(SAMPLE, heads, D) of batch and heads counted as one, `lead` (heads, SAMPLE)."""
    return x[lead // x.shape[1], lead % x.shape[1], t].transpose(0, 1)


def apart(x: Tensor, layers: Iterable[Layer], lead: Sequence[int]) -> float:
    """How far the heads of queries or keys (B, H, T, D) are from the parts of a layer's output, at least: the norms of
    all heads are compared, relative to the whole. `lead`: sizes of the batch's axes, which a layer may have in another
    order, as code has that attends along columns of an image."""
    (B, H, T, D), norms = x.shape, x.detach().float().norm(dim=-1)
    least = float("inf")
    for layer in layers:
        if not D or not layer.rows.shape[1] or layer.rows.shape[1] % (H * D) or layer.tokens != B * T:
            continue
        known = layer.rows.float().reshape(len(layer.rows), -1, H, D).norm(dim=-1)
        all_heads = known / known.norm(dim=(0, 2), keepdim=True)
        for places in _orders(lead, T):
            i = places.flatten().to(x.device)[ids(layer.tokens, x.device)]
            mine = norms[i // T, :, i % T]
            least = min(least, float((all_heads - (mine / mine.norm())[:, None]).norm(dim=(0, 2)).min()))
    return least


def _orders(lead: Sequence[int], T: int) -> Iterator[Tensor]:
    """Tokens of a batch with axes of these sizes, numbered batch first, in all orders of the axes."""
    sizes = [n for n in (*lead, T) if n > 1] or [1]
    numbers = torch.arange(math.prod(sizes)).reshape(sizes)
    orders = itertools.permutations(range(len(sizes))) if len(sizes) <= _MOST_AXES else iter([range(len(sizes))])
    return (numbers.permute(*order) for order in orders)


# ---- in compiled graphs

# An operator of its own: it takes the sample where it stands, before later code overwrites the output, and the compiler
# removes it if no call follows. Plain indexing would be fused with the model's own code and could change its bits.
_library: Any = Library("levelhead_watch", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("rows(Tensor output) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
observing: dict[int, Callable[[], bool]] = {}  # of every attached watch, whether it measures now


def _rows(output: Tensor) -> Tensor:
    if any(now() for now in observing.values()):
        return rows(output)
    return output.new_empty((SAMPLE, output.shape[-1]))  # its numbers are not read


_library.impl("rows", _rows, "CompositeExplicitAutograd")
register_fake("levelhead_watch::rows", lambda x: x.new_empty((SAMPLE, x.shape[-1])), lib=_library)

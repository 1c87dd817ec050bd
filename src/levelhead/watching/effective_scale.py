"""The effective scale: the whole factor from the outputs of the projections to the logits.

A model may scale its queries before the product, its logits after it, both or neither; only the whole counts. It is the
scale passed, times the change of q and k between their projections and the call, by root mean squares (rotations keep
those). With a norm in between there is no such number: the reading is "normalised". The spread of the logits does not
give it: that depends on how the weights were drawn.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

FROM_PROJECTIONS, NORMALISED, BY_DEFINITION = "projections", "normalised", "torch's own module"

# Names of projections, after the words around the letter are removed.
_AROUND = {"proj", "projection", "linear", "lin", "layer", "to", "w", "fc", "attn", "attention"}
_AROUND |= {"self", "c", "net", "map", "dense", "weight", "0", "in", "b"}
_ROLES = {"q": "q", "query": "q", "queries": "q", "wq": "q", "k": "k", "key": "k", "keys": "k"}
_ROLES |= {"wk": "k", "v": "v", "value": "v", "values": "v", "wv": "v", "kv": "kv", "wkv": "kv"}
_ROLES |= {"qkv": "qkv", "wqkv": "qkv", "query key value": "qkv", "q k v": "qkv"}


@dataclass(frozen=True)
class Ran:
    """A child that ran inside an attention module, and the squares of its output per column."""

    name: str  # within the module
    module: nn.Module | None  # None: a product with a parameter of the module itself
    reads: int | None  # how wide its input is; None: it is no projection
    features: int
    tokens: int
    squares: Tensor  # (features,)

    @property
    def norm(self) -> bool:
        """Whether it normalises."""
        return self.module is not None and is_norm(self.name, self.module)


def ran(name: str, module: nn.Module, output: Tensor) -> Ran:
    """Of a child. Squared at once: later code may overwrite the output."""
    if isinstance(module, nn.Conv1d | nn.Conv2d):  # a projection by a convolution
        output = output.movedim(1 if output.dim() > module.weight.dim() - 1 else 0, -1)
    return columns(name, module, _reads(module), output)


def columns(name: str, module: nn.Module | None, reads: int | None, output: Tensor) -> Ran:
    """Of any output whose last dimension is its features."""
    x = output.detach()
    features = x.shape[-1]
    tokens = x.numel() // features if features else 0
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    norms = torch.linalg.vector_norm(x, dim=tuple(range(x.dim() - 1)), dtype=wide)
    return Ran(name, module, reads, features, tokens, norms.square())


class Reading(NamedTuple):
    """The effective scale, and how it was read."""

    scale: float | None
    how: str
    width: int | None = None  # what the q projection reads


def is_norm(name: str, module: nn.Module) -> bool:
    """Whether a child normalises its input."""
    kind = type(module).__name__.lower()
    return "norm" in kind or (("norm" in name.lower()) and not isinstance(module, nn.Identity))


def qk_norms(module: nn.Module) -> list[str]:
    """Names of a module's children that normalise queries or keys: q_norm, key_layernorm, norm_k."""
    around = {"norm", "layernorm", "rmsnorm", "ln", "layer", "rms"}
    names = [name for name, child in module.named_children() if is_norm(name, child)]
    return [name for name in names if (set(_words(name)) - around) & {"q", "k", "qk", "query", "key"}]


def role(name: str) -> str | None:
    """The role of a projection by its name: "q", "k", "v", "kv" or "qkv"."""
    words = [word for word in _words(name) if word != "weight"]
    if words == ["c", "attn"] or words[-2:] == ["in", "proj"]:
        return "qkv"
    return _ROLES.get(" ".join(word for word in words if word not in _AROUND))


def _words(name: str) -> list[str]:
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.rsplit(".", 1)[-1])
    return [word for word in re.split(r"[._\d]+", spaced.lower()) if word]


class Sizes(NamedTuple):
    """Of a call."""

    heads: int
    kv_heads: int
    d_k: int
    tokens: int  # keys in all


def read(ran: Sequence[Ran], call: Sizes, *, scale: float | None, q_rms: float, k_rms: float) -> Reading:
    """The effective scale of a call, from what ran in the module before it."""
    H, G, D, tokens = call
    parts = _projections(ran, H, G, D)
    if not parts:
        return Reading(None, "no projections were found")
    width = parts["q"].ran.reads if "q" in parts else None
    first = min(ran.index(part.ran) for part in parts.values())
    if any(child.norm and child.features in (D, H * D, G * D) for child in ran[first + 1 :]):
        return Reading(None, NORMALISED, width)
    if scale is None or not {"q", "k"} <= parts.keys():
        why = "the scale is not known" if scale is None else "a projection was not found"
        return Reading(None, why, width)
    if parts["k"].ran.tokens != tokens:
        return Reading(None, "keys come from a cache", width)
    choices = []
    for layout in _layouts(parts, H, G, D):
        if min(q_rms, k_rms, *layout) > 0 and math.isfinite(sum(layout) + q_rms + k_rms):
            of_q, of_k = q_rms / layout[0], k_rms / layout[1]
            choices.append((abs(math.log(of_k)), of_q, of_k))
    if not choices:
        return Reading(None, "q, k or a projection's output is zero or not finite", width)
    _, of_q, of_k = min(choices)  # keys are hardly ever scaled: the layout that leaves them
    return Reading(scale * of_q * of_k, FROM_PROJECTIONS, width)


class _Part(NamedTuple):
    """A projection, or the columns of a joint one."""

    ran: Ran
    joint: bool = False


def _projections(ran: Sequence[Ran], H: int, G: int, D: int) -> dict[str, _Part]:
    """By role: from names where these are known, else from size and order."""
    plain = [child for child in ran if not child.norm and child.reads is not None]
    parts: dict[str, _Part] = {}
    for child in plain:
        name = role(child.name)
        if name == "qkv" or (name is None and child.features == (H + 2 * G) * D):
            parts |= {each: _Part(child, joint=True) for each in "qkv"}
        elif name == "kv":
            parts |= {each: _Part(child, joint=True) for each in "kv"}
        elif name is not None:
            parts[name] = _Part(child)
    if {"q", "k"} & parts.keys():
        return parts
    nameless = [c for c in plain if c.features in (H * D, G * D) and role(c.name) is None][-3:]
    if [c.features for c in nameless] == [H * D, G * D, G * D]:  # the last three before the call
        return {name: _Part(c) for name, c in zip("qkv", nameless, strict=True)}
    return parts


def _reads(module: nn.Module) -> int | None:
    """How wide a projection's input is; None: it is no projection."""
    if isinstance(module, nn.Embedding):
        return None
    for name in ("in_features", "in_channels", "nx"):
        width = getattr(module, name, None)
        if isinstance(width, int):
            return width
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.dim() == 2:
        return int(weight.shape[1])
    inner = [child for child in module.modules() if child is not module]
    widths = [width for child in inner if (width := getattr(child, "in_features", None))]
    return int(widths[0]) if widths else None


def _layouts(parts: dict[str, _Part], H: int, G: int, D: int) -> Iterator[tuple[float, float]]:
    """Root mean squares of the q and k projections, for every way joint columns may be laid out."""
    q, k = parts["q"], parts["k"]
    both, n = k.ran.squares, k.ran.tokens
    if not (q.joint and k.joint):
        # Keys and values may be in one.
        of_k = (both[: len(both) // 2], both.reshape(G, 2, -1)[:, 0].flatten()) if k.joint else (both,)
        yield from ((_rms(q.ran.squares, q.ran.tokens), _rms(part, n)) for part in of_k)
        return
    if len(both) == (H + 2 * G) * D:
        yield _rms(both[: H * D], n), _rms(both[H * D : (H + G) * D], n)
        groups = both.reshape(G, H // G + 2, D)  # each kv head beside its queries
        yield _rms(groups[:, :-2].flatten(), n), _rms(groups[:, -2].flatten(), n)
    if len(both) == 3 * H * D:
        last = both.reshape(H, D, 3)
        yield _rms(last[..., 0].flatten(), n), _rms(last[..., 1].flatten(), n)


def _rms(squares: Tensor, tokens: int) -> float:
    count = squares.numel() * tokens
    return math.sqrt(float(squares.sum()) / count) if count else math.nan

"""The effective scale: the whole factor from the outputs of the projections to the logits.

A model may scale its queries before the product, its logits after it, both or neither; only the whole counts. It is the
scale passed, times the factors by which q and k at the call differ from the outputs of their projections. With a norm
in between there is no such number: the reading is "normalised". The spread of the logits does not give it: that depends
on how the weights were drawn. Here is what ran before a call; `scale_reader` computes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from inspect import getattr_static, unwrap
from typing import Any, NamedTuple, TypeGuard
from weakref import ReferenceType, ref

from torch import Tensor, nn

from levelhead.watching import sampled
from levelhead.watching.described import plain

BY_DEFINITION = "torch's own module"
NOTHING_RAN = "no layer ran before the call"
NOT_FOLLOWED = "q and k are not seen where a softmax is formed by hand; deep=True follows them"

# Names of projections, after the words around the letter are removed.
_AROUND = {"proj", "projection", "linear", "lin", "layer", "to", "w", "fc", "attn", "attention"}
_AROUND |= {"self", "c", "net", "map", "dense", "weight", "0", "in", "b"}
_ROLES = {"q": "q", "query": "q", "queries": "q", "wq": "q", "k": "k", "key": "k", "keys": "k"}
_ROLES |= {"wk": "k", "v": "v", "value": "v", "values": "v", "wv": "v", "kv": "kv", "wkv": "kv"}
_ROLES |= {"qkv": "qkv", "wqkv": "qkv", "query key value": "qkv", "q k v": "qkv"}


class Read(NamedTuple):
    """What a layer was computed from: the tensor as long as it lives, where it lay, and its numbers at the sampled
    tokens, of queries and keys."""

    tensor: ReferenceType[Tensor]
    at: int
    rows: Tensor | None = None


@dataclass(frozen=True)
class Ran:
    """A layer that ran before a call, and its output at some tokens."""

    name: str  # within its module
    module: nn.Module | None  # None: a product with a parameter
    reads: int | None  # how wide its input is; None: it is no projection
    tokens: int
    rows: Tensor  # (SAMPLE, features)
    inner: bool = False  # it ran inside a child of the module
    read: Read | None = None  # its input
    wrote: tuple[int, int] = (0, 0)  # the memory of its output

    @property
    def norm(self) -> bool:
        """Whether it normalises."""
        return self.module is not None and is_norm(self.name, self.module)


def ran(name: str, module: nn.Module, args: Any, output: Tensor) -> Ran:
    """Of a child. Sampled at once: later code may overwrite the output."""
    x = args[0] if args else None
    read, width = None, reads(module)
    if isinstance(x, Tensor) and x.dim() > 1 and plain(x):
        narrows = width is not None and output.shape[-1] < x.shape[-1]  # queries or keys may follow from it
        read = reading(x, sample=role(name) is not None or narrows)
    return columns(name, module, width, features_last(module, output), read)


def reading(x: Tensor, *, sample: bool = True) -> Read:
    return Read(ref(x), x.data_ptr(), sampled.rows(x) if sample and x.numel() else None)


def features_last(module: nn.Module, output: Tensor) -> Tensor:
    """An output whose last dimension is its features, also of a convolution."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return output.movedim(1 if output.dim() > len(module.kernel_size) + 1 else 0, -1)
    return output


def columns(name: str, module: nn.Module | None, reads: int | None, output: Tensor, read: Read | None = None) -> Ran:
    """Of any output whose last dimension is its features; `read`: what it was computed from."""
    tokens = output.numel() // output.shape[-1] if output.shape[-1] else 0
    begin = output.data_ptr()
    wrote = begin, begin + output.numel() * output.element_size()
    return Ran(name, module, reads, tokens, sampled.rows(output), read=read, wrote=wrote)


def is_norm(name: str, module: nn.Module) -> bool:
    """Whether a child normalises its input; a norm and a projection in one is a projection."""
    kind = type(module).__name__.lower()
    if reads(module) is not None and hasattr(module, "out_features"):
        return False
    return "norm" in kind or (("norm" in name.lower()) and not isinstance(module, nn.Identity))


def qk_norms(module: nn.Module) -> list[str]:
    """Names of a module's children that normalise queries or keys: q_norm, key_layernorm, norm_k."""
    around = {"norm", "layernorm", "rmsnorm", "ln", "layer", "rms"}
    names = [name for name, child in module.named_children() if is_norm(name, child)]
    return [name for name in names if (set(_words(name)) - around) & {"q", "k", "qk", "qn", "kn", "query", "key"}]


def role(name: str) -> str | None:
    """The role of a projection by its name: "q", "k", "v", "kv" or "qkv"."""
    words = [word for word in _words(name) if word != "weight"]
    if words == ["c", "attn"] or words[-2:] == ["in", "proj"]:
        return "qkv"
    return _ROLES.get(" ".join(word for word in words if word not in _AROUND))


def _words(name: str) -> list[str]:
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.rsplit(".", 1)[-1])
    return [word for word in re.split(r"[._\d]+", spaced.lower()) if word]


def reads(module: nn.Module) -> int | None:
    """How wide a projection's input is; None: it is no projection."""
    if isinstance(module, nn.Embedding):
        return None
    torchs = type(module).__module__.startswith("torch.nn.modules")
    for name in ("in_features", "in_channels", "nx"):
        # A model's own __getattr__ may warn.
        width = vars(module).get(name) if torchs else getattr_static(module, name, None)
        width = getattr(module, name, None) if isinstance(width, property) else width
        if isinstance(width, int):
            return width
    weight = held_weight(module)
    if weight is not None and weight.dim() == 2:
        return int(weight.shape[1])
    inner = [child for child in module.modules() if child is not module]
    widths = [width for child in inner if (width := getattr(child, "in_features", None))]
    return int(widths[0]) if widths else None


def held_weight(module: nn.Module | None) -> Tensor | None:
    """A module's weight, if it holds one. A parametrized one is not asked for: computing it may change the module, as
    spectral_norm does."""
    if module is None:
        return None
    held = dict(module._parameters.items())  # of a scripted module, it is no dict
    weight = held.get("weight", vars(module).get("weight"))
    return weight if isinstance(weight, Tensor) else None


def is_by_definition(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Whether torch's own code attends in it: a class that inherits its weights may have code of its own."""
    if not isinstance(module, nn.MultiheadAttention):
        return False
    forward = unwrap(type(module).forward)
    called = getattr(getattr(forward, "__code__", None), "co_names", ())
    inherited = forward is nn.MultiheadAttention.forward or {"super", "forward"} <= {*called}
    return inherited or "multi_head_attention_forward" in called


def parts_named(module: nn.Module) -> tuple[int, ...]:
    """Widths of the first part of a head, where a module or its configuration names two: with and without positions."""
    for owner in (module, getattr(module, "config", None)):
        widths = [getattr(owner, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
        if named := tuple(width for width in widths if isinstance(width, int)):
            return named
    return ()

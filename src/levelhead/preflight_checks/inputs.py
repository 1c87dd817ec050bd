"""The batch of a pre-flight: which tensors hold tokens, which a padding mask, and changed copies of them.

Tokens are ids (B, T) or vectors (B, T, C), or (T, B, C) where the model reads the sequence first. Everything else is
passed on as it is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from levelhead.checks import short_repr
from levelhead.errors import bad_type, bad_value

Key: TypeAlias = int | str

_NO_IDS = ("label", "mask", "type", "position", "segment", "length", "target", "len", "pad", "index", "indices", "step")
_ENDS = ("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id")
_DECODER = ("decoder", "tgt")
_MASKS = ("attention_mask", "padding_mask", "pad_mask")  # a loss_mask or special_tokens_mask is none


@dataclass(frozen=True)
class Batch:
    """What the model is called with, and which of it are tokens."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: Mapping[Key, str]  # of every argument, positional ones too
    model: nn.Module
    sequence_first: bool = False

    def run(self) -> Any:
        """Calls the model with copies: it may write into a tensor, and a cache may grow. What is given twice is one
        object still."""
        copies: dict[int, Any] = {}
        args = tuple(_fresh(x, copies) for x in self.args)
        return self.model(*args, **{name: _fresh(x, copies) for name, x in self.kwargs.items()})

    def __getitem__(self, key: Key) -> Any:
        return self.args[key] if isinstance(key, int) else self.kwargs[key]

    def keys(self) -> list[Key]:
        """Of all arguments."""
        return [*range(len(self.args)), *self.kwargs]

    def tensors(self) -> dict[Key, Tensor]:
        """The arguments that are tensors."""
        return {key: self[key] for key in self.keys() if isinstance(self[key], Tensor)}

    def with_(self, changes: Mapping[Key, Any]) -> Batch:
        """The batch with some arguments replaced or added; a tensor given twice is replaced twice."""
        same = {id(x): changes[key] for key, x in self.tensors().items() if key in changes}
        args = tuple(changes.get(n, same.get(id(x), x)) for n, x in enumerate(self.args))
        kwargs = {name: changes.get(name, same.get(id(x), x)) for name, x in self.kwargs.items()}
        added = {key: value for key, value in changes.items() if isinstance(key, str)}
        names: dict[Key, str] = dict(self.names)
        names |= {key: names.get(key, key.lower()) for key in added}
        return replace(self, args=args, kwargs=kwargs | added, names=names)

    # ---- tokens

    def ids(self) -> list[Key]:
        """Arguments that are token ids."""
        found = [key for key, x in self.tensors().items() if _holds_ids(self.names[key], x)]
        known = hasattr(self.model, "config")  # Hugging Face's names; a grid of an image is (B, 3) and no text
        return [key for key in found if not known or self.names[key].endswith("input_ids")]

    def vectors(self) -> list[Key]:
        """Arguments that are a vector per token."""
        found = [key for key, x in self.tensors().items() if x.is_floating_point() and x.dim() == 3]
        return [key for key in found if "mask" not in self.names[key] and "pos" not in self.names[key]]

    def streams(self) -> list[Key]:
        """All that hold tokens; an argument given several times once."""
        first = {id(self[key]): key for key in reversed([*self.ids(), *self.vectors()])}
        return [key for key in (*self.ids(), *self.vectors()) if first[id(self[key])] == key]

    def stream(self) -> Key | None:
        """The tokens whose order of sight is judged: the decoder's, else the first."""
        streams = self.streams()
        decoder = [key for key in streams if any(word in self.names[key] for word in _DECODER)]
        return next(iter(decoder or streams), None)

    def sizes(self, key: Key) -> tuple[int, int]:
        """Rows and tokens of a stream."""
        first, second = self[key].shape[:2]
        return (second, first) if self.sequence_first else (first, second)

    @property
    def rows(self) -> int:
        """How many examples there are; 0: not known."""
        key = self.stream()
        if key is not None:
            return self.sizes(key)[0]
        if any("grid" in name or "seqlens" in name for name in self.names.values()):
            return 0  # pieces of images, packed
        sizes = {x.shape[0] for x in self.tensors().values() if x.dim() > 3 and x.is_floating_point()}  # images
        return sizes.pop() if len(sizes) == 1 else 0

    def padding_mask(self) -> Key | None:
        """An argument (B, T) that says which tokens are padding, of the first stream."""
        stream = next(iter(self.streams()), None)
        if stream is None:
            return None
        size = self.sizes(stream)
        for key, x in self.tensors().items():
            name = self.names[key]
            usual = name in ("mask", f"{self.names[stream]}_mask") or name.endswith(_MASKS)
            named = usual and not name.startswith(_DECODER)
            if named and x.shape == size and _distinct(x) <= {0, 1}:
                return key
        return None

    def unpadded(self, stream: Key) -> Tensor:
        """(B, T): tokens that are no padding. A padded query may see anything: its output is ignored. Where 1 may mean
        either, rows with padding are left out as a whole."""
        key = self.padding_mask()
        if key is None or stream != next(iter(self.streams())):
            return torch.ones(self.sizes(stream), dtype=torch.bool)
        mask: Tensor = self[key].bool().cpu()
        if self.names[key].endswith("attention_mask"):
            return mask
        return (mask.all(1) | ~mask.any(1))[:, None].expand_as(mask)

    def without_padding(self) -> Batch:
        """The batch with all tokens real, where it says which are not."""
        key = self.padding_mask()
        if key is None or not self.names[key].endswith("attention_mask") or bool(self[key].bool().all()):
            return self
        return self.with_({key: torch.ones_like(self[key])})

    def changed(self, key: Key, where: Tensor) -> Batch:
        """Other tokens at the places (B, T) that are True."""
        x = self[key]
        chosen = where.mT if self.sequence_first else where
        if x.is_floating_point():
            noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
            new = torch.where(chosen[..., None], x + 2 * noise * x.float().std().clamp(min=0.1).to(x), x)
        else:
            held = torch.isin(x, torch.tensor(sorted(self._placeholders()), dtype=x.dtype, device=x.device))
            new = torch.where(chosen & ~held, _other_ids(x, self.special_ids()), x)
        return self.with_({key: new})

    def special_ids(self) -> set[int]:
        """Ids that mean more than a word: padding, the ends of a text, and placeholders."""
        ends = [getattr(getattr(self.model, "config", None), name, None) for name in _ENDS]
        padding = [m.padding_idx for m in self.model.modules() if isinstance(m, nn.Embedding)]
        return {n for n in (*ends, *padding) if isinstance(n, int)} | self._placeholders()

    def _placeholders(self) -> set[int]:
        """Ids that stand for something else, such as a part of an image: these are never changed."""
        config = getattr(self.model, "config", None)
        found = vars(config).items() if config is not None else ()
        named = {n for name, n in found if "token" in name and name not in _ENDS and name.endswith(("_id", "_index"))}
        return {n for n in named if isinstance(n, int) and not isinstance(n, bool) and n >= 0}


def _holds_ids(name: str, x: Tensor) -> bool:
    whole = not x.is_floating_point() and x.dtype is not torch.bool and not x.is_complex()
    return whole and x.dim() == 2 and not any(word in name for word in _NO_IDS)


def _distinct(x: Tensor) -> set[Any]:
    return set(x.flatten().tolist())


def _other_ids(x: Tensor, special: set[int]) -> Tensor:
    """For every id another one of the batch, so that it exists and is an ordinary one."""
    known = sorted(_distinct(x) - special) or sorted(_distinct(x))
    if len(known) == 1:
        known = [known[0], known[0] - 1 if known[0] else 1]
    new = x.clone()
    for place, n in enumerate(known):
        new[x == n] = known[(place + 1 + len(known) // 2) % len(known)] if len(known) > 2 else known[1 - place]
    for n in _distinct(x) - set(known):
        new[x == n] = known[0]
    return new


def _fresh(x: Any, copies: dict[int, Any]) -> Any:
    if isinstance(x, int | float | str | bool | type(None)):
        return x
    if id(x) not in copies:
        copies[id(x)] = x.detach().clone() if isinstance(x, Tensor) else copy.deepcopy(x)
    return copies[id(x)]


def read(model: nn.Module, batch: Any, *, sequence_first: bool = False) -> Batch:
    """The batch, however it is given."""
    args: tuple[Any, ...]
    if isinstance(batch, Mapping):
        args, kwargs = (), {str(name): x for name, x in batch.items()}
    elif isinstance(batch, tuple | list):
        args, kwargs = tuple(batch), {}
    else:
        args, kwargs = (batch,), {}
    if not any(isinstance(x, Tensor) for x in (*args, *kwargs.values())):
        wanted = "tensors: a mapping by keyword, a tuple or list in order, or one tensor"
        raise bad_type("batch", wanted, short_repr(batch), "Give what the model is called with")
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if any(x.numel() == 0 for x in tensors):
        raise bad_value("batch", "tensors with elements", "an empty one", "Give at least one example")
    names: dict[Key, str] = {name: name.lower() for name in kwargs}
    parameters = list(inspect.signature(model.forward).parameters)
    names |= {n: parameters[n].lower() if n < len(parameters) else "" for n in range(len(args))}
    sequence_first = sequence_first or getattr(model, "batch_first", None) is False
    return Batch(args, kwargs, names, model, sequence_first=sequence_first)

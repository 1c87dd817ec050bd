"""A text in steps: its first half at once, then token by token, each pass with the cache that the one before left.

Models take a cache as an argument (Hugging Face's `past_key_values`, or another usual name) and return it, or they keep
it themselves and take the place of the first token.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from levelhead.errors import bad_value
from levelhead.preflight_checks.inputs import Batch, Key

_PAST = ("past_key_values", "past_key_value", "past", "pasts", "past_kv", "past_kvs", "layer_past")
_CACHES = (*_PAST, "kv_cache", "kv_caches", "cache", "caches", "kv")
_RETURNED = ("presents", "present", *_CACHES)
_FLAGS = ("use_cache", "use_kv_cache", "return_cache", "return_past", "return_kv")
_OFFSETS = (
    "start_pos",
    "start_position",
    "start",
    "offset",
    "pos_offset",
    "position_offset",
    "past_length",
    "past_len",
)


@dataclass(frozen=True)
class Steps:
    """How a model is given its tokens and its cache."""

    batch: Batch  # without padding, and with a flag that asks for a cache
    stream: Key
    cache: Key | None  # the argument; None: the model keeps it
    offset: Key | None  # the argument that counts the tokens before

    @property
    def tokens(self) -> int:
        return self.batch.sizes(self.stream)[1]

    def part(self, start: int, end: int, before: Any) -> Batch:
        """These tokens, behind what the pass before returned."""
        batch, size = self.batch, self.batch.sizes(self.stream)
        changes: dict[Key, Any] = {}
        for key, x in batch.tensors().items():
            if tuple(x.shape) == size and key != self.stream and self._beside(key):
                changes[key] = x[:, :end] if batch.names[key].endswith("mask") else x[:, start:end]
        changes[self.stream] = batch[self.stream][:, start:end]
        if self.cache is not None and before is not None:
            changes[self.cache] = _cache_of(before)
        if self.offset is not None:
            changes[self.offset] = start
        return batch.with_(changes)

    def _beside(self, key: Key) -> bool:
        """Whether an argument of the stream's size belongs to it: an encoder's does not belong to a decoder."""
        decoder = "decoder"
        return self.batch.names[key].startswith(decoder) or not self.batch.names[self.stream].startswith(decoder)


def steps(batch: Batch) -> Steps | str:
    """Or why the text cannot be read in steps."""
    stream, parameters = batch.stream(), inspect.signature(batch.model.forward).parameters
    cache, offset = (_argument(batch, parameters, names) for names in (_CACHES, _OFFSETS))
    if cache is None and offset is None:
        return "the model takes no cache"
    if stream is None or batch.sequence_first:
        return "the batch holds no tokens, rows first"
    if cache is not None and cache in batch.keys() and batch[cache] is not None:  # noqa: SIM118  no mapping
        return "the batch brings a cache of its own"
    other = [batch.names[key] for key in batch.keys() if not _follows(key, batch, stream)]  # noqa: SIM118
    if other:
        return f"what a later token is to be given as {', '.join(other[:3])} is not known"
    flag = _argument(batch, parameters, _FLAGS)
    return Steps(batch if flag is None else batch.with_({flag: True}), stream, cache, offset)


def _argument(batch: Batch, parameters: Mapping[str, Any], names: Sequence[str]) -> Key | None:
    found = next((name for name in names if name in parameters), None)
    return next((key for key, name in batch.names.items() if name == found), found)


def _follows(key: Key, batch: Batch, stream: Key) -> bool:
    """Whether it is known what this argument is for a later token."""
    x, name, decoder = batch[key], batch.names[key], "decoder"
    if key == stream or not isinstance(x, Tensor):
        return True
    if batch.names[stream].startswith(decoder) and not name.startswith(decoder):
        return True  # the encoder reads it again
    return tuple(x.shape) == batch.sizes(stream) and (name.endswith("mask") or "pos" in name)


def _cache_of(result: Any) -> Any:
    """The cache among what a model returned."""
    found: Any = None
    if isinstance(result, Mapping):
        found = next((result[name] for name in _RETURNED if result.get(name) is not None), None)
    elif isinstance(result, tuple | list):
        rest = [x for x in result[1:] if x is not None and not (isinstance(x, Tensor) and x.dim() < 3)]
        found = rest[-1] if rest else None
    else:
        found = next((x for name in _RETURNED if (x := getattr(result, name, None)) is not None), None)
    if found is None:
        raise bad_value("model", "one that returns its cache", type(result).__name__, "Return the cache as well")
    return found

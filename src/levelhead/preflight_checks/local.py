"""A pre-flight of an opened local model, on a few short rows of a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from levelhead.models import Opened
from levelhead.preflight_checks.preflight import preflight
from levelhead.preflight_checks.result import Preflight

_ROWS, _TOKENS = 3, 24


def preflight_opened(
    opened: Opened, text: str, *, against: Opened | None = None, expected_scale: float | str | None = None
) -> Preflight:
    """Reads the beginning of the text; without a tokenizer ordinary token ids, drawn at random."""
    ids = _ids(opened, text)
    batch: dict[str, Any] = {"input_ids": ids}
    if getattr(opened.model.config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = ids[:, : _TOKENS // 2]
    earlier = None if against is None else against.model
    return preflight(opened.model, batch, expected_scale=expected_scale, against=earlier)


def _ids(opened: Opened, text: str) -> Tensor:
    tokens = min(_TOKENS, getattr(opened.model.config, "max_position_embeddings", None) or _TOKENS)
    found: list[int] = []
    if opened.tokenizer is not None:
        found = opened.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(found) >= _ROWS * tokens:
        return torch.tensor(found[: _ROWS * tokens]).reshape(_ROWS, tokens)
    words = getattr(opened.model.config, "vocab_size", 256)
    return torch.randint(words // 4, words, (_ROWS, tokens), generator=torch.Generator().manual_seed(0))

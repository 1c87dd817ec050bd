"""A real model for the lab: MiniLM, what it reads, and the queries and keys of its heads.

It reads passages of the documentation that every Python contains, chosen by the seed. If the model, or a package that
opens it, is not installed, a claim about it is undecided, and the error names the command to run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from levelhead import models
from levelhead.errors import LevelheadError
from levelhead.lab.claim import UndecidedError

if TYPE_CHECKING:
    from torch import Tensor

MODEL = "minilm"
_LONG = 2500  # characters that a topic must have to give several passages


def opened() -> models.Opened:
    """The model, or the reason why there is none."""
    try:
        return models.open(MODEL)
    except LevelheadError as error:
        raise UndecidedError(str(error)) from error


def passages(model: models.Opened, number: int, tokens: int, seed: int) -> list[list[int]]:
    """Token ids of passages, each from another topic as long as there are enough topics."""
    from pydoc_data.topics import topics

    rng = np.random.default_rng(seed)
    names = sorted(name for name, text in topics.items() if len(text) >= _LONG)
    order = [names[i] for _ in range(-(-number // len(names))) for i in rng.permutation(len(names))]
    token_ids = []
    for name in order[:number]:
        ids = model.tokenizer(topics[name], add_special_tokens=False, verbose=False)["input_ids"]
        first = int(rng.integers(max(len(ids) - tokens, 1)))
        token_ids.append(ids[first : first + tokens])
    return token_ids


def queries_and_keys(model: Any, ids: Tensor) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """q and k (B, H, T, D) of every layer, as the model reads these tokens."""
    import torch

    from levelhead.torch.huggingface.functions import observed_calls

    layers: list[tuple[NDArray[Any], NDArray[Any]]] = []

    def keep(name: str, module: Any, query: Tensor, key: Tensor, *args: Any, **options: Any) -> None:
        layers.append((query.numpy(), key.numpy()))

    with torch.no_grad(), observed_calls(model, keep):
        model(input_ids=ids)
    return layers

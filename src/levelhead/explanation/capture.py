"""The attention calls of every layer of a real model, as it reads one sentence.

The model runs as it is, and the arguments of each call of transformers' attention functions are kept: queries and keys
after their rotation, shared key heads as they are, the scale as it was passed. A call with more options than scale and
mask is refused, not approximated.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from levelhead import models
from levelhead.errors import LevelheadValueError, expected
from levelhead.explanation.head import Step
from levelhead.explanation.reading import Call, Reading
from levelhead.explanation.tokens import Tokens, checked, of_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["read"]

_UNKNOWN = ("position_bias", "softcap", "s_aux", "sliding_window")  # would change the logits
_lock = threading.Lock()  # the wrapping is one for the process


def read(opened: models.Opened, sentence: str) -> Reading:
    """Has the model read the sentence."""
    import torch

    from levelhead.torch.huggingface.functions import observed_calls

    tokenizer = opened.tokenizer
    if tokenizer is None or not tokenizer.is_fast:
        given = "none" if tokenizer is None else "a slow one, which forgets where tokens were"
        advice = "Keep tokenizer.json beside the weights"
        raise LevelheadValueError(expected("model", "a fast tokenizer", given, advice))
    tokens = checked(of_tokenizer(tokenizer, sentence))
    calls: list[Call] = []

    def keep(name: str, module: Any, *args: Any, **options: Any) -> None:
        calls.append(_call(name == "eager", module, *args, **options))

    with _lock, torch.no_grad(), observed_calls(opened.model, keep):
        opened.model(input_ids=torch.tensor([tokens.ids]))
    if not calls:
        given = f"{type(opened.model).__name__}, whose attention was not seen"
        advice = "Models of transformers that ask its attention interface are"
        raise LevelheadValueError(expected("model", "a model that can be explained", given, advice))
    return _told(opened, tokens, tuple(calls))


def _call(
    eager: bool,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **rest: Any,
) -> Call:
    """One call of transformers' attention interface in levelhead's words."""
    strange = [name for name in _UNKNOWN if rest.get(name) is not None]
    if strange:
        advice = "lh.watch and lh.health know such models"
        raise LevelheadValueError(expected("model", "attention with scale and mask alone", ", ".join(strange), advice))
    options: dict[str, Any] = {}
    if attention_mask is not None:
        options["mask"] = _mask(attention_mask[0, ..., : key.shape[2]])
    elif not eager and query.shape[2] > 1:
        options["causal"] = bool(module.is_causal if is_causal is None else is_causal)
    q, k, v = (x[0].float().contiguous().numpy() for x in (query, key, value))
    return Call(q, k, v, None if scaling is None else float(scaling), options)


def _mask(mask: Tensor) -> Any:
    """As NumPy, with -inf where it hides."""
    import torch

    from levelhead.torch.huggingface.masks import hides

    if mask.dtype is torch.bool:
        return mask.numpy()
    return mask.float().masked_fill(hides(mask), -torch.inf).numpy()


def _told(opened: models.Opened, tokens: Tokens, calls: tuple[Call, ...]) -> Reading:
    first = calls[0]
    H, T, _ = first.q.shape
    G, _, E = first.v.shape
    known = models.available().get(opened.name)
    about = known.about if known else type(opened.model).__name__
    marks = sorted({name for name, mark in zip(tokens.names, tokens.special, strict=True) if mark})
    notes = [f"{' and '.join(marks)}: marks that the tokenizer adds, no words"] if marks else []
    if G < H:
        notes.append(f"{H} query heads share {G} heads of keys and values, {H // G} each")
    side = f"the outputs of all {H} heads side by side; the layer's projection follows"
    return Reading(
        opened.name, about, tokens, calls, after=(Step("concatenated", (T, H * E), side),), notes=tuple(notes)
    )

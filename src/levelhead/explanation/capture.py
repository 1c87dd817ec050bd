"""The inputs of every attention layer of a real model, recorded while it processes one sentence.

The model runs unchanged. Its attention functions are wrapped where transformers looks them up, and the arguments of
each call are kept: queries and keys after their rotation, shared key heads once, the scale as passed. A call with
options beyond scale and mask is an error, not an approximation.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from levelhead import models
from levelhead.errors import bad_value
from levelhead.explanation.forward_pass import AttentionCall, ForwardPass
from levelhead.explanation.head_steps import Step
from levelhead.explanation.tokens import Tokens, checked, of_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

_lock = threading.Lock()  # the wrapping affects the whole process


def read(opened: models.Opened, sentence: str) -> ForwardPass:
    """Runs the model on the sentence."""
    import torch

    from levelhead.torch.huggingface.functions import observed_calls

    tokenizer = opened.tokenizer
    if tokenizer is None or not tokenizer.is_fast:
        given = "none" if tokenizer is None else "a slow one, which forgets where tokens were"
        raise bad_value("model", "a fast tokenizer", given, "Keep tokenizer.json beside the weights")
    tokens = checked(of_tokenizer(tokenizer, sentence))
    calls: list[AttentionCall] = []

    def keep(name: str, module: Any, *args: Any, **options: Any) -> None:
        calls.append(_call(name == "eager", module, *args, **options))

    with _lock, torch.no_grad(), observed_calls(opened.model, keep):
        opened.model(input_ids=torch.tensor([tokens.ids]))
    if not calls:
        given = f"{type(opened.model).__name__}, whose attention was not seen"
        advice = "Models of transformers that ask its attention interface are"
        raise bad_value("model", "a model that can be explained", given, advice)
    return _forward_pass(opened, tokens, tuple(calls))


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
) -> AttentionCall:
    """One call of transformers' attention interface, as arguments of `levelhead.attention`."""
    from levelhead.torch.huggingface.options import CHANGING_LOGITS, causal_without_mask

    unsupported = ", ".join(name for name in CHANGING_LOGITS if rest.get(name) is not None)
    if unsupported:
        wanted = "attention with scale and mask alone"
        raise bad_value("model", wanted, unsupported, "lh.watch and lh.health know such models")
    options: dict[str, Any] = {}
    if attention_mask is not None:
        options["mask"] = _mask(attention_mask[0, ..., : key.shape[2]])
    elif not eager and causal_without_mask(module, query, is_causal):
        options["causal"] = True
    q, k, v = (x[0].float().contiguous().numpy() for x in (query, key, value))
    return AttentionCall(q, k, v, None if scaling is None else float(scaling), options)


def _mask(mask: Tensor) -> Any:
    """As NumPy, with -inf where it hides."""
    import torch

    from levelhead.torch.masks import hides

    if mask.dtype is torch.bool:
        return mask.numpy()
    return mask.float().masked_fill(hides(mask), -torch.inf).numpy()


def _forward_pass(opened: models.Opened, tokens: Tokens, calls: tuple[AttentionCall, ...]) -> ForwardPass:
    H, T, _ = calls[0].q.shape
    G, _, E = calls[0].v.shape
    known = models.available().get(opened.name)
    about = known.about if known else type(opened.model).__name__
    marks = sorted({name for name, mark in zip(tokens.names, tokens.special, strict=True) if mark})
    notes = [f"{' and '.join(marks)}: marks that the tokenizer adds, no words"] if marks else []
    if G < H:
        notes.append(f"{H} query heads share {G} heads of keys and values, {H // G} each")
    side = f"the outputs of all {H} heads side by side; the layer's projection follows"
    after = (Step("concatenated", (T, H * E), side),)
    return ForwardPass(opened.name, about, tokens, calls, after=after, notes=tuple(notes))

"""`F.softmax` as an attention call, where no function with queries and keys is called.

These are `nn.MultiheadAttention` with need_weights=True, a module of transformers from before its attention interface,
and a transformers function that no `Call` describes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from levelhead.torch.huggingface.scores import Scores
from levelhead.torch.multihead_forward import traced
from levelhead.torch.swap import Function
from levelhead.watching.effective_scale import reading
from levelhead.watching.measure import Call, from_scores, plain
from levelhead.watching.module_stack import Frame, current
from levelhead.watching.observe_call import cannot_be_read, is_retraced, run_observed, run_traced
from levelhead.watching.undisturbed import undisturbed

BY_HAND = "softmax by hand"
WEIGHTS = "nn.MultiheadAttention, weights asked for"


def softmax_over(original: Function) -> Function:
    """`original`, observed."""

    def softmax(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        frame = current()
        if isinstance(input, Scores):  # of a served module: observed when it is computed
            return original(input, *args, **kwargs)
        if frame is None or frame.busy or is_retraced(input) or not _is_call(frame, input):
            return original(input, *args, **kwargs)

        def run() -> Any:
            return original(input, *args, **kwargs)

        def describe() -> Call:
            return from_scores(input if input.dim() == 4 else _by_head(input, frame.watched.heads or 1))

        own = isinstance(frame.watched.module, nn.MultiheadAttention)
        path = WEIGHTS if own else frame.via or "huggingface:eager"
        if torch.compiler.is_compiling():
            return run_traced(frame, path, run, describe())
        return run() if cannot_be_read(frame, input) else run_observed(frame, path, run, describe)

    return softmax


def _is_call(frame: Frame, scores: Tensor) -> bool:
    """Whether these scores are the logits of attention."""
    watched = frame.watched
    if isinstance(watched.module, nn.MultiheadAttention) or frame.softmax_is_call:
        return True
    if not watched.softmax_by_hand or scores.dim() != 4 or scores.shape[1] != watched.heads:
        return False
    # Where every pass is followed, `by_hand` measures it, and knows q and k as well.
    return torch.compiler.is_compiling() or not frame.watch.probe.follows_all


def _by_head(scores: Tensor, heads: int) -> Tensor:
    each = heads if scores.shape[0] % heads == 0 else 1
    return scores.reshape(-1, each, *scores.shape[-2:])


def multihead_over(original: Function) -> Function:
    """`F.multi_head_attention_forward`; under Dynamo a copy, which is traced with the attention call inside it."""
    copy = traced(original)

    def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return copy(*args, **kwargs)
        frame = current()
        if frame is not None and frame.watch.wanted():
            query: Any = args[0] if args else kwargs.get("query")
            key: Any = args[1] if len(args) > 1 else kwargs.get("key")
            frame.given = None
            with undisturbed():
                if all(isinstance(x, Tensor) and x.dim() > 1 and plain(x) for x in (query, key)):
                    apart = query.data_ptr() != key.data_ptr()
                    frame.given = reading(query, sample=apart), reading(key, sample=apart)
        return original(*args, **kwargs)

    return multi_head_attention_forward

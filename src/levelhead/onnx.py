"""ONNX's `Attention` operator (opsets 23 to 25) on levelhead's core, for `onnx.reference`.

    from onnx.reference import ReferenceEvaluator
    ReferenceEvaluator(model, new_ops=[levelhead.onnx.Attention]).run(None, feeds)

It translates ONNX's conventions (cache offsets, short masks, -1 for "no window") into `levelhead.attention` and holds
no attention of its own, with one exception: the optional output `qk_matmul_output` is a score matrix, which the fused
core never stores, so those scores come from the NumPy reference, and only for a node that asks for them.

Precision is never less than asked: the core's softmax works in float32 (float64 for float64), so a `softmax_precision`
below that is exceeded, and one of double widens the inputs first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead import reference
from levelhead.attention import attention
from levelhead.errors import LevelheadError, bad_value
from levelhead.extras import command, missing

if _error := missing("levelhead.onnx", "onnx", install=command("onnx")):
    raise _error

import onnx
from onnx.reference.op_run import OpRun

Array = NDArray[Any]

OLDEST, NEWEST = 23, 25  # a later definition of the operator may mean something else: refused
PRECISIONS = (1, 10, 11, 16)  # TensorProto's float32, float16, float64, bfloat16


@dataclass(frozen=True, slots=True)
class Inputs:
    """One call in levelhead's terms: q (B, H, T, D), k (B, G, S, D), v (B, G, S, E), caches joined.

    The mask covers the first `reach` <= S keys; those beyond it are hidden (ONNX's padding). start (B,) is the position
    of the first query; lengths (B,) counts keys that are not padding, None where the call has no such input.
    """

    q: Array
    k: Array
    v: Array
    reach: int
    start: NDArray[np.int64]
    lengths: Array | None


def _split_heads(argument: str, x: Array, heads: int | None) -> Array:
    """(B, L, heads * width) -> (B, heads, L, width), a view."""
    B, L, columns = x.shape
    if heads is None or heads < 1 or columns % heads:
        want = f"a count of heads that divides the {columns} columns of a 3-D input"
        raise bad_value(argument, want, heads, "Set the attribute, or pass 4-D inputs")
    split: Array = x.reshape(B, L, heads, columns // heads).transpose(0, 2, 1, 3)
    return split


def _join(argument: str, past: Array | None, new: Array) -> Array:
    """The cache with the new tokens behind it. The copy is the `present` output ONNX defines."""
    if past is None:
        return new
    B, G, _, width = new.shape
    if past.ndim != 4 or past.dtype != new.dtype or past.shape != (B, G, past.shape[2], width):
        want = f"{new.dtype} of shape ({B}, {G}, past length, {width})"
        raise bad_value(argument, want, f"{past.dtype} of {past.shape}", "Match the new tokens")
    return np.concatenate((past, new), axis=2)


def _prepare(
    q: Array, k: Array, v: Array, optional: tuple[Array | None, ...], heads: tuple[int | None, int | None]
) -> Inputs:
    mask, past_key, past_value, nonpad = optional
    ranks = (q.ndim, k.ndim, v.ndim)
    if ranks not in ((3, 3, 3), (4, 4, 4)):
        raise bad_value("Q, K, V", "all 3-D or all 4-D", f"ranks {ranks}", "Reshape the inputs")
    if k.dtype != q.dtype:
        raise bad_value("K", f"Q's type {q.dtype}", k.dtype, "Cast one of them")
    if (past_key is None) != (past_value is None):
        raise bad_value("past_key, past_value", "both or neither", "one", "Pass the other one too")
    if nonpad is not None and past_key is not None:
        raise bad_value("nonpad_kv_seqlen", "no past_key", "both", "Choose one kind of cache")
    if q.ndim == 3:
        q = _split_heads("q_num_heads", q, heads[0])
        k, v = (_split_heads("kv_num_heads", x, heads[1]) for x in (k, v))
    k, v = _join("past_key", past_key, k), _join("past_value", past_value, v)
    B, T, S = q.shape[0], q.shape[2], k.shape[2]
    reach = S if mask is None or mask.ndim == 0 else mask.shape[-1]
    if mask is not None and reach > S:
        want = f"a shape broadcastable to (B, H, T, {S}), or with fewer keys"
        raise bad_value("attn_mask", want, mask.shape, "Cut it to the keys")
    # Where the first query sits: after the internal cache, or so that the last query meets the last key of the external
    # one (negative when there are more queries than keys).
    start = np.full(B, 0 if past_key is None else past_key.shape[2], np.int64)
    lengths = None
    if nonpad is not None:
        if nonpad.shape != (B,) or np.any((nonpad < 0) | (nonpad > S)):
            want = f"shape ({B},) and values from 0 to {S}"
            raise bad_value("nonpad_kv_seqlen", want, nonpad.tolist(), "Give a length per batch row")
        start = nonpad.astype(np.int64) - T
        lengths = np.minimum(nonpad, reach)
    return Inputs(q, k, v, reach, start, lengths)


def _side(argument: str, size: int) -> int | None:
    if size < -1:
        raise bad_value(argument, "a count of positions or -1", size, "-1 leaves that side open")
    return None if size == -1 else size


def _scores(q: Array, k: Array, mode: int, reach: int, options: dict[str, Any]) -> Array:
    """qk_matmul_output (B, H, T, S): 0 scaled q k^T, 1 softcapped, 2 with bias, 3 softmaxed.

    Mode 0 is before the softcap, as in the operator's function body (onnx's own Python has it after). Memory O(T S):
    that is what the output is.
    """
    if mode <= 1:
        kept = ("scale", "softcap")[: mode + 1]
        return reference.logits(q, k, **{name: options[name] for name in kept})
    s = reference.logits(q, k[:, :, :reach], **options)
    s = np.pad(s, [(0, 0)] * 3 + [(0, k.shape[2] - reach)], constant_values=-np.inf)
    if mode == 2:
        return s
    lse = np.logaddexp.reduce(s, axis=-1, keepdims=True)
    weights: Array = np.exp(s - np.where(np.isneginf(lse), 0, lse))  # nothing seen: all zero
    return weights


class Attention(OpRun):
    """ONNX `Attention`, computed by `levelhead.attention`. Pass the class in `new_ops`."""

    op_domain = ""

    def __init__(self, onnx_node: onnx.NodeProto, run_params: dict[str, Any]) -> None:
        # The evaluator picks a class by name alone and OpRun assumes the newest schema: the definition of the model's
        # own opset is looked up here, and the node held to it.
        opset = run_params["opsets"][onnx_node.domain]
        schema = onnx.defs.get_schema("Attention", max(opset, OLDEST), "")
        self.version = schema.since_version
        if opset < OLDEST or self.version > NEWEST:
            want = f"a definition of Attention from opset {OLDEST} to {NEWEST}"
            raise bad_value("opset", want, opset, "Convert the model")
        unknown = [a.name for a in onnx_node.attribute if a.name not in schema.attributes]
        unknown += ["nonpad_kv_seqlen"] * any(onnx_node.input[len(schema.inputs) :])
        if unknown:
            want = f"only what Attention-{self.version} defines"
            raise bad_value(unknown[0], want, f"it in opset {opset}", "Import a later opset")
        super().__init__(onnx_node, run_params, schema)

    def run(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        parent: Any = super()  # onnx leaves this method untyped
        try:
            outputs = parent.run(*args, **kwargs)
        except TypeError as error:  # OpRun hides any TypeError behind a text of its own
            if isinstance(error.__cause__, LevelheadError):
                raise error.__cause__ from None
            raise
        # The evaluator files an unnamed output under "", the name of every absent input: a value there would become,
        # say, the mask of the next node.
        return tuple(y if name else None for name, y in zip(self.output, outputs, strict=False))

    def _run(
        self,
        Q: Array,
        K: Array,
        V: Array,
        attn_mask: Array | None = None,
        past_key: Array | None = None,
        past_value: Array | None = None,
        nonpad_kv_seqlen: Array | None = None,
        **attributes: Any,
    ) -> tuple[Array, ...]:
        heads = attributes["q_num_heads"], attributes["kv_num_heads"]
        precision, mode = attributes["softmax_precision"], attributes["qk_matmul_output_mode"]
        if self.version >= 25 and Q.ndim == 4 and heads != (None, None):
            raise bad_value("q_num_heads, kv_num_heads", "no such attributes with 4-D inputs", heads, "Drop them")
        if precision not in (None, *PRECISIONS):
            raise bad_value("softmax_precision", f"one of {PRECISIONS}", precision, "Pick one")
        if mode not in range(4):
            raise bad_value("qk_matmul_output_mode", "0, 1, 2 or 3", mode, "Pick one")
        x = _prepare(Q, K, V, (attn_mask, past_key, past_value, nonpad_kv_seqlen), heads)
        double = np.float64 in (Q.dtype, V.dtype) or precision == onnx.TensorProto.DOUBLE
        # ONNX lets the types of V and the mask differ from Q's; where they do, one holds them all.
        mixed = np.dtype(np.float64 if double else np.float32)
        work = Q.dtype if Q.dtype == V.dtype and not double else mixed
        if attn_mask is not None and attn_mask.dtype not in (np.bool_, np.float32, work):
            attn_mask = attn_mask.astype(mixed)
        sides = ("left_window_size", "right_window_size")
        options: dict[str, Any] = {
            "scale": None if attributes["scale"] is None else float(attributes["scale"]),
            "softcap": float(attributes["softcap"]) or None,
            "causal": bool(attributes["is_causal"]),
            "window": tuple(_side(side, attributes.get(side, -1)) for side in sides),
            "mask": attn_mask,
            "key_lengths": x.lengths,
            "query_start": x.start,
        }
        q, k, v = (a.astype(work, copy=False) for a in (x.q, x.k, x.v))
        # Keys beyond a short mask are cut off, not masked: positions are explicit, so it is free.
        y = attention(q, k[:, :, : x.reach], v[:, :, : x.reach], **options)
        y = y.astype(Q.dtype, copy=False)
        if Q.ndim == 3:
            y = y.transpose(0, 2, 1, 3).reshape(*Q.shape[:2], y.shape[1] * y.shape[3])
        if len(self.output) < 4 or not self.output[3]:
            return y, x.k, x.v
        return y, x.k, x.v, _scores(q, k, mode, x.reach, options).astype(Q.dtype)

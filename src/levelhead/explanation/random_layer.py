"""Words through one layer of random weights: the flow with its shapes, without any model.

n words → X [n × 512] → W_Q, W_K, W_V [512 × 64] → Q, K, V [n × 64] → attention → [n × 64]; eight
such heads side by side are [n × 512] again, and so is their projection. Nothing here has learned
anything: the shapes and the sizes of the numbers are real, the preferences are not.
"""

from __future__ import annotations

import zlib

import numpy as np

from levelhead.attention import attention
from levelhead.explanation.forward_pass import ForwardPass, LayerCall
from levelhead.explanation.head_steps import Array, Step
from levelhead.explanation.tokens import checked, of_words
from levelhead.multihead import MultiHeadAttention

__all__ = ["HEADS", "NAME", "WIDTH", "embedded", "layer", "read"]

WIDTH, HEADS = 512, 8  # so each head is 64 wide
_SEED = 0  # the same numbers every time
NAME = "random"


def embedded(words: tuple[str, ...]) -> Array:
    """[n × 512], entries of variance 1: a word's row depends on the word alone."""
    rows = [np.random.default_rng([_SEED, zlib.crc32(word.encode())]).standard_normal(WIDTH) for word in words]
    return np.stack(rows)


def layer() -> MultiHeadAttention:
    """The layer. Variance 1/512 keeps the entries of Q, K and V at variance 1."""
    drawn = np.random.default_rng(_SEED).standard_normal((4, WIDTH, WIDTH)) / np.sqrt(WIDTH)
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    weights = {f"{name}.weight": w for name, w in zip(names, drawn, strict=True)}
    return MultiHeadAttention(weights, HEADS)


def read(sentence: str) -> ForwardPass:
    """The words of a sentence through the layer."""
    tokens = checked(of_words(sentence))
    n, each = len(tokens), WIDTH // HEADS
    x, heads = embedded(tokens.words), layer()
    q, k, v = (
        np.swapaxes((x @ heads.weights[f"{name}.weight"].T).reshape(n, HEADS, each), 0, 1)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    before = (
        Step("X", x.shape, "one random embedding per word", x),
        Step("W_Q W_K W_V", (WIDTH, each), f"random, variance 1/{WIDTH}, for each head"),
        Step("Q K V", (n, each), "X W_Q, X W_K, X W_V"),
    )
    joined, projected = np.swapaxes(attention(q, k, v), 0, 1).reshape(n, WIDTH), heads(x)
    again = f"times W_O [{WIDTH} × {WIDTH}]: only now the shape is that of X again"
    after = (
        Step("concatenated", joined.shape, f"the outputs of all {HEADS} heads side by side", joined),
        Step("projected", projected.shape, again, projected),
    )
    about = f"random weights, {HEADS} heads of width {each}, nothing learned"
    return ForwardPass(NAME, about, tokens, (LayerCall(q, k, v),), before, after, ordered=False)

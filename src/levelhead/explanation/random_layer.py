"""Words through one layer of random weights: the data flow with its shapes, without a model.

n words → X [n × 512] → W_Q, W_K, W_V [512 × 64] → Q, K, V [n × 64] → attention → [n × 64]; eight such heads side by
side are [n × 512] again, and so is their projection. Nothing is learned: the shapes and the sizes of the numbers are
real, the preferences are not.
"""

from __future__ import annotations

import zlib

import numpy as np

from levelhead.attention import attention
from levelhead.explanation.forward_pass import AttentionCall, ForwardPass
from levelhead.explanation.head_steps import Array, Step
from levelhead.explanation.tokens import checked, of_words
from levelhead.multihead import MultiHeadAttention

WIDTH, HEADS = 512, 8  # so each head is 64 wide
_SEED = 0  # the same numbers every time
NAME = "random"


def embedded(words: tuple[str, ...]) -> Array:
    """[n × 512], entries of variance 1: a word's row depends on the word alone."""
    seeds = ([_SEED, zlib.crc32(word.encode())] for word in words)
    return np.stack([np.random.default_rng(seed).standard_normal(WIDTH) for seed in seeds])


def layer() -> MultiHeadAttention:
    """The layer. Variance 1/512 keeps the entries of Q, K and V at variance 1."""
    matrices = np.random.default_rng(_SEED).standard_normal((4, WIDTH, WIDTH)) / np.sqrt(WIDTH)
    names = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight")
    return MultiHeadAttention(dict(zip(names, matrices, strict=True)), HEADS)


def read(sentence: str) -> ForwardPass:
    """The words of a sentence through the layer."""
    tokens = checked(of_words(sentence))
    n, d_k = len(tokens), WIDTH // HEADS
    x, heads = embedded(tokens.words), layer()
    q, k, v = (np.swapaxes((x @ heads.weights[f"{name}_proj.weight"].T).reshape(n, HEADS, d_k), 0, 1) for name in "qkv")
    before = (
        Step("X", x.shape, "one random embedding per word", x),
        Step("W_Q W_K W_V", (WIDTH, d_k), f"random, variance 1/{WIDTH}, for each head"),
        Step("Q K V", (n, d_k), "X W_Q, X W_K, X W_V"),
    )
    joined, projected = np.swapaxes(attention(q, k, v), 0, 1).reshape(n, WIDTH), heads(x)
    again = f"times W_O [{WIDTH} × {WIDTH}]: only now the shape is that of X again"
    after = (
        Step("concatenated", joined.shape, f"the outputs of all {HEADS} heads side by side", joined),
        Step("projected", projected.shape, again, projected),
    )
    about = f"random weights, {HEADS} heads of width {d_k}, nothing learned"
    return ForwardPass(NAME, about, tokens, (AttentionCall(q, k, v),), before, after, ordered=False)

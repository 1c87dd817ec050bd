"""Attention on NumPy arrays with the options of a decoder: grouped heads, causal, a window, lengths."""

import numpy as np

import levelhead as lh

rng = np.random.default_rng(0)
q = rng.standard_normal((2, 8, 300, 64), dtype=np.float32)  # batch, query heads, tokens, width
k, v = rng.standard_normal((2, 2, 2, 300, 64), dtype=np.float32)  # 2 kv heads, each shared by 4 query heads

out = lh.attention(q, k, v, causal=True, window=(128, 0), key_lengths=[300, 211])

truth = lh.reference.attention(q, k, v, causal=True, window=(128, 0), key_lengths=[300, 211])
print(f"{out.shape}, largest distance from float64: {np.abs(out - truth).max():.0e}")

"""Attention to a long prefix is computed once, then merged with that to new tokens, with all statistics."""

import numpy as np

import levelhead as lh

rng = np.random.default_rng(0)
k, v = rng.standard_normal((2, 4, 1000, 64), dtype=np.float32)
q = rng.standard_normal((4, 3, 64), dtype=np.float32)  # three queries

prefix = lh.observe(q, k[:, :900], v[:, :900])
new = lh.observe(q, k[:, 900:], v[:, 900:])
whole = lh.merge(prefix, new)

np.testing.assert_allclose(whole.output, lh.attention(q, k, v), rtol=1e-5, atol=1e-6)
print(f"{whole.keys} keys, entropy of the first head's rows: {whole.rows.entropy[0].round(3)}")

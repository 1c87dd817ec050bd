"""Four heads with the scale 1/√d_k and without it."""

import numpy as np

import levelhead as lh

q, k, v = np.random.default_rng(0).standard_normal((3, 4, 256, 64), dtype=np.float32)

print("divided by √64:", lh.observe(q, k, v), sep="\n")
print("divided by nothing:", lh.observe(q, k, v, scale="none"), sep="\n")

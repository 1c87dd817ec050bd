import numpy as np

for d_k in (64, 256):
    rng = np.random.default_rng(d_k)
    q, k = rng.standard_normal((2, 4096, d_k))  # 4096 queries, 4096 keys
    ends = (q * k).sum(axis=1)  # one dot product per pair
    print(f"spread_{d_k}", ends.std())  # theory: the root of d_k

# the examples of some notes, and what they hide
print("variance_two", np.var([8, 29, 18]))
print("variance_three", np.var([10, 86, 839]))

import numpy as np

rng = np.random.default_rng(4)
q, k = rng.standard_normal((2, 64))
w_q, w_k = rng.standard_normal((2, 8, 64)) / np.sqrt(64)  # the root is here
v = rng.standard_normal(8) / np.sqrt(8)
for name, g in [("", 1), ("_grown", 4)]:  # q and k as they are, then four times as large
    print(f"dot{name}", (g * q) @ (g * k))
    print(f"additive{name}", v @ np.tanh(w_q @ (g * q) + w_k @ (g * k)))
print("bound", np.abs(v).sum())

q, k = np.random.default_rng(0).standard_normal((2, 4096, 64))
dot = (q * k).sum(1)
cosine = dot / np.linalg.norm(q, axis=1) / np.linalg.norm(k, axis=1)
print("cosine_spread", cosine.std())
print("correlation", np.corrcoef(cosine, dot / np.sqrt(64))[0, 1])

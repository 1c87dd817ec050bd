import numpy as np

rng = np.random.default_rng(0)
x = rng.standard_normal((64, 64))  # 64 tokens
w_q, w_k, w_v = (rng.standard_normal((64, n)) / 8 for n in (256, 256, 32))
target = rng.standard_normal((64, 32))
q, k, v = x @ w_q, x @ w_k, x @ w_v
norm = {}
for name, scale in [("undivided", 1), ("divided", 1 / 16)]:
    s = q @ k.T * scale
    p = np.exp(s - s.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    dp = 2 * (p @ v - target) / target.size @ v.T
    ds = p * (dp - (p * dp).sum(1, keepdims=True))  # through the softmax
    norm[name] = np.linalg.norm(x.T @ (ds @ k) * scale)  # of dL/dW_Q
    print(f"toy_reached_{name}", np.abs(ds).sum() ** 2 / (ds.size * (ds**2).sum()))
print("toy_gradient", norm["undivided"] / norm["divided"])

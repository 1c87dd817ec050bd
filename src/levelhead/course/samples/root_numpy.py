import numpy as np

rng = np.random.default_rng(0)
q = rng.standard_normal((64, 128))  # a head of GPT-3: d_k = 12288 / 96 = 128
k = rng.standard_normal((256, 128))

for name, divisor in [("nothing", 1), ("root", np.sqrt(128)), ("width", 128), ("model", np.sqrt(12288))]:
    s = q @ k.T / divisor
    p = np.exp(s - s.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    entropy = -(p * np.log(p)).sum(axis=1) / np.log(256)  # 1: all weights are equal
    print(f"spread_{name}_large", s.std())
    print(f"entropy_{name}_large", entropy.mean())

import numpy as np

rng = np.random.default_rng(0)
q, k = rng.standard_normal((512, 64)), rng.standard_normal((512, 32, 64))
k[:, 0] = 0.5 * q + np.sqrt(1 - 0.5**2) * k[:, 0]  # the match: correlation 0.5


def softmax(s):
    p = np.exp(s - s.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


s = np.einsum("rd,rkd->rk", q, k) / np.sqrt(64)
print("score", s[:, 0].mean())
print("root_match", softmax(s)[:, 0].mean())
s = 8 * 8 * s  # q and k have grown to a standard deviation of 8
print("root_big", softmax(s)[:, 0].mean())
p = softmax(30 * np.tanh(s / 30))  # softcap
print("cap_big", p[:, 0].mean())
print("cap_softmax", (1 - (p**2).sum(1)).mean())
print("cap_left", (p * (1 - p) * (1 - np.tanh(s / 30) ** 2)).sum(1).mean())

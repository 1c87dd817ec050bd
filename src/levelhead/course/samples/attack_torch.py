import numpy as np
import torch

rng = np.random.default_rng(0)  # the draw of this page
q, k = torch.tensor(rng.standard_normal((512, 64))), torch.tensor(rng.standard_normal((512, 32, 64)))
k[:, 0] = 0.5 * q + (1 - 0.5**2) ** 0.5 * k[:, 0]  # the match: correlation 0.5

s = torch.einsum("rd,rkd->rk", q, k) / 64**0.5
print("score", s[:, 0].mean().item())
print("root_match", s.softmax(1)[:, 0].mean().item())
unit = torch.nn.functional.normalize
norm = torch.einsum("rd,rkd->rk", unit(q, dim=1), unit(k, dim=2)) * 64**0.5  # QK-norm
print("norm_match", norm.softmax(1)[:, 0].mean().item())
s = 8 * 8 * s  # q and k have grown to a standard deviation of 8
print("root_big", s.softmax(1)[:, 0].mean().item())
print("cap_big", (30 * (s / 30).tanh()).softmax(1)[:, 0].mean().item())  # softcap

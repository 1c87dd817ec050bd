import numpy as np
import torch

rng = np.random.default_rng(4)  # the draw of this page
q, k = torch.tensor(rng.standard_normal((2, 64)))
w_q, w_k = torch.tensor(rng.standard_normal((2, 8, 64))) / 64**0.5  # the root is here
v = torch.tensor(rng.standard_normal(8)) / 8**0.5
for name, g in [("", 1), ("_grown", 4)]:  # q and k as they are, then four times as large
    print(f"dot{name}", ((g * q) @ (g * k)).item())
    print(f"additive{name}", (v @ torch.tanh(w_q @ (g * q) + w_k @ (g * k))).item())
print("bound", v.abs().sum().item())

q, k = torch.tensor(np.random.default_rng(0).standard_normal((2, 4096, 64)))
cosine = torch.nn.functional.cosine_similarity(q, k)
print("cosine_spread", cosine.std().item())
print("correlation", torch.corrcoef(torch.stack([cosine, (q * k).sum(1) / 64**0.5]))[0, 1].item())

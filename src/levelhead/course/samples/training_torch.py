import numpy as np
import torch

rng = np.random.default_rng(0)  # the draw of this page
x = torch.tensor(rng.standard_normal((64, 64)))
w_q, w_k, w_v = (torch.tensor(rng.standard_normal((64, n)) / 8, requires_grad=True) for n in (256, 256, 32))
target = torch.tensor(rng.standard_normal((64, 32)))
norm = {}
for name, scale in [("undivided", 1), ("divided", 1 / 16)]:
    s = (x @ w_q) @ (x @ w_k).T * scale
    loss = ((s.softmax(1) @ (x @ w_v) - target) ** 2).mean()
    of_w_q, ds = torch.autograd.grad(loss, [w_q, s])
    norm[name] = of_w_q.norm().item()
    print(f"toy_reached_{name}", (ds.abs().sum() ** 2 / (ds.numel() * (ds**2).sum())).item())
print("toy_gradient", norm["undivided"] / norm["divided"])

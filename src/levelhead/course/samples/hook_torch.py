import numpy as np
import torch

rng = np.random.default_rng(3)  # the draw of this page
q = torch.tensor(rng.standard_normal(64))
k = torch.tensor(rng.standard_normal((9, 64)))

for name, divisor in [("undivided", 1.0), ("divided", 64**0.5)]:
    s = k @ q / divisor
    p = torch.softmax(s, dim=0)
    jacobian = torch.autograd.functional.jacobian(lambda s: torch.softmax(s, dim=0), s)
    print(f"top_{name}", p.max().item())
    print(f"left_{name}", jacobian.trace().item())  # the same as 1 - (p**2).sum()

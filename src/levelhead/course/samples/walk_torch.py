import numpy as np
import torch

for d_k in (64, 256):
    rng = np.random.default_rng(d_k)  # the pairs of this page
    q, k = torch.tensor(rng.standard_normal((2, 4096, d_k)))
    walks = (q * k).cumsum(dim=1)  # where each walk is after each term
    ends = walks[:, -1]
    print(f"spread_{d_k}", ends.std(correction=0).item())  # theory: the root of d_k
    if d_k == 64:
        print("first_end", ends[0].item())
        print("within", (ends[:40].abs() <= 64**0.5).sum().item())

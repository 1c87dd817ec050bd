import numpy as np
import torch

rng = np.random.default_rng(0)  # the numbers of this page
q = torch.tensor(rng.standard_normal((64, 128)))  # a head of GPT-3: d_k = 12288 / 96 = 128
k = torch.tensor(rng.standard_normal((256, 128)))

for name, divisor in [("nothing", 1), ("root", 128**0.5), ("width", 128), ("model", 12288**0.5)]:
    s = q @ k.T / divisor
    entropy = torch.distributions.Categorical(logits=s).entropy() / np.log(256)
    print(f"spread_{name}_large", s.std(correction=0).item())
    print(f"entropy_{name}_large", entropy.mean().item())  # 1: all weights are equal

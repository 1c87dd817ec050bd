import numpy as np
import torch

rng = np.random.default_rng(0)  # the numbers of this page
X = torch.tensor(rng.standard_normal((3, 512)))  # Love, Apple, phones
W_Q, W_K, W_V = torch.tensor(rng.standard_normal((3, 512, 64)) / 512**0.5)
Q, K, V = X @ W_Q, X @ W_K, X @ W_V

scores = Q @ K.T
weights = torch.softmax(scores / 64**0.5, dim=1)
output = torch.nn.functional.scaled_dot_product_attention(Q[None], K[None], V[None])[0]
assert torch.allclose(output, weights @ V)

print("apple_love", scores[1, 0].item())
print("w_phones", weights[1, 2].item())
print("out_first", output[1, 0].item())

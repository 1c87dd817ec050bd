import numpy as np

rng = np.random.default_rng(0)
X = rng.standard_normal((3, 512))  # Love, Apple, phones
W_Q, W_K, W_V = rng.standard_normal((3, 512, 64)) / np.sqrt(512)
Q, K, V = X @ W_Q, X @ W_K, X @ W_V  # [3×64] each

scores = Q @ K.T  # [3×3]
weights = np.exp(scores / np.sqrt(64))
weights /= weights.sum(axis=1, keepdims=True)  # softmax of every row
output = weights @ V  # [3×64]

print("apple_love", scores[1, 0])
print("apple_love_divided", scores[1, 0] / np.sqrt(64))
print("w_phones", weights[1, 2])
print("out_first", output[1, 0])
